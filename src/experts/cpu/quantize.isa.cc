#include "experts/cpu/quantize.h"

#include "experts/cpu/quantize_block.h"

namespace anabranch::AB_ISA {
namespace {

// Loads a block's columns, `step` elements apart.
template <class T>
void load_block(const T* from, int64_t step, float* to) {
  if (step == 1) {
    for (int64_t j = 0; j < kScaleBlock; ++j) to[j] = to_float(from[j]);
  } else {
    for (int64_t j = 0; j < kScaleBlock; ++j) to[j] = to_float(from[j * step]);
  }
}

void rows(const Matrix& from, int64_t step, int64_t num_rows, int64_t columns, const QuantizedRows& to) {
  with_float_type(from.dtype, [&]<class T>(T) {
    for (int64_t i = 0; i < num_rows; ++i) {
      const T* row = static_cast<const T*>(from.data) + i * from.stride;
      for (int64_t begin = 0; begin < columns; begin += kScaleBlock) {
        float values[kScaleBlock];
        load_block(row + begin * step, step, values);
        quantize_values(values, kScaleBlock, to, i, begin);
      }
    }
  });
}

// Reads the block twice; the second read hits the caches.
float weights(int32_t dtype, const void* from, int64_t outer_stride, int64_t inner_stride, bool power_of_two,
              uint8_t* q) {
  float scale = 1.0f;
  with_float_type(dtype, [&]<class T>(T) {
    const T* w = static_cast<const T*>(from);
    float values[kScaleBlock];
    uint32_t largest = 0;
    for (int64_t i = 0; i < kScaleBlock; ++i) {
      load_block(w + i * outer_stride, inner_stride, values);
      largest = largest_magnitude(values, largest);
    }
    scale = block_scale(largest, power_of_two);
    for (int64_t i = 0; i < kScaleBlock; ++i) {
      load_block(w + i * outer_stride, inner_stride, values);
      divide_block(values, scale, reinterpret_cast<Float8E4M3*>(q + i * kScaleBlock));
    }
  });
  return scale;
}

}  // namespace

const QuantizeKernels kQuantize = {rows, weights};

}  // namespace anabranch::AB_ISA
