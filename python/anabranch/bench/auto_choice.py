"""What precision="auto" chooses, as text: of a layer that is timed, and of models that people train."""

from collections.abc import Sequence

from anabranch import _library
from anabranch.bench.layer_shape import NAMED, LayerShape
from anabranch.precision import BLOCK
from anabranch.precision_choice import (
    CAPABILITY,
    FORWARD,
    PASSES,
    Choice,
    LayerSize,
    choose_precision,
    why_not_fp8,
)

#: The smallest layer that FP8 has.
_ANY_SIZE = LayerSize(1, BLOCK, BLOCK, 1, 1)


def _choices(shape: LayerShape, dtype: str, capability: str | None) -> dict[str, Choice]:
    """Of the forward pass alone, and of both, with gated experts of dtype that each pass would quantise."""
    weight_bytes = 4 if dtype == "float32" else 2
    return {
        name: choose_precision(
            LayerSize(*shape), dtype=dtype, capability=capability, weight_bytes=weight_bytes, passes=passes
        )
        for name, passes in (("forward", (FORWARD,)), ("both", PASSES))
    }


def auto_choice(shape: LayerShape, dtype: str) -> str:
    """What "auto" chooses for a layer on the first GPU of this machine.

    Args:
      shape: of the layer.
      dtype: of its operands.

    Returns:
      "fp8" or "highest", or "forward highest, both fp8" where the forward pass alone has another answer than both.
    """
    found = _library.cuda_capabilities(_library.describe_cuda())
    names = {name: choice.precision for name, choice in _choices(shape, dtype, next(iter(found), None)).items()}
    if names["forward"] == names["both"]:
        return names["both"]
    return ", ".join(f"{name} {precision}" for name, precision in names.items())


def of_models(capabilities: Sequence[str]) -> dict[str, str]:
    """Lines for `info`: what "auto" chooses for one layer of models on the GPUs of this machine.

    Args:
      capabilities: of the GPUs.

    >>> of_models(["8.9"])
    {'precision auto': '"highest": got no GPU of compute capability 9.0, expected one for FP8'}
    >>> print(of_models(["9.0"])["auto qwen3-30b"])
    forward fp8 (fp8 4.05 ms, highest 4.55), both fp8 (fp8 12.7 ms, highest 13.8)
    """
    if CAPABILITY not in capabilities:
        return {"precision auto": f'"highest": got no GPU of compute capability {CAPABILITY}, expected one for FP8'}
    if why := why_not_fp8(_ANY_SIZE, "bfloat16", CAPABILITY):
        return {"precision auto": f'"highest": {why}'}
    (tokens,) = {shape.T for shape in NAMED.values()}
    lines = {"precision auto": f"predicted for bfloat16 and T = {tokens}:"}
    for model, shape in NAMED.items():
        choices = _choices(shape, "bfloat16", CAPABILITY)
        lines[f"auto {model}"] = ", ".join(f"{name} {_text(choice)}" for name, choice in choices.items())
        if why := choices["both"].why:
            lines[f"auto {model}"] = f"highest: {why}"
    return lines


def _text(choice: Choice) -> str:
    if choice.highest is None or choice.fp8 is None:
        return choice.precision
    return f"{choice.precision} (fp8 {1e3 * choice.fp8:.3g} ms, highest {1e3 * choice.highest:.3g})"
