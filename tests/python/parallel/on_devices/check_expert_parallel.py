"""Expert, data, FSDP and tensor parallelism against the float64 oracle: output, losses, counts, every gradient."""

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType
from meshes import around, mesh_of, placed, put

from anabranch.jax import Parallel, moe
from moe_cases import check_layer, operands

TRANSPORTS = ("ring", "all_to_all", "ragged")
transports = pytest.mark.parametrize("transport", TRANSPORTS)


def check(mesh, parallel, arrays, **options):
    with jax.set_mesh(mesh):
        result, _ = check_layer(arrays, put=placed(mesh, parallel), parallel=parallel, **options)
    assert int(result.dropped) == 0 and not result.dropped_by_source.any()
    return result


@transports
@pytest.mark.parametrize(
    "expert,data,dtype", [(1, 8, "float32"), (2, 4, "bfloat16"), (4, 2, "float32"), (8, 1, "bfloat16")]
)
def test_meshes(transport, expert, data, dtype):
    """16 experts, 2 to 16 per rank; aligned rows; experts and ranks without tokens."""
    mesh = mesh_of(data=data, expert=expert)
    parallel = Parallel(expert_axis="expert", data_axes="data", transport=transport)
    arrays = operands(64, 16, 3, 16, 24, dtype=dtype, bias=True, skew=3.0, cold=5)
    mask = np.random.default_rng(3).random(64) < 0.8
    result = check(mesh, parallel, arrays, topk=3, aux_loss_coeff=0.3, z_loss_coeff=0.1, token_mask=mask, align_size=8)
    assert result.dropped_by_source.shape == (8,)


@pytest.mark.parametrize("transport, dtype", [("ring", "bfloat16"), ("all_to_all", "float16"), ("ragged", "bfloat16")])
def test_explicit_axes_and_16_bits(transport, dtype):
    mesh = mesh_of(AxisType.Explicit, data=2, expert=4)
    parallel = Parallel(expert_axis="expert", data_axes="data", transport=transport)
    arrays = operands(64, 8, 2, 24, 32, dtype=dtype, bias=True, skew=2.0, cold=1)
    check(mesh, parallel, arrays, topk=2, aux_loss_coeff=0.3, align_size=128)


@transports
@pytest.mark.parametrize("fsdp", [(), "data"])
def test_float32_weights_of_a_bfloat16_layer(transport, fsdp):
    mesh = mesh_of(data=2, expert=4)
    parallel = Parallel(expert_axis="expert", data_axes="data", fsdp_axes=fsdp, transport=transport)
    arrays = operands(64, 8, 2, 24, 32, dtype="bfloat16", bias=True, skew=2.0, cold=1)
    place = placed(mesh, parallel)

    def put(name, array):
        return place(name, array.astype(np.float32) if name in ("w_in", "w_out") else array)

    with jax.set_mesh(mesh):
        _, gradients = check_layer(arrays, put=put, parallel=parallel, topk=2, aux_loss_coeff=0.3)
    for name in ("w_in", "w_out"):
        got = np.asarray(gradients[name])
        assert got.dtype == np.float32 and (got != got.astype(ml_dtypes.bfloat16).astype(np.float32)).any()


def test_histograms_of_quantile_balancing_are_those_of_all_tokens(axis_type):
    mesh = mesh_of(axis_type, data=2, expert=4)
    parallel = Parallel(expert_axis="expert", data_axes="data")
    arrays = {name: a for name, a in operands(64, 8, 2, 16, 24).items() if a is not None}
    bias = np.linspace(-0.1, 0.1, 8, dtype=np.float32)
    options = dict(topk=2, score_function="sigmoid", qb_bin_bounds=(-1.0, 1.0), qb_bins=50)
    want = moe(**arrays, expert_bias=bias, **options).qb_histogram
    place = placed(mesh, parallel)
    on_mesh = {name: place(name, array) for name, array in arrays.items()}
    with jax.set_mesh(mesh):
        step = jax.jit(lambda arrays, bias: moe(**arrays, expert_bias=bias, **options, parallel=parallel).qb_histogram)
        np.testing.assert_array_equal(step(on_mesh, place("expert_bias", bias)), want)
    tokens = {name: put(mesh, a, *([("data", "expert")] if name == "x" else [])) for name, a in arrays.items()}
    with around(mesh):
        step = jax.jit(lambda arrays, bias: moe(**arrays, expert_bias=bias, **options).qb_histogram)
        np.testing.assert_array_equal(step(tokens, put(mesh, bias)), want)


