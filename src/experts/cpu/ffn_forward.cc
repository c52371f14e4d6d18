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
  int threads;
  Workspace workspace;
  GroupedRows rows;
  Matrix a;  // [R, F]
  Products products;

  Forward(const ab_expert_ffn_forward_args& arguments, const FfnSizes& sizes, const ab_exec* exec,
          const ab_exec* memory)
      : args(arguments),
        s(sizes),
        threads(threads_for(exec, s.R, (s.P + 1) * s.D * s.F)),
        workspace(memory),
        rows(workspace, s.R, s.E, args.slot_of_row != nullptr, args.weights != nullptr),
        a(args.a != nullptr ? matrix_of(args.a, 0, s.F) : row_buffer(s.F)),
        products(workspace, threads, std::max(s.D, s.P * s.F),
                 std::max(std::min(s.D, kTileColumns), s.P * std::min(s.F, kTileColumns))) {}

  Matrix row_buffer(int64_t columns) {
    return {workspace.take_rows(s.R, columns, args.x->dtype), args.x->dtype, columns, nullptr};
  }

  // h = x W_in + b_in;  a = act(h_gate) h_up, times the row's weight where it comes early.
  void up() {
    const ColumnParts parts(s.F, rows.num_tiles);
    parallel_for(threads, rows.num_tiles * parts.count(), [&](int64_t task, int thread) {
      const RowTile& tile = rows.tiles[task / parts.count()];
      const int64_t part = task % parts.count();
      const int64_t end = parts.end(part);
      for (int64_t begin = parts.begin(part); begin < end; begin += kTileColumns) {
        up_tile(tile, begin, std::min(kTileColumns, end - begin), thread);
      }
    });
  }

  // Columns begin..begin+n of gate and up stand side by side in the tile.
  void up_tile(const RowTile& tile, int64_t begin, int64_t n, int thread) {
    const Matrix h[2] = {h_part(0, tile.begin, begin), h_part(s.P - 1, tile.begin, begin)};
    if (tile.expert < 0) {
      for (const Matrix& part : {h[0], h[1], at(a, tile.begin, begin)}) {
        if (part.data != nullptr) clear_rows(part, tile.rows, n);
      }
      return;
    }
    float* c = products.tile(thread);
    const Matrix w = matrix_of(args.w_in, tile.expert * s.D * s.P * s.F, s.P * s.F);
    const int64_t width = s.P * n;
    const RightHandSide rhs[2] = {{at(w, 0, begin), {c, AB_FLOAT32, width, nullptr}},
                                  {at(w, 0, s.F + begin), {c + n, AB_FLOAT32, width, nullptr}}};
    const bool whole = n == s.F && width <= kTileColumns;  // gate and up are one matrix as they are stored
    products.multiply(thread, at(matrix_of(args.x, 0, s.D, rows.tokens), tile.begin, 0), false,
                      {rhs, whole ? 1 : static_cast<size_t>(s.P)}, false, tile.rows, whole ? width : n, s.D);
    float memory[2 * kTileColumns];
    const float* bias = nullptr;
    for (int64_t part = 0; part < s.P && args.b_in != nullptr; ++part) {
      bias_row(products.kernels(), args.b_in, tile.expert * s.P + part, s.F, begin, n, memory + part * n);
      bias = memory;
    }
    products.kernels().hidden(args.activation, s.P == 2, {c, width, tile.rows, n, tokens_of(tile)}, bias,
                              args.weight_early != 0 ? scale_of(tile) : nullptr, h, at(a, tile.begin, begin));
  }

  // y = a W_out + b_out, times the row's weight; `a` has it already where it comes early.
  void down() {
    if (args.y == nullptr) return;
    const float* late = args.weight_early != 0 ? nullptr : rows.scale;
    multiply_grouped_rows(products, threads, rows,
                          {a, {args.w_out, false}, matrix_of(args.y, 0, s.D), s.D, s.F, late, args.b_out, rows.scale});
  }

  Matrix h_part(int64_t part, int64_t row, int64_t column) const {
    return at(matrix_of(args.h, part * s.F, s.P * s.F), row, column);
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
