"""The whole layer by SonicMoE (package sonic-moe), which has torch kernels for Hopper."""

from collections.abc import Callable
from typing import Any

from anabranch.bench import ArgumentError, BenchError
from benchmarks.layer_torch import Operands


def calls(given: Operands, topk: int) -> dict[str, Callable[[], Any]]:
    """Returns the calls "forward" (inference, saves no residuals) and "both" (the output and the gradients).

    Calls each once, because every GEMM then searches for its fastest kernel, which takes seconds to minutes.

    Raises:
      ArgumentError: experts are given, which its layer does not support.
      BenchError: the package is not installed.
    """
    by_name = _calls(given, topk)
    for call in by_name.values():
        call()
    return by_name


def _calls(given: Operands, topk: int) -> dict[str, Callable[[], Any]]:
    import torch

    if given.experts is not None:
        raise ArgumentError(
            "--routing: got zipf with --by sonicmoe, expected uniform: it does not support given experts"
        )
    try:
        from sonicmoe import moe_TC_softmax_topk_layer
    except ImportError as error:
        raise BenchError(f"--by: got sonicmoe, which needs the package sonic-moe: {error}") from error

    x, gate, w_in, w_out = (leaf.detach() for leaf in given.leaves)
    E, D, _, F = w_in.shape
    router = gate.T.contiguous()
    up = w_in.permute(0, 3, 2, 1).reshape(E, 2 * F, D).contiguous()  # interleave gate and up
    down = w_out.transpose(1, 2).contiguous()
    leaves = tuple(leaf.requires_grad_() for leaf in (x, router, up, down))

    def layer(*, inference: bool) -> Any:
        x, router, up, down = leaves
        return moe_TC_softmax_topk_layer(
            x,
            router,
            up.permute(1, 2, 0),
            None,
            down.permute(1, 2, 0),
            None,
            topk,
            stream_id=0,  # unused
            is_inference_mode_enabled=inference,
        )[0]

    def forward() -> Any:
        with torch.no_grad():
            return layer(inference=True)

    def both() -> Any:
        output = layer(inference=False)
        return output, *torch.autograd.grad(output, leaves, given.d_out)

    return {"forward": forward, "both": both}
