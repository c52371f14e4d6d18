"""Random operands of the whole layer, and the comparison of its results with the oracle."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import frameworks
import replay_cases
from anabranch.activation import Activation, as_activation
from anabranch.jax import moe, route
from anabranch.layouts import IN_LAYOUTS, OURS, OUT_LAYOUTS, Layouts
from anabranch.lora import NAMES
from anabranch.reference import moe as reference
from anabranch.reference import replay as reference_replay
from anabranch.reference.router import route as reference_route
from lora_cases import as_lora, oracle_options, with_factors
from oracle import assert_close, assert_close_per_expert, remembered

# float32: 2e-6 times 4, for GEMMs over D and F with at most a few hundred terms and the sums after them.
# bfloat16: a unit roundoff of 2^-9 for each rounding in sequence (h, a, y or dh, the result: at most 5; sqrt(5) as
# independent errors), plus the float32 sums over bfloat16 operands. The bound per expert is twice that, because a small
# expert averages over few rows. float16: as bfloat16, with a unit roundoff of 2^-12.
BOUND = {"float32": 8e-6, "bfloat16": 5 * 2.0**-9, "float16": 5 * 2.0**-12}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
LAYOUT_OPTIONS = ("w_in_layout", "w_out_layout")
LAYOUTS = [(w_in, w_out) for w_in in IN_LAYOUTS for w_out in OUT_LAYOUTS]
TWO_INPUTS = (
    Activation.swiglu_clamped(0.8),
    Activation.swiglu_oai(1.3, 0.8),
    Activation.swiglu_then_clamp(0.4),
    Activation.situ(0.7, 0.9),
)
"""Activations whose limits clamp many elements."""
_reference_moe, _reference_moe_backward = remembered(reference.moe), remembered(reference.moe_backward)

EXPERT_AXIS = {"gate": 1, "gate_bias": 0, "w_in": 0, "w_out": 0, "b_in": 0, "b_out": 0} | dict.fromkeys(NAMES, 0)


def operands(T, E, K, D, F, *, parts=2, dtype="float32", bias=False, seed=0, skew=1.0, cold=0):
    """x, gate, gate_bias, w_in, w_out, b_in, b_out as numpy arrays of `dtype` (gate and its bias: float32).

    The last `cold` experts get no token; skew > 1 makes few experts take most tokens.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return (scale * rng.standard_normal(shape)).astype(DTYPES[dtype])

    x = normal(T, D)
    gate = rng.standard_normal((D, E)).astype(np.float32) * np.float32(skew / np.sqrt(D))
    if cold:
        # A constant feature with a large negative weight for experts without tokens.
        x[:, 0] = 1.0
        gate[0, E - cold :] = -60.0
    arrays = {
        "x": x,
        "gate": gate,
        "gate_bias": np.float32(0.3) * rng.standard_normal(E).astype(np.float32) if bias else None,
        "w_in": normal(E, D, parts, F, scale=D**-0.5),
        "w_out": normal(E, F, D, scale=F**-0.5),
        "b_in": normal(E, parts, F) if bias else None,
        "b_out": normal(E, D) if bias else None,
    }
    return arrays


ROUTING = (
    "score_function",
    "normalize",
    "expert_bias",
    "num_groups",
    "group_topk",
    "group_score_topk",
    "scaling_factor",
    "token_mask",
    "forced_experts",
)


@jax.jit
def _logits(x, gate, bias):
    return jnp.dot(x.astype(jnp.float32), gate.astype(jnp.float32), precision="highest") + bias


def selected(arrays, options):
    """The experts that route() selects from the layer's own logits, with those of a replay."""
    replay = options.get("replay")
    if replay is not None:
        others = selected(arrays, {name: value for name, value in options.items() if name != "replay"})
        experts = np.where(replay_cases.replayed(replay), replay.experts, others)
        mask = options.get("token_mask")
        return experts if mask is None else np.where(mask[:, None], experts, -1)
    bias = arrays.get("gate_bias")
    logits = _logits(arrays["x"], arrays["gate"], np.float32(0) if bias is None else bias.astype(np.float32))
    chosen = {name: options[name] for name in ROUTING if name in options}
    if frameworks.in_torch():
        import layer_in_torch

        return layer_in_torch.selected(arrays, options["topk"], chosen)
    return np.asarray(route(logits, options["topk"], **chosen).experts)


