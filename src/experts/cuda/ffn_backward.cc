// ab_cuda_expert_ffn_backward: gradients of the intermediate rows first, then all gradients that depend on them.
#include <algorithm>
#include <utility>

#include "anabranch/cuda.h"
#include "core/cuda/launch.h"
#include "core/entry.h"
#include "core/range.h"
#include "core/tensor.h"
#include "core/workspace.h"
#include "experts/check.h"
#include "experts/cuda/arriving_rows.h"
#include "experts/cuda/bias_gradient.h"
#include "experts/cuda/convert.h"
#include "experts/cuda/fp8_operands.h"
#include "experts/cuda/lora_backward.h"
#include "experts/cuda/ops/workspace_sizes.h"
#include "experts/cuda/packed.h"
#include "experts/cuda/path.h"
#include "experts/cuda/phases.h"
#include "experts/cuda/slot_gradient.h"

namespace anabranch::cuda {
namespace {

struct Backward {
  const ab_expert_ffn_backward_args& args;
  FfnSizes s;
  RowMap map;
  Workspace workspace;
  Floats weighted_a;  // [R, F]
  Floats dh;          // [R, P, F]
  Floats d_out;       // [T, D] or [R, D] in the dtype of x; converted in the workspace if it has another dtype
  bool fp8;
  // FP8 (e4m3) operands:
  Fp8Output d_y8;
  Fp8Output dh8;  // null if nothing needs it
  Fp8WeightOperand w_out;
  Fp8WeightOperand w_in;
  LoraBackward lora;
  int32_t* bounds;  // [E, 2], of the rows that arrive first
  ArrivingTokens arriving;
  MaybePacked plain_w_in;
  MaybePacked plain_w_out;
  void* unpacked;  // shared by both
  void* scratch;   // shared by consecutive steps

  Backward(const ab_expert_ffn_backward_args& arguments, const FfnSizes& sizes, const ab_exec* memory)
      : args(arguments),
        s(sizes),
        map(args.slot_of_row, s.T, s.K, s.R),
        workspace(memory),
        weighted_a(args.weighted_a != nullptr ? Floats(args.weighted_a) : row_buffer(needs_weighted_a(args), s.F)),
        dh(args.dh != nullptr ? Floats(args.dh) : row_buffer(needs_dh(), s.P * s.F)),
        d_out(converts() ? Floats(workspace.take_rows(args.d_out->shape[0], s.D, args.x->dtype), args.x->dtype)
                         : Floats(args.d_out)),
        fp8(is_fp8(args)),
        lora(workspace, args, s),
        bounds(workspace.take<int32_t>(args.arriving == nullptr ? 0 : 2 * s.E)),
        plain_w_in(args.w_in, args.w_in_block_scales, s.E, s.P * s.F, s.D, s.dtype),
        plain_w_out(args.w_out, args.w_out_block_scales, s.E, s.D, s.F, s.dtype),
        unpacked(workspace.take_bytes(std::max(args.dx_rows == nullptr ? 0 : plain_w_in.scratch_bytes(),
                                               args.h == nullptr ? 0 : plain_w_out.scratch_bytes()))) {
    if (fp8) take_fp8();
    scratch = workspace.take_bytes(scratch_bytes());
  }

  void take_fp8() {
    const bool power_of_two = uses_power_of_two_scales(args);
    dh8 = args.dh_q != nullptr ? given_fp8_rows(args.dh_q, args.dh_scales, power_of_two)
                               : take_fp8_rows(workspace, args.dx_rows != nullptr, s.R, s.P * s.F, power_of_two);
    if (args.h != nullptr) {
      d_y8 = args.d_out_q != nullptr ? given_fp8_rows(args.d_out_q, args.d_out_scales, power_of_two)
                                     : take_fp8_rows(workspace, true, args.d_out->shape[0], s.D, power_of_two);
      w_out = Fp8WeightOperand(workspace, args.w_out, args.w_out_q, args.w_out_scales, sizes_of_w_out(s), true,
                               power_of_two);
    }
    if (args.dx_rows != nullptr) {
      w_in =
          Fp8WeightOperand(workspace, args.w_in, args.w_in_q, args.w_in_scales, sizes_of_w_in(s), true, power_of_two);
    }
  }

