// Activation values and partial derivatives in float32. One definition serves every backend.
//
// An activation is phi(g, u) of a gate g and an up value u. Ungated experts compute phi(h, 1). The activations of the C
// interface are instances of a few parametrised formulas: quick_gelu is silu with a steeper sigmoid, swiglu_clamped is
// swiglu with limits. To add one, add an enumerator in anabranch/experts.h, a case in activation_of() and, if no
// existing formula fits, a formula here. Functions have internal linkage because *.isa.cc files include this header.
#pragma once

#include "anabranch/experts.h"
#include "core/inline.h"
#include "core/math.h"

namespace anabranch {

enum class Formula : int32_t {
  silu,               // g sigmoid(g) u
  gelu,               // g sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3)) u, the tanh form
  gelu_erf,           // g Phi(g) u, Phi is the CDF of the normal distribution
  power,              // max(g, floor) u, or max(g, floor)^2 u; slope_at_floor is the derivative at the floor
  swiglu,             // g' sigmoid(alpha g') (u' + offset), g' = min(g, limit), u' = clamp(u, -limit, limit)
  swiglu_then_clamp,  // min(g sigmoid(g), limit) u'
  situ,               // alpha tanh(g/alpha) sigmoid(g) limit tanh(u/limit)
  any                 // template argument only: selects the formula at run time
};

// Parameters of an activation for a kernel. At a limit the slope is the one-sided slope from inside; beyond it, 0.
struct Activation {
  Formula formula = Formula::silu;
  float alpha = 1.0f;
  float limit = __builtin_inff();
  float inverse_alpha = 1.0f;  // situ only, like inverse_limit
  float inverse_limit = 0.0f;
  float offset = 0.0f;
  float floor = 0.0f;  // power only, like the two fields below
  float slope_at_floor = 0.0f;
  bool squared = false;
};

namespace {

// Requires checked arguments. alpha and limit are read only for activations that have them.
inline Activation activation_of(int32_t kind, float alpha, float limit) {
  switch (kind) {
    case AB_GELU: return {.formula = Formula::gelu};
    case AB_GELU_ERF: return {.formula = Formula::gelu_erf};
    case AB_QUICK_GELU: return {.formula = Formula::swiglu, .alpha = 1.702f};
    case AB_RELU: return {.formula = Formula::power};
    case AB_RELU2: return {.formula = Formula::power, .squared = true};
    case AB_LINEAR: return {.formula = Formula::power, .floor = -__builtin_inff(), .slope_at_floor = 1.0f};
    case AB_SWIGLU_CLAMPED: return {.formula = Formula::swiglu, .limit = limit};
    case AB_SWIGLU_OAI: return {.formula = Formula::swiglu, .alpha = alpha, .limit = limit, .offset = 1.0f};
    case AB_SWIGLU_THEN_CLAMP: return {.formula = Formula::swiglu_then_clamp, .limit = limit};
    case AB_SITU:
      return {.formula = Formula::situ,
              .alpha = alpha,
              .limit = limit,
              .inverse_alpha = 1.0f / alpha,
              .inverse_limit = 1.0f / limit};
    default: return {.formula = Formula::silu};
  }
}

// phi and its partial derivatives.
struct ActivationAt {
  float value;
  float by_gate;
  float by_up;
};

AB_INLINE float sigmoid(float x) {
#if defined(__CUDA_ARCH__)
  return reciprocal(1.0f + exp2_flushed_f32(-kLog2E * x));  // relative error 2^-23 (2 + |x|)
#else
  return 1.0f / (1.0f + exp_f32(-x));
#endif
}

// sigmoid(x) and 1 - sigmoid(x), each with a small relative error for every x.
struct SigmoidAt {
  float value;
  float complement;
};
AB_INLINE SigmoidAt sigmoid_and_complement(float x) {
  const float size = __builtin_fabsf(x);
#if defined(__CUDA_ARCH__)
  const float e = exp2_flushed_f32(-kLog2E * size);
#else
  const float e = exp_f32(-size);
#endif
  const float large = reciprocal(1.0f + e);
  const float small = e * large;
  return {x < 0.0f ? small : large, x < 0.0f ? large : small};
}

// h * sigmoid(x).
AB_INLINE float times_sigmoid(float h, float x) {
#if defined(__CUDA_ARCH__)
  // Scale numerator and denominator by 1/4: 1 / (1 + exp(-x)) must not be denormal, reciprocal() would flush it to 0.
  return 0.25f * h * reciprocal(multiply_add(0.25f, exp2_flushed_f32(-kLog2E * x), 0.25f));
#else
  return h * sigmoid(x);
#endif
}

// gelu(h) = h/2 (1 + tanh(v)) = h sigmoid(2v), 2v = kGeluScale (h + kGeluCubic h^3).
constexpr float kGeluScale = 1.5957691216f;  // 2 sqrt(2/pi)
constexpr float kGeluCubic = 0.044715f;

AB_INLINE float gelu_argument(float h) { return kGeluScale * (h + kGeluCubic * h * h * h); }

// Phi(x) and its derivative, the density exp(-x^2/2) / sqrt(2 pi).
struct NormalAt {
  float value;
  float slope;
};
AB_INLINE NormalAt normal_distribution(float x) {
  // Compute exp(-x^2/2) with the rounding error of the square compensated: an absolute error of the exponent is a
  // relative error of the result.
  const float square = x * x;
  const float error = multiply_add(x, x, -square);
#if defined(__CUDA_ARCH__)
  const float exponent = -0.5f * kLog2E * square;
  const float lost = multiply_add(-0.5f * kLog2E, square, -exponent) - 0.5f * kLog2E * error - 0x1.4ae0cp-27f * square;
  const float e = exp2_flushed_f32(exponent) * multiply_add(0.69314718f, lost, 1.0f);
#else
  const float e = exp_flushed_f32(-0.5f * square) * (1.0f - 0.5f * error);
#endif
  // Phi(-y) exp(y^2/2) for y >= 0 as a polynomial in t = 1 / (1 + 0.35 y); minimax, relative error 3.2e-8.
  const float t = reciprocal(multiply_add(0.35f, __builtin_fabsf(x), 1.0f));
  float p = multiply_add(t, -0x1.ddb9p-6f, 0x1.26f9aap-3f);
  p = multiply_add(t, p, -0x1.05faa4p-2f);
  p = multiply_add(t, p, 0x1.46495cp-3f);
  p = multiply_add(t, p, -0x1.7c4f6ap-6f);
  p = multiply_add(t, p, 0x1.b057ccp-4f);
  p = multiply_add(t, p, 0x1.eac9bcp-4f);
  p = multiply_add(t, p, 0x1.1e70c4p-3f);
  p = multiply_add(t, p, 0x1.1df1c6p-3f);
  const bool vanishes = square > 170.0f;  // the result would be denormal
  const float tail = vanishes ? 0.0f : p * t * e;
  return {x < 0.0f ? tail : 1.0f - tail, vanishes ? 0.0f : 0.3989422804f * e};
}

AB_INLINE float limited(float u, float limit) { return at_least(at_most(u, limit), -limit); }
AB_INLINE bool is_past(float x, float limit) { return __builtin_fabsf(x) > limit; }

template <Formula kFormula>
AB_INLINE float activate(const Activation& a, float g, float u) {
  if constexpr (kFormula == Formula::silu) return times_sigmoid(g, g) * u;
  if constexpr (kFormula == Formula::gelu) return times_sigmoid(g, gelu_argument(g)) * u;
  if constexpr (kFormula == Formula::gelu_erf) return g * normal_distribution(g).value * u;
  if constexpr (kFormula == Formula::power) {
    const float base = at_least(g, a.floor);
    return (a.squared ? base * base : base) * u;
  }
  if constexpr (kFormula == Formula::swiglu) {
    const float inside = at_most(g, a.limit);
    return times_sigmoid(inside, a.alpha * inside) * (limited(u, a.limit) + a.offset);
  }
  if constexpr (kFormula == Formula::swiglu_then_clamp) {
    return at_most(times_sigmoid(g, g), a.limit) * limited(u, a.limit);
  }
  if constexpr (kFormula == Formula::situ) {
    return times_sigmoid(a.alpha * tanh_f32(g * a.inverse_alpha).value, g) *
           (a.limit * tanh_f32(u * a.inverse_limit).value);
  }
}

// For v = h s(x(h)) with the sigmoid s: v' = s + v (1 - s) x'.
template <Formula kFormula>
AB_INLINE ActivationAt activate_with_slopes(const Activation& a, float g, float u) {
  if constexpr (kFormula == Formula::silu) {
    const float s = sigmoid(g);
    const float v = g * s;
    return {v * u, (s + multiply_add(-v, s, v)) * u, v};
  }
  if constexpr (kFormula == Formula::gelu) {
    const float s = sigmoid(gelu_argument(g));
    const float x_slope = kGeluScale * (1.0f + 3.0f * kGeluCubic * g * g);
    const float v = g * s;
    const float slope = multiply_add(multiply_add(-v, s, v), x_slope, s);
    // Beyond 16, s is exactly 0 or 1, and g^3 may overflow.
    return {v * u, (__builtin_fabsf(g) > 16.0f ? s : slope) * u, v};
  }
  if constexpr (kFormula == Formula::gelu_erf) {
    const NormalAt normal = normal_distribution(g);
    const float v = g * normal.value;
    return {v * u, multiply_add(g, normal.slope, normal.value) * u, v};
  }
  if constexpr (kFormula == Formula::power) {
    const float base = at_least(g, a.floor);
    const float slope = g > a.floor ? 1.0f : base == a.floor ? a.slope_at_floor : base;  // `base` covers NaN
    const float v = a.squared ? base * base : base;
    return {v * u, (a.squared ? 2.0f * base : slope) * u, v};
  }
  if constexpr (kFormula == Formula::swiglu) {
    const float inside = at_most(g, a.limit);
    const float s = sigmoid(a.alpha * inside);
    const float v = inside * s;
    const float slope = multiply_add(a.alpha, multiply_add(-v, s, v), s);
    const float up = limited(u, a.limit) + a.offset;
    return {v * up, g > a.limit ? 0.0f : slope * up, is_past(u, a.limit) ? 0.0f : v};
  }
  if constexpr (kFormula == Formula::swiglu_then_clamp) {
    const float s = sigmoid(g);
    const float v = g * s;
    const float up = limited(u, a.limit);
    const float inside = at_most(v, a.limit);
    return {inside * up, v > a.limit ? 0.0f : (s + multiply_add(-v, s, v)) * up, is_past(u, a.limit) ? 0.0f : inside};
  }
  if constexpr (kFormula == Formula::situ) {
    // In saturation the slope is a sum of two small terms, so 1 - s must not be a difference of numbers near 1.
    const SigmoidAt s = sigmoid_and_complement(g);
    const TanhAt gate = tanh_f32(g * a.inverse_alpha);
    const TanhAt up = tanh_f32(u * a.inverse_limit);
    const float v = a.alpha * gate.value * s.value;
    const float limited_up = a.limit * up.value;
    return {v * limited_up, multiply_add(gate.slope, s.value, v * s.complement) * limited_up, v * up.slope};
  }
}

// Calls f.template operator()<formula>() with the formula of an activation.
template <class F>
AB_INLINE void with_formula(const Activation& activation, F&& f) {
  switch (activation.formula) {
    case Formula::gelu: return f.template operator()<Formula::gelu>();
    case Formula::gelu_erf: return f.template operator()<Formula::gelu_erf>();
    case Formula::power: return f.template operator()<Formula::power>();
    case Formula::swiglu: return f.template operator()<Formula::swiglu>();
    case Formula::swiglu_then_clamp: return f.template operator()<Formula::swiglu_then_clamp>();
    case Formula::situ: return f.template operator()<Formula::situ>();
    default: return f.template operator()<Formula::silu>();
  }
}

// Like with_formula(), for kernels in which every formula adds code: rarely used formulas share Formula::any.
template <class F>
AB_INLINE void with_common_formula(const Activation& activation, F&& f) {
  switch (activation.formula) {
    case Formula::silu: return f.template operator()<Formula::silu>();
    case Formula::gelu: return f.template operator()<Formula::gelu>();
    case Formula::power: return f.template operator()<Formula::power>();
    case Formula::swiglu: return f.template operator()<Formula::swiglu>();
    default: return f.template operator()<Formula::any>();
  }
}

// Dispatches among the formulas that share Formula::any.
template <>
AB_INLINE float activate<Formula::any>(const Activation& a, float g, float u) {
  switch (a.formula) {
    case Formula::gelu_erf: return activate<Formula::gelu_erf>(a, g, u);
    case Formula::swiglu_then_clamp: return activate<Formula::swiglu_then_clamp>(a, g, u);
    default: return activate<Formula::situ>(a, g, u);
  }
}
template <>
AB_INLINE ActivationAt activate_with_slopes<Formula::any>(const Activation& a, float g, float u) {
  switch (a.formula) {
    case Formula::gelu_erf: return activate_with_slopes<Formula::gelu_erf>(a, g, u);
    case Formula::swiglu_then_clamp: return activate_with_slopes<Formula::swiglu_then_clamp>(a, g, u);
    default: return activate_with_slopes<Formula::situ>(a, g, u);
  }
}

}  // namespace
}  // namespace anabranch
