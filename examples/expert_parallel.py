"""Trains one Mixture-of-Experts layer on a mesh of devices, of one process or of several.

    python examples/expert_parallel.py --mesh expert=2,data=2
    python examples/launch.py --processes 4 examples/expert_parallel.py --mesh expert=2,data=2 --checkpoint /tmp/layer

The layer learns to imitate a frozen random one. Batches and initial weights are the same on every mesh, and so are
losses, up to rounding. With --checkpoint a run goes on from the newest one in the folder, whatever mesh has written it.
"""

import argparse
import logging
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from anabranch.jax import Parallel
from anabranch.jax.nnx import MoE
from launch import join
from mesh import ask_for_devices, make_mesh, parse_mesh

D, F, E, K, BATCH, SEQ = 32, 64, 8, 2, 8, 16


def batch(step: int) -> np.ndarray:
    """The tokens of a step, the same wherever it runs."""
    return np.random.default_rng(step).standard_normal((BATCH, SEQ, D)).astype(np.float32)


def main() -> int:
    """Trains and prints one line a step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", default="", help="for example expert=2,data=2, with axes data, expert, tensor")
    parser.add_argument("--transport", default="auto", help="auto, ring, all_to_all or ragged")
    parser.add_argument("--fsdp", action="store_true", help="divide matrices over the data axis, too")
    parser.add_argument("--steps", type=int, default=10, help="training steps in all")
    parser.add_argument("--checkpoint", type=pathlib.Path, help="folder to go on from and to save to")
    options = parser.parse_args()
    try:
        sizes = parse_mesh(options.mesh)
        if not join():
            ask_for_devices(sizes)
        mesh = make_mesh(sizes)
    except ValueError as error:
        parser.error(str(error))
    parallel = Parallel(
        expert_axis="expert",
        data_axes="data",
        fsdp_axes="data" if options.fsdp else (),
        tensor_axis="tensor",
        transport=options.transport,
    )

    def make(seed: int) -> tuple[nnx.GraphDef, nnx.State]:
        layer = MoE(D, F, E, K, aux_loss_coeff=0.01, parallel=parallel, rngs=nnx.Rngs(seed))
        return nnx.split(layer, nnx.Param)

    optimizer = optax.adam(1e-2)

    def begin() -> tuple[nnx.State, optax.OptState]:
        params = make(0)[1]
        return params, optimizer.init(params)

    @jax.jit
    def train(state, teacher, x):
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
        # What has no sharding of its own, the optimiser's counter, is on all devices.
        everywhere = NamedSharding(mesh, PartitionSpec())
        state = jax.tree.map(lambda a: a if a.ndim else jax.device_put(a, everywhere), state)
        done = 0
        if options.checkpoint is not None:
            logging.getLogger("absl").setLevel(logging.ERROR)
            manager = ocp.CheckpointManager(options.checkpoint.resolve())
            if (newest := manager.latest_step()) is not None:
                # Arrays are read into the shards that this mesh wants, whatever mesh has written them.
                shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
                state, done = manager.restore(newest, args=ocp.args.StandardRestore(shapes)), newest
        tokens = NamedSharding(mesh, PartitionSpec(("data", "expert")))
        for step in range(done, options.steps):
            state, loss = train(state, teacher, jax.device_put(batch(step), tokens))
            if jax.process_index() == 0:
                print(f"step {step} loss {float(loss):.6f}", flush=True)
        if options.checkpoint is not None and options.steps > done:
            manager.save(options.steps, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()
            manager.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
