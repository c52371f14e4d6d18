"""Recognises the activation that a gate function computes by evaluating it.

A class name is not enough: classes of one name differ in clamping and in the order of gate and up columns. So the
function is evaluated in float64 at points on both sides of every number that it may use as a limit. It is recognised
if its values and gradients equal those of one `Activation`, also for bfloat16 inputs and for a single row. A function
that reads other tensors or draws random numbers is refused.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from anabranch.activation import (
    PLAIN,
    Activation,
    activation,
    activation_gradient,
    gated_activation,
    gated_activation_gradients,
)
from anabranch.torch.binding import private
from anabranch.torch.binding.check import describe

#: Points are dense up to _NEAR, where gradients are compared too. Sparse ones follow up to _FAR: g u fits in float32.
_NEAR, _FAR = 2.0**14, 2.0**60
_POSITIVE = np.concatenate([np.geomspace(2.0**-6, _NEAR, 41), np.geomspace(2.0**18, _FAR, 12)])
#: Every point above is paired with these. All pairs of a coarser grid follow.
_PARTNERS = np.array([0.0, 0.3, -0.3, 1.7, -1.7, 9.0, -9.0, 150.0, -_FAR])
_FEW, _SOME = slice(None, None, 97), slice(None, None, 7)
#: Relative to the value: rounding of a few operations in float32 (a gate may convert to float32) and in bfloat16.
_FLOAT32, _BFLOAT16 = 1e-5, 2.0**-6
_GRADIENT = 1e-4
#: Relative to max(1, |g|) max(1, |u|), as a share of the tolerances above: cancellation of terms of that size.
_CANCELLATION = 0.1
#: Larger values overflow to infinity in float32.
_LARGEST = float(np.finfo(np.float32).max)


class NotAnActivation(Exception):
    """The function is no `Activation`. The message continues a sentence that begins with the function's name."""


class Found(NamedTuple):
    """A recognised activation.

    Attributes:
      activation: the values and gradients of the function.
      interleaved: whether gate and up columns alternate, (g0, u0, g1, u1, ...).
    """

    activation: Activation
    interleaved: bool = False


def _leaves(value: Any) -> Iterator[Any]:
    """The values in nested tuples, lists and dictionaries."""
    if isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


class _Recorder(private.TorchDispatchMode):  # type: ignore[misc]
    """Records tensors that operations read but did not create, and random operations."""

    def __init__(self, argument: Tensor) -> None:
        super().__init__()
        self._made = [argument]
        self._known = {id(argument)}
        self.foreign: list[Tensor] = []
        self.random = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.lift_fresh.default:  # a tensor created from Python numbers
            given = (leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self.foreign += (tensor for tensor in given if id(tensor) not in self._known)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random = str(func)
        output = func(*args, **(kwargs or {}))
        # A reference to each tensor prevents reuse of its id.
        self._made += (leaf for leaf in _leaves(output) if isinstance(leaf, Tensor))
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
    pairs = (np.concatenate([grid[part].ravel() for grid in grids]) for part in (0, 1))
    # With one column per row, both orders of gates and ups are the same.
    g, u = (np.stack([values, values[::-1]], axis=-1) for values in pairs)
    return g, u


def _close(values: np.ndarray, expected: np.ndarray, scale: np.ndarray, relative: float = _FLOAT32) -> bool:
    values, expected = (np.clip(x, -_LARGEST, _LARGEST) for x in (values, expected))
    return bool(np.all(np.abs(values - expected) <= relative * (np.abs(expected) + _CANCELLATION * scale)))


def _scale(*inputs: np.ndarray) -> np.ndarray:
    scale: np.ndarray = np.prod([np.maximum(1, np.abs(x)) for x in inputs], axis=0)
    return scale


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
    """Leaves active tracers, whose tensors have no values, and checkpoints, which count saved tensors."""
    with (
        torch.inference_mode(False),
        torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved),
        private.disable_modes(),
    ):
        yield


def _values(function: Callable[[Tensor], Tensor], inputs: np.ndarray, dtype: torch.dtype = torch.float64) -> np.ndarray:
    """Values of the function in float64.

    Raises:
      NotAnActivation: the function reads another tensor or draws random numbers.
    """
    with _isolated(), torch.no_grad():
        argument = torch.tensor(inputs, dtype=dtype, device="cpu")
        with _Recorder(argument) as recorder:
            values = function(argument)
        if recorder.foreign:
            raise NotAnActivation(f"computes with a tensor beside its argument, {describe(recorder.foreign[0])}")
        if recorder.random:
            raise NotAnActivation(f"draws random numbers ({recorder.random})")
        return values.double().numpy()