  ab_status compute_intermediate_fp8(const Device& device, cudaStream_t stream) const {
    if (args.d_out_q == nullptr) {
      AB_RETURN_IF_ERROR(quantize_rows(Floats(args.d_out), args.d_out->shape[0], s.D, d_y8, stream));
    }
    AB_RETURN_IF_ERROR(w_out.fill(stream));
    return compute_intermediate_gradient(intermediate_gradient_fp8(), device, stream);
  }

  ab_status compute_intermediate(const Device& device, cudaStream_t stream) const {
    const PackedIntermediateGradient packed{intermediate_gradient(), plain_w_out.matrices()};
    return compute_maybe_packed(plain_w_out.is_packed(), packed, device, stream, [&] {
      return plain_w_out.for_ranges(unpacked, group_sizes(), device, stream, [&](auto range, void* w) {
        IntermediateGradient op = intermediate_gradient();
        op.range = range;
        op.w_out = Floats(w, s.dtype);
        return compute_intermediate_gradient(op, device, stream);
      });
    });
  }

  ab_status compute_inputs(const Device& device, cudaStream_t stream) const {
    const PackedRowsProduct packed{inputs(), plain_w_in.matrices()};
    return compute_maybe_packed(plain_w_in.is_packed(), packed, device, stream, [&] {
      return plain_w_in.for_ranges(unpacked, group_sizes(), device, stream, [&](auto range, const void* w) {
        RowsProduct op = inputs();
        op.range = range;
        op.w = w;
        return compute_rows_product(op, device, stream);
      });
    });
  }

  Fp8IntermediateGradient intermediate_gradient_fp8() const {
    return {intermediate_gradient(), rows_of(d_y8), w_out.weights(), dh8};
  }

  // If dh comes from an earlier call without its quantised form, quantise it per part: gate and up have separate
  // blocks.
  ab_status compute_inputs_fp8(const Device& device, cudaStream_t stream) const {
    if (args.h == nullptr && args.dh_q == nullptr) {
      AB_RETURN_IF_ERROR(s.layout.interleaved ? quantize_pairs(dh, s.R, s.F, dh8, stream)
                                              : quantize_rows(dh, s.R, s.P * s.F, dh8, stream));
    }
    AB_RETURN_IF_ERROR(w_in.fill(stream));
    return compute_rows_product(Fp8RowsProduct{inputs(), rows_of(dh8), w_in.weights()}, device, stream);
  }

  bool converts() const { return args.d_out != nullptr && args.d_out->dtype != args.x->dtype; }
  bool needs_dh() const {
    return args.dx_rows != nullptr || args.d_w_in != nullptr || args.d_b_in != nullptr || needs_dh_for_lora(args, s);
  }

  Floats row_buffer(bool needed, int64_t columns) {
    return {workspace.take_rows(needed ? s.R : 0, columns, args.x->dtype), args.x->dtype};
  }

  size_t scratch_bytes() const {
    return std::max({args.d_weights == nullptr ? 0 : dots_bytes(s.R, s.F),
                     args.d_w_out == nullptr ? 0 : weight_gradient_bytes(s.R, s.E, s.F, s.D),
                     args.d_b_out == nullptr ? 0 : workspace_of(out_bias()),
                     args.d_w_in == nullptr ? 0 : weight_gradient_bytes(s.R, s.E, s.D, s.P * s.F),
                     args.d_b_in == nullptr ? 0 : workspace_of(in_bias()), lora.scratch_bytes()});
  }

  const int32_t* group_sizes() const { return data<const int32_t>(args.group_sizes); }

