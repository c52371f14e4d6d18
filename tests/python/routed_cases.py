"""Random operands of the layer after the router, and the comparison of its results with the oracle."""

import jax
import jax.numpy as jnp
import numpy as np

import frameworks
from anabranch.jax import routed_experts
from anabranch.lora import NAMES
from anabranch.reference import moe as reference
from lora_cases import as_lora, oracle_options, with_factors
from moe_cases import BOUND, EXPERT_AXIS, in_our_layout, layouts_of, operands, saved_dtype, stored
from oracle import assert_close, assert_close_per_expert, remembered

_reference_experts = remembered(reference.routed_experts)
_reference_experts_backward = remembered(reference.routed_experts_backward)

POSITIONAL = ("x", "experts", "weights", "w_in", "w_out")


def routed_operands(T, E, K, D, F, *, wrong=False, weights_dtype="float32", seed=0, **options):
    """x, experts, weights, w_in, w_out, b_in, b_out as numpy arrays.

    Experts repeat within a token and some are -1; wrong: some are outside [-1, E). Weights have either sign, and some
    are exactly 0.
    """
    arrays = operands(T, E, K, D, F, seed=seed, **options)
    del arrays["gate"], arrays["gate_bias"]
    rng = np.random.default_rng(seed + 100)
    experts = rng.integers(-1, E, (T, K)).astype(np.int32)
    if wrong:
        experts = np.where(rng.random((T, K)) < 0.1, rng.choice([E, E + 7, -2, 2**31 - 1, -(2**31)], (T, K)), experts)
    weights = np.where(rng.random((T, K)) < 0.1, 0, rng.standard_normal((T, K)))
    given = {"experts": experts.astype(np.int32), "weights": weights.astype(jnp.dtype(weights_dtype))}
    return arrays | given


def run_routed(arrays, *, seed=1, put=None, **options):
    """(result, gradients, cotangent) for a random cotangent. Layouts and put: see `moe_cases.run_layer`."""
    put = put or (lambda name, array: jax.device_put(array))
    layouts = layouts_of(options)
    present = {name: put(name, array) for name, array in stored(arrays, layouts).items() if array is not None}
    experts = present.pop("experts")
    if frameworks.in_torch():
        import layer_in_torch

        outputs, gradients, d_output = layer_in_torch.run_routed(present, experts, seed, options)
        return outputs, in_our_layout(gradients, layouts), d_output

    def layer(present, experts):
        main = present | {"experts": experts}
        rest = {name: present[name] for name in ("b_in", "b_out") if name in present}
        rest["lora"] = as_lora(present)
        return routed_experts(*(main[name] for name in POSITIONAL), **rest, **options)

    @jax.jit
    def both_passes(present, experts, d_output):
        output, pull, counts = jax.vjp(lambda p: split(layer(p, experts)), present, has_aux=True)
        return output, counts, pull(d_output)[0]

    d_output = np.random.default_rng(seed).standard_normal(arrays["x"].shape).astype(arrays["x"].dtype)
    output, counts, gradients = both_passes(present, experts, put("output", d_output))
    for name in present:
        assert gradients[name].dtype == present[name].dtype, name
    return (output, *counts), in_our_layout(gradients, layouts), d_output


def split(result):
    """(output, counts), for jax.vjp with has_aux."""
    return result.output, result[1:]


def check_routed(arrays, *, kept=None, tiny=False, **options):
    """Compares output, counts and every gradient with the oracle; arguments: see `check_layer`."""
    (output, counts, dropped), gradients, d_output = run_routed(arrays, **options)
    names = ("activation", "weight_early", "align_size", "lora_scale")
    settings = {name: options[name] for name in names if name in options} | {"kept": kept}
    settings |= oracle_options(arrays)
    given = {name: array for name, array in arrays.items() if name not in NAMES}
    expected = _reference_experts(**given, **settings)
    settings["saved_dtype"] = saved_dtype(options.get("activation", "silu"), str(arrays["x"].dtype))
    expected_gradients = with_factors(_reference_experts_backward(**given, **settings, d_output=d_output))
    bound = BOUND[str(arrays["x"].dtype)]
    assert_close(output, expected.output, bound, "output")
    np.testing.assert_array_equal(counts, expected.tokens_per_expert)
    assert int(dropped) == int(expected.dropped)
    for name, gradient in gradients.items():
        got, want = np.asarray(gradient, np.float64), expected_gradients[name]
        if tiny and np.linalg.norm(got - want) <= 1e-6:
            continue
        dtype_bound = max(bound, BOUND[str(gradient.dtype)])
        assert_close(got, want, dtype_bound, f"d_{name}")
        if name == "weights":  # zero for -1, wrong and dropped assignments
            none = (arrays["experts"] < 0) | (arrays["experts"] >= len(arrays["w_in"]))
            assert not got[none if kept is None else none | ~kept].any()
        if not tiny and name in EXPERT_AXIS:
            assert_close_per_expert(got, want, 4 * bound, f"d_{name}", EXPERT_AXIS[name])
    return output, gradients
