"""Every argument of every public function gets every value of a list: the call returns, or its error names the
argument.

Functions and arguments are read from the package and from signatures, so new ones are tested automatically; a function
needs one valid call in `CALLS`. Calls are traced, not run, because bad values must be refused without data.
"""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import anabranch.jax as ab
import bad_values
from anabranch.jax.linen import MoEBlock
from anabranch.jax.nnx import MoE
from bad_values import DTYPES, as_dtype, complaint, floats, shown

T, E, K, D, F, R, P = 4, 4, 2, 3, 5, 8, 2
MESH = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


EXPERTS = np.arange(T * K, dtype=np.int32).reshape(T, K) % E
PLAN = ab.plan(EXPERTS, E)
MASK, MAP = np.ones(T, bool), np.ones((T, E), bool)
DISPATCHED = ab.token_dispatch(floats(T, D), MAP, T * E, align_size=4)
PURE = ab.pure_jax_token_dispatch(floats(T, D), EXPERTS, E, K, 4)
ARRIVED = ab.local_permute_after_a2a(floats(R, D), np.ones((P, E), np.int32), 0, P)
CONTRACTED = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
RAGGED = dict(all_shards_tokens_per_expert=np.ones((P, E), np.int32), shard_id=0, num_expert_shards=P)
ROUTING = dict(topk=K, score_function="sigmoid", num_groups=2, group_topk=1, expert_bias=floats(E), token_mask=MASK)
MATRICES = dict(w_in=floats(E, D, 2, F), w_out=floats(E, F, D), b_in=floats(E, 2, F), b_out=floats(E, D))
LAYER = dict(in_features=D, hidden_features=F, num_experts=E, topk=K)
REPLAY = ab.Replay(EXPERTS, floats(T, K), MASK)
LORA = ab.Lora(floats(1, D, 2), floats(E, 2, 2, F), floats(E, F, 2), floats(1, 2, D))
BLOCK = dict(num_experts=E, num_experts_per_tok=K, intermediate_size=F)


def make_layer(layer, **arguments):
    """A layer with its own random keys, because those of another trace cannot be used."""
    return layer(**{"rngs": nnx.Rngs(0)} | arguments)


def make_nnx(**arguments):
    make_layer(MoE, **arguments)


def call_nnx(**arguments):
    return make_layer(MoE, **LAYER)(**arguments)


def update_nnx(**arguments):
    layer = make_layer(MoE, **LAYER, score_function="sigmoid", use_expert_bias=True)
    layer.update_expert_bias(**arguments)
    return layer.expert_bias[...]


def make_linen(**arguments):
    MoEBlock(**arguments).init(jax.random.key(0), floats(T, D))


def call_linen(**arguments):
    return nn.init(lambda block, arguments: block(**arguments), MoEBlock(**BLOCK))(jax.random.key(0), arguments)


