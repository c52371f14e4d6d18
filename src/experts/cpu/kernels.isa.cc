#include "experts/cpu/kernels.h"

#include "core/dtype.h"
#include "experts/activation.h"
#include "experts/cpu/quantize_block.h"

namespace anabranch::AB_ISA {
namespace {

constexpr int64_t kChunk = 256;  // columns per pass through local arrays
constexpr int64_t kStrip = 64;   // columns whose sums stay in registers
constexpr int64_t kLanes = 16;   // partial sums of a dot product; the same for every instruction set

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Returns the elements of row i, or nullptr for a row of zeros.
template <class T>
T* row_of(const Matrix& m, int64_t i) {
  const int64_t row = m.rows == nullptr ? i : m.rows[i];
  return row < 0 ? nullptr : static_cast<T*>(m.data) + row * m.stride;
}

template <class T>
void fill_zero(T* to, int64_t count) {
  for (int64_t j = 0; j < count; ++j) to[j] = T{};
}

// Prefetches the first `count` elements of the next row: gathered rows have no regular addresses, and tiles are too
// narrow for the hardware prefetcher.
template <class T>
void prefetch(const T* row, int64_t count) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  for (int64_t j = 0; row != nullptr && j < count; j += kLine) __builtin_prefetch(row + j);
}

bool is_padding(const ResultTile& tile, int64_t i) { return tile.tokens != nullptr && tile.tokens[i] < 0; }

void load_quantized(const Matrix& from, int64_t rows, int64_t padded_rows, int64_t columns, float* to) {
  const BlockScales& scales = from.scales;
  for (int64_t i = 0; i < padded_rows; ++i, to += columns) {
    const Float8E4M3* row = i < rows ? row_of<const Float8E4M3>(from, i) : nullptr;
    if (i + 1 < rows) prefetch(row_of<const Float8E4M3>(from, i + 1), columns);
    if (row == nullptr) {
      fill_zero(to, columns);
      continue;
    }
    const int64_t stored = from.rows == nullptr ? i : from.rows[i];
    const float* scale = scales.data + stored / scales.block_rows * scales.row_stride;
    for (int64_t begin = 0; begin < columns; begin += kScaleBlock) {
      const float s = scale[begin / kScaleBlock * scales.column_stride];
      for (int64_t j = begin; j < begin + kScaleBlock; ++j) to[j] = s * to_float(row[j]);
    }
  }
}

void load(const Matrix& from, int64_t rows, int64_t padded_rows, int64_t columns, float* to) {
  if (from.dtype == AB_FLOAT8_E4M3) return load_quantized(from, rows, padded_rows, columns, to);
  with_float_type(from.dtype, [&]<class T>(T) {
    for (int64_t i = 0; i < padded_rows; ++i, to += columns) {
      const T* row = i < rows ? row_of<const T>(from, i) : nullptr;
      if (i + 1 < rows) prefetch(row_of<const T>(from, i + 1), columns);
      if (row == nullptr) {
        fill_zero(to, columns);
      } else {
        for (int64_t j = 0; j < columns; ++j) to[j] = to_float(row[j]);
      }
    }
  });
}

void store(const ResultTile& tile, const float* scale, const float* bias, const float* bias_scale, const Matrix& y) {
  with_float_type(y.dtype, [&]<class T>(T) {
    for (int64_t i = 0; i < tile.rows; ++i) {
      T* to = row_of<T>(y, i);
      if (i + 1 < tile.rows) prefetch(row_of<const T>(y, i + 1), tile.columns);
      const float* from = tile.data + i * tile.stride;
      const float w = scale == nullptr ? 1.0f : scale[i];
      const float v = bias_scale == nullptr ? 1.0f : bias_scale[i];
      if (is_padding(tile, i)) {
        fill_zero(to, tile.columns);
      } else if (bias == nullptr) {
        for (int64_t j = 0; j < tile.columns; ++j) to[j] = from_float<T>(w * from[j]);
      } else {
        for (int64_t j = 0; j < tile.columns; ++j) to[j] = from_float<T>(w * from[j] + v * bias[j]);
      }
    }
  });
}

// Activations of a chunk, and their derivatives. `up` is not read for ungated experts. They are separate functions, so
// that each is compiled once and not per dtype of the rows.
using Activate = void (*)(const Activation& activation, const float* gate, const float* up, int64_t count,
                          float* value);
struct Slopes {
  float value[kChunk];
  float by_gate[kChunk];
  float by_up[kChunk];
};
using ActivateWithSlopes = void (*)(const Activation& activation, const float* gate, const float* up, int64_t count,
                                    Slopes& slopes);

template <Formula kFormula, bool kGated>
void activate_chunk(const Activation& activation, const float* __restrict gate, const float* __restrict up,
                    int64_t count, float* __restrict value) {
  const Activation a = activation;
  for (int64_t j = 0; j < count; ++j) value[j] = activate<kFormula>(a, gate[j], kGated ? up[j] : 1.0f);
}

template <Formula kFormula, bool kGated>
void activate_chunk_with_slopes(const Activation& activation, const float* __restrict gate, const float* __restrict up,
                                int64_t count, Slopes& __restrict slopes) {
  const Activation a = activation;
  for (int64_t j = 0; j < count; ++j) {
    const ActivationAt at = activate_with_slopes<kFormula>(a, gate[j], kGated ? up[j] : 1.0f);
    slopes.value[j] = at.value;
    slopes.by_gate[j] = at.by_gate;
    slopes.by_up[j] = at.by_up;
  }
}

Activate activate_of(const Activation& activation, bool gated) {
  Activate result = nullptr;
  with_formula(activation, [&]<Formula kFormula>() {
    result = gated ? activate_chunk<kFormula, true> : activate_chunk<kFormula, false>;
  });
  return result;
}

ActivateWithSlopes activate_with_slopes_of(const Activation& activation, bool gated) {
  ActivateWithSlopes result = nullptr;
  with_formula(activation, [&]<Formula kFormula>() {
    result = gated ? activate_chunk_with_slopes<kFormula, true> : activate_chunk_with_slopes<kFormula, false>;
  });
  return result;
}

// Loads every step-th element as float32, and stores it back.
template <class T>
void load_columns(const T* from, int64_t step, int64_t count, float* to) {
  if (step == 1) {
    for (int64_t j = 0; j < count; ++j) to[j] = to_float(from[j]);
  } else {
    for (int64_t j = 0; j < count; ++j) to[j] = to_float(from[j * step]);
  }
}
template <class T, class Value>
void store_columns(T* to, int64_t step, int64_t count, const Value& value) {
  if (step == 1) {
    for (int64_t j = 0; j < count; ++j) to[j] = from_float<T>(value(j));
  } else {
    for (int64_t j = 0; j < count; ++j) to[j * step] = from_float<T>(value(j));
  }
}

// Loads columns of the tile and adds the bias.
void load_h(const float* tile, const float* bias, int64_t step, int64_t count, float* to) {
  load_columns(tile, step, count, to);
  for (int64_t j = 0; bias != nullptr && j < count; ++j) to[j] += bias[j * step];
}

template <class T>
void h_row(const Activation& activation, Activate activate, const GateUpOrder& order, const GateUpOrder& tile_order,
           const float* tile, const float* bias, float w, int64_t columns, T* h_gate, T* h_up, T* a,
           const QuantizedRows& a_q, int64_t row) {
  const int64_t step = order.step();
  const int64_t tile_step = tile_order.step();
  const int64_t up_begin = tile_order.interleaved ? 1 : columns;
  for (int64_t begin = 0; begin < columns; begin += kChunk) {
    const int64_t count = least(kChunk, columns - begin);
    float gate[kChunk];
    float up[kChunk];
    float product[kChunk];
    const int64_t at = begin * step;
    const int64_t in_tile = begin * tile_step;
    load_h(tile + in_tile, bias == nullptr ? nullptr : bias + in_tile, tile_step, count, gate);
    if (order.gated) {
      const int64_t up_at = up_begin + in_tile;
      load_h(tile + up_at, bias == nullptr ? nullptr : bias + up_at, tile_step, count, up);
    }
    activate(activation, gate, up, count, product);
    for (int64_t j = 0; j < count; ++j) product[j] *= w;
    for (int64_t j = 0; a != nullptr && j < count; ++j) a[begin + j] = from_float<T>(product[j]);
    if (a_q.q.data != nullptr) quantize_values(product, count, a_q, row, begin);
    if (h_gate != nullptr) store_columns(h_gate + at, step, count, [&](int64_t j) { return gate[j]; });
    if (order.gated && h_up != nullptr) store_columns(h_up + at, step, count, [&](int64_t j) { return up[j]; });
  }
}

template <class T>
void clear_columns(T* to, int64_t step, int64_t count) {
  store_columns(to, step, count, [](int64_t) { return 0.0f; });
}

void clear_quantized(const QuantizedRows& rows, int64_t count, int64_t columns) {
  const BlockScales& scales = rows.q.scales;
  for (int64_t i = 0; rows.q.data != nullptr && i < count; ++i) {
    fill_zero(row_of<Float8E4M3>(rows.q, i), columns);
    for (int64_t j = 0; j < columns / kScaleBlock; ++j) {
      scales.data[i * scales.row_stride + j * scales.column_stride] = 1.0f;
    }
  }
}

// Clears row i only.
void clear_quantized_row(const QuantizedRows& rows, int64_t i, int64_t columns) {
  QuantizedRows row = rows;
  if (row.q.data == nullptr) return;
  row.q.data = row_of<Float8E4M3>(rows.q, i);
  row.q.scales.data += i * rows.q.scales.row_stride;
  clear_quantized(row, 1, columns);
}

void intermediate(const Activation& activation, const GateUpOrder& order, const GateUpOrder& tile_order,
                  const ResultTile& tile, const float* bias, const float* scale, const Matrix (&h)[2], const Matrix& a,
                  const QuantizedRows& a_q) {
  const Activate activate = activate_of(activation, order.gated);
  with_float_type(a.dtype, [&]<class T>(T) {
    for (int64_t i = 0; i < tile.rows; ++i) {
      T* h_gate = h[0].data == nullptr ? nullptr : row_of<T>(h[0], i);
      T* h_up = h[1].data == nullptr ? nullptr : row_of<T>(h[1], i);
      T* to = a.data == nullptr ? nullptr : row_of<T>(a, i);
      if (i + 1 < tile.rows) {
        if (to != nullptr) prefetch(row_of<const T>(a, i + 1), tile.columns);
        if (h_gate != nullptr) prefetch(row_of<const T>(h[0], i + 1), order.step() * tile.columns);
        if (h_up != nullptr && !order.interleaved) prefetch(row_of<const T>(h[1], i + 1), tile.columns);
      }
      if (is_padding(tile, i)) {
        if (to != nullptr) fill_zero(to, tile.columns);
        clear_quantized_row(a_q, i, tile.columns);
        if (h_gate != nullptr) clear_columns(h_gate, order.step(), tile.columns);
        if (h_up != nullptr) clear_columns(h_up, order.step(), tile.columns);
      } else {
        h_row(activation, activate, order, tile_order, tile.data + i * tile.stride, bias,
              scale == nullptr ? 1.0f : scale[i], tile.columns, h_gate, h_up, to, a_q, i);
      }
    }
  });
}

// Adds the lanes pairwise.
float sum_lanes(float (&lanes)[kLanes]) {
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  }
  return lanes[0];
}

