// Quantile balancing: the bin of (threshold - score), where the threshold is a token's (K+1)-th best selection value.
// One definition for every backend. Internal linkage: *.isa.cc files include this header.
#pragma once

#include <cstdint>

#include "core/inline.h"
#include "core/math.h"

namespace anabranch {

constexpr int64_t kMaxBins = 1 << 20;  // bin positions are exact in float32

namespace {

struct QuantileBins {
  float per_unit;       // bins per unit of score
  float zero_position;  // the position of the difference 0
  float last;

  AB_INLINE QuantileBins(const float* bounds, int64_t bins)
      : per_unit(static_cast<float>(bins) / (bounds[1] - bounds[0])),
        zero_position(-bounds[0] * per_unit),
        last(static_cast<float>(bins - 1)) {}

  // bin = clamp(floor(position), 0, last); NaN falls into no bin.
  AB_INLINE float position(float threshold, float score) const {
    return multiply_add(threshold - score, per_unit, zero_position);
  }
};

}  // namespace
}  // namespace anabranch
