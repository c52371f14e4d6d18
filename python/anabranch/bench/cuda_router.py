"""The router on a GPU: through C and through JAX, beside torch eager and XLA's jit of the same routing."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from anabranch.bench import gpu
from anabranch.bench.cuda_call import cuda_call
from anabranch.bench.errors import ArgumentError
from anabranch.bench.router_case import RouterCase

CAPTION = """microseconds a call, median of the repeats, over operands rotated past the L2 cache (at most 64 sets).
dense: probabilities and byte map; compact: weights, experts, counts, score_sum, lse; with loss: compact, the balance
loss and its gradient; balanced: compact with quantile balancing, 1000 bins, where there is a bias and no groups; d:
backward by itself, from the cotangents of dense probabilities, of weights, of weights and
score_sum (d with loss). Ours through C, and torch (eager operations), from graphs of many calls, timed on the device;
jax (ours) and xla (lax.top_k and a scatter) from jitted programs of up to 64 and 8 calls one after another, timed on
the host with the queue full; *: the host's launches are the limit. torch and xla compute the dense form; x: their time
over ours through C. Floors: the bytes of the dense call, of reading the logits, of reading the logits and writing
their gradient, at the rate of a copy in this run"""

QB_BINS = 1000
CASES = [
    RouterCase(8, 2),
    RouterCase(64, 8, normalize=False),
    RouterCase(128, 4),
    RouterCase(128, 8, normalize=False),
    RouterCase(256, 8, "sigmoid", bias=True, groups=(8, 4)),
    RouterCase(384, 8, "sigmoid", bias=True),
    RouterCase(512, 10, normalize=False),
    RouterCase(512, 32, "sigmoid", bias=True),
]
TOKENS = (65536, 8192, 4096, 256)
_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")

#: Most calls of one jitted program. Ours compile at once; XLA's take a moment each.
_CALLS_OF_OURS, _CALLS_OF_XLA = gpu.MOST_SETS, 8


class Operands(NamedTuple):
    """torch's tensors that a routing reads: [T, E] logits and d_probs, [E] bias, [T, K] d_weights."""

    logits: Any
    bias: Any
    d_probs: Any
    d_weights: Any


def operands(case: RouterCase, T: int, dtype: str, seed: int = 0) -> Operands:
    """Random operands; the bias and the weights' cotangent are float32."""
    torch = gpu.torch_with_gpu()
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, kind: Any = torch.float32) -> Any:
        return torch.randn(shape, device="cuda", generator=generator).to(kind)

    float_type = getattr(torch, dtype)
    return Operands(
        logits=normal(T, case.E, kind=float_type),
        bias=0.01 * normal(case.E),
        d_probs=normal(T, case.E, kind=float_type),
        d_weights=normal(T, case.K),
    )


def c_calls(case: RouterCase, given: Operands) -> dict[str, Callable[[], Any]]:
    """Our calls through C, by the name of their column. The backward ones read what compact writes."""
    torch = gpu.torch_with_gpu()
    (T, E), K = given.logits.shape, case.K

    def empty(*shape: int, kind: Any = torch.float32) -> Any:
        return torch.empty(shape, device="cuda", dtype=kind)

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
    wanted = statistics | {"weights": empty(T, K), "experts": experts, "lse": lse}
    compact = cuda_call("ab_cuda_router_forward", **forward, **wanted)
    balanced = {}
    if case.balances:
        bounds = torch.tensor([-1.0, 1.0], device="cuda")
        histogram = empty(E, QB_BINS, kind=torch.int32)
        balanced["balanced"] = cuda_call(
            "ab_cuda_router_forward", **forward, **wanted, qb_bin_bounds=bounds, qb_histogram=histogram
        )
    d_score_sum = empty(E)
    loss = cuda_call(
        "ab_cuda_load_balance_loss",
        topk=K,
        coeff=0.01,
        **statistics,
        num_tokens=torch.tensor(T, dtype=torch.int32, device="cuda"),
        loss=empty(),
        d_score_sum=d_score_sum,
    )

    def with_loss() -> None:
        compact()
        loss()

    backward = shared | {"experts": experts, "d_logits": empty(T, E, kind=given.logits.dtype)}
    if case.score_function == "softmax":
        backward["lse"] = lse
    backward_call = functools.partial(cuda_call, "ab_cuda_router_backward", **backward)
    return {
        "dense": cuda_call("ab_cuda_router_forward", **forward, **dense),
        "compact": compact,
        "with loss": with_loss,
        **balanced,
        "d dense": backward_call(d_probs=given.d_probs),
        "d compact": backward_call(d_weights=given.d_weights),
        "d with loss": backward_call(d_weights=given.d_weights, d_score_sum=d_score_sum),
    }


