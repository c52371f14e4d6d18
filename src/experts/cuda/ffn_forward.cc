// ab_cuda_expert_ffn_forward: the up GEMM, then the down GEMM if y is requested.

#include <algorithm>

#include "anabranch/cuda.h"
#include "core/cuda/launch.h"
#include "core/entry.h"
#include "core/range.h"
#include "core/tensor.h"
#include "core/workspace.h"
#include "experts/check.h"
#include "experts/cuda/arriving_rows.h"
#include "experts/cuda/fp8_operands.h"
#include "experts/cuda/lora.h"
#include "experts/cuda/packed.h"
#include "experts/cuda/path.h"
#include "experts/cuda/phases.h"
#include "experts/few_rows/products.h"

namespace anabranch::cuda {
namespace {

// What arrives while tokens are routed, in about 100 us.
constexpr int64_t kHiddenBytes = 32 << 20;

struct Forward {
  const ab_expert_ffn_forward_args& args;
  FfnSizes s;
  RowMap map;
  Workspace workspace;
  bool fp8;
  Floats a;  // [R, F], in 16 bits or float32
  // FP8 (e4m3) operands:
  Fp8Output x8;
  Fp8Output a8;
  Fp8WeightOperand w_in;
  Fp8WeightOperand w_out;
  Factor lora_a_in;
  Factor lora_b_in;
  Factor lora_a_out;
  Factor lora_b_out;
  void* lora_u;  // [R, rank]
  void* lora_z;
  LowRankTerm lora_in;
  LowRankTerm lora_out;
  int32_t* bounds;  // [E, 2], of the rows that arrive first
  ArrivingTokens arriving;
  MaybePacked plain_w_in;
  MaybePacked plain_w_out;
  void* unpacked;  // shared by both

  Forward(const ab_expert_ffn_forward_args& arguments, const FfnSizes& sizes, const ab_exec* memory)
      : args(arguments),
        s(sizes),
        map(args.slot_of_row, s.T, s.K, s.R),
        workspace(memory),
        fp8(is_fp8(args)),
        a(take_a()),
        lora_a_in(workspace, read(args.lora_a_in, args.lora_a_in_copy), s.dtype, s.E, FactorOrder::free_columns),
        lora_b_in(workspace, read(args.lora_b_in, args.lora_b_in_copy), s.dtype, s.E,
                  order_like(s.layout.in_transposed || fp8), s.layout.interleaved && !fp8),
        lora_a_out(workspace, read(args.lora_a_out, args.lora_a_out_copy), s.dtype, s.E, FactorOrder::free_columns),
        lora_b_out(workspace, args.y == nullptr ? nullptr : read(args.lora_b_out, args.lora_b_out_copy), s.dtype, s.E,
                   order_like(s.layout.out_transposed || fp8)),
        lora_u(take_low_rank_rows(workspace, args.lora_u, s.rank_in > 0, s.R, s.rank_in, s.dtype)),
        lora_z(take_low_rank_rows(workspace, args.lora_z, s.rank_out > 0, s.R, s.rank_out, s.dtype)),
        lora_in(workspace, lora_u, lora_b_in, {s.R, s.E}, s.P * s.F, s.rank_in, s.dtype, fp8),
        lora_out(workspace, lora_z, lora_b_out, {s.R, s.E}, s.D, args.y == nullptr ? 0 : s.rank_out, s.dtype, fp8),
        bounds(workspace.take<int32_t>(args.arriving == nullptr ? 0 : 2 * s.E)),
        plain_w_in(args.w_in, args.w_in_block_scales, s.E, s.P * s.F, s.D, s.dtype,
                   reads_packed(s.R, s.E, s.P * s.F, s.D, s.dtype)),
        plain_w_out(args.w_out, args.w_out_block_scales, s.E, s.D, s.F, s.dtype,
                    reads_packed(s.R, s.E, s.D, s.F, s.dtype)),
        unpacked(workspace.take_bytes(std::max(plain_w_in.scratch_bytes(), plain_w_out.scratch_bytes()))) {
    if (fp8) take_fp8();
  }

