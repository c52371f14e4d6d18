"""Which activation a function of somebody else's is, found by what it computes.

A name says little: the same class may clamp or not, or store gate and up in turns. So the function is evaluated at
points that reach past every number it may hold, and is an activation of ours if all values are that one's.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from anabranch.activation import PLAIN, Activation
from anabranch.reference.experts import activation, gated_activation

_POINTS = np.concatenate([[0.0], *(sign * np.geomspace(2.0**-6, 2.0**14, 41) for sign in (1, -1))])
_FEW = slice(None, None, 97)
#: Of a value: what float32 leaves of it, through a few operations.
_RELATIVE = 1e-5
#: Of max(1, |g|) max(1, |u|): what is left of a difference of nearly equal terms of that size.
_ABSOLUTE = 1e-6


class Found(NamedTuple):
    """An activation, and whether its gate and up columns stand in turns, (g0, u0, g1, u1, ...)."""

    activation: Activation
    interleaved: bool = False


def _candidates(numbers: list[float]) -> Iterator[Activation]:
    yield from (Activation.glu(name) for name in PLAIN)
    for limit in numbers:
        yield Activation.swiglu_clamped(limit)
        yield Activation.swiglu_then_clamp(limit)
    for pair in itertools.product(numbers, repeat=2):
        yield Activation.swiglu_oai(*pair)
        yield Activation.situ(*pair)


def _points(numbers: list[float]) -> np.ndarray:
    past = np.outer(numbers, [0.5, 0.99, 1.0, 1.01, 2.0]).ravel()
    return np.unique(np.concatenate([_POINTS, past, -past]))


def _close(found: np.ndarray, expected: np.ndarray, scale: np.ndarray | float) -> bool:
    return bool(np.all(np.abs(found - expected) <= _RELATIVE * np.abs(expected) + _ABSOLUTE * scale))


def _values(function: Callable[[Tensor], Tensor], inputs: np.ndarray, device: torch.device) -> np.ndarray:
    with torch.no_grad(), _disable_current_modes():  # a tracer's tensors have no values
        return function(torch.tensor(inputs, dtype=torch.float64, device=device)).double().cpu().numpy()


def _usable(numbers: Iterable[float]) -> list[float]:
    return sorted({float(number) for number in numbers if 2.0**-10 <= number <= 2.0**20})


def plain_activation_of(function: Callable[[Tensor], Tensor], device: torch.device) -> Found | None:
    """The activation act that `function` is, elementwise; None: none of ours."""
    h = _points([])
    values = _values(function, h, device)
    if values.shape != h.shape:
        return None
    matches = (name for name in PLAIN if _close(values, activation(h, name), np.maximum(1, np.abs(h))))
    name = next(matches, None)
    return None if name is None else Found(Activation.glu(name))


def gated_activation_of(
    function: Callable[[Tensor], Tensor], numbers: Iterable[float], device: torch.device
) -> Found | None:
    """The activation phi(g, u) that `function` computes of rows [R, 2 N] of gates and ups; None: none of ours.

    Args:
      function: from float64 [R, 2 N] to [R, N].
      numbers: those that may be its parameters.
      device: where it computes.
    """
    parameters = _usable(numbers)
    points = _points(parameters)
    pairs = (axis.ravel() for axis in np.meshgrid(points, points))
    # Two columns: with one alone both orders of gates and ups are the same.
    g, u = (np.stack([values, values[::-1]], axis=-1) for values in pairs)
    scale = np.maximum(1, np.abs(g)) * np.maximum(1, np.abs(u))
    for interleaved in (False, True):
        inputs = np.stack([g, u], axis=-1).reshape(-1, 4) if interleaved else np.concatenate([g, u], axis=-1)
        values = _values(function, inputs, device)
        if values.shape != g.shape:
            return None
        for act in _candidates(parameters):
            # A few points tell most candidates apart.
            if all(_close(values[i], gated_activation(g[i], u[i], act), scale[i]) for i in (_FEW, slice(None))):
                return Found(act, interleaved)
    return None
