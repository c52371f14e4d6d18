"""Dispatch and combine with the interface of TransformerEngine's PyTorch front end.

Sizes: T tokens, E experts, K experts per token, D width, R rows. A mask [T, E] marks the experts of each token, any
number of them; an index map [T, K] lists K of them. Rows of an expert are contiguous, in token order.

Code that calls `transformer_engine.pytorch.permutation` only needs another import. The host does not wait for the
device: numbers of rows are host values.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anabranch._text import shown
from anabranch.rows import check_num_slots
from anabranch.torch.binding import check
from anabranch.torch.binding.autograd import Function
from anabranch.torch.binding.native import call
from anabranch.torch.ops import torch_ops
from anabranch.torch.ops.dispatch import ANY_DTYPE, _Combine, _Dispatch

# uint8 is excluded, because it is the dtype of a bitmap.
_MAP_DTYPES = (torch.bool, torch.int8, *check.INDICES)
_MAP_TYPES = ("mask", "index")
#: Sort key for "no expert": the largest int32.
_NO_EXPERT = check.INDEX_LIMIT - 1


def _take(values: Tensor, index: Tensor) -> Tensor:
    """values[index] for values [N] and an index of any shape; 0 where the index is negative."""
    padded = torch.nn.functional.pad(values, (0, 1))
    return padded.index_select(0, torch.where(index < 0, values.shape[0], index).reshape(-1)).reshape(index.shape)


class _DispatchProbs(Function):
    """Gathers probabilities [T, E] to rows [R]."""

    @staticmethod
    def forward(probs, row_of_slot, slot_of_row):
        return _take(probs.reshape(-1), slot_of_row)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, d_rows):
        (row_of_slot,) = ctx.saved_tensors
        return _take(d_rows, row_of_slot), None, None


# ---------------------------------------------------------------- maps


def _mask(inp: Tensor, value: Any) -> Tensor:
    """Checks a mask and returns it as bool [T, E]."""
    routing_map = check.tensor("routing_map", value, _MAP_DTYPES, (("T", inp.shape[0]), "E"))
    if routing_map.shape[1] < 1:
        raise ValueError(f"routing_map: got {check.describe(routing_map)}, expected [T, E] with E >= 1")
    check_num_slots("routing_map", *routing_map.shape)
    check.same_device("inp", inp, routing_map=routing_map)
    return routing_map != 0


def _host_number(num_out_tokens: Any) -> Any:
    """num_out_tokens as a host value: Megatron passes an integer scalar on the CPU. None becomes -1.

    Raises:
      TypeError: it is another kind of tensor.
    """
    if num_out_tokens is None:
        return -1
    if isinstance(num_out_tokens, Tensor):
        if num_out_tokens.dim() or num_out_tokens.device.type != "cpu" or num_out_tokens.dtype not in check.INDICES:
            raise TypeError(
                f"num_out_tokens: got {check.describe(num_out_tokens)} on {num_out_tokens.device}, expected an int or "
                "an integer scalar on the CPU: the host would have to wait for a device"
            )
        return int(num_out_tokens)
    return num_out_tokens


def _mask_num_rows(num_out_tokens: Any) -> int:
    """R for a mask.

    Raises:
      TypeError, ValueError: num_out_tokens is no integer in [0, 2^31), or is not given.
    """
    number = _host_number(num_out_tokens)
    if isinstance(number, int) and number == -1:
        raise ValueError(
            "num_out_tokens: got none with a mask, expected the number of its nonzero entries: to count them, the host "
            "would have to wait for a device"
        )
    return check.num_rows("num_out_tokens", number)


def _indexed_rows(inp: Tensor, value: Any, num_out_tokens: Any) -> tuple[Tensor, Tensor]:
    """(row_of_slot [T, K], slot_of_row [R]) from an index map, sorted by expert, then by slot."""
    index = check.indices("routing_map", value, (("T", inp.shape[0]), "K"))
    if index.shape[1] < 1:
        raise ValueError(f"routing_map: got {check.describe(index)}, expected [T, K] with K >= 1")
    check.same_device("inp", inp, routing_map=index)
    check_num_slots("routing_map", *index.shape)
    N = index.numel()
    R = check.size("num_out_tokens", _host_number(num_out_tokens), -1)
    R = N if R <= 0 else R
    keys = torch.where(index < 0, _NO_EXPERT, index).reshape(-1)
    order = keys.argsort(stable=True)
    positions = torch.arange(N, device=inp.device)
    row_of_slot = torch.empty_like(order).scatter(0, order, positions)
    row_of_slot = torch.where((keys < _NO_EXPERT) & (row_of_slot < R), row_of_slot, -1)
    slot_of_row = torch.where(keys[order] < _NO_EXPERT, order, -1)
    slot_of_row = torch.nn.functional.pad(slot_of_row[:R], (0, max(R - N, 0)), value=-1)
    return row_of_slot.to(torch.int32).reshape(index.shape), slot_of_row.to(torch.int32)


def _index_maps(row_id_map: Tensor, num_slots: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """(row_of_slot [T, K], slot_of_row [R]) from the row_id_map [K T] of an index map; any values are allowed."""
    T = row_id_map.shape[0] // max(num_slots, 1)
    rows = row_id_map.reshape(num_slots, T).t()
    slots = torch.arange(T * num_slots, dtype=torch.int32, device=row_id_map.device)
    targets = torch.where((rows >= 0) & (rows < num_rows), rows, num_rows).reshape(-1).long()
    # If several assignments name one row, the last one gets it.
    empty = torch.full((num_rows + 1,), -1, dtype=torch.int32, device=row_id_map.device)
    slot_of_row = empty.scatter_reduce(0, targets, slots, "amax")[:num_rows]
    has_row = torch.nn.functional.pad(slot_of_row, (0, 1), value=-1)[targets] == slots
    return torch.where(has_row.reshape(rows.shape), rows, -1), slot_of_row


# ---------------------------------------------------------------- permute


def _permute(
    inp: Tensor, routing_map: Tensor, num_rows: int, align_size: int, probs: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(rows, their probabilities, row_id_map, tokens_per_expert) for a bool mask."""
    counts, row_of_slot, slot_of_row, row_id_map = call(torch_ops.plan_of_map, routing_map, num_rows, align_size)
    rows = _Dispatch.call(inp, row_of_slot, slot_of_row)
    permuted_probs = None if probs is None else _DispatchProbs.call(probs, row_of_slot, slot_of_row)
    return rows, permuted_probs, row_id_map, counts


