"""Which activation a function of somebody else's is, found by what it computes.

A name says little: the same class may clamp or not, or store gate and up in turns. So the function is evaluated at
points that reach past every number it may hold, and is an activation of ours if all values are that one's, and all
gradients. What it computes with beside its argument, and whether it draws random numbers, is seen meanwhile.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from anabranch.activation import PLAIN, Activation
from anabranch.reference.experts import activation, activation_gradient, gated_activation, gated_activation_gradients
from anabranch.torch.binding.check import describe

#: Close to 0 they are dense, and gradients are looked at; the rest goes on to where float32 ends for g u.
_NEAR, _FAR = 2.0**14, 2.0**60
_POSITIVE = np.concatenate([np.geomspace(2.0**-6, _NEAR, 41), np.geomspace(2.0**18, _FAR, 12)])
#: Every one of the points above meets these, and its neighbours but one meet each other.
_PARTNERS = np.array([0.0, 0.3, -0.3, 1.7, -1.7, 9.0, -9.0, 150.0, -_FAR])
_FEW, _SOME = slice(None, None, 97), slice(None, None, 7)
#: Of a value: what float32 leaves of it, through a few operations.
_RELATIVE = 1e-5
#: Of max(1, |g|) max(1, |u|): what is left of a difference of nearly equal terms of that size.
_ABSOLUTE = 1e-6
#: A larger one is infinite in float32.
_LARGEST = float(np.finfo(np.float32).max)


class NotAnActivation(Exception):
    """What a function does that no activation does; its text goes on after "which"."""


class Found(NamedTuple):
    """An activation, and whether its gate and up columns stand in turns, (g0, u0, g1, u1, ...)."""

    activation: Activation
    interleaved: bool = False


class _Seen(TorchDispatchMode):
    """The tensors that operations read and did not make, and whether one was random."""

    def __init__(self, argument: Tensor) -> None:
        super().__init__()
        self._made = [argument]
        self._known = {id(argument)}
        self.foreign: list[Tensor] = []
        self.random = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.lift_fresh.default:  # a tensor that Python made of numbers
            given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self.foreign += (tensor for tensor in given if id(tensor) not in self._known)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random = str(func)
        output = func(*args, **(kwargs or {}))
        self._made += (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))  # kept: ids are used again
        self._known |= {id(tensor) for tensor in self._made}
        return output


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
    return np.unique(np.concatenate([[0.0], *(sign * part for part in (_POSITIVE, past) for sign in (1, -1))]))


def _pairs(numbers: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Gates and ups, [R, 2] each."""
    points, past = _points(numbers), np.outer(numbers, [0.99, 1.01, 2.0]).ravel()
    coarse = np.concatenate([[0.0], *(sign * part for part in (_POSITIVE[:41:2], past) for sign in (1, -1))])
    grids = np.meshgrid(coarse, coarse), np.meshgrid(points, _PARTNERS), np.meshgrid(_PARTNERS, points)
    of_pairs = (np.concatenate([grid[part].ravel() for grid in grids]) for part in (0, 1))
    # Two columns: with one alone both orders of gates and ups are the same.
    g, u = (np.stack([values, values[::-1]], axis=-1) for values in of_pairs)
    return g, u


def _close(found: np.ndarray, expected: np.ndarray, scale: np.ndarray | float, relative: float = _RELATIVE) -> bool:
    found, expected = (np.clip(values, -_LARGEST, _LARGEST) for values in (found, expected))
    allowed = relative * np.abs(expected) + relative / _RELATIVE * _ABSOLUTE * scale
    return bool(np.all(np.abs(found - expected) <= allowed))


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """From what surrounds a call: tracers, whose tensors have no values; checkpoints, which count what is saved."""
    with (
        torch.inference_mode(False),
        torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved),
        _disable_current_modes(),
    ):
        yield


def _values(function: Callable[[Tensor], Tensor], inputs: np.ndarray) -> np.ndarray:
    """What it computes.

    Raises:
      NotAnActivation: it depends on more than its argument.
    """
    with _apart(), torch.no_grad():
        argument = torch.tensor(inputs, dtype=torch.float64, device="cpu")
        with _Seen(argument) as seen:
            values = function(argument)
        if seen.foreign:
            raise NotAnActivation(f"computes with a tensor beside its argument, {describe(seen.foreign[0])}")
        if seen.random:
            raise NotAnActivation(f"draws random numbers ({seen.random})")
        return values.double().numpy()


