"""The files of a run: Orbax checkpoints of the training state and history, and the configuration beside them."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from byte_lm.options import Options
from byte_lm.step import TrainState
from checkpoints import Checkpoints
from run_error import RunError, as_run_error

#: The files that a run writes to its folder; `clear` removes exactly these.
CHECKPOINTS, CONFIG = "checkpoints", "config.json"
LOSS_CURVE, LOAD_MAP, SAMPLE, SUMMARY = "loss.png", "expert_load.png", "sample.txt", "summary.json"


@dataclasses.dataclass
class History:
    """Measurements of every step so far.

    Attributes:
      train_bits: loss of the step's batch in bits per byte.
      held_out_bits: bits per byte on a few held-out windows after the step, NaN where not measured.
      seconds: duration of the step.
      loads: int32 [layers, E] each, bytes routed to each expert.
    """

    train_bits: list[float] = dataclasses.field(default_factory=list)
    held_out_bits: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    loads: list[np.ndarray] = dataclasses.field(default_factory=list)

    def append(self, train_bits: float, held_out_bits: float, seconds: float, load: np.ndarray) -> None:
        """Adds one step."""
        self.train_bits.append(train_bits)
        self.held_out_bits.append(held_out_bits)
        self.seconds.append(seconds)
        self.loads.append(load)

    def arrays(self) -> dict[str, np.ndarray]:
        """The fields as arrays whose first axis is the step."""
        floats = {name: np.array(getattr(self, name)) for name in ("train_bits", "held_out_bits", "seconds")}
        return {**floats, "loads": np.array(self.loads, np.int32)}


class RunFolder:
    """The folder of one run.

    Args:
      path: the folder; created if missing.

    Raises:
      RunError: the folder cannot be created.
    """

    def __init__(self, path: Path):
        self.path = path.resolve()
        self._checkpoints = Checkpoints(self.path / CHECKPOINTS, f"--out: got {path}", "--fresh starts over.")

    def close(self) -> None:
        """Ends the threads that save."""
        self._checkpoints.close()

    def clear(self) -> None:
        """Removes the files of a run, and nothing else."""
        with as_run_error(f"--fresh: could not remove the earlier run in {self.path}"):
            self._checkpoints.clear()
            for name in (CONFIG, LOSS_CURVE, LOAD_MAP, SAMPLE, SUMMARY):
                (self.path / name).unlink(missing_ok=True)

    def saved_step(self) -> int | None:
        """The step of the newest checkpoint, readable or not; None without a checkpoint."""
        return self._checkpoints.newest()

    def check_config(self, config: dict[str, Any]) -> None:
        """Compares `config` with the configuration of the run in this folder.

        Raises:
          RunError: they differ (the message names every difference), or the file cannot be read.
        """
        saved = self._config()
        different = [
            f"{name}: got {value}, expected {saved.get(name)}"
            for name, value in config.items()
            if saved.get(name) != value
        ]
        if different:
            raise RunError(
                f"the run in {self.path} was made with other options ({'; '.join(different)}). "
                "Use those options, another --out, or --fresh to start over."
            )

    def options(self) -> Options:
        """The options of the run in this folder that determine its model; others have their defaults.

        Raises:
          RunError: the file cannot be read.
        """
        saved = self._config()
        saved.pop("corpus", None)  # a fingerprint of the text, not its folder
        with as_run_error(f"{self.path / CONFIG}: expected the options of a run", (TypeError, ValueError)):
            return Options(**saved)

    def _config(self) -> dict[str, Any]:
        """The contents of the file that `write_config` wrote."""
        file, advice = self.path / CONFIG, "; --fresh starts over"
        with as_run_error(f"{file}: expected the options of the run whose checkpoint is there", Exception, advice):
            saved = json.loads(file.read_text())
            if not isinstance(saved, dict):
                raise TypeError(f"got {type(saved).__name__}")
        return saved

    def write_config(self, config: dict[str, Any]) -> None:
        """Writes the configuration for `check_config`, atomically."""
        file = self.path / CONFIG
        partial = file.with_suffix(".partial")
        with as_run_error(f"--out: could not write {file}"):
            partial.write_text(json.dumps(config, indent=2) + "\n")
            os.replace(partial, file)

    def save(self, state: TrainState, history: History) -> None:
        """Writes a checkpoint and returns when it is complete on disk; does nothing before the first step.

        Raises:
          RunError: the checkpoint could not be written.
        """
        if int(state.step) == 0:
            return
        self._checkpoints.save(int(state.step), state=state, history=history.arrays())

    def restore(self, state: TrainState, num_loads: tuple[int, int]) -> tuple[TrainState, History]:
        """Reads the newest complete checkpoint.

        Args:
          state: shapes, dtypes and shardings to read, independent of the mesh that wrote them.
          num_loads: (layers, E).

        Raises:
          RunError: no checkpoint is complete.
        """

        def items_of(step: int) -> dict[str, Any]:
            steps = {name: np.empty(step) for name in ("train_bits", "held_out_bits", "seconds")}
            return dict(state=state, history={**steps, "loads": np.empty((step, *num_loads), np.int32)})

        _, restored = self._checkpoints.restore(items_of)
        return restored.state, History(**{name: list(values) for name, values in restored.history.items()})
