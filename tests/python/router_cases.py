"""Random routings, and the comparison of selection, weights, statistics and gradients with the oracle."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import frameworks
from anabranch.jax import route
from anabranch.reference import router as reference
from oracle import assert_close, assert_close_per_expert, remembered

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

# float32 arithmetic: 2e-6 per tensor; 4 times that per expert, where the cancellation in g - sum g w matters more and a
# slice has few elements. Measured: at most 4e-7 and 2e-6.
BOUND = 2e-6
PER_EXPERT = 4 * BOUND
# A result in another dtype is rounded once, by half an ulp; subnormals of float16 lose more.
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-10}

# The weight of a single expert has gradient 0. The oracle's float64 leaves rounding errors of this size, and so does
# the CPU, which divides before it subtracts; float32 on a GPU leaves the rounding error of the terms.
FLOAT64_ZERO = 1e-14

GROUPS = {"num_groups": 8, "group_topk": 4}

_reference_route = remembered(reference.route)
_reference_route_backward = remembered(reference.route_backward)
_reference_select = remembered(reference.select)


def logits(T, E, dtype="float32", seed=0, scale=2.0):
    return (scale * np.random.default_rng(seed).standard_normal((T, E))).astype(DTYPES[dtype])


def cotangents(weights, score_sum, lse, seed=1):
    """Random float32 arrays in the shapes of the three differentiable results."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(array.shape).astype(np.float32) for array in (weights, score_sum, lse)]


@functools.partial(jax.jit, static_argnames=("topk", "static"))
def _route_and_pull(z, arrays, cotangent, topk, static):
    def differentiable(z):
        routing = route(z, topk, **arrays, **dict(static))
        return (routing.weights, routing.score_sum, routing.lse), (routing.experts, routing.tokens_per_expert)

    results, pull, integers = jax.vjp(differentiable, z, has_aux=True)
    gradients = [
        pull(tuple(cotangent[i] if i == j else jnp.zeros_like(results[i]) for i in range(3)))[0] for j in range(3)
    ]
    return results, integers, pull(tuple(cotangent))[0], gradients


def _route_and_pull_in_torch(z, arrays, cotangent, topk, static):
    import in_torch
    from anabranch.torch import route as route_in_torch

    fixed = {name: in_torch.tensor(value) for name, value in arrays.items()}
    routing, pull = in_torch.vjp(lambda z: route_in_torch(z, topk, **fixed, **dict(static)), {"z": z})
    given = dict(zip(("weights", "score_sum", "lse"), cotangent, strict=True))
    gradients = [pull({n: d if n == name else np.zeros_like(d) for n, d in given.items()})["z"] for name in given]
    routing_arrays = in_torch.arrays(routing)
    results = [getattr(routing_arrays, name) for name in given]
    return results, (routing_arrays.experts, routing_arrays.tokens_per_expert), pull(given)["z"], gradients


def check_selection(experts, z, topk, options):
    """Checks a selection: exactly if keys are the logits themselves; computed keys that are nearly equal may swap."""
    steering = {
        name: options[name]
        for name in (
            "score_function",
            "normalize",
            "expert_bias",
            "num_groups",
            "group_topk",
            "group_score_topk",
            "token_mask",
        )
        if name in options
    }
    if "expert_bias" in options or "num_groups" in options:
        agrees = reference.selection_agrees(experts, z, **steering)
        assert agrees.all(), f"experts: got {np.asarray(experts)[~agrees][:4]} for tokens {np.flatnonzero(~agrees)[:4]}"
    else:
        np.testing.assert_array_equal(experts, _reference_select(z, topk, **steering))


def _on_gpu(got):
    """Whether the array was computed on a GPU: from JAX's array, or from torch's current device."""
    if isinstance(got, np.ndarray):
        import in_torch

        return in_torch.device() != "cpu"
    return next(iter(got.devices())).platform != "cpu"


def check(z, topk, per_expert=True, each=True, **options):
    """Routes z [T, E] on the backend and compares all results with the oracle's for the backend's selection.

    per_expert: also compare the gradient per expert.
    each: also compare the gradients from weights, score_sum and lse alone.
    """
    static = ("score_function", "normalize", "num_groups", "group_topk", "group_score_topk", "scaling_factor")
    arrays = {name: value for name, value in options.items() if name not in static}
    fixed = tuple((name, options[name]) for name in static if name in options)
    shapes = reference.Routing(np.empty((len(z), topk)), None, None, np.empty(z.shape[1]), np.empty(len(z)))
    cotangent = cotangents(shapes.weights, shapes.score_sum, shapes.lse)
    run = _route_and_pull_in_torch if frameworks.in_torch() else _route_and_pull
    results, (experts, counts), d_joint, d_each = run(z, arrays, cotangent, topk, fixed)

    experts = np.asarray(experts)
    if "forced_experts" not in options:
        check_selection(experts, z, topk, options)
    selected = {"experts": experts} if "forced_experts" not in options else {}
    want = _reference_route(z, topk, **options, **selected)
    np.testing.assert_array_equal(experts, want.experts)
    np.testing.assert_array_equal(counts, want.tokens_per_expert)
    for name, got in zip(("weights", "score_sum", "lse"), results, strict=True):
        assert got.dtype == np.float32
        assert_close(got, getattr(want, name), BOUND, name)

    rounding = ROUNDING[str(z.dtype)]
    for i, (name, got) in enumerate([*zip(("weights", "score_sum", "lse"), d_each, strict=True), ("all", d_joint)]):
        if name != "all" and not each:
            continue
        # Zeros rather than None: a NaN score times a cotangent of 0 is NaN.
        given = cotangent if name == "all" else [c if i == j else np.zeros_like(c) for j, c in enumerate(cotangent)]
        d_want = _reference_route_backward(z, topk, *given, **options, **selected)
        assert got.dtype == z.dtype
        if np.abs(d_want).max(initial=0.0) < FLOAT64_ZERO:
            zero = BOUND if _on_gpu(got) else FLOAT64_ZERO
            assert np.abs(np.asarray(got, np.float64)).max(initial=0.0) < zero, f"d_logits from {name}"
            continue
        assert_close(got, d_want, BOUND + rounding, f"d_logits from {name}")
        if per_expert:
            assert_close_per_expert(got, d_want, PER_EXPERT + rounding, f"d_logits from {name}", axis=-1)
