"""The experts alone, through JAX and through C, beside torch eager, XLA ragged_dot and the rate of oneDNN."""

import ctypes
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from anabranch import _library
from anabranch.bench import c_call
from anabranch.bench.ceiling import matmul_flops
from anabranch.bench.measure import Timing, interleaved
from anabranch.jax import ragged_dot
from anabranch.jax.ops.ffn import FfnConfig, FfnOperands, ffn_backward, ffn_forward

CAPTION = "GFLOP/s (6 T K D F forward, 12 T K D F backward); share: of oneDNN's large product in this run"

SHAPES = [(1024, 8, 2, 512, 1024), (2048, 64, 8, 512, 256), (2048, 128, 8, 512, 256)]  # T, E, K, D, F

Calls = tuple[Callable[[], Any], Callable[[], Any]]  # forward; forward and backward


class Problem(NamedTuple):
    """Operands of one network; rows gather tokens by slot_of_row."""

    x: np.ndarray
    slot_of_row: np.ndarray
    group_sizes: np.ndarray
    w_in: np.ndarray
    w_out: np.ndarray
    weights: np.ndarray
    d_out: np.ndarray


def problem(shape: tuple[int, ...], dtype: str) -> Problem:
    """Random operands; each token has K distinct experts, all equally likely."""
    T, E, K, D, F = shape
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32

    def normal(size: tuple[int, ...], scale: float) -> np.ndarray:
        return (rng.standard_normal(size, dtype=np.float32) * np.float32(scale)).astype(kind)

    experts = np.argsort(rng.random((T, E)), axis=1)[:, :K].reshape(-1)
    return Problem(
        x=normal((T, D), 1.0),
        slot_of_row=np.argsort(experts, kind="stable").astype(np.int32),
        group_sizes=np.bincount(experts, minlength=E).astype(np.int32),
        w_in=normal((E, D, 2, F), D**-0.5),
        w_out=normal((E, F, D), F**-0.5),
        weights=rng.random((T, K), dtype=np.float32),
        d_out=normal((T, D), 1.0),
    )


# ---------------------------------------------------------------- through C


_FORWARD = "x slot_of_row group_sizes w_in b_in w_out b_out weights y h a"
_BACKWARD = (
    "x slot_of_row group_sizes w_in w_out b_out weights h d_out dh dx_rows d_w_in d_b_in d_w_out d_b_out d_weights"
    " weighted_a"
)


def _c_call(function: str, options: list[str], tensors: str, values: Mapping[str, Any]) -> Callable[[], None]:
    return c_call.call(_library.load(), function, [(name, ctypes.c_int32) for name in options], tensors.split(), values)


def c_calls(p: Problem, topk: int) -> Calls:
    """Into memory that is there already, dh in the place of h."""
    R = len(p.slot_of_row)
    given = {**p._asdict(), "topk": topk}
    d_out = given.pop("d_out")
    y, h = np.ones((R, p.x.shape[1]), p.x.dtype), np.ones((R, *p.w_in.shape[2:]), p.x.dtype)
    plain = {name: value for name, value in given.items() if name != "weights"}
    options = ["activation", "weight_early", "topk", "skip_rest"]
    forward = _c_call("ab_expert_ffn_forward", options, _FORWARD, {**plain, "y": y})
    keeping_h = _c_call("ab_expert_ffn_forward", options, _FORWARD, {**plain, "y": y, "h": h})
    results = {
        "dx_rows": np.ones_like(y),
        "d_w_in": np.ones_like(p.w_in),
        "d_w_out": np.ones_like(p.w_out),
        "d_weights": np.ones_like(p.weights),
    }
    backward = _c_call(
        "ab_expert_ffn_backward",
        ["activation", "topk", "accumulate", "skip_rest"],
        _BACKWARD,
        {**given, "h": h, "dh": h, "d_out": d_out, **results},
    )
    return forward, lambda: (keeping_h(), backward())


# ---------------------------------------------------------------- through JAX, and the peers


def _jitted(forward: Callable[..., Any], both: Callable[..., Any], *operands: Any) -> Calls:
    forward, both = jax.jit(forward), jax.jit(both)
    return (
        lambda: jax.block_until_ready(forward(*operands)),
        lambda: jax.block_until_ready(both(*operands)),
    )