void add_products(const float* x, const float* y, int64_t count, float (&lanes)[kLanes]) {
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += x[j + lane] * y[j + lane];
  }
  for (; j < count; ++j) lanes[j % kLanes] += x[j] * y[j];
}

// Rounds to T, then quantises.
template <class T>
void quantize_rounded(float* values, int64_t count, const QuantizedRows& rows, int64_t row, int64_t column) {
  for (int64_t j = 0; j < count; ++j) values[j] = to_float(from_float<T>(values[j]));
  quantize_values(values, count, rows, row, column);
}

// Reads each chunk of h before it writes the same chunk of dh, which may alias h. Returns <da', a>.
template <class T>
float intermediate_backward_row(const Activation& activation, ActivateWithSlopes activate, const GateUpOrder& order,
                                const float* d_a, float w, int64_t columns, const T* h_gate, const T* h_up, T* d_gate,
                                T* d_up, const QuantizedRows (&dh_q)[2], int64_t row, T* weighted_a) {
  const int64_t step = order.step();
  float lanes[kLanes] = {};
  for (int64_t begin = 0; begin < columns; begin += kChunk) {
    const int64_t count = least(kChunk, columns - begin);
    float gate[kChunk];
    float up[kChunk];
    Slopes a;
    const float* d = d_a + begin;
    const int64_t at = begin * step;
    load_columns(h_gate + at, step, count, gate);
    if (order.gated) load_columns(h_up + at, step, count, up);
    activate(activation, gate, up, count, a);
    add_products(d, a.value, count, lanes);
    for (int64_t j = 0; weighted_a != nullptr && j < count; ++j) weighted_a[begin + j] = from_float<T>(w * a.value[j]);
    for (int64_t j = 0; j < count; ++j) a.by_gate[j] *= w * d[j];
    if (d_gate != nullptr) store_columns(d_gate + at, step, count, [&](int64_t j) { return a.by_gate[j]; });
    if (dh_q[0].q.data != nullptr) quantize_rounded<T>(a.by_gate, count, dh_q[0], row, begin);
    if (!order.gated) continue;
    for (int64_t j = 0; j < count; ++j) a.by_up[j] *= w * d[j];
    if (d_up != nullptr) store_columns(d_up + at, step, count, [&](int64_t j) { return a.by_up[j]; });
    if (dh_q[1].q.data != nullptr) quantize_rounded<T>(a.by_up, count, dh_q[1], row, begin);
  }
  return sum_lanes(lanes);
}

