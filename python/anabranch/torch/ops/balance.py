"""Load-balancing losses and the z-loss.

`load_balance_loss` and `z_loss` use the statistics of `route`. They are plain torch, since the data is small.
`fused_moe_aux_loss` sums dense scores.
"""

from typing import Any

import torch
from torch import Tensor

from anabranch.torch.binding import check
from anabranch.torch.binding.autograd import Function
from anabranch.torch.ops import torch_ops

_COUNTS = (*check.INDICES, torch.int8, torch.uint8, torch.float32)
#: For `fused_moe_aux_loss`.
_DENSE_COUNTS = (*check.INDICES, torch.uint8, *check.FLOATS)


def _num_tokens(name: str, value: Any, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Checks a number of tokens, an int or a tensor (a scalar, or with `shape`), and converts it to float32."""
    if not isinstance(value, Tensor):
        return torch.full((), check.size(name, value), dtype=torch.float32, device=like.device)
    tokens = check.tensor(name, value, _COUNTS, () if value.dim() == 0 else shape)
    check.same_device("the sums", like, **{name: tokens})
    return tokens.detach().float()


def balance_loss(
    score_sum: Tensor, counts: Tensor, num_experts: int, topk: int, coeff: float, tokens: Tensor
) -> Tensor:
    """coeff E / (K N^2) sum_e score_sum[e] counts[e] over the last axis; 0 where N = 0."""
    some = ~(tokens <= 0)  # NaN stays NaN
    factor = torch.where(some, coeff * num_experts / topk / torch.where(some, tokens, 1.0) ** 2, 0.0)
    return factor * (torch.where(some[..., None], score_sum, 0.0) * counts.detach().float()).sum(-1)


def load_balance_loss(
    score_sum: Tensor, tokens_per_expert: Tensor, topk: int, coeff: float, num_tokens: int | Tensor
) -> Tensor:
    """The load-balancing loss, coeff E / (K N^2) sum_e score_sum[e] tokens_per_expert[e].

    In a distributed program, sum score_sum, tokens_per_expert and num_tokens over the ranks first.

    Args:
      score_sum: float32 [E], or [..., E] with one row per sequence (sequence_stats of `route`).
      tokens_per_expert: integers or float32, shaped like score_sum.
      topk: K, 1 <= K <= E.
      coeff: finite Python number.
      num_tokens: N, the unmasked tokens: an int in [0, 2^31) or a scalar tensor; with sequences also a tensor [...].
        Negative values in a tensor count as 0; NaN makes the loss NaN.

    Returns:
      float32 scalar, the mean over sequences; 0 where N = 0.

    Raises:
      TypeError, ValueError: an argument has a wrong type or value.

    Gradients: of score_sum only.
    Source: Switch Transformer, https://arxiv.org/abs/2101.03961, equation 4.

    >>> float(load_balance_loss(torch.tensor([2.0, 2.0]), torch.tensor([2, 2]), 1, 1.0, 4))
    1.0
    """
    score_sum = check.tensor("score_sum", score_sum, (torch.float32,), (..., "E"))
    *leading, E = score_sum.shape
    counts = check.tensor("tokens_per_expert", tokens_per_expert, _COUNTS, tuple(score_sum.shape))
    check.same_device("score_sum", score_sum, tokens_per_expert=counts)
    topk, coeff = check.integer("topk", topk, 1, E), check.number("coeff", coeff)
    tokens = _num_tokens("num_tokens", num_tokens, score_sum, tuple(leading))
    losses = balance_loss(score_sum, counts, E, topk, coeff, tokens)
    return losses.sum() / max(losses.numel(), 1)


def z_loss(
    lse: Tensor, coeff: float, token_mask: Tensor | None = None, num_tokens: int | Tensor | None = None
) -> Tensor:
    """The router z-loss, coeff / N sum_t lse[t]^2 over the unmasked tokens. It keeps logits small.

    Args:
      lse: float32 [...], from `route`.
      coeff: finite Python number.
      token_mask: bool [...]; False marks padding. None: no padding.
      num_tokens: N, as in `load_balance_loss`; None: the unmasked tokens of this call. A distributed program passes the
        number of the whole batch and sums the ranks' losses.

    Returns:
      float32 scalar; 0 where N = 0.

    Raises:
      TypeError, ValueError: an argument has a wrong type or value.

    Gradients: of lse.
    Source: ST-MoE, https://arxiv.org/abs/2202.08906, equation 5.

    >>> float(z_loss(torch.tensor([1.0, 3.0]), 0.1))
    0.5
    """
    lse = check.tensor("lse", lse, (torch.float32,), (...,))
    coeff = check.number("coeff", coeff)
    mask = check.optional_tensor("token_mask", token_mask, check.BOOL, tuple(lse.shape))
    check.same_device("lse", lse, token_mask=mask)
    if num_tokens is None and mask is not None:
        tokens = mask.sum().float()
    else:
        tokens = _num_tokens("num_tokens", lse.numel() if num_tokens is None else num_tokens, lse, ())
    if mask is not None:
        lse = torch.where(mask, lse, 0.0)
    return mean_of_squares(lse.square().sum(), coeff, tokens)


def mean_of_squares(squares: Tensor, coeff: float, tokens: Tensor) -> Tensor:
    """The z-loss from the sum of lse^2 and the number of tokens, float32 []; 0 without tokens."""
    some = ~(tokens <= 0)  # NaN stays NaN
    return torch.where(some, coeff / torch.where(some, tokens, 1.0), 0.0) * squares


class _MoEAuxLoss(Function):
    @staticmethod
    def forward(probs, tokens_per_expert, num_tokens, topk, num_experts, coeff):
        return torch_ops.moe_aux_loss(probs, tokens_per_expert, num_tokens, topk, num_experts, coeff)

    @staticmethod
    def setup_context(ctx, inputs, output):
        probs, tokens_per_expert, num_tokens, *ctx.options = inputs
        ctx.rows, ctx.dtype = probs.shape[0], probs.dtype
        ctx.save_for_backward(tokens_per_expert, num_tokens)

    @staticmethod
    def backward(ctx, d_loss):
        d_probs = torch_ops.moe_aux_loss_backward(d_loss, *ctx.saved_tensors, ctx.rows, ctx.dtype, *ctx.options)
        return d_probs, None, None, None, None, None


def fused_moe_aux_loss(
    probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int | Tensor, num_experts: int, topk: int, coeff: float
) -> Tensor:
    """The load-balancing loss of dense scores, coeff E / (K N^2) sum_e tokens_per_expert[e] sum_t probs[t, e].

    Args:
      probs: float32, bfloat16 or float16 [T, C], the auxiliary scores. C is E, or a multiple of E for the concatenated
        scores of several sequences.
      tokens_per_expert: uint8, int16, int32, int64, float32, bfloat16 or float16 [C].
      total_num_tokens: N, an int in [0, 2^31), or an integer or float32 scalar tensor. It need not be whole: Megatron
        passes the mean over sequences of different lengths. Negative values in a tensor count as 0; NaN makes the loss
        NaN.
      num_experts: E.
      topk: K, 1 <= K <= E.
      coeff: finite Python number.

    Returns:
      float32 scalar for every dtype of probs; 0 where N = 0.

    Raises:
      TypeError, ValueError: an argument has a wrong type or value.

    Gradients: of probs only. No double backward.
    Source: TransformerEngine (interface); Switch Transformer, https://arxiv.org/abs/2101.03961, equation 4.

    >>> float(fused_moe_aux_loss(torch.full((4, 2), 0.5), torch.tensor([2, 2]), 4, 2, 1, 1.0))
    1.0
    """
    probs = check.tensor("probs", probs, check.FLOATS, ("T", "C"))
    C = probs.shape[1]
    counts = check.tensor("tokens_per_expert", tokens_per_expert, _DENSE_COUNTS, (("C", C),))
    E = check.integer("num_experts", num_experts, 1, check.INDEX_LIMIT - 1)
    if C % E:
        raise ValueError(f"num_experts: got {E}, expected a divisor of the {C} columns of probs")
    topk, coeff = check.integer("topk", topk, 1, E), check.number("coeff", coeff)
    if isinstance(total_num_tokens, Tensor):
        tokens = check.tensor("total_num_tokens", total_num_tokens, (*check.INDICES, torch.float32), ()).detach()
    else:
        number = check.size("total_num_tokens", total_num_tokens)
        tokens = torch.full((), number, dtype=torch.int64, device=probs.device)
    check.same_device("probs", probs, tokens_per_expert=counts, total_num_tokens=tokens)
    if not tokens.is_floating_point():
        loss: Tensor = _MoEAuxLoss.call(probs, counts.detach(), tokens.long(), topk, E, coeff)
        return loss
    # The native operation takes an integer number of tokens: it computes the loss for N = 1 or N = 0.
    some = ~(tokens <= 0)  # NaN stays NaN
    loss = _MoEAuxLoss.call(probs, counts.detach(), some.long(), topk, E, coeff)
    return loss / torch.where(some, tokens, 1.0).square()
