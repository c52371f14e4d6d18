"""The whole layer on a GPU through C, as a C++ program would call it.

The gate's products, which no function of ours computes, are torch's: cuBLAS's.
"""

from collections.abc import Callable
from typing import Any

from anabranch.bench.cuda_call import cuda_call
from anabranch.bench.cuda_layer_graphs import Operands


def calls(given: Operands, topk: int) -> dict[str, Callable[[], Any]]:
    """The forward pass, and forward and backward: the output and the gradients of the leaves."""
    import torch

    x, gate, w_in, w_out = (leaf.detach() for leaf in given.leaves)
    (T, D), E, F, K = x.shape, gate.shape[1], w_out.shape[1], topk
    R = T * K

    def empty(*shape: int, dtype: Any = x.dtype) -> Any:
        return torch.empty(shape, dtype=dtype, device=x.device)

    logits, d_logits = (empty(T, E, dtype=torch.float32) for _ in range(2))
    weights, d_weights = (empty(T, K, dtype=torch.float32) for _ in range(2))
    experts, row_of_slot = (empty(T, K, dtype=torch.int32) for _ in range(2))
    lse, score_sum = empty(T, dtype=torch.float32), empty(E, dtype=torch.float32)
    tokens_per_expert, group_sizes = (empty(E, dtype=torch.int32) for _ in range(2))
    slot_of_row = empty(R, dtype=torch.int32)
    a, h, output = empty(R, F), empty(R, 2, F), empty(T, D)
    d_w_in, d_w_out, d_x, d_gate = (torch.empty_like(leaf) for leaf in (w_in, w_out, x, gate))

    routing = {"topk": K, "score_function": 0, "normalize": 1, "scaling_factor": 1.0, "logits": logits}
    forced = {} if given.experts is None else {"forced_experts": given.experts.to(torch.int32)}
    route = cuda_call(
        "ab_cuda_router_forward",
        **routing,
        **forced,
        weights=weights,
        experts=experts,
        tokens_per_expert=tokens_per_expert,
        score_sum=score_sum,
        lse=lse,
    )
    plan = cuda_call(
        "ab_cuda_plan",
        num_experts=E,
        experts=experts,
        tokens_per_expert=tokens_per_expert,
        group_sizes=group_sizes,
        offsets=empty(E + 1, dtype=torch.int32),
        row_of_slot=row_of_slot,
        slot_of_row=slot_of_row,
        dropped=empty(dtype=torch.int32),
    )
    layout = {"slot_of_row": slot_of_row, "group_sizes": group_sizes}
    ffn = {"topk": K, "x": x, "w_in": w_in, **layout}
    ffn_forward = {
        name: cuda_call("ab_cuda_expert_ffn_forward", **ffn, a=a, **kept)
        for name, kept in (("without h", {}), ("with h", {"h": h}))
    }
    down = cuda_call(
        "ab_cuda_grouped_matmul_combine", x=a, w=w_out, **layout, row_of_slot=row_of_slot, weights=weights, out=output
    )
    ffn_backward = cuda_call(
        "ab_cuda_expert_ffn_backward",
        **ffn,
        w_out=w_out,
        weights=weights,
        h=h,
        d_out=given.d_out,
        dh=h,
        d_w_in=d_w_in,
        d_w_out=d_w_out,
        d_weights=d_weights,
    )
    route_backward = cuda_call(
        "ab_cuda_router_backward", **routing, experts=experts, lse=lse, d_weights=d_weights, d_logits=d_logits
    )
    through_logits = empty(T, D)
    add_up = cuda_call(
        "ab_cuda_grouped_matmul_combine",
        transpose_w=1,
        backward=1,
        x=h.reshape(R, 2 * F),  # dh by then
        w=w_in.reshape(E, D, 2 * F),
        **layout,
        row_of_slot=row_of_slot,
        addend=through_logits,
        out=d_x,
    )

    def forward(name: str = "without h") -> Any:
        torch.mm(x, gate, out_dtype=torch.float32, out=logits)
        route()
        plan()
        ffn_forward[name]()
        down()
        return output

    def both() -> Any:
        forward("with h")
        ffn_backward()
        route_backward()
        narrow = d_logits.to(x.dtype)  # as in moe() with a bfloat16 gate
        torch.mm(narrow, gate.T, out=through_logits)
        torch.mm(x.T, narrow, out=d_gate)
        add_up()
        return output, d_x, d_gate, d_w_in, d_w_out

    return {"forward": forward, "forward and backward": both}
