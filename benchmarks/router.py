"""The router, dense and compact, through C and through JAX, against eager torch and XLA."""

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from anabranch.bench import ArgumentError
from benchmarks import beside, ceilings, flags, timing
from benchmarks.c_call import Calls, c_call
from benchmarks.shapes import ITEMSIZES, RouterCase
from benchmarks.tables import columns, shown

CAPTION = """microseconds. dense: probabilities and byte map; compact: weights, experts, counts, score_sum, lse; plain:
weights, experts and, for softmax, lse, as a layer without losses needs; with loss: compact, the load-balancing loss and
its gradient; balanced: compact with quantile balancing, 1000 bins, for routings with a bias and without groups; d: only
backward, from the cotangents of dense probabilities, of weights, or of weights and score_sum (d with loss). jax: ours
through JAX; xla: lax.top_k and a scatter; both jitted. torch and xla compute the dense form; x: their time divided by
ours through C. Floors: the bytes of the dense call, of reading the logits, or of reading the logits and writing their
gradient, at the copy rate of this run. On a GPU: median of the repeats, which rotate operands past the L2 cache (at
most 64 sets). C and torch are timed on the device, in graphs of many calls; jax and xla on the host with the queue
full, in programs of up to 8 calls; *: bound by the host's launches. On the CPU: best of interleaved repeats"""

DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16")}
BY = ("c", "jax", "torch", "xla")
_DEFAULT = {"cpu": BY, "cuda": ("c", "torch")}
TOKENS = {"cpu": (4096,), "cuda": (65536, 8192, 4096, 256)}
QB_BINS = 1000
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
#: Other combinations, and shapes that select other kernels; for --beside.
MORE_CASES = [
    RouterCase(16, 1, "sigmoid", normalize=False),
    RouterCase(16, 4),
    RouterCase(32, 4),
    RouterCase(64, 6, "sigmoid", bias=True),
    RouterCase(128, 8, "sigmoid"),
    RouterCase(128, 8, bias=True),
    RouterCase(160, 8, "sigmoid", bias=True),
    RouterCase(256, 8, "sqrtsoftplus", bias=True),
    RouterCase(256, 16, normalize=False),
    RouterCase(256, 16, "sigmoid"),
    RouterCase(384, 8, "sigmoid"),
]
OPTIONS = {
    **flags.rows("only E experts, K per token; one of those that the table has without this option"),
    **flags.tokens("4096 on the CPU; 65536, 8192, 4096 and 256 on a GPU"),
    **flags.by(BY, "all installed ones; on a GPU c and torch"),
}
_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")

_MOST_CALLS = 8  # per jitted program


class Operands(NamedTuple):
    """torch tensors that a routing reads: logits and d_probs [T, E], bias [E], d_weights [T, K]."""

    logits: Any
    bias: Any
    d_probs: Any
    d_weights: Any


def operands(case: RouterCase, T: int, dtype: str, device: str, seed: int = 0) -> Operands:
    """Returns random operands. bias and d_weights are float32."""
    normal, normal_32 = (timing.normal_on(device, kind, seed) for kind in (dtype, "float32"))
    return Operands(
        logits=normal(T, case.E),
        bias=normal_32(case.E, scale=0.01),
        d_probs=normal(T, case.E),
        d_weights=normal_32(T, case.K),
    )


def c_calls(case: RouterCase, given: Operands) -> Calls:
    """Returns our calls through C by column. The backward calls read the results of compact."""
    import torch

    (T, E), K = given.logits.shape, case.K

    def empty(*shape: int, kind: Any = torch.float32) -> Any:
        return torch.zeros(shape, device=given.logits.device, dtype=kind)

    softmax = case.score_function == "softmax"
    shared = {
        "score_function": _SCORES.index(case.score_function),
        "normalize": int(case.normalize),
        "topk": K,
        "scaling_factor": 1.0,
        "logits": given.logits,
    }
    forward = shared | {"num_groups": case.groups[0], "group_topk": case.groups[1]}
    if case.bias:
        forward["expert_bias"] = given.bias
    dense = {"probs": empty(T, E, kind=given.logits.dtype), "routing_map": empty(T, E, kind=torch.bool)}
    experts, lse = empty(T, K, kind=torch.int32), empty(T)
    statistics = {"tokens_per_expert": empty(E, kind=torch.int32), "score_sum": empty(E)}
    requested = {"weights": empty(T, K), "experts": experts}
    compact = c_call("router_forward", **forward, **requested, **statistics, lse=lse)
    balanced = {}
    if case.bias and not case.groups[0]:
        bins = {"qb_bin_bounds": torch.tensor([-1.0, 1.0]).to(lse.device)}
        bins["qb_histogram"] = empty(E, QB_BINS, kind=torch.int32)
        balanced["balanced"] = c_call("router_forward", **forward, **requested, **statistics, lse=lse, **bins)
    d_score_sum = empty(E)
    loss = c_call(
        "load_balance_loss",
        topk=K,
        coeff=0.01,
        **statistics,
        num_tokens=torch.tensor(T, dtype=torch.int32).to(lse.device),
        loss=empty(),
        d_score_sum=d_score_sum,
    )

    def with_loss() -> Any:
        return compact(), loss()

    backward = shared | {"experts": experts, "d_logits": empty(T, E, kind=given.logits.dtype)}
    if softmax:
        backward["lse"] = lse
    with_loss()  # on the CPU a backward call may be timed before compact
    return {
        "dense": c_call("router_forward", **forward, **dense),
        "compact": compact,
        "plain": c_call("router_forward", **forward, **requested, **({"lse": lse} if softmax else {})),
        "with loss": with_loss,
        **balanced,
        "d dense": c_call("router_backward", **backward, d_probs=given.d_probs),
        "d compact": c_call("router_backward", **backward, d_weights=given.d_weights),
        "d with loss": c_call("router_backward", **backward, d_weights=given.d_weights, d_score_sum=d_score_sum),
    }