def _gradient(function: Callable[[Tensor], Tensor], inputs: np.ndarray) -> np.ndarray:
    """Of the sum of what it computes."""
    with _apart(), torch.enable_grad():
        argument = torch.tensor(inputs, dtype=torch.float64, device="cpu").requires_grad_()
        total = function(argument).double().sum()
        if not total.requires_grad:
            return np.zeros_like(inputs)
        (gradient,) = torch.autograd.grad(total, argument, materialize_grads=True)
        return gradient.numpy()


def _usable(numbers: Iterable[float]) -> list[float]:
    return sorted({float(number) for number in numbers if 2.0**-10 <= number <= _FAR / 2})


def _check_gradients(
    found: Activation, numbers: list[float], inputs: list[np.ndarray], gradients: list[np.ndarray], expected: Any
) -> None:
    """Raises NotAnActivation where one is another's, at points that are near and at no limit."""
    kinks = np.array([0.0, *numbers])
    looked_at = np.all([(np.abs(x) <= _NEAR) & ~np.isin(np.abs(x), kinks) for x in inputs], axis=0)
    inputs = [x[looked_at] for x in inputs]
    scale = np.prod([np.maximum(1, np.abs(x)) for x in inputs], axis=0)
    with np.errstate(over="ignore"):
        pairs = zip(gradients, expected(*inputs), strict=True)
        same = all(_close(ours[looked_at], theirs, scale, 1e-4) for ours, theirs in pairs)
    if not same:
        raise NotAnActivation(f"has the values of {found.name} and other gradients")


def plain_activation_of(function: Callable[[Tensor], Tensor]) -> Found | None:
    """The activation act that `function` is, elementwise; None: none of ours.

    Raises:
      NotAnActivation: as of `gated_activation_of`.
    """
    h = _points([])
    values = _values(function, h)
    if values.shape != h.shape:
        return None
    matches = (name for name in PLAIN if _close(values, activation(h, name), np.maximum(1, np.abs(h))))
    name = next(matches, None)
    if name is None:
        return None
    found = Activation.glu(name)
    _check_gradients(found, [], [h], [_gradient(function, h)], lambda h: [activation_gradient(h, name)])
    return Found(found)


def _rows(g: np.ndarray, u: np.ndarray, interleaved: bool) -> np.ndarray:
    """[R, 2 N] of gates and ups [R, N]."""
    return np.stack([g, u], axis=-1).reshape(len(g), -1) if interleaved else np.concatenate([g, u], axis=-1)


def gated_activation_of(function: Callable[[Tensor], Tensor], numbers: Iterable[float]) -> Found | None:
    """The activation phi(g, u) that `function` computes of rows [R, 2 N] of gates and ups; None: none of ours.

    Args:
      function: from float64 [R, 2 N] to [R, N].
      numbers: those that may be its parameters.

    Raises:
      NotAnActivation: it computes with other tensors, draws random numbers, or has other gradients.
    """
    parameters = _usable(numbers)
    g, u = _pairs(parameters)
    scale = np.maximum(1, np.abs(g)) * np.maximum(1, np.abs(u))
    for interleaved in (False, True):
        values = _values(function, _rows(g, u, interleaved))
        if values.shape != g.shape:
            return None
        for act in _candidates(parameters):
            # A few points tell most candidates apart.
            if all(_close(values[i], gated_activation(g[i], u[i], act), scale[i]) for i in (_FEW, slice(None))):
                some = g[_SOME], u[_SOME]
                gradient = _gradient(function, _rows(*some, interleaved))
                parts = [gradient[:, ::2], gradient[:, 1::2]] if interleaved else np.split(gradient, 2, axis=-1)
                of_act = functools.partial(gated_activation_gradients, act=act)
                _check_gradients(act, parameters, list(some), parts, of_act)
                return Found(act, interleaved)
    return None
