#include "core/xla.h"
#include "anabranch/experts.h"

namespace {

using anabranch::xla::Field;

// XLA's results are buffers of their own, so `accumulate` is not offered here.

constexpr Field kQuantizeRowsFields[] = {
    AB_INT32(ab_quantize_rows_args, fp8_scales),
    AB_TENSOR(ab_quantize_rows_args, x),
    AB_TENSOR(ab_quantize_rows_args, q),
    AB_TENSOR(ab_quantize_rows_args, scales),
};

constexpr Field kQuantizeWeightsFields[] = {
    AB_INT32(ab_quantize_weights_args, fp8_scales), AB_TENSOR(ab_quantize_weights_args, w),
    AB_TENSOR(ab_quantize_weights_args, q),         AB_TENSOR(ab_quantize_weights_args, q_transposed),
    AB_TENSOR(ab_quantize_weights_args, scales),
};

constexpr Field kPackMxfp4Fields[] = {
    AB_INT32(ab_pack_mxfp4_args, scale_rule),
    AB_TENSOR(ab_pack_mxfp4_args, w),
    AB_TENSOR(ab_pack_mxfp4_args, codes),
    AB_TENSOR(ab_pack_mxfp4_args, scales),
};

constexpr Field kUnpackFields[] = {
    AB_TENSOR(ab_unpack_args, packed),
    AB_TENSOR(ab_unpack_args, scales),
    AB_TENSOR(ab_unpack_args, w),
};

constexpr Field kGroupedMatmulFields[] = {
    AB_INT32(ab_grouped_matmul_args, transpose_w),
    AB_TENSOR(ab_grouped_matmul_args, x),
    AB_TENSOR(ab_grouped_matmul_args, w),
    AB_TENSOR(ab_grouped_matmul_args, group_sizes),
    AB_TENSOR(ab_grouped_matmul_args, y),
    AB_LATER_INT32(ab_grouped_matmul_args, precision),
    AB_LATER_INT32(ab_grouped_matmul_args, fp8_scales),
    AB_TENSOR(ab_grouped_matmul_args, x_scales),
    AB_TENSOR(ab_grouped_matmul_args, w_q),
    AB_TENSOR(ab_grouped_matmul_args, w_scales),
    AB_LATER_FLOAT(ab_grouped_matmul_args, lora_scale),
    AB_TENSOR(ab_grouped_matmul_args, lora_a),
    AB_TENSOR(ab_grouped_matmul_args, lora_b),
    AB_TENSOR(ab_grouped_matmul_args, lora_u),
};

constexpr Field kGroupedMatmulDwFields[] = {
    AB_TENSOR(ab_grouped_matmul_dw_args, x),
    AB_TENSOR(ab_grouped_matmul_dw_args, d_y),
    AB_TENSOR(ab_grouped_matmul_dw_args, group_sizes),
    AB_TENSOR(ab_grouped_matmul_dw_args, d_w),
    AB_LATER_INT32(ab_grouped_matmul_dw_args, precision),
};

constexpr Field kGroupedMatmulCombineFields[] = {
    AB_INT32(ab_grouped_matmul_combine_args, transpose_w),
    AB_LATER_INT32(ab_grouped_matmul_combine_args, backward),
    AB_INT32(ab_grouped_matmul_combine_args, weight_early),
    AB_INT32(ab_grouped_matmul_combine_args, skip_rest),
    AB_TENSOR(ab_grouped_matmul_combine_args, x),
    AB_TENSOR(ab_grouped_matmul_combine_args, w),
    AB_TENSOR(ab_grouped_matmul_combine_args, group_sizes),
    AB_TENSOR(ab_grouped_matmul_combine_args, bias),
    AB_TENSOR(ab_grouped_matmul_combine_args, slot_of_row),
    AB_TENSOR(ab_grouped_matmul_combine_args, row_of_slot),
    AB_TENSOR(ab_grouped_matmul_combine_args, weights),
    AB_TENSOR(ab_grouped_matmul_combine_args, addend),
    AB_TENSOR(ab_grouped_matmul_combine_args, out),
    AB_LATER_INT32(ab_grouped_matmul_combine_args, precision),
    AB_LATER_INT32(ab_grouped_matmul_combine_args, fp8_scales),
    AB_TENSOR(ab_grouped_matmul_combine_args, x_scales),
    AB_TENSOR(ab_grouped_matmul_combine_args, w_q),
    AB_TENSOR(ab_grouped_matmul_combine_args, w_scales),
    AB_LATER_FLOAT(ab_grouped_matmul_combine_args, lora_scale),
    AB_TENSOR(ab_grouped_matmul_combine_args, lora_a),
    AB_TENSOR(ab_grouped_matmul_combine_args, lora_b),
    AB_TENSOR(ab_grouped_matmul_combine_args, lora_u),
    AB_TENSOR(ab_grouped_matmul_combine_args, w_block_scales),
    AB_EXCHANGE(ab_grouped_matmul_combine_args, returning),
    AB_LATER_INT32(ab_grouped_matmul_combine_args, returning_buffer),
};

constexpr Field kFfnForwardFields[] = {
    AB_INT32(ab_expert_ffn_forward_args, activation),
    AB_LATER_FLOAT(ab_expert_ffn_forward_args, activation_alpha),
    AB_LATER_FLOAT(ab_expert_ffn_forward_args, activation_limit),
    AB_LATER_INT32(ab_expert_ffn_forward_args, precision),
    AB_INT32(ab_expert_ffn_forward_args, weight_early),
    AB_INT32(ab_expert_ffn_forward_args, skip_rest),
    AB_INT32(ab_expert_ffn_forward_args, topk),
    AB_TENSOR(ab_expert_ffn_forward_args, x),
    AB_TENSOR(ab_expert_ffn_forward_args, slot_of_row),
    AB_TENSOR(ab_expert_ffn_forward_args, group_sizes),
    AB_TENSOR(ab_expert_ffn_forward_args, w_in),
    AB_TENSOR(ab_expert_ffn_forward_args, b_in),
    AB_TENSOR(ab_expert_ffn_forward_args, w_out),
    AB_TENSOR(ab_expert_ffn_forward_args, b_out),
    AB_TENSOR(ab_expert_ffn_forward_args, weights),
    AB_TENSOR(ab_expert_ffn_forward_args, y),
    AB_TENSOR(ab_expert_ffn_forward_args, h),
    AB_TENSOR(ab_expert_ffn_forward_args, a),
    AB_LATER_INT32(ab_expert_ffn_forward_args, fp8_scales),
    AB_TENSOR(ab_expert_ffn_forward_args, w_in_q),
    AB_TENSOR(ab_expert_ffn_forward_args, w_in_scales),
    AB_TENSOR(ab_expert_ffn_forward_args, w_out_q),
    AB_TENSOR(ab_expert_ffn_forward_args, w_out_scales),
    AB_TENSOR(ab_expert_ffn_forward_args, a_scales),
    AB_TENSOR(ab_expert_ffn_forward_args, x_q),
    AB_TENSOR(ab_expert_ffn_forward_args, x_scales),
    AB_LATER_FLOAT(ab_expert_ffn_forward_args, lora_scale_in),
    AB_LATER_FLOAT(ab_expert_ffn_forward_args, lora_scale_out),
    AB_TENSOR(ab_expert_ffn_forward_args, lora_a_in),
    AB_TENSOR(ab_expert_ffn_forward_args, lora_b_in),
    AB_TENSOR(ab_expert_ffn_forward_args, lora_a_out),
    AB_TENSOR(ab_expert_ffn_forward_args, lora_b_out),
    AB_TENSOR(ab_expert_ffn_forward_args, lora_u),
    AB_TENSOR(ab_expert_ffn_forward_args, lora_z),
    AB_TENSOR(ab_expert_ffn_forward_args, lora_a_in_copy),
    AB_TENSOR(ab_expert_ffn_forward_args, lora_b_in_copy),
    AB_TENSOR(ab_expert_ffn_forward_args, lora_a_out_copy),
    AB_TENSOR(ab_expert_ffn_forward_args, lora_b_out_copy),
    AB_TENSOR(ab_expert_ffn_forward_args, w_in_block_scales),
    AB_TENSOR(ab_expert_ffn_forward_args, w_out_block_scales),
    AB_EXCHANGE(ab_expert_ffn_forward_args, arriving),
    AB_LATER_INT32(ab_expert_ffn_forward_args, arriving_buffer),
};

constexpr Field kFfnBackwardFields[] = {
    AB_INT32(ab_expert_ffn_backward_args, skip_rest),
    AB_INT32(ab_expert_ffn_backward_args, activation),
    AB_LATER_FLOAT(ab_expert_ffn_backward_args, activation_alpha),
    AB_LATER_FLOAT(ab_expert_ffn_backward_args, activation_limit),
    AB_LATER_INT32(ab_expert_ffn_backward_args, precision),
    AB_INT32(ab_expert_ffn_backward_args, topk),
    AB_TENSOR(ab_expert_ffn_backward_args, x),
    AB_TENSOR(ab_expert_ffn_backward_args, slot_of_row),
    AB_TENSOR(ab_expert_ffn_backward_args, group_sizes),
    AB_TENSOR(ab_expert_ffn_backward_args, w_in),
    AB_TENSOR(ab_expert_ffn_backward_args, w_out),
    AB_TENSOR(ab_expert_ffn_backward_args, b_out),
    AB_TENSOR(ab_expert_ffn_backward_args, weights),
    AB_TENSOR(ab_expert_ffn_backward_args, h),
    AB_TENSOR(ab_expert_ffn_backward_args, d_out),
    AB_TENSOR(ab_expert_ffn_backward_args, dh),
    AB_TENSOR(ab_expert_ffn_backward_args, dx_rows),
    AB_TENSOR(ab_expert_ffn_backward_args, d_w_in),
    AB_TENSOR(ab_expert_ffn_backward_args, d_b_in),
    AB_TENSOR(ab_expert_ffn_backward_args, d_w_out),
    AB_TENSOR(ab_expert_ffn_backward_args, d_b_out),
    AB_TENSOR(ab_expert_ffn_backward_args, d_weights),
    AB_TENSOR(ab_expert_ffn_backward_args, weighted_a),
    AB_LATER_INT32(ab_expert_ffn_backward_args, fp8_scales),
    AB_TENSOR(ab_expert_ffn_backward_args, w_in_q),
    AB_TENSOR(ab_expert_ffn_backward_args, w_in_scales),
    AB_TENSOR(ab_expert_ffn_backward_args, w_out_q),
    AB_TENSOR(ab_expert_ffn_backward_args, w_out_scales),
    AB_TENSOR(ab_expert_ffn_backward_args, dh_q),
    AB_TENSOR(ab_expert_ffn_backward_args, dh_scales),
    AB_TENSOR(ab_expert_ffn_backward_args, d_out_q),
    AB_TENSOR(ab_expert_ffn_backward_args, d_out_scales),
    AB_LATER_FLOAT(ab_expert_ffn_backward_args, lora_scale_in),
    AB_LATER_FLOAT(ab_expert_ffn_backward_args, lora_scale_out),
    AB_TENSOR(ab_expert_ffn_backward_args, lora_a_in),
    AB_TENSOR(ab_expert_ffn_backward_args, lora_b_in),
    AB_TENSOR(ab_expert_ffn_backward_args, lora_a_out),
    AB_TENSOR(ab_expert_ffn_backward_args, lora_b_out),
    AB_TENSOR(ab_expert_ffn_backward_args, lora_u),
    AB_TENSOR(ab_expert_ffn_backward_args, lora_v_in),
    AB_TENSOR(ab_expert_ffn_backward_args, lora_v_out),
    AB_TENSOR(ab_expert_ffn_backward_args, d_lora_a_in),
    AB_TENSOR(ab_expert_ffn_backward_args, d_lora_b_in),
    AB_TENSOR(ab_expert_ffn_backward_args, d_lora_a_out),
    AB_TENSOR(ab_expert_ffn_backward_args, d_lora_b_out),
    AB_TENSOR(ab_expert_ffn_backward_args, w_in_block_scales),
    AB_TENSOR(ab_expert_ffn_backward_args, w_out_block_scales),
    AB_EXCHANGE(ab_expert_ffn_backward_args, arriving),
    AB_LATER_INT32(ab_expert_ffn_backward_args, arriving_buffer),
};

}  // namespace

AB_XLA_HANDLER(quantize_rows, kQuantizeRowsFields, ab_quantize_rows_workspace);
AB_XLA_HANDLER(quantize_weights, kQuantizeWeightsFields, ab_quantize_weights_workspace);
AB_XLA_HANDLER(pack_mxfp4, kPackMxfp4Fields, ab_pack_mxfp4_workspace);
AB_XLA_HANDLER(unpack, kUnpackFields, ab_unpack_workspace);
AB_XLA_HANDLER(grouped_matmul, kGroupedMatmulFields, ab_grouped_matmul_workspace);
AB_XLA_HANDLER(grouped_matmul_dw, kGroupedMatmulDwFields, ab_grouped_matmul_dw_workspace);
AB_XLA_HANDLER(grouped_matmul_combine, kGroupedMatmulCombineFields, ab_grouped_matmul_combine_workspace);
AB_XLA_HANDLER(expert_ffn_forward, kFfnForwardFields, ab_expert_ffn_forward_workspace);
AB_XLA_HANDLER(expert_ffn_backward, kFfnBackwardFields, ab_expert_ffn_backward_workspace);