void intermediate_backward(const Activation& activation, const GateUpOrder& order, const ResultTile& tile,
                           const float* scale, const Matrix (&h)[2], const Matrix (&dh)[2],
                           const QuantizedRows (&dh_q)[2], const Matrix& weighted_a, float* dot) {
  const ActivateWithSlopes activate = activate_with_slopes_of(activation, order.gated);
  with_float_type(h[0].dtype, [&]<class T>(T) {
    for (int64_t i = 0; i < tile.rows; ++i) {
      T* d_gate = dh[0].data == nullptr ? nullptr : row_of<T>(dh[0], i);
      T* d_up = dh[1].data == nullptr ? nullptr : row_of<T>(dh[1], i);
      T* a = weighted_a.data == nullptr ? nullptr : row_of<T>(weighted_a, i);
      if (i + 1 < tile.rows) {
        prefetch(row_of<const T>(h[0], i + 1), order.step() * tile.columns);
        if (order.gated && !order.interleaved) prefetch(row_of<const T>(h[1], i + 1), tile.columns);
        if (a != nullptr) prefetch(row_of<const T>(weighted_a, i + 1), tile.columns);
      }
      if (is_padding(tile, i)) {
        if (d_gate != nullptr) clear_columns(d_gate, order.step(), tile.columns);
        if (d_up != nullptr) clear_columns(d_up, order.step(), tile.columns);
        if (a != nullptr) fill_zero(a, tile.columns);
        for (const QuantizedRows& part : dh_q) clear_quantized_row(part, i, tile.columns);
        continue;
      }
      const T* h_up = order.gated ? row_of<const T>(h[1], i) : nullptr;
      const float product = intermediate_backward_row(activation, activate, order, tile.data + i * tile.stride,
                                                      scale == nullptr ? 1.0f : scale[i], tile.columns,
                                                      row_of<const T>(h[0], i), h_up, d_gate, d_up, dh_q, i, a);
      if (dot != nullptr) dot[i] += product;
    }
  });
}

