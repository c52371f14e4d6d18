"""The run: trains from the newest checkpoint, which any mesh may have written, to the last step."""

import time
from pathlib import Path

import jax

from byte_lm.data import load_corpus, training_batch
from checkpoints import Checkpoints
from jax_train.config import Config
from jax_train.step import Program, TrainState
from launch import join
from mesh import make_mesh, parse_mesh, request_devices
from run_error import RunError


def run(config: Config) -> None:
    """Creates the mesh and trains on it.

    Raises:
      RunError: the devices, the corpus or a checkpoint do not fit the options.
    """
    sizes, joined = parse_mesh(config.mesh), join()
    if not config.mesh:
        if joined:
            raise RunError("--mesh: got none with several processes, expected their devices")
        train(config)
        return
    if not joined:
        request_devices(sizes)
    try:
        mesh = make_mesh(sizes)
    except ValueError as error:
        raise RunError(str(error)) from None
    with jax.set_mesh(mesh):
        train(config)


def train(config: Config) -> TrainState:
    """Trains on the mesh of the context, or on one device without --mesh; returns the last state.

    Raises:
      RunError: the corpus is too small, or a checkpoint cannot be read or written, or has more steps than --steps.
    """
    text = load_corpus(config.corpus).train
    if len(text) < config.max_target_length + 2:
        raise RunError(f"--corpus: got {len(text)} bytes, expected at least {config.max_target_length + 2}")
    program, checkpoints, state, done = Program(config), None, None, 0
    if config.base_output_directory:
        folder = config.base_output_directory
        option = f"--base-output-directory: got {folder}"
        checkpoints = Checkpoints(Path(folder), option, "Another --base-output-directory starts over.")
        if checkpoints.newest() is not None:
            # Arrays are read in the shardings of this mesh, whichever mesh wrote them.
            done, restored = checkpoints.restore(lambda _: dict(state=program.shapes))
            state = restored.state
    if done > config.steps:
        raise RunError(f"--steps: got {config.steps}, expected at least {done}, the steps of the checkpoint")
    state = program.init() if state is None else TrainState(*state)
    last, tokens = (done, time.perf_counter()), config.global_batch_size * config.max_target_length
    for step in range(done, config.steps):
        batch = training_batch(text, step, config.global_batch_size, config.max_target_length, config.init_weights_seed)
        state, bits = program.compiled_step(state, program.put(batch))
        if (step + 1) % config.log_period == 0 or step + 1 == config.steps:
            bits, now = float(bits), (step + 1, time.perf_counter())
            rate, last = tokens * (now[0] - last[0]) / (now[1] - last[1]), now
            if jax.process_index() == 0:
                print(f"step {step + 1} bits per byte {bits:.5f} bytes per second {rate:.0f}", flush=True)
        if checkpoints is not None and ((step + 1) % config.checkpoint_period == 0 or step + 1 == config.steps):
            checkpoints.save(step + 1, state=state)
    if checkpoints is not None:
        checkpoints.close()
    return state