#: Public callable: a valid call with as many arguments as can be combined.
CALLS = {
    ab.Parallel: dict(
        expert_axis="e",
        data_axes="data",
        fsdp_axes="data",
        tensor_axis="t",
        transport="ring",
        capacity_factor=1.5,
        mesh=MESH,
        fp8_exchange=True,
    ),
    ab.combine: dict(rows=floats(R, D), plan=PLAN, weights=floats(T, K)),
    ab.compute_ragged_all_to_all_params: RAGGED,
    ab.compute_reverse_ragged_all_to_all_params: RAGGED,
    ab.custom_calls: {},
    ab.dispatch: dict(x=floats(T, D), plan=PLAN),
    ab.expert_ffn: dict(
        rows=floats(R, D), group_sizes=np.array(PLAN.group_sizes), weights=floats(R), lora=LORA, **MATRICES
    ),
    ab.fused_compute_score_for_moe_aux_loss: dict(logits=floats(T, E), topk=K, score_function="softmax"),
    ab.fused_moe_aux_loss: dict(
        probs=floats(T, E), tokens_per_expert=np.ones(E, np.int32), topk=K, coeff=0.1, total_num_tokens=T, num_experts=E
    ),
    ab.fused_topk_with_score_function: dict(logits=floats(T, E))
    | {n: v for n, v in ROUTING.items() if n != "token_mask"},
    ab.gmm: dict(lhs=floats(R, D), rhs=floats(E, D, F), group_sizes=np.ones(E, np.int32), transpose_rhs=False),
    ab.grouped_dense: dict(
        x=floats(R, D), kernel=floats(E, D, F), group_sizes=np.ones(E, np.int32), bias=floats(E, F), precision="highest"
    ),
    ab.grouped_matmul: dict(
        x=floats(R, D),
        w=floats(E, D, F),
        group_sizes=np.ones(E, np.int32),
        lora=(floats(E, D, 2), floats(1, 2, F)),
    ),
    ab.init_lora: dict(key=jax.random.key(0), w_in=MATRICES["w_in"], w_out=MATRICES["w_out"], rank=2),
    ab.join_lora: dict(gate=(floats(E, D, 2), floats(1, 2, F)), up=(floats(1, D, 3), floats(E, 3, F))),
    ab.load_balance_loss: dict(
        score_sum=floats(E), tokens_per_expert=np.ones(E, np.int32), topk=K, coeff=0.1, num_tokens=T
    ),
    ab.local_permute_after_a2a: dict(x_recv=floats(R, D), **RAGGED),
    ab.local_unpermute_before_a2a: dict(expert_outputs=floats(R, D), state=ARRIVED[2]),
    ab.moe: dict(
        x=floats(T, D), gate=floats(D, E), gate_bias=floats(E), lora=LORA, replay=REPLAY, **MATRICES, **ROUTING
    ),
    ab.merge_lora: dict(w_in=MATRICES["w_in"], w_out=MATRICES["w_out"], lora=LORA),
    ab.pack_fp8: dict(w=floats(2, 128, 256)),
    ab.pack_mxfp4: dict(w=floats(2, 3, 64)),
    ab.plan: dict(experts=EXPERTS, num_experts=E, align_size=2, num_rows=40, num_destinations=2),
    ab.pure_jax_token_combine: dict(
        expert_outputs=floats(*PURE[0].shape),
        perm_state=PURE[1],
        routing_weights=floats(T, K),
        num_experts_per_tok=K,
        batch_size=2,
        sequence_length=T // 2,
    ),
    ab.pure_jax_token_dispatch: dict(
        inputs=floats(T, D),
        selected_experts=EXPERTS,
        num_experts=E,
        num_experts_per_tok=K,
        align_size=4,
        roll_to_expert_id=1,
    ),
    ab.quantile_bias: dict(histogram=np.ones((E, 4), np.int32), lower=-1.0, upper=1.0, topk=K),
    ab.ragged_dot: dict(lhs=floats(R, D), rhs=floats(E, D, F), group_sizes=np.ones(E, np.int32)),
    ab.ragged_dot_general: dict(
        lhs=floats(R, D), rhs=floats(R, F), group_sizes=np.ones(E, np.int32), ragged_dot_dimension_numbers=CONTRACTED
    ),
    ab.quantize_experts: dict(w_in=floats(E, 128, 2, 128), w_out=floats(E, 128, 128)),
    ab.route: dict(logits=floats(T, E), **ROUTING),
    ab.routed_experts: dict(x=floats(T, D), experts=EXPERTS, weights=floats(T, K), lora=LORA, **MATRICES),
    ab.unpack: dict(packed=ab.Mxfp4(np.zeros((2, 3, 2, 16), np.uint8), np.zeros((2, 3, 2), np.uint8)), dtype="float32"),
    ab.routing_map_to_selected_experts: dict(sparse_probs=floats(T, E), routing_map=MAP, topk=K),
    ab.shared_expert: dict(
        x=floats(T, D), w_in=floats(D, 2, F), w_out=floats(F, D), w_gate=floats(D, 1), token_mask=MASK
    ),
    ab.sort_chunks_by_index: dict(
        inp=floats(R, D), split_sizes=np.array([1, 2, 3]), sorted_indices=np.array([2, 0, 1]), probs=floats(R)
    ),
    ab.token_combine: dict(
        inp=floats(*DISPATCHED.output.shape),
        row_id_map=np.array(DISPATCHED.row_id_map),
        merging_probs=floats(T, E),
        pad_offsets=np.array(DISPATCHED.pad_offsets),
    ),
    ab.token_dispatch: dict(inp=floats(T, D), routing_map=MAP, num_out_tokens=T * E, probs=floats(T, E), align_size=4),
    ab.z_loss: dict(lse=floats(T), coeff=0.1, token_mask=MASK, num_tokens=T),
    MoE.__init__: LAYER,
    MoE.__call__: dict(x=floats(T, D), token_mask=MASK, forced_experts=EXPERTS),
    MoE.update_expert_bias: dict(tokens_per_expert=np.ones(E, np.int32), rate=0.1),
    MoEBlock: BLOCK,
    MoEBlock.__call__: dict(inputs=floats(T, D)),
}
#: How the layers are called.
LAYERS = {
    MoE.__init__: make_nnx,
    MoE.__call__: call_nnx,
    MoE.update_expert_bias: update_nnx,
    MoEBlock: make_linen,
    MoEBlock.__call__: call_linen,
}
#: Arguments that the layers inherit.
OTHERS = {"self", "parent", "name"}


