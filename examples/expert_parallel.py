"""Trains one Mixture-of-Experts layer on a mesh of devices, in one process or several.

    python examples/expert_parallel.py --mesh expert=2,data=2
    python examples/launch.py --processes 4 examples/expert_parallel.py --mesh expert=2,data=2 --checkpoint /tmp/layer

The layer learns to imitate a frozen random one. Batches and initial weights are equal on every mesh, and so are losses
up to rounding. With --checkpoint a run resumes from the newest checkpoint in the folder, which any mesh may have
written.
"""

import argparse
import pathlib
import sys

from launch import join
from mesh import make_mesh, parse_mesh, request_devices
from run_error import RunError, needs, run_main

D, F, E, K, BATCH, SEQ = 32, 64, 8, 2, 8, 16


def check(options: argparse.Namespace, sizes: dict[str, int]) -> None:
    """Refuses options that this layer cannot be trained with.

    Raises:
      ValueError: the mesh does not divide the layer, or --steps is less than 1.
    """
    data, expert, tensor = sizes["data"], sizes["expert"], sizes["tensor"]
    for what, size, parts in (
        ("sequences", BATCH, data * expert),
        ("experts", E, expert),
        ("columns of an expert", F, tensor),
        ("rows of a matrix (--fsdp)", D, data if options.fsdp else 1),
    ):
        if size % parts:
            raise ValueError(
                f"--mesh: got {options.mesh!r}, {parts} parts of {size} {what}, expected a divisor of {size}"
            )
    if options.steps < 1:
        raise ValueError(f"--steps: got {options.steps}, expected a number >= 1")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", default="", help="for example expert=2,data=2, with axes data, expert, tensor")
    parser.add_argument("--transport", default="auto", help="transport of tokens: auto, ring, all_to_all or ragged")
    parser.add_argument("--fsdp", action="store_true", help="also shard matrices over the data axis")
    parser.add_argument("--steps", type=int, default=10, help="total number of training steps")
    parser.add_argument("--checkpoint", type=pathlib.Path, help="folder to resume from and to save to")
    options = parser.parse_args(arguments)
    try:
        check(options, parse_mesh(options.mesh))
    except ValueError as error:
        parser.error(str(error))
    return options


if __name__ == "__main__":
    OPTIONS = parse()  # before imports that take seconds and may fail

with needs("demo"):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from jax.sharding import NamedSharding, PartitionSpec

    from anabranch.jax import Parallel
    from anabranch.jax.nnx import MoE
    from checkpoints import Checkpoints


def run(options: argparse.Namespace) -> None:
    """Creates the mesh and trains on it.

    Raises:
      RunError: the devices or an option do not match.
    """
    sizes = parse_mesh(options.mesh)
    if not join():
        request_devices(sizes)
    try:
        mesh = make_mesh(sizes)
    except ValueError as error:
        raise RunError(str(error)) from None
    train(options, mesh)


def batch(step: int) -> np.ndarray:
    """The tokens of a step, which do not depend on the mesh."""
    return np.random.default_rng(step).standard_normal((BATCH, SEQ, D)).astype(np.float32)


def train(options: argparse.Namespace, mesh: jax.sharding.Mesh) -> None:
    """Trains and prints one line per step.

    Raises:
      RunError: a checkpoint cannot be read or written, or has more steps than --steps.
    """
    try:
        parallel = Parallel(
            expert_axis="expert",
            data_axes="data",
            fsdp_axes="data" if options.fsdp else (),
            tensor_axis="tensor",
            transport=options.transport,
        )
    except ValueError as error:
        raise RunError(f"--{error}") from None

    def make(seed: int) -> tuple[nnx.GraphDef, nnx.State]:
        layer = MoE(D, F, E, K, aux_loss_coeff=0.01, parallel=parallel, rngs=nnx.Rngs(seed))
        return nnx.split(layer, nnx.Param)

    optimizer = optax.adam(1e-2)

    def begin() -> tuple[nnx.State, optax.OptState]:
        params = make(0)[1]
        return params, optimizer.init(params)

    @jax.jit
    def take_step(state, teacher, x):
        params, opt_state = state
        target = nnx.merge(graph, teacher)(x).output

        def loss(params):
            result = nnx.merge(graph, params)(x)
            return jnp.mean(jnp.square(result.output - target)) + result.aux_loss

        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return (optax.apply_updates(params, updates), opt_state), value

    with jax.set_mesh(mesh):
        graph, teacher = make(1)
        state = begin()
        # The optimiser's counter has no sharding of its own and is replicated.
        replicated = NamedSharding(mesh, PartitionSpec())
        state = jax.tree.map(lambda a: a if a.ndim else jax.device_put(a, replicated), state)
        done = 0
        if options.checkpoint is not None:
            checkpoints = Checkpoints(
                options.checkpoint, f"--checkpoint: got {options.checkpoint}", "Another --checkpoint starts over."
            )
            if checkpoints.newest() is not None:
                # Arrays are read in this mesh's shardings, independent of the mesh that wrote them.
                shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
                done, restored = checkpoints.restore(lambda _: dict(state=shapes))
                state = restored.state
            if done > options.steps:
                raise RunError(f"--steps: got {options.steps}, expected at least {done}, the steps in --checkpoint")
        tokens = NamedSharding(mesh, PartitionSpec(("data", "expert")))
        for step in range(done, options.steps):
            state, loss = take_step(state, teacher, jax.device_put(batch(step), tokens))
            if jax.process_index() == 0:
                print(f"step {step} loss {float(loss):.6f}", flush=True)
        if options.checkpoint is not None:
            checkpoints.save(options.steps, state=state)
            checkpoints.close()


if __name__ == "__main__":
    sys.exit(run_main("expert_parallel", lambda: run(OPTIONS)))