def _gradient(function: Callable[[Tensor], Tensor], inputs: np.ndarray) -> np.ndarray:
    """Gradient of the sum of all values."""
    with _isolated(), torch.enable_grad():
        argument = torch.tensor(inputs, dtype=torch.float64, device="cpu").requires_grad_()
        total = function(argument).double().sum()
        if not total.requires_grad:
            return np.zeros_like(inputs)
        (gradient,) = torch.autograd.grad(total, argument, materialize_grads=True)
        return gradient.numpy()


def _usable(numbers: Iterable[float]) -> list[float]:
    return sorted({float(number) for number in numbers if 2.0**-10 <= number <= _FAR / 2})


def _check_gradients(
    act: Activation, numbers: list[float], inputs: list[np.ndarray], gradients: list[np.ndarray], expected: Any
) -> None:
    """Compares gradients at points up to _NEAR that are no kink of the activation."""
    kinks = np.array([0.0, *numbers])
    selected = np.all([(np.abs(x) <= _NEAR) & ~np.isin(np.abs(x), kinks) for x in inputs], axis=0)
    inputs = [x[selected] for x in inputs]
    scale = _scale(*inputs)
    with np.errstate(over="ignore"):
        pairs = zip(gradients, expected(*inputs), strict=True)
        same = all(_close(gradient[selected], want, scale, _GRADIENT) for gradient, want in pairs)
    if not same:
        raise NotAnActivation(f"has the values of {act.name} and other gradients")


def _check_invariance(
    function: Callable[[Tensor], Tensor],
    act: Activation,
    inputs: list[np.ndarray],
    row: Callable[..., np.ndarray],
    expected: Callable[..., np.ndarray],
) -> None:
    """Checks that the function does not depend on the dtype or on the number of rows.

    Args:
      function: has the values of `act` for float64 inputs of many rows.
      act: named in messages.
      inputs: gates and ups, or h of a plain activation.
      row: function's argument, from one row of each of the inputs.
      expected: act's values, from the inputs.
    """
    inputs = [x.reshape(1, -1) for x in inputs]
    if not _close(_values(function, row(*inputs)), expected(*inputs), _scale(*inputs)):
        raise NotAnActivation(f"has the values of {act.name} for many rows and other values for one row")
    rounded = [x.reshape(-1, 2).astype(ml_dtypes.bfloat16).astype(np.float64) for x in inputs]
    values = _values(function, row(*rounded), torch.bfloat16)
    if not _close(values, expected(*rounded), _scale(*rounded), _BFLOAT16):
        raise NotAnActivation(f"has the values of {act.name} in float64 and other values in bfloat16")


def recognise_plain(function: Callable[[Tensor], Tensor]) -> Found | None:
    """The activation act that `function` computes elementwise, or None if it is none of `PLAIN`.

    Raises:
      NotAnActivation: see `recognise_gated`.
    """
    h = np.append(_points([]), 0.0).reshape(-1, 2)
    values = _values(function, h)
    if values.shape != h.shape:
        return None
    name = next((name for name in PLAIN if _close(values, activation(h, name), _scale(h))), None)
    if name is None:
        return None
    act = Activation.glu(name)
    _check_gradients(act, [], [h], [_gradient(function, h)], lambda h: [activation_gradient(h, name)])
    _check_invariance(function, act, [h], lambda h: h, functools.partial(activation, name=name))
    return Found(act)


def _rows(g: np.ndarray, u: np.ndarray, interleaved: bool) -> np.ndarray:
    """[R, 2 N] from gates and ups [R, N]."""
    return np.stack([g, u], axis=-1).reshape(len(g), -1) if interleaved else np.concatenate([g, u], axis=-1)


def recognise_gated(function: Callable[[Tensor], Tensor], numbers: Iterable[float]) -> Found | None:
    """The activation phi(g, u) that `function` computes from rows [R, 2 N] of gates and ups, or None.

    Args:
      function: from [R, 2 N] to [R, N]; called with float64 and bfloat16.
      numbers: candidates for its parameters.

    Raises:
      NotAnActivation: it reads other tensors, draws random numbers, has the values of an activation but other
        gradients, or depends on the dtype or on the number of rows.
    """
    parameters = _usable(numbers)
    g, u = _pairs(parameters)
    scale = _scale(g, u)
    for interleaved in (False, True):
        row = functools.partial(_rows, interleaved=interleaved)
        values = _values(function, row(g, u))
        if values.shape != g.shape:
            return None
        for act in _candidates(parameters):
            # A few points tell most candidates apart.
            if all(_close(values[i], gated_activation(g[i], u[i], act), scale[i]) for i in (_FEW, slice(None))):
                some = g[_SOME], u[_SOME]
                gradient = _gradient(function, row(*some))
                parts = [gradient[:, ::2], gradient[:, 1::2]] if interleaved else np.split(gradient, 2, axis=-1)
                gradients = functools.partial(gated_activation_gradients, act=act)
                _check_gradients(act, parameters, list(some), parts, gradients)
                _check_invariance(function, act, [g, u], row, functools.partial(gated_activation, act=act))
                return Found(act, interleaved)
    return None
