"""Routing, plan, dispatch and the layer in eager torch, as users write them, on the device of the arguments."""

from collections.abc import Callable
from typing import Any

from benchmarks.shapes import RouterCase


def dense(case: RouterCase, logits: Any, bias: Any) -> tuple[Any, Any]:
    """Computes dense probabilities and the byte map with topk and scatter."""
    import torch

    z = logits.float()
    softmax = case.score_function == "softmax"
    scores = z if softmax and case.normalize else torch.softmax(z, -1) if softmax else torch.sigmoid(z)
    with torch.no_grad():
        keys = scores + bias.float() if case.bias else z
        groups, group_topk = case.groups
        if groups:
            grouped = keys.view(-1, groups, case.E // groups)
            best = grouped.topk(case.K // group_topk, dim=-1)[0].sum(-1).topk(group_topk, dim=-1)[1]
            keep = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=z.device).scatter(1, best, True)
            keys = grouped.masked_fill(~keep[..., None], float("-inf")).view_as(z)
        experts = keys.topk(case.K, dim=-1)[1]
    weights = scores.gather(1, experts)
    if case.normalize:
        weights = torch.softmax(weights, -1) if softmax else weights / (weights.sum(-1, keepdim=True) + 1e-20)
    probs = torch.zeros_like(logits).scatter(1, experts, weights.to(logits.dtype))
    return probs, torch.zeros(z.shape, dtype=torch.bool, device=z.device).scatter(1, experts, True)


def plan(experts: Any, num_experts: int) -> tuple[Any, Any, Any, Any]:
    """Computes the same as `xla.plan`. row_of_slot and slot_of_row are int64, as torch.sort returns them."""
    import torch

    keys, slot_of_row = experts.flatten().sort(stable=True)
    bounds = torch.arange(num_experts + 1, dtype=keys.dtype, device=keys.device)
    offsets = torch.searchsorted(keys, bounds, out_int32=True)
    rows = torch.arange(keys.numel(), device=keys.device)
    row_of_slot = torch.empty_like(rows).scatter_(0, slot_of_row, rows)
    return offsets.diff(), offsets, row_of_slot.view(experts.shape), slot_of_row


def dispatch(experts: Any) -> dict[str, Callable[..., Any]]:
    """Returns dispatch, combine and their backward passes for experts [T, K]; see `benchmarks.dispatch`."""
    import torch

    T, K = experts.shape
    order = experts.reshape(-1).argsort(stable=True)
    token = order // K

    def gather_sum(rows: Any) -> Any:
        return rows.new_zeros(T, rows.shape[1]).index_add_(0, token, rows)

    def weighted(rows: Any, weights: Any) -> Any:
        return rows * weights.reshape(-1)[order][:, None].to(rows.dtype)

    def combine_backward(d_out: Any, rows: Any, weights: Any) -> tuple[Any, Any]:
        gathered = d_out.index_select(0, token)
        by_row = (gathered * rows).sum(1, dtype=torch.float32)
        return weighted(gathered, weights), torch.empty_like(by_row).index_copy_(0, order, by_row).view(T, K)

    return {
        "dispatch": lambda x: x.index_select(0, token),
        "dispatch backward": gather_sum,
        "combine": lambda rows, weights: gather_sum(weighted(rows, weights)),
        "combine backward": combine_backward,
    }


def network(x: Any, w_in: Any, w_out: Any, token: Any, ends: Any) -> Any:
    """Computes SwiGLU experts with grouped GEMMs on rows grouped by expert. Row r reads x[token[r]].

    ends: int32 [E], the end of each expert's rows.
    """
    import torch

    E, D, _, F = w_in.shape
    h = grouped_mm(x.index_select(0, token), w_in.view(E, D, 2 * F), ends)
    return grouped_mm(torch.nn.functional.silu(h[:, :F]) * h[:, F:], w_out, ends)


def grouped_mm(a: Any, b: Any, ends: Any) -> Any:
    """Calls torch's grouped GEMM.

    Raises:
      NotImplementedError: this version of torch has no grouped_mm.
    """
    import torch

    function = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if function is None:
        raise NotImplementedError(f"torch {torch.__version__} has no grouped_mm")
    return function(a, b, offs=ends)


def select(x: Any, gate: Any, experts: Any, *, topk: int) -> tuple[Any, Any]:
    """Returns weights and experts [T, K]. Selects the top K if experts is None. Experts are int64."""
    import torch

    logits = (x @ gate).float()
    if experts is None:
        top, experts = logits.topk(topk, dim=-1)
    else:
        top = logits.gather(1, experts)
    return torch.softmax(top, -1), experts


def layer(x: Any, gate: Any, w_in: Any, w_out: Any, experts: Any = None, *, topk: int) -> Any:
    """Computes the layer with topk, a stable sort, two grouped GEMMs and index_add, without host synchronisation.

    Args:
      x: [T, D].
      gate: [D, E].
      w_in: [E, D, 2, F].
      w_out: [E, F, D].
      experts: int64 [T, K], or None: the gate decides.
      topk: K.

    Returns:
      The output [T, D]. It is differentiable.
    """
    import torch

    E = gate.shape[1]
    weights, experts = select(x, gate, experts, topk=topk)
    keys, order = experts.flatten().sort(stable=True)
    token = order // topk
    numbers = torch.arange(E, dtype=keys.dtype, device=keys.device)
    ends = torch.searchsorted(keys, numbers, right=True, out_int32=True)
    y = network(x, w_in, w_out, token, ends)
    weighted = (y * weights.flatten().index_select(0, order)[:, None]).to(x.dtype)
    return torch.zeros_like(x).index_add(0, token, weighted)


def loop_layer(x: Any, gate: Any, w_in: Any, w_out: Any, experts: Any = None, *, topk: int) -> Any:
    """Computes `layer` with a loop over experts, as in model code for the CPU."""
    import torch

    E, D, _, F = w_in.shape
    weights, experts = select(x, gate, experts, topk=topk)
    output = torch.zeros_like(x)
    for e in range(E):
        token, k = torch.where(experts == e)
        h = x[token] @ w_in[e].reshape(D, 2 * F)
        y = (torch.nn.functional.silu(h[:, :F]) * h[:, F:]) @ w_out[e]
        output.index_add_(0, token, (y * weights[token, k, None]).to(x.dtype))
    return output
