// The activations and their slopes, in float32. One definition for every backend. Internal linkage: included by
// *.isa.cc files.
#pragma once

#include "anabranch/experts.h"
#include "core/inline.h"
#include "core/math.h"

namespace anabranch {
namespace {

struct ActivationAt {
  float value;
  float slope;
};

AB_INLINE float sigmoid(float x) {
#if defined(__CUDA_ARCH__)
  return reciprocal(1.0f + exp2_flushed_f32(-kLog2E * x));  // off by 2^-23 (2 + |x|), relatively
#else
  return 1.0f / (1.0f + exp_f32(-x));
#endif
}

// h sigmoid(x).
AB_INLINE float times_sigmoid(float h, float x) {
#if defined(__CUDA_ARCH__)
  // A quarter of both, so that 1 / (1 + exp(-x)) is no denormal number, which the reciprocal would make 0.
  return 0.25f * h * reciprocal(multiply_add(0.25f, exp2_flushed_f32(-kLog2E * x), 0.25f));
#else
  return h * sigmoid(x);
#endif
}

// max(h, 0); NaN stays NaN.
AB_INLINE float relu(float h) { return h <= 0.0f ? 0.0f : h; }

// gelu(h) = h/2 (1 + tanh(u)) = h sigmoid(2u), 2u = kGeluScale (h + kGeluCubic h^3).
constexpr float kGeluScale = 1.5957691216f;  // 2 sqrt(2/pi)
constexpr float kGeluCubic = 0.044715f;

AB_INLINE float gelu_argument(float h) { return kGeluScale * (h + kGeluCubic * h * h * h); }

template <int32_t kActivation>
AB_INLINE float activate(float h) {
  if constexpr (kActivation == AB_SILU) return times_sigmoid(h, h);
  if constexpr (kActivation == AB_GELU) return times_sigmoid(h, gelu_argument(h));
  if constexpr (kActivation == AB_RELU) return relu(h);
  if constexpr (kActivation == AB_RELU2) return relu(h) * relu(h);
}

// The slope of g = h s(v(h)), s the sigmoid: s + g (1 - s) v'.
template <int32_t kActivation>
AB_INLINE ActivationAt activate_with_slope(float h) {
  if constexpr (kActivation == AB_SILU) {
    const float s = sigmoid(h);
    const float g = h * s;
    return {g, s + multiply_add(-g, s, g)};
  }
  if constexpr (kActivation == AB_GELU) {
    const float s = sigmoid(gelu_argument(h));
    const float v_slope = kGeluScale * (1.0f + 3.0f * kGeluCubic * h * h);
    const float g = h * s;
    const float slope = multiply_add(multiply_add(-g, s, g), v_slope, s);
    return {g, __builtin_fabsf(h) > 16.0f ? s : slope};  // there s is 0 or 1 to the last bit, and h^3 may overflow
  }
  if constexpr (kActivation == AB_RELU) return {relu(h), h > 0.0f ? 1.0f : relu(h)};
  if constexpr (kActivation == AB_RELU2) return {relu(h) * relu(h), 2.0f * relu(h)};
}

// Calls f.template operator()<activation>() with an activation that has been checked.
template <class F>
AB_INLINE void with_activation(int32_t activation, F&& f) {
  switch (activation) {
    case AB_GELU: return f.template operator()<AB_GELU>();
    case AB_RELU: return f.template operator()<AB_RELU>();
    case AB_RELU2: return f.template operator()<AB_RELU2>();
    default: return f.template operator()<AB_SILU>();
  }
}

}  // namespace
}  // namespace anabranch
