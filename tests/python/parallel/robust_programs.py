"""JAX programs that use the transport "p2p" as training programs do, until one of the processes ends.

    python examples/launch.py --processes 2 --gpus tests/python/parallel/robust_programs.py    # a process per GPU
    python tests/python/parallel/robust_programs.py                                            # one process

Each function of SITUATIONS returns arrays, which must have the same bits with "p2p" as with "ring". The last process
then exits; the others expect an error that names its rank. The first argument replaces "p2p"; with "ring" the programs
run on CPU devices too. The second is the number of steps with random routing, by default 300.
"""

import functools
import os
import pathlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor

_TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = map(str, (_TESTS.parents[1] / "examples", _TESTS, _TESTS / "parallel" / "on_devices"))

from launch import join  # noqa: E402

LIMIT = 15  # seconds that an exchange waits: longer than the ranks differ in the time that they compile
os.environ["ANABRANCH_EXCHANGE_TIMEOUT"] = str(LIMIT)
if not join():
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")  # p2p needs it if a process has several GPUs

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec  # noqa: E402
from meshes import placed  # noqa: E402

from anabranch.jax import Parallel, moe  # noqa: E402

T, D, F, E, K = 256, 128, 128, 8, 2  # T: of a rank


def mesh_over(devices, shape=None):
    devices = np.asarray(devices).reshape(shape or (1, -1))
    return Mesh(devices, ("data", "expert"), axis_types=(AxisType.Auto,) * 2)


def arrays_on(mesh, seed=0, width=F, skew=0.0):
    """x, gate, w_in and w_out."""
    rng = np.random.default_rng(seed)
    shapes = {"x": (T * mesh.size, D), "gate": (D, E), "w_in": (E, D, 2, width), "w_out": (E, width, D)}
    place = placed(mesh, parallel_by("ring"))
    arrays = {name: 0.1 * rng.standard_normal(shape) for name, shape in shapes.items()}
    arrays["x"] += skew * arrays["gate"][:, 0]  # expert 0 gets most tokens
    return [place(name, array.astype(jnp.bfloat16)) for name, array in arrays.items()]


def parallel_by(transport, **options):
    return Parallel(expert_axis="expert", data_axes="data", transport=transport, **options)


def layer(transport, x, *weights, precision=None, token_mask=None, **options):
    more = {} if precision is None else {"precision": precision}
    return moe(x, *weights, topk=K, token_mask=token_mask, parallel=parallel_by(transport, **options), **more)


def loss_of(output):
    return jnp.mean(jnp.square(output.astype(jnp.float32) - 0.1))


def both_passes(function, *arrays):
    """A jitted function of arrays: the results of `function`, the first of which is differentiated, and all gradients."""

    def loss(*given):
        found = function(*given)
        return loss_of(found[0]), found

    step = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(arrays))), has_aux=True))
    return functools.partial(step, *arrays)


def often(step, times=4):
    """Runs a step several times without a wait, so that XLA also runs it as a command buffer. All have the same bits."""
    found = [step() for _ in range(times)]
    for one in found[1:]:
        expect_same(one, found[0])
    return found[0]


