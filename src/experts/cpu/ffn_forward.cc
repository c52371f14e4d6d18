#include <algorithm>

#include "anabranch/experts.h"
#include "core/entry.h"
#include "core/threads.h"
#include "experts/check.h"
#include "experts/cpu/lora.h"
#include "experts/cpu/no_exchange.h"
#include "experts/cpu/phases.h"
#include "experts/cpu/quantized_operands.h"

namespace anabranch {
namespace {

struct Forward {
  const ab_expert_ffn_forward_args& args;
  FfnSizes s;
  Activation activation;
  bool fp8;
  IntermediateParts parts;          // of h and b_in
  IntermediateParts product_parts;  // of W_in as operand B
  int threads;
  Workspace workspace;
  GroupedRows rows;
  Matrix x;             // rows per token, or per row in expert order
  Matrix a;             // [R, F]; data nullptr: not requested
  QuantizedRows a_q;    // [R, F]; data nullptr: not requested
  WeightOperand w_in;   // [D, P F]
  WeightOperand w_out;  // [F, D]
  Factor lora_a_in;
  Factor lora_b_in;  // its columns are in the order of product_parts
  Factor lora_a_out;
  Factor lora_b_out;
  Matrix lora_u;  // [R, rank]
  Matrix lora_z;
  Products products;

  Forward(const ab_expert_ffn_forward_args& arguments, const FfnSizes& sizes, const ab_exec* exec,
          const ab_exec* memory)
      : args(arguments),
        s(sizes),
        activation(activation_of(args.activation, args.activation_alpha, args.activation_limit)),
        fp8(is_fp8(args)),
        parts{{s.P == 2, s.layout.interleaved}, s.F},
        product_parts{{s.P == 2, s.layout.interleaved && !fp8}, s.F},
        threads(threads_for(exec, s.R, (s.P + 1) * s.D * s.F)),
        workspace(memory),
        rows(workspace, s.R, s.E, args.slot_of_row != nullptr, args.weights != nullptr),
        x(take_x()),
        a(take_a()),
        a_q{take_quantized_a(), uses_power_of_two_scales(args)},
        lora_a_in(workspace, args.lora_a_in, s.dtype, s.E),
        lora_b_in(workspace, args.lora_b_in, s.dtype, s.E, product_parts.order.interleaved),
        lora_a_out(workspace, args.lora_a_out, s.dtype, s.E),
        lora_b_out(workspace, args.y != nullptr ? args.lora_b_out : nullptr, s.dtype, s.E),
        lora_u(take_low_rank_rows(workspace, args.lora_u, s.rank_in > 0, s.R, s.rank_in, s.dtype)),
        lora_z(take_low_rank_rows(workspace, args.lora_z, s.rank_out > 0, s.R, s.rank_out, s.dtype)),
        products(
            workspace, threads, s.R, std::max({s.D, s.P * s.F, s.rank_in, s.rank_out}),
            std::max(std::min(std::max({s.D, s.rank_in, s.rank_out}), kTileColumns), s.P * std::min(s.F, kTileColumns)),
            std::max(packed_block_bytes(args.w_in, s.layout.in_transposed, s.P * s.F, s.D),
                     packed_block_bytes(args.w_out, s.layout.out_transposed, s.D, s.F))) {
    take_weights();
  }

  int64_t x_rows() const { return s.K > 0 ? s.T : s.R; }

  Matrix take_x() {
    if (!fp8) return matrix_of(args.x, 0, s.D);
    return args.x_q != nullptr ? quantized_matrix(args.x_q, args.x_scales, s.D)
                               : take_quantized_rows(workspace, true, x_rows(), s.D);
  }
  Matrix take_a() {
    if (args.a != nullptr && args.a_scales == nullptr) return matrix_of(args.a, 0, s.F);
    return {workspace.take_rows(fp8 && s.rank_out == 0 ? 0 : s.R, s.F, s.dtype), s.dtype, s.F, nullptr};
  }
  Matrix take_quantized_a() {
    if (args.a_scales != nullptr) return quantized_matrix(args.a, args.a_scales, s.F);
    return take_quantized_rows(workspace, fp8 && args.y != nullptr, s.R, s.F);
  }
  void take_weights() {
    if (!fp8) {
      w_in = WeightOperand(workspace, args.w_in, args.w_in_block_scales, s.dtype, s.layout.in_transposed);
      w_out = WeightOperand(workspace, args.w_out, args.w_out_block_scales, s.dtype, s.layout.out_transposed);
      return;
    }
    const bool power_of_two = uses_power_of_two_scales(args);
    w_in = WeightOperand(workspace, args.w_in, args.w_in_q, args.w_in_scales, sizes_of_w_in(s), false, power_of_two);
    if (args.y == nullptr) return;
    w_out =
        WeightOperand(workspace, args.w_out, args.w_out_q, args.w_out_scales, sizes_of_w_out(s), false, power_of_two);
  }

