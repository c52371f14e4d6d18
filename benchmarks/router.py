"""The router, dense and compact, through C and through JAX, against eager torch and XLA."""

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from anabranch.bench import ArgumentError
from benchmarks import timing
from benchmarks.c_call import c_call
from benchmarks.options import add_by, add_rows, add_tokens
from benchmarks.shapes import RouterCase
from benchmarks.tables import columns, shown

CAPTION = """microseconds. dense: probabilities and byte map; compact: weights, experts, counts, score_sum, lse; with
loss: compact, the load-balancing loss and its gradient; balanced: compact with quantile balancing, 1000 bins, for
routings with a bias and without groups; d: only backward, from the cotangents of dense probabilities, of weights, or of
weights and score_sum (d with loss). jax: ours through JAX; xla: lax.top_k and a scatter; both jitted. torch and xla
compute the dense form; x: their time divided by ours through C. Floors: the bytes of the dense call, of reading the
logits, or of reading the logits and writing their gradient, at the copy rate of this run. On a GPU: median of the
repeats, which rotate operands past the L2 cache (at most 64 sets). C and torch are timed on the device, in graphs of
many calls; jax and xla on the host with the queue full, in programs of up to 64 and 8 calls; *: bound by the host's
launches. On the CPU: best of interleaved repeats"""

DEVICES = ("cpu", "cuda")
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16")}
BY = ("c", "jax", "torch", "xla")
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
_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")

#: Most calls per jitted program. XLA takes longer to compile each of its calls than each of ours.
_CALLS_OF_OURS, _CALLS_OF_XLA = timing.MOST_SETS, 8


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    known = " ".join("{},{}".format(*pair) for pair in dict.fromkeys(case[:2] for case in CASES))
    add_rows(parser, f"only E experts, K per token; one of {known}")
    add_tokens(parser, "4096 on the CPU; 65536, 8192, 4096 and 256 on a GPU")
    add_by(parser, BY, "all installed ones")


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


def c_calls(case: RouterCase, given: Operands) -> dict[str, Callable[[], Any]]:
    """Returns our calls through C by column. The backward calls read the results of compact."""
    import torch

    (T, E), K = given.logits.shape, case.K

    def empty(*shape: int, kind: Any = torch.float32) -> Any:
        return torch.empty(shape, device=given.logits.device, dtype=kind)

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
    requested = statistics | {"weights": empty(T, K), "experts": experts, "lse": lse}
    compact = c_call("router_forward", **forward, **requested)
    balanced = {}
    if case.balances:
        bins = {"qb_bin_bounds": torch.tensor([-1.0, 1.0]).to(lse.device)}
        bins["qb_histogram"] = empty(E, QB_BINS, kind=torch.int32)
        balanced["balanced"] = c_call("router_forward", **forward, **requested, **bins)
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

    def with_loss() -> None:
        compact()
        loss()

    backward = shared | {"experts": experts, "d_logits": empty(T, E, kind=given.logits.dtype)}
    if case.score_function == "softmax":
        backward["lse"] = lse
    with_loss()  # on the CPU a backward call may be timed before compact
    return {
        "dense": c_call("router_forward", **forward, **dense),
        "compact": compact,
        "with loss": with_loss,
        **balanced,
        "d dense": c_call("router_backward", **backward, d_probs=given.d_probs),
        "d compact": c_call("router_backward", **backward, d_weights=given.d_weights),
        "d with loss": c_call("router_backward", **backward, d_weights=given.d_weights, d_score_sum=d_score_sum),
    }


def torch_calls(case: RouterCase, given: Operands) -> dict[str, Callable[[], Any]]:
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