@pytest.mark.parametrize(
    "axis_type, layouts",
    [
        (AxisType.Auto, ("pfd", "df")),
        (AxisType.Auto, ("dfp", "fd")),
        (AxisType.Auto, ("fpd", "df")),
        (AxisType.Explicit, ("pfd", "df")),
    ],
)
def test_layouts_of_weights_on_every_axis(axis_type, layouts):
    mesh = mesh_of(axis_type, data=2, expert=2, tensor=2)
    parallel = Parallel(expert_axis="expert", data_axes="data", fsdp_axes="data", tensor_axis="tensor")
    arrays = operands(32, 4, 2, 16, 24, bias=True, skew=2.0)
    options = dict(zip(("w_in_layout", "w_out_layout"), layouts, strict=True))
    with jax.set_mesh(mesh):
        check_layer(arrays, put=placed(mesh, parallel, *layouts), parallel=parallel, topk=2, **options)


@transports
@pytest.mark.parametrize("experts,topk", [(8, 1), (128, 8)])
def test_few_and_many_experts_a_rank(transport, experts, topk):
    """E = ranks and E = 16 times the ranks, K = 1 and K = 8."""
    parallel = Parallel(expert_axis="expert", transport=transport)
    arrays = operands(48, experts, topk, 8, 16, bias=True)
    check(mesh_of(expert=8), parallel, arrays, topk=topk, aux_loss_coeff=0.1)


@pytest.mark.parametrize("transport, weight_early", [*((name, False) for name in TRANSPORTS), ("ragged", True)])
def test_one_rank_gets_everything_and_one_nothing(transport, weight_early):
    """All assignments, also more than two of a token, go to the two experts of rank 2 and fill the buffers."""
    forced = np.random.default_rng(1).integers(4, 6, (32, 3)).astype(np.int32)
    forced[20:22] = -1
    parallel = Parallel(expert_axis="expert", transport=transport)
    arrays = operands(32, 8, 3, 8, 16, bias=True)
    check(mesh_of(expert=4), parallel, arrays, topk=3, forced_experts=forced, weight_early=weight_early, align_size=8)


@transports
def test_sharded_weights_and_slices_of_f(axis_type, transport):
    """FSDP over data, tensor parallelism over F and expert parallelism together, for either type of axes."""
    mesh = mesh_of(axis_type, data=2, expert=2, tensor=2)
    parallel = Parallel(
        expert_axis="expert", data_axes="data", fsdp_axes="data", tensor_axis="tensor", transport=transport
    )
    if axis_type == AxisType.Auto:
        arrays = operands(32, 4, 2, 16, 24, bias=True, skew=2.0)
        check(mesh, parallel, arrays, topk=2, aux_loss_coeff=0.3, z_loss_coeff=0.1)
    else:
        arrays = operands(32, 4, 2, 16, 24, dtype="bfloat16", bias=True, parts=1)
        check(mesh, parallel, arrays, topk=2, weight_early=True, activation="relu2", align_size=8)


def test_a_whole_gate_beside_sharded_experts(axis_type):
    """The gate may be replicated where FSDP shards the matrices; a sharded gate returns the same bits."""
    mesh = mesh_of(axis_type, data=2, expert=4)
    parallel = Parallel(expert_axis="expert", data_axes="data", fsdp_axes="data", transport="all_to_all")
    place = placed(mesh, parallel)
    arrays = operands(64, 8, 2, 16, 24, bias=True, skew=2.0)
    options = dict(parallel=parallel, topk=2, aux_loss_coeff=0.3, z_loss_coeff=0.1)

    def put_whole(name, array):
        return put(mesh, array) if name == "gate" else place(name, array)

    with jax.set_mesh(mesh):
        divided = check_layer(arrays, put=place, **options)
        whole = check_layer(arrays, put=put_whole, **options)
    jax.tree.map(np.testing.assert_array_equal, whole, divided)


@transports
def test_bias_and_groups_steer_the_selection(transport):
    """Groups of experts of two ranks each; expert_bias is replicated."""
    parallel = Parallel(expert_axis="expert", data_axes="data", transport=transport)
    bias = np.random.default_rng(5).standard_normal(16).astype(np.float32)
    options = dict(score_function="sigmoid", expert_bias=bias, num_groups=2, group_topk=1, scaling_factor=2.5)
    arrays = operands(64, 16, 4, 8, 16, bias=True)
    check(mesh_of(data=2, expert=4), parallel, arrays, topk=4, aux_loss_coeff=0.2, normalize=False, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"data_axes": ("a", "b"), "fsdp_axes": ("b", "a")},
        {"data_axes": "a", "tensor_axis": "b"},
        {"tensor_axis": "a"},
        {"expert_axis": "a", "tensor_axis": "b"},
    ],
    ids=str,
)
def test_any_subset_of_axes(options):
    """Arrays are replicated over axes that are not named."""
    arrays = operands(32, 4, 2, 16, 16, bias=True)
    check(mesh_of(a=4, b=2), Parallel(**options), arrays, topk=2, aux_loss_coeff=0.2)
