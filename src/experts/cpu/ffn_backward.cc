#include <algorithm>

#include "anabranch/experts.h"
#include "core/entry.h"
#include "core/threads.h"
#include "experts/check.h"
#include "experts/cpu/lora.h"
#include "experts/cpu/no_exchange.h"
#include "experts/cpu/phases.h"
#include "experts/cpu/quantized_operands.h"
#include "experts/lora_check.h"

namespace anabranch {
namespace {

struct Backward {
  const ab_expert_ffn_backward_args& args;
  FfnSizes s;
  Activation activation;
  bool fp8;
  IntermediateParts parts;
  int threads;
  Workspace workspace;
  GroupedRows rows;
  Matrix weighted_a;    // w a, [R, F]
  Matrix dh;            // [R, P F]
  QuantizedRows dh_q;   // [R, P F], gate columns before up columns; data nullptr: not requested
  Matrix d_y;           // operand A of da'; read only if h is given
  WeightOperand w_out;  // W_out^T
  WeightOperand w_in;   // W_in^T
  float* dots;          // [parts, R]: <da', a> over the columns of each part
  Factor lora_a_in;
  Factor lora_b_in;  // its columns are in the order of h
  Factor lora_a_out;
  Factor lora_b_out;
  Matrix lora_u;  // [R, rank], like the three below
  Matrix lora_z;
  Matrix lora_v_in;
  Matrix lora_v_out;
  InterleavedGradient d_lora_b_in;
  Products products;

  Backward(const ab_expert_ffn_backward_args& arguments, const FfnSizes& sizes, const ab_exec* exec,
           const ab_exec* memory)
      : args(arguments),
        s(sizes),
        activation(activation_of(args.activation, args.activation_alpha, args.activation_limit)),
        fp8(is_fp8(args)),
        parts{{s.P == 2, s.layout.interleaved}, s.F},
        threads(threads_for(exec, s.R, 2 * (s.P + 1) * s.D * s.F)),
        workspace(memory),
        rows(workspace, s.R, s.E, args.slot_of_row != nullptr, args.weights != nullptr),
        weighted_a(args.weighted_a != nullptr ? matrix_of(args.weighted_a, 0, s.F)
                                              : row_buffer(needs_weighted_a(args), s.F)),
        dh(args.dh != nullptr ? matrix_of(args.dh, 0, s.P * s.F) : row_buffer(needs_dh(), s.P * s.F)),
        dh_q{args.dh_q != nullptr ? quantized_matrix(args.dh_q, args.dh_scales, s.P * s.F)
                                  : take_quantized_rows(workspace, fp8 && args.dx_rows != nullptr, s.R, s.P * s.F),
             uses_power_of_two_scales(args)},
        d_y(take_d_y()),
        dots(args.d_weights == nullptr ? nullptr : workspace.take<float>(max_parts() * s.R)),
        lora_a_in(factor(args.lora_a_in, args.dx_rows != nullptr || computes_u())),
        lora_b_in(factor(args.lora_b_in, computes_v_in(), parts.order.interleaved)),
        lora_a_out(factor(args.lora_a_out, args.h != nullptr || args.d_lora_b_out != nullptr)),
        lora_b_out(factor(args.lora_b_out, computes_v_out())),
        lora_u(low_rank_rows(args.lora_u, args.d_lora_b_in != nullptr, s.rank_in)),
        lora_z(low_rank_rows(nullptr, args.d_lora_b_out != nullptr, s.rank_out)),
        lora_v_in(low_rank_rows(args.lora_v_in, needs_v_in(), s.rank_in)),
        lora_v_out(low_rank_rows(args.lora_v_out, needs_v_out(), s.rank_out)),
        d_lora_b_in(workspace, args.d_lora_b_in, args.d_lora_b_in != nullptr && parts.order.interleaved),
        products(workspace, threads, s.R, widest(), std::min(widest(), kTileColumns),
                 std::max(packed_block_bytes(args.w_in, !s.layout.in_transposed, s.D, s.P * s.F),
                          packed_block_bytes(args.w_out, !s.layout.out_transposed, s.F, s.D))) {
    take_weights();
  }

  int64_t widest() const { return std::max({s.D, s.P * s.F, s.rank_in, s.rank_out}); }

  bool computes_u() const { return args.d_lora_b_in != nullptr && args.lora_u == nullptr; }
  bool needs_v_in() const {
    return s.rank_in > 0 && (args.dx_rows != nullptr || args.d_lora_a_in != nullptr || args.lora_v_in != nullptr);
  }
  bool computes_v_in() const { return needs_v_in() && (args.h != nullptr || args.lora_v_in == nullptr); }
  bool needs_v_out() const { return s.rank_out > 0 && (args.h != nullptr || args.d_lora_a_out != nullptr); }
  bool computes_v_out() const { return needs_v_out() && (args.h != nullptr || args.lora_v_out == nullptr); }

