// Operands quantised by the library, and float64 GEMMs of the dequantised values.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "anabranch/experts.h"
#include "experts_operands.h"
#include "quantized.h"

namespace anabranch::testing {

constexpr double kFloat32Sums = 3e-6;  // error of sums of some hundred terms, relative to the norm of the result

// Gives each block another magnitude, so that using the scale of the wrong block gives a large error.
inline void vary(Floats& tensor, int64_t columns, int64_t block_rows) {
  for (int64_t i = 0; i < tensor.size(); ++i) {
    const int64_t block = i / columns / block_rows * 5 + i % columns / kBlock * 3;
    tensor[i] *= std::ldexp(1.0f, static_cast<int>(block % 4)) * static_cast<float>(3 + block % 5);
  }
}

inline std::vector<float> slice(const Floats& tensor, int64_t begin, int64_t count) {
  return {tensor.values().begin() + begin, tensor.values().begin() + begin + count};
}

// Compares `parts` equal parts of a tensor (one per expert, for example), each relative to its own norm.
inline void expect_parts_near(const Floats& got, const std::vector<double>& want, int64_t parts,
                              const std::string& name) {
  ASSERT_EQ(got.size(), static_cast<int64_t>(want.size())) << name;
  const int64_t count = parts == 0 ? 0 : got.size() / parts;
  for (int64_t part = 0; part < parts; ++part) {
    const auto begin = want.begin() + part * count;
    expect_near(Floats({count}, slice(got, part * count, count)), std::vector<double>(begin, begin + count),
                kFloat32Sums, name + " of " + std::to_string(part));
  }
}

// c [m, n] = a [m, k] b [k, n].
inline std::vector<double> matmul(std::span<const double> a, std::span<const double> b, int64_t m, int64_t k,
                                  int64_t n) {
  std::vector<double> c(static_cast<size_t>(m * n));
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t p = 0; p < k; ++p) {
      const double value = a[static_cast<size_t>(i * k + p)];
      for (int64_t j = 0; j < n; ++j) {
        c[static_cast<size_t>(i * n + j)] += value * b[static_cast<size_t>(p * n + j)];
      }
    }
  }
  return c;
}
inline std::vector<double> transposed(std::span<const double> a, int64_t rows, int64_t columns) {
  std::vector<double> result(a.size());
  for (int64_t i = 0; i < rows * columns; ++i) {
    result[static_cast<size_t>(i % columns * rows + i / columns)] = a[static_cast<size_t>(i)];
  }
  return result;
}

// Rows that the library quantises.
struct QuantizedTensor {
  Bytes q;
  Floats scales;

  QuantizedTensor(const ab_tensor* x, int32_t kind)
      : q({x->shape[0], x->shape[1]}, AB_FLOAT8_E4M3), scales({x->shape[0], x->shape[1] / kBlock}) {
    const ab_quantize_rows_args args{sizeof(args), kind, x, q.view(), scales.view()};
    EXPECT_OK(call(ab_quantize_rows, ab_quantize_rows_workspace, args));
  }
};

// Weights [E, D, N] or [E, D, P, F] that the library quantises, in both orientations.
struct QuantizedWeights {
  Bytes q, q_transposed;
  Floats scales;

  static std::vector<int64_t> shape_of(const ab_tensor* w, bool transpose) {
    std::vector<int64_t> shape(w->shape, w->shape + w->rank);
    if (transpose) std::rotate(shape.begin() + 1, shape.begin() + 2, shape.end());
    return shape;
  }
  static std::vector<int64_t> blocks_of(const ab_tensor* w) {
    std::vector<int64_t> shape = shape_of(w, false);
    shape[1] /= kBlock;
    shape.back() /= kBlock;
    return shape;
  }
  QuantizedWeights(const ab_tensor* w, int32_t kind)
      : q(shape_of(w, false), AB_FLOAT8_E4M3), q_transposed(shape_of(w, true), AB_FLOAT8_E4M3), scales(blocks_of(w)) {
    const ab_quantize_weights_args args{sizeof(args), kind, w, q.view(), q_transposed.view(), scales.view()};
    EXPECT_OK(call(ab_quantize_weights, ab_quantize_weights_workspace, args));
  }
};

}  // namespace anabranch::testing
