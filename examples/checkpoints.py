"""Checkpoints in a folder: a failed save never damages others, and unreadable checkpoints are skipped."""

import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from run_error import RunError, as_run_error, cause

#: Number of checkpoints to keep.
KEPT = 2
#: Prefix of the name of an unreadable checkpoint.
DAMAGED = "damaged_"


class Checkpoints:
    """The checkpoints of one run, each under the number of its step.

    A checkpoint gets its name only when it is complete, and older ones are deleted after that. So a killed process or a
    full disk costs only the checkpoint in progress.

    Args:
      folder: the folder; created if missing.
      option: the option that sets `folder`, and its value; starts messages.
      advice: what to do without a complete checkpoint; ends messages.

    Raises:
      RunError: the folder cannot be created.
    """

    def __init__(self, folder: Path, option: str, advice: str):
        self.folder, self._advice = folder.resolve(), advice
        # Errors are reported by this class in one line.
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
        """The step of the newest checkpoint, readable or not; None without a checkpoint."""
        return self._manager.latest_step()

    def clear(self) -> None:
        """Removes all checkpoints, including damaged ones."""
        for step in self._manager.all_steps():
            self._manager.delete(step)
        for damaged in self.folder.glob(DAMAGED + "*"):
            shutil.rmtree(damaged)

    def save(self, step: int, **items: Any) -> None:
        """Writes a checkpoint and returns when it is complete on disk; keeps an existing one of the same step.

        Args:
          items: trees of arrays, each under a name of its own.

        Raises:
          RunError: it could not be written; the message names the newest complete one.
        """
        before = self.newest()
        if step == before:
            return
        if before is None:
            after = "; there is no earlier one"
        else:
            after = f"; the checkpoint of step {before} is complete, and the same command resumes from it"
        with as_run_error(f"could not save the checkpoint of step {step} in {self.folder}", Exception, after):
            trees = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
            self._manager.save(step, args=ocp.args.Composite(**trees))

    def restore(self, items_of: Callable[[int], dict[str, Any]]) -> tuple[int, Any]:
        """Reads the newest complete checkpoint; at least one has to exist.

        Newer, unreadable ones are renamed, so that their steps can be saved again, and reported in a line.

        Args:
          items_of: returns the items of a step's checkpoint as trees of arrays or jax.ShapeDtypeStruct, the read
            targets.

        Returns:
          (the checkpoint's step, the items as attributes).

        Raises:
          RunError: no checkpoint is complete. With several processes: the newest is not complete, because a process
            does not know which ones the others can read.
        """
        damaged: dict[int, str] = {}
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in steps if jax.process_count() == 1 else steps[:1]:
            try:
                trees = {name: ocp.args.StandardRestore(tree) for name, tree in items_of(step).items()}
                restored = self._manager.restore(step, args=ocp.args.Composite(**trees))
            except Exception as error:  # Orbax and TensorStore raise many types.
                damaged[step] = cause(error)
                continue
            for other, why in damaged.items():
                renamed = self._rename_damaged(other)
                print(
                    f"The checkpoint of step {other} cannot be read ({why}) and was renamed to {renamed}. "
                    f"Resuming from step {step}.",
                    file=sys.stderr,
                )
            return step, restored
        reasons = "; ".join(f"step {step}: {why}" for step, why in damaged.items())
        advice = self._advice
        if len(damaged) < len(steps):
            advice = f"A single process would try the older ones. {advice}"
        raise RunError(f"could not read any checkpoint in {self.folder} ({reasons}). {advice}")

    def _rename_damaged(self, step: int) -> Path:
        """Renames the checkpoint of that step; returns its path."""
        path = self.folder / f"{DAMAGED}{step}"
        with as_run_error(f"could not rename the damaged checkpoint of step {step} in {self.folder}"):
            if path.exists():
                shutil.rmtree(path)
            (self.folder / str(step)).rename(path)
        self._manager.reload()
        return path
