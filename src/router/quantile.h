// Quantile balancing: by how much an expert's score fell short of a token's (K+1)-th best key, as the number of a bin.
// One definition for every backend. Internal linkage: included by *.isa.cc files.
#pragma once

#include <cstdint>

#include "core/inline.h"
#include "core/math.h"

namespace anabranch {

constexpr int64_t kMostBins = 1 << 20;  // positions of bins are exact in float32

namespace {

struct QuantileBins {
  float per_unit;  // bins of a unit of the score
  float of_zero;   // the position of a difference of 0
  float last;

  AB_INLINE QuantileBins(const float* bounds, int64_t bins)
      : per_unit(static_cast<float>(bins) / (bounds[1] - bounds[0])),
        of_zero(-bounds[0] * per_unit),
        last(static_cast<float>(bins - 1)) {}

  // Whose whole part, brought into [0, last], is the bin; NaN: none.
  AB_INLINE float position(float cutoff, float score) const { return multiply_add(cutoff - score, per_unit, of_zero); }
};

}  // namespace
}  // namespace anabranch
