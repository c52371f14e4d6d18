// Loops over a row of logits. Rows in scratch memory are float32, padded to a multiple of kRowPad. Sums have kRowPad
// partial sums on every instruction set, so every machine computes the same bits. Internal linkage: *.isa.cc files
// include this header.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "router/score.h"

namespace anabranch {
namespace {

constexpr int64_t kRowPad = 16;

#if defined(__AVX512F__)
constexpr int kFloats = 16;
#elif defined(__AVX__)
constexpr int kFloats = 8;
#else
constexpr int kFloats = 4;
#endif
constexpr int kAccumulators = static_cast<int>(kRowPad) / kFloats;

using Floats [[gnu::vector_size(kFloats * sizeof(float))]] = float;

[[gnu::always_inline]] inline Floats load_floats(const float* p) {
  Floats v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
[[gnu::always_inline]] inline void store_floats(float* p, Floats v) { __builtin_memcpy(p, &v, sizeof(v)); }

// Applies step(partial, e) for e = 0, kFloats, ... over the padded elements, then combines the lanes as a tree.
template <class Step, class Combine>
[[gnu::always_inline]] inline float reduce(int64_t blocks, float start, const Step& step, const Combine& combine) {
  Floats partial[kAccumulators];
#pragma GCC unroll 4
  for (int i = 0; i < kAccumulators; ++i) partial[i] = start - Floats{};
  for (int64_t block = 0; block < blocks; ++block) {
#pragma GCC unroll 4
    for (int i = 0; i < kAccumulators; ++i) step(partial[i], block * kRowPad + i * kFloats);
  }
  float lanes[kRowPad];
  __builtin_memcpy(lanes, partial, sizeof(lanes));
#pragma GCC unroll 4
  for (int64_t half = kRowPad / 2; half >= 1; half /= 2) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < half; ++i) lanes[i] = combine(lanes[i], lanes[i + half]);
  }
  return lanes[0];
}

// The number of blocks of kRowPad elements in a row of n.
[[gnu::always_inline]] inline int64_t row_blocks(int64_t n) { return (n + kRowPad - 1) / kRowPad; }

inline float row_sum(const float* x, int64_t blocks) {
  return reduce(
      blocks, 0.0f, [x](Floats& sum, int64_t e) { sum += load_floats(x + e); }, [](float a, float b) { return a + b; });
}

inline float row_dot(const float* x, const float* y, int64_t blocks) {
  return reduce(
      blocks, 0.0f, [x, y](Floats& sum, int64_t e) { sum += load_floats(x + e) * load_floats(y + e); },
      [](float a, float b) { return a + b; });
}

// The maximum, ignoring NaN; -inf if all elements are NaN.
inline float row_max(const float* x, int64_t blocks) {
  return reduce(
      blocks, -__builtin_inff(),
      [x](Floats& top, int64_t e) {
        const Floats v = load_floats(x + e);
        top = v > top ? v : top;
      },
      [](float a, float b) { return b > a ? b : a; });
}

// Whether the row contains NaN or +inf.
inline bool row_has_nan_or_inf(const float* x, int64_t blocks) {
  return reduce(
             blocks, 0.0f,
             [x](Floats& broken, int64_t e) {
               const Floats v = load_floats(x + e);
               broken = v < __builtin_inff() - Floats{} ? broken : 1.0f - Floats{};
             },
             [](float a, float b) { return a + b; }) != 0.0f;
}

inline bool row_has_nan(const float* x, int64_t blocks) {
  return reduce(
             blocks, 0.0f,
             [x](Floats& nans, int64_t e) {
               const Floats v = load_floats(x + e);
               nans = v == v ? nans : 1.0f - Floats{};
             },
             [](float a, float b) { return a + b; }) != 0.0f;
}

// out[0 .. n) = the row as float32, out[n .. padded) = pad.
inline void load_row(const void* logits, int32_t dtype, int64_t row, int64_t n, float pad, float* out) {
  with_float_type(dtype, [&]<class T>(T) {
    const T* from = static_cast<const T*>(logits) + row * n;
    for (int64_t e = 0; e < n; ++e) out[e] = to_float(from[e]);
  });
  for (int64_t e = n; e < row_blocks(n) * kRowPad; ++e) out[e] = pad;
}

// The padded row of token t: in place if it needs neither conversion nor padding, else in `buffer`.
inline const float* logits_row(const void* logits, int32_t dtype, int64_t t, int64_t E, float* buffer) {
  if (dtype == AB_FLOAT32 && E % kRowPad == 0) return static_cast<const float*>(logits) + t * E;
  load_row(logits, dtype, t, E, -__builtin_inff(), buffer);
  return buffer;
}

inline void store_row(const float* row, int64_t n, int32_t dtype, int64_t t, void* out) {
  with_float_type(dtype, [&]<class T>(T) {
    T* to = static_cast<T*>(out) + t * n;
    for (int64_t e = 0; e < n; ++e) to[e] = from_float<T>(row[e]);
  });
}

[[gnu::always_inline]] inline float load_element(const void* values, int32_t dtype, int64_t i) {
  return with_float_type(dtype, [&]<class T>(T) { return to_float(static_cast<const T*>(values)[i]); });
}

// s of the elementwise score functions.
inline void score_row(int32_t score_function, const float* z, int64_t count, float* s) {
  if (score_function == AB_SIGMOID) {
    for (int64_t e = 0; e < count; ++e) s[e] = sigmoid(z[e]);
  } else {
    for (int64_t e = 0; e < count; ++e) s[e] = sqrtsoftplus(z[e]);
  }
}

// The softmax of row z up to a factor: e[i] = exp(z[i] - shift); returns their sum. Padding (z = -inf) yields 0.
inline float softmax_row(const float* z, int64_t blocks, float shift, float* e) {
  for (int64_t i = 0; i < blocks * kRowPad; ++i) e[i] = exp_flushed_f32(z[i] - shift);
  return row_sum(e, blocks);
}

// The sum of softmax_row alone, with the same bits.
inline float softmax_sum(const float* z, int64_t blocks, float shift) {
  return reduce(
      blocks, 0.0f,
      [z, shift](Floats& sum, int64_t first) {
        float e[kFloats];
        for (int i = 0; i < kFloats; ++i) e[i] = exp_flushed_f32(z[first + i] - shift);
        sum += load_floats(e);
      },
      [](float a, float b) { return a + b; });
}

}  // namespace
}  // namespace anabranch