  bool needs_dh() const {
    return (args.dx_rows != nullptr && !fp8) || args.d_w_in != nullptr || args.d_b_in != nullptr ||
           args.d_lora_b_in != nullptr || computes_v_in();
  }
  int64_t d_out_rows() const { return args.d_out == nullptr ? 0 : args.d_out->shape[0]; }
  bool quantizes_d_out() const { return fp8 && args.h != nullptr && args.d_out_q == nullptr; }

  Matrix take_d_y() {
    if (!fp8) return matrix_of(args.d_out, 0, s.D);
    return args.d_out_q != nullptr ? quantized_matrix(args.d_out_q, args.d_out_scales, s.D)
                                   : take_quantized_rows(workspace, quantizes_d_out(), d_out_rows(), s.D);
  }

  void take_weights() {
    if (!fp8) {
      w_out = WeightOperand(workspace, args.w_out, args.w_out_block_scales, s.dtype, !s.layout.out_transposed);
      w_in = WeightOperand(workspace, args.w_in, args.w_in_block_scales, s.dtype, !s.layout.in_transposed);
      return;
    }
    const bool power_of_two = uses_power_of_two_scales(args);
    if (args.h != nullptr) {
      w_out =
          WeightOperand(workspace, args.w_out, args.w_out_q, args.w_out_scales, sizes_of_w_out(s), true, power_of_two);
    }
    if (args.dx_rows != nullptr) {
      w_in = WeightOperand(workspace, args.w_in, args.w_in_q, args.w_in_scales, sizes_of_w_in(s), true, power_of_two);
    }
  }

  void quantize() {
    if (quantizes_d_out()) {
      quantize_rows(threads, matrix_of(args.d_out, 0, s.D), 1, d_out_rows(), s.D, {d_y, dh_q.power_of_two});
    }
    w_out.fill(threads);
    w_in.fill(threads);
    d_y.rows = rows.tokens;
    if (!fp8 || args.h != nullptr || args.dx_rows == nullptr || args.dh_q != nullptr) return;
    for (int64_t part = 0; part < s.P; ++part) {
      const Matrix from = part == 0 ? parts.gate(dh, 0, 0) : parts.up(dh, 0, 0);
      quantize_rows(threads, from, parts.order.step(), s.R, s.F, part_of_dh_q(0, part, 0));
    }
  }

  QuantizedRows part_of_dh_q(int64_t row, int64_t part, int64_t begin) const {
    return {at(dh_q.q, row, part * s.F + begin), dh_q.power_of_two};
  }

  Matrix row_buffer(bool needed, int64_t columns) {
    return {workspace.take_rows(needed ? s.R : 0, columns, args.x->dtype), args.x->dtype, columns, nullptr};
  }

  Factor factor(const ab_tensor* tensor, bool needed, bool interleaved = false) {
    return {workspace, needed ? tensor : nullptr, s.dtype, s.E, interleaved};
  }

  Matrix low_rank_rows(const ab_tensor* tensor, bool needed, int64_t rank) {
    return take_low_rank_rows(workspace, tensor, needed, s.R, rank, s.dtype);
  }

  int64_t max_parts() const { return std::max<int64_t>(ColumnParts(s.F, 1).count(), 1); }

  void fill_factors() {
    for (const Factor* factor : {&lora_a_in, &lora_b_in, &lora_a_out, &lora_b_out})
      factor->fill(threads, args.group_sizes);
  }

  // v_out = scale_out d_y B_out^T.
  void compute_v_out() {
    if (!computes_v_out()) return;
    multiply_low_rank(products, threads, rows, d_out(), s.D, lora_b_out.matrices(true), args.lora_scale_out, lora_v_out,
                      s.rank_out);
  }

  // v_in = scale_in dh B_in^T.
  void compute_v_in() {
    if (!computes_v_in()) return;
    multiply_low_rank(products, threads, rows, dh, s.P * s.F, lora_b_in.matrices(true), args.lora_scale_in, lora_v_in,
                      s.rank_in);
  }