def torch_calls(case: RouterCase, given: Operands) -> Calls:
    """Returns torch's calls of the dense form, forward and backward."""
    import contextlib

    import torch

    from benchmarks.peers.torch import dense

    def forward() -> None:
        with torch.no_grad():
            dense(case, given.logits, given.bias)

    leaf = given.logits.detach().requires_grad_()
    with torch.cuda.stream(timing.capture_stream()) if leaf.is_cuda else contextlib.nullcontext():
        probs = dense(case, leaf, given.bias)[0]
    return {
        "torch": forward,
        "torch d": lambda: torch.autograd.grad(probs, leaf, given.d_probs, retain_graph=True),
    }


def ours(case: RouterCase, logits: Any, bias: Any) -> Any:
    """Computes the compact form through JAX, with all statistics. bias [E] is ignored for cases without one."""
    from anabranch.jax import route

    return route(logits, case.K, normalize=case.normalize, **_options(case, bias))


def ours_dense(case: RouterCase, logits: Any, bias: Any) -> Any:
    """Computes dense probabilities and the byte map [T, E] through JAX; see `ours`."""
    from anabranch.jax import fused_topk_with_score_function

    pre_softmax = case.score_function == "softmax" and not case.normalize
    return fused_topk_with_score_function(logits, case.K, use_pre_softmax=pre_softmax, **_options(case, bias))


def _options(case: RouterCase, bias: Any) -> dict[str, Any]:
    groups = {"num_groups": case.groups[0], "group_topk": case.groups[1]}
    return {"score_function": case.score_function, "expert_bias": bias if case.bias else None, **groups}


def jax_functions(case: RouterCase) -> dict[str, Callable[..., Any]]:
    """Returns functions of logits and bias by column. Our custom calls write all their outputs, returned or not."""
    from benchmarks.peers import xla

    return {
        "jax dense": lambda z, b: ours_dense(case, z, b)[0],
        "jax compact": lambda z, b: ours(case, z, b).weights,
        "xla": functools.partial(xla.dense, case),
    }


def _chosen(options: argparse.Namespace, cases: Sequence[RouterCase]) -> list[RouterCase]:
    """Returns the cases of --rows.

    Raises:
      ArgumentError: there is no such case.
    """
    known = list(dict.fromkeys(case[:2] for case in cases))
    for pair in options.rows or ():
        if pair not in known:
            expected = " ".join("{},{}".format(*k) for k in known)
            raise ArgumentError("--rows: got {},{}, expected one of ".format(*pair) + expected)
    chosen = [case for case in cases if options.rows is None or case[:2] in options.rows]
    return chosen[:1] if options.quick else chosen


def _draw(
    options: argparse.Namespace, known: Sequence[RouterCase]
) -> Iterator[tuple[RouterCase, dict[str, Any], list[Operands]]]:
    """Yields routings, the first columns of their rows, and sets of operands."""
    device = options.device
    for dtype in options.dtype:
        for T in options.tokens or TOKENS[device]:
            for case in _chosen(options, known):
                count = timing.sets_past_cache(device, T * case.E * (ITEMSIZES[dtype] + 1))
                head = {"T": T, "E": case.E, "K": case.K, "score": str(case), "dtype": dtype}
                yield case, head, [operands(case, T, dtype, device, seed) for seed in range(count)]


def cases(options: argparse.Namespace) -> Iterator[beside.Case]:
    """Yields what --beside times."""
    for case, head, sets in _draw(options, CASES + MORE_CASES):
        yield head, sets, functools.partial(c_calls, case)


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields one row per dtype, number of tokens and routing.

    Raises:
      ArgumentError: a routing of --rows is unknown.
      BenchError: this machine lacks something.
    """
    _chosen(options, CASES)
    device = options.device
    by = timing.available("router", options.by, _DEFAULT[device], device)
    rate = ceilings.copy_rate(device)
    for case, head, given in _draw(options, CASES):
        calls: dict[str, list[Callable[[], Any]]] = {}
        programs: dict[str, timing.Program] = {}
        for make in [c_calls] * ("c" in by) + [torch_calls] * ("torch" in by):
            made = [make(case, one) for one in given]
            calls |= {name: [one[name] for one in made] for name in made[0]}
        if "jax" in by or "xla" in by:
            arrays = [tuple(map(timing.as_jax, one[:2])) for one in given]
            programs = {
                name: timing.program(function, arrays, min(_MOST_CALLS, len(given)))
                for name, function in jax_functions(case).items()
                if name.split()[0] in by
            }
        size, elements = ITEMSIZES[head["dtype"]], head["T"] * case.E
        yield {
            **head,
            **columns(timing.times_of(device, calls, programs, quick=options.quick)),
            "dense floor": 1e6 * elements * (2 * size + 1) / rate,
            "read floor": 1e6 * elements * size / rate,
            "d floor": 1e6 * elements * 2 * size / rate,
            "copy TB/s": rate / 1e12,
        }


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns one table for the forward pass and one for the backward pass."""
    what = ("T", "E", "K", "score", "dtype")
    forward = "dense, jax dense, torch, xla, x torch, x xla, dense floor, compact, jax compact, plain, with loss, "
    forward += "balanced, read floor"
    backward = "d dense, torch d, x torch, d compact, d with loss, d floor"
    return {
        "forward": [shown(row, [*what, *forward.split(", ")], "dense", ("torch", "xla")) for row in rows],
        "backward": [shown(row, [*what, *backward.split(", ")], "d dense", ("torch d", "xla d")) for row in rows],
    }
