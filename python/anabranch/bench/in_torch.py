"""The routing and the plan as users of torch write them, on the device of their arguments."""

from typing import Any

from anabranch.bench.router_case import RouterCase


def torch_dense(case: RouterCase, logits: Any, bias: Any) -> tuple[Any, Any]:
    """Dense probabilities and byte map as torch users write them: topk and scatter, on the device of the logits."""
    import torch

    z = logits.float()
    softmax = case.score_function == "softmax"
    scores = z if softmax and case.normalize else torch.softmax(z, -1) if softmax else torch.sigmoid(z)
    with torch.no_grad():
        keys = scores + bias.float() if case.bias else z
        groups, kept = case.groups
        if groups:
            grouped = keys.view(-1, groups, case.E // groups)
            best = grouped.topk(case.K // kept, dim=-1)[0].sum(-1).topk(kept, dim=-1)[1]
            keep = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=z.device).scatter(1, best, True)
            keys = grouped.masked_fill(~keep[..., None], float("-inf")).view_as(z)
        experts = keys.topk(case.K, dim=-1)[1]
    weights = scores.gather(1, experts)
    if case.normalize:
        weights = torch.softmax(weights, -1) if softmax else weights / (weights.sum(-1, keepdim=True) + 1e-20)
    probs = torch.zeros_like(logits).scatter(1, experts, weights.to(logits.dtype))
    return probs, torch.zeros(z.shape, dtype=torch.bool, device=z.device).scatter(1, experts, True)


def torch_plan(experts: Any, num_experts: int) -> tuple[Any, Any, Any, Any]:
    """What `in_jax.xla_plan` returns; row_of_slot and slot_of_row are int64, as torch.sort gives them."""
    import torch

    keys, slot_of_row = experts.flatten().sort(stable=True)
    bounds = torch.arange(num_experts + 1, dtype=keys.dtype, device=keys.device)
    offsets = torch.searchsorted(keys, bounds, out_int32=True)
    rows = torch.arange(keys.numel(), device=keys.device)
    row_of_slot = torch.empty_like(rows).scatter_(0, slot_of_row, rows)
    return offsets.diff(), offsets, row_of_slot.view(experts.shape), slot_of_row