  // da' = d_y W_out^T + v_out A_out^T, dh = phi'(h) w da', w a, and partial sums of <da', a>.
  void intermediate() {
    const ColumnParts pieces(s.F, rows.num_tiles, w_out.matrices().column_step());
    if (dots != nullptr && pieces.count() == 0) std::fill_n(dots, s.R, 0.0f);  // F = 0: <da', a> has no terms
    parallel_for(threads, rows.num_tiles * pieces.count(), [&](int64_t task, int thread) {
      const RowTile& tile = rows.tiles[task / pieces.count()];
      const int64_t part = task % pieces.count();
      float* dot = dots == nullptr ? nullptr : dots + part * s.R + tile.begin;
      if (dot != nullptr) std::fill_n(dot, tile.rows, 0.0f);
      const int64_t end = pieces.end(part);
      for (int64_t begin = pieces.begin(part); begin < end; begin += kTileColumns) {
        intermediate_tile(tile, begin, std::min(kTileColumns, end - begin), dot, thread);
      }
    });
    if (args.d_weights != nullptr) write_d_weights(pieces.count());
  }

  void intermediate_tile(const RowTile& tile, int64_t begin, int64_t n, float* dot, int thread) {
    if (tile.expert < 0) {
      parts.clear(dh, tile.begin, begin, tile.rows, n);
      for (int64_t part = 0; part < s.P; ++part) {
        products.kernels().clear_quantized(part_of_dh_q(tile.begin, part, begin), tile.rows, n);
      }
      if (weighted_a.data != nullptr) clear_rows(at(weighted_a, tile.begin, begin), tile.rows, n);
      return;
    }
    float* c = products.tile(thread);
    const bool transposed = w_out.matrices().transposed;
    const Matrix w = w_out.matrices().expert_matrix(tile.expert, s.F, s.D);
    const RightHandSide rhs{transposed ? at(w, begin, 0) : at(w, 0, begin), {c, AB_FLOAT32, n, nullptr}};
    products.multiply(thread, at(d_y, tile.begin, 0), false, {&rhs, 1}, transposed, tile.rows, n, s.D);
    const LowRankProduct low_rank{lora_v_out, lora_a_out.matrices(true), s.rank_out};
    low_rank.add(products, thread, tile.expert, tile.begin, tile.rows, s.F, begin, n, rhs.c);
    const Matrix h_rows = matrix_of(args.h, 0, s.P * s.F);
    const Matrix h[2] = {parts.gate(h_rows, tile.begin, begin), parts.up(h_rows, tile.begin, begin)};
    const Matrix d_parts[2] = {parts.gate(dh, tile.begin, begin), parts.up(dh, tile.begin, begin)};
    const QuantizedRows q_parts[2] = {part_of_dh_q(tile.begin, 0, begin), part_of_dh_q(tile.begin, s.P - 1, begin)};
    const int32_t* tokens = rows.tokens == nullptr ? nullptr : rows.tokens + tile.begin;
    products.kernels().intermediate_backward(activation, parts.order, {c, n, tile.rows, n, tokens},
                                             rows.scale == nullptr ? nullptr : rows.scale + tile.begin, h, d_parts,
                                             q_parts, at(weighted_a, tile.begin, begin), dot);
  }

  // d_w = <da', a> + <d_y, b_out>; zero for assignments without a row.
  void write_d_weights(int64_t parts) {
    parallel_for(threads, rows.num_tiles, [&](int64_t i, int) {
      const RowTile& tile = rows.tiles[i];
      float* dot = dots + tile.begin;
      for (int64_t part = 1; part < parts; ++part) {
        for (int64_t r = 0; r < tile.rows; ++r) dot[r] += dots[part * s.R + tile.begin + r];
      }
      for (int64_t begin = 0; begin < s.D && args.b_out != nullptr && tile.expert >= 0; begin += kTileColumns) {
        const int64_t n = std::min(kTileColumns, s.D - begin);
        float memory[kTileColumns];
        const float* bias = bias_row(products.kernels(), args.b_out, tile.expert, s.D, begin, n, memory);
        products.kernels().row_dots(at(d_out(), tile.begin, begin), tile.rows, n, bias, dot);
      }
    });
    float* to = data<float>(args.d_weights);
    if (args.slot_of_row == nullptr) {
      std::copy_n(dots, s.R, to);
      return;
    }
    std::fill_n(to, s.slots(), 0.0f);
    const int32_t* slots = data<const int32_t>(args.slot_of_row);
    for (int64_t i = 0; i < rows.num_tiles; ++i) {
      const RowTile& tile = rows.tiles[i];
      for (int64_t r = tile.begin; r < tile.begin + tile.rows && tile.expert >= 0; ++r) {
        if (rows.tokens[r] >= 0) to[slots[r]] = dots[r];
      }
    }
  }