  void quantize() {
    if (fp8 && args.x_q == nullptr) {
      quantize_rows(threads, matrix_of(args.x, 0, s.D), 1, x_rows(), s.D, {x, uses_power_of_two_scales(args)});
    }
    w_in.fill(threads);
    w_out.fill(threads);
    x.rows = rows.tokens;
  }

  void fill_factors() {
    copy_factor(threads, args.lora_a_in, args.lora_a_in_copy, args.group_sizes);
    copy_factor(threads, args.lora_b_in, args.lora_b_in_copy, args.group_sizes);
    copy_factor(threads, args.lora_a_out, args.lora_a_out_copy, args.group_sizes);
    copy_factor(threads, args.lora_b_out, args.lora_b_out_copy, args.group_sizes);
    for (const Factor* factor : {&lora_a_in, &lora_b_in, &lora_a_out, &lora_b_out})
      factor->fill(threads, args.group_sizes);
  }

  // u = scale_in x A_in.
  void compute_u() {
    if (s.rank_in == 0) return;
    multiply_low_rank(products, threads, rows, matrix_of(args.x, 0, s.D, rows.tokens), s.D, lora_a_in.matrices(false),
                      args.lora_scale_in, lora_u, s.rank_in);
  }

  // z = scale_out a A_out.
  void compute_z() {
    if (s.rank_out == 0) return;
    multiply_low_rank(products, threads, rows, a, s.F, lora_a_out.matrices(false), args.lora_scale_out, lora_z,
                      s.rank_out);
  }

  // h = x W_in + b_in; a = phi(h_gate, h_up), times the row's weight if it is applied early.
  void compute_up() {
    const ColumnParts pieces(s.F, rows.num_tiles, w_in.matrices().column_step());
    parallel_for(threads, rows.num_tiles * pieces.count(), [&](int64_t task, int thread) {
      const RowTile& tile = rows.tiles[task / pieces.count()];
      const int64_t part = task % pieces.count();
      const int64_t end = pieces.end(part);
      for (int64_t begin = pieces.begin(part); begin < end; begin += kTileColumns) {
        up_tile(tile, begin, std::min(kTileColumns, end - begin), thread);
      }
    });
  }

  // Computes columns begin..begin+n of gate and up. The tile has the column order of W_in: two parts, or interleaved.
  void up_tile(const RowTile& tile, int64_t begin, int64_t n, int thread) {
    const Matrix h_rows = matrix_of(args.h, 0, s.P * s.F);
    const Matrix h[2] = {parts.gate(h_rows, tile.begin, begin), parts.up(h_rows, tile.begin, begin)};
    if (tile.expert < 0) {
      parts.clear(h_rows, tile.begin, begin, tile.rows, n);
      clear_rows(at(a, tile.begin, begin), tile.rows, n);
      products.kernels().clear_quantized(columns_of(a_q, tile, begin), tile.rows, n);
      return;
    }
    float* c = products.tile(thread);
    const int64_t width = s.P * n;
    // Contiguous columns are one GEMM, if it fits a tile.
    const bool interleaved = product_parts.order.interleaved;
    const bool together = interleaved || n == s.F;
    const bool whole = s.P == 1 || (together && width <= kTileColumns);
    const int64_t first = product_parts.column(begin);
    const int64_t second = interleaved ? first + n : s.F + begin;
    const RightHandSide rhs[2] = {{columns_of_w_in(tile.expert, first), {c, AB_FLOAT32, width, nullptr}},
                                  {columns_of_w_in(tile.expert, second), {c + n, AB_FLOAT32, width, nullptr}}};
    products.multiply(thread, at(x, tile.begin, 0), false, {rhs, whole ? size_t{1} : 2}, w_in.matrices().transposed,
                      tile.rows, whole ? width : n, s.D);
    const LowRankProduct low_rank{lora_u, lora_b_in.matrices(false), s.rank_in};
    low_rank.add(products, thread, tile.expert, tile.begin, tile.rows, s.P * s.F, first, whole ? width : n, rhs[0].c);
    if (!whole) low_rank.add(products, thread, tile.expert, tile.begin, tile.rows, s.P * s.F, second, n, rhs[1].c);
    float memory[2 * kTileColumns];
    const float* bias = args.b_in == nullptr ? nullptr : memory;
    if (bias != nullptr) load_bias(tile.expert, begin, n, memory);
    products.kernels().intermediate(
        activation, parts.order, product_parts.order, {c, width, tile.rows, n, tokens_of(tile)}, bias,
        args.weight_early != 0 ? scale_of(tile) : nullptr, h, at(a, tile.begin, begin), columns_of(a_q, tile, begin));
  }

