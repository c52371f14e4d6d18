// Per-element formulas of the router: score functions, their derivatives, and the order in which experts are selected.
// One definition for every backend. Internal linkage: *.isa.cc files include this header.
#pragma once

#include <cstdint>

#include "anabranch/router.h"
#include "core/math.h"

namespace anabranch {
namespace {

constexpr float kSumEpsilon = 1e-20f;          // added to every sum of scores that is a divisor
constexpr float kSqrtSoftplusTail = -20.0f;    // below this, sqrt(softplus(z)) = exp(z/2) in float32
constexpr uint32_t kOrderedNan = 0xffc00000u;  // above the ordered bits of +inf

// 1 / (1 + exp(-z)), computed from exp(-|z|) to avoid overflow and to preserve the precision of small scores. On CUDA
// reciprocal(infinity) is 0, and results flush to zero where exp(z) would.
AB_INLINE float sigmoid(float z) {
#if defined(__CUDA_ARCH__)
  return reciprocal(1.0f + exp2_flushed_f32(z * -kLog2E));
#else
  const float e = exp_flushed_f32(-__builtin_fabsf(z));
  const float r = reciprocal(1.0f + e);
  return z < 0.0f ? e * r : r;
#endif
}

// sigmoid(z) sigmoid(-z)
AB_INLINE float sigmoid_gradient(float z) {
  const float e = exp_flushed_f32(-__builtin_fabsf(z));
  const float r = reciprocal(1.0f + e);
  return e * r * r;
}

// log(1 + exp(z)), with e = exp(-|z|)
AB_INLINE float softplus(float z, float e) { return multiply_add(e, log1p_ratio(e), z > 0.0f ? z : 0.0f); }

// exp(-|z|/2) = sqrt(exp(-|z|))
AB_INLINE float exp_half(float z) {
#if defined(__CUDA_ARCH__)
  return exp2_flushed_f32(__builtin_fabsf(z) * (-0.5f * kLog2E));
#else
  return exp_flushed_f32(-0.5f * __builtin_fabsf(z));
#endif
}

// sqrt(log(1 + exp(z)))
AB_INLINE float sqrtsoftplus(float z) {
  const float h = exp_half(z);
  return choose(z < kSqrtSoftplusTail, h, square_root(softplus(z, h * h)));
}

// sigmoid(z) / (2 s); s/2 in the tail.
AB_INLINE float sqrtsoftplus_gradient(float z) {
  const float h = exp_half(z);
  const float e = h * h;
  const float r = reciprocal(1.0f + e);
  const float body = (z < 0.0f ? e * r : r) / (2.0f * square_root(softplus(z, e)));
  return choose(z < kSqrtSoftplusTail, 0.5f * h, body);
}

// Score and slope together, with half the special-function instructions of separate calls.
struct ScoreAndSlope {
  float score;
  float slope;
};
AB_INLINE ScoreAndSlope sigmoid_and_slope(float z) {
  const float e = exp_flushed_f32(-__builtin_fabsf(z));
  const float r = reciprocal(1.0f + e);
  const float er = e * r;
  return {z < 0.0f ? er : r, er * r};
}
AB_INLINE ScoreAndSlope sqrtsoftplus_and_slope(float z) {
  const float h = exp_half(z);
  const float e = h * h;
  const float r = reciprocal(1.0f + e);
  const float s = square_root(softplus(z, e));
  const bool tail = z < kSqrtSoftplusTail;
  return {choose(tail, h, s), choose(tail, 0.5f * h, (z < 0.0f ? e * r : r) / (2.0f * s))};
}

// Order-preserving bits: a < b as floats iff bits(a) < bits(b) as unsigned integers. -0 equals +0; every NaN has the
// same bits, above +inf.
AB_INLINE uint32_t ordered_bits(float q) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, q + 0.0f);
  const uint32_t sign = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31);
  return q == q ? bits ^ (sign | 0x80000000u) : kOrderedNan;
}

AB_INLINE float from_ordered_bits(uint32_t ordered) {
  const uint32_t bits = (ordered & 0x80000000u) != 0 ? ordered ^ 0x80000000u : ~ordered;
  return __builtin_bit_cast(float, bits);
}

// A candidate as one integer: larger q first, then the smaller index. The bits are those of a positive normal float64
// (the exponent field is between 3 and 2046), so keys may be compared as float64, which every vector instruction set
// supports in one instruction. Every key is above 0.
AB_INLINE uint64_t selection_key(float q, uint32_t index) {
  return static_cast<uint64_t>(ordered_bits(q)) << 31 | (0x7fffffffu - index);
}
AB_INLINE int32_t key_index(uint64_t key) { return static_cast<int32_t>(0x7fffffffu - (key & 0x7fffffffu)); }
AB_INLINE float key_value(uint64_t key) { return from_ordered_bits(static_cast<uint32_t>(key >> 31)); }

}  // namespace
}  // namespace anabranch