def expect_same(got, want):
    """Compares the parts of this process."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype and g.sharding == w.sharding
        for one, other in zip(g.addressable_shards, w.addressable_shards, strict=True):
            one, other = np.asarray(one.data), np.asarray(other.data)
            if one.tobytes() != other.tobytes() or not np.isfinite(one.astype(np.float32)).all():
                raise AssertionError(f"arrays of shape {g.shape} differ, or are not finite")


def in_jit(transport, mesh):
    return often(both_passes(lambda *given: (layer(transport, *given).output,), *arrays_on(mesh)))


def one_gradient_of_a_program(transport, mesh):
    """XLA removes what the other gradients need."""
    arrays = arrays_on(mesh, seed=1)
    step = jax.jit(jax.grad(lambda x, *weights: loss_of(layer(transport, x, *weights).output)))
    return often(functools.partial(step, *arrays))


def outside_of_jit(transport, mesh):
    arrays = arrays_on(mesh, seed=2)

    def loss(*given):
        return loss_of(layer(transport, *given).output)

    return layer(transport, *arrays).output, jax.grad(loss, argnums=(0, 1, 2, 3))(*arrays)


def scan_and_checkpoint(transport, mesh):
    def function(x, *weights):
        def one(x):
            return x + layer(transport, x, *weights).output

        x, _ = jax.lax.scan(lambda x, _: (jax.checkpoint(one)(x), None), x, length=2)
        return (jax.checkpoint(one)(x),)

    return often(both_passes(function, *arrays_on(mesh, seed=3)))


def three_layers_in_flight(transport, mesh):
    """Layers of different widths, of which two do not depend on each other; backward after all of them."""
    x, *first = arrays_on(mesh, seed=4)
    _, *second = arrays_on(mesh, seed=5, width=2 * F)
    _, *third = arrays_on(mesh, seed=6, width=F // 2)

    def function(x, *weights):
        x = x + layer(transport, x, *weights[:3]).output
        beside = layer(transport, jnp.roll(x, 1, axis=1), *weights[3:6]).output
        return (x + layer(transport, x, *weights[6:]).output + beside,)

    return often(both_passes(function, x, *first, *second, *third), 6)


def other_collectives(transport, mesh):
    """Sums and gathers of XLA before, beside and after the layer."""

    def shared(x):
        total = jax.lax.psum(x.astype(jnp.float32), "expert")
        gathered = jax.lax.all_gather(x, "expert", tiled=True)
        return x + (0.01 * total + 0.01 * jnp.mean(gathered, axis=0)).astype(x.dtype)

    rows = PartitionSpec(("data", "expert"))
    collect = jax.shard_map(shared, mesh=mesh, in_specs=rows, out_specs=rows)

    def function(x, *weights):
        x = collect(x)
        return (collect(layer(transport, x, *weights).output) + collect(2 * x),)

    return often(both_passes(function, *arrays_on(mesh, seed=7)))


def two_meshes(transport, mesh):
    """Programs of two meshes take turns: the devices in the opposite order or, if there are four, in two groups."""
    devices = mesh.devices.ravel()
    other = mesh_over(devices[::-1], (2, 2) if len(devices) == 4 else None)
    steps = []
    for seed, one in enumerate((mesh, other)):
        arrays = arrays_on(one, seed=8 + seed)
        step = both_passes(lambda *given: (layer(transport, *given).output,), *arrays)
        steps.append((one, step))
    found = []
    for _ in range(4):
        for one, step in steps:
            with jax.set_mesh(one):
                found.append(step())
    return found


def capacity(transport, mesh):
    def function(*given):
        result = layer(transport, *given, capacity_factor=0.7)
        return result.output, result.dropped_by_source

    found = often(both_passes(function, *arrays_on(mesh, seed=10, skew=1.0)))
    (_, (_, dropped)), _ = found
    assert jnp.sum(dropped) > 0
    return found


def fp8_exchange(transport, mesh):
    def function(*given):
        return (layer(transport, *given, precision="fp8", fp8_exchange=True).output,)

    return often(both_passes(function, *arrays_on(mesh, seed=11)))


def compile_a_program():
    return np.asarray(jax.jit(lambda x: jnp.sort(jnp.sin(x) @ x.T))(np.ones((32, 32), np.float32)))


def a_rank_is_late(transport, mesh):
    """Process 0 compiles another program first, then process 1 is late by seconds; the others wait on the device."""
    arrays = arrays_on(mesh, seed=12)
    step = both_passes(lambda *given: (layer(transport, *given).output,), *arrays)
    if jax.process_index() == 0:
        with ThreadPoolExecutor(1) as pool:  # in another thread the program has no mesh, so it is that of one device
            pool.submit(compile_a_program).result()
    found = step()
    jax.block_until_ready(found)
    if jax.process_index() == 1:
        time.sleep(3)
    expect_same(step(), found)
    return found


def bits_of(array):
    """The sum of an array's bits as integers, modulo 2^32."""
    kind = jnp.int16 if array.dtype.itemsize == 2 else jnp.int32
    return jnp.sum(jax.lax.bitcast_convert_type(array, kind).astype(jnp.int32))


