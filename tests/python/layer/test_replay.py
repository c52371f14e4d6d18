"""Replay of a recorded routing in moe and the layers, against the oracle and against the run that was recorded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch.utils.checkpoint import checkpoint

import anabranch.jax as in_jax
import anabranch.torch as of_torch
import in_torch
from anabranch.jax.linen import MoEBlock
from anabranch.jax.nnx import MoE as NnxMoE
from anabranch.replay import Replay
from frameworks import both, call, only_torch
from moe_cases import check_layer, operands
from replay_cases import CASES, record

pytestmark = pytest.mark.usefixtures("platform")

T, E, K, D, F = 24, 6, 2, 8, 10
MASK = np.arange(T) % 5 > 0
LOSSES = {"aux_loss_coeff": 0.3, "z_loss_coeff": 0.1}
BIAS = {"expert_bias": np.linspace(1, -1, E).astype(np.float32), "score_function": "sigmoid"}
GROUPS = BIAS | {"num_groups": 3, "group_topk": 2}


def layer_of(framework, arrays, **options):
    """The results of `moe` in the framework, as arrays."""
    main = [arrays[name] for name in ("x", "gate", "w_in", "w_out")]
    if framework == "torch" and "replay" in options:
        options["replay"] = Replay(*map(in_torch.tensor, options["replay"]))
    return call(in_jax.moe, of_torch.moe, *main, topk=K, **options)


def on_host(routing):
    return Replay(*(None if field is None else np.asarray(field) for field in routing))


def assert_same(got, want):
    for name in want._fields:
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)


# ---------------------------------------------------------------- against the oracle


@both
@pytest.mark.parametrize("name", CASES)
def test_results_and_every_gradient(name):
    of_record, options = CASES[name]
    arrays = operands(T, E, K, D, F, bias=True)
    check_layer(arrays, topk=K, replay=record(T, E, K, **of_record), token_mask=MASK, **options, **LOSSES)


@both
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bias_and_groups_select_for_the_other_tokens(dtype, weights):
    arrays = operands(T, E, K, D, F, dtype=dtype)
    replay = record(T, E, K, weights=weights)
    result, _ = check_layer(arrays, topk=K, replay=replay, **GROUPS, **LOSSES)
    free = ~replay.mask
    plain, _ = check_layer(arrays, topk=K, **GROUPS, **LOSSES)
    np.testing.assert_array_equal(np.asarray(result.experts)[free], np.asarray(plain.experts)[free])
    np.testing.assert_array_equal(np.asarray(result.weights)[free], np.asarray(plain.weights)[free])
    all_replayed, _ = check_layer(arrays, topk=K, replay=replay._replace(mask=None), **GROUPS, **LOSSES)
    np.testing.assert_array_equal(all_replayed.experts, replay.experts)


@both
def test_recorded_weights_are_finite_where_the_router_has_none(framework):
    """The router's weights of experts with logit -inf are NaN. Neither they nor their gradients are used."""
    arrays = operands(T, E, K, D, F)
    arrays["x"][:, 0], arrays["gate"][0, 2] = 1.0, -np.inf
    replay = Replay(np.full((T, K), 2, np.int32), np.full((T, K), 0.5, np.float32), np.arange(T) < 4)
    arrays = {name: arrays[name] for name in ("x", "gate", "w_in", "w_out")}
    if framework == "torch":
        given, floats = in_torch.leaves(arrays)
        result = of_torch.moe(**given, topk=K, replay=Replay(*map(in_torch.tensor, replay)), aux_loss_coeff=1.0)
        found = in_torch.gradients_of([(result.output, torch.ones_like(result.output))], floats)
        gradients = in_torch.gradient_arrays(found, floats)
    else:

        def loss(arrays):
            return in_jax.moe(**arrays, topk=K, replay=replay, aux_loss_coeff=1.0).output.sum()

        gradients = jax.grad(loss)(arrays)
    for name in ("gate", "w_in", "w_out"):
        assert np.isfinite(gradients[name]).all(), name


# ---------------------------------------------------------------- of a recorded run


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, GROUPS, {"normalize": False, "weight_early": True}], ids=["", "groups", "raw"])
def test_the_routing_of_a_result_replays_to_the_same_bits(options, dtype, framework):
    arrays = operands(T, E, K, D, F, dtype=dtype)
    first = layer_of(framework, arrays, token_mask=MASK, **options, **LOSSES)
    routing = on_host(first.routing) if framework == "jax" else Replay(first.experts, first.weights)
    assert_same(layer_of(framework, arrays, token_mask=MASK, replay=routing, **options, **LOSSES), first)
    some = routing._replace(mask=np.arange(T) % 3 > 0)
    assert_same(layer_of(framework, arrays, token_mask=MASK, replay=some, **options, **LOSSES), first)
    no_weights = routing._replace(weights=None)
    assert_same(layer_of(framework, arrays, token_mask=MASK, replay=no_weights, **options, **LOSSES), first)


