"""Unsupported shardings raise errors that name the argument."""

import jax
import pytest
from jax.sharding import AxisType, NamedSharding
from meshes import P, mesh_of, put

from anabranch.jax import Parallel, moe
from moe_cases import operands

FIELDS = [
    (dict(), ValueError, r"parallel: got no axis, expected expert_axis, data_axes or tensor_axis"),
    (dict(expert_axis=1), TypeError, r"expert_axis: got int 1, expected the name of a mesh axis or None"),
    (dict(data_axes=("a", 2)), TypeError, r"data_axes: got tuple \('a', 2\), expected the names of mesh axes"),
    (
        dict(expert_axis="a", data_axes=("b", "a")),
        ValueError,
        r"data_axes: got 'a', expected an axis .* in expert_axis",
    ),
    (dict(data_axes=("b", "b")), ValueError, r"data_axes: got 'b', expected an axis that is not in data_axes"),
    (dict(expert_axis="a", tensor_axis="a"), ValueError, r"tensor_axis: got 'a', expected an axis that is not in"),
    (dict(expert_axis="a", fsdp_axes="b"), ValueError, r"fsdp_axes: got 'b', expected axes of data_axes \(\)"),
    (dict(expert_axis="a", transport="nccl"), ValueError, r"transport: got 'nccl', expected one of 'auto', 'ring'"),
    (dict(data_axes="a", transport="ring"), ValueError, r"transport: got 'ring' without expert_axis"),
    (dict(data_axes="a", capacity_factor=1.0), ValueError, r"capacity_factor: got 1.0 without expert_axis"),
    (dict(expert_axis="a", capacity_factor=0.0), ValueError, r"capacity_factor: got 0.0, expected a number > 0"),
    (dict(expert_axis="a", capacity_factor="1"), TypeError, r"capacity_factor: got str '1'"),
    (dict(expert_axis="a", mesh=4), TypeError, r"mesh: got int 4, expected a jax.sharding.Mesh"),
]


@pytest.mark.parametrize("fields,error,message", FIELDS, ids=[str(f) for f, *_ in FIELDS])
def test_fields(fields, error, message):
    with pytest.raises(error, match=message):
        Parallel(**fields)


def _arguments(T=32, E=8, D=8, F=16):
    arrays = operands(T, E, 2, D, F)
    return {name: arrays[name] for name in ("x", "gate", "w_in", "w_out")}


CALLS = [
    (dict(expert_axis="c"), {}, r"expert_axis: got 'c', expected an axis of the mesh, 'a', 'b'"),
    (dict(data_axes=("a", "c")), {}, r"data_axes: got 'c', expected an axis of the mesh"),
    (dict(expert_axis="a"), dict(E=6), r"w_in: got float32\[6, 8, 2, 16\], expected E a multiple of 4"),
    (dict(tensor_axis="a"), dict(F=18), r"w_in: got float32\[8, 8, 2, 18\], expected F a multiple of 4"),
    (dict(data_axes="a", fsdp_axes="a"), dict(D=6), r"x: got float32\[32, 6\], expected D a multiple of 4"),
    (
        dict(expert_axis="a", data_axes="b"),
        dict(T=12),
        r"x: got float32\[12, 8\], expected that dimension of tokens a multiple of 8, the devices along 'b', 'a'",
    ),
]


def test_counts_of_all_shards_beyond_int32_are_an_error():
    """The program, with 2^29 tokens of 2 experts on each of 4 devices, is only traced."""
    arrays = _arguments(D=1)
    arrays["x"] = jax.ShapeDtypeStruct((2**31, 1), arrays["x"].dtype)

    def layer(x, *others):
        return moe(x, *others, topk=2, parallel=Parallel(data_axes="a")).output

    on_mesh = jax.shard_map(layer, in_specs=(P("a"), P(), P(), P()), out_specs=P("a"), check_vma=False)
    with jax.set_mesh(mesh_of(a=4)), pytest.raises(ValueError, match=r"x: got 2147483648 x 2 slots, expected fewer"):
        jax.eval_shape(on_mesh, *arrays.values())


