// An independent reference of e4m3 and its block scales: a table of all values and a search.
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

// Decodes e4m3: 1 sign bit, 4 exponent bits with bias 7, 3 mantissa bits.
inline double e4m3_value(uint8_t bits) {
  const int exponent = (bits >> 3) & 15;
  const int mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

// Rounds to the nearest e4m3 value, ties to even. Saturates at 448.
inline uint8_t nearest_e4m3(double value) {
  if (std::isnan(value)) return 0x7f;
  static const std::vector<double> numbers = [] {
    std::vector<double> from_zero;
    for (int bits = 0; bits < 0x7f; ++bits) from_zero.push_back(e4m3_value(static_cast<uint8_t>(bits)));
    return from_zero;
  }();
  const double magnitude = std::min(std::abs(value), numbers.back());
  auto bits =
      std::lower_bound(numbers.begin(), numbers.end(), magnitude) - numbers.begin();  // first value >= magnitude
  if (bits > 0) {
    const double below = magnitude - numbers[static_cast<size_t>(bits - 1)];
    const double above = numbers[static_cast<size_t>(bits)] - magnitude;
    if (below < above || (below == above && bits % 2 != 0)) --bits;
  }
  return static_cast<uint8_t>(bits | (std::signbit(value) ? 0x80 : 0));
}

// Computes the scale of a block as experts.h defines it.
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

// A matrix quantised in blocks of block_rows x 128, and its dequantised values.
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
      std::vector<size_t> indices;
      std::vector<float> block;
      for (int64_t i = row; i < row + block_rows; ++i) {
        for (int64_t j = column; j < column + kBlock; ++j) indices.push_back(static_cast<size_t>(i * columns + j));
      }
      for (const size_t i : indices) block.push_back(matrix[i]);
      const float scale = scale_of_block(block, fp8_scales);
      result.scales.push_back(scale);
      for (const size_t i : indices) {
        result.q[i] = nearest_e4m3(matrix[i] / scale);  // in float32
        result.values[i] = e4m3_value(result.q[i]) * scale;
      }
    }
  }
  return result;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

}  // namespace anabranch::testing
