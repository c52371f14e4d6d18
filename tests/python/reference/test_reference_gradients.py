"""Every gradient of the oracle against central differences, with random cotangents."""

import functools
import itertools

import numpy as np
import pytest
from differences import check_gradient

from anabranch.activation import PLAIN, Activation
from anabranch.reference import balance, dispatch, experts, moe, router

FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
T, E, D, F = 6, 4, 3, 5
MASK = np.array([True, True, False, True, True, False])
#: Selections with repeats, -1, indices out of range on either side, and a token without experts.
GIVEN = np.array([[0, 0, 1], [-1, 2, 1], [-1, -1, -1], [9, 0, 1], [1, 3, 0], [0, 2, -4]])
TWO_INPUTS = [
    Activation.swiglu_clamped(limit=0.9),
    Activation.swiglu_oai(alpha=1.702, limit=0.8),
    Activation.swiglu_then_clamp(limit=0.7),
    Activation.situ(a=0.6, b=1.3),
]
#: By name: the function that builds the case, and the bound. A case is (forward, backward, operands). forward takes the
#: operands by name and returns a list of results; backward takes their cotangents and returns gradients by name.
CASES = {}


def add(name, make, *arguments, bound=1e-8, **options):
    assert name not in CASES
    CASES[name] = functools.partial(make, *arguments, **options), bound


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


# ---------------------------------------------------------------- router


def score(function):
    z = np.array([-60.0, -21.0, -19.0, -3.0, 0.0, 2.0, 30.0])
    scale = 1 / router.scores(z, function)  # compares tiny scores too
    return (
        lambda z: [scale * router.scores(z, function)],
        lambda g: {"z": g * scale * router.score_gradient(z, function)},
        {"z": z},
    )


def routing(topk, only=None, scale=2.0, never=(), **options):
    """All three results, or one alone; the selection is held."""
    z = scale * normal(T, 8, seed=topk)
    z[np.abs(z + 20) < 0.1] += 1  # The formula of sqrtsoftplus changes at -20.
    z[:, list(never)] = -np.inf
    results = range(3) if only is None else [only]
    steering = ("expert_bias", "num_groups", "group_topk", "forced_experts")
    held = {k: v for k, v in options.items() if k not in steering}
    held["experts"] = router.route(z, topk, **options).experts

    def forward(z):
        r = router.route(z, topk, **held)
        return [(r.weights, r.score_sum, r.lse)[i] for i in results]

    def backward(*cotangents):
        given = dict(zip(results, cotangents, strict=True))
        return {"z": router.route_backward(z, topk, *map(given.get, range(3)), **options)}

    return forward, backward, {"z": z}


def aux_scores(function, mask):
    z = normal(T, E)
    return (
        lambda z: [router.aux_scores(z, function, mask)],
        lambda g: {"z": router.aux_scores_backward(z, g, function, mask)},
        {"z": z},
    )


def dense_probs(function):
    z, options = normal(T, E), {"score_function": function, "token_mask": MASK}
    held = router.route(z, 3, **options).experts

    def forward(z):
        r = router.route(z, 3, experts=held, **options)
        return [router.dense(r.weights, r.experts, E)[0]]

    return forward, lambda g: {"z": router.route_backward(z, 3, router.dense_backward(g, held), **options)}, {"z": z}


for function in ("sigmoid", "sqrtsoftplus"):
    add(f"score {function}", score, function, bound=1e-7)
for function, normalize in itertools.product(FUNCTIONS, (True, False)):
    common = {"score_function": function, "normalize": normalize, "scaling_factor": 1.7}
    bias = normal(8, seed=3)
    for name, topk, options in [
        ("one", 1, {}),
        ("all", 8, {"expert_bias": bias}),
        ("mask", 5, {"token_mask": MASK}),
        ("one group", 1, {"num_groups": 4, "group_topk": 1}),
        ("groups", 4, {"num_groups": 4, "group_topk": 2, "expert_bias": bias}),
        ("large groups, mask", 4, {"num_groups": 2, "group_topk": 1, "token_mask": MASK}),
        ("sequences", 2, {"sequences": 2, "token_mask": MASK}),
        ("large and infinite", 3, {"scale": 12, "never": (1, 6)}),
        ("replay", 3, {"forced_experts": GIVEN}),
        ("replay, mask", 3, {"forced_experts": GIVEN, "token_mask": MASK}),
        *((f"of result {i}", 3, {"only": i}) for i in range(3)),
    ]:
        add(f"route {function} {normalize} {name}", routing, topk, **common, **options)
