"""Operations of anabranch.torch on numpy arrays: results and gradients as numpy arrays again."""

import types

import ml_dtypes
import numpy as np
import torch

from anabranch.torch import Plan

_device = "cpu"


def on(device):
    """Tensors go to a device from now on."""
    global _device
    _device = device


def device():
    """Where tensors go."""
    return _device


def tensor(array):
    """A tensor of an array; of None, None."""
    if array is None:
        return None
    array = np.array(array, order="C")  # a copy
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(_device)
    return torch.from_numpy(array).to(_device)


def array(value):
    """An array of a tensor; of None, None."""
    if value is None:
        return None
    value = value.detach().cpu()
    if value.dtype == torch.bfloat16:
        return value.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()


def arrays(result):
    """A result with arrays in the place of its tensors: a tensor, or a tuple of them, named or not."""
    if isinstance(result, torch.Tensor):
        return array(result)
    if isinstance(result, Plan):  # with what it computes where it is asked for
        return types.SimpleNamespace(
            **{name: array(getattr(result, name)) for name in (*Plan._fields, "expert_of_row")}
        )
    return tuple(map(array, result)) if type(result) is tuple else type(result)(*map(array, result))


def leaves(operands):
    """Named arrays as tensors, and those of them that gradients are of."""
    given = {name: tensor(value) for name, value in operands.items() if value is not None}
    return given, {name: t.requires_grad_() for name, t in given.items() if t.dtype.is_floating_point}


def pulled(pairs, floats):
    """Gradients of `floats` by name for (result, cotangent); None where nothing depends on one."""
    # What has no elements or comes from nothing has no graph.
    pairs = [(o, d.to(o.dtype)) for o, d in pairs if o.requires_grad]
    if not pairs:
        return dict.fromkeys(floats)
    outputs, d_outputs = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, list(floats.values()), d_outputs, retain_graph=True, allow_unused=True)
    return dict(zip(floats, found, strict=True))


def gradient_arrays(found, floats):
    """The arrays of `pulled`, zeros for None."""
    return {name: np.zeros_like(array(floats[name])) if g is None else array(g) for name, g in found.items()}


def vjp(function, operands):
    """(result, pull) of a function of named operands, those that are arrays as tensors.

    pull(cotangents): of a tensor its cotangent, else cotangents by the names of the results; gradients by the names of
    the floating operands, zeros where nothing depends on one.
    """
    given, floats = leaves(operands)
    result = function(**given)

    def pull(cotangents):
        if isinstance(result, torch.Tensor):
            pairs = [(result, tensor(cotangents))]
        else:
            pairs = [(getattr(result, name), tensor(d)) for name, d in cotangents.items()]
        return gradient_arrays(pulled(pairs, floats), floats)

    return result, pull


def plan_of(plan):
    """A plan of torch with a numpy plan's or JAX's arrays."""
    return Plan(*(tensor(np.asarray(value)) for value in plan))


def to_bytes(array):
    """An array that numpy.savez keeps the dtype of, which it does not of bfloat16."""
    return array.view(np.dtype("V2")) if array.dtype == ml_dtypes.bfloat16 else array


def from_bytes(array):
    """The array of `to_bytes`."""
    return array.view(ml_dtypes.bfloat16) if array.dtype.kind == "V" else array