  IntermediateGradient intermediate_gradient() const {
    IntermediateGradient gradient;
    gradient.s = s;
    gradient.map = map;
    gradient.group_sizes = group_sizes();
    gradient.activation = activation_of(args.activation, args.activation_alpha, args.activation_limit);
    gradient.precision = precision_of(args);
    gradient.skips_rest = args.skip_rest != 0;
    gradient.d_y = d_out;
    gradient.w_out = args.w_out_block_scales != nullptr ? Floats(unpacked, s.dtype) : Floats(args.w_out);
    gradient.weights = Floats(args.weights);
    gradient.h = Floats(args.h);
    gradient.dh = dh;
    gradient.weighted_a = weighted_a;
    gradient.low_rank = lora.out();
    if (args.d_weights != nullptr) gradient.dots = static_cast<float*>(scratch);
    return gradient;
  }

  SlotGradient slots(const Device& device) const {
    SlotGradient slots;
    slots.s = s;
    slots.map = map;
    slots.group_sizes = group_sizes();
    slots.dots = static_cast<const float*>(scratch);
    slots.parts = fp8 ? dot_parts(intermediate_gradient_fp8()) : dot_parts(intermediate_gradient(), device);
    slots.d_y = d_out;
    slots.b_out = Floats(args.b_out);
    slots.d_weights = data<float>(args.d_weights);
    return slots;
  }

  // dW_out = (w a)^T d_y
  WeightGradient out_weights() const {
    WeightGradient gradient = product_of({.rows = weighted_a, .columns = s.F},
                                         {.rows = d_out, .columns = s.D, .gathered = true}, s.layout.out_transposed);
    gradient.d_w = Floats(args.d_w_out);
    return gradient;
  }

  // dW_in = x^T dh
  WeightGradient in_weights() const {
    WeightGradient gradient = product_of({.rows = Floats(args.x), .columns = s.D, .gathered = true},
                                         {.rows = dh, .columns = s.P * s.F}, s.layout.in_transposed);
    gradient.d_w = Floats(args.d_w_in);
    return gradient;
  }

  struct Operand {
    Floats rows;
    int64_t columns;
    bool gathered = false;
  };
  // a^T b, or its transpose.
  WeightGradient product_of(Operand a, Operand b, bool transposed) const {
    if (transposed) std::swap(a, b);
    WeightGradient gradient;
    gradient.map = map;
    gradient.x = a.rows;
    gradient.gathers_x = a.gathered;
    gradient.d_y = b.rows;
    gradient.gathers_d_y = b.gathered;
    gradient.group_sizes = group_sizes();
    gradient.precision = precision_of(args);
    gradient.accumulates = args.accumulate != 0;
    gradient.R = s.R;
    gradient.E = s.E;
    gradient.D = a.columns;
    gradient.N = b.columns;
    return gradient;
  }

  // db_out = sum w d_y
  BiasGradient out_bias() const {
    return {.map = map,
            .gathers = true,
            .m = d_out,
            .weights = Floats(args.weights),
            .group_sizes = group_sizes(),
            .d_bias = Floats(args.d_b_out),
            .R = s.R,
            .E = s.E,
            .N = s.D};
  }

  // db_in = sum dh
  BiasGradient in_bias() const {
    return {.map = map,
            .m = dh,
            .group_sizes = group_sizes(),
            .d_bias = Floats(args.d_b_in),
            .R = s.R,
            .E = s.E,
            .N = s.P * s.F};
  }

  // dx = dh W_in^T
  RowsProduct inputs() const {
    return {.x = dh.data,
            .w = data<const void>(args.w_in),
            .transposed = !s.layout.in_transposed,
            .group_sizes = group_sizes(),
            .y = args.dx_rows->data,
            .map = map,
            .dtype = dh.dtype,
            .precision = precision_of(args),
            .R = s.R,
            .E = s.E,
            .D = s.P * s.F,
            .N = s.D,
            .low_rank = lora.in()};
  }

  // The rows that the adapters read.
  LoraBackward::Rows rows() const {
    return {.map = map, .d_out = d_out, .weighted_a = weighted_a, .dh = dh, .scratch = scratch};
  }