  // dW_out = (w a)^T d_y;  db_out = sum w d_y;  dW_in = x^T dh;  db_in = sum dh.
  void weights() {
    const Matrix x = matrix_of(args.x, 0, s.D, rows.tokens);
    if (args.d_w_out != nullptr) {
      gradient_of_matrix(s.layout.out_transposed, weighted_a, s.F, d_out(), s.D, args.d_w_out);
    }
    if (args.d_b_out != nullptr) bias_gradient(products, threads, rows, d_out(), s.D, rows.scale, args.d_b_out);
    if (args.d_w_in != nullptr) gradient_of_matrix(s.layout.in_transposed, x, s.D, dh, s.P * s.F, args.d_w_in);
    if (args.d_b_in != nullptr) bias_gradient(products, threads, rows, dh, s.P * s.F, nullptr, args.d_b_in);
  }

  // dA_out = (w a)^T v_out;  dB_out = z^T d_y;  dA_in = x^T v_in;  dB_in = u^T dh.
  void factors() {
    const Matrix x = matrix_of(args.x, 0, s.D, rows.tokens);
    if (args.d_lora_a_out != nullptr) {
      gradient_of_matrix(false, weighted_a, s.F, lora_v_out, s.rank_out, args.d_lora_a_out);
    }
    if (args.d_lora_b_out != nullptr) {
      multiply_low_rank(products, threads, rows, weighted_a, s.F, lora_a_out.matrices(false), args.lora_scale_out,
                        lora_z, s.rank_out);
      gradient_of_matrix(false, lora_z, s.rank_out, d_out(), s.D, args.d_lora_b_out);
    }
    if (args.d_lora_a_in != nullptr) gradient_of_matrix(false, x, s.D, lora_v_in, s.rank_in, args.d_lora_a_in);
    if (args.d_lora_b_in == nullptr) return;
    if (computes_u()) {
      multiply_low_rank(products, threads, rows, x, s.D, lora_a_in.matrices(false), args.lora_scale_in, lora_u,
                        s.rank_in);
    }
    if (!parts.order.interleaved) {
      gradient_of_matrix(false, lora_u, s.rank_in, dh, s.P * s.F, args.d_lora_b_in);
      return;
    }
    weight_gradient(products, threads, rows, lora_u, s.rank_in, dh, s.P * s.F, false, d_lora_b_in.interleaved());
    d_lora_b_in.store(threads, args.accumulate != 0);
  }

  // Computes a^T b [M, N] per expert, or its transpose [N, M].
  void gradient_of_matrix(bool transposed, const Matrix& a, int64_t M, const Matrix& b, int64_t N,
                          const ab_tensor* to) {
    const bool adds = args.accumulate != 0;
    if (transposed) {
      weight_gradient(products, threads, rows, b, N, a, M, adds, to);
    } else {
      weight_gradient(products, threads, rows, a, M, b, N, adds, to);
    }
  }

  // dx = dh W_in^T + v_in A_in^T.
  void inputs() {
    if (args.dx_rows == nullptr) return;
    RowProduct product{fp8 ? dh_q.q : dh, w_in.matrices(), matrix_of(args.dx_rows, 0, s.D), s.D, s.P * s.F};
    product.low_rank = {lora_v_in, lora_a_in.matrices(true), s.rank_in};
    multiply_grouped_rows(products, threads, rows, product);
  }

  // d_out with one row per row of the experts: that of the row's token.
  Matrix d_out() const { return matrix_of(args.d_out, 0, s.D, rows.tokens); }
};

}  // namespace
}  // namespace anabranch

using namespace anabranch;

extern "C" {

ab_status ab_expert_ffn_backward_workspace(const ab_expert_ffn_backward_args* args, const ab_exec* exec,
                                           size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  AB_RETURN_IF_ERROR(check_no_exchange("arriving", args->arriving));
  FfnSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  return report_workspace(Backward(*args, s, exec, nullptr).workspace.size(), bytes);
}

ab_status ab_expert_ffn_backward(const ab_expert_ffn_backward_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  AB_RETURN_IF_ERROR(check_no_exchange("arriving", args->arriving));
  FfnSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  AB_RETURN_IF_ERROR(Products::check(args->x->dtype, args->x->dtype));
  Backward op(*args, s, exec, exec);
  AB_RETURN_IF_ERROR(check_workspace(exec, op.workspace.size()));
  op.rows.fill(op.threads, args->group_sizes, args->slot_of_row, args->weights, s.T, s.K);
  op.quantize();
  op.fill_factors();
  op.compute_v_out();
  if (args->h != nullptr) op.intermediate();
  op.compute_v_in();
  op.weights();
  op.factors();
  op.inputs();
  return op.products.status();
}

}  // extern "C"
