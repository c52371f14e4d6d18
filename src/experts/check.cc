#include "experts/check.h"

#include <cmath>

#include "dispatch/maps.h"
#include "experts/block_scale.h"
#include "experts/lora_check.h"
#include "experts/packed_check.h"
#include "experts/precision.h"

namespace anabranch {
namespace {

// Allows only the dtype of x.
Dtypes dtype_of(const ab_tensor* x) { return dtype_bit(static_cast<ab_dtype>(x->dtype)); }

Dtypes dtype_of(const FfnSizes& s) { return dtype_bit(static_cast<ab_dtype>(s.dtype)); }

// Dtypes allowed for the results of a GEMM of x. Quantised x does not restrict them.
Dtypes dtype_of_results(const ab_tensor* x) { return x->dtype == AB_FLOAT8_E4M3 ? kFloats : dtype_of(x); }

ab_status check_flag(const char* name, int32_t value) {
  return value == 0 || value == 1 ? ok() : AB_INVALID("%s: got %d, expected 0 or 1", name, value);
}

ab_status check_fp8_scales(int32_t value) {
  if (value == AB_FP8_SCALES_FLOAT32 || value == AB_FP8_SCALES_POWER_OF_TWO) return ok();
  return AB_INVALID("fp8_scales: got %d, expected %d or %d, an ab_fp8_scales", value, AB_FP8_SCALES_FLOAT32,
                    AB_FP8_SCALES_POWER_OF_TWO);
}

template <class Args>
ab_status check_precision(const Args* args) {
  if (args->precision < AB_PRECISION_HIGHEST || args->precision > AB_PRECISION_FP8) {
    return AB_INVALID("precision: got %d, expected %d to %d, an ab_precision", args->precision, AB_PRECISION_HIGHEST,
                      AB_PRECISION_FP8);
  }
  AB_RETURN_IF_ERROR(check_fp8_scales(args->fp8_scales));
  if (is_fp8(*args) || args->fp8_scales == 0) return ok();
  return AB_INVALID("fp8_scales: got %d, expected 0 without AB_PRECISION_FP8", args->fp8_scales);
}

// Requires an axis to consist of whole blocks of one scale each.
ab_status check_blocks(const char* name, const char* axis, int64_t size) {
  if (size % kScaleBlock == 0) return ok();
  return AB_INVALID("%s: got %s=%lld, expected a multiple of %lld to be quantised", name, axis,
                    static_cast<long long>(size), static_cast<long long>(kScaleBlock));
}
int64_t blocks(int64_t size) { return size / kScaleBlock; }

ab_status check_weight_early(int32_t value, const ab_tensor* weights) {
  if (value == 0 || (value == 1 && weights != nullptr)) return ok();
  return AB_INVALID("weight_early: got %d, expected 0, or 1 together with weights", value);
}

// Requires an argument to be NULL where the other arguments give it no use.
ab_status check_unused(const char* name, const ab_tensor* tensor, const char* when) {
  return tensor == nullptr ? ok() : AB_INVALID("%s: got a tensor, expected NULL %s", name, when);
}

int64_t axis(const ab_tensor* tensor, int i) { return tensor->shape[i]; }

// Requires quantised values and their scales together.
ab_status check_quantized(const char* name, const ab_tensor* q, std::initializer_list<Axis> shape,
                          const char* scales_name, const ab_tensor* scales, std::initializer_list<Axis> scales_shape) {
  if (q == nullptr && scales == nullptr) return ok();
  AB_RETURN_IF_ERROR(check_tensor(name, q, kE4m3, shape));
  return check_tensor(scales_name, scales, kFloat32, scales_shape);
}

// Requires scales for e4m3 tensors and refuses them for all others.
ab_status check_scales_of(const char* name, const ab_tensor* tensor, const char* scales_name, const ab_tensor* scales,
                          std::initializer_list<Axis> scales_shape) {
  if (tensor != nullptr && tensor->dtype == AB_FLOAT8_E4M3) {
    return check_tensor(scales_name, scales, kFloat32, scales_shape);
  }
  if (scales == nullptr) return ok();
  return AB_INVALID("%s: got a tensor, expected NULL if %s is not float8_e4m3", scales_name, name);
}

constexpr const char* kWithoutFp8 = "without AB_PRECISION_FP8";

// Refuses scales without packed weights.
ab_status check_without_scales(const char* name, const char* scales_name, const ab_tensor* scales) {
  if (scales == nullptr) return ok();
  return AB_INVALID("%s: got a tensor, expected NULL since %s is not packed", scales_name, name);
}

const ab_tensor* block_scales_of(const ab_grouped_matmul_args*) { return nullptr; }
const ab_tensor* block_scales_of(const ab_grouped_matmul_combine_args* args) { return args->w_block_scales; }

// Packed dtypes that w may have. With FP8, FP8 blocks are w_q.
Dtypes packed_dtypes(const ab_grouped_matmul_args*) { return 0; }
Dtypes packed_dtypes(const ab_grouped_matmul_combine_args* args) {
  return !is_fp8(*args) && is_packed(args->w) ? kPacked : 0;
}

// Checks packed weights [E, M, C] of a GEMM.
ab_status check_packed_product(const ab_tensor& w, const ab_tensor* scales, int64_t E) {
  constexpr Order kRowMajor{{0, 1, 2}};
  const int64_t M = axis(&w, 1);
  const int64_t C = axis(&w, 2);
  if (w.dtype == AB_FLOAT4_E2M1X2) {
    AB_RETURN_IF_ERROR(check_packed_axis("w", "C", C, kMxBlock));
    return check_block_scales("w_block_scales", scales, w.dtype, {{"E", E}, {"M", M}, {"C/32", C / kMxBlock}},
                              kRowMajor);
  }
  AB_RETURN_IF_ERROR(check_packed_axis("w", "M", M, kScaleBlock));
  AB_RETURN_IF_ERROR(check_packed_axis("w", "C", C, kScaleBlock));
  return check_block_scales("w_block_scales", scales, w.dtype, {{"E", E}, {"M/128", blocks(M)}, {"C/128", blocks(C)}},
                            kRowMajor);
}

// Checks the weights [D, N] of a GEMM with rows x.
template <class Args>
ab_status check_product_weights(const Args* args, GroupedSizes* s) {
  const bool transposed = args->transpose_w != 0;
  if (args->w != nullptr || args->w_q == nullptr) {
    const Dtypes dtype = (is_fp8(*args) ? kFloats : dtype_of(args->x)) | packed_dtypes(args);
    if (transposed) {
      AB_RETURN_IF_ERROR(check_tensor("w", args->w, dtype, {{"E", s->E}, {"N"}, {"D", s->D}}));
    } else {
      AB_RETURN_IF_ERROR(check_tensor("w", args->w, dtype, {{"E", s->E}, {"D", s->D}, {"N"}}));
    }
    s->N = axis(args->w, transposed ? 1 : 2);
    if (is_packed(args->w)) return check_packed_product(*args->w, block_scales_of(args), s->E);
  } else {
    AB_RETURN_IF_ERROR(check_tensor("w_q", args->w_q, kE4m3, {{"E", s->E}, {"N"}, {"D", s->D}}));
    s->N = axis(args->w_q, 1);
  }
  AB_RETURN_IF_ERROR(check_without_scales("w", "w_block_scales", block_scales_of(args)));
  if (!is_fp8(*args)) return ok();
  AB_RETURN_IF_ERROR(check_blocks("w", "N", s->N));
  const Axis d_blocks{"D/128", blocks(s->D)};
  const Axis n_blocks{"N/128", blocks(s->N)};
  return check_quantized("w_q", args->w_q, {{"E", s->E}, {"N", s->N}, {"D", s->D}}, "w_scales", args->w_scales,
                         {{"E", s->E}, transposed ? n_blocks : d_blocks, transposed ? d_blocks : n_blocks});
}

// Checks x, w and group_sizes of a GEMM over rows.
template <class Args>
ab_status check_product(const Args* args, GroupedSizes* s) {
  AB_RETURN_IF_ERROR(check_flag("transpose_w", args->transpose_w));
  AB_RETURN_IF_ERROR(check_precision(args));
  if (!is_fp8(*args)) {
    AB_RETURN_IF_ERROR(check_unused("x_scales", args->x_scales, kWithoutFp8));
    AB_RETURN_IF_ERROR(check_unused("w_q", args->w_q, kWithoutFp8));
    AB_RETURN_IF_ERROR(check_unused("w_scales", args->w_scales, kWithoutFp8));
  }
  AB_RETURN_IF_ERROR(check_tensor("x", args->x, is_fp8(*args) ? kFloats | kE4m3 : kFloats, {{"R"}, {"D"}}));
  AB_RETURN_IF_ERROR(check_tensor("group_sizes", args->group_sizes, kInt32, {{"E"}}));
  s->R = axis(args->x, 0);
  s->D = axis(args->x, 1);
  s->E = axis(args->group_sizes, 0);
  AB_RETURN_IF_ERROR(check_num_rows("x", s->R));
  if (is_fp8(*args)) {
    AB_RETURN_IF_ERROR(check_blocks("x", "D", s->D));
    AB_RETURN_IF_ERROR(
        check_scales_of("x", args->x, "x_scales", args->x_scales, {{"R", s->R}, {"D/128", blocks(s->D)}}));
  }
  return check_product_weights(args, s);
}

// Layouts of W_in [E, D, P, F] and W_out [E, F, D], in order of preference.
enum InOrder : size_t { kDpf, kPfd, kDfp, kFpd };
enum OutOrder : size_t { kFd, kDf };
constexpr Order kInOrders[] = {{{0, 1, 2, 3}}, {{0, 2, 3, 1}}, {{0, 1, 3, 2}}, {{0, 3, 2, 1}}};
constexpr Order kOutOrders[] = {{{0, 1, 2}}, {{0, 2, 1}}};

// A weight gradient has the layout of its weight.
ab_status check_gradient_of_in(const ab_tensor* tensor, Dtypes dtypes, const FfnSizes& s) {
  if (tensor == nullptr) return ok();
  const size_t order =
      s.layout.interleaved ? (s.layout.in_transposed ? kFpd : kDfp) : (s.layout.in_transposed ? kPfd : kDpf);
  size_t order_index = 0;
  return check_ordered("d_w_in", tensor, dtypes, {{"E", s.E}, {"D", s.D}, {"P", s.P}, {"F", s.F}},
                       {&kInOrders[order], 1}, &order_index);
}
ab_status check_gradient_of_out(const ab_tensor* tensor, Dtypes dtypes, const FfnSizes& s) {
  if (tensor == nullptr) return ok();
  size_t order_index = 0;
  return check_ordered("d_w_out", tensor, dtypes, {{"E", s.E}, {"F", s.F}, {"D", s.D}},
                       {&kOutOrders[s.layout.out_transposed ? kDf : kFd], 1}, &order_index);
}

// Checks b_in [E, P, F], h [R, P, F] and tensors of these shapes: P and F are stored in the order of W_in.
ab_status check_intermediate(const char* name, const ab_tensor* tensor, Dtypes dtypes, Axis rows, const FfnSizes& s) {
  constexpr Order kSideBySide{{0, 1, 2}};
  constexpr Order kInterleaved{{0, 2, 1}};
  if (tensor == nullptr) return ok();
  size_t order_index = 0;
  return check_ordered(name, tensor, dtypes, {rows, {"P", s.P}, {"F", s.F}},
                       {s.layout.interleaved ? &kInterleaved : &kSideBySide, 1}, &order_index);
}

// Checks quantised rows: one per token if rows are gathered, else one per row of the experts.
ab_status check_quantized_rows(const char* name, const ab_tensor* q, const char* scales_name, const ab_tensor* scales,
                               const FfnSizes& s) {
  const Axis rows = s.K > 0 ? Axis{"T", s.T} : Axis{"R", s.R};
  return check_quantized(name, q, {rows, {"D", s.D}}, scales_name, scales, {rows, {"D/128", blocks(s.D)}});
}

// Requires a finite value above 0 if the activation has the parameter, else exactly 0.
ab_status check_parameter(const char* name, float value, bool has) {
  if (has ? std::isfinite(value) && value > 0.0f : value == 0.0f) return ok();
  return AB_INVALID("%s: got %g, expected %s", name, static_cast<double>(value),
                    has ? "a finite number above 0" : "0: the activation has no such parameter");
}

template <class Args>
ab_status check_activation(const Args* args) {
  const int32_t kind = args->activation;
  if (kind < AB_SILU || kind > AB_SITU) {
    return AB_INVALID("activation: got %d, expected %d to %d, an ab_activation", kind, AB_SILU, AB_SITU);
  }
  AB_RETURN_IF_ERROR(
      check_parameter("activation_alpha", args->activation_alpha, kind == AB_SWIGLU_OAI || kind == AB_SITU));
  return check_parameter("activation_limit", args->activation_limit, kind >= AB_SWIGLU_CLAMPED);
}

// Dtypes allowed for weights: FP8 quantises weights of any float dtype, without it they may be packed. Messages about
// other weights do not name packed dtypes.
template <class Args>
Dtypes dtypes_of_weights(const Args* args, const ab_tensor* weights) {
  if (is_fp8(*args)) return kFloats;
  return is_packed(weights) ? dtype_of(args->x) | kPacked : dtype_of(args->x);
}

// Finds the tensor that determines the number of rows and D: x or, if it is absent, x_q.
ab_status check_rows(const ab_expert_ffn_forward_args* args, const char* rows_name, const ab_tensor** rows) {
  if (!is_fp8(*args)) {
    AB_RETURN_IF_ERROR(check_unused("x_q", args->x_q, kWithoutFp8));
    AB_RETURN_IF_ERROR(check_unused("x_scales", args->x_scales, kWithoutFp8));
  }
  const bool has_floats = args->x != nullptr || args->x_q == nullptr;
  *rows = has_floats ? args->x : args->x_q;
  return has_floats ? check_tensor("x", args->x, kFloats, {{rows_name}, {"D"}})
                    : check_tensor("x_q", args->x_q, kE4m3, {{rows_name}, {"D"}});
}
ab_status check_rows(const ab_expert_ffn_backward_args* args, const char* rows_name, const ab_tensor** rows) {
  *rows = args->x;
  return check_tensor("x", args->x, kFloats, {{rows_name}, {"D"}});
}

// The dtype of the network is the dtype of x. If only x_q is given, it is the float dtype of the first of y, h, a, b_in
// and lora_z that has one, so that a different dtype in the others is refused. If none is given, any dtype will do.
int32_t dtype_of_network(const ab_expert_ffn_forward_args* args) {
  for (const ab_tensor* tensor : {args->x, args->y, args->h, args->a, args->b_in, args->lora_z}) {
    if (tensor == nullptr) continue;
    for (const int32_t dtype : {AB_FLOAT32, AB_BFLOAT16, AB_FLOAT16}) {
      if (tensor->dtype == dtype) return dtype;
    }
  }
  return AB_BFLOAT16;
}
int32_t dtype_of_network(const ab_expert_ffn_backward_args* args) { return args->x->dtype; }

// Checks packed W_in and its scales. order: the order of its axes; FP8 blocks must not mix gate and up.
template <class Args>
ab_status check_packed_w_in(const Args* args, const FfnSizes& s, size_t* order) {
  constexpr Order kPacked[] = {kInOrders[kPfd], kInOrders[kFpd]};
  const ab_tensor* w = args->w_in;
  const bool fp4 = w->dtype == AB_FLOAT4_E2M1X2;
  const Axis E{"E", s.E}, P{"P", s.P}, F{"F", s.F};
  AB_RETURN_IF_ERROR(check_ordered("w_in", w, dtype_bit(static_cast<ab_dtype>(w->dtype)), {E, {"D", s.D}, P, F},
                                   {kPacked, fp4 ? size_t{2} : size_t{1}}, order));
  *order = *order == 0 ? kPfd : kFpd;
  const Order& of_scales = kInOrders[*order];
  if (fp4) {
    AB_RETURN_IF_ERROR(check_packed_axis("w_in", "D", s.D, kMxBlock));
    return check_block_scales("w_in_block_scales", args->w_in_block_scales, w->dtype,
                              {E, {"D/32", s.D / kMxBlock}, P, F}, of_scales);
  }
  AB_RETURN_IF_ERROR(check_packed_axis("w_in", "D", s.D, kScaleBlock));
  AB_RETURN_IF_ERROR(check_packed_axis("w_in", "F", s.F, kScaleBlock));
  return check_block_scales("w_in_block_scales", args->w_in_block_scales, w->dtype,
                            {E, {"D/128", blocks(s.D)}, P, {"F/128", blocks(s.F)}}, of_scales);
}

// Checks packed W_out and its scales.
template <class Args>
ab_status check_packed_w_out(const Args* args, const FfnSizes& s) {
  const ab_tensor* w = args->w_out;
  const Axis E{"E", s.E}, D{"D", s.D};
  size_t order = 0;
  AB_RETURN_IF_ERROR(check_ordered("w_out", w, dtype_bit(static_cast<ab_dtype>(w->dtype)), {E, {"F", s.F}, D},
                                   {&kOutOrders[kDf], 1}, &order));
  if (w->dtype == AB_FLOAT4_E2M1X2) {
    AB_RETURN_IF_ERROR(check_packed_axis("w_out", "F", s.F, kMxBlock));
    return check_block_scales("w_out_block_scales", args->w_out_block_scales, w->dtype,
                              {E, {"F/32", s.F / kMxBlock}, D}, kOutOrders[kDf]);
  }
  AB_RETURN_IF_ERROR(check_packed_axis("w_out", "F", s.F, kScaleBlock));
  AB_RETURN_IF_ERROR(check_packed_axis("w_out", "D", s.D, kScaleBlock));
  return check_block_scales("w_out_block_scales", args->w_out_block_scales, w->dtype,
                            {E, {"F/128", blocks(s.F)}, {"D/128", blocks(s.D)}}, kOutOrders[kDf]);
}

// Checks W_in, given as floats, packed, or quantised in the axis order that quantized_transposed selects.
template <class Args>
ab_status check_w_in(const Args* args, bool quantized_transposed, FfnSizes* s) {
  size_t order = kDpf;
  if (args->w_in != nullptr || args->w_in_q == nullptr) {
    AB_RETURN_IF_ERROR(check_ordered("w_in", args->w_in, dtypes_of_weights(args, args->w_in),
                                     {{"E", s->E}, {"D", s->D}, {"2 or 1"}, {"F"}}, kInOrders, &order));
    s->P = axis(args->w_in, 2);
    s->F = axis(args->w_in, 3);
    if (is_packed(args->w_in)) AB_RETURN_IF_ERROR(check_packed_w_in(args, *s, &order));
  } else if (quantized_transposed) {
    AB_RETURN_IF_ERROR(check_tensor("w_in_q", args->w_in_q, kE4m3, {{"E", s->E}, {"2 or 1"}, {"F"}, {"D", s->D}}));
    s->P = axis(args->w_in_q, 1);
    s->F = axis(args->w_in_q, 2);
  } else {
    AB_RETURN_IF_ERROR(check_tensor("w_in_q", args->w_in_q, kE4m3, {{"E", s->E}, {"D", s->D}, {"2 or 1"}, {"F"}}));
    s->P = axis(args->w_in_q, 2);
    s->F = axis(args->w_in_q, 3);
  }
  s->layout.in_transposed = order == kPfd || order == kFpd;
  s->layout.interleaved = (order == kDfp || order == kFpd) && s->P > 1;
  if (s->P != 1 && s->P != 2) {
    return AB_INVALID("%s: got %lld parts, expected 2 (gate, up) or 1", args->w_in != nullptr ? "w_in" : "w_in_q",
                      static_cast<long long>(s->P));
  }
  if (!is_packed(args->w_in)) {
    AB_RETURN_IF_ERROR(check_without_scales("w_in", "w_in_block_scales", args->w_in_block_scales));
  }
  if (!is_fp8(*args)) return ok();
  AB_RETURN_IF_ERROR(check_blocks("w_in", "F", s->F));
  const Axis E{"E", s->E}, D{"D", s->D}, P{"P", s->P}, F{"F", s->F};
  const std::initializer_list<Axis> scales = {E, {"D/128", blocks(s->D)}, P, {"F/128", blocks(s->F)}};
  return quantized_transposed
             ? check_quantized("w_in_q", args->w_in_q, {E, P, F, D}, "w_in_scales", args->w_in_scales, scales)
             : check_quantized("w_in_q", args->w_in_q, {E, D, P, F}, "w_in_scales", args->w_in_scales, scales);
}

template <class Args>
ab_status check_w_out(const Args* args, bool quantized_transposed, FfnSizes* s) {
  const Axis E{"E", s->E}, D{"D", s->D}, F{"F", s->F};
  if (args->w_out != nullptr || args->w_out_q == nullptr) {
    size_t order = kFd;
    AB_RETURN_IF_ERROR(
        check_ordered("w_out", args->w_out, dtypes_of_weights(args, args->w_out), {E, F, D}, kOutOrders, &order));
    s->layout.out_transposed = order == kDf;
    if (is_packed(args->w_out)) {
      s->layout.out_transposed = true;
      AB_RETURN_IF_ERROR(check_packed_w_out(args, *s));
    }
  }
  if (!is_packed(args->w_out)) {
    AB_RETURN_IF_ERROR(check_without_scales("w_out", "w_out_block_scales", args->w_out_block_scales));
  }
  if (!is_fp8(*args)) return ok();
  const std::initializer_list<Axis> scales = {E, {"F/128", blocks(s->F)}, {"D/128", blocks(s->D)}};
  return quantized_transposed
             ? check_quantized("w_out_q", args->w_out_q, {E, D, F}, "w_out_scales", args->w_out_scales, scales)
             : check_quantized("w_out_q", args->w_out_q, {E, F, D}, "w_out_scales", args->w_out_scales, scales);
}

// Checks shared by forward and backward. has_down: the call includes the down GEMM. quantized_transposed: quantised
// weights are transposed, as the forward GEMMs read them.
template <class Args>
ab_status check_common(const Args* args, bool has_down, bool quantized_transposed, FfnSizes* s) {
  AB_RETURN_IF_ERROR(check_activation(args));
  AB_RETURN_IF_ERROR(check_precision(args));
  if (!is_fp8(*args)) {
    AB_RETURN_IF_ERROR(check_unused("w_in_q", args->w_in_q, kWithoutFp8));
    AB_RETURN_IF_ERROR(check_unused("w_in_scales", args->w_in_scales, kWithoutFp8));
    AB_RETURN_IF_ERROR(check_unused("w_out_q", args->w_out_q, kWithoutFp8));
    AB_RETURN_IF_ERROR(check_unused("w_out_scales", args->w_out_scales, kWithoutFp8));
  }
  AB_RETURN_IF_ERROR(check_flag("skip_rest", args->skip_rest));
  const bool by_slot = args->slot_of_row != nullptr;
  if (by_slot ? args->topk < 1 : args->topk != 0) {
    return AB_INVALID("topk: got %d, expected %s", args->topk, by_slot ? "at least 1" : "0 without slot_of_row");
  }
  const ab_tensor* x = nullptr;
  AB_RETURN_IF_ERROR(check_rows(args, by_slot ? "T" : "R", &x));
  AB_RETURN_IF_ERROR(check_tensor("group_sizes", args->group_sizes, kInt32, {{"E"}}));
  AB_RETURN_IF_ERROR(check_optional("slot_of_row", args->slot_of_row, kInt32, {{"R"}}));
  s->E = axis(args->group_sizes, 0);
  s->D = axis(x, 1);
  s->T = by_slot ? axis(x, 0) : 0;
  s->K = args->topk;
  s->R = by_slot ? axis(args->slot_of_row, 0) : axis(x, 0);
  s->dtype = dtype_of_network(args);
  AB_RETURN_IF_ERROR(check_num_rows(by_slot ? "slot_of_row" : "x", s->R));
  if (by_slot) AB_RETURN_IF_ERROR(check_num_slots("slot_of_row", s->T, s->K));
  if (is_fp8(*args)) AB_RETURN_IF_ERROR(check_blocks("x", "D", s->D));
  AB_RETURN_IF_ERROR(check_w_in(args, quantized_transposed, s));
  if (s->P == 1 && args->activation >= AB_SWIGLU_CLAMPED) {
    return AB_INVALID("activation: got %d, which needs gate and up, expected another one since w_in has 1 part",
                      args->activation);
  }
  if (has_down) {
    AB_RETURN_IF_ERROR(check_w_out(args, quantized_transposed, s));
    AB_RETURN_IF_ERROR(check_optional("b_out", args->b_out, dtype_of(*s), {{"E", s->E}, {"D", s->D}}));
  } else {
    AB_RETURN_IF_ERROR(check_unused("w_out", args->w_out, "without y"));
    AB_RETURN_IF_ERROR(check_unused("w_out_q", args->w_out_q, "without y"));
    AB_RETURN_IF_ERROR(check_unused("w_out_scales", args->w_out_scales, "without y"));
    AB_RETURN_IF_ERROR(check_unused("w_out_block_scales", args->w_out_block_scales, "without y"));
    AB_RETURN_IF_ERROR(check_unused("b_out", args->b_out, "without y"));
  }
  return by_slot ? check_optional("weights", args->weights, kFloats, {{"T", s->T}, {"K", s->K}})
                 : check_optional("weights", args->weights, kFloats, {{"R", s->R}});
}

}  // namespace

QuantizedSizes weights_of(int64_t E, int64_t D, int64_t P, int64_t F, bool d_inside, bool p_inside) {
  QuantizedSizes s;
  s.E = E;
  s.D = D;
  s.P = P;
  s.F = F;
  s.d_stride = d_inside ? 1 : P * F;
  s.f_stride = (d_inside ? D : 1) * (p_inside ? P : 1);
  s.p_stride = (d_inside ? D : 1) * (p_inside ? 1 : F);
  return s;
}

ab_status check(const ab_quantize_rows_args* args, QuantizedSizes* s) {
  AB_RETURN_IF_ERROR(check_fp8_scales(args->fp8_scales));
  AB_RETURN_IF_ERROR(check_tensor("x", args->x, kFloats, {{"R"}, {"D"}}));
  s->R = axis(args->x, 0);
  s->D = axis(args->x, 1);
  AB_RETURN_IF_ERROR(check_num_rows("x", s->R));
  AB_RETURN_IF_ERROR(check_blocks("x", "D", s->D));
  AB_RETURN_IF_ERROR(check_tensor("q", args->q, kE4m3, {{"R", s->R}, {"D", s->D}}));
  return check_tensor("scales", args->scales, kFloat32, {{"R", s->R}, {"D/128", blocks(s->D)}});
}

ab_status check(const ab_quantize_weights_args* args, QuantizedSizes* s) {
  AB_RETURN_IF_ERROR(check_fp8_scales(args->fp8_scales));
  const bool has_parts = args->w != nullptr && args->w->rank == 4;
  size_t order = 0;
  if (has_parts) {
    AB_RETURN_IF_ERROR(check_ordered("w", args->w, kFloats, {{"E"}, {"D"}, {"P"}, {"F"}}, kInOrders, &order));
  } else {
    AB_RETURN_IF_ERROR(check_ordered("w", args->w, kFloats, {{"E"}, {"D"}, {"N"}}, kOutOrders, &order));
  }
  *s = weights_of(axis(args->w, 0), axis(args->w, 1), has_parts ? axis(args->w, 2) : 1,
                  axis(args->w, has_parts ? 3 : 2), has_parts ? order == kPfd || order == kFpd : order == kDf,
                  has_parts && (order == kDfp || order == kFpd));
  AB_RETURN_IF_ERROR(check_blocks("w", "D", s->D));
  AB_RETURN_IF_ERROR(check_blocks("w", has_parts ? "F" : "N", s->F));
  if (args->q == nullptr && args->q_transposed == nullptr) {
    return AB_INVALID("q: got NULL, expected a tensor, or one for q_transposed");
  }
  const Axis E{"E", s->E}, D{"D", s->D}, P{"P", s->P}, F{has_parts ? "F" : "N", s->F};
  const Axis d_blocks{"D/128", blocks(s->D)}, f_blocks{has_parts ? "F/128" : "N/128", blocks(s->F)};
  if (has_parts) {
    AB_RETURN_IF_ERROR(check_optional("q", args->q, kE4m3, {E, D, P, F}));
    AB_RETURN_IF_ERROR(check_optional("q_transposed", args->q_transposed, kE4m3, {E, P, F, D}));
    return check_tensor("scales", args->scales, kFloat32, {E, d_blocks, P, f_blocks});
  }
  AB_RETURN_IF_ERROR(check_optional("q", args->q, kE4m3, {E, D, F}));
  AB_RETURN_IF_ERROR(check_optional("q_transposed", args->q_transposed, kE4m3, {E, F, D}));
  return check_tensor("scales", args->scales, kFloat32, {E, d_blocks, f_blocks});
}

ab_status check(const ab_grouped_matmul_args* args, GroupedSizes* s) {
  AB_RETURN_IF_ERROR(check_product(args, s));
  AB_RETURN_IF_ERROR(check_tensor("y", args->y, dtype_of_results(args->x), {{"R", s->R}, {"N", s->N}}));
  return check_lora(args, args->y->dtype, s);
}

// An exchange of a call, or NULL.
static ab_status check_exchange(const char* name, const ab_exchange* exchange, int32_t buffer, int32_t reserved) {
  if (exchange == nullptr && buffer != 0) {
    return AB_INVALID("%s_buffer: got %d, expected 0 without an exchange", name, buffer);
  }
  if (reserved != 0) return AB_INVALID("%s_reserved: got %d, expected 0", name, reserved);
  return ok();
}

ab_status check(const ab_grouped_matmul_combine_args* args, CombinedSizes* s) {
  AB_RETURN_IF_ERROR(check_exchange("returning", args->returning, args->returning_buffer, args->returning_reserved));
  AB_RETURN_IF_ERROR(check_product(args, s));
  AB_RETURN_IF_ERROR(check_flag("skip_rest", args->skip_rest));
  AB_RETURN_IF_ERROR(check_weight_early(args->weight_early, args->weights));
  AB_RETURN_IF_ERROR(check_tensor("slot_of_row", args->slot_of_row, kInt32, {{"R", s->R}}));
  Maps maps;
  AB_RETURN_IF_ERROR(check_row_of_slot(args->row_of_slot, -1, {"K"}, &maps));
  s->T = maps.T;
  s->K = maps.K;
  AB_RETURN_IF_ERROR(check_optional("weights", args->weights, kFloats, {{"T", s->T}, {"K", s->K}}));
  AB_RETURN_IF_ERROR(check_flag("backward", args->backward));
  AB_RETURN_IF_ERROR(check_optional("addend", args->addend, kFloats, {{"T", s->T}, {"N", s->N}}));
  AB_RETURN_IF_ERROR(check_tensor("out", args->out, kFloats, {{"T", s->T}, {"N", s->N}}));
  const ab_tensor* dtype_source = args->x->dtype == AB_FLOAT8_E4M3 ? args->out : args->x;
  s->rows_dtype = dtype_source->dtype;
  AB_RETURN_IF_ERROR(check_lora(args, s->rows_dtype, s));
  return check_optional("bias", args->bias, dtype_of(dtype_source), {{"E", s->E}, {"N", s->N}});
}

ab_status check(const ab_grouped_matmul_dw_args* args, GroupedSizes* s) {
  AB_RETURN_IF_ERROR(check_flag("accumulate", args->accumulate));
  if (args->precision != AB_PRECISION_HIGHEST && args->precision != AB_PRECISION_TF32) {
    return AB_INVALID("precision: got %d, expected %d or %d, an ab_precision that weight gradients support",
                      args->precision, AB_PRECISION_HIGHEST, AB_PRECISION_TF32);
  }
  if (args->reserved != 0) return AB_INVALID("reserved: got %d, expected 0", args->reserved);
  AB_RETURN_IF_ERROR(check_tensor("x", args->x, kFloats, {{"R"}, {"D"}}));
  s->R = axis(args->x, 0);
  s->D = axis(args->x, 1);
  AB_RETURN_IF_ERROR(check_num_rows("x", s->R));
  AB_RETURN_IF_ERROR(check_tensor("d_y", args->d_y, kFloats, {{"R", s->R}, {"N"}}));
  AB_RETURN_IF_ERROR(check_tensor("group_sizes", args->group_sizes, kInt32, {{"E"}}));
  s->N = axis(args->d_y, 1);
  s->E = axis(args->group_sizes, 0);
  const Dtypes dtypes = args->accumulate != 0 ? kFloat32 : kFloats;
  AB_RETURN_IF_ERROR(check_tensor("d_w", args->d_w, dtypes, {{"E or 1"}, {"D", s->D}, {"N", s->N}}));
  return check_shared("d_w", args->d_w, s->E);
}

ab_status check(const ab_expert_ffn_forward_args* args, FfnSizes* s) {
  const bool has_down = args->y != nullptr || args->a == nullptr;
  AB_RETURN_IF_ERROR(check_exchange("arriving", args->arriving, args->arriving_buffer, args->arriving_reserved));
  AB_RETURN_IF_ERROR(check_common(args, has_down, true, s));
  AB_RETURN_IF_ERROR(check_weight_early(args->weight_early, args->weights));
  if (!has_down && args->weight_early == 0) {
    AB_RETURN_IF_ERROR(check_unused("weights", args->weights, "without y and weight_early"));
  }
  AB_RETURN_IF_ERROR(check_quantized_rows("x_q", args->x_q, "x_scales", args->x_scales, *s));
  const Dtypes dtype = dtype_of(*s);
  AB_RETURN_IF_ERROR(check_intermediate("b_in", args->b_in, dtype, {"E", s->E}, *s));
  if (has_down) AB_RETURN_IF_ERROR(check_tensor("y", args->y, dtype, {{"R", s->R}, {"D", s->D}}));
  if (!is_fp8(*args)) AB_RETURN_IF_ERROR(check_unused("a_scales", args->a_scales, kWithoutFp8));
  AB_RETURN_IF_ERROR(check_optional("a", args->a, is_fp8(*args) ? dtype | kE4m3 : dtype, {{"R", s->R}, {"F", s->F}}));
  AB_RETURN_IF_ERROR(check_scales_of("a", args->a, "a_scales", args->a_scales, {{"R", s->R}, {"F/128", blocks(s->F)}}));
  AB_RETURN_IF_ERROR(check_lora(args, s));
  return check_intermediate("h", args->h, dtype, {"R", s->R}, *s);
}

ab_status check(const ab_expert_ffn_backward_args* args, FfnSizes* s) {
  AB_RETURN_IF_ERROR(check_exchange("arriving", args->arriving, args->arriving_buffer, args->arriving_reserved));
  AB_RETURN_IF_ERROR(check_common(args, true, false, s));
  AB_RETURN_IF_ERROR(check_flag("accumulate", args->accumulate));
  const bool has_factors = args->d_lora_a_in != nullptr || args->d_lora_b_in != nullptr ||
                           args->d_lora_a_out != nullptr || args->d_lora_b_out != nullptr;
  if (args->accumulate != 0 && args->d_w_in == nullptr && args->d_w_out == nullptr && !has_factors) {
    return AB_INVALID("accumulate: got 1, expected 0, or 1 together with d_w_in, d_w_out or the gradient of a factor");
  }
  if (is_packed(args->w_in)) AB_RETURN_IF_ERROR(check_unused("d_w_in", args->d_w_in, "since w_in is packed"));
  if (is_packed(args->w_out)) AB_RETURN_IF_ERROR(check_unused("d_w_out", args->d_w_out, "since w_out is packed"));
  AB_RETURN_IF_ERROR(check_lora(args, s));
  const Dtypes dtype = dtype_of(*s);
  const Dtypes gradients = args->accumulate != 0 ? kFloat32 : dtype | kFloat32;
  if (!is_fp8(*args)) {
    AB_RETURN_IF_ERROR(check_unused("dh_q", args->dh_q, kWithoutFp8));
    AB_RETURN_IF_ERROR(check_unused("dh_scales", args->dh_scales, kWithoutFp8));
    AB_RETURN_IF_ERROR(check_unused("d_out_q", args->d_out_q, kWithoutFp8));
    AB_RETURN_IF_ERROR(check_unused("d_out_scales", args->d_out_scales, kWithoutFp8));
  } else {
    AB_RETURN_IF_ERROR(check_quantized_rows("d_out_q", args->d_out_q, "d_out_scales", args->d_out_scales, *s));
    AB_RETURN_IF_ERROR(check_quantized("dh_q", args->dh_q, {{"R", s->R}, {"P", s->P}, {"F", s->F}}, "dh_scales",
                                       args->dh_scales, {{"R", s->R}, {"P", s->P}, {"F/128", blocks(s->F)}}));
  }
  AB_RETURN_IF_ERROR(check_intermediate("h", args->h, dtype, {"R", s->R}, *s));
  if (args->h == nullptr) {
    const bool dx_needs_dh = args->dx_rows != nullptr && args->dh_q == nullptr;
    const bool needs_v_in = s->rank_in > 0 && (args->dx_rows != nullptr || args->d_lora_a_in != nullptr);
    const bool needs_dh = dx_needs_dh || args->d_w_in != nullptr || args->d_b_in != nullptr ||
                          args->d_lora_b_in != nullptr || (needs_v_in && args->lora_v_in == nullptr);
    const bool needs_a = needs_weighted_a(*args);
    if ((needs_dh && args->dh == nullptr) || (needs_a && args->weighted_a == nullptr)) {
      return AB_INVALID("h: got NULL, expected [R, P, F], or %s from an earlier call",
                        needs_dh && args->dh == nullptr ? "dh" : "weighted_a");
    }
    AB_RETURN_IF_ERROR(check_unused("d_weights", args->d_weights, "without h"));
    AB_RETURN_IF_ERROR(check_unused("d_out_q", args->d_out_q, "without h"));
    if (!needs_dh) AB_RETURN_IF_ERROR(check_unused("dh", args->dh, "without h and outputs that depend on dh"));
    if (!needs_a) {
      AB_RETURN_IF_ERROR(
          check_unused("weighted_a", args->weighted_a, "without h, d_w_out, d_lora_a_out and d_lora_b_out"));
    }
    if (!needs_v_in) {
      AB_RETURN_IF_ERROR(check_unused("lora_v_in", args->lora_v_in, "without h, dx_rows and d_lora_a_in"));
    }
    if (args->d_lora_a_out == nullptr) {
      AB_RETURN_IF_ERROR(check_unused("lora_v_out", args->lora_v_out, "without h and d_lora_a_out"));
    }
    if (args->dx_rows == nullptr) AB_RETURN_IF_ERROR(check_unused("dh_q", args->dh_q, "without h and dx_rows"));
    if (args->skip_rest != 0) return AB_INVALID("skip_rest: got %d, expected 0 without h", args->skip_rest);
  }
  const bool by_token = args->slot_of_row != nullptr;
  if (args->h != nullptr || args->d_w_out != nullptr || args->d_b_out != nullptr || args->d_lora_a_out != nullptr ||
      args->d_lora_b_out != nullptr) {
    const Axis rows = by_token ? Axis{"T", s->T} : Axis{"R", s->R};
    AB_RETURN_IF_ERROR(check_tensor("d_out", args->d_out, kFloats, {rows, {"D", s->D}}));
  } else {
    AB_RETURN_IF_ERROR(
        check_unused("d_out", args->d_out, "without h, d_w_out, d_b_out, d_lora_a_out and d_lora_b_out"));
  }
  if (by_token) {
    AB_RETURN_IF_ERROR(check_optional("d_weights", args->d_weights, kFloat32, {{"T", s->T}, {"K", s->K}}));
  } else {
    AB_RETURN_IF_ERROR(check_optional("d_weights", args->d_weights, kFloat32, {{"R", s->R}}));
  }
  AB_RETURN_IF_ERROR(check_intermediate("dh", args->dh, dtype, {"R", s->R}, *s));
  AB_RETURN_IF_ERROR(check_optional("weighted_a", args->weighted_a, dtype, {{"R", s->R}, {"F", s->F}}));
  AB_RETURN_IF_ERROR(check_optional("dx_rows", args->dx_rows, dtype, {{"R", s->R}, {"D", s->D}}));
  AB_RETURN_IF_ERROR(check_gradient_of_in(args->d_w_in, gradients, *s));
  AB_RETURN_IF_ERROR(check_intermediate("d_b_in", args->d_b_in, dtype, {"E", s->E}, *s));
  AB_RETURN_IF_ERROR(check_gradient_of_out(args->d_w_out, gradients, *s));
  return check_optional("d_b_out", args->d_b_out, dtype, {{"E", s->E}, {"D", s->D}});
}

}  // namespace anabranch
