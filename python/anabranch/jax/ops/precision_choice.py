"""precision="auto" of JAX's layers: the facts of a call that the choice is made from, and the choice."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax

from anabranch.jax.ops.ffn import FfnConfig
from anabranch.jax.ops.quantized import QuantizedExperts
from anabranch.precision import AUTO, NUMBERS
from anabranch.precision_choice import FORWARD, PASSES, LayerSize, choose_precision, kept_passes


def capability_of(x: jax.Array, mesh: Any) -> str | None:
    """The compute capability of the GPUs that a call runs on, as far as is known where it is traced.

    They are those of the mesh or of x, or else the device that JAX takes when nothing is said.

    Args:
      x: the tokens; mesh: over which the layer is spread, or None.
    """
    if isinstance(mesh, jax.sharding.Mesh) and not mesh.empty:
        devices = list(mesh.devices.flat)
    elif not isinstance(x, jax.core.Tracer):
        devices = list(x.devices())
    else:
        default = jax.config.jax_default_device  # type: ignore[attr-defined]
        devices = [default] if isinstance(default, jax.Device) else jax.devices(default)[:1]
    found = {getattr(d, "compute_capability", None) if d.platform == "gpu" else None for d in devices}
    return found.pop() if len(found) == 1 else None


class Spread(NamedTuple):
    """Over how many devices of which mesh a layer is spread.

    Attributes:
      mesh: None: none that names devices.
      tokens, experts, hidden, widths: the devices over which T, E, F, and D of the weights, are divided.
    """

    mesh: Any = None
    tokens: int = 1
    experts: int = 1
    hidden: int = 1
    widths: int = 1


def decided(
    config: FfnConfig, x: jax.Array, w_in: jax.Array, quantized: QuantizedExperts | None, spread: Spread
) -> FfnConfig:
    """The options of the experts with what "auto" means here; x: tokens, or rows of which each stands for itself."""
    if config.precision != AUTO:
        return config
    E, D, P, F = config.sizes(w_in)
    T, K = math.prod(x.shape[:-1]), max(config.topk, 1)
    # Whether a backward pass follows, a trace can't tell. Experts that were quantised without what it takes say not.
    kept = kept_passes(quantized)
    choice = choose_precision(
        LayerSize(T // spread.tokens, D, F // spread.hidden, E // spread.experts, K, P),
        dtype=str(x.dtype),
        capability=capability_of(x, spread.mesh),
        weight_bytes=w_in.dtype.itemsize,
        kept=kept,
        passes=kept if kept == (FORWARD,) else PASSES,
        width_shards=spread.widths,
    )
    fp8_scales = config.fp8_scales if choice.precision == "fp8" else 0
    return dataclasses.replace(config, precision=NUMBERS[choice.precision], fp8_scales=fp8_scales)