  // Computes the gradients of the intermediate rows while d_out is arriving.
  ab_status compute_arriving_intermediate(const Device& device, cudaStream_t stream) const {
    const auto compute = [&](const IntermediateGradient& gradient) {
      return compute_intermediate_gradient(gradient, device, stream);
    };
    return compute_when_arrived(intermediate_gradient(), arriving, pays_to_split(arriving, 0), bounds, device, stream,
                                compute);
  }

  ab_status run(const Device& device, cudaStream_t stream) const {
    AB_RETURN_IF_ERROR(run_hidden(device, stream));
    AB_RETURN_IF_ERROR(run_weights(device, stream));
    if (args.dx_rows == nullptr) return ok();
    const Range range(Phase::d_x);
    return fp8 ? compute_inputs_fp8(device, stream) : compute_inputs(device, stream);
  }

  // The gradients of the intermediate rows and of the weights of routing, and the operands of the adapters.
  ab_status run_hidden(const Device& device, cudaStream_t stream) const {
    const Range range(args.h != nullptr ? Phase::hidden_gradient : Phase::weight_gradients);
    const bool arrives_first =
        fp8 || converts() || s.rank_in + s.rank_out > 0 || args.h == nullptr || args.w_out_block_scales != nullptr;
    if (arriving && arrives_first) AB_RETURN_IF_ERROR(arriving.await_all(stream));
    if (converts()) {
      AB_RETURN_IF_ERROR(
          convert(Floats(args.d_out), d_out, args.d_out->shape[0] * s.D, device.multiprocessors, stream));
    }
    AB_RETURN_IF_ERROR(lora.fill(device, stream));
    AB_RETURN_IF_ERROR(lora.compute_v_out(rows(), device, stream));
    if (args.h != nullptr) {
      AB_RETURN_IF_ERROR(fp8                          ? compute_intermediate_fp8(device, stream)
                         : arriving && !arrives_first ? compute_arriving_intermediate(device, stream)
                                                      : compute_intermediate(device, stream));
    }
    if (args.d_weights == nullptr) return ok();
    return compute_slot_gradient(slots(device), device.multiprocessors, stream);
  }

  // The gradients of the experts' parameters.
  ab_status run_weights(const Device& device, cudaStream_t stream) const {
    const Range range(Phase::weight_gradients);
    const int multiprocessors = device.multiprocessors;
    if (args.d_w_out != nullptr) AB_RETURN_IF_ERROR(compute_weight_gradient(out_weights(), scratch, device, stream));
    if (args.d_b_out != nullptr) {
      AB_RETURN_IF_ERROR(compute_bias_gradient(out_bias(), scratch, multiprocessors, stream));
    }
    if (args.d_w_in != nullptr) AB_RETURN_IF_ERROR(compute_weight_gradient(in_weights(), scratch, device, stream));
    if (args.d_b_in != nullptr) {
      AB_RETURN_IF_ERROR(compute_bias_gradient(in_bias(), scratch, multiprocessors, stream));
    }
    return lora.compute_v_in_and_gradients(rows(), device, stream);
  }
};

}  // namespace
}  // namespace anabranch::cuda

using namespace anabranch;

extern "C" {

ab_status ab_cuda_expert_ffn_backward_workspace(const ab_expert_ffn_backward_args* args, const ab_exec* exec,
                                                size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  FfnSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  return report_workspace(cuda::Backward(*args, s, nullptr).workspace.size(), bytes);
}

ab_status ab_cuda_expert_ffn_backward(const ab_expert_ffn_backward_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  FfnSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  cuda::Backward op(*args, s, exec);
  AB_RETURN_IF_ERROR(check_workspace(exec, op.workspace.size()));
  AB_RETURN_IF_ERROR(
      cuda::ArrivingTokens::find("d_out", args->arriving, args->arriving_buffer, args->d_out, &op.arriving));
  cuda::Device device;
  AB_RETURN_IF_ERROR(cuda::find_device_of_experts("expert_ffn_backward", &device));
  return op.run(device, cuda::stream_of(exec));
}

}  // extern "C"