@remembered
def gate_terms(arrays, options, gradients):
    """The sums of |terms| of the gradients of the gate [D, E] and its bias [E], by name.

    Per token, a logit's terms are w_e (|g_e| + sum_k w_k |g_k|); the gate sums |x|^T of these, the bias sums them
    alone.

    Where the cotangents g of a token's weights are nearly equal, the gradient of normalised weights cancels down to
    their rounding errors. The result is at least the magnitude of the gradient itself.
    """
    x = arrays["x"].astype(np.float64)
    if options.get("token_mask") is not None:  # masked tokens do not contribute
        x = np.where(np.asarray(options["token_mask"])[:, None], x, 0.0)
    logits = x @ arrays["gate"] + (0 if arrays.get("gate_bias") is None else arrays["gate_bias"])
    experts = options.get("experts", options.get("forced_experts"))
    if (replay := options.get("replay")) is not None and replay.weights is not None:  # they have no gradient
        experts = np.where(replay_cases.replayed(replay), -1, experts)
    names = [name for name in ROUTING if name in options and name != "forced_experts"]
    routing = reference_route(logits, options["topk"], experts=experts, **{name: options[name] for name in names})
    weights, sizes = np.abs(routing.weights), np.abs(gradients["weights"])
    terms = weights * (sizes + (weights * sizes).sum(-1, keepdims=True))
    d_logits = np.zeros(logits.shape)
    token, slot = np.nonzero(routing.experts >= 0)
    np.add.at(d_logits, (token, routing.experts[token, slot]), terms[token, slot])
    sizes = {"gate": np.abs(x).T @ d_logits, "gate_bias": d_logits.sum(0)}
    return {name: np.maximum(a, np.abs(gradients[name])) for name, a in sizes.items() if gradients[name] is not None}


def layouts_of(options):
    """The layouts that the layer's options name."""
    return Layouts(*(options.get(name, own) for name, own in zip(LAYOUT_OPTIONS, OURS, strict=True)))


def laid_out(arrays):
    """The names of the arrays whose axis order depends on the layout."""
    return [name for name in ("w_in", "w_out", "b_in") if arrays.get(name) is not None]


def stored(arrays, layouts):
    """The arrays in these layouts."""
    return arrays | {name: arrays[name].transpose(layouts.from_ours(name)) for name in laid_out(arrays)}


def in_our_layout(gradients, layouts):
    """The gradients of `stored` arrays, transposed to our own layout."""
    return gradients | {name: gradients[name].transpose(layouts.order(name)) for name in laid_out(gradients)}


def saved_dtype(activation, dtype):
    """The dtype to which the oracle rounds h if the slope jumps at a limit, which rounding may cross; else None."""
    return DTYPES[dtype] if as_activation(activation).limit else None


def run_layer(arrays, *, seed=1, put=None, **options):
    """(result, gradients, cotangents) of the layer for random cotangents of the output, the losses and the weights.

    Operands and gradients are in our own layout; the layer gets them in the layouts of its options.

    put: (name, array) -> array places the array of an argument ("output" for cotangents).
    """
    put = put or (lambda name, array: jax.device_put(array))  # jnp.asarray compiles a program per shape
    layouts = layouts_of(options)
    present = {name: put(name, array) for name, array in stored(arrays, layouts).items() if array is not None}
    if frameworks.in_torch():
        import layer_in_torch

        result, gradients, cotangents = layer_in_torch.run(present, seed, options)
        return result, in_our_layout(gradients, layouts), cotangents
    rng = np.random.default_rng(seed)

    placed = ("expert_bias", "token_mask", "forced_experts")
    given = {name: put(name, value) for name, value in options.items() if name in placed and value is not None}
    settings = {name: value for name, value in options.items() if name not in (*placed, "replay")}
    if options.get("replay") is not None:
        given["replay"] = jax.tree.map(lambda array: put("replay", array), options["replay"])

    def layer(present, given):
        rest = {name: present[name] for name in ("gate_bias", "b_in", "b_out") if name in present}
        rest["lora"] = as_lora(present)
        return moe(present["x"], present["gate"], present["w_in"], present["w_out"], **rest, **given, **settings)

    x = present["x"]
    d_output = rng.standard_normal(x.shape).astype(x.dtype)
    d_aux, d_z = np.float32(rng.standard_normal()), np.float32(rng.standard_normal())
    d_weights = rng.standard_normal((*x.shape[:-1], options["topk"])).astype(np.float32)
    token_cotangents = {"output": put("output", d_output), "weights": put("output", d_weights)}

    # One program for both passes. `given` is an argument, because a program of several processes cannot close over
    # global arrays.
    @jax.jit
    def both_passes(present, given, token_cotangents):
        result, pull = jax.vjp(lambda present: layer(present, given), present)
        integers = ("tokens_per_expert", "dropped", "dropped_by_source", "experts")
        zeros = {name: np.zeros(getattr(result, name).shape, jax.dtypes.float0) for name in integers}
        return result, pull(
            type(result)(aux_loss=jnp.asarray(d_aux), z_loss=jnp.asarray(d_z), **token_cotangents, **zeros)
        )[0]

    result, gradients = both_passes(present, given, token_cotangents)
    for name in present:
        assert gradients[name].dtype == present[name].dtype, name
    return result, in_our_layout(gradients, layouts), (d_output, d_aux, d_z, d_weights)


