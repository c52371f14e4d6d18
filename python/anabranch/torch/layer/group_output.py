"""The static options and the results of the layer on a rank of a process group."""

from typing import NamedTuple

from torch import Tensor

from anabranch.torch.layer.operands import LayerConfig
from anabranch.torch.parallel.exchange import Ranks


class GroupConfig(NamedTuple):
    """Static options of the layer and of the exchange. `layer.num_experts` counts the experts of all ranks."""

    layer: LayerConfig
    ranks: Ranks
    transport: str
    fp8_exchange: bool


class GroupOutput(NamedTuple):
    """The results of the layer for this rank's tokens. Without a router, the results of routing have no elements.

    Native operations return None for results that were not requested.
    """

    output: Tensor
    """[T, D], dtype of x."""
    tokens_per_expert: Tensor
    """int32 [E], before dropping."""
    all_tokens_per_expert: Tensor
    """As tokens_per_expert, for all ranks; so are the next two."""
    all_dropped: Tensor
    """int32 [P]: dropped slots, by source rank."""
    all_qb_histogram: Tensor
    """int32 [E, bins]."""
    weights: Tensor
    """float32 [T, K]."""
    experts: Tensor
    """int32 [T, K], before dropping."""
    score_sum: Tensor
    """float32 [E]."""
    lse: Tensor
    """float32 [T], 0 for a masked token."""
    h: Tensor
    """Saved for backward, as are the following."""
    lora_u: Tensor
    """[R, r], of the adapter of w_in; no elements without it."""
    lora_copies: Tensor
    """[n], the copies of factors of another dtype than x, see `factors`; no elements without them."""
    there: Tensor
    """See `Passed`."""
    logits: Tensor
    experts_weighed_by_router: Tensor
    """int32 [T, K], see `replay`; no elements without recorded weights."""
    row_of_slot: Tensor
    slot_of_row: Tensor
    group_sizes: Tensor
    sent_row_of_slot: Tensor
    sent_slot_of_row: Tensor
    dropped: Tensor | None = None
    """int32 [], the dropped slots of all ranks. Only native operations return this field and the next one."""
    zero: Tensor | None = None
    """float32 []: 0, for losses that are not requested."""
