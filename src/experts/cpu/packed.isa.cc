#include "experts/cpu/packed.h"

#include "core/dtype.h"
#include "experts/packed_value.h"

namespace anabranch::AB_ISA {
namespace {

// Values of a row of MXFP4: whole blocks.
void load_mxfp4(const uint8_t* codes, const uint8_t* scales, int64_t columns, float* to) {
  for (int64_t begin = 0; begin < columns; begin += kMxBlock, codes += kMxBlock / 2) {
    const float scale = e8m0_value(*scales++);
    for (int64_t j = 0; j < kMxBlock / 2; ++j) {
      to[begin + 2 * j] = e2m1_value(codes[j]) * scale;
      to[begin + 2 * j + 1] = e2m1_value(codes[j] >> 4) * scale;
    }
  }
}

// Values of a row of FP8 blocks from column `first` on. scales: of the row's blocks.
void load_fp8(const Float8E4M3* row, const float* scales, int64_t first, int64_t columns, float* to) {
  for (int64_t j = 0; j < columns;) {
    const float scale = scales[(first + j) / kScaleBlock];
    const int64_t left = kScaleBlock - (first + j) % kScaleBlock;
    const int64_t end = j + left < columns ? j + left : columns;
    for (; j < end; ++j) to[j] = to_float(row[first + j]) * scale;
  }
}

// Values of columns of row i of a submatrix, not rounded.
void load_row(const Matrix& m, int64_t i, int64_t first, int64_t columns, float* to) {
  const int64_t row = m.packed.row + i;
  const int64_t column = m.packed.column + first;
  if (m.dtype == AB_FLOAT4_E2M1X2) {
    const int64_t start = row * m.stride + column;
    load_mxfp4(static_cast<const uint8_t*>(m.data) + start / 2,
               static_cast<const uint8_t*>(m.packed.scales) + start / kMxBlock, columns, to);
  } else {
    load_fp8(static_cast<const Float8E4M3*>(m.data) + row * m.stride,
             static_cast<const float*>(m.packed.scales) + row / kScaleBlock * (m.stride / kScaleBlock), column, columns,
             to);
  }
}

template <class T, class To>
void unpack_rows(const Matrix& from, int64_t rows, int64_t padded_rows, int64_t columns, To* to, int64_t stride) {
  constexpr int64_t kChunk = 256;  // columns
  for (int64_t i = 0; i < padded_rows; ++i, to += stride) {
    for (int64_t begin = 0; begin < columns; begin += kChunk) {
      const int64_t n = columns - begin < kChunk ? columns - begin : kChunk;
      if (i >= rows) {
        for (int64_t j = 0; j < n; ++j) to[begin + j] = To{};
        continue;
      }
      float values[kChunk];
      load_row(from, i, begin, n, values);
      for (int64_t j = 0; j < n; ++j) to[begin + j] = from_float<To>(to_float(from_float<T>(values[j])));
    }
  }
}

void unpack(const Matrix& from, int64_t rows, int64_t padded_rows, int64_t columns, int32_t dtype, void* to,
            int64_t stride) {
  with_float_type(from.packed.dtype, [&]<class T>(T) {
    if (dtype == AB_FLOAT32) {
      unpack_rows<T>(from, rows, padded_rows, columns, static_cast<float*>(to), stride);
    } else {
      unpack_rows<T>(from, rows, padded_rows, columns, static_cast<T*>(to), stride);
    }
  });
}

void pack(int32_t dtype, const void* w, int64_t blocks, bool ceil, uint8_t* codes, uint8_t* scales) {
  with_float_type(dtype, [&]<class T>(T) {
    const T* from = static_cast<const T*>(w);
    for (int64_t block = 0; block < blocks; ++block, from += kMxBlock, codes += kMxBlock / 2) {
      float values[kMxBlock];
      uint32_t largest = 0;
      for (int64_t j = 0; j < kMxBlock; ++j) {
        values[j] = to_float(from[j]);
        const uint32_t magnitude = magnitude_bits(values[j]);
        largest = magnitude > largest ? magnitude : largest;
      }
      scales[block] = mx_scale(largest, ceil);
      const bool is_nan = scales[block] == 255u;
      const float inverse = is_nan ? 0.0f : e8m0_value(static_cast<uint8_t>(254 - scales[block]));
      for (int64_t j = 0; j < kMxBlock / 2; ++j) {
        const uint32_t low = e2m1_code(values[2 * j] * inverse);
        const uint32_t high = e2m1_code(values[2 * j + 1] * inverse);
        codes[j] = static_cast<uint8_t>(is_nan ? 0u : low | high << 4);
      }
    }
  });
}

void load_scales(int32_t dtype, const void* from, int64_t count, float* to) {
  if (dtype == AB_UINT8 || dtype == AB_FLOAT8_E8M0) {
    for (int64_t i = 0; i < count; ++i) to[i] = e8m0_value(static_cast<const uint8_t*>(from)[i]);
    return;
  }
  with_float_type(dtype, [&]<class T>(T) {
    for (int64_t i = 0; i < count; ++i) to[i] = to_float(static_cast<const T*>(from)[i]);
  });
}

}  // namespace

const PackedKernels kPacked = {unpack, pack, load_scales};

}  // namespace anabranch::AB_ISA
