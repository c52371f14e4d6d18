"""The whole layer, forward and forward plus backward, beside torch eager, XLA's ragged_dot and oneDNN's own rate."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anabranch.bench.ceiling import matmul_flops
from anabranch.bench.layer_in_jax import ours, ragged_dot_layer
from anabranch.bench.measure import interleaved

CAPTION = "GFLOP/s (6 T K D F forward, 18 T K D F forward and backward); share: of oneDNN's large product in this run"

#: Seconds of a forward pass beyond which forward and backward together are not waited for.
TOO_SLOW = 2.0

SHAPES = [(1024, 8, 2, 512, 1024), (2048, 64, 8, 512, 256), (2048, 128, 8, 512, 256)]  # T, E, K, D, F


def _data(shape: tuple[int, ...]) -> list[np.ndarray]:
    """x, gate, w_in, w_out and a cotangent, float32."""
    T, E, _, D, F = shape
    rng = np.random.default_rng(0)
    sizes = [(T, D), (D, E), (E, D, 2, F), (E, F, D), (T, D)]
    scales = [1.0, D**-0.5, D**-0.5, F**-0.5, 1.0]
    return [rng.standard_normal(size, dtype=np.float32) * np.float32(s) for size, s in zip(sizes, scales, strict=True)]


def _jax_calls(layer: Callable[..., jax.Array], arrays: list[jax.Array]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    *operands, cotangent = arrays

    def pull(operands, cotangent):
        output, vjp = jax.vjp(layer, *operands)
        return output, vjp(cotangent)

    forward, both = jax.jit(layer), jax.jit(pull)
    return (
        lambda: jax.block_until_ready(forward(*operands)),
        lambda: jax.block_until_ready(both(operands, cotangent)),
    )


def _torch_calls(arrays: list[np.ndarray], topk: int, dtype: str) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """A loop over experts with index_select and index_add, as in eager model code."""
    try:
        import torch
    except ImportError:
        return None
    *operands, cotangent = (torch.from_numpy(array).to(getattr(torch, dtype)) for array in arrays)

    def layer(x, gate, w_in, w_out):
        E, D, _, F = w_in.shape
        top, experts = torch.topk((x @ gate).float(), topk)
        weights = torch.softmax(top, -1)
        output = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(experts == e)
            h = x[token] @ w_in[e].reshape(D, 2 * F)
            y = (torch.nn.functional.silu(h[:, :F]) * h[:, F:]) @ w_out[e]
            output.index_add_(0, token, (y * weights[token, slot, None]).to(x.dtype))
        return output

    def forward():
        with torch.no_grad():
            return layer(*operands)

    leaves = [operand.requires_grad_() for operand in operands]
    return forward, lambda: torch.autograd.grad(layer(*leaves), leaves, cotangent)


def rows(*, dtypes: list[str], quick: bool) -> Iterator[dict[str, Any]]:
    """Yields one row a shape, dtype and implementation."""
    for shape in SHAPES[:1] if quick else SHAPES:
        T, _, K, D, F = shape
        flops = {"forward": 6.0 * T * K * D * F, "both": 18.0 * T * K * D * F}
        for dtype in dtypes:
            data = _data(shape)
            arrays = [jnp.asarray(array, dtype) for array in data]
            calls = {
                "anabranch": _jax_calls(lambda *a, K=K: ours(*a, topk=K), arrays),
                "xla ragged_dot": _jax_calls(lambda *a, K=K: ragged_dot_layer(*a, topk=K), arrays),
            }
            if (torch_calls := _torch_calls(data, K, dtype)) is not None:
                calls["torch eager"] = torch_calls
            ceilings = [matmul_flops(dtype)]
            settings: dict[str, Any] = dict(seconds=0.3 if quick else 1.5, repeats=3 if quick else 5)
            forward = interleaved({name: pair[0] for name, pair in calls.items()}, **settings)
            patient = {name: pair[1] for name, pair in calls.items() if forward[name].best < TOO_SLOW}
            both = interleaved(patient, **settings)
            ceilings.append(matmul_flops(dtype))
            known = [rate for rate in ceilings if rate is not None]
            ceiling = max(known) if known else None
            for name in calls:
                row: dict[str, Any] = {"T,E,K,D,F": ",".join(map(str, shape)), "dtype": dtype, "by": name}
                for label, timings in (("forward", forward), ("both", both)):
                    rate = flops[label] / timings[name].best if name in timings else None
                    row[f"{label} GFLOP/s"] = None if rate is None else rate / 1e9
                    row[f"{label} share"] = rate / ceiling if ceiling and rate is not None else None
                row["oneDNN GFLOP/s"] = ceiling / 1e9 if ceiling else None
                yield row
