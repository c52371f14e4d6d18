#include <algorithm>

#include "anabranch/experts.h"
#include "core/entry.h"
#include "core/threads.h"
#include "experts/check.h"
#include "experts/cpu/phases.h"

namespace anabranch {
namespace {

struct Forward {
  const ab_expert_ffn_forward_args& args;
  FfnSizes s;
  Activation activation;
  HiddenParts parts;
  int threads;
  Workspace workspace;
  GroupedRows rows;
  Matrix a;  // [R, F]
  Products products;

  Forward(const ab_expert_ffn_forward_args& arguments, const FfnSizes& sizes, const ab_exec* exec,
          const ab_exec* memory)
      : args(arguments),
        s(sizes),
        activation(activation_of(args.activation, args.activation_alpha, args.activation_limit)),
        parts{{s.P == 2, s.layout.interleaved}, s.F},
        threads(threads_for(exec, s.R, (s.P + 1) * s.D * s.F)),
        workspace(memory),
        rows(workspace, s.R, s.E, args.slot_of_row != nullptr, args.weights != nullptr),
        a(args.a != nullptr ? matrix_of(args.a, 0, s.F) : row_buffer(s.F)),
        products(workspace, threads, std::max(s.D, s.P * s.F),
                 std::max(std::min(s.D, kTileColumns), s.P * std::min(s.F, kTileColumns))) {}

  Matrix row_buffer(int64_t columns) {
    return {workspace.take_rows(s.R, columns, args.x->dtype), args.x->dtype, columns, nullptr};
  }

  // h = x W_in + b_in;  a = phi(h_gate, h_up), times the row's weight where it comes early.
  void up() {
    const ColumnParts pieces(s.F, rows.num_tiles);
    parallel_for(threads, rows.num_tiles * pieces.count(), [&](int64_t task, int thread) {
      const RowTile& tile = rows.tiles[task / pieces.count()];
      const int64_t part = task % pieces.count();
      const int64_t end = pieces.end(part);
      for (int64_t begin = pieces.begin(part); begin < end; begin += kTileColumns) {
        up_tile(tile, begin, std::min(kTileColumns, end - begin), thread);
      }
    });
  }

  // Columns begin..begin+n of gate and up, in the tile as hidden rows have them: side by side, or alternating.
  void up_tile(const RowTile& tile, int64_t begin, int64_t n, int thread) {
    const Matrix kept = matrix_of(args.h, 0, s.P * s.F);
    const Matrix h[2] = {parts.gate(kept, tile.begin, begin), parts.up(kept, tile.begin, begin)};
    if (tile.expert < 0) {
      parts.clear(kept, tile.begin, begin, tile.rows, n);
      clear_rows(at(a, tile.begin, begin), tile.rows, n);
      return;
    }
    float* c = products.tile(thread);
    const int64_t width = s.P * n;
    // Columns that stand together are one product, if it is not too wide.
    const bool together = s.layout.interleaved || n == s.F;
    const bool whole = s.P == 1 || (together && width <= kTileColumns);
    const int64_t first = parts.column(begin);
    const int64_t second = s.layout.interleaved ? first + n : s.F + begin;
    const RightHandSide rhs[2] = {{columns_of_w_in(tile.expert, first), {c, AB_FLOAT32, width, nullptr}},
                                  {columns_of_w_in(tile.expert, second), {c + n, AB_FLOAT32, width, nullptr}}};
    products.multiply(thread, at(matrix_of(args.x, 0, s.D, rows.tokens), tile.begin, 0), false,
                      {rhs, whole ? size_t{1} : 2}, s.layout.in_transposed, tile.rows, whole ? width : n, s.D);
    float memory[2 * kTileColumns];
    const float* bias = nullptr;
    if (args.b_in != nullptr) {
      const int64_t of_expert = s.P * s.F;
      bias_row(products.kernels(), args.b_in, tile.expert, of_expert, first, n, memory);
      if (s.P == 2) bias_row(products.kernels(), args.b_in, tile.expert, of_expert, second, n, memory + n);
      bias = memory;
    }
    products.kernels().hidden(activation, parts.order, {c, width, tile.rows, n, tokens_of(tile)}, bias,
                              args.weight_early != 0 ? scale_of(tile) : nullptr, h, at(a, tile.begin, begin));
  }

  // y = a W_out + b_out, times the row's weight; `a` has it already where it comes early.
  void down() {
    if (args.y == nullptr) return;
    const float* late = args.weight_early != 0 ? nullptr : rows.scale;
    multiply_grouped_rows(
        products, threads, rows,
        {a, {args.w_out, s.layout.out_transposed}, matrix_of(args.y, 0, s.D), s.D, s.F, late, args.b_out, rows.scale});
  }

  // The matrix of an expert from one of its P F columns on, [D, columns], or transposed as it is stored.
  Matrix columns_of_w_in(int64_t expert, int64_t column) const {
    const Matrix w = matrix_of(args.w_in, expert * s.D * s.P * s.F, s.layout.in_transposed ? s.D : s.P * s.F);
    return s.layout.in_transposed ? at(w, column, 0) : at(w, 0, column);
  }
  const int32_t* tokens_of(const RowTile& tile) const {
    return rows.tokens == nullptr ? nullptr : rows.tokens + tile.begin;
  }
  const float* scale_of(const RowTile& tile) const { return rows.scale == nullptr ? nullptr : rows.scale + tile.begin; }
};

}  // namespace
}  // namespace anabranch

using namespace anabranch;

extern "C" {

ab_status ab_expert_ffn_forward_workspace(const ab_expert_ffn_forward_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  FfnSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  return report_workspace(Forward(*args, s, exec, nullptr).workspace.size(), bytes);
}

ab_status ab_expert_ffn_forward(const ab_expert_ffn_forward_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  FfnSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  AB_RETURN_IF_ERROR(Products::check(args->x->dtype, args->x->dtype));
  Forward op(*args, s, exec, exec);
  AB_RETURN_IF_ERROR(check_workspace(exec, op.workspace.size()));
  op.rows.fill(op.threads, args->group_sizes, args->slot_of_row, args->weights, s.T, s.K);
  op.up();
  op.down();
  return op.products.status();
}

}  // extern "C"