  // Loads b_in for columns begin..begin+n of gate and up, in the order of the tile.
  void load_bias(int64_t expert, int64_t begin, int64_t n, float* to) const {
    const int64_t bias_columns = s.P * s.F;
    const auto load = [&](int64_t column, int64_t count, float* values) {
      bias_row(products.kernels(), args.b_in, expert, bias_columns, column, count, values);
    };
    if (!parts.order.interleaved) {
      load(begin, n, to);
      if (s.P == 2) load(s.F + begin, n, to + n);
    } else if (product_parts.order.interleaved) {
      load(2 * begin, 2 * n, to);
    } else {
      float pairs[2 * kTileColumns];
      load(2 * begin, 2 * n, pairs);
      for (int64_t j = 0; j < n; ++j) {
        to[j] = pairs[2 * j];
        to[n + j] = pairs[2 * j + 1];
      }
    }
  }

  // y = a W_out + b_out, times the row's weight. If the weight is applied early, `a` already contains it.
  void compute_down() {
    if (args.y == nullptr) return;
    const float* late = args.weight_early != 0 ? nullptr : rows.scale;
    RowProduct product{fp8 ? a_q.q : a, w_out.matrices(), matrix_of(args.y, 0, s.D), s.D, s.F, late,
                       args.b_out,      rows.scale};
    product.low_rank = {lora_z, lora_b_out.matrices(false), s.rank_out};
    multiply_grouped_rows(products, threads, rows, product);
  }

  // W_in of an expert from one of its P F columns on: [D, columns], or its transpose as stored.
  Matrix columns_of_w_in(int64_t expert, int64_t column) const {
    const Matrix w = w_in.matrices().expert_matrix(expert, s.P * s.F, s.D);
    return w_in.matrices().transposed ? at(w, column, 0) : at(w, 0, column);
  }
  static QuantizedRows columns_of(const QuantizedRows& rows, const RowTile& tile, int64_t begin) {
    return {at(rows.q, tile.begin, begin), rows.power_of_two};
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
  AB_RETURN_IF_ERROR(check_no_exchange("arriving", args->arriving));
  FfnSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  return report_workspace(Forward(*args, s, exec, nullptr).workspace.size(), bytes);
}

ab_status ab_expert_ffn_forward(const ab_expert_ffn_forward_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  AB_RETURN_IF_ERROR(check_no_exchange("arriving", args->arriving));
  FfnSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  Forward op(*args, s, exec, exec);
  AB_RETURN_IF_ERROR(Products::check(op.x.dtype, op.x.dtype));
  if (s.rank_in > 0 || s.rank_out > 0) AB_RETURN_IF_ERROR(Products::check(s.dtype, s.dtype));
  AB_RETURN_IF_ERROR(check_workspace(exec, op.workspace.size()));
  op.rows.fill(op.threads, args->group_sizes, args->slot_of_row, args->weights, s.T, s.K);
  op.quantize();
  op.fill_factors();
  op.compute_u();
  op.compute_up();
  op.compute_z();
  op.compute_down();
  return op.products.status();
}

}  // extern "C"