def _tokens(value: Any) -> Tensor:
    return check.tensor("inp", value, ANY_DTYPE, ("T", "D"))


def _probabilities(inp: Tensor, value: Any, routing_map: Tensor) -> Tensor:
    T, E = routing_map.shape
    probs = check.tensor("probs", value, check.FLOATS, (("T", T), ("E", E)))
    check.same_device("inp", inp, probs=probs)
    return probs


def moe_permute(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int | Tensor | None,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[Tensor, Tensor]:
    """Copies every token to one row per expert; rows of an expert are contiguous, in token order.

    Args:
      inp: [T, D] float32, bfloat16 or float16, or (without a gradient) bool, uint8, int16, int32, int64.
      routing_map: for map_type "mask" bool, int8, int16, int32 or int64 [T, E], nonzero where the token is routed to
        the expert; for "index" int16, int32 or int64 [T, K], experts; a negative one is no expert.
      num_out_tokens: R, the number of rows, an int or an integer scalar on the CPU. With a mask: the number of its
        nonzero entries. With indices, 0, -1 or None stand for T K. Entries past R get no row; unused rows are zero.
      max_token_num: ignored; TransformerEngine sizes a buffer with it.
      map_type: "mask" or "index".

    Returns:
      (rows [R, D], dtype of inp; row_id_map for `moe_unpermute`). With a mask, row_id_map is int32 [T, 2E+1]: a token's
      rows in descending order, from column E on their experts, and in the last column their number. With indices it is
      int32 [K T]: the row of expert k of token t at k T + t, or -1.

    Gradient: of inp, the sum of the token's rows in float32. No double backward.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not match, or a size is out of range.

    Source: the function of this name in transformer_engine.pytorch.

    >>> routing_map = torch.tensor([[True, True], [False, True]])
    >>> moe_permute(torch.tensor([[1.0], [2.0]]), routing_map, 3)[0].ravel().tolist()
    [1.0, 1.0, 2.0]
    """
    inp = _tokens(inp)
    check.integer("max_token_num", max_token_num, -1)
    if check.choice("map_type", map_type, _MAP_TYPES) == "index":
        row_of_slot, slot_of_row = _indexed_rows(inp, routing_map, num_out_tokens)
        return _Dispatch.call(inp, row_of_slot, slot_of_row), row_of_slot.t().reshape(-1)
    mask = _mask(inp, routing_map)
    rows, _, row_id_map, _ = _permute(inp, mask, _mask_num_rows(num_out_tokens), 0, None)
    return rows, row_id_map


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int | Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`moe_permute` with a mask, and the probability of every row.

    Args:
      inp: [T, D], as in `moe_permute`.
      probs: float32, bfloat16 or float16 [T, E].
      routing_map: a mask [T, E], as in `moe_permute`.
      num_out_tokens: R, as in `moe_permute`.

    Returns:
      (rows [R, D], dtype of inp; permuted_probs [R], dtype of probs, probs[t, e] of each row, 0 in unused rows;
      row_id_map int32 [T, 2E+1]).

    Gradient: of inp, the sum of the token's rows; of probs, that of the row, also where a probability is 0, and 0
    without a row. No double backward.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not match, or a size is out of range.

    Source: the function of this name in transformer_engine.pytorch.

    >>> probs, routing_map = torch.tensor([[0.5, 0.0], [0.0, 1.0]]), torch.tensor([[True, False], [False, True]])
    >>> moe_permute_with_probs(torch.tensor([[1.0], [2.0]]), probs, routing_map, 2)[1].tolist()
    [0.5, 1.0]
    """
    inp = _tokens(inp)
    mask = _mask(inp, routing_map)
    probs = _probabilities(inp, probs, mask)
    num_rows = _mask_num_rows(num_out_tokens)
    rows, permuted_probs, row_id_map, _ = _permute(inp, mask, num_rows, 0, probs)
    assert permuted_probs is not None
    return rows, permuted_probs, row_id_map


def moe_permute_and_pad_with_probs(
    inp: Tensor,
    probs: Tensor,
    routing_map: Tensor,
    tokens_per_expert: Tensor,
    align_size: int,
    *,
    num_rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`moe_permute_with_probs` with every expert's rows padded to a multiple of align_size.

    Args:
      inp: [T, D], as in `moe_permute`.
      probs: float32, bfloat16 or float16 [T, E].
      routing_map: a mask [T, E], as in `moe_permute`.
      tokens_per_expert: int16, int32 or int64 [E], the column sums of the mask, on the CPU. R is their sum after
        rounding each up. With num_rows they may be on any device and are not read.
      align_size: a >= 1.
      num_rows: R, a multiple of a; required if tokens_per_expert is on a device or the program is compiled. An upper
        bound suffices, floor((n + E (a-1)) / a) a for n entries: rows past the last expert are zero.

    Returns:
      (rows [R, D], permuted_probs [R], row_id_map int32 [T, 2E+1], pad_offsets int64 [E], padded counts int64 [E]).
      pad_offsets are the padding rows before every expert, for `moe_unpermute`; padded counts are the rows of every
      expert including padding. Padding rows are zero.

    Gradient: as in `moe_permute_with_probs`. No double backward.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not match, a size is out of range, or counts on a device come without num_rows.

    Source: the function of this name in transformer_engine.pytorch.

    >>> routing_map, counts = torch.tensor([[True, True], [False, True]]), torch.tensor([1, 2])
    >>> moe_permute_and_pad_with_probs(torch.ones(2, 1), torch.ones(2, 2), routing_map, counts, 2)[1].tolist()
    [1.0, 0.0, 1.0, 1.0]
    """
    inp = _tokens(inp)
    mask = _mask(inp, routing_map)
    probs = _probabilities(inp, probs, mask)
    given = check.tensor("tokens_per_expert", tokens_per_expert, check.INDICES, (("E", mask.shape[1]),))
    a = check.integer("align_size", align_size, 1, check.INDEX_LIMIT - 1)
    if num_rows is not None:
        R = check.num_rows("num_rows", num_rows, a)
    elif given.device.type != "cpu":
        raise ValueError(
            f"tokens_per_expert: got a tensor on {given.device}, expected one on the CPU, whose sum is the number of "
            "rows, or num_rows"
        )
    else:
        R = check.num_rows("tokens_per_expert", int(_round_up(given.clamp(min=0), a).sum()), a)
    rows, permuted_probs, row_id_map, counts = _permute(inp, mask, R, a, probs)
    assert permuted_probs is not None
    padded = _round_up(counts, a)
    padding = padded - counts
    return rows, permuted_probs, row_id_map, padding.cumsum(0) - padding, padded


def _round_up(counts: Tensor, align_size: int) -> Tensor:
    return -(-counts.long() // align_size) * align_size


# ---------------------------------------------------------------- unpermute


def _check_shape(restore_shape: Any, shape: tuple[int, int]) -> None:
    """Raises if restore_shape is not the shape of the result."""
    expected = f"{shape}, the tokens of row_id_map"
    if not isinstance(restore_shape, (tuple, list)):
        raise TypeError(f"restore_shape: got {check.describe(restore_shape)}, expected {expected}")
    sizes = all(isinstance(size, (int, torch.SymInt)) for size in restore_shape)
    if not sizes or tuple(restore_shape) != shape:
        raise ValueError(f"restore_shape: got {shown(tuple(restore_shape))}, expected {expected}")


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: Sequence[int] | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """Sums the rows of every token: the sum over its experts of merging_probs[t, e] * inp[row].

    Args:
      inp: [R, D] float32, bfloat16 or float16.
      row_id_map: int16, int32 or int64, from a permute function: with a mask [T, 2E+1], with indices [K T].
      merging_probs: float32, bfloat16 or float16, with a mask [T, E], with indices [T, K]. None: ones, and with indices
        K = 1.
      restore_shape: (T, D), the shape of the result, or None.
      map_type: "mask" or "index", as in `moe_permute`.
      probs: the older name of merging_probs.
      pad_offsets: int16, int32 or int64 [E] from `moe_permute_and_pad_with_probs`, else None.

    Returns:
      [T, D], dtype of inp, summed in float32, in ascending order of experts or in the order of the indices.

    Gradient: of inp, merging_probs[t, e] d_out[t], zero in padding rows; of merging_probs, <d_out[t], inp[row]>, also
    where a probability is 0, and 0 without a row. No double backward.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not match.

    Source: the function of this name in transformer_engine.pytorch.

    >>> rows, row_id_map = moe_permute(torch.tensor([[1.0], [2.0]]), torch.tensor([[True, True], [False, True]]), 3)
    >>> moe_unpermute(rows, row_id_map).ravel().tolist()
    [2.0, 2.0]
    """
    inp = check.tensor("inp", inp, check.FLOATS, ("R", "D"))
    R, D = inp.shape
    check.num_rows("inp", R)
    if probs is not None and merging_probs is not None:
        raise ValueError("probs: got one together with merging_probs, its other name, expected None")
    name, weights = ("probs", probs) if probs is not None else ("merging_probs", merging_probs)
    if check.choice("map_type", map_type, _MAP_TYPES) == "index":
        if pad_offsets is not None:
            raise ValueError("pad_offsets: got one with map_type 'index', expected None")
        row_id_map = check.indices("row_id_map", row_id_map, ("K*T",))
        weights = check.optional_tensor(name, weights, check.FLOATS, ("T", "K"))
        K = 1 if weights is None else weights.shape[1]
        if K < 1 or (weights is not None and weights.numel() != row_id_map.shape[0]):
            raise ValueError(
                f"{name}: got {check.describe(weights)}, expected the {row_id_map.shape[0]} probabilities of the rows "
                "in row_id_map"
            )
        check.same_device("inp", inp, row_id_map=row_id_map, **{name: weights})
        row_of_slot, slot_of_row = _index_maps(row_id_map, K, R)
    else:
        row_id_map = check.indices("row_id_map", row_id_map, ("T", "2E+1"))
        T, width = row_id_map.shape
        if width < 3 or width % 2 == 0:
            raise ValueError(f"row_id_map: got {check.describe(row_id_map)}, expected [T, 2E+1] with E >= 1")
        E = width // 2
        check_num_slots("row_id_map", T, E)
        weights = check.optional_tensor(name, weights, check.FLOATS, (("T", T), ("E", E)))
        offsets = None if pad_offsets is None else check.indices("pad_offsets", pad_offsets, (("E", E),))
        check.same_device("inp", inp, row_id_map=row_id_map, pad_offsets=offsets, **{name: weights})
        row_of_slot, slot_of_row = call(torch_ops.expand_row_id_map, row_id_map, offsets, R)
    if restore_shape is not None:
        _check_shape(restore_shape, (row_of_slot.shape[0], D))
    out: Tensor = _Combine.call(inp, row_of_slot, slot_of_row, weights)
    return out
