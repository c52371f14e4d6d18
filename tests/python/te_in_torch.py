"""Calls the TransformerEngine functions of anabranch.torch with the signatures of anabranch.jax."""

from typing import NamedTuple

import numpy as np
import torch

import in_torch
from anabranch import torch as ab


def _tensor(value):
    return in_torch.tensor(value) if isinstance(value, np.ndarray) else value


def fused_topk_with_score_function(
    logits,
    topk,
    use_pre_softmax=False,
    num_groups=None,
    group_topk=None,
    scaling_factor=1.0,
    score_function="softmax",
    expert_bias=None,
    routing_map_format="bytemap",
    topk_indices_dtype=None,
    qb_histogram=None,
    qb_bin_bounds=None,
    qb_histogram_mode=None,
):
    """Returns JAX's results: torch's in-place buffers become results, and a dtype argument allocates a buffer."""
    indices = None
    if topk_indices_dtype is not None:
        dtype = getattr(torch, np.dtype(topk_indices_dtype).name)
        indices = torch.full((*logits.shape[:-1], topk), -7, dtype=dtype, device=logits.device)
    histogram = _tensor(qb_histogram)
    probs, routing = ab.fused_topk_with_score_function(
        logits,
        topk,
        use_pre_softmax,
        num_groups,
        group_topk,
        scaling_factor,
        score_function,
        _tensor(expert_bias),
        routing_map_format,
        indices,
        histogram,
        _tensor(qb_bin_bounds),
        qb_histogram_mode,
    )
    assert indices is None or routing is indices
    return (probs, routing) if histogram is None else (probs, routing, histogram)


class Dispatched(NamedTuple):
    """The fields of JAX's TokenDispatch; tokens_per_expert is None without alignment."""

    output: torch.Tensor
    permuted_probs: torch.Tensor | None
    row_id_map: torch.Tensor
    pad_offsets: torch.Tensor | None
    tokens_per_expert: torch.Tensor | None


def token_dispatch(inp, routing_map, num_out_tokens, probs=None, align_size=None):
    """Calls the one of the three torch functions that the arguments need."""
    inp, routing_map, probs = map(_tensor, (inp, routing_map, probs))
    if probs is None:
        output, row_id_map = ab.moe_permute(inp, routing_map, num_out_tokens)
        return Dispatched(output, None, row_id_map, None, None)
    if align_size is None:
        output, permuted_probs, row_id_map = ab.moe_permute_with_probs(inp, probs, routing_map, num_out_tokens)
        return Dispatched(output, permuted_probs, row_id_map, None, None)
    E = routing_map.shape[1]
    num_rows = (num_out_tokens + E * (align_size - 1)) // align_size * align_size
    counts = (routing_map != 0).sum(0)
    return Dispatched(
        *ab.moe_permute_and_pad_with_probs(inp, probs, routing_map, counts, align_size, num_rows=num_rows)
    )


def token_combine(inp, row_id_map, merging_probs=None, pad_offsets=None):
    row_id_map, merging_probs, pad_offsets = map(_tensor, (row_id_map, merging_probs, pad_offsets))
    return ab.moe_unpermute(inp, row_id_map, merging_probs, pad_offsets=pad_offsets)
