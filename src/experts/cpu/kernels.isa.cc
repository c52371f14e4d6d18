#include "experts/cpu/kernels.h"

#include "core/dtype.h"
#include "experts/activation.h"

namespace anabranch::AB_ISA {
namespace {

constexpr int64_t kChunk = 256;  // columns that pass through local arrays at once
constexpr int64_t kStrip = 64;   // columns whose sums stay in registers
constexpr int64_t kLanes = 16;   // partial sums of a dot product: the same on every instruction set

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// The elements of row i from column j on; nullptr for a row of zeros.
template <class T>
T* row_of(const Matrix& m, int64_t i) {
  const int64_t row = m.rows == nullptr ? i : m.rows[i];
  return row < 0 ? nullptr : static_cast<T*>(m.data) + row * m.stride;
}

template <class T>
void fill_zero(T* to, int64_t count) {
  for (int64_t j = 0; j < count; ++j) to[j] = T{};
}

// Asks for the first `count` elements of a row that is used next: gathered rows lie anywhere, and tiles are too narrow
// for the hardware to see a pattern.
template <class T>
void prefetch(const T* row, int64_t count) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  for (int64_t j = 0; row != nullptr && j < count; j += kLine) __builtin_prefetch(row + j);
}

bool is_padding(const ResultTile& tile, int64_t i) { return tile.tokens != nullptr && tile.tokens[i] < 0; }

void load(const Matrix& from, int64_t rows, int64_t padded_rows, int64_t columns, float* to) {
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

// The activations of a chunk, times `up` if gated, and their slopes. Functions of their own: the rows around them are
// compiled for every dtype, these once.
using Activate = void (*)(const float* gate, const float* up, int64_t count, float* product);
using ActivateWithSlope = void (*)(const float* gate, int64_t count, float* value, float* slope);

template <int32_t kActivation, bool kGated>
void activate_chunk(const float* __restrict gate, const float* __restrict up, int64_t count,
                    float* __restrict product) {
  for (int64_t j = 0; j < count; ++j) product[j] = activate<kActivation>(gate[j]) * (kGated ? up[j] : 1.0f);
}

template <int32_t kActivation>
void activate_chunk_with_slope(const float* __restrict gate, int64_t count, float* __restrict value,
                               float* __restrict slope) {
  for (int64_t j = 0; j < count; ++j) {
    const ActivationAt at = activate_with_slope<kActivation>(gate[j]);
    value[j] = at.value;
    slope[j] = at.slope;
  }
}

Activate activate_of(int32_t activation, bool gated) {
  Activate result = nullptr;
  with_activation(activation, [&]<int32_t kActivation>() {
    result = gated ? activate_chunk<kActivation, true> : activate_chunk<kActivation, false>;
  });
  return result;
}

ActivateWithSlope activate_with_slope_of(int32_t activation) {
  ActivateWithSlope result = nullptr;
  with_activation(activation, [&]<int32_t kActivation>() { result = activate_chunk_with_slope<kActivation>; });
  return result;
}

template <class T>
void hidden_row(Activate activate, bool gated, const float* tile, const float* bias, float w, int64_t columns,
                T* h_gate, T* h_up, T* a) {
  for (int64_t begin = 0; begin < columns; begin += kChunk) {
    const int64_t count = least(kChunk, columns - begin);
    float gate[kChunk];
    float up[kChunk];
    float product[kChunk];
    const float* gate_tile = tile + begin;
    const float* up_tile = tile + columns + begin;
    for (int64_t j = 0; j < count; ++j) gate[j] = gate_tile[j] + (bias == nullptr ? 0.0f : bias[begin + j]);
    for (int64_t j = 0; gated && j < count; ++j) {
      up[j] = up_tile[j] + (bias == nullptr ? 0.0f : bias[columns + begin + j]);
    }
    activate(gate, up, count, product);
    for (int64_t j = 0; j < count; ++j) a[begin + j] = from_float<T>(w * product[j]);
    for (int64_t j = 0; h_gate != nullptr && j < count; ++j) h_gate[begin + j] = from_float<T>(gate[j]);
    for (int64_t j = 0; gated && h_up != nullptr && j < count; ++j) h_up[begin + j] = from_float<T>(up[j]);
  }
}

void hidden(int32_t activation, bool gated, const ResultTile& tile, const float* bias, const float* scale,
            const Matrix (&h)[2], const Matrix& a) {
  const Activate activate = activate_of(activation, gated);
  with_float_type(a.dtype, [&]<class T>(T) {
    for (int64_t i = 0; i < tile.rows; ++i) {
      T* h_gate = h[0].data == nullptr ? nullptr : row_of<T>(h[0], i);
      T* h_up = h[1].data == nullptr ? nullptr : row_of<T>(h[1], i);
      T* to = row_of<T>(a, i);
      if (i + 1 < tile.rows) {
        prefetch(row_of<const T>(a, i + 1), tile.columns);
        if (h_gate != nullptr) prefetch(row_of<const T>(h[0], i + 1), tile.columns);
        if (h_up != nullptr) prefetch(row_of<const T>(h[1], i + 1), tile.columns);
      }
      if (is_padding(tile, i)) {
        fill_zero(to, tile.columns);
        if (h_gate != nullptr) fill_zero(h_gate, tile.columns);
        if (h_up != nullptr) fill_zero(h_up, tile.columns);
      } else {
        hidden_row(activate, gated, tile.data + i * tile.stride, bias, scale == nullptr ? 1.0f : scale[i], tile.columns,
                   h_gate, h_up, to);
      }
    }
  });
}

// The lanes added pair by pair.
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

// Reads a chunk of h before it writes dh, which may be the same memory. Returns <da', a>.
template <class T>
float hidden_backward_row(ActivateWithSlope activate, bool gated, const float* d_a, float w, int64_t columns,
                          const T* h_gate, const T* h_up, T* d_gate, T* d_up, T* weighted_a) {
  float lanes[kLanes] = {};
  for (int64_t begin = 0; begin < columns; begin += kChunk) {
    const int64_t count = least(kChunk, columns - begin);
    float gate[kChunk];
    float up[kChunk];
    float value[kChunk];
    float slope[kChunk];
    float a[kChunk];
    const float* d = d_a + begin;
    for (int64_t j = 0; j < count; ++j) gate[j] = to_float(h_gate[begin + j]);
    for (int64_t j = 0; gated && j < count; ++j) up[j] = to_float(h_up[begin + j]);
    activate(gate, count, value, slope);
    for (int64_t j = 0; j < count; ++j) a[j] = gated ? value[j] * up[j] : value[j];
    add_products(d, a, count, lanes);
    for (int64_t j = 0; weighted_a != nullptr && j < count; ++j) weighted_a[begin + j] = from_float<T>(w * a[j]);
    if (d_gate == nullptr) continue;
    for (int64_t j = 0; j < count; ++j) {
      d_gate[begin + j] = from_float<T>((gated ? slope[j] * up[j] : slope[j]) * (w * d[j]));
    }
    for (int64_t j = 0; gated && j < count; ++j) d_up[begin + j] = from_float<T>(value[j] * (w * d[j]));
  }
  return sum_lanes(lanes);
}

void hidden_backward(int32_t activation, bool gated, const ResultTile& tile, const float* scale, const Matrix (&h)[2],
                     const Matrix (&dh)[2], const Matrix& weighted_a, float* dot) {
  const ActivateWithSlope activate = activate_with_slope_of(activation);
  with_float_type(h[0].dtype, [&]<class T>(T) {
    for (int64_t i = 0; i < tile.rows; ++i) {
      T* d_gate = dh[0].data == nullptr ? nullptr : row_of<T>(dh[0], i);
      T* d_up = dh[1].data == nullptr ? nullptr : row_of<T>(dh[1], i);
      T* a = weighted_a.data == nullptr ? nullptr : row_of<T>(weighted_a, i);
      if (i + 1 < tile.rows) {
        prefetch(row_of<const T>(h[0], i + 1), tile.columns);
        if (gated) prefetch(row_of<const T>(h[1], i + 1), tile.columns);
        if (a != nullptr) prefetch(row_of<const T>(weighted_a, i + 1), tile.columns);
      }
      if (is_padding(tile, i)) {
        if (d_gate != nullptr) fill_zero(d_gate, tile.columns);
        if (d_up != nullptr) fill_zero(d_up, tile.columns);
        if (a != nullptr) fill_zero(a, tile.columns);
        continue;
      }
      const T* h_up = gated ? row_of<const T>(h[1], i) : nullptr;
      const float product =
          hidden_backward_row(activate, gated, tile.data + i * tile.stride, scale == nullptr ? 1.0f : scale[i],
                              tile.columns, row_of<const T>(h[0], i), h_up, d_gate, d_up, a);
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

void column_sums(const Matrix& m, int64_t rows, int64_t columns, const float* scale, float* sum) {
  constexpr int64_t kRows = 128;
  fill_zero(sum, columns);
  with_float_type(m.dtype, [&]<class T>(T) {
    for (int64_t first = 0; first < rows; first += kRows) {
      const int64_t last = least(first + kRows, rows);
      for (int64_t begin = 0; begin < columns; begin += kStrip) {
        const int64_t count = least(kStrip, columns - begin);
        float block[kStrip] = {};
        for (int64_t i = first; i < last; ++i) {
          const T* row = row_of<const T>(m, i);
          if (row == nullptr) continue;
          const float w = scale == nullptr ? 1.0f : scale[i];
          for (int64_t j = 0; j < count; ++j) block[j] += w * to_float(row[begin + j]);
        }
        for (int64_t j = 0; j < count; ++j) sum[begin + j] += block[j];
      }
    }
  });
}

// kRows x kStrip elements of C stay in registers while k runs.
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

const ExpertKernels kExperts = {load, store, hidden, hidden_backward, row_dots, column_sums, multiply};

}  // namespace anabranch::AB_ISA