@both
def test_forced_experts_are_a_replay_without_weights_and_mask(framework):
    arrays, experts = operands(T, E, K, D, F), record(T, E, K).experts
    got = layer_of(framework, arrays, replay=Replay(experts), **LOSSES)
    assert_same(got, layer_of(framework, arrays, forced_experts=experts, **LOSSES))


@both
@pytest.mark.parametrize("dtype", [np.int16, np.int64])
def test_experts_of_other_integer_dtypes(dtype, framework):
    arrays, replay = operands(T, E, K, D, F), record(T, E, K)
    experts = replay.experts.astype(dtype)
    if dtype == np.int64:
        experts[0, 0] = 2**32  # as int32 it would be expert 0
        replay.experts[0, 0] = -1
    got = layer_of(framework, arrays, replay=replay._replace(experts=experts))
    assert_same(got, layer_of(framework, arrays, replay=replay))


@both
def test_leading_dimensions(framework):
    arrays, replay = operands(T, E, K, D, F), record(T, E, K)
    want = layer_of(framework, arrays, replay=replay)
    folded = arrays | {"x": arrays["x"].reshape(2, 3, 4, D)}
    in_rows = Replay(
        replay.experts.reshape(2, 3, 4, K), replay.weights.reshape(2, 3, 4, K), replay.mask.reshape(2, 3, 4)
    )
    got = layer_of(framework, folded, replay=in_rows)
    for name in ("output", "experts", "weights"):
        np.testing.assert_array_equal(getattr(got, name).reshape(T, -1), getattr(want, name), err_msg=name)


@both
def test_the_histogram_of_quantile_balancing_does_not_depend_on_the_replay(framework):
    arrays, replay = operands(T, E, K, D, F), record(T, E, K)
    options = BIAS | {"qb_bin_bounds": (-1.0, 1.0), "qb_bins": 8, "token_mask": MASK}
    want = layer_of(framework, arrays, **options).qb_histogram
    assert want.sum() == MASK.sum() * E
    for some in (replay, replay._replace(mask=None), Replay(replay.experts)):
        np.testing.assert_array_equal(layer_of(framework, arrays, replay=some, **options).qb_histogram, want)


# ---------------------------------------------------------------- transformations and layers


def test_recorded_weights_have_no_gradient_in_jax():
    arrays, (experts, weights, mask) = operands(T, E, K, D, F), record(T, E, K)
    arrays = {name: arrays[name] for name in ("x", "gate", "w_in", "w_out")}

    @jax.jit
    def loss(arrays, weights, mask):
        result = in_jax.moe(**arrays, topk=K, replay=in_jax.Replay(experts, weights, mask))
        return jnp.sum(result.output * result.weights.sum(-1, keepdims=True))

    assert not np.asarray(jax.grad(loss, 1)(arrays, weights, mask)).any()
    assert not np.asarray(jax.grad(loss)(arrays, weights, jnp.ones_like(mask))["gate"]).any()
    plain, remat = jax.grad(loss)(arrays, weights, mask), jax.grad(jax.checkpoint(loss))(arrays, weights, mask)
    assert np.asarray(plain["gate"]).any()
    jax.tree.map(np.testing.assert_array_equal, plain, remat)


@only_torch
def test_recorded_weights_have_no_gradient_in_torch():
    """Compiled and checkpointed calls give the gradients of the plain call."""
    arrays = {n: a for n, a in operands(T, E, K, D, F).items() if a is not None}
    given, floats = in_torch.leaves(arrays)
    experts, weights, mask = map(in_torch.tensor, record(T, E, K))
    weights.requires_grad_()

    def loss(given, mask):
        result = of_torch.moe(**given, topk=K, replay=of_torch.Replay(experts, weights, mask), aux_loss_coeff=0.1)
        return (result.output * result.weights.sum(-1, keepdim=True)).sum() + result.aux_loss

    def gradients(loss):
        return torch.autograd.grad(loss, [*floats.values(), weights], allow_unused=True)

    *plain, of_weights = gradients(loss(given, mask))
    assert of_weights is None
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for again in (compiled(given, mask), checkpoint(loss, given, mask, use_reentrant=False)):
        for got, want in zip(gradients(again), plain, strict=False):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
    result = of_torch.moe(**given, topk=K, replay=of_torch.Replay(experts, weights))
    assert result.routing.weights.grad_fn is None
    gate = torch.autograd.grad(result.output.sum() + result.weights.square().sum(), floats["gate"])[0]
    assert not gate.any()


