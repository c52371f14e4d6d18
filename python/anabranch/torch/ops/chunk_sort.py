"""Chunk sort: reorder chunks of rows, with the names of TransformerEngine's PyTorch front end."""

from typing import Any

from torch import Tensor

from anabranch.torch.binding import check
from anabranch.torch.binding.autograd import Function
from anabranch.torch.ops import torch_ops
from anabranch.torch.ops.dispatch import ANY_DTYPE


class _SortChunks(Function):
    @staticmethod
    def forward(x, split_sizes, sorted_index):
        return torch_ops.sort_chunks(x, split_sizes, sorted_index, False)[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[1:])
        if not output.dtype.is_floating_point:
            ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx, d_out):
        return torch_ops.sort_chunks(d_out, *ctx.saved_tensors, True)[0], None, None


def _operands(inp: Any, split_sizes: Any, sorted_index: Any) -> tuple[Tensor, Tensor, Tensor]:
    inp = check.tensor("inp", inp, ANY_DTYPE, ("R", "D"))
    check.num_rows("inp", inp.shape[0])
    sizes = check.indices("split_sizes", split_sizes, ("S",))
    order = check.indices("sorted_index", sorted_index, (("S", sizes.shape[0]),))
    check.same_device("inp", inp, split_sizes=sizes, sorted_index=order)
    return inp, sizes, order


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Reorders chunks of rows: chunk i of the output is chunk sorted_index[i] of the input.

    Args:
      inp: [R, D] float32, bfloat16 or float16, or (without a gradient) bool, uint8, int16, int32, int64.
      split_sizes: int16, int32 or int64 [S], rows per chunk. Rows past their sum are not moved.
      sorted_index: int16, int32 or int64 [S], a permutation of 0 ... S-1.

    Returns:
      [R, D], dtype of inp, a permutation of the input for any integers: a negative size counts as 0, sizes are clipped
      to R, an index that is out of range or repeated is skipped, and chunks that are not named follow in their order.

    Gradient: the inverse permutation of the cotangents. No double backward.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not match.

    Source: the function of this name in transformer_engine.pytorch.

    >>> import torch
    >>> sizes, order = torch.tensor([1, 2]), torch.tensor([1, 0])
    >>> moe_sort_chunks_by_index(torch.arange(3.0)[:, None], sizes, order).ravel().tolist()
    [1.0, 2.0, 0.0]
    """
    out: Tensor = _SortChunks.call(*_operands(inp, split_sizes, sorted_index))
    return out


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """`moe_sort_chunks_by_index` for rows and their probabilities.

    Args:
      inp: [R, D], as in `moe_sort_chunks_by_index`.
      probs: float32, bfloat16 or float16 [R].
      split_sizes, sorted_index: as in `moe_sort_chunks_by_index`.

    Returns:
      (rows [R, D], dtype of inp; their probabilities [R], dtype of probs).

    Gradient: the inverse permutation of both cotangents. No double backward.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not match.

    Source: the function of this name in transformer_engine.pytorch.

    >>> import torch
    >>> probs, sizes, order = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1, 2]), torch.tensor([1, 0])
    >>> moe_sort_chunks_by_index_with_probs(torch.arange(3.0)[:, None], probs, sizes, order)[1].tolist()
    [0.20000000298023224, 0.30000001192092896, 0.10000000149011612]
    """
    inp, sizes, order = _operands(inp, split_sizes, sorted_index)
    probs = check.tensor("probs", probs, check.FLOATS, (("R", inp.shape[0]),))
    check.same_device("inp", inp, probs=probs)
    return _SortChunks.call(inp, sizes, order), _SortChunks.call(probs[:, None], sizes, order)[:, 0]
