"""The router, compact and dense, beside torch eager and XLA's jit of the same computation."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anabranch.bench.measure import Timing, interleaved
from anabranch.jax import fused_topk_with_score_function, route

CAPTION = (
    "microseconds, best of the repeats. dense: probabilities and byte map; compact: weights, experts, counts, "
    "score_sum, lse; grad: d_logits from the dense probabilities' cotangent; x torch, x xla: their dense (or grad) "
    "time over ours"
)

# E, K, score function, normalised, bias, groups, kept groups
CASES = [
    (8, 2, "softmax", True, False, 0, 0),
    (64, 8, "softmax", False, False, 0, 0),
    (128, 4, "softmax", True, False, 0, 0),
    (128, 8, "softmax", False, False, 0, 0),
    (256, 8, "softmax", False, False, 0, 0),
    (256, 8, "sigmoid", True, True, 8, 4),
    (384, 8, "sigmoid", True, True, 0, 0),
    (512, 10, "softmax", False, False, 0, 0),
    (512, 32, "sigmoid", True, True, 0, 0),
    (2304, 36, "softmax", False, False, 0, 0),
]
TOKENS = 4096

Case = tuple[int, int, str, bool, bool, int, int]


def xla_dense(case: Case, logits: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Dense probabilities and byte map as JAX users write them: lax.top_k and a scatter."""
    E, K, score_function, normalize, biased, groups, kept = case
    z = logits.astype(jnp.float32)
    softmax = score_function == "softmax"
    scores = jax.nn.softmax(z) if softmax else jax.nn.sigmoid(z)
    keys = scores + bias if biased else z
    if groups:
        grouped = keys.reshape(-1, groups, E // groups)
        best = jax.lax.top_k(jax.lax.top_k(grouped, K // kept)[0].sum(-1), kept)[1]
        keep = jnp.zeros(grouped.shape[:2], bool).at[jnp.arange(z.shape[0])[:, None], best].set(True)
        keys = jnp.where(keep[..., None], grouped, -jnp.inf).reshape(z.shape)
    experts = jax.lax.top_k(keys, K)[1]
    weights = jnp.take_along_axis(z if softmax and normalize else scores, experts, -1)
    if normalize:
        weights = jax.nn.softmax(weights) if softmax else weights / (weights.sum(-1, keepdims=True) + 1e-20)
    token = jnp.arange(z.shape[0])[:, None]
    probs = jnp.zeros_like(logits).at[token, experts].set(weights.astype(logits.dtype))
    return probs, jnp.zeros(z.shape, bool).at[token, experts].set(True)


def ours_dense(case: Case, logits: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same from anabranch."""
    _, K, score_function, normalize, biased, groups, kept = case
    return fused_topk_with_score_function(
        logits,
        K,
        use_pre_softmax=score_function == "softmax" and not normalize,
        num_groups=groups,
        group_topk=kept,
        score_function=score_function,
        expert_bias=bias if biased else None,
    )


def ours_compact(case: Case, logits: jax.Array, bias: jax.Array) -> Any:
    """route(), with all its statistics."""
    _, K, score_function, normalize, biased, groups, kept = case
    return route(
        logits,
        K,
        score_function=score_function,
        normalize=normalize,
        num_groups=groups,
        group_topk=kept,
        expert_bias=bias if biased else None,
    )


def _jax_calls(
    dense: Callable[..., Any], case: Case, arrays: list[jax.Array]
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The forward pass, and the backward pass by itself: its residuals are made once."""
    logits, bias, cotangent = arrays
    forward = jax.jit(lambda z: dense(case, z, bias))
    _, pull = jax.vjp(lambda z: dense(case, z, bias)[0], logits)
    backward = jax.jit(lambda pull, g: pull(g))
    return (
        lambda: jax.block_until_ready(forward(logits)),
        lambda: jax.block_until_ready(backward(pull, cotangent)),
    )


def _torch_calls(
    case: Case, arrays: list[np.ndarray], dtype: str
) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    try:
        import torch
    except ImportError:
        return None
    E, K, score_function, normalize, biased, groups, kept = case
    logits, bias, cotangent = (torch.from_numpy(array).to(getattr(torch, dtype)) for array in arrays)
    softmax = score_function == "softmax"

    def dense(logits):
        z = logits.float()
        scores = torch.softmax(z, -1) if softmax and not normalize else None if softmax else torch.sigmoid(z)
        keys = scores + bias.float() if biased else z
        if groups:
            grouped = keys.view(-1, groups, E // groups)
            best = grouped.topk(K // kept, dim=-1)[0].sum(-1).topk(kept, dim=-1)[1]
            keep = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter(1, best, True)
            keys = grouped.masked_fill(~keep[..., None], float("-inf")).view_as(z)
        experts = keys.topk(K, dim=-1)[1]
        weights = (z if scores is None else scores).gather(1, experts)
        if normalize:
            weights = torch.softmax(weights, -1) if softmax else weights / (weights.sum(-1, keepdim=True) + 1e-20)
        probs = torch.zeros_like(logits).scatter(1, experts, weights.to(logits.dtype))
        return probs, torch.zeros(z.shape, dtype=torch.bool).scatter(1, experts, True)

    def forward():
        with torch.no_grad():
            dense(logits)

    leaf = logits.clone().requires_grad_()
    probs = dense(leaf)[0]
    return forward, lambda: torch.autograd.grad(probs, leaf, cotangent, retain_graph=True)


def _microseconds(timings: Mapping[str, Timing], name: str) -> float | None:
    return timings[name].best * 1e6 if name in timings else None


def rows(
    *, dtypes: list[str], quick: bool, cases: list[Case] | None = None, tokens: int = TOKENS
) -> Iterator[dict[str, Any]]:
    """One row a case and dtype.

    Args:
      dtypes: of the logits, "float32" and/or "bfloat16".
      quick: the second case only, and few repeats.
      cases: (E, K, score function, normalised, bias, groups, kept groups); None: CASES.
      tokens: T.
    """
    chosen = CASES if cases is None else cases
    for dtype in dtypes:
        for case in chosen[1:2] if quick and cases is None else chosen:
            E, K, score_function, normalize, biased, groups, kept = case
            rng = np.random.default_rng(0)
            arrays = [
                rng.standard_normal((tokens, E), dtype=np.float32),
                rng.standard_normal(E, dtype=np.float32) * np.float32(0.01),
                rng.standard_normal((tokens, E), dtype=np.float32),
            ]
            ours = [jnp.asarray(array, dtype) for array in arrays]
            functions: dict[str, Callable[[], Any]] = {}
            functions["ours"], functions["ours grad"] = _jax_calls(ours_dense, case, ours)
            compact = jax.jit(lambda z, b, case=case: ours_compact(case, z, b))
            functions["compact"] = lambda compact=compact, ours=ours: jax.block_until_ready(compact(*ours[:2]))
            functions["xla"], functions["xla grad"] = _jax_calls(xla_dense, case, ours)
            if (peer := _torch_calls(case, arrays, dtype)) is not None:
                functions["torch"], functions["torch grad"] = peer
            timings = interleaved(functions, seconds=0.1 if quick else 0.5)
            us = {
                name: _microseconds(timings, name)
                for name in ("ours", "torch", "xla", "ours grad", "torch grad", "xla grad", "compact")
            }

            def ratio(peer: str, own: str, us: dict[str, float | None] = us) -> float | None:
                a, b = us[peer], us[own]
                return a / b if a is not None and b is not None else None

            yield {
                "T": tokens,
                "E": E,
                "K": K,
                "score": f"{score_function}{' normalised' if normalize else ''}{' bias' if biased else ''}"
                + (f" groups {groups}/{kept}" if groups else ""),
                "dtype": dtype,
                "dense": us["ours"],
                "torch": us["torch"],
                "xla": us["xla"],
                "x torch": ratio("torch", "ours"),
                "x xla": ratio("xla", "ours"),
                "compact": us["compact"],
                "grad": us["ours grad"],
                "grad x torch": ratio("torch grad", "ours grad"),
                "grad x xla": ratio("xla grad", "ours grad"),
            }
