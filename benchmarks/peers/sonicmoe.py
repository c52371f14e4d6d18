"""The whole layer by SonicMoE (package sonic-moe), which has torch kernels for Hopper."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from anabranch.bench import ArgumentError, BenchError

if TYPE_CHECKING:
    from benchmarks.layer_torch import Operands


def layer(given: "Operands", topk: int) -> tuple[tuple[Any, ...], Callable[..., Any]]:
    """Returns its weights, and a function of the tokens and these weights. Without gradients it saves no residuals.

    Raises:
      ArgumentError: experts are given, which its layer does not support.
      BenchError: the package is not installed.
    """
    import torch

    if given.experts is not None:
        raise ArgumentError(
            "--routing: got zipf with --by sonicmoe, expected uniform: it does not support given experts"
        )
    try:
        from sonicmoe import moe_TC_softmax_topk_layer
    except ImportError as error:
        raise BenchError(f"--by: got sonicmoe, which needs the package sonic-moe: {error}") from error

    _, gate, w_in, w_out = (leaf.detach() for leaf in given.leaves)
    E, D, _, F = w_in.shape
    up = w_in.permute(0, 3, 2, 1).reshape(E, 2 * F, D).contiguous()  # interleave gate and up

    def run(x: Any, router: Any, up: Any, down: Any) -> Any:
        return moe_TC_softmax_topk_layer(
            x,
            router,
            up.permute(1, 2, 0),
            None,
            down.permute(1, 2, 0),
            None,
            topk,
            stream_id=0,  # unused
            is_inference_mode_enabled=not torch.is_grad_enabled(),
        )[0]

    return (gate.T.contiguous(), up, w_out.transpose(1, 2).contiguous()), run
