"""Starts or resumes runs, trains them and writes their state: `write_state.py JOBS`, a list in JSON.

A job is [command line options, last step, file for the arrays or null]. Without a file, the run is finished and writes
its report.
"""

import json
import sys

import jax
import numpy as np

from byte_lm.checkpoint import RunFolder
from byte_lm.data import load_corpus
from byte_lm.options import Options, parse
from byte_lm.train import Run
from mesh import make_mesh, parse_mesh, request_devices


class StopAfter:
    """Requests a stop after a number of steps."""

    def __init__(self, run, steps):
        self.run, self.steps = run, steps

    @property
    def requested(self):
        return self.run.done >= self.steps


def arrays_of(run: Run) -> dict[str, np.ndarray]:
    """Every array of the state and of the history by its path; the history's length is the position in the data."""
    state = {
        f"state{jax.tree_util.keystr(path)}": leaf for path, leaf in jax.tree_util.tree_leaves_with_path(run.state)
    }
    history = {f"history.{name}": values for name, values in run.history.arrays().items()}
    return {name: np.asarray(array) for name, array in {**state, **history}.items()}


def do(options: Options, start: str, steps: int, file: str | None) -> None:
    """Runs one job, and writes the arrays after a check of their shardings."""
    folder = RunFolder(options.out)
    run = Run.begin(options, start, load_corpus(options.corpus), folder)
    run.train(StopAfter(run, steps))
    for array, sharding in zip(jax.tree.leaves(run.state), jax.tree.leaves(run.program.shardings), strict=True):
        if not array.sharding.is_equivalent_to(sharding, array.ndim):
            raise ValueError(f"sharding: got {array.sharding}, expected {sharding}")
    if file is None:
        run.finish()
    else:
        np.savez(file, **arrays_of(run))
    folder.close()


def main() -> None:
    """Runs all jobs on the mesh of the first one."""
    jobs = json.loads(sys.argv[1])
    parsed = [(*parse(arguments), steps, file) for arguments, steps, file in jobs]
    sizes = parse_mesh(parsed[0][0].mesh)
    request_devices(sizes)
    with jax.set_mesh(make_mesh(sizes)):
        for job in parsed:
            do(*job)


if __name__ == "__main__":
    main()
