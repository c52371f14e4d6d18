// e4m3 and its block scales by other means than the library's: a table of the numbers there are, and a search.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "anabranch/experts.h"
#include "core/dtype.h"
#include "support.h"

namespace anabranch::testing {

using Bytes = Tensor<uint8_t>;

constexpr int64_t kBlock = 128;

inline Bytes e4m3(const std::vector<int64_t>& shape) { return Bytes(shape, AB_FLOAT8_E4M3); }

// Sign, exponent of 4 bits with bias 7, mantissa of 3 bits.
inline double e4m3_value(uint8_t bits) {
  const int exponent = (bits >> 3) & 15;
  const int mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

// The nearest, of two that are as near the one whose last bit is 0; 448 past the end.
inline uint8_t nearest_e4m3(double value) {
  if (std::isnan(value)) return 0x7f;
  static const std::vector<double> numbers = [] {
    std::vector<double> from_zero;
    for (int bits = 0; bits < 0x7f; ++bits) from_zero.push_back(e4m3_value(static_cast<uint8_t>(bits)));
    return from_zero;
  }();
  const double magnitude = std::min(std::abs(value), numbers.back());
  auto bits = std::lower_bound(numbers.begin(), numbers.end(), magnitude) - numbers.begin();  // the number, or above it
  if (bits > 0) {
    const double below = magnitude - numbers[static_cast<size_t>(bits - 1)];
    const double above = numbers[static_cast<size_t>(bits)] - magnitude;
    if (below < above || (below == above && bits % 2 != 0)) --bits;
  }
  return static_cast<uint8_t>(bits | (std::signbit(value) ? 0x80 : 0));
}

// A block's scale, by the words of experts.h.
inline float scale_of_block(const std::vector<float>& block, int32_t fp8_scales) {
  float largest = 0;
  for (const float value : block) {
    if (!std::isfinite(value)) return std::numeric_limits<float>::quiet_NaN();
    largest = std::max(largest, std::abs(value));
  }
  if (largest == 0) return 1;
  const float scale = std::max(largest / 448.0f, std::numeric_limits<float>::min());
  if (fp8_scales == AB_FP8_SCALES_FLOAT32) return scale;
  int exponent = 0;
  const float half_to_one = std::frexp(scale, &exponent);
  return std::ldexp(1.0f, half_to_one == 0.5f ? exponent - 1 : exponent);
}

// A matrix of floats, quantised in blocks of so many rows and 128 columns, and what that stands for.
struct QuantizedMatrix {
  std::vector<uint8_t> q;
  std::vector<float> scales;  // [rows/block_rows, columns/128]
  std::vector<double> values;
};
inline QuantizedMatrix quantize(const std::vector<float>& matrix, int64_t columns, int64_t block_rows,
                                int32_t fp8_scales) {
  const auto rows = columns == 0 ? 0 : static_cast<int64_t>(matrix.size()) / columns;
  QuantizedMatrix result{std::vector<uint8_t>(matrix.size()), {}, std::vector<double>(matrix.size())};
  for (int64_t row = 0; row < rows; row += block_rows) {
    for (int64_t column = 0; column < columns; column += kBlock) {
      std::vector<size_t> places;
      std::vector<float> block;
      for (int64_t i = row; i < row + block_rows; ++i) {
        for (int64_t j = column; j < column + kBlock; ++j) places.push_back(static_cast<size_t>(i * columns + j));
      }
      for (const size_t place : places) block.push_back(matrix[place]);
      const float scale = scale_of_block(block, fp8_scales);
      result.scales.push_back(scale);
      for (const size_t place : places) {
        result.q[place] = nearest_e4m3(matrix[place] / scale);  // in float32
        result.values[place] = e4m3_value(result.q[place]) * scale;
      }
    }
  }
  return result;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

}  // namespace anabranch::testing
