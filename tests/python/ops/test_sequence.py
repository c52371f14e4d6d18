"""Several C calls as one custom call: its results, and the refusal of malformed descriptions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anabranch.jax.binding import ffi
from anabranch.jax.binding.sequence import Sequence
from anabranch.jax.ops.ffn import FfnConfig, FfnOperands, ffn_forward_by_slot
from anabranch.jax.ops.plan import plan
from anabranch.options import ExpertsOptions

T, E, K, D, F, R = 24, 4, 2, 16, 24, 48


def arrays(layouts):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)  # noqa: E731
    return {
        "x": normal(T, D),
        "experts": jnp.asarray(rng.integers(-1, E, (T, K)), jnp.int32),
        "weights": jnp.asarray(rng.random((T, K)), jnp.float32),
        "w_in": normal(*layouts.shape("w_in", e=E, d=D, p=2, f=F)),
        "w_out": normal(*layouts.shape("w_out", e=E, f=F, d=D)),
        "b_in": normal(*layouts.shape("b_in", e=E, p=2, f=F)),
        "b_out": normal(E, D),
    }


def layer(config, given, route, x):
    """The forward pass of the experts: (sums, h)."""
    others = {name: given[name] for name in ("w_in", "w_out", "b_in", "b_out")}
    operands = FfnOperands(x=x, weights=None, **route, **others)
    operands = operands._replace(**{name: route[name] for name in ("slot_of_row", "group_sizes")})
    rows, saved = ffn_forward_by_slot(config, operands, save=True)
    return rows.sum(given["row_of_slot"], given["weights"], rows.dtype), saved.h


@pytest.mark.parametrize("layouts", [("dpf", "fd"), ("fpd", "df"), ("pfd", "fd")], ids="-".join)
def test_a_sequence_has_the_bits_of_its_calls(layouts):
    options = ExpertsOptions(w_in_layout=layouts[0], w_out_layout=layouts[1])
    config = FfnConfig.of(options.experts(2, K, None), skip_rest=True)
    given = arrays(options.layouts())

    @jax.jit
    def apart(given):
        found = plan(given["experts"], E, num_rows=R)
        route = {name: getattr(found, name) for name in ("slot_of_row", "group_sizes")}
        return *layer(config, given | {"row_of_slot": found.row_of_slot}, route, given["x"]), *route.values()

    @jax.jit
    def together(given):
        sequence = Sequence()
        int32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
        found = ffi.call(
            "ab_xla_plan",
            {"experts": sequence.operand(given["experts"])},
            {"row_of_slot": int32(T, K), "slot_of_row": int32(R), "group_sizes": int32(E)},
            num_experts=E,
            align_size=0,
            num_destinations=1,
        )
        row_of_slot = found.pop("row_of_slot")
        wanted = (*layer(config, given | {"row_of_slot": row_of_slot}, found, given["x"]), *found.values())
        assert len(sequence.calls) == 3
        results = ffi.call_sequence(sequence)
        return tuple(results[buffer.index] for buffer in wanted)

    want, got = apart(given), together(given)
    assert np.isfinite(np.asarray(want[0], np.float32)).all() and np.any(want[0])
    sizes = np.asarray(want[3]).sum()
    for name, a, b in zip(("sums", "h", "slot_of_row", "group_sizes"), want, got, strict=True):
        rows = slice(sizes) if name == "h" else slice(None)  # skip_rest: other rows may have any value
        np.testing.assert_array_equal(np.asarray(a)[rows], np.asarray(b)[rows], err_msg=name)


def test_a_plan_of_some_of_the_experts():
    experts = jnp.array([[0], [3], [2], [3]], jnp.int32)
    sequence = Sequence()
    found = ffi.call(
        "ab_xla_plan",
        {"experts": sequence.operand(experts)},
        {
            name: jax.ShapeDtypeStruct(shape, jnp.int32)
            for name, shape in (("group_sizes", (2,)), ("row_of_slot", (4, 1)), ("slot_of_row", (4,)))
        },
        num_experts=2,
        align_size=0,
        num_destinations=1,
        is_part=1,
        first_expert=2,
    )
    results = ffi.call_sequence(sequence)
    assert results[found["group_sizes"].index].tolist() == [1, 2]
    assert results[found["row_of_slot"].index].ravel().tolist() == [-1, 1, 0, 2]
    assert results[found["slot_of_row"].index].tolist() == [2, 1, 3, -1]


# ---------------------------------------------------------------- malformed descriptions

PLAN = {
    "function": "plan",
    "tensors": "experts=0,row_of_slot=1,slot_of_row=2",
    "num_experts": np.int32(4),
    "align_size": np.int32(0),
    "num_destinations": np.int32(1),
}
VIEW = {"exchange": "tokens", "buffer": np.int32(0), "dtype": np.int32(4), "shape": "3,2"}
EXCHANGES = {"tokens": "an exchange"}


def run(call=PLAN, without=(), **attributes):
    """A sequence of one plan, with other attributes; a value of None removes one."""
    call = {name: value for name, value in call.items() if name not in without}
    given = {"calls": np.int32(1), "workspace": np.int32(-1), "call_0": call} | attributes
    experts = jnp.array([[1, 0], [2, -1], [0, 3]], jnp.int32)
    ffi.register()
    results = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 2), (5,))]
    return jax.ffi.ffi_call("ab_xla_sequence", results)(
        experts, **{name: value for name, value in given.items() if value is not None}
    )


def test_the_description_that_the_others_change():
    row_of_slot, slot_of_row = run()
    assert row_of_slot.tolist() == [[2, 0], [3, -1], [1, 4]] and slot_of_row.tolist() == [1, 4, 0, 2, 5]


WRONG = {
    "no calls": (dict(calls=None), "got no calls"),
    "zero calls": (dict(calls=np.int32(0)), "got no calls"),
    "calls of another type": (dict(calls=np.float32(1.5)), "got no calls"),
    "a missing call": (dict(calls=np.int32(2)), "call_1: got"),
    "a call that is no dictionary": (dict(call_0="plan"), "call_0: got"),
    "no function": (dict(without=("function",)), "expected the name of a function"),
    "an unknown function": (dict(call=PLAN | {"function": "scheme"}), 'call_0: got "scheme"'),
    "no tensors": (dict(without=("tensors",)), "expected tensors"),
    "an unknown tensor": (dict(call=PLAN | {"tensors": "experts=0,rows=1"}), 'got "rows=1"'),
    "an option as a tensor": (dict(call=PLAN | {"tensors": "num_experts=0"}), 'got "num_experts=0"'),
    "a tensor given twice": (dict(call=PLAN | {"tensors": "experts=0,experts=0"}), 'got "experts=0"'),
    "a buffer past the last": (dict(call=PLAN | {"tensors": "experts=3"}), 'got "experts=3"'),
    "a huge number": (dict(call=PLAN | {"tensors": f"experts={2**70}"}), "with the number of a buffer"),
    "a negative number": (dict(call=PLAN | {"tensors": "experts=-1"}), 'got "experts=-1"'),
    "no number": (dict(call=PLAN | {"tensors": "experts="}), 'got "experts="'),
    "text after a number": (dict(call=PLAN | {"tensors": "experts=0x"}), 'got "experts=0x"'),
    "no separator": (dict(call=PLAN | {"tensors": "experts"}), 'got "experts"'),
    "an empty entry": (dict(call=PLAN | {"tensors": ",experts=0"}), 'got ""'),
    "an order of other axes": (dict(call=PLAN | {"orders": "experts:02"}), 'got "experts=0"'),
    "a short order": (dict(call=PLAN | {"orders": "experts:0"}), 'got "experts=0"'),
    "no option": (dict(without=("num_experts",)), "no int32 attribute num_experts"),
    "an option of another type": (dict(call=PLAN | {"num_experts": np.float32(4.5)}), "no int32 attribute num_experts"),
    "a value that the function refuses": (dict(call=PLAN | {"num_experts": np.int32(0)}), "num_experts: got 0"),
    "a tensor that the function needs": (dict(call=PLAN | {"tensors": "row_of_slot=1"}), "experts"),
    "no workspace": (dict(workspace=None), "workspace: expected"),
    "a workspace past the last buffer": (dict(workspace=np.int32(3)), "workspace: expected the number"),
    "a negative workspace": (dict(workspace=np.int32(-2)), "workspace: expected the number"),
    "a workspace that is not bytes": (dict(workspace=np.int32(1)), "workspace: expected an array of bytes"),
    "a missing view": (dict(views=np.int32(1)), "view_0: got"),
    "a view without a shape": (dict(views=np.int32(1), view_0={"exchange": "tokens"}), "view_0: got"),
    "a view of an unknown dtype": (
        dict(views=np.int32(1), view_0=VIEW | {"dtype": np.int32(77)}, exchanges=EXCHANGES), 'view_0: got "77"',
    ),
    "a view of an unknown exchange": (
        dict(views=np.int32(1), view_0=VIEW | {"exchange": "other"}, exchanges=EXCHANGES), 'view_0: got "other"',
    ),
    "a view without exchanges": (dict(views=np.int32(1), view_0=VIEW), 'view_0: got "tokens"'),
    "a view on the CPU": (
        dict(views=np.int32(1), view_0=VIEW, exchanges=EXCHANGES), "got an exchange on the CPU, expected a GPU",
    ),
    "a rank of an unknown option": (
        dict(call=PLAN | {"per_rank": "other:tokens"}, exchanges=EXCHANGES), "OPTION:EXCHANGE",
    ),
    "a rank of a tensor": (dict(call=PLAN | {"per_rank": "experts:tokens"}, exchanges=EXCHANGES), "OPTION:EXCHANGE"),
    "a rank of no exchange": (dict(call=PLAN | {"per_rank": "num_experts"}, exchanges=EXCHANGES), "OPTION:EXCHANGE"),
    "a rank on the CPU": (
        dict(call=PLAN | {"per_rank": "num_experts:tokens"}, exchanges=EXCHANGES), "got an exchange on the CPU",
    ),
    "an exchange on the CPU": (
        dict(
            call={
                "function": "grouped_matmul_combine", "tensors": "", "returning": "tokens", "transpose_w": np.int32(0),
                "weight_early": np.int32(0), "skip_rest": np.int32(0),
            },
            exchanges=EXCHANGES,
        ),
        "got an exchange on the CPU",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change,message", WRONG.values(), ids=WRONG)
def test_malformed_descriptions_are_refused(change, message):
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError)) as raised:
        jax.block_until_ready(run(**change))
    assert message in str(raised.value)


def test_more_tensors_than_a_call_has_room_for():
    """Every tensor of a call is a field of its struct, which has fewer than a call has room for."""
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="given once"):
        run(call=PLAN | {"tensors": ",".join(["experts=0"] * 99)})


def test_a_buffer_is_never_converted():
    buffer = Sequence().result((2,), jnp.float32)
    assert buffer.astype(jnp.float32) is buffer
    with pytest.raises(TypeError, match="got a conversion of float32 to bfloat16, expected none"):
        buffer.astype(jnp.bfloat16)


def test_a_second_derivative_is_an_error():
    sequence = Sequence()

    def loss(x):
        sequence.operand(x)
        sequence.result((2,), jnp.float32)
        return ffi.call_sequence(sequence)[0].sum()

    with pytest.raises(TypeError, match="ab_xla_sequence: got a gradient of a gradient"):
        jax.grad(loss)(jnp.ones(2))