for function in FUNCTIONS:
    add(f"aux_scores {function}", aux_scores, function, None)
    add(f"aux_scores {function} mask", aux_scores, function, MASK)
    add(f"dense {function}", dense_probs, function)

# ---------------------------------------------------------------- losses


def load_balance(shape, tokens):
    scores, counts = np.abs(normal(*shape)), np.abs(np.rint(3 * normal(*shape, seed=1)))
    return (
        lambda score_sum: [balance.load_balance_loss(score_sum, counts, 2, 0.3, tokens)],
        lambda g: {"score_sum": balance.load_balance_loss_backward(scores, counts, 2, 0.3, tokens, g)},
        {"score_sum": scores},
    )


def z_loss():
    lse = normal(2, 3)
    return (
        lambda lse: [balance.z_loss(lse, 0.2, 5)],
        lambda g: {"lse": balance.z_loss_backward(lse, 0.2, 5, g)},
        {"lse": lse},
    )


def fused_loss():
    probs, counts = normal(4, 2 * E), np.arange(2 * E)
    return (
        lambda probs: [balance.fused_moe_aux_loss(probs, counts, 2, 0.3, 7, E)],
        lambda g: {"probs": balance.fused_moe_aux_loss_backward(probs, counts, 2, 0.3, 7, E, d_loss=g)},
        {"probs": probs},
    )


add("load_balance_loss", load_balance, (E,), 4)
add("load_balance_loss sequences", load_balance, (2, E), np.array([4, 7]))
add("z_loss", z_loss)
add("fused_moe_aux_loss", fused_loss)

# ---------------------------------------------------------------- dispatch


def dispatched(align_size, num_rows):
    plan = dispatch.plan(GIVEN, E, align_size, num_rows)
    return (
        lambda x: [dispatch.dispatch(x, plan)],
        lambda g: {"x": dispatch.dispatch_backward(g, plan)},
        {"x": normal(T, D)},
    )


def combined(align_size, num_rows, weighted):
    plan = dispatch.plan(GIVEN, E, align_size, num_rows)
    operands = {"rows": normal(plan.slot_of_row.size, D)} | ({"weights": normal(T, 3)} if weighted else {})

    def backward(g):
        d_rows, d_weights = dispatch.combine_backward(g, operands["rows"], plan, operands.get("weights"))
        assert weighted or d_weights is None
        return {"rows": d_rows} | ({"weights": d_weights} if weighted else {})

    return lambda rows, weights=None: [dispatch.combine(rows, plan, weights)], backward, operands


def chunk_sort(sizes):
    sizes, order = np.array(sizes), np.array([2, 0, 1])
    return (
        lambda inp: [dispatch.sort_chunks_by_index(inp, sizes, order)[0]],
        lambda g: {"inp": dispatch.sort_chunks_by_index_backward(g, sizes, order)},
        {"inp": normal(10, D)},
    )


def token_map():
    """A token with no expert, one with all, an expert without a token."""
    routed = np.random.default_rng(0).random((T, E)) < 0.4
    routed[1], routed[2], routed[:, 3] = False, True, False
    return routed


def token_dispatch(align_size, n, with_probs):
    routed, operands = token_map(), {"inp": normal(T, D)} | ({"probs": normal(T, E)} if with_probs else {})
    if with_probs:
        operands["probs"][2, 0] = 0.0
    _, _, row_id_map, pads, _ = dispatch.token_dispatch(operands["inp"], routed, n, None, align_size)

    def forward(inp, probs=None):
        return list(dispatch.token_dispatch(inp, routed, n, probs, align_size)[: 1 + with_probs])

    def backward(g, g_probs=None):
        d_inp, d_probs = dispatch.token_dispatch_backward(g, g_probs, row_id_map, pads)
        return {"inp": d_inp} | ({"probs": d_probs} if with_probs else {})

    return forward, backward, operands


def token_combine(align_size, n, with_probs):
    rows, _, row_id_map, pads, _ = dispatch.token_dispatch(np.zeros((T, D)), token_map(), n, None, align_size)
    operands = {"inp": normal(*rows.shape)} | ({"probs": normal(T, E)} if with_probs else {})

    def backward(g):
        d_inp, d_probs = dispatch.token_combine_backward(g, operands["inp"], row_id_map, operands.get("probs"), pads)
        return {"inp": d_inp} | ({"probs": d_probs} if with_probs else {})

    return lambda inp, probs=None: [dispatch.token_combine(inp, row_id_map, probs, pads)], backward, operands