void row_dots(const Matrix& m, int64_t rows, int64_t columns, const float* vector, float* dot) {
  with_float_type(m.dtype, [&]<class T>(T) {
    for (int64_t i = 0; i < rows; ++i) {
      const T* row = row_of<const T>(m, i);
      if (row == nullptr) continue;
      float lanes[kLanes] = {};
      for (int64_t begin = 0; begin < columns; begin += kChunk) {
        const int64_t count = least(kChunk, columns - begin);
        float values[kChunk];
        for (int64_t j = 0; j < count; ++j) values[j] = to_float(row[begin + j]);
        add_products(values, vector + begin, count, lanes);
      }
      dot[i] += sum_lanes(lanes);
    }
  });
}

void column_sums(const Matrix& m, int64_t rows, int64_t columns, const int32_t* tokens, const float* scale,
                 float* sum) {
  constexpr int64_t kRows = 128;
  fill_zero(sum, columns);
  with_float_type(m.dtype, [&]<class T>(T) {
    for (int64_t first = 0; first < rows; first += kRows) {
      const int64_t last = least(first + kRows, rows);
      for (int64_t begin = 0; begin < columns; begin += kStrip) {
        const int64_t count = least(kStrip, columns - begin);
        float block[kStrip] = {};
        for (int64_t i = first; i < last; ++i) {
          if (tokens != nullptr && tokens[i] < 0) continue;
          const T* row = row_of<const T>(m, i);
          const float w = scale == nullptr ? 1.0f : scale[i];
          for (int64_t j = 0; j < count; ++j) block[j] += w * to_float(row[begin + j]);
        }
        for (int64_t j = 0; j < count; ++j) sum[begin + j] += block[j];
      }
    }
  });
}