def torch_calls(case: RouterCase, given: Operands) -> dict[str, Callable[[], Any]]:
    """The dense form in torch, forward and backward."""
    from anabranch.bench.in_torch import torch_dense

    torch = gpu.torch_with_gpu()

    def forward() -> None:
        with torch.no_grad():
            torch_dense(case, given.logits, given.bias)

    leaf = given.logits.detach().requires_grad_()
    with torch.cuda.stream(gpu.capture_stream()):
        probs = torch_dense(case, leaf, given.bias)[0]
    return {
        "torch": forward,
        "torch d": lambda: torch.autograd.grad(probs, leaf, given.d_probs, retain_graph=True),
    }


class JaxCall(NamedTuple):
    """A function to time through JAX.

    function: of the operands of one call; what our custom calls write besides its results is written all the same.
    arguments: their `gpu.struct`s.
    residuals: None, or the function of (logits, bias) that gives the arguments after the cotangent.
    cotangent: which of the Operands comes first then.
    calls: how many of them make a program.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    residuals: Callable[..., Any] | None
    cotangent: str
    calls: int


def jax_calls(case: RouterCase, T: int, dtype: str, by: Sequence[str]) -> dict[str, JaxCall]:
    """Ours and XLA's routing, forward and backward, by the name of their column."""
    jax = gpu.jax_with_gpu()
    from anabranch.bench.in_jax import ours_compact, ours_dense, xla_dense

    logits, bias = gpu.struct(T, case.E, dtype=dtype), gpu.struct(case.E, dtype="float32")
    d_weights = gpu.struct(T, case.K, dtype="float32")

    def backward(result: Callable[..., Any], cotangent: str, calls: int) -> JaxCall:
        def rule(z: Any, b: Any) -> Any:
            return jax.vjp(lambda z: result(z, b), z)[1]

        leaves, tree = jax.tree.flatten(jax.eval_shape(rule, logits, bias))
        first = logits if cotangent == "d_probs" else d_weights
        return JaxCall(
            lambda g, *kept: jax.tree.unflatten(tree, kept)(g)[0],
            (first, *(gpu.struct(*leaf.shape, dtype=leaf.dtype) for leaf in leaves)),
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
        result["xla"] = forward(lambda z, b: xla_dense(case, z, b), _CALLS_OF_XLA)
        result["xla d"] = backward(lambda z, b: xla_dense(case, z, b)[0], "d_probs", _CALLS_OF_XLA)
    return result


class JaxPrograms:
    """The compiled programs of some routings, and their times."""

    def __init__(self, cases: Sequence[RouterCase], T: int, dtype: str, sets: Mapping[RouterCase, int], by: Any):
        """Compiles everything; `sets` tells how many sets of operands there will be."""
        self._calls = {case: jax_calls(case, T, dtype, by) for case in cases}
        programs: dict[Any, Any] = {}
        for case, calls in self._calls.items():
            for name, call in calls.items():
                sizes = [call.arguments] * min(call.calls, sets[case])
                programs[case, name] = gpu.chained(call.function), sizes
                if call.residuals is not None:
                    operands = gpu.struct(T, case.E, dtype=dtype), gpu.struct(case.E, dtype="float32")
                    residuals = call.residuals
                    programs[case, name, "residuals"] = lambda given, residuals=residuals: residuals(*given), operands
        self._programs = gpu.compile_all(programs)

    def times(self, case: RouterCase, given: Sequence[Operands]) -> dict[str, gpu.Timing]:
        """The time of one call of each, on these operands."""
        jax, torch = gpu.jax_with_gpu(), gpu.torch_with_gpu()
        torch.cuda.synchronize()
        arrays = [Operands(*map(jax.dlpack.from_dlpack, one)) for one in given]
        result = {}
        for name, call in self._calls[case].items():
            sets: list[Sequence[Any]] = [one[:2] for one in arrays]
            if call.residuals is not None:
                residuals = self._programs[case, name, "residuals"]
                sets = [(getattr(one, call.cotangent), *residuals(one[:2])) for one in arrays]
            groups = gpu.groups_of(sets, min(call.calls, len(sets)))
            result[name] = gpu.seconds_of_program(self._programs[case, name], groups)
        return result


def rows(
    *,
    dtypes: list[str],
    quick: bool,
    rows: Sequence[tuple[int, int]] | None = None,
    tokens: Sequence[int] | None = None,
    by: Sequence[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """One row for every dtype, number of tokens and routing.

    Args:
      dtypes: of the logits, "float32" and/or "bfloat16".
      quick: the first routing only.
      rows: (E, K) of the routings; None: all.
      tokens: T; None: TOKENS.
      by: out of gpu.BY; None: all that this machine has.

    Raises:
      ArgumentError: a routing of `rows` is not in CASES.
      BenchError: this machine lacks something.
    """
    known = [case[:2] for case in CASES]
    for pair in rows or ():
        if pair not in known:
            raise ArgumentError(
                "--rows: got {},{}, expected out of ".format(*pair) + " ".join("{},{}".format(*k) for k in known)
            )
    by = gpu.choose_by(by)
    chosen = [case for case in CASES if rows is None or case[:2] in rows]
    rate = gpu.copy_rate()
    for dtype in dtypes:
        size = 4 if dtype == "float32" else 2
        for T in tokens or TOKENS:
            wanted = chosen[:1] if quick else chosen
            sets = {case: gpu.copies_past_cache(T * case.E * (size + 1)) for case in wanted}
            programs = JaxPrograms(wanted, T, dtype, sets, by) if "jax" in by or "xla" in by else None
            for case in wanted:
                given = [operands(case, T, dtype, seed) for seed in range(sets[case])]
                times: dict[str, gpu.Timing] = {}
                for make in [c_calls] * ("c" in by) + [torch_calls] * ("torch" in by):
                    calls = [make(case, one) for one in given]
                    times |= {name: gpu.seconds_of_each([one[name] for one in calls]) for name in calls[0]}
                if programs is not None:
                    times |= programs.times(case, given)
                elements = T * case.E
                yield {
                    "T": T,
                    "E": case.E,
                    "K": case.K,
                    "score": str(case),
                    "dtype": dtype,
                    **gpu.columns(times),
                    "dense floor": 1e6 * elements * (2 * size + 1) / rate,
                    "read floor": 1e6 * elements * size / rate,
                    "d floor": 1e6 * elements * 2 * size / rate,
                    "copy TB/s": rate / 1e12,
                }


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows as one table for the forward and one for the backward pass."""
    what = ("T", "E", "K", "score", "dtype")
    forward = "dense, jax dense, torch, xla, x torch, x xla, dense floor, compact, jax compact, with loss, balanced"
    forward += ", read floor"
    backward = "d dense, jax d dense, torch d, xla d, x torch, x xla, d compact, jax d compact, d with loss, d floor"
    return {
        "forward": [gpu.shown(row, [*what, *forward.split(", ")], "dense", ("torch", "xla")) for row in rows],
        "backward": [gpu.shown(row, [*what, *backward.split(", ")], "d dense", ("torch d", "xla d")) for row in rows],
    }
