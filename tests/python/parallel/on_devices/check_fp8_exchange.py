"""FP8 exchange: expert GEMMs get equal bits, and everything else reads the dequantised tokens, as in the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from meshes import collectives, kept_and_dropped, mesh_of, placed

from anabranch.exchange_sizes import traffic
from anabranch.jax import Parallel, moe, routed_experts
from anabranch.jax.ops.quantized import quantize_rows
from anabranch.jax.parallel.exchange import Bounds
from anabranch.jax.parallel.message import dequantize, pack, unpack
from anabranch.jax.parallel.transports import choose
from anabranch.reference.fp8 import received
from fp8_layers import check_routed
from moe_cases import operands
from routed_cases import routed_operands, run_routed

EVERY_AXIS = dict(expert_axis="expert", data_axes="data", fsdp_axes="data", tensor_axis="tensor")
SENT = dict(expert_axis="expert", data_axes="data", fp8_exchange=True)
transports = pytest.mark.parametrize("transport", ["ring", "all_to_all", "ragged"])
scales = pytest.mark.parametrize("fp8_scales", ["float32", "power_of_two"])


def make_operands(dtype="bfloat16", **options):
    """Operands of a layer with float32 matrices, an expert without tokens and one that half of the tokens select."""
    arrays = routed_operands(64, 8, 2, 256, 256, dtype=dtype, **{"bias": True} | options)
    experts = np.where(arrays["experts"] == 5, 6, arrays["experts"])
    experts[::2, 0] = 3
    return arrays | {"experts": experts} | {name: arrays[name].astype(np.float32) for name in ("w_in", "w_out")}


@transports
def test_every_kind_of_parallelism(transport):
    early, layouts = {"ring": (False, ()), "all_to_all": (True, ("dfp", "df")), "ragged": (False, ())}[transport]
    axis_type = AxisType.Explicit if transport == "all_to_all" else AxisType.Auto
    mesh = mesh_of(axis_type, data=2, expert=2, tensor=2)
    parallel = Parallel(**EVERY_AXIS, transport=transport, fp8_exchange=True)
    options = dict(activation="silu", fp8_scales="float32", weight_early=early)
    options |= dict(zip(("w_in_layout", "w_out_layout"), layouts, strict=False))
    with jax.set_mesh(mesh):
        check_routed(make_operands(), put=placed(mesh, parallel, *layouts), parallel=parallel, sent=True, **options)


@transports
def test_drops_of_bounded_buffers(transport):
    mesh = mesh_of(data=2, expert=4)
    parallel = Parallel(**SENT, transport=transport, capacity_factor=0.8)
    arrays = make_operands("float32", bias=False)
    arrays["experts"] = np.maximum(arrays["experts"], 0)
    kept, dropped = kept_and_dropped(arrays, {"forced_experts": arrays["experts"]}, parallel, 4, 2)
    assert dropped.sum() > 10
    options = dict(activation="silu", fp8_scales="power_of_two", weight_early=transport == "ragged")
    with jax.set_mesh(mesh):
        check_routed(
            arrays, put=placed(mesh, parallel), parallel=parallel, sent=True, kept=kept, align_size=8, **options
        )


@transports
@scales
def test_only_weight_gradients_differ_from_an_unquantised_exchange(transport, fp8_scales):
    """All bits are equal, also with a block of NaN, an infinity and a row of zeros among the tokens."""
    mesh, arrays = mesh_of(data=2, expert=4), make_operands(bias=False)
    arrays["x"][3, 130], arrays["x"][9, 7], arrays["x"][20] = np.nan, -np.inf, 0
    found = []
    for fp8_exchange in (False, True):
        parallel = Parallel(expert_axis="expert", data_axes="data", transport=transport, fp8_exchange=fp8_exchange)
        options = dict(precision="fp8", fp8_scales=fp8_scales, parallel=parallel)
        with jax.set_mesh(mesh):
            found.append(run_routed(arrays, put=placed(mesh, parallel), **options)[:2])
    (want, want_gradients), (got, got_gradients) = found
    assert np.isnan(np.asarray(want[0], np.float32)).any(axis=1).sum() == 2
    for name, w, g in (
        ("output", want[0], got[0]),
        *((n, want_gradients[n], got_gradients[n]) for n in ("x", "weights")),
    ):
        np.testing.assert_array_equal(np.asarray(g, np.float32), np.asarray(w, np.float32), err_msg=name)
    for name in ("w_in", "w_out"):
        w, g = (np.asarray(of[name], np.float64) for of in (want_gradients, got_gradients))
        np.testing.assert_array_equal(np.isfinite(g), np.isfinite(w), err_msg=name)
        finite = np.isfinite(w)
        error = np.linalg.norm((g - w)[finite]) / np.linalg.norm(w[finite])
        assert 2.0**-9 < error < 2.0**-4, f"{name}: {error}"


@scales
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_message_preserves_every_bit_and_dequantises_within_its_bound(dtype, fp8_scales):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 384)) * np.exp(rng.uniform(-9, 4, (40, 1))) * np.exp2(rng.integers(-14, 1, (40, 384)))
    x[0, :5], x[1, 128:256], x[2, 300], x[3, 0] = 0.0, 0.0, np.nan, np.inf
    x[4, :2] = 65504.0, 65000.0  # the largest float16, whose power-of-two scale overflows it
    x = np.asarray(jnp.asarray(x, dtype))
    number = ["float32", "power_of_two"].index(fp8_scales)
    sent = jax.jit(lambda x: quantize_rows(x, number))(x)
    message = jax.jit(pack)(sent)
    assert message.dtype == jnp.int32 and message.nbytes == x.size * 33 // 32
    got = jax.jit(unpack, static_argnums=1)(message, 384)
    for g, w in zip(got, sent, strict=True):
        np.testing.assert_array_equal(np.asarray(g).view(np.uint8), np.asarray(w).view(np.uint8))
    read = np.asarray(jax.jit(dequantize, static_argnums=1)(got, dtype))
    assert read.dtype == x.dtype
    np.testing.assert_array_equal(read.astype(np.float64), received(x, fp8_scales, x.dtype))
    exact, read = (a.astype(np.float64).reshape(40, 3, 128) for a in (x, read))
    whole = np.isfinite(exact).all(axis=2, keepdims=True)
    assert (np.isnan(read) == ~whole).all()
    largest = np.where(whole, np.abs(exact).max(axis=2, keepdims=True, initial=0), 0)
    rounding = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    smallest = {"float16": 2.0**-25}.get(dtype, 2.0**-126)  # half a step of the subnormals
    near_zero = 2.0**-10 * largest / (448 if number == 0 else 224)
    bound = np.maximum(2.0**-4 * np.abs(exact), near_zero) * (1 + 2.0**-20)
    bound += rounding * (np.abs(exact) + bound) + smallest
    assert np.where(whole, np.abs(read - exact) <= bound, True).all()


def test_traffic_of_a_program_is_that_of_the_transport_choice():
    """Forward sends one message of 33/32 bytes per element; backward sends one each for x and its cotangent."""
    P, T, D, E, K = 4, 16, 256, 8, 2
    arrays, mesh = make_operands(bias=False), mesh_of(expert=P)
    given = [arrays[name] for name in ("x", "experts", "weights", "w_in", "w_out")]
    bounds = Bounds(P, E, 0, T, K, K, None, "expert")
    # A rank contributes one part to a gather; the result of an all_to_all is one part.
    parts = {"all-gather": P, "all-to-all": 1}
    for transport, kind in (("ring", "all-gather"), ("all_to_all", "all-to-all")):
        parallel = Parallel(expert_axis="expert", transport=transport, fp8_exchange=True, mesh=mesh)

        def forward(*given, parallel=parallel):
            return routed_experts(*given, precision="fp8", parallel=parallel).output

        def backward(d_output, *given, forward=forward):
            return jax.vjp(forward, *given)[1](d_output)

        rows = T if transport == "ring" else bounds.region
        message, back = (kind, parts[kind] * rows * (D // 4 + D // 128)), ("all-to-all", rows * D)
        found = [collectives(function, *given) for function in (forward, functools.partial(backward, arrays["x"]))]
        # On the CPU XLA merges the backward pass's message of x with the forward pass's.
        assert [of.count(message) for of in found] == [1, 2] and [of.count(back) for of in found] == [1, 1], found
        assert not any(name in parts and size > max(message[1], back[1]) for of in found for name, size in of)
        counted = (P - 1) * (rows * (D // 4 + D // 128) * 4 + rows * D * 2)
        assert traffic(bounds, 2, True)[transport] * D == counted
    plain = traffic(bounds, 2)
    assert traffic(bounds, 2, True) == {name: size * (33 / 32 + 2) / 4 for name, size in plain.items()}
    assert choose("gpu", bounds, 2, True) == choose("gpu", bounds, 2)


def test_no_tokens_at_all():
    mesh = mesh_of(data=2, expert=4)
    arrays = make_operands("float32")
    arrays |= {name: arrays[name][:0] for name in ("x", "experts", "weights")}
    for transport in ("ring", "all_to_all", "ragged"):
        parallel = Parallel(**SENT, transport=transport)
        with jax.set_mesh(mesh):
            (output, counts, _), gradients, _ = run_routed(
                arrays, put=placed(mesh, parallel), precision="fp8", parallel=parallel
            )
        assert output.shape == (0, 256) and not np.asarray(counts).any()
        assert not any(np.asarray(gradient).any() for gradient in gradients.values())


def test_the_router_reads_unquantised_tokens():
    """The losses and the gate of `moe` read unquantised tokens."""
    mesh, arrays = mesh_of(data=2, expert=4), operands(64, 8, 2, 256, 256, skew=2.0, cold=1)
    given = [arrays[name] for name in ("x", "gate", "w_in", "w_out")]
    found = []
    for fp8_exchange in (False, True):
        parallel = Parallel(
            expert_axis="expert", data_axes="data", transport="ring", fp8_exchange=fp8_exchange, mesh=mesh
        )

        def loss(x, gate, w_in, w_out, parallel=parallel):
            options = dict(topk=2, aux_loss_coeff=0.1, z_loss_coeff=0.1, precision="fp8", parallel=parallel)
            result = moe(x, gate, w_in, w_out, **options)
            return jnp.sum(jnp.sin(result.output)) + result.aux_loss + result.z_loss

        found.append(jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*given))
    (want, want_gradients), (got, got_gradients) = found
    assert want == got
    for w, g in zip(want_gradients[:2], got_gradients[:2], strict=True):
        np.testing.assert_array_equal(g, w)
    assert not np.array_equal(got_gradients[2], want_gradients[2])


def test_fp8_exchange_without_fp8_or_an_exchange_is_refused():
    mesh, arrays = mesh_of(expert=8), operands(16, 8, 1, 128, 128)
    given = [arrays[name] for name in ("x", "gate", "w_in", "w_out")]
    parallel = Parallel(expert_axis="expert", fp8_exchange=True, mesh=mesh)
    message = r'fp8_exchange: got True without precision="fp8", expected False'
    with pytest.raises(ValueError, match=message):
        moe(*given, topk=1, parallel=parallel)
    with pytest.raises(ValueError, match=message):
        routed = routed_operands(16, 8, 1, 128, 128)
        routed_experts(*(routed[n] for n in ("x", "experts", "weights", "w_in", "w_out")), parallel=parallel)
    with pytest.raises(ValueError, match="fp8_exchange: got True without expert_axis, expected False"):
        Parallel(data_axes="expert", fp8_exchange=True)
    with pytest.raises(TypeError, match=r"fp8_exchange: got .*1, expected True or False"):
        Parallel(expert_axis="expert", fp8_exchange=1)
