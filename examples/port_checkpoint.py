"""Trains one layer of a safetensors checkpoint for one step and writes the checkpoint again.

    pip install '.[jax,checkpoints]'    # in the folder of the repository
    python examples/port_checkpoint.py

The program creates the file with two small layers of gpt-oss. It reads layer 1 into arrays for `moe`, which accepts the
checkpoint's layouts, runs one step of gradient descent, and writes all tensors under their names again.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from run_error import needs, run_main

if __name__ == "__main__":
    # This precedes imports that take seconds and may fail.
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()

with needs("jax,checkpoints"):
    import jax
    import jax.numpy as jnp
    import numpy as np
    from safetensors import safe_open
    from safetensors.numpy import save_file

    from anabranch.checkpoints import FAMILIES, Block, load, store
    from anabranch.jax import moe

FAMILY = FAMILIES["gpt_oss"]
E, D, F, K, T = 16, 64, 48, 4, 256


def prefix(layer: int) -> str:
    """The prefix of the names of a layer's block."""
    return f"model.layers.{layer}.mlp."


def write_checkpoint(path: Path, layers: int) -> None:
    """Writes random layers in the form of a model's checkpoint."""
    rng = np.random.default_rng(0)
    shapes = {
        "router.weight": (E, D),
        "router.bias": (E,),
        "experts.gate_up_proj": (E, D, 2 * F),
        "experts.gate_up_proj_bias": (E, 2 * F),
        "experts.down_proj": (E, F, D),
        "experts.down_proj_bias": (E, D),
    }
    tensors = {
        prefix(layer) + name: rng.normal(0, D**-0.5, shape).astype(np.float32)
        for layer in range(layers)
        for name, shape in shapes.items()
    }
    save_file(tensors, path)


def read(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a file."""
    with safe_open(path, framework="np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def loss(block: Block, x: jax.Array, target: jax.Array) -> jax.Array:
    """The squared distance of the layer's output to a target."""
    y = moe(x, **block.router, **block.experts, **FAMILY.options, topk=K).output
    return jnp.mean((y - target) ** 2)


def train_layer(source: Path, destination: Path, layer: int) -> tuple[Block, float, float]:
    """Runs one training step on one layer of a checkpoint.

    Returns:
      (the layer's new arrays, its loss before, its loss after).
    """
    with safe_open(source, framework="np") as file:
        block = load(FAMILY, file, prefix(layer))
    x, target = jax.random.normal(jax.random.key(0), [2, T, D])
    before, gradients = jax.jit(jax.value_and_grad(loss))(block, x, target)
    block = jax.tree.map(lambda array, gradient: array - gradient, block, gradients)
    after = loss(block, x, target)
    trained = {name: np.ascontiguousarray(tensor) for name, tensor in store(FAMILY, block, prefix(layer)).items()}
    save_file(read(source) | trained, destination)
    return block, float(before), float(after)


def main() -> None:
    """Creates a checkpoint, trains its layer 1, and checks the written file."""
    with tempfile.TemporaryDirectory() as folder:
        source, destination = Path(folder, "model.safetensors"), Path(folder, "trained.safetensors")
        write_checkpoint(source, layers=2)
        block, before, after = train_layer(source, destination, layer=1)
        old, new = read(source), read(destination)
        again = load(FAMILY, new, prefix(1))
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), again, block)
    others = [name for name in old if not name.startswith(prefix(1))]
    if not (jax.tree.all(same) and old.keys() == new.keys() and after < before):
        raise SystemExit("the layer read again is not the trained one")
    if any(old[name].tobytes() != new[name].tobytes() for name in others):
        raise SystemExit("a tensor of another layer has changed")
    print(
        f"Checked: the loss of layer 1 fell from {before:.4f} to {after:.4f}; its {len(old) - len(others)} tensors "
        f"came back from the new file bit for bit, the other {len(others)} are those of the old one."
    )


if __name__ == "__main__":
    sys.exit(run_main("port_checkpoint", main))