def expected_layer(arrays, cotangents, *, kept=None, **options):
    """The oracle's result, gradients and `gate_terms` for the cotangents of `run_layer`."""
    main = [arrays[name] for name in ("x", "gate", "w_in", "w_out")]
    settings = {name: value for name, value in options.items() if name not in ("parallel", *LAYOUT_OPTIONS)}
    settings = {
        **settings,
        "kept": kept,
        "gate_bias": arrays.get("gate_bias"),
        "b_in": arrays["b_in"],
        "b_out": arrays["b_out"],
        "experts": selected(arrays, options),
        **oracle_options(arrays),
    }
    if options.get("forced_experts") is not None:
        settings.pop("experts")
    if options.get("replay") is not None:
        settings["replay"] = reference_replay.Replay(*options["replay"])
    kept_as = saved_dtype(options.get("activation", "silu"), str(arrays["x"].dtype))
    gradients = _reference_moe_backward(*main, *cotangents, **settings, saved_dtype=kept_as)
    gradients = with_factors(gradients)
    return _reference_moe(*main, **settings), gradients, gate_terms(arrays, settings, gradients)


def assert_layer(result, gradients, expected, dtype, *, tiny=False, weights_bound=1e-5):
    """Compares the results of a layer of `dtype` with `expected_layer`. tiny, weights_bound: see `check_layer`."""
    expected, expected_gradients, terms_of_gate = expected
    bound = BOUND[dtype]
    assert_close(result.output, expected.output, bound, "output")
    assert_close(result.aux_loss, expected.aux_loss, BOUND["float32"], "aux_loss")
    assert_close(result.z_loss, expected.z_loss, BOUND["float32"], "z_loss")
    np.testing.assert_array_equal(result.tokens_per_expert, expected.tokens_per_expert)
    np.testing.assert_array_equal(result.experts, expected.experts)
    assert_close(result.weights, expected.weights, BOUND["float32"] if dtype == "float32" else weights_bound, "weights")
    assert int(result.dropped) == int(expected.dropped)
    for name in gradients:
        got, want = np.asarray(gradients[name], np.float64), expected_gradients[name]
        terms = terms_of_gate.get(name)
        dtype_bound = max(bound, BOUND[str(gradients[name].dtype)])  # the gate's dtype may be narrower than x's
        if tiny and np.linalg.norm(got - want) <= (1e-6 if terms is None else dtype_bound * np.linalg.norm(terms)):
            continue
        assert_close(got, want, dtype_bound, f"d_{name}")
        if not tiny and name in EXPERT_AXIS:
            assert_close_per_expert(got, want, 4 * dtype_bound, f"d_{name}", EXPERT_AXIS[name], terms)


def check_layer(arrays, *, tiny=False, kept=None, weights_bound=1e-5, **options):
    """Compares output, losses, counts and every gradient with the oracle; see `run_layer`.

    kept: bool [T, K], the assignments within capacity; None: all.
    tiny: the tensors have so few elements that a sum may cancel down to the rounding errors of its terms, which are of
    order 1. Then an absolute error of 1e-6 passes too, for the gate an error relative to its terms, and single experts
    are not compared. weights_bound: the bound of the routing weights if x is not float32.
    """
    result, gradients, cotangents = run_layer(arrays, **options)
    options = {name: value for name, value in options.items() if name not in ("seed", "put")}
    expected = expected_layer(arrays, cotangents, kept=kept, **options)
    assert_layer(result, gradients, expected, str(arrays["x"].dtype), tiny=tiny, weights_bound=weights_bound)
    return result, gradients
