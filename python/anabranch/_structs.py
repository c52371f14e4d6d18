"""The structs of the C interface (include/anabranch/*.h) for ctypes, each described once."""

import ctypes
from typing import Any

MAX_RANK = 6
EXCHANGE_BUFFERS = 4


class Tensor(ctypes.Structure):
    """ab_tensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.c_int64 * MAX_RANK),
        ("strides", ctypes.c_void_p),
    )


class Exec(ctypes.Structure):
    """ab_exec."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("num_threads", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_size", ctypes.c_size_t),
    )


KINDS = {
    "i": ctypes.c_int32,
    "f": ctypes.c_float,
    "t": ctypes.POINTER(Tensor),
    "e": ctypes.c_void_p,
    "b": ctypes.c_int64 * EXCHANGE_BUFFERS,
}

#: The fields of ab_NAME_args after `size`, in order. A prefix gives the type of the names after it: "i:" int32, "f:"
#: float, "t:" pointer to a tensor, "e:" an exchange, "b:" the bytes of its buffers.
_FIELDS = {
    "router_forward": "i:topk,score_function,normalize,num_groups,group_topk f:scaling_factor "
    "t:logits,expert_bias,token_mask,forced_experts,weights,experts,tokens_per_expert,score_sum,lse,probs,routing_map,"
    "aux_scores i:group_score_topk t:qb_bin_bounds,qb_histogram",
    "router_backward": "i:topk,score_function,normalize f:scaling_factor "
    "t:logits,experts,token_mask,lse,d_weights,d_probs,d_score_sum,d_aux_scores,d_lse,d_logits,routing_map",
    "load_balance_loss": "i:topk f:coeff t:score_sum,tokens_per_expert,num_tokens,loss,d_score_sum",
    "moe_aux_loss": "i:topk,num_experts f:coeff t:probs,tokens_per_expert,num_tokens,d_loss,loss,d_probs",
    "score_sum": "t:scores,score_sum",
    "plan": "i:num_experts,align_size,num_destinations "
    "t:experts,routing_map,tokens_per_expert,group_sizes,offsets,row_of_slot,slot_of_row,dropped,row_id_map "
    "i:is_part,first_expert",
    "dispatch": "t:x,row_of_slot,slot_of_row,weights,rows",
    "combine": "t:rows,row_of_slot,weights,out,addend",
    "combine_backward": "t:d_out,rows,row_of_slot,slot_of_row,weights,d_rows,d_weights",
    "sort_chunks": "i:inverse t:x,split_sizes,sorted_indices,out,row_id_map",
    "expand_row_id_map": "t:row_id_map,pad_offsets,row_of_slot,slot_of_row",
    "quantize_rows": "i:fp8_scales t:x,q,scales",
    "quantize_weights": "i:fp8_scales t:w,q,q_transposed,scales",
    "pack_mxfp4": "i:scale_rule t:w,codes,scales",
    "unpack": "t:packed,scales,w",
    "grouped_matmul": "i:transpose_w t:x,w,group_sizes,y i:precision,fp8_scales t:x_scales,w_q,w_scales "
    "f:lora_scale t:lora_a,lora_b,lora_u",
    "grouped_matmul_dw": "i:accumulate t:x,d_y,group_sizes,d_w i:precision,reserved",
    "grouped_matmul_combine": "i:transpose_w,weight_early,skip_rest "
    "t:x,w,group_sizes,bias,slot_of_row,row_of_slot,weights,addend,out "
    "i:backward,precision,fp8_scales t:x_scales,w_q,w_scales f:lora_scale t:lora_a,lora_b,lora_u,w_block_scales "
    "e:returning i:returning_buffer,returning_reserved",
    "expert_ffn_forward": "i:activation,weight_early,topk,skip_rest "
    "t:x,slot_of_row,group_sizes,w_in,b_in,w_out,b_out,weights,y,h,a f:activation_alpha,activation_limit "
    "i:precision,fp8_scales t:w_in_q,w_in_scales,w_out_q,w_out_scales,a_scales,x_q,x_scales "
    "f:lora_scale_in,lora_scale_out t:lora_a_in,lora_b_in,lora_a_out,lora_b_out,lora_u,lora_z,"
    "lora_a_in_copy,lora_b_in_copy,lora_a_out_copy,lora_b_out_copy,w_in_block_scales,w_out_block_scales "
    "e:arriving i:arriving_buffer,arriving_reserved",
    "expert_ffn_backward": "i:activation,topk,accumulate,skip_rest "
    "t:x,slot_of_row,group_sizes,w_in,w_out,b_out,weights,h,d_out,dh,dx_rows,d_w_in,d_b_in,d_w_out,d_b_out,d_weights,"
    "weighted_a f:activation_alpha,activation_limit i:precision,fp8_scales "
    "t:w_in_q,w_in_scales,w_out_q,w_out_scales,dh_q,dh_scales,d_out_q,d_out_scales f:lora_scale_in,lora_scale_out "
    "t:lora_a_in,lora_b_in,lora_a_out,lora_b_out,lora_u,lora_v_in,lora_v_out,"
    "d_lora_a_in,d_lora_b_in,d_lora_a_out,d_lora_b_out,w_in_block_scales,w_out_block_scales "
    "e:arriving i:arriving_buffer,arriving_reserved",
    "exchange_create": "i:device,rank,ranks f:timeout b:buffer_bytes",
    "exchange_all_gather": "e:exchange i:buffer,lockstep,part,reserved t:x,out,x_2,out_2,x_3,out_3",
    "exchange_all_to_all": "e:exchange i:buffer,lockstep,part,reserved t:x,out",
    "exchange_release": "e:exchange i:buffer,reserved",
    "exchange_sum": "e:exchange i:buffer f:factor t:sums,addend,out",
}


def _struct(name: str, fields: str) -> Any:
    members: list[tuple[str, Any]] = [("size", ctypes.c_size_t)]
    for part in fields.split():
        kind, names = part.split(":")
        members += [(field, KINDS[kind]) for field in names.split(",")]
    return type(f"ab_{name}_args", (ctypes.Structure,), {"_fields_": members})


#: The argument struct of every operation, by the operation's name.
ARGS: dict[str, Any] = {name: _struct(name, fields) for name, fields in _FIELDS.items()}
