// Quantile balancing: by how much an expert's score fell short of a token's (K+1)-th best key, as the number of a bin.
// One definition for every backend. Internal linkage: included by *.isa.cc files.
#pragma once

#include <cstdint>

#include "core/inline.h"

namespace anabranch {

constexpr int64_t kMostBins = 1 << 20;  // positions of bins are exact in float32

namespace {

struct QuantileBins {
  float lower;
  float per_unit;  // bins of a unit of the score
  float last;

  AB_INLINE QuantileBins(const float* bounds, int64_t bins)
      : lower(bounds[0]),
        per_unit(static_cast<float>(bins) / (bounds[1] - bounds[0])),
        last(static_cast<float>(bins - 1)) {}

  // Whose whole part is the bin, in [0, last]; NaN: none.
  AB_INLINE float position(float cutoff, float score) const {
    const float x = (cutoff - score - lower) * per_unit;
    const float not_low = x < 0.0f ? 0.0f : x;
    return not_low > last ? last : not_low;
  }
};

}  // namespace
}  // namespace anabranch