@only_torch
def test_the_module_replays_and_does_not_count():
    torch.manual_seed(0)
    layer = of_torch.MoE(D, F, E, K, use_expert_bias=True, num_groups=3, group_topk=2, device=in_torch.device())
    x = torch.randn(T, D, device=in_torch.device())
    first = layer(x)
    counts = layer.tokens_per_expert.clone()
    layer.expert_bias.copy_(torch.linspace(5, -5, E))
    routing = of_torch.Replay(*(field.clone() for field in first.routing[:2]))
    assert not torch.equal(layer.eval()(x).experts, first.experts)
    layer.train()
    replays = [layer(x, replay=routing), layer(x, replay=routing._replace(weights=None))]
    replays.append(layer(x, forced_experts=routing.experts))
    for got in replays:
        assert torch.equal(got.output, first.output) and torch.equal(got.experts, first.experts)
    half = torch.arange(T, device=x.device) < T // 2
    some = layer(x, replay=routing._replace(mask=half))
    torch.testing.assert_close(some.output[half], first.output[half])
    torch.testing.assert_close(some.output[~half], layer.eval()(x).output[~half])
    assert torch.equal(layer.tokens_per_expert, counts)


def test_nnx_and_linen_replay():
    x = np.random.default_rng(0).standard_normal((T, D)).astype(np.float32)
    layer = NnxMoE(D, F, E, K, use_expert_bias=True, score_function="sigmoid", rngs=nnx.Rngs(0))
    first = layer(x)
    layer.update_expert_bias(first.tokens_per_expert, rate=2.0)
    assert (layer(x).experts != first.experts).any()
    assert_same(layer(x, replay=first.routing), first)

    block = MoEBlock(E, K, F)
    variables = block.init(jax.random.key(0), x)
    (output, _), sown = block.apply(variables, x, mutable=["intermediates"])
    routing = in_jax.Replay(*(sown["intermediates"][name][0] for name in ("experts", "weights")))
    other = jax.tree.map(lambda a: a + 1 if a.shape == (D, E) else a, variables)
    other["params"]["gate_kernel"] = -variables["params"]["gate_kernel"]
    assert (block.apply(other, x)[0] != output).any()
    np.testing.assert_array_equal(block.apply(other, x, replay=routing)[0], output)


@pytest.mark.gpu
def test_a_replay_in_a_cuda_graph():
    if not torch.cuda.is_available():
        pytest.skip("NO GPU FOUND: the CUDA kernels are not tested")
    in_torch.on("cuda")
    given = {n: in_torch.tensor(a) for n, a in operands(T, E, K, D, F).items() if a is not None}
    replay = of_torch.Replay(*map(in_torch.tensor, record(T, E, K)))
    want = of_torch.moe(**given, topk=K, replay=replay)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = of_torch.moe(**given, topk=K, replay=replay)
    graph.replay()
    assert torch.equal(got.output, want.output)
    in_torch.on("cpu")


# ---------------------------------------------------------------- errors

EXPERTS, WEIGHTS = np.zeros((T, K), np.int32), np.zeros((T, K), np.float32)
BAD = [
    (EXPERTS, TypeError, r"replay: got int32\[24, 2\], expected a Replay"),
    (Replay(None), TypeError, "replay.experts: got NoneType None, expected"),
    (Replay(WEIGHTS), TypeError, r"replay.experts: got float32\[24, 2\], expected int16 or int32 or int64"),
    (Replay(EXPERTS[:, :1]), ValueError, r"replay.experts: got int32\[24, 1\], expected .*\[24, 2\]"),
    (Replay(EXPERTS[:5]), ValueError, r"replay.experts: got int32\[5, 2\], expected"),
    (Replay(EXPERTS, EXPERTS), TypeError, r"replay.weights: got int32\[24, 2\], expected float32 \[24, 2\]"),
    (Replay(EXPERTS, WEIGHTS.astype(np.float16)), TypeError, r"replay.weights: got float16\[24, 2\], expected"),
    (Replay(EXPERTS, WEIGHTS[:, :1]), ValueError, r"replay.weights: got float32\[24, 1\], expected float32 \[24, 2\]"),
    (Replay(EXPERTS, None, np.ones(T, np.int32)), TypeError, r"replay.mask: got int32\[24\], expected bool \[24\]"),
    (Replay(EXPERTS, None, np.ones(5, bool)), ValueError, r"replay.mask: got bool\[5\], expected bool \[24\]"),
]


@both
@pytest.mark.parametrize("replay, error, message", BAD, ids=[message[:40] for *_, message in BAD])
def test_errors_name_the_argument(replay, error, message, framework):
    arrays = operands(T, E, K, D, F)
    if framework == "torch":
        fields = replay if isinstance(replay, Replay) else [replay]
        fields = [in_torch.tensor(field) for field in fields]
        replay = Replay(*fields) if isinstance(replay, Replay) else fields[0]
        given = {n: in_torch.tensor(a) for n, a in arrays.items() if a is not None}
    else:
        given = {n: a for n, a in arrays.items() if a is not None}
    moe = of_torch.moe if framework == "torch" else in_jax.moe
    with pytest.raises(error, match=message):
        moe(**given, topk=K, replay=replay)


@both
def test_a_replay_and_forced_experts_exclude_each_other(framework):
    with pytest.raises(ValueError, match="replay: got one together with forced_experts, expected one of them"):
        layer_of(framework, operands(T, E, K, D, F), replay=Replay(EXPERTS), forced_experts=EXPERTS)
