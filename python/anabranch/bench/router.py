"""The router, compact and dense, beside torch eager and XLA's jit of the same computation."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anabranch.bench.in_jax import ours_balanced, ours_compact, ours_dense, xla_dense
from anabranch.bench.in_torch import torch_dense
from anabranch.bench.measure import Timing, interleaved
from anabranch.bench.router_case import RouterCase

CAPTION = (
    "microseconds, best of the repeats. dense: probabilities and byte map; compact: weights, experts, counts, "
    "score_sum, lse; balanced: compact with quantile balancing, 1000 bins, where there is a bias and no groups; grad: "
    "d_logits from the dense probabilities' cotangent; x torch, x xla: their dense (or grad) time over ours"
)

CASES = [
    RouterCase(8, 2),
    RouterCase(64, 8, normalize=False),
    RouterCase(128, 4),
    RouterCase(128, 8, normalize=False),
    RouterCase(256, 8, normalize=False),
    RouterCase(256, 8, "sigmoid", bias=True, groups=(8, 4)),
    RouterCase(384, 8, "sigmoid", bias=True),
    RouterCase(512, 10, normalize=False),
    RouterCase(512, 32, "sigmoid", bias=True),
    RouterCase(2304, 36, normalize=False),
]
TOKENS = 4096


def _jax_calls(
    dense: Callable[..., Any], case: RouterCase, arrays: list[jax.Array]
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
    case: RouterCase, arrays: list[np.ndarray], dtype: str
) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    try:
        import torch
    except ImportError:
        return None
    logits, bias, cotangent = (torch.from_numpy(array).to(getattr(torch, dtype)) for array in arrays)

    def forward():
        with torch.no_grad():
            torch_dense(case, logits, bias)

    leaf = logits.clone().requires_grad_()
    probs = torch_dense(case, leaf, bias)[0]
    return forward, lambda: torch.autograd.grad(probs, leaf, cotangent, retain_graph=True)


def _microseconds(timings: Mapping[str, Timing], name: str) -> float | None:
    return timings[name].best * 1e6 if name in timings else None


def rows(
    *, dtypes: list[str], quick: bool, cases: list[RouterCase] | None = None, tokens: int = TOKENS
) -> Iterator[dict[str, Any]]:
    """One row a case and dtype.

    Args:
      dtypes: of the logits, "float32" and/or "bfloat16".
      quick: the second case only, and few repeats.
      cases: None: CASES.
      tokens: T.
    """
    chosen = CASES if cases is None else cases
    for dtype in dtypes:
        for case in chosen[1:2] if quick and cases is None else chosen:
            E = case.E
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
            if case.balances:
                balanced = jax.jit(lambda z, b, case=case: ours_balanced(case, z, b))
                functions["balanced"] = lambda balanced=balanced, ours=ours: jax.block_until_ready(balanced(*ours[:2]))
            functions["xla"], functions["xla grad"] = _jax_calls(xla_dense, case, ours)
            if (peer := _torch_calls(case, arrays, dtype)) is not None:
                functions["torch"], functions["torch grad"] = peer
            timings = interleaved(functions, seconds=0.1 if quick else 0.5)
            us = {
                name: _microseconds(timings, name)
                for name in ("ours", "torch", "xla", "ours grad", "torch grad", "xla grad", "compact", "balanced")
            }

            def ratio(peer: str, own: str, us: dict[str, float | None] = us) -> float | None:
                a, b = us[peer], us[own]
                return a / b if a is not None and b is not None else None

            yield {
                "T": tokens,
                "E": E,
                "K": case.K,
                "score": str(case),
                "dtype": dtype,
                "dense": us["ours"],
                "torch": us["torch"],
                "xla": us["xla"],
                "x torch": ratio("torch", "ours"),
                "x xla": ratio("xla", "ours"),
                "compact": us["compact"],
                "balanced": us["balanced"],
                "grad": us["ours grad"],
                "grad x torch": ratio("torch grad", "ours grad"),
                "grad x xla": ratio("xla grad", "ours grad"),
            }
