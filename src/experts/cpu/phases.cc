#include "experts/cpu/phases.h"

#include <algorithm>
#include <cstring>

#include "core/dtype.h"
#include "core/threads.h"
#include "experts/packed_value.h"

namespace anabranch {

GroupedRows::GroupedRows(Workspace& workspace, int64_t num_rows, int64_t num_experts, bool by_slot, bool weighted)
    : R(num_rows), E(num_experts) {
  if (by_slot) tokens = workspace.take<int32_t>(R);
  if (weighted) scale = workspace.take<float>(R);
  groups = workspace.take<RowRange>(E);
  tiles = workspace.take<RowTile>(max_row_tiles(R, E));
}

void GroupedRows::fill(int threads, const ab_tensor* group_sizes, const ab_tensor* slot_of_row,
                       const ab_tensor* weights, int64_t T, int64_t K) {
  constexpr int64_t kTaskRows = 1 << 14;
  const int32_t* slots = data<const int32_t>(slot_of_row);
  parallel_for(threads, (R + kTaskRows - 1) / kTaskRows, [&](int64_t task, int) {
    const int64_t begin = task * kTaskRows;
    const int64_t end = std::min(begin + kTaskRows, R);
    for (int64_t r = begin; slots != nullptr && r < end; ++r) {
      const bool real = slots[r] >= 0 && slots[r] < T * K;
      tokens[r] = real ? static_cast<int32_t>(slots[r] / K) : -1;
    }
    if (weights == nullptr) return;
    with_float_type(weights->dtype, [&]<class T_>(T_) {
      const T_* w = data<const T_>(weights);
      for (int64_t r = begin; r < end; ++r) {
        scale[r] = slots == nullptr ? to_float(w[r]) : tokens[r] < 0 ? 0.0f : to_float(w[slots[r]]);
      }
    });
  });
  clip_groups(data<const int32_t>(group_sizes), tokens, R, E, groups);
  num_tiles = cut_tiles(groups, R, E, tiles);
}

int threads_for(const ab_exec* exec, int64_t R, int64_t elements_per_row) {
  constexpr double kMinMultiplyAdds =
      2e6;  // multiply-adds, which take about as long as OpenMP takes to wake its threads
  return static_cast<double>(R) * static_cast<double>(elements_per_row) < kMinMultiplyAdds ? 1 : num_threads(exec);
}

ExpertMatrices matrices_of(const ab_tensor* tensor, bool transposed) {
  const Matrix m = matrix_of(tensor, 0, 0);
  return {m.data, m.dtype, transposed};
}

Matrix ExpertMatrices::expert_matrix(int64_t e, int64_t N, int64_t D) const {
  Matrix m{data, dtype, transposed ? D : N, nullptr, scales, packed};
  if (shared) return m;
  if (packed.scales != nullptr) {
    const bool fp4 = dtype == AB_FLOAT4_E2M1X2;
    const int64_t bytes =
        fp4 ? e * N * D / kMxBlock : e * (N / kScaleBlock) * (D / kScaleBlock) * dtype_size(AB_FLOAT32);
    m.packed.scales = static_cast<const char*>(packed.scales) + bytes;
    m.data = static_cast<char*>(data) + (fp4 ? e * N * D / 2 : e * N * D);
    return m;
  }
  if (data != nullptr) m.data = static_cast<char*>(data) + e * N * D * dtype_size(dtype);
  if (scales.data != nullptr) m.scales.data += e * (N / kScaleBlock) * (D / kScaleBlock);
  return m;
}

void clear_rows(const Matrix& m, int64_t rows, int64_t columns) {
  if (m.data == nullptr) return;
  const int64_t size = dtype_size(m.dtype);
  for (int64_t i = 0; i < rows; ++i) {
    std::memset(static_cast<char*>(m.data) + i * m.stride * size, 0, static_cast<size_t>(columns * size));
  }
}

const float* bias_row(const ExpertKernels& kernels, const ab_tensor* bias, int64_t e, int64_t N, int64_t begin,
                      int64_t count, float* to) {
  if (bias == nullptr) return nullptr;
  kernels.load(matrix_of(bias, e * N + begin, N), 1, 1, count, to);
  return to;
}

void LowRankProduct::add(Products& products, int thread, int64_t expert, int64_t row, int64_t m, int64_t columns,
                         int64_t begin, int64_t n, const Matrix& c) const {
  if (rank == 0) return;
  const Matrix factor = b.expert_matrix(expert, columns, rank);
  const RightHandSide rhs{b.transposed ? at(factor, begin, 0) : at(factor, 0, begin), c, true};
  products.multiply(thread, at(u, row, 0), false, {&rhs, 1}, b.transposed, m, n, rank);
}

void multiply_grouped_rows(Products& products, int threads, const GroupedRows& rows, const RowProduct& op) {
  const ColumnParts parts(op.N, rows.num_tiles, op.w.column_step());
  float factors[kTileRows];
  std::fill_n(factors, kTileRows, op.factor);
  parallel_for(threads, rows.num_tiles * parts.count(), [&](int64_t task, int thread) {
    const RowTile& tile = rows.tiles[task / parts.count()];
    const int64_t part = task % parts.count();
    const int64_t end = parts.end(part);
    const int32_t* tokens = rows.tokens == nullptr ? nullptr : rows.tokens + tile.begin;
    for (int64_t begin = parts.begin(part); begin < end; begin += kTileColumns) {
      const int64_t n = std::min(kTileColumns, end - begin);
      const Matrix y = at(op.y, tile.begin, begin);
      if (tile.expert < 0) {
        clear_rows(y, tile.rows, n);
        continue;
      }
      float* c = products.tile(thread);
      const Matrix w = op.w.expert_matrix(tile.expert, op.N, op.D);
      const RightHandSide rhs{op.w.transposed ? at(w, begin, 0) : at(w, 0, begin), {c, AB_FLOAT32, n, nullptr}};
      products.multiply(thread, at(op.x, tile.begin, 0), false, {&rhs, 1}, op.w.transposed, tile.rows, n, op.D,
                        rows.R - tile.begin);
      op.low_rank.add(products, thread, tile.expert, tile.begin, tile.rows, op.N, begin, n, rhs.c);
      float memory[kTileColumns];
      const float* bias = bias_row(products.kernels(), op.bias, tile.expert, op.N, begin, n, memory);
      products.kernels().store({c, n, tile.rows, n, tokens}, op.scale == nullptr ? factors : op.scale + tile.begin,
                               bias, op.bias_scale == nullptr ? nullptr : op.bias_scale + tile.begin, y);
    }
  });
}

void IntermediateParts::clear(const Matrix& rows, int64_t row, int64_t begin, int64_t num_rows, int64_t columns) const {
  if (rows.data == nullptr) return;
  clear_rows(gate(rows, row, begin), num_rows, columns * order.step());
  if (order.gated && !order.interleaved) clear_rows(up(rows, row, begin), num_rows, columns);
}

namespace {

// d_w [1, M, N] = the sum of a^T b over all experts, one after the other.
void sum_weight_gradients(Products& products, int threads, const GroupedRows& rows, const Matrix& a, int64_t M,
                          const Matrix& b, int64_t N, bool adds, const ab_tensor* d_w) {
  const int64_t strips = (M + kTileRows - 1) / kTileRows;
  const ColumnParts parts(N, strips);
  parallel_for(threads, strips * parts.count(), [&](int64_t task, int thread) {
    const int64_t row = task / parts.count() * kTileRows;
    const int64_t m = std::min(kTileRows, M - row);
    const int64_t end = parts.end(task % parts.count());
    for (int64_t begin = parts.begin(task % parts.count()); begin < end; begin += kTileColumns) {
      const int64_t n = std::min(kTileColumns, end - begin);
      const Matrix to = matrix_of(d_w, row * N + begin, N);
      const bool direct = to.dtype == AB_FLOAT32;
      const Matrix sum = direct ? to : Matrix{products.tile(thread), AB_FLOAT32, n, nullptr};
      bool is_empty = !(direct && adds);
      for (int64_t e = 0; e < rows.E; ++e) {
        const RowRange& group = rows.groups[e];
        if (group.rows == 0) continue;
        const RightHandSide rhs{at(b, group.begin, begin), sum, !is_empty};
        products.multiply(thread, at(a, group.begin, row), true, {&rhs, 1}, false, m, n, group.rows);
        is_empty = false;
      }
      if (is_empty) {
        clear_rows(to, m, n);
      } else if (!direct) {
        products.kernels().store({products.tile(thread), n, m, n, nullptr}, nullptr, nullptr, nullptr, to);
      }
    }
  });
}

}  // namespace

void weight_gradient(Products& products, int threads, const GroupedRows& rows, const Matrix& a, int64_t M,
                     const Matrix& b, int64_t N, bool adds, const ab_tensor* d_w) {
  const int64_t strips = (M + kTileRows - 1) / kTileRows;
  if (d_w->shape[0] != rows.E) return sum_weight_gradients(products, threads, rows, a, M, b, N, adds, d_w);
  const ColumnParts parts(N, rows.E * strips);
  parallel_for(threads, rows.E * strips * parts.count(), [&](int64_t task, int thread) {
    const int64_t part = task % parts.count();
    const int64_t strip = task / parts.count() % strips;
    const int64_t e = task / parts.count() / strips;
    const int64_t row = strip * kTileRows;
    const int64_t m = std::min(kTileRows, M - row);
    const RowRange& group = rows.groups[e];
    const int64_t end = parts.end(part);
    for (int64_t begin = parts.begin(part); begin < end; begin += kTileColumns) {
      const int64_t n = std::min(kTileColumns, end - begin);
      const Matrix to = matrix_of(d_w, (e * M + row) * N + begin, N);
      if (group.rows == 0) {
        if (!adds) clear_rows(to, m, n);
        continue;
      }
      const Matrix tile{products.tile(thread), AB_FLOAT32, n, nullptr};
      const bool direct = Products::can_write(to.dtype, a, b, group.rows);
      const RightHandSide rhs{at(b, group.begin, begin), direct ? to : tile, adds};
      products.multiply(thread, at(a, group.begin, row), true, {&rhs, 1}, false, m, n, group.rows);
      if (!direct) products.kernels().store({products.tile(thread), n, m, n, nullptr}, nullptr, nullptr, nullptr, to);
    }
  });
}

void bias_gradient(Products& products, int threads, const GroupedRows& rows, const Matrix& m, int64_t N,
                   const float* scale, const ab_tensor* d_bias) {
  const int64_t parts = (N + kTileColumns - 1) / kTileColumns;
  parallel_for(threads, rows.E * parts, [&](int64_t task, int) {
    const int64_t e = task / parts;
    const int64_t begin = task % parts * kTileColumns;
    const int64_t n = std::min(kTileColumns, N - begin);
    const RowRange& group = rows.groups[e];
    float sum[kTileColumns];
    products.kernels().column_sums(at(m, group.begin, begin), group.rows, n,
                                   rows.tokens == nullptr ? nullptr : rows.tokens + group.begin,
                                   scale == nullptr ? nullptr : scale + group.begin, sum);
    products.kernels().store({sum, n, 1, n, nullptr}, nullptr, nullptr, nullptr, matrix_of(d_bias, e * N + begin, N));
  });
}

}  // namespace anabranch