  void take_fp8() {
    const bool power_of_two = uses_power_of_two_scales(args);
    x8 = args.x_q != nullptr ? given_fp8_rows(args.x_q, args.x_scales, power_of_two)
                             : take_fp8_rows(workspace, true, x_rows(), s.D, power_of_two);
    a8 = args.a_scales != nullptr ? given_fp8_rows(args.a, args.a_scales, power_of_two)
                                  : take_fp8_rows(workspace, true, s.R, s.F, power_of_two);
    w_in = Fp8WeightOperand(workspace, args.w_in, args.w_in_q, args.w_in_scales, sizes_of_w_in(s), false, power_of_two);
    if (args.y == nullptr) return;
    w_out = Fp8WeightOperand(workspace, args.w_out, args.w_out_q, args.w_out_scales, sizes_of_w_out(s), false,
                             power_of_two);
  }

  // The GEMMs read the caller's copy of a factor, if there is one.
  static const ab_tensor* read(const ab_tensor* factor, const ab_tensor* copy) {
    return copy == nullptr ? factor : copy;
  }

  const int32_t* group_sizes() const { return data<const int32_t>(args.group_sizes); }
  int64_t x_rows() const { return s.K > 0 ? s.T : s.R; }

  ab_status run_fp8(const Device& device, cudaStream_t stream) const {
    AB_RETURN_IF_ERROR(run_up_fp8(device, stream));
    if (args.y == nullptr) return ok();
    const Range range(Phase::down);
    AB_RETURN_IF_ERROR(w_out.fill(stream));
    return compute_rows_product(Fp8RowsProduct{down(), rows_of(a8), w_out.weights()}, device, stream);
  }

  ab_status run_up_fp8(const Device& device, cudaStream_t stream) const {
    const Range range(Phase::up);
    if (arriving) AB_RETURN_IF_ERROR(arriving.await_all(stream));
    if (args.x_q == nullptr) AB_RETURN_IF_ERROR(quantize_rows(Floats(args.x), x_rows(), s.D, x8, stream));
    AB_RETURN_IF_ERROR(w_in.fill(stream));
    AB_RETURN_IF_ERROR(fill_factors(device, stream));
    AB_RETURN_IF_ERROR(compute_u(device, stream));
    AB_RETURN_IF_ERROR(compute_up(Fp8Up{up(), rows_of(x8), w_in.weights(), a8}, device, stream));
    return compute_z(device, stream);
  }

  ab_status run(const Device& device, cudaStream_t stream) const {
    AB_RETURN_IF_ERROR(run_up(device, stream));
    if (args.y == nullptr) return ok();
    const Range range(Phase::down);
    const PackedRowsProduct packed{down(), plain_w_out.matrices()};
    return compute_maybe_packed(plain_w_out.is_packed(), packed, device, stream, [&] {
      return plain_w_out.for_ranges(unpacked, group_sizes(), device, stream, [&](auto range, const void* w) {
        RowsProduct op = down();
        op.range = range;
        op.w = w;
        return compute_rows_product(op, device, stream);
      });
    });
  }

  ab_status run_up(const Device& device, cudaStream_t stream) const {
    const Range range(Phase::up);
    AB_RETURN_IF_ERROR(fill_factors(device, stream));
    AB_RETURN_IF_ERROR(compute_up_of_rows(device, stream));
    return compute_z(device, stream);
  }

  // u and the up GEMM.
  ab_status compute_up_of_rows(const Device& device, cudaStream_t stream) const {
    const auto compute = [&](const Up& up) { return compute_up(up, device, stream); };
    if (arriving && s.rank_in == 0 && args.w_in_block_scales == nullptr) {
      const bool splits = pays_to_split(arriving, kHiddenBytes) && !few_rows::supports(up());
      return compute_when_arrived(up(), arriving, splits, bounds, device, stream, compute);
    }
    if (arriving) AB_RETURN_IF_ERROR(arriving.await_all(stream));
    AB_RETURN_IF_ERROR(compute_u(device, stream));
    const PackedUp packed{up(), plain_w_in.matrices()};
    return compute_maybe_packed(plain_w_in.is_packed(), packed, device, stream, [&] {
      return plain_w_in.for_ranges(unpacked, group_sizes(), device, stream, [&](auto range, void* w) {
        Up op = up();
        op.range = range;
        op.w_in = Floats(w, s.dtype);
        return compute(op);
      });
    });
  }

  ab_status fill_factors(const Device& device, cudaStream_t stream) const {
    AB_RETURN_IF_ERROR(copy_factors({{args.lora_a_in, args.lora_a_in_copy},
                                     {args.lora_b_in, args.lora_b_in_copy},
                                     {args.lora_a_out, args.lora_a_out_copy},
                                     {args.lora_b_out, args.lora_b_out_copy}},
                                    s.E, group_sizes(), device, stream));
    return fill({&lora_a_in, &lora_b_in, &lora_a_out, &lora_b_out}, group_sizes(), device, stream);
  }