// Holds kRows x kStrip elements of C in registers while looping over k.
template <int64_t kRows>
void multiply_strip(bool transpose_a, bool transpose_b, int64_t n, int64_t k, const float* a, int64_t lda,
                    const float* b, int64_t ldb, bool accumulate, float* c, int64_t ldc) {
  for (int64_t begin = 0; begin < n; begin += kStrip) {
    const int64_t count = least(kStrip, n - begin);
    float sum[kRows][kStrip] = {};
    for (int64_t p = 0; p < k; ++p) {
      float column[kStrip] = {};
      for (int64_t j = 0; j < count; ++j) column[j] = transpose_b ? b[(begin + j) * ldb + p] : b[p * ldb + begin + j];
      for (int64_t i = 0; i < kRows; ++i) {
        const float factor = transpose_a ? a[p * lda + i] : a[i * lda + p];
        for (int64_t j = 0; j < kStrip; ++j) sum[i][j] += factor * column[j];
      }
    }
    for (int64_t i = 0; i < kRows; ++i) {
      float* to = c + i * ldc + begin;
      for (int64_t j = 0; j < count; ++j) to[j] = accumulate ? to[j] + sum[i][j] : sum[i][j];
    }
  }
}

void multiply(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, const float* a, int64_t lda,
              const float* b, int64_t ldb, bool accumulate, float* c, int64_t ldc) {
  constexpr int64_t kRows = 4;
  const int64_t step = transpose_a ? 1 : lda;
  int64_t i = 0;
  for (; i + kRows <= m; i += kRows) {
    multiply_strip<kRows>(transpose_a, transpose_b, n, k, a + i * step, lda, b, ldb, accumulate, c + i * ldc, ldc);
  }
  for (; i < m; ++i) {
    multiply_strip<1>(transpose_a, transpose_b, n, k, a + i * step, lda, b, ldb, accumulate, c + i * ldc, ldc);
  }
}

}  // namespace

const ExpertKernels kExperts = {load,     store,       intermediate, intermediate_backward, clear_quantized,
                                row_dots, column_sums, multiply};

}  // namespace anabranch::AB_ISA
