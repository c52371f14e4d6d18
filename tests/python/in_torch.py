"""Calls operations of anabranch.torch on numpy arrays; results and gradients are numpy arrays."""

import types

import ml_dtypes
import numpy as np
import torch

from anabranch.torch import Plan

_device = "cpu"


def on(device):
    """Selects the device of later tensors."""
    global _device
    _device = device


def device():
    """The device of new tensors."""
    return _device


def tensor(array):
    """The array as a tensor; None stays None."""
    if array is None:
        return None
    array = np.array(array, order="C")  # a copy
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(_device)
    return torch.from_numpy(array).to(_device)


def array(value):
    """The tensor as an array; None stays None."""
    if value is None:
        return None
    value = value.detach().cpu()
    if value.dtype == torch.bfloat16:
        return value.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()


def arrays(result):
    """A result with its tensors converted to arrays: a tensor, a tuple or a named tuple."""
    if isinstance(result, torch.Tensor):
        return array(result)
    if isinstance(result, Plan):  # including the property that is computed on access
        return types.SimpleNamespace(
            **{name: array(getattr(result, name)) for name in (*Plan._fields, "expert_of_row")}
        )
    return tuple(map(array, result)) if type(result) is tuple else type(result)(*map(array, result))


def leaves(operands):
    """(named arrays as tensors, those that get a gradient)."""
    given = {name: tensor(value) for name, value in operands.items() if value is not None}
    return given, {name: t.requires_grad_() for name, t in given.items() if t.dtype.is_floating_point}


def gradients_of(pairs, floats):
    """Gradients of `floats` by name for pairs (result, cotangent); None for an operand without influence."""
    # Results without elements or without differentiable operands have no graph.
    pairs = [(o, d.to(o.dtype)) for o, d in pairs if o.requires_grad]
    if not pairs:
        return dict.fromkeys(floats)
    outputs, d_outputs = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, list(floats.values()), d_outputs, retain_graph=True, allow_unused=True)
    return dict(zip(floats, found, strict=True))


def gradient_arrays(found, floats):
    """The results of `gradients_of` as arrays; zeros for None."""
    return {name: np.zeros_like(array(floats[name])) if g is None else array(g) for name, g in found.items()}


def vjp(function, operands):
    """(result, pull) of a function of named operands; arrays are converted to tensors.

    pull(cotangents): takes one cotangent if the result is a tensor, else cotangents by the names of the results;
    returns gradients by the names of the floating operands, zeros for an operand without influence.
    """
    given, floats = leaves(operands)
    result = function(**given)

    def pull(cotangents):
        if isinstance(result, torch.Tensor):
            pairs = [(result, tensor(cotangents))]
        else:
            pairs = [(getattr(result, name), tensor(d)) for name, d in cotangents.items()]
        return gradient_arrays(gradients_of(pairs, floats), floats)

    return result, pull


def plan_of(plan):
    """A numpy or JAX plan as a plan of torch."""
    return Plan(*(tensor(np.asarray(value)) for value in plan))


def to_bytes(array):
    """The array in a dtype that numpy.savez preserves, which bfloat16 is not."""
    return array.view(np.dtype("V2")) if array.dtype == ml_dtypes.bfloat16 else array


def from_bytes(array):
    """The inverse of `to_bytes`."""
    return array.view(ml_dtypes.bfloat16) if array.dtype.kind == "V" else array
