"""Several JAX processes on this host, over Gloo: the same losses, and checkpoints that move between meshes."""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"


def run(*arguments, processes=0, devices=1):
    """Runs a program, with the launcher where there are several processes; returns the finished process."""
    launcher = [str(EXAMPLES / "launch.py"), f"--processes={processes}", f"--devices={devices}"] if processes else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, *launcher, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def losses(*arguments, **how):
    """{step: loss} of a run of the example."""
    result = run(EXAMPLES / "expert_parallel.py", *arguments, **how)
    assert result.returncode == 0, result.stdout + result.stderr
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", result.stdout)}


def assert_same(got, want, steps):
    assert sorted(got) == list(steps)
    np.testing.assert_allclose([got[s] for s in steps], [want[s] for s in steps], rtol=1e-5)


def test_processes_and_meshes_take_turns_on_one_run(tmp_path):
    """Every leg goes on from the checkpoint of the one before, which was saved on another mesh."""
    want = losses("--steps=7")
    assert want[6] < want[0]
    folder = f"--checkpoint={tmp_path / 'run'}"
    legs = [
        (range(0, 1), ["--mesh=expert=1"], {}),
        (range(1, 3), ["--mesh=expert=4", "--transport=all_to_all"], {"processes": 2, "devices": 2}),
        (range(3, 5), ["--mesh=expert=2,data=2", "--fsdp", "--transport=ragged"], {"processes": 4}),
        (range(5, 6), ["--mesh=tensor=2,expert=2"], {}),
        (range(6, 7), [], {}),
    ]
    for steps, mesh, how in legs:
        assert_same(losses(f"--steps={steps.stop}", folder, *mesh, **how), want, steps)


def test_the_launcher_ends_all_when_one_fails(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time\n"
        "if os.environ['LAUNCH_PROCESS'] == '1':\n    print('out of luck'); sys.exit(3)\n"
        "time.sleep(250)\n"
    )
    result = run(program, processes=3)
    assert result.returncode == 3
    assert "launch: process 1 ended with status 3" in result.stderr and "out of luck" in result.stderr


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--mesh", "expert=two"], "--mesh: got 'expert=two', expected AXIS=N with an axis of data, expert, tensor"),
        (["--mesh", "pipe=2"], "--mesh: got 'pipe=2', expected AXIS=N"),
    ],
)
def test_a_mesh_that_can_not_be_read(arguments, message):
    result = run(EXAMPLES / "expert_parallel.py", *arguments)
    assert result.returncode == 2 and message in result.stderr