VALUES = [
    *bad_values.VALUES, jnp.float32, jax.Array, jax.ShapeDtypeStruct((T, E), jnp.float32), jax.random.key(0), PLAN,
    jax.sharding.PartitionSpec("a"), ab.Parallel(data_axes="data"),
]  # fmt: skip


def variants(good):
    """Variants of a valid array: other dtypes, ranks and shapes, and numbers outside int32."""
    for dtype in DTYPES:
        yield as_dtype(good, dtype)
    if good.dtype.kind in "iu":
        yield np.full(good.shape, 2**32 + 1, np.int64)
        yield np.full(good.shape, -(2**63), np.int64)
    yield np.full(good.shape, np.nan, np.float32)
    yield np.ma.masked_array(good, np.ones(good.shape, bool))
    yield from (good[None], good.ravel(), good[:0], good[..., :0], np.concatenate([good, good]), good.tolist())
    yield np.concatenate([good, good], -1)
    yield good.astype(object)


TRACED = [jax.ShapeDtypeStruct(*t) for t in (((), jnp.int32), ((T, E), jnp.float32), ((E,), bool))]


def public():
    names = [getattr(ab, name) for name in ab.__all__]
    return [f for f in names if inspect.isfunction(f)] + [*LAYERS, ab.Parallel]


@pytest.fixture
def errors_as_they_are():
    """Filtering JAX's frames out of tracebacks would take most of the time."""
    usual = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", usual)


@pytest.mark.usefixtures("errors_as_they_are")
@pytest.mark.parametrize("function", public(), ids=lambda f: f"{f.__module__}.{f.__qualname__}")
def test_a_bad_value_is_an_error_that_names_its_argument(function):
    good, call = CALLS[function], LAYERS.get(function, function)
    arguments = [name for name in inspect.signature(function).parameters if name not in OTHERS]

    def run(**changes):
        call(**good | changes)
        return ()

    def traced(**changes):
        return jax.eval_shape(functools.partial(run, **changes))

    traced()
    wrong = []
    for argument in arguments:
        usual = good.get(argument)
        calls = [(value, functools.partial(traced, **{argument: value})) for value in VALUES]
        if isinstance(usual, np.ndarray):
            calls += [(value, functools.partial(traced, **{argument: value})) for value in variants(usual)]
        for struct in TRACED:
            calls.append((struct, functools.partial(jax.eval_shape, lambda v, a=argument: run(**{a: v}), struct)))
        for value, attempt in calls:
            try:
                attempt()
            except Exception as error:
                problem = complaint(error, argument, arguments, value, (jax.Array, jax.ShapeDtypeStruct))
                if problem:
                    wrong.append(f"{argument} = {shown(value)}: {problem[:300]}")
    assert not wrong, f"{len(wrong)} calls:\n" + "\n".join(wrong)
