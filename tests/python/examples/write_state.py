"""Begins or resumes a run, trains to --steps, and writes what it then holds: `write_state.py FILE.npz OPTIONS`."""

import sys

import jax
import numpy as np

from byte_lm.checkpoint import RunFolder
from byte_lm.data import load_corpus
from byte_lm.interrupt import StopRequest
from byte_lm.options import parse
from byte_lm.train import Run
from mesh import ask_for_devices, make_mesh, parse_mesh


def arrays_of(run: Run) -> dict[str, np.ndarray]:
    """Every array of the state and of the history, by its place; the history's length is the place in the data."""
    state = {
        f"state{jax.tree_util.keystr(path)}": leaf for path, leaf in jax.tree_util.tree_leaves_with_path(run.state)
    }
    history = {f"history.{name}": values for name, values in run.history.arrays().items()}
    return {name: np.asarray(array) for name, array in {**state, **history}.items()}


def main() -> None:
    """Writes the arrays once each of them is where its sharding says."""
    file, *arguments = sys.argv[1:]
    options, start = parse(arguments)
    ask_for_devices(parse_mesh(options.mesh))
    folder = RunFolder(options.out)
    with jax.set_mesh(make_mesh(parse_mesh(options.mesh))):
        run = Run.begin(options, start, load_corpus(options.corpus), folder)
        run.train(StopRequest())
        for array, sharding in zip(jax.tree.leaves(run.state), jax.tree.leaves(run.program.shardings), strict=True):
            if not array.sharding.is_equivalent_to(sharding, array.ndim):
                raise ValueError(f"sharding: got {array.sharding}, expected {sharding}")
        np.savez(file, **arrays_of(run))
    folder.close()


if __name__ == "__main__":
    main()
