"""The run: reads the text, trains with checkpoints until done or interrupted, then reports."""

import contextlib
import dataclasses
import math
import sys
import time
from pathlib import Path

import jax
import numpy as np

from byte_lm import report
from byte_lm.checkpoint import CONFIG, History, RunFolder
from byte_lm.data import Corpus, held_out_starts, load_corpus, training_batch
from byte_lm.interrupt import StopRequest
from byte_lm.options import Options
from byte_lm.sampling import continued
from byte_lm.step import Program, TrainState
from byte_lm.trigram import Trigram
from mesh import make_mesh, parse_mesh
from progress import Progress
from run_error import RunError, as_run_error

#: Number of held-out measurements per run for the loss curve, and windows per measurement.
MEASUREMENTS, MEASURED_WINDOWS = 10, 128


def run(options: Options, start: str = "auto") -> "Run":
    """Trains to `options.steps` steps or until interrupted, and writes the report.

    Args:
      options: the options of the run.
      start: "auto" resumes from a checkpoint if there is one, "resume" requires one, "fresh" starts over.

    Raises:
      RunError: the corpus is too small, devices are missing, the checkpoint in the folder does not match the options or
        cannot be read, or a file cannot be written.
    """
    corpus = load_corpus(options.corpus)
    shortest = min(len(corpus.train), len(corpus.held_out))
    if shortest < options.seq + 2:
        raise RunError(f"corpus: got {shortest} bytes on one side of the split, expected at least {options.seq + 2}")
    try:
        mesh = jax.set_mesh(make_mesh(parse_mesh(options.mesh))) if options.mesh else contextlib.nullcontext()
    except ValueError as error:
        raise RunError(str(error)) from None
    with mesh:
        return _run(options, start, corpus)


def _run(options: Options, start: str, corpus: Corpus) -> "Run":
    folder = RunFolder(options.out)
    try:
        current = Run.begin(options, start, corpus, folder)
        with StopRequest() as stop:
            current.train(stop)
        current.finish()
    finally:
        folder.close()
    return current


def _base(options: Options) -> TrainState:
    """The newest state of the run in the folder --base.

    Raises:
      RunError: there is none, or its model is another.
    """
    path = Path(options.base)
    if not options.base or not (path / CONFIG).is_file():
        raise RunError(f"--base: got {options.base or 'no folder'}, expected the --out folder of a run without --lora")
    folder = RunFolder(path)
    try:
        base = folder.options()
        for field in dataclasses.fields(options):
            ours = 0 if field.name == "lora" else getattr(options, field.name)
            theirs = getattr(base, field.name)
            if field.metadata["group"] in ("model", "experts") and ours != theirs:
                name = field.name.replace("_", "-")
                raise RunError(f"--{name}: got {ours}, expected {theirs} as in the run in {path}")
        base = dataclasses.replace(base, mesh=options.mesh)
        return folder.restore(Program.of(base).shapes, (base.layers, base.experts))[0]
    finally:
        folder.close()


@dataclasses.dataclass
class Run:
    """A run in progress.

    Attributes:
      options, corpus, folder, program: the run's inputs.
      state: the training state after the steps done so far.
      history: the measurements of these steps.
    """

    options: Options
    corpus: Corpus
    folder: RunFolder
    program: Program
    state: TrainState
    history: History

    @classmethod
    def begin(cls, options: Options, start: str, corpus: Corpus, folder: RunFolder) -> "Run":
        """A run before its first step or at its newest checkpoint; prints the introduction."""
        program = Program.of(options)
        shapes = program.shapes
        config = {**options.fixed(), "corpus": corpus.fingerprint}
        if start == "fresh":
            folder.clear()
        if folder.saved_step() is None:
            if start == "resume":
                raise RunError(f"--resume: got no checkpoint in {folder.path}, expected one")
            folder.write_config(config)
            state, history = None, History()
        else:
            folder.check_config(config)
            state, history = folder.restore(shapes, (options.layers, options.experts))
        done = len(history.train_bits)
        if done > options.steps:
            raise RunError(f"--steps: got {options.steps}, expected at least {done}, the steps in {folder.path}")
        if state is None:
            state = program.adapt(_base(options)) if options.lora else program.init()
        print(report.introduction(options, corpus, shapes, done), flush=True)
        return cls(options, corpus, folder, program, state, history)

    @property
    def done(self) -> int:
        """Steps done."""
        return len(self.history.train_bits)

    def train(self, stop: StopRequest) -> None:
        """Runs the remaining steps until `stop` is requested; saves periodically and at the end."""
        options = self.options
        starts = held_out_starts(self.corpus.held_out, options.seq, MEASURED_WINDOWS)
        measure_every = math.ceil(options.steps / MEASUREMENTS)
        with Progress(total=options.steps, initial=self.done, desc="compiling", file=sys.stderr) as progress:
            while self.done < options.steps and not stop.requested:
                measure = (self.done + 1) % measure_every == 0
                self.step(starts if measure else None)
                progress.set_description_str("training", refresh=False)
                progress.set_postfix_str(report.progress_line(options, self.history), refresh=False)
                progress.update()
                if self.done % options.save_every == 0:
                    self.folder.save(self.state, self.history)
        self.folder.save(self.state, self.history)

    def step(self, measured: np.ndarray | None) -> None:
        """Runs one step; then measures the held-out windows at `measured`, if given."""
        options, text = self.options, self.corpus.train
        batch = training_batch(text, self.done, options.batch, options.seq, options.seed)
        began = time.perf_counter()
        self.state, metrics = self.program.train_step(self.state, batch)
        train_bits, loads = float(metrics.train_bits), np.asarray(metrics.loads)
        seconds = time.perf_counter() - began
        held_out_bits = math.nan
        if measured is not None:
            held_out_bits = self.program.evaluate(self.state, self.corpus.held_out, measured)
        self.history.append(train_bits, held_out_bits, seconds, loads)

    def finish(self) -> None:
        """Writes figures and summary, and for a finished run the held-out comparison and the sample."""
        finished = self.done == self.options.steps
        if finished:
            print("Measuring model and trigram on held-out files, and writing a sample", flush=True)
        comparison = self.compare() if finished else None
        sample = self.sample() if finished else None
        if self.done:
            with as_run_error(f"could not write the report of {self.done} steps, all saved"):
                report.write(self.options, self.corpus, self.state, self.history, comparison, sample)
        if not finished:
            print(f"Stopped after {self.done} of {self.options.steps} steps, all saved. The same command resumes.")

    def compare(self) -> report.Comparison:
        """Compares the model and the trigram, fitted on the same training text, on the same held-out bytes."""
        seq, text = self.options.seq, self.corpus.held_out
        starts = held_out_starts(text, seq, max(1, self.options.held_out_bytes // seq))
        positions = (starts[:, None] + np.arange(1, seq + 1)).ravel()
        return report.Comparison(
            bytes=len(positions),
            model=self.program.evaluate(self.state, text, starts),
            trigram=Trigram(self.corpus.train).bits_per_byte(text, positions),
        )

    def sample(self) -> str:
        """The prompt and the model's continuation."""
        options = self.options
        return continued(
            self.program, self.state, options.prompt, options.sample_bytes, options.temperature, options.seed
        )
