"""What a run keeps on disk: the training state and history in Orbax checkpoints, and the configuration beside them."""

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

#: Everything that a run writes to its folder, and so all that `clear` removes.
CHECKPOINTS, CONFIG = "checkpoints", "config.json"
LOSS_CURVE, LOAD_MAP, SAMPLE, SUMMARY = "loss.png", "expert_load.png", "sample.txt", "summary.json"


@dataclasses.dataclass
class History:
    """What happened at each step so far.

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
      path: the folder; made if it is not there.

    Raises:
      RunError: there can't be such a folder.
    """

    def __init__(self, path: Path):
        self.path = path.resolve()
        self._checkpoints = Checkpoints(self.path / CHECKPOINTS, f"--out: got {path}", "--fresh begins anew.")

    def close(self) -> None:
        """Ends the threads that save."""
        self._checkpoints.close()

    def clear(self) -> None:
        """Removes what a run wrote here, and nothing else."""
        with as_run_error(f"--fresh: could not remove the earlier run in {self.path}"):
            self._checkpoints.clear()
            for name in (CONFIG, LOSS_CURVE, LOAD_MAP, SAMPLE, SUMMARY):
                (self.path / name).unlink(missing_ok=True)

    def saved_step(self) -> int | None:
        """Steps done in the newest checkpoint, whole or not; None: there is none."""
        return self._checkpoints.newest()

    def check_config(self, config: dict[str, Any]) -> None:
        """Compares `config` with that of the run whose checkpoint is here.

        Raises:
          RunError: they differ, and the message names every difference; or the file can't be read.
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
                "Give those, another --out, or --fresh to begin anew."
            )

    def options(self) -> Options:
        """The options of the run whose checkpoint is here, as far as they decide its model; others are the defaults.

        Raises:
          RunError: the file can't be read.
        """
        saved = self._config()
        saved.pop("corpus", None)  # a fingerprint of the text, not its folder
        with as_run_error(f"{self.path / CONFIG}: expected the options of a run", (TypeError, ValueError)):
            return Options(**saved)

    def _config(self) -> dict[str, Any]:
        """What `write_config` has written."""
        file, advice = self.path / CONFIG, "; --fresh begins anew"
        with as_run_error(f"{file}: expected the options of the run whose checkpoint is there", Exception, advice):
            saved = json.loads(file.read_text())
            if not isinstance(saved, dict):
                raise TypeError(f"got {type(saved).__name__}")
        return saved

    def write_config(self, config: dict[str, Any]) -> None:
        """Writes what `check_config` compares, whole or not at all."""
        file = self.path / CONFIG
        partial = file.with_suffix(".partial")
        with as_run_error(f"--out: could not write {file}"):
            partial.write_text(json.dumps(config, indent=2) + "\n")
            os.replace(partial, file)

    def save(self, state: TrainState, history: History) -> None:
        """Writes a checkpoint and returns when it is complete on disk; nothing before the first step.

        Raises:
          RunError: it could not be written.
        """
        if int(state.step) == 0:
            return
        self._checkpoints.save(int(state.step), state=state, history=history.arrays())

    def restore(self, state: TrainState, num_loads: tuple[int, int]) -> tuple[TrainState, History]:
        """Reads the newest checkpoint that is whole.

        Args:
          state: shapes, dtypes and shardings to read, whatever mesh has written them.
          num_loads: (layers, E).

        Raises:
          RunError: none is whole.
        """

        def items_of(step: int) -> dict[str, Any]:
            steps = {name: np.empty(step) for name in ("train_bits", "held_out_bits", "seconds")}
            return dict(state=state, history={**steps, "loads": np.empty((step, *num_loads), np.int32)})

        _, restored = self._checkpoints.restore(items_of)
        return restored.state, History(**{name: list(values) for name, values in restored.history.items()})