def ours_dense(case: RouterCase, logits: Any, bias: Any) -> Any:
    """Computes dense probabilities and the byte map [T, E] through JAX. bias [E] is ignored for cases without one."""
    from anabranch.jax import fused_topk_with_score_function

    return fused_topk_with_score_function(
        logits,
        case.K,
        use_pre_softmax=case.score_function == "softmax" and not case.normalize,
        num_groups=case.groups[0],
        group_topk=case.groups[1],
        score_function=case.score_function,
        expert_bias=bias if case.bias else None,
    )


def ours_compact(case: RouterCase, logits: Any, bias: Any) -> Any:
    """Computes the routing of `ours_dense` in compact form with `route`, with all statistics."""
    from anabranch.jax import route

    return route(
        logits,
        case.K,
        score_function=case.score_function,
        normalize=case.normalize,
        num_groups=case.groups[0],
        group_topk=case.groups[1],
        expert_bias=bias if case.bias else None,
    )


class JaxCall(NamedTuple):
    """A function to time through JAX.

    function: a function of the operands of one call. Our custom calls write all their outputs, returned or not.
    arguments: the `timing.struct`s of its operands.
    residuals: None, or a function of (logits, bias) that returns the arguments after the cotangent.
    cotangent: with residuals, the field of Operands that is the first argument.
    calls: number of calls per program.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    residuals: Callable[..., Any] | None
    cotangent: str
    calls: int


class JaxPrograms:
    """Our routing and XLA's, forward and backward, compiled for given cases."""

    def __init__(self, cases: Mapping[RouterCase, int], T: int, dtype: str, device: str, by: Sequence[str]):
        """Compiles all programs. cases: number of operand sets per case."""
        self._device = device
        self._calls = {case: self._calls_of(case, T, dtype, by) for case in cases}
        programs: dict[Any, Any] = {}
        for case, calls in self._calls.items():
            for name, call in calls.items():
                programs[case, name] = (
                    timing.chained(call.function),
                    [call.arguments] * min(call.calls, cases[case]),
                )
                if call.residuals is not None:
                    residuals = call.residuals
                    programs[case, name, "residuals"] = (
                        lambda given, residuals=residuals: residuals(*given),
                        self._logits_and_bias(case, T, dtype),
                    )
        self._programs = timing.compile_all(programs)

    def _logits_and_bias(self, case: RouterCase, T: int, dtype: str) -> tuple[Any, Any]:
        return (
            timing.struct(self._device, T, case.E, dtype=dtype),
            timing.struct(self._device, case.E, dtype="float32"),
        )

    def _calls_of(self, case: RouterCase, T: int, dtype: str, by: Sequence[str]) -> dict[str, JaxCall]:
        """Returns the calls by column."""
        import jax

        from benchmarks.peers import xla

        logits, bias = self._logits_and_bias(case, T, dtype)
        d_weights = timing.struct(self._device, T, case.K, dtype="float32")

        def backward(result: Callable[..., Any], cotangent: str, calls: int) -> JaxCall:
            def rule(z: Any, b: Any) -> Any:
                return jax.vjp(lambda z: result(z, b), z)[1]

            leaves, tree = jax.tree.flatten(jax.eval_shape(rule, logits, bias))
            first = logits if cotangent == "d_probs" else d_weights
            return JaxCall(
                lambda g, *kept: jax.tree.unflatten(tree, kept)(g)[0],
                (first, *(timing.struct(self._device, *leaf.shape, dtype=leaf.dtype) for leaf in leaves)),
                lambda z, b: jax.tree.leaves(rule(z, b)),
                cotangent,
                calls,
            )

        def forward(result: Callable[..., Any], calls: int) -> JaxCall:
            return JaxCall(result, (logits, bias), None, "", calls)

        def dense(z: Any, b: Any) -> Any:
            return ours_dense(case, z, b)[0]

        def weights(z: Any, b: Any) -> Any:
            return ours_compact(case, z, b).weights

        result = {}
        if "jax" in by:
            result["jax dense"] = forward(dense, _CALLS_OF_OURS)
            result["jax compact"] = forward(weights, _CALLS_OF_OURS)
            result["jax d dense"] = backward(dense, "d_probs", _CALLS_OF_OURS)
            result["jax d compact"] = backward(weights, "d_weights", _CALLS_OF_OURS)
        if "xla" in by:
            result["xla"] = forward(functools.partial(xla.dense, case), _CALLS_OF_XLA)
            result["xla d"] = backward(lambda z, b: xla.dense(case, z, b)[0], "d_probs", _CALLS_OF_XLA)
        return result

    def of(self, case: RouterCase, given: Sequence[Operands]) -> dict[str, timing.Program]:
        """Returns the programs of a case on these operands."""
        if self._device == "cuda":
            timing.torch_on("cuda").cuda.synchronize()
        arrays = [Operands(*map(timing.as_jax, one)) for one in given]
        result = {}
        for name, call in self._calls[case].items():
            sets: list[Sequence[Any]] = [one[:2] for one in arrays]
            if call.residuals is not None:
                residuals = self._programs[case, name, "residuals"]
                sets = [(getattr(one, call.cotangent), *residuals(one[:2])) for one in arrays]
            groups = timing.groups_of(sets, min(call.calls, len(sets)))
            result[name] = timing.Program(self._programs[case, name], groups)
        return result


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields one row per dtype, number of tokens and routing.

    Raises:
      ArgumentError: a routing of --rows is unknown.
      BenchError: this machine lacks something.
    """
    device, quick = options.device, options.quick
    known = list(dict.fromkeys(case[:2] for case in CASES))
    for pair in options.rows or ():
        if pair not in known:
            expected = " ".join("{},{}".format(*k) for k in known)
            raise ArgumentError("--rows: got {},{}, expected one of ".format(*pair) + expected)
    by = timing.available("router", options.by or BY, options.by is not None, device)
    chosen = [case for case in CASES if options.rows is None or case[:2] in options.rows]
    rate = timing.copy_rate(device)
    for dtype in options.dtype:
        size = 4 if dtype == "float32" else 2
        for T in options.tokens or TOKENS[device]:
            sets = {
                case: timing.sets_past_cache(device, T * case.E * (size + 1))
                for case in (chosen[:1] if quick else chosen)
            }
            programs = JaxPrograms(sets, T, dtype, device, by) if "jax" in by or "xla" in by else None
            for case, count in sets.items():
                given = [operands(case, T, dtype, device, seed) for seed in range(count)]
                calls: dict[str, list[Callable[[], Any]]] = {}
                for make in [c_calls] * ("c" in by) + [torch_calls] * ("torch" in by):
                    made = [make(case, one) for one in given]
                    calls |= {name: [one[name] for one in made] for name in made[0]}
                case_programs = {} if programs is None else programs.of(case, given)
                elements = T * case.E
                yield {
                    "T": T,
                    "E": case.E,
                    "K": case.K,
                    "score": str(case),
                    "dtype": dtype,
                    **columns(timing.times_of(device, calls, case_programs, quick=quick)),
                    "dense floor": 1e6 * elements * (2 * size + 1) / rate,
                    "read floor": 1e6 * elements * size / rate,
                    "d floor": 1e6 * elements * 2 * size / rate,
                    "copy TB/s": rate / 1e12,
                }


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns one table for the forward pass and one for the backward pass."""
    what = ("T", "E", "K", "score", "dtype")
    forward = "dense, jax dense, torch, xla, x torch, x xla, dense floor, compact, jax compact, with loss, balanced"
    forward += ", read floor"
    backward = "d dense, jax d dense, torch d, xla d, x torch, x xla, d compact, jax d compact, d with loss, d floor"
    return {
        "forward": [shown(row, [*what, *forward.split(", ")], "dense", ("torch", "xla")) for row in rows],
        "backward": [shown(row, [*what, *backward.split(", ")], "d dense", ("torch d", "xla d")) for row in rows],
    }
