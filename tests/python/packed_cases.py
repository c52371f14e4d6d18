"""Random packed weights for tests of both frameworks, as numpy arrays and as arrays of the current framework."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import anabranch.jax as in_jax
from anabranch.packed import Fp8Blocks, Mxfp4
from anabranch.reference.packed import pack_fp8
from frameworks import in_torch


def random_packed(kind, shape, *, seed=0, scales="float32"):
    """Packed weights [..., N, C] of about unit variance over C. kind: "mxfp4" or "fp8_blocks"; scales: of FP8 blocks."""
    rng = np.random.default_rng(seed)
    *leading, N, C = shape
    if kind == "mxfp4":
        exponent = 125 - int(np.log2(C) / 2)
        codes = rng.integers(0, 256, (*leading, N, C // 32, 16), np.uint8)
        return Mxfp4(codes, rng.integers(exponent, exponent + 3, (*leading, N, C // 32), np.uint8))
    packed = pack_fp8((rng.standard_normal(shape) / np.sqrt(C)).astype(np.float32))
    if scales == "uint8":
        return packed._replace(scales=rng.integers(114, 117, packed.scales.shape, np.uint8))
    return packed._replace(scales=packed.scales.astype(scales if scales != "bfloat16" else ml_dtypes.bfloat16))


def as_given(value):
    """A packed matrix, or an array, of the current framework; None stays None."""
    if isinstance(value, Mxfp4 | Fp8Blocks):
        return type(value)(*map(as_given, value))
    if value is None or not in_torch():
        return None if value is None else jnp.asarray(value)
    import torch

    from in_torch import device, tensor

    if value.dtype == ml_dtypes.float8_e4m3fn:
        return torch.from_numpy(np.array(value.view(np.uint8))).to(device()).view(torch.float8_e4m3fn)
    return tensor(value)


def dtype_of(name):
    """A dtype of the current framework."""
    if not in_torch():
        return name
    import torch

    return getattr(torch, name)


def front_end():
    """The module of the current framework."""
    if not in_torch():
        return in_jax
    import anabranch.torch

    return anabranch.torch


def as_array(value):
    """An array of the current framework as numpy."""
    if not in_torch():
        return np.asarray(value)
    import torch

    from in_torch import array

    if value.dtype == torch.float8_e4m3fn:
        return array(value.view(torch.uint8)).view(ml_dtypes.float8_e4m3fn)
    return array(value)


def bits(value):
    """The bits of a float array; all NaNs count as one number."""
    value = np.ascontiguousarray(value)
    integers = value.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[value.dtype.itemsize])
    return np.where(np.isnan(value.astype(np.float32)), 1, integers)
