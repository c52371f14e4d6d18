"""What a run keeps on disk: the training state and history in Orbax checkpoints, and the configuration beside them."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from byte_lm.errors import RunError
from byte_lm.step import TrainState

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
    """

    def __init__(self, path: Path):
        self.path = path.resolve()
        self.path.mkdir(parents=True, exist_ok=True)
        logging.getLogger("absl").setLevel(logging.WARNING)
        self._manager = ocp.CheckpointManager(
            self.path / CHECKPOINTS,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=2, enable_async_checkpointing=False, cleanup_tmp_directories=True
            ),
        )

    def close(self) -> None:
        """Ends the checkpoint manager's threads."""
        self._manager.close()

    def clear(self) -> None:
        """Removes what a run wrote here, and nothing else."""
        for step in self._manager.all_steps():
            self._manager.delete(step)
        for name in (CONFIG, LOSS_CURVE, LOAD_MAP, SAMPLE, SUMMARY):
            (self.path / name).unlink(missing_ok=True)

    def saved_step(self) -> int | None:
        """Steps done in the newest checkpoint; None: there is none."""
        return self._manager.latest_step()

    def check_config(self, config: dict[str, Any]) -> None:
        """Compares `config` with that of the run whose checkpoint is here.

        Raises:
          RunError: they differ; the message names every difference.
        """
        saved = json.loads((self.path / CONFIG).read_text())
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

    def write_config(self, config: dict[str, Any]) -> None:
        """Writes what `check_config` compares."""
        (self.path / CONFIG).write_text(json.dumps(config, indent=2) + "\n")

    def save(self, state: TrainState, history: History) -> None:
        """Writes a checkpoint and returns when it is complete on disk; one of the same step is left as it is.

        A checkpoint appears under its name only when it is whole: a process killed in between loses only that one.
        """
        step = int(state.step)
        if step == 0 or step == self.saved_step():
            return
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), history=ocp.args.StandardSave(history.arrays()))
        self._manager.save(step, args=items)

    def restore(self, state: TrainState, num_loads: tuple[int, int]) -> tuple[TrainState, History]:
        """Reads the newest checkpoint.

        Args:
          state: shapes, dtypes and shardings to read, whatever mesh has written them.
          num_loads: (layers, E).
        """
        step = self.saved_step()
        steps = {name: np.empty(step) for name in ("train_bits", "held_out_bits", "seconds")}
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(state),
            history=ocp.args.StandardRestore({**steps, "loads": np.empty((step, *num_loads), np.int32)}),
        )
        restored = self._manager.restore(step, args=items)
        return restored.state, History(**{name: list(values) for name, values in restored.history.items()})