@pytest.mark.parametrize("fields,sizes,message", CALLS, ids=[str(f) for f, *_ in CALLS])
def test_shapes_and_meshes_that_are_refused(fields, sizes, message):
    with jax.set_mesh(mesh_of(a=4, b=2)), pytest.raises(ValueError, match=message):
        jax.jit(lambda a: moe(**a, topk=2, parallel=Parallel(**fields)))(_arguments(**sizes))


def test_a_missing_mesh_is_an_error():
    with pytest.raises(ValueError, match=r"mesh: got none, expected parallel.mesh, or the call under jax.set_mesh"):
        moe(**_arguments(), topk=2, parallel=Parallel(expert_axis="a"))


def test_another_mesh_than_that_of_the_context():
    parallel = Parallel(expert_axis="a", mesh=mesh_of(a=8))
    with jax.set_mesh(mesh_of(a=4, b=2)), pytest.raises(ValueError, match=r"mesh: got {'a': 8}, expected .*'a': 4"):
        moe(**_arguments(), topk=2, parallel=parallel)


def test_other_explicit_shardings_are_refused():
    mesh, arguments = mesh_of(AxisType.Explicit, a=4, b=2), _arguments()
    parallel = Parallel(expert_axis="a", data_axes="b")

    def call(**changed):
        return moe(**{**{n: put(mesh, a) for n, a in arguments.items()}, **changed}, topk=2, parallel=parallel)

    with pytest.raises(ValueError, match=r"w_out: got float32\[8, 16, 8\] sharded as .*'b'.*, expected P.*'a'"):
        call(w_out=put(mesh, arguments["w_out"], "b"))
    with pytest.raises(
        ValueError, match=r"x: got float32\[32, 8\] sharded as .*expected its leading dimensions over 'b', 'a'"
    ):
        call(x=put(mesh, arguments["x"], "a"))
    with pytest.raises(ValueError, match=r"x: got float32\[8\], expected \[..., D\] with a first dimension"):
        call(x=put(mesh, arguments["x"][0]))


def test_inside_a_shard_map_over_the_whole_mesh():
    mesh, arguments = mesh_of(a=8), _arguments()

    def shard(parallel):
        step = jax.shard_map(
            lambda a: moe(**a, topk=2, parallel=parallel).output,
            mesh=mesh,
            in_specs=P(),
            out_specs=P(),
            check_vma=False,
        )
        return jax.jit(step)(arguments)

    with pytest.raises(ValueError, match=r"expert_axis: got 'a' inside a jax.shard_map over the whole mesh"):
        shard(Parallel(expert_axis="a"))
    with pytest.raises(ValueError, match=r"data_axes: got 'z', expected axes of the mesh, 'a'"):
        shard(Parallel(data_axes="z"))


def test_automatic_axes_inside_a_shard_map_over_others():
    """XLA does not report how tokens are sharded over these axes, and would gather them."""
    mesh, arguments = mesh_of(stage=2, a=4), _arguments()
    stage = jax.shard_map(
        lambda a: moe(**a, topk=2).output, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"stage"}, check_vma=False
    )
    with pytest.raises(
        ValueError, match=r"sharding: got automatic mesh axes 'a' beside manual or explicit ones 'stage'"
    ):
        jax.jit(stage)(arguments)


def test_parallel_is_a_parallel():
    with pytest.raises(TypeError, match=r"parallel: got str 'expert', expected a Parallel"):
        moe(**_arguments(), topk=2, parallel="expert")


def test_shards_of_different_sizes():
    """Only a program can have them, and only with automatic axes."""
    mesh, arguments = mesh_of(a=8), _arguments(T=12)

    def step(x, **weights):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("a")))
        return moe(x, **weights, topk=2).output

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"sharding: got float32\[12, 8\].* 8 shards"):
        jax.jit(step)(**arguments)
