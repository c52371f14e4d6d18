"""The whole layer on torch tensors, without JAX: operands, ours through C, and torch's."""

from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import timing
from benchmarks.c_call import c_call
from benchmarks.shapes import LayerShape, zipf_experts


class Operands(NamedTuple):
    """leaves: x, gate, w_in, w_out; d_out; experts: int64 [T, K], or None: the gate decides."""

    leaves: tuple[Any, Any, Any, Any]
    d_out: Any
    experts: Any


Calls = dict[str, Callable[[], Any]]
"""Calls by name. "forward" returns the output; "both" returns the output and the gradients of the leaves."""


def operands(shape: LayerShape, dtype: str, routing: str, device: str, seed: int = 0) -> Operands:
    """Returns operands with the same distribution as layer_jax.operands, and the same experts if they are given."""
    torch, normal = timing.torch_on(device), timing.normal_on(device, dtype, seed)
    T, D, F, E, _ = shape
    leaves = (
        normal(T, D),
        normal(D, E, scale=D**-0.5),
        normal(E, D, 2, F, scale=D**-0.5),
        normal(E, F, D, scale=F**-0.5),
    )
    experts = torch.from_numpy(zipf_experts(shape, seed)).to(device, torch.int64) if routing == "zipf" else None
    return Operands(tuple(leaf.requires_grad_() for leaf in leaves), normal(T, D), experts)


def largest_load(given: Operands, topk: int) -> float:
    """Returns the rows of the busiest expert divided by the mean."""
    import torch

    from benchmarks.peers.torch import select

    x, gate, *_ = given.leaves
    with torch.no_grad():
        sizes = torch.bincount(select(x, gate, given.experts, topk=topk)[1].flatten(), minlength=gate.shape[1])
    return float(sizes.max() / sizes.float().mean())


def torch_calls(layer: Callable[..., Any], given: Operands, topk: int) -> Calls:
    """Returns the calls of an eager layer; see peers.torch."""
    import torch

    def forward() -> Any:
        with torch.no_grad():
            return layer(*given.leaves, given.experts, topk=topk)

    def both() -> Any:
        output = layer(*given.leaves, given.experts, topk=topk)
        return output, *torch.autograd.grad(output, given.leaves, given.d_out)

    return {"forward": forward, "both": both}


def calls_of(by: str, given: Operands, topk: int) -> Calls:
    """Returns the calls of an implementation: c, torch, torch-loop or sonicmoe."""
    if by == "c":
        return c_calls(given, topk)
    if by == "sonicmoe":
        from benchmarks.peers.sonicmoe import calls

        return calls(given, topk)
    from benchmarks.peers import torch as eager

    return torch_calls({"torch": eager.layer, "torch-loop": eager.loop_layer}[by], given, topk)


def c_calls(given: Operands, topk: int) -> Calls:
    """Returns our calls through C, as a C++ program would make them.

    torch computes the gate's GEMMs, for which we have no function.
    """
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
    route = c_call(
        "router_forward",
        **routing,
        **forced,
        weights=weights,
        experts=experts,
        tokens_per_expert=tokens_per_expert,
        score_sum=score_sum,
        lse=lse,
    )
    plan = c_call(
        "plan",
        num_experts=E,
        experts=experts,
        tokens_per_expert=tokens_per_expert,
        group_sizes=group_sizes,
        offsets=empty(E + 1, dtype=torch.int32),
        row_of_slot=row_of_slot,
        slot_of_row=slot_of_row,
        dropped=empty(dtype=torch.int32),
    )
    rows = {"slot_of_row": slot_of_row, "group_sizes": group_sizes}
    ffn = {"topk": K, "x": x, "w_in": w_in, **rows}
    ffn_forward = {
        name: c_call("expert_ffn_forward", **ffn, a=a, **saved)
        for name, saved in (("without h", {}), ("with h", {"h": h}))
    }
    down = c_call("grouped_matmul_combine", x=a, w=w_out, **rows, row_of_slot=row_of_slot, weights=weights, out=output)
    ffn_backward = c_call(
        "expert_ffn_backward",
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
    route_backward = c_call(
        "router_backward", **routing, experts=experts, lse=lse, d_weights=d_weights, d_logits=d_logits
    )
    through_logits = empty(T, D)
    add_up = c_call(
        "grouped_matmul_combine",
        transpose_w=1,
        backward=1,
        x=h.reshape(R, 2 * F),  # h contains dh by then
        w=w_in.reshape(E, D, 2 * F),
        **rows,
        row_of_slot=row_of_slot,
        addend=through_logits,
        out=d_x,
    )

    def forward(name: str = "without h") -> Any:
        if x.is_cuda:
            torch.mm(x, gate, out_dtype=torch.float32, out=logits)
        else:
            torch.mm(x.float(), gate.float(), out=logits)
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

    return {"forward": forward, "both": both}
