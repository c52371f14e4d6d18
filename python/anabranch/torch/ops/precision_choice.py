"""precision="auto" of torch's layers: the facts of a call that the choice is made from, and the choice."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from anabranch.layouts import Layouts
from anabranch.precision import AUTO, NUMBERS
from anabranch.precision_choice import FORWARD, PASSES, LayerSize, choose_precision, kept_passes
from anabranch.torch.ops.quantized import QuantizedExperts

if TYPE_CHECKING:
    from anabranch.torch.ops.experts import Network

_CHUNK_BYTES = 16


class Facts(NamedTuple):
    """What the choice looks at beside dtypes, shapes and devices.

    Attributes:
      trains: whether a backward pass is to be expected.
      aligned: whether biases begin where FP8 kernels can read them.
    """

    trains: bool
    aligned: bool


def facts_of(precision: Any, leaves: Iterable[Any], biases: Iterable[Any]) -> Facts | None:
    """Of the tensors that a call has; None: it does not ask for "auto".

    Args:
      precision: the argument.
      leaves: what may want a gradient, under torch.no_grad() too: an activation checkpoint runs there first, and has to
        compute what the step will.
      biases: b_in and b_out.
    """
    if not isinstance(precision, str) or precision != "auto":
        return None
    leaves, biases = (tuple(t for t in tensors if isinstance(t, Tensor)) for tensors in (leaves, biases))
    trains = any(t.requires_grad for t in (*leaves, *biases))
    strided = (t for t in biases if t.layout == torch.strided)  # others are refused by the checks
    return Facts(trains, all(t.storage_offset() * t.element_size() % _CHUNK_BYTES == 0 for t in strided))


def capability_of(device: torch.device) -> str | None:
    """The compute capability of a GPU; None: the device is none of CUDA's."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    found = torch.cuda.get_device_properties(device)
    return f"{found.major}.{found.minor}"


def decided(
    network: "Network", x: Tensor, w_in: Tensor, quantized: QuantizedExperts | None, facts: Facts | None
) -> "Network":
    """The options of the experts with what "auto" means here; x: tokens, or rows of which each stands for itself."""
    if network.precision != AUTO:
        return network
    assert facts is not None
    of = Layouts(network.w_in_layout, network.w_out_layout).sizes("w_in", w_in.shape)
    size = LayerSize(math.prod(x.shape[:-1]), of["d"], of["f"], of["e"], max(network.topk, 1), of["p"])
    choice = choose_precision(
        size,
        dtype=str(x.dtype).removeprefix("torch."),
        capability=capability_of(x.device) if facts.aligned else None,
        weight_bytes=w_in.element_size(),
        kept=kept_passes(quantized),
        passes=PASSES if facts.trains else (FORWARD,),
    )
    fp8_scales = network.fp8_scales if choice.precision == "fp8" else 0
    return network._replace(precision=NUMBERS[choice.precision], fp8_scales=fp8_scales)