def local_permutation(inverse):
    counts, operands = np.array([[0, 0, 0, 0], [0, 2, 1, 3]]), {"x": normal(6, D)}
    state = dispatch.local_permute_after_a2a(operands["x"], counts, 1, 2)[2]
    if inverse:
        return (
            lambda x: [dispatch.local_unpermute_before_a2a(x, state)],
            lambda g: {"x": dispatch.local_unpermute_before_a2a_backward(g, state)},
            operands,
        )
    return (
        lambda x: [dispatch.local_permute_after_a2a(x, counts, 1, 2)[0]],
        lambda g: {"x": dispatch.local_permute_after_a2a_backward(g, counts, 1, 2)},
        operands,
    )


for align_size, num_rows in itertools.product((0, 4), (None, 8)):
    add(f"dispatch {align_size} {num_rows}", dispatched, align_size, num_rows)
    add(f"combine {align_size} {num_rows}", combined, align_size, num_rows, False)
    add(f"combine weights {align_size} {num_rows}", combined, align_size, num_rows, True)
for sizes in ([2, 3, 4], [0, 0, 0], [4, 4, 4]):
    add(f"chunk_sort {sizes}", chunk_sort, sizes)
for align_size, n, with_probs in itertools.product((None, 4), (30, 5), (False, True)):  # 5 rows drop some pairs
    add(f"token_dispatch {align_size} {n} {with_probs}", token_dispatch, align_size, n, with_probs)
    add(f"token_combine {align_size} {n} {with_probs}", token_combine, align_size, n, with_probs)
add("local_permute", local_permutation, False)
add("local_unpermute", local_permutation, True)

# ---------------------------------------------------------------- experts

SIZES, R = np.array([2, 0, 3, 1]), 8  # an expert without rows; two rows past the groups


def plain_activation(name):
    h = np.array([-3.0, -1.0, -0.2, 0.4, 1.5, 5.0])
    return (
        lambda h: [experts.activation(h, name)],
        lambda g: {"h": g * experts.activation_gradient(h, name)},
        {"h": h},
    )


def gated_activation(act):
    operands = {"g": 1.5 * normal(60), "u": 1.5 * normal(60, seed=1)}

    def backward(cotangent):
        by_gate, by_up = experts.gated_activation_gradients(*operands.values(), act)
        return {"g": cotangent * by_gate, "u": cotangent * by_up}

    return lambda g, u: [experts.gated_activation(g, u, act)], backward, operands


def grouped_matmul():
    operands = {"x": normal(R, D), "w": normal(E, D, F)}
    return (
        lambda x, w: [experts.grouped_matmul(x, w, SIZES)],
        lambda g: dict(zip("xw", experts.grouped_matmul_backward(g, *operands.values(), SIZES), strict=True)),
        operands,
    )


def matrices(gated, biased):
    parts = 2 if gated else 1
    arrays = {"w_in": normal(E, D, parts, F), "w_out": normal(E, F, D)}
    return arrays | ({"b_in": normal(E, parts, F), "b_out": normal(E, D)} if biased else {})


def network(act, gated, biased, weighted, early):
    operands = {"rows": normal(R, D)} | matrices(gated, biased)
    if weighted:
        operands["row_weights"] = normal(R)
        operands["row_weights"][0] = 0.0  # A weight of exactly 0 still gets its gradient.
    options = {"group_sizes": SIZES, "activation": act}

    def backward(g):
        found = experts.expert_ffn_backward(g, **operands, **options)._asdict()
        given = {name.removeprefix("d_"): gradient for name, gradient in found.items() if gradient is not None}
        assert given.keys() == operands.keys()
        assert not weighted or given["row_weights"][0] != 0
        assert all((given[name][1] == 0).all() for name in given.keys() & {"w_in", "w_out", "b_in", "b_out"})
        return given

    return lambda **arrays: [experts.expert_ffn(**arrays, **options, weight_early=early)], backward, operands


for name in PLAIN:
    add(f"activation {name}", plain_activation, name)
for act in (*map(Activation.glu, PLAIN), *TWO_INPUTS):
    add(f"gated_activation {act}", gated_activation, act, bound=1e-7)
add("grouped_matmul", grouped_matmul)
for i, (act, gated) in enumerate(
    [*((name, gated) for name in PLAIN for gated in (True, False)), *((act, True) for act in TWO_INPUTS)]
):
    add(f"expert_ffn {act} {gated}", network, act, gated, True, True, i % 3 == 0, bound=1e-7)