def jax_calls(p: Problem, topk: int) -> Calls:
    """The rules as the whole layer composes them."""
    config = FfnConfig(topk=topk)
    arrays = Problem(*map(jnp.asarray, p))

    def operands(a: Problem, weights: Any) -> FfnOperands:
        return FfnOperands(a.x, a.slot_of_row, a.group_sizes, a.w_in, a.w_out, None, None, weights)

    def forward(a: Problem) -> jax.Array:
        return ffn_forward(config, operands(a, None), save_h=False)[0]

    def both(a: Problem) -> Any:
        y, h = ffn_forward(config, operands(a, None), save_h=True)
        return y, ffn_backward(config, operands(a, a.weights), h, a.d_out)

    return _jitted(forward, both, arrays)


def ragged_dot_calls(p: Problem, topk: int, product: Callable[..., jax.Array]) -> Calls:
    """What a JAX user writes without this library, or with one import of it."""
    E, D, _, F = p.w_in.shape
    token = p.slot_of_row // topk
    x, w_in, w_out = jnp.asarray(p.x), jnp.asarray(p.w_in), jnp.asarray(p.w_out)
    d_y = jnp.asarray(p.d_out)[token]

    def network(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
        h = product(x[token], w_in.reshape(E, D, 2 * F), p.group_sizes)
        return product(jax.nn.silu(h[:, :F]) * h[:, F:], w_out, p.group_sizes)

    def both(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> Any:
        y, pull = jax.vjp(network, x, w_in, w_out)
        return y, pull(d_y)

    return _jitted(network, both, x, w_in, w_out)


def torch_calls(p: Problem, topk: int) -> Calls | None:
    """A loop over experts, as in eager model code; None without torch."""
    try:
        import torch
    except ImportError:
        return None

    def tensor(array: np.ndarray) -> Any:
        return torch.from_numpy(array.astype(np.float32)).to(getattr(torch, p.x.dtype.name))

    E, D, _, F = p.w_in.shape
    tokens = torch.from_numpy((p.slot_of_row // topk).astype(np.int64))
    bounds = np.concatenate([[0], np.cumsum(p.group_sizes)]).tolist()
    leaves = [tensor(array) for array in (p.x, p.w_in, p.w_out)]
    d_y = tensor(p.d_out)[tokens]

    def network() -> Any:
        x, w_in, w_out = leaves
        parts = []
        for e in range(E):
            h = x[tokens[bounds[e] : bounds[e + 1]]] @ w_in[e].reshape(D, 2 * F)
            parts.append((torch.nn.functional.silu(h[:, :F]) * h[:, F:]) @ w_out[e])
        return torch.cat(parts)

    def forward() -> Any:
        with torch.no_grad():
            return network()

    for leaf in leaves:
        leaf.requires_grad_()
    return forward, lambda: torch.autograd.grad(network(), leaves, d_y)


def _once(call: Callable[[], Any]) -> Timing:
    """One timed call after one warm-up, for what takes seconds."""
    call()
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return Timing(seconds, seconds)


def rows(*, dtypes: list[str], quick: bool) -> Iterator[dict[str, Any]]:
    """Yields one row a shape, dtype and implementation."""
    for shape in SHAPES[:1] if quick else SHAPES:
        T, _, K, D, F = shape
        flops = {"forward": 6.0 * T * K * D * F, "both": 18.0 * T * K * D * F}
        for dtype in dtypes:
            p = problem(shape, dtype)
            calls = {
                "anabranch C": c_calls(p, K),
                "anabranch JAX": jax_calls(p, K),
                "anabranch ragged_dot": ragged_dot_calls(p, K, ragged_dot),
            }
            if (torch := torch_calls(p, K)) is not None:
                calls["torch eager"] = torch
            before = matmul_flops(dtype)
            functions = {(name, "forward"): pair[0] for name, pair in calls.items()}
            functions |= {(name, "both"): pair[1] for name, pair in calls.items()}
            timings = interleaved(functions, seconds=0.3 if quick else 1.5, repeats=3 if quick else 7)
            known = [rate for rate in (before, matmul_flops(dtype)) if rate is not None]
            ceiling = max(known) if known else None
            forward, both = ragged_dot_calls(p, K, jax.lax.ragged_dot)
            timings |= {("xla ragged_dot", "forward"): _once(forward), ("xla ragged_dot", "both"): _once(both)}
            for name in (*calls, "xla ragged_dot"):
                row: dict[str, Any] = {"T,E,K,D,F": ",".join(map(str, shape)), "dtype": dtype, "by": name}
                for direction, label in (("forward", "fwd"), ("both", "fwd+bwd")):
                    rate = flops[direction] / timings[name, direction].best
                    row[f"{label} GFLOP/s"] = rate / 1e9
                    row[f"{label} share"] = rate / ceiling if ceiling else None
                row["oneDNN GFLOP/s"] = ceiling / 1e9 if ceiling else None
                yield row
