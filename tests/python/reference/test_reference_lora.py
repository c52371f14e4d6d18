"""The oracle's LoRA against automatic differentiation of an independent dense model with the weights W + s A B."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import normal

from anabranch.activation import Activation
from anabranch.reference.grouped_matmul import grouped_matmul, grouped_matmul_backward
from anabranch.reference.lora import Lora
from anabranch.reference.moe import moe, moe_backward, routed_experts, routed_experts_backward
from oracle import assert_close, assert_close_per_expert

BOUND = 1e-12
T, K, E, D, F = 7, 3, 4, 5, 6
COLD = 2  # an expert without a token
EXPERTS = np.array([[0, 0, 3], [-1, 3, 0], [-1, -1, -1], [9, 0, 3], [1, 3, 0], [0, 1, -4], [3, 3, 1]])
SCALES = (0.7, -1.3)
NAMES = Lora._fields
LIMIT = 0.8


def silu(h):
    return h * jax.nn.sigmoid(h)


def swiglu_oai(g, u):
    g = jnp.minimum(g, LIMIT)
    return g * jax.nn.sigmoid(1.702 * g) * (jnp.clip(u, -LIMIT, LIMIT) + 1)


ACTIVATIONS = {
    "silu": ("silu", 2, lambda h: silu(h[..., 0, :]) * h[..., 1, :]),
    "swiglu_oai": (Activation.swiglu_oai(1.702, LIMIT), 2, lambda h: swiglu_oai(h[..., 0, :], h[..., 1, :])),
    "relu2": ("relu2", 1, lambda h: jnp.maximum(h[..., 0, :], 0) ** 2),
}


def factors(parts=2, ranks=(5, 3), shared=(), projections=("in", "out")):
    """Random factors of these ranks (r, q); `shared`: the names of those that all experts share."""
    r, q = ranks
    shapes = {"a_in": (D, r), "b_in": (r, parts, F), "a_out": (F, q), "b_out": (q, D)}
    made = {name: normal(1 if name in shared else E, *shapes[name], seed=NAMES.index(name)) for name in NAMES}
    return Lora(**{name: factor for name, factor in made.items() if name.split("_")[1] in projections})


def operands(parts=2, biased=True):
    arrays = {"x": normal(T, D), "weights": normal(T, K), "w_in": normal(E, D, parts, F), "w_out": normal(E, F, D)}
    arrays["weights"][1, 1] = 0.0
    return arrays | ({"b_in": normal(E, parts, F), "b_out": normal(E, D)} if biased else {})


def adapted(w, a, b, scale):
    return w if a is None else w + scale * jnp.einsum("edr,er...->ed...", *(spread(factor) for factor in (a, b)))


def spread(factor):
    return jnp.broadcast_to(factor, (E, *factor.shape[1:]))


def dense(x, weights, w_in, w_out, lora, b_in=0.0, b_out=0.0, *, phi):
    """Every expert on every token; a matrix of the summed weights selects."""
    w_in, w_out = adapted(w_in, *lora[:2], SCALES[0]), adapted(w_out, *lora[2:], SCALES[1])
    a = phi(jnp.einsum("td,edpf->tepf", x, w_in) + b_in)
    y = jnp.einsum("tef,efd->ted", a, w_out) + b_out
    selected = jnp.einsum("tk,tke->te", weights, np.float64(np.expand_dims(EXPERTS, -1) == np.arange(E)))
    return jnp.einsum("te,ted->td", selected, y)


CASES = [
    # activation, weights early, biases, (r, q), shared factors, adapted projections
    ("silu", False, True, (5, 3), (), ("in", "out")),
    ("silu", True, True, (1, 16), ("a_in", "b_out"), ("in", "out")),
    ("silu", True, False, (16, 1), NAMES, ("in", "out")),
    ("swiglu_oai", False, True, (16, 5), ("b_in", "a_out"), ("in", "out")),
    ("swiglu_oai", True, True, (5, 5), (), ("in",)),
    ("relu2", False, False, (1, 1), (), ("out",)),
    ("relu2", True, True, (2, 4), ("a_in", "b_in"), ("in", "out")),
]


@pytest.mark.parametrize("name, early, biased, ranks, shared, projections", CASES)
def test_the_layer_is_that_of_weights_that_contain_the_adapters(name, early, biased, ranks, shared, projections):
    activation, parts, phi = ACTIVATIONS[name]
    arrays, lora = operands(parts, biased), factors(parts, ranks, shared, projections)
    d_output = normal(T, D, seed=9)
    options = {"experts": EXPERTS, "activation": activation, "lora": lora, "lora_scale": SCALES}
    options |= {"weight_early": early, "align_size": 4 * early}
    with jax.enable_x64(True):
        want, pull = jax.vjp(lambda given: dense(**given, phi=phi), arrays | {"lora": lora})
        (want_gradients,) = pull(d_output)
    assert_close(routed_experts(**arrays, **options).output, want, BOUND, "output")
    gradients = routed_experts_backward(**arrays, **options, d_output=d_output)
    for operand in ("x", "weights"):
        assert_close(gradients[operand], want_gradients[operand], BOUND, operand)
    for operand in arrays.keys() - {"x", "weights"}:
        assert_close_per_expert(gradients[operand], want_gradients[operand], BOUND, operand)
    for factor, got, expected in zip(NAMES, gradients["lora"], want_gradients["lora"], strict=True):
        assert (got is None) == (expected is None), factor
        if got is not None:
            assert_close_per_expert(got, expected, BOUND, factor)
            assert len(got) == 1 or not got[COLD].any(), factor


@pytest.mark.parametrize("shared", list(itertools.product((1, E), repeat=2)))
def test_a_grouped_gemm_is_that_of_weights_that_contain_the_adapter(shared):
    """Rows past the groups may be NaN."""
    sizes, rows, s = np.array([3, 0, 1, 2]), 8, -0.6
    x, w, d_y = normal(rows, D), normal(E, D, F), normal(rows, F)
    lora = normal(shared[0], D, 2), normal(shared[1], 2, F)
    expert = np.repeat(np.arange(E), sizes)
    with jax.enable_x64(True):
        want, pull = jax.vjp(
            lambda x, w, lora: jnp.einsum("rd,rdf->rf", x, adapted(w, *lora, s)[expert]), x[:6], w, lora
        )
        want_x, want_w, want_lora = pull(d_y[:6])
    x[6:] = d_y[6:] = np.nan
    y = grouped_matmul(x, w, sizes, lora=lora, lora_scale=s)
    d_x, d_w, d_lora = grouped_matmul_backward(d_y, x, w, sizes, lora=lora, lora_scale=s)
    assert_close(y[:6], want, BOUND, "y")
    assert_close(d_x[:6], want_x, BOUND, "x")
    assert not y[6:].any() and not d_x[6:].any()
    for name, got, expected in zip("wab", (d_w, *d_lora), (want_w, *want_lora), strict=True):
        assert_close_per_expert(got, expected, BOUND, name)


def test_the_whole_layer_passes_its_adapters_on_and_drops_assignments_without_room():
    """A number is the scale of both projections."""
    arrays, lora = operands(), factors()
    x, gate, w_in, w_out = arrays["x"], normal(D, E), arrays["w_in"], arrays["w_out"]
    d_output, kept = normal(T, D, seed=9), normal(T, 2, seed=3) < 0.5
    options = {"b_in": arrays["b_in"], "b_out": arrays["b_out"], "lora": lora, "lora_scale": 0.4, "kept": kept}
    out = moe(x, gate, w_in, w_out, topk=2, **options)
    routed = (x, out.experts, out.weights, w_in, w_out)
    options["lora_scale"] = (0.4, 0.4)
    assert_close(out.output, routed_experts(*routed, **options).output, 0, "output")
    gradients = moe_backward(x, gate, w_in, w_out, d_output, topk=2, **options)["lora"]
    held = np.where(kept, out.experts, -1)
    options["kept"] = None
    want = routed_experts_backward(x, held, out.weights, w_in, w_out, d_output, **options)["lora"]
    for name, got, expected in zip(NAMES, gradients, want, strict=True):
        assert_close_per_expert(got, expected, BOUND, name)


def test_an_adapter_whose_second_factor_is_zero_changes_nothing():
    arrays, lora = operands(), factors()
    lora = lora._replace(b_in=0 * lora.b_in, b_out=0 * lora.b_out)
    options, d_output = arrays | {"experts": EXPERTS}, normal(T, D, seed=9)
    assert_close(routed_experts(**options, lora=lora).output, routed_experts(**options).output, 0, "output")
    plain = routed_experts_backward(**options, d_output=d_output)
    gradients = routed_experts_backward(**options, d_output=d_output, lora=lora)
    assert plain["lora"] is None
    for name in arrays:
        assert_close(gradients[name], plain[name], 0, name)
    d_lora = gradients["lora"]
    assert not d_lora.a_in.any() and not d_lora.a_out.any() and d_lora.b_in[0].all() and d_lora.b_out[0].all()


BAD = [
    ({"b_in": None}, 1.0, ValueError, r"lora.b_in: got None, expected \[4 or 1, 5, 2, 6\]"),
    ({"a_out": None}, 1.0, ValueError, r"lora.a_out: got None"),
    ({"a_in": normal(3, D, 5)}, 1.0, ValueError, r"lora.a_in: got \[3, 5, 5\], expected \[4 or 1, 5, 5\]"),
    ({"a_in": normal(E, D, 4)}, 1.0, ValueError, r"lora.a_in: got \[4, 5, 4\], expected \[4 or 1, 5, 5\]"),
    ({"b_out": normal(E, 3, F)}, 1.0, ValueError, r"lora.b_out: got \[4, 3, 6\], expected \[4 or 1, 3, 5\]"),
    ({"a_out": normal(E, F, 0), "b_out": normal(E, 0, D)}, 1.0, ValueError, "lora.a_out: .* a rank >= 1"),
    ({"a_in": np.ones((E, D, 5), int)}, 1.0, TypeError, "lora.a_in: got dtype int64"),
    *(({}, s, ValueError, "lora_scale: got .*, expected a finite float32 number") for s in (np.nan, 1e39)),
]


def test_a_grouped_gemm_needs_both_factors():
    with pytest.raises(ValueError, match=r"lora.a: got None, expected \[4 or 1, 5, 2\]"):
        grouped_matmul(normal(8, D), normal(E, D, F), np.zeros(E, int), lora=(None, normal(E, 2, F)))


@pytest.mark.parametrize("change, scale, error, message", BAD)
def test_wrong_factors_are_errors_that_name_them(change, scale, error, message):
    with pytest.raises(error, match=message):
        routed_experts(**operands(), experts=EXPERTS, lora=factors()._replace(**change), lora_scale=scale)