for gated, biased, weighted, early in itertools.product((True, False), repeat=4):
    add(f"expert_ffn {gated} {biased} {weighted} {early}", network, "silu", gated, biased, weighted, early, bound=1e-7)

# ---------------------------------------------------------------- the layer


def layer(options, act, gated, biased, gate_bias=False):
    """Gradients of the output, both losses and the weights, with the selection held."""
    operands = {"x": normal(T, D), "gate": normal(D, E)} | matrices(gated, biased)
    if gate_bias:
        operands["gate_bias"] = normal(E)
    options = options | {"activation": act, "aux_loss_coeff": 0.3, "z_loss_coeff": 0.2}
    steering = ("expert_bias", "num_groups", "group_topk", "forced_experts")
    held = {k: v for k, v in options.items() if k not in steering}
    held["experts"] = moe.moe(**operands, **options).experts

    def forward(**arrays):
        out = moe.moe(**arrays, **held)
        return [out.output, out.aux_loss, out.z_loss, out.weights]

    def backward(*cotangents):
        given = [operands[name] for name in ("x", "gate", "w_in", "w_out")]
        biases = {name: operands.get(name) for name in ("gate_bias", "b_in", "b_out")}
        found = moe.moe_backward(*given, *cotangents, **biases, **options)
        assert biased or (found["b_in"] is None and found["b_out"] is None)
        return {name: found[name] for name in operands}

    return forward, backward, operands


def routed_experts(gated, biased, early, align_size, bounded):
    operands = {"x": normal(T, D), "weights": normal(T, 3)} | matrices(gated, biased)
    operands["weights"][0, 1] = 0.0
    kept = normal(T, 3) < 0.8 if bounded else None
    options = {"experts": GIVEN, "weight_early": early, "align_size": align_size, "kept": kept}

    def backward(g):
        found = moe.routed_experts_backward(**operands, **options, d_output=g)
        return {name: found[name] for name in operands}

    return lambda **arrays: [moe.routed_experts(**arrays, **options).output], backward, operands


def shared_expert(parts, gate_shape):
    operands = {"x": normal(T, D), "w_in": normal(D, parts, F), "w_out": normal(F, D)}
    if gate_shape:
        operands["w_gate"] = normal(*gate_shape)

    def backward(g):
        found = moe.shared_expert_backward(**operands, d_output=g)
        return {name: found[name] for name in operands}

    return lambda **arrays: [moe.shared_expert(**arrays)], backward, operands


for i, (name, options) in enumerate(
    {
        "softmax": {"topk": 2},
        "raw softmax": {"topk": 2, "normalize": False},
        "one expert": {"topk": 1, "score_function": "sigmoid", "normalize": False},
        "every expert": {"topk": 4, "score_function": "sqrtsoftplus"},
        "bias and groups": {
            "topk": 2,
            "score_function": "sigmoid",
            "expert_bias": np.array([1.0, -1.0, 0.5, 0.0]),
            "num_groups": 2,
            "group_topk": 1,
            "scaling_factor": 2.5,
        },
        "mask": {"topk": 2, "token_mask": MASK},
        "replay": {"topk": 3, "score_function": "sigmoid", "forced_experts": GIVEN},
    }.items()
):
    for early in (False, True):
        act, gated, biased = [("silu", True, True), ("gelu", False, True), ("relu2", True, False)][(i + early) % 3]
        given = options | {"align_size": 4 * early, "weight_early": early}
        add(f"moe {name} {early}", layer, given, act, gated, biased, gate_bias=early, bound=1e-7)
for gated, early in itertools.product((True, False), repeat=2):
    add(f"routed_experts {gated} {early}", routed_experts, gated, gated, early, 4 * early, early, bound=1e-7)
for parts, gate_shape in itertools.product((1, 2), (None, (D,), (D, 1))):
    add(f"shared_expert {parts} {gate_shape}", shared_expert, parts, gate_shape, bound=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_the_derivative(name):
    make, bound = CASES[name]
    forward, backward, operands = make()
    cotangents = [normal(*np.shape(result), seed=9) for result in forward(**operands)]

    def loss(key, value):
        results = forward(**operands | {key: value})
        return sum((g * result).sum() for g, result in zip(cotangents, results, strict=True))

    gradients = backward(*cotangents)
    assert gradients.keys() == operands.keys()
    for key, gradient in gradients.items():
        check_gradient(lambda v, key=key: loss(key, v), operands[key], gradient, f"d_{key}", bound)