  // u = scale_in x A_in
  ab_status compute_u(const Device& device, cudaStream_t stream) const {
    if (s.rank_in == 0) return ok();
    const LowRankRows u{
        .x = args.x->data, .gathers_x = true, .D = s.D, .scale = args.lora_scale_in, .u = lora_u, .rank = s.rank_in};
    AB_RETURN_IF_ERROR(compute_rows_product(product_of(u, lora_a_in, thin()), device, stream));
    return lora_in.fill(device, stream);
  }

  // z = scale_out a A_out
  ab_status compute_z(const Device& device, cudaStream_t stream) const {
    if (s.rank_out == 0) return ok();
    const LowRankRows z{.x = a.data, .D = s.F, .scale = args.lora_scale_out, .u = lora_z, .rank = s.rank_out};
    AB_RETURN_IF_ERROR(compute_rows_product(product_of(z, lora_a_out, thin()), device, stream));
    return lora_out.fill(device, stream);
  }

  RowsProduct thin() const {
    return {.group_sizes = group_sizes(),
            .map = map,
            .dtype = s.dtype,
            .precision = precision_of(args),
            .R = s.R,
            .E = s.E};
  }

  // With FP8 only an adapter of W_out reads 16-bit `a`.
  Floats take_a() {
    if (fp8) return s.rank_out > 0 ? row_buffer(s.F) : Floats();
    return args.a != nullptr ? Floats(args.a) : row_buffer(s.F);
  }
  Floats row_buffer(int64_t columns) { return {workspace.take_rows(s.R, columns, s.dtype), s.dtype}; }

  Up up() const {
    Up up;
    up.s = s;
    up.map = map;
    up.group_sizes = group_sizes();
    up.activation = activation_of(args.activation, args.activation_alpha, args.activation_limit);
    up.precision = precision_of(args);
    up.skips_rest = args.skip_rest != 0;
    up.x = Floats(data<void>(args.x), s.dtype);
    up.w_in = Floats(args.w_in);
    up.b_in = Floats(args.b_in);
    if (args.weight_early != 0) up.weights = Floats(args.weights);
    up.h = Floats(args.h);
    up.a = a;
    up.low_rank = lora_in.get();
    return up;
  }

  RowsProduct down() const {
    return {.x = a.data,
            .w = data<const void>(args.w_out),
            .transposed = s.layout.out_transposed,
            .group_sizes = group_sizes(),
            .y = args.y->data,
            .bias = data<const void>(args.b_out),
            .map = map,
            .weights = Floats(args.weights),
            .weight_early = args.weight_early != 0,
            .dtype = s.dtype,
            .precision = precision_of(args),
            .R = s.R,
            .E = s.E,
            .D = s.F,
            .N = s.D,
            .low_rank = lora_out.get()};
  }
};

// Refuses results that the FP8 kernels cannot produce.
ab_status check_fp8(const ab_expert_ffn_forward_args& args) {
  if (!is_fp8(args) || args.a == nullptr || args.a_scales != nullptr) return ok();
  return error(AB_UNSUPPORTED,
               "a: got a tensor without a_scales, expected float8_e4m3 and a_scales, or NULL, with AB_PRECISION_FP8");
}

}  // namespace
}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" {

ab_status ab_cuda_expert_ffn_forward_workspace(const ab_expert_ffn_forward_args* args, const ab_exec* exec,
                                               size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  FfnSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  AB_RETURN_IF_ERROR(cuda::check_fp8(*args));
  return report_workspace(cuda::Forward(*args, s, nullptr).workspace.size(), bytes);
}

ab_status ab_cuda_expert_ffn_forward(const ab_expert_ffn_forward_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  FfnSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  AB_RETURN_IF_ERROR(cuda::check_fp8(*args));
  cuda::Forward op(*args, s, exec);
  AB_RETURN_IF_ERROR(check_workspace(exec, op.workspace.size()));
  AB_RETURN_IF_ERROR(cuda::ArrivingTokens::find("x", args->arriving, args->arriving_buffer, args->x, &op.arriving));
  cuda::Device device;
  AB_RETURN_IF_ERROR(cuda::find_device_of_experts("expert_ffn_forward", &device));
  const cudaStream_t stream = cuda::stream_of(exec);
  return op.fp8 ? op.run_fp8(device, stream) : op.run(device, stream);
}

}  // extern "C"