def random_routing(transport, mesh, steps):
    """Many steps: in some, ranks have no tokens, or most tokens go to one expert; process 1 is late now and then."""
    _, *weights = arrays_on(mesh, seed=14)
    rows = NamedSharding(mesh, PartitionSpec(("data", "expert")))

    @jax.jit
    def step(seed, before, *weights):
        of_x, of_favourite, of_ranks, of_tokens = jax.random.split(jax.random.key(seed), 4)
        x = 0.1 * jax.random.normal(of_x, (mesh.size * T, D))
        favourite = jax.random.randint(of_favourite, (), 0, 2 * E)  # none in half of the steps
        x += jnp.where(favourite < E, weights[0][:, favourite % E].astype(jnp.float32), 0)
        x = jax.lax.with_sharding_constraint(x.astype(jnp.bfloat16), rows)
        some = jax.random.bernoulli(of_ranks, 0.7, (mesh.size, 1))
        some &= jax.random.bernoulli(of_tokens, 0.9, (mesh.size, T))

        def loss(*given):
            output = layer(transport, *given, token_mask=some.ravel()).output
            return loss_of(output), output

        (_, output), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(x, *weights)
        found = (output, *gradients)
        bits = 31 * before[0] + jnp.stack([bits_of(array) for array in found])
        finite = before[1] & jnp.stack([jnp.isfinite(array).all() for array in found])
        return bits, finite

    found = np.zeros(5, np.int32), np.ones(5, bool)
    for seed in range(steps):
        if jax.process_index() == 1 and seed % 100 == 50:
            time.sleep(0.2)
        found = step(seed, found, *weights)
    assert np.asarray(found[1]).all()
    return found


SITUATIONS = (
    in_jit,
    one_gradient_of_a_program,
    outside_of_jit,
    scan_and_checkpoint,
    three_layers_in_flight,
    other_collectives,
    two_meshes,
    capacity,
    fp8_exchange,
    a_rank_is_late,
    random_routing,
)


def forward_only(mesh):
    """A new program without collectives of XLA, which would wait for an ended process without a time limit."""
    return jax.jit(lambda *given: layer("p2p", *given).output)


def a_rank_ends(mesh):
    arrays, last = arrays_on(mesh, seed=13), jax.process_count() - 1
    jax.block_until_ready(forward_only(mesh)(*arrays))
    multihost_utils.sync_global_devices("before a rank ends")
    if jax.process_index() == last:
        os._exit(0)
    start = time.monotonic()
    while time.monotonic() - start < 2 * LIMIT + 10:  # two exchanges may wait one after the other
        try:
            # A new program, since a command buffer is replayed without the check.
            output = forward_only(mesh)(*arrays)
            (shard,) = output.addressable_shards
            is_finite = bool(np.isfinite(np.asarray(shard.data, np.float32)).all())
        except jax.errors.JaxRuntimeError as error:
            assert f"rank {last}" in str(error), error
            return f"after {time.monotonic() - start:.1f} s: {str(error).splitlines()[0]}"
        assert not is_finite, "a result without a rank is finite"
    raise AssertionError("no error after a rank ended")


def main(transport="p2p", steps="300"):
    mesh = mesh_over(jax.devices())
    is_first = jax.process_index() == 0
    for situation in SITUATIONS:
        start = time.monotonic()
        options = {"steps": int(steps)} if situation is random_routing else {}
        with jax.set_mesh(mesh):
            try:
                want, got = situation("ring", mesh, **options), situation(transport, mesh, **options)
                expect_same(got, want)
            except Exception as error:
                raise AssertionError(f"{situation.__name__}, process {jax.process_index()}") from error
        if is_first:
            print(f"{situation.__name__}: {time.monotonic() - start:.1f} s", flush=True)
    if jax.process_count() > 1 and transport == "p2p":
        with jax.set_mesh(mesh):
            print(f"a_rank_ends, {a_rank_ends(mesh)}", flush=True)
        os._exit(0)  # the shutdown of jax.distributed would wait for the rank that ended


if __name__ == "__main__":
    main(*sys.argv[1:])
