// Packed weights with random values, and an independent decoder.
#pragma once

#include <cmath>
#include <limits>
#include <memory>
#include <random>

#include "ordered_tensor.h"
#include "quantized.h"

namespace anabranch::testing {

// 2^(scale - 127); NaN for 255.
inline double e8m0_value(uint8_t scale) {
  return scale == 255 ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, scale - 127);
}

// The value of an element with a code of 4 bits.
inline double e2m1_value(int code) {
  constexpr double kMagnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return (code & 8) != 0 ? -kMagnitudes[code & 7] : kMagnitudes[code & 7];
}

// Packed matrices [M, N, C] and their scales, with views of other shapes for the weights of a network.
struct PackedTensor {
  int64_t M, N, C;
  int32_t dtype;         // AB_FLOAT4_E2M1X2 or AB_FLOAT8_E4M3
  int32_t scales_dtype;  // AB_FLOAT8_E8M0, AB_UINT8, or for FP8 a float dtype
  Bytes values;
  std::unique_ptr<FloatTensor> float_scales;
  Bytes byte_scales;
  int64_t strides[2][AB_MAX_RANK] = {};

  PackedTensor(int64_t matrices, int64_t rows, int64_t columns, int32_t packed_dtype, int32_t dtype_of_scales,
               unsigned seed)
      : M(matrices),
        N(rows),
        C(columns),
        dtype(packed_dtype),
        scales_dtype(dtype_of_scales),
        values({M * N * (is_fp4() ? C / 2 : C)}),
        byte_scales({has_byte_scales() ? num_scales() : 0}, dtype_of_scales) {
    std::mt19937 random(seed);
    uint32_t four_bytes = 0;
    for (int64_t i = 0; i < values.size(); ++i) {
      four_bytes = i % 4 == 0 ? static_cast<uint32_t>(random()) : four_bytes >> 8;
      values[i] = static_cast<uint8_t>(four_bytes);
      if (!is_fp4() && (values[i] & 0x7f) >= 0x70) values[i] = static_cast<uint8_t>(values[i] - 0x30);  // no NaN
    }
    std::uniform_int_distribution<int> exponent(119, 122);
    std::uniform_real_distribution<float> scale(0.002f, 0.02f);
    for (int64_t i = 0; i < byte_scales.size(); ++i) byte_scales[i] = static_cast<uint8_t>(exponent(random));
    if (has_byte_scales()) return;
    float_scales = std::make_unique<FloatTensor>(std::vector<int64_t>{num_scales()}, scales_dtype);
    for (int64_t i = 0; i < num_scales(); ++i) float_scales->set(i, scale(random));
  }

  bool is_fp4() const { return dtype == AB_FLOAT4_E2M1X2; }
  bool has_byte_scales() const { return scales_dtype == AB_FLOAT8_E8M0 || scales_dtype == AB_UINT8; }
  int64_t num_scales() const { return is_fp4() ? M * N * (C / 32) : M * (N / kBlock) * (C / kBlock); }
  int64_t size() const { return M * N * C; }

  // The i-th value as float32, not rounded further.
  float value(int64_t i) const {
    const int64_t row = i / C % N;
    const int64_t matrix = i / C / N;
    const int64_t block = is_fp4() ? i / 32 : (matrix * (N / kBlock) + row / kBlock) * (C / kBlock) + i % C / kBlock;
    const double scale = has_byte_scales() ? e8m0_value(byte_scales[block]) : double{float_scales->get(block)};
    const double code = is_fp4() ? e2m1_value(values[i / 2] >> (4 * (i % 2)) & 15) : e4m3_value(values[i]);
    return static_cast<float>(code * scale);  // the product of two floats is exact in float64
  }

  void* scales_data() const {
    return has_byte_scales() ? static_cast<void*>(const_cast<uint8_t*>(byte_scales.values().data()))
                             : float_scales->view()->data;
  }

  ab_tensor view(const std::vector<int64_t>& shape, const Order& order, int64_t* to) const {
    ab_tensor view{const_cast<uint8_t*>(values.values().data()), dtype, static_cast<int32_t>(shape.size()), {}, to};
    set_sizes(&view, shape, order, to);
    return view;
  }
  ab_tensor scales_view(const std::vector<int64_t>& shape, const Order& order, int64_t* to) const {
    ab_tensor view{scales_data(), scales_dtype, static_cast<int32_t>(shape.size()), {}, to};
    set_sizes(&view, shape, order, to);
    return view;
  }

 private:
  static void set_sizes(ab_tensor* view, const std::vector<int64_t>& shape, const Order& order, int64_t* to) {
    int64_t stride = 1;
    for (size_t i = 0; i < shape.size(); ++i) view->shape[i] = shape[i];
    for (auto axis = order.rbegin(); axis != order.rend(); ++axis) {
      to[*axis] = stride;
      stride *= std::max<int64_t>(view->shape[*axis], 1);
    }
  }
};

}  // namespace anabranch::testing
