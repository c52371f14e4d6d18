"""Runs a program as several JAX processes on this host, as a cluster runs it on several hosts.

    python examples/launch.py --processes 4 examples/expert_parallel.py --mesh expert=2,data=2
    python examples/launch.py --processes 2 --devices 2 examples/expert_parallel.py --mesh expert=4

Each process gets its rank in the environment, and `join()` reads it. On CPUs a process has `--devices` devices and
communicates over Gloo. With `--gpus` each process has its own GPU, of CUDA_VISIBLE_DEVICES if that is set, and
communicates over NCCL. The output of process 0 is shown immediately, that of another process if it fails.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile

from run_error import run_main

_COORDINATOR, _COUNT, _INDEX = "LAUNCH_COORDINATOR", "LAUNCH_PROCESSES", "LAUNCH_PROCESS"


def num_processes() -> int:
    """The number of processes that `launch.py` started, including this one; 1 without the launcher."""
    return int(os.environ.get(_COUNT, "1"))


def join() -> bool:
    """Joins the processes that `launch.py` started; has to be called before JAX initialises devices.

    Returns:
      Whether there are other processes; False without the launcher.
    """
    if _COORDINATOR not in os.environ:
        return False
    import jax

    jax.distributed.initialize(os.environ[_COORDINATOR], num_processes(), int(os.environ[_INDEX]))
    return True


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
        return port


def _gpus(processes: int) -> list[str]:
    """The GPU of every process in the syntax of CUDA_VISIBLE_DEVICES: those in it, or all if it is not set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in range(processes)]
    gpus = [name.strip() for name in visible.split(",") if name.strip()]
    if len(gpus) < processes:
        raise ValueError(f"CUDA_VISIBLE_DEVICES: got {visible!r}, expected {processes} GPUs, one per process")
    return gpus[:processes]


def launch(command: list[str], processes: int, devices: int, gpus: bool) -> int:
    """Runs Python's `command` in every process; returns the first nonzero exit status, or 0.

    If one process fails, the others are terminated, because they would wait for it.

    Raises:
      ValueError: CUDA_VISIBLE_DEVICES has fewer GPUs than processes.
    """
    own_gpu = _gpus(processes) if gpus else []
    shared = {_COORDINATOR: f"localhost:{_free_port()}", _COUNT: str(processes)}
    running = []
    for index in range(processes):
        environment = {**os.environ, **shared, _INDEX: str(index)}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = own_gpu[index]
        else:
            environment |= {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
        output = None if index == 0 else tempfile.TemporaryFile()
        process = subprocess.Popen([sys.executable, *command], env=environment, stdout=output, stderr=output)
        running.append((process, output))
    status = 0
    waiting = list(range(processes))
    try:
        while waiting and not status:
            for index in list(waiting):
                process, output = running[index]
                try:
                    status = process.wait(timeout=0.1)
                except subprocess.TimeoutExpired:
                    continue
                waiting.remove(index)
                if status:
                    print(f"launch: process {index} ended with status {status}", file=sys.stderr)
                    if output is not None:
                        output.seek(0)
                        sys.stderr.write(output.read().decode(errors="replace"))
                    break
    finally:
        for process, output in running:
            if process.poll() is None:
                process.terminate()
                process.wait()
            if output is not None:
                output.close()
    return status


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line and runs the program."""
    parser = argparse.ArgumentParser(
        description="Runs a Python program as several JAX processes on this host.",
        usage="%(prog)s [--processes N] [--devices N | --gpus] program.py [its arguments], or -m module [...]",
    )
    parser.add_argument("--processes", type=int, default=2, help="number of processes (default: 2)")
    parser.add_argument("--devices", type=int, default=1, help="CPU devices per process (default: 1)")
    parser.add_argument(
        "--gpus", action="store_true", help="process i uses the i-th visible GPU instead of CPU devices"
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module with its arguments")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a Python file and its arguments")
    options = parser.parse_args(arguments)
    command = ["-m", *options.module] if options.module else options.program
    if not command:
        parser.error("program: got none, expected a Python file or -m module")
    for name in ("processes", "devices"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: got {getattr(options, name)}, expected a number >= 1")
    try:
        return launch(command, options.processes, options.devices, options.gpus)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(run_main("launch", main))
