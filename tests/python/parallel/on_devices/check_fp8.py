"""precision="fp8" on meshes: sharding does not change the scales of blocks, so results are the oracle's."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from meshes import around, mesh_of, placed, put

from anabranch.jax import Parallel, moe, quantize_experts
from fp8_layers import check_routed
from moe_cases import operands
from routed_cases import routed_operands

EVERY_AXIS = dict(expert_axis="expert", data_axes="data", fsdp_axes="data", tensor_axis="tensor")
OPTIONS = dict(activation="silu", fp8_scales="float32")


def make_operands(dtype="bfloat16"):
    """Operands of a layer with float32 matrices and an expert without tokens."""
    arrays = routed_operands(64, 8, 2, 256, 256, dtype=dtype, bias=True)
    arrays["experts"] = np.where(arrays["experts"] == 5, 6, arrays["experts"])
    return arrays | {name: arrays[name].astype(np.float32) for name in ("w_in", "w_out")}


@pytest.mark.parametrize(
    ("transport", "axis_type", "layouts"),
    [
        ("ring", AxisType.Auto, ()),
        ("all_to_all", AxisType.Explicit, ("dfp", "df")),
    ],
)
def test_every_kind_of_parallelism(transport, axis_type, layouts):
    mesh, parallel = mesh_of(axis_type, data=2, expert=2, tensor=2), Parallel(**EVERY_AXIS, transport=transport)
    layout_options = dict(zip(("w_in_layout", "w_out_layout"), layouts, strict=False))
    with jax.set_mesh(mesh):
        check_routed(
            make_operands(), put=placed(mesh, parallel, *layouts), parallel=parallel, **OPTIONS, **layout_options
        )


def test_experts_are_quantised_in_their_shards(axis_type):
    """Weights are quantised in the shards of `parallel`; the layer on a mesh returns the bits of one device."""
    mesh, parallel = mesh_of(axis_type, data=2, expert=2, tensor=2), Parallel(**EVERY_AXIS, transport="all_to_all")
    arrays = make_operands("float32")
    place = placed(mesh, parallel)
    whole = quantize_experts(arrays["w_in"], arrays["w_out"])
    with jax.set_mesh(mesh):
        spread = jax.jit(lambda *weights: quantize_experts(*weights, parallel=parallel))(
            *(place(name, arrays[name]) for name in ("w_in", "w_out"))
        )
        for name, want, got in zip(whole._fields, whole, spread, strict=True):
            assert got.addressable_shards[0].data.size * 8 == got.size, name
            np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8), err_msg=name)
        check_routed(arrays, put=place, parallel=parallel, quantized=spread, **OPTIONS)


def test_tokens_in_shards_and_experts_on_every_device(axis_type):
    mesh = mesh_of(axis_type, a=4, b=2)
    tokens = ("x", "experts", "weights", "output")
    with around(mesh):
        check_routed(
            make_operands(),
            put=lambda name, array: put(mesh, array, *([("b", "a")] if name in tokens else [])),
            **OPTIONS,
        )


@pytest.mark.parametrize(("axis", "width"), [("fsdp_axes", "D"), ("tensor_axis", "F")])
def test_a_block_must_not_be_split(axis, width):
    mesh = mesh_of(data=4, expert=2)
    if axis == "fsdp_axes":
        parallel = Parallel(data_axes="data", fsdp_axes="data", mesh=mesh)
    else:
        parallel = Parallel(data_axes="expert", tensor_axis="data", mesh=mesh)
    arrays = operands(16, 4, 1, 256, 256)
    given = [arrays[name] for name in ("x", "gate", "w_in", "w_out")]
    message = rf"w_in: got float32\[4, 256, 2, 256\].*, expected {width} a multiple of 128"
    with pytest.raises(ValueError, match=message):
        moe(*given, topk=1, precision="fp8", parallel=parallel)
    with pytest.raises(ValueError, match=r"w_in: got float32\[4, 256, 2, 256\].* over 4 devices"):
        quantize_experts(*given[2:], parallel=parallel)
