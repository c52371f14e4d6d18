"""Checkpoints in a folder: a save that fails costs no other one, and one that can't be read is passed over."""

import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from run_error import RunError, as_run_error, cause

#: The newest of these are kept.
KEPT = 2
#: Begins the name of one that could not be read.
DAMAGED = "damaged_"


class Checkpoints:
    """The checkpoints of one run, each under the number of its step.

    One appears under its name only when it is whole, and older ones go only after that: a process killed in between, or
    a disk that is full, costs the one being written and no other.

    Args:
      folder: where they are; made if it is not there.
      option: the option that `folder` comes from and its value, as messages begin.
      advice: what the user can do who has no whole checkpoint; ends messages.

    Raises:
      RunError: there can't be such a folder.
    """

    def __init__(self, folder: Path, option: str, advice: str):
        self.folder, self._advice = folder.resolve(), advice
        # What goes wrong is told by us, in one line.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        with as_run_error(f"{option}, expected a folder to write to", Exception):
            self.folder.mkdir(parents=True, exist_ok=True)
            options = ocp.CheckpointManagerOptions(
                max_to_keep=KEPT, enable_async_checkpointing=False, cleanup_tmp_directories=True
            )
            self._manager = ocp.CheckpointManager(self.folder, options=options)

    def close(self) -> None:
        """Ends the manager's threads."""
        self._manager.close()

    def newest(self) -> int | None:
        """The step of the newest checkpoint, whole or not; None: there is none."""
        return self._manager.latest_step()

    def clear(self) -> None:
        """Removes all, the damaged ones too."""
        for step in self._manager.all_steps():
            self._manager.delete(step)
        for damaged in self.folder.glob(DAMAGED + "*"):
            shutil.rmtree(damaged)

    def save(self, step: int, **items: Any) -> None:
        """Writes a checkpoint and returns when it is complete on disk; one of the same step is left as it is.

        Args:
          items: trees of arrays, each under a name of its own.

        Raises:
          RunError: it could not be written; says which one is there.
        """
        before = self.newest()
        if step == before:
            return
        if before is None:
            after = "; none was saved before"
        else:
            after = f"; that of step {before} is whole, the same command goes on from there"
        with as_run_error(f"could not save the checkpoint of step {step} in {self.folder}", Exception, after):
            trees = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
            self._manager.save(step, args=ocp.args.Composite(**trees))

    def restore(self, items_of: Callable[[int], dict[str, Any]]) -> tuple[int, Any]:
        """Reads the newest checkpoint that is whole; there must be one of some kind.

        Newer ones, which can't be read, are renamed, so that their steps can be saved again, and named in a line.

        Args:
          items_of: the items of a step's checkpoint as trees of arrays or jax.ShapeDtypeStruct: what is read into them.

        Returns:
          (its step, the items as attributes).

        Raises:
          RunError: none is whole; or in one of several processes, which can't know what the others could read: the
            newest is not.
        """
        damaged: dict[int, str] = {}
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in steps if jax.process_count() == 1 else steps[:1]:
            try:
                trees = {name: ocp.args.StandardRestore(tree) for name, tree in items_of(step).items()}
                restored = self._manager.restore(step, args=ocp.args.Composite(**trees))
            except Exception as error:  # Orbax and TensorStore raise whatever they come across.
                damaged[step] = cause(error)
                continue
            for other, why in damaged.items():
                print(
                    f"The checkpoint of step {other} can't be read ({why}) and is {self._put_aside(other)} now. "
                    f"Going on from that of step {step}.",
                    file=sys.stderr,
                )
            return step, restored
        told = "; ".join(f"step {step}: {why}" for step, why in damaged.items())
        advice = self._advice
        if len(damaged) < len(steps):
            advice = f"One process alone would try the older ones. {advice}"
        raise RunError(f"could not read any checkpoint in {self.folder} ({told}). {advice}")

    def _put_aside(self, step: int) -> Path:
        """Renames the checkpoint of that step; returns its path."""
        path = self.folder / f"{DAMAGED}{step}"
        with as_run_error(f"could not rename the damaged checkpoint of step {step} in {self.folder}"):
            if path.exists():
                shutil.rmtree(path)
            (self.folder / str(step)).rename(path)
        self._manager.reload()
        return path
