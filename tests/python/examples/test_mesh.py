"""The demo on a mesh: equal training, and checkpoints that move between one device and four."""

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from test_run import EXAMPLES, command, train_until
from write_state import arrays_of

from mesh import make_mesh, parse_mesh

MESH = "expert=2,data=2"


def on_mesh(*jobs):
    """Runs jobs of write_state.py, each (options, last step, file), in a process that can still set JAX's devices."""
    (python, _, _, *_), environment = command(jobs[0][0])
    listed = [(command(options)[0][3:], steps, file and str(file)) for options, steps, file in jobs]
    result = subprocess.run(
        [python, str(Path(__file__).with_name("write_state.py")), json.dumps(listed)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def arrays_in(file):
    with np.load(file) as arrays:
        return dict(arrays)


def state_on_one_device(options, steps):
    """{name: array} of a run's state at that step on this process's one device."""
    return arrays_of(train_until(dataclasses.replace(options, mesh=""), steps))


def assert_same_bits(got, want):
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].dtype == array.dtype and got[name].shape == array.shape, name
        assert got[name].tobytes() == array.tobytes(), name


def assert_close(got, want, rtol, atol):
    """Asserts equality up to the rounding of sums over devices; `atol` is relative to an array's largest element."""
    assert got.keys() == want.keys()
    for name, array in want.items():
        if name == "history.train_bits":
            np.testing.assert_allclose(got[name], array, rtol=rtol)
        elif name.startswith("state"):
            np.testing.assert_allclose(got[name], array, rtol=0, atol=atol * np.abs(array).max(), err_msg=name)


@pytest.fixture(scope="module")
def first_steps(module_options, tmp_path_factory):
    """Four of eight steps on one device and on four: options and state of each run."""
    folder = tmp_path_factory.mktemp("first")
    one = dataclasses.replace(module_options, batch=4, steps=8, out=folder / "one")
    four = dataclasses.replace(one, mesh=MESH, out=folder / "four")
    on_mesh((four, 4, folder / "four.npz"))
    return (one, arrays_of(train_until(one, 4))), (four, arrays_in(folder / "four.npz"))


def copy_of(options, folder):
    shutil.copytree(options.out, folder / options.out.name)
    return dataclasses.replace(options, out=folder / options.out.name)


@pytest.fixture(scope="module")
def read_on_mesh(first_steps, tmp_path_factory):
    """The state that the mesh reads from both runs, and the options of the first, which resumes there to its report."""
    folder = tmp_path_factory.mktemp("mesh")
    copies = [dataclasses.replace(copy_of(options, folder), mesh=MESH) for options, _ in first_steps]
    files = [folder / f"{options.out.name}.npz" for options in copies]
    on_mesh(*[(options, 4, file) for options, file in zip(copies, files, strict=True)], (copies[0], 8, None))
    return [arrays_in(file) for file in files], copies[0]


def test_restored_state_has_the_saved_bits(first_steps, read_on_mesh, tmp_path):
    """Parameters, router and optimiser state, steps and history are equal on every mesh."""
    for (options, held), read in zip(first_steps, read_on_mesh[0], strict=True):
        moments = [name for name in held if ".mu" in name or ".nu" in name]
        assert len(moments) == 2 * len([name for name in held if name.startswith("state.params")])
        assert held["state.step"] == len(held["history.train_bits"]) == 4
        assert all(held[name].any() for name in moments)
        assert_same_bits(state_on_one_device(copy_of(options, tmp_path), 4), held)
        assert_same_bits(read, held)


def test_checkpoints_move_between_one_device_and_four(first_steps, read_on_mesh, tmp_path):
    (one, held_by_one), (four, held_by_four) = first_steps
    assert_close(held_by_four, held_by_one, 1e-4, 1e-3)

    one_then_four = read_on_mesh[1]
    assert json.loads((one_then_four.out / "summary.json").read_text())["finished"]
    want = state_on_one_device(copy_of(one, tmp_path), 8)
    assert_close(state_on_one_device(one_then_four, 8), want, 1e-3, 1e-3)
    assert_close(state_on_one_device(copy_of(four, tmp_path), 8), want, 1e-3, 1e-3)


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(mesh="expert=0"), "--mesh: got 'expert=0', expected AXIS=N with an axis of data, expert, tensor"),
        (dict(mesh="model=2"), "--mesh: got 'model=2'"),
        (dict(mesh="expert=3"), "--batch: got 2, expected a multiple of 3"),
        (dict(mesh="expert=3", batch=3), "--experts: got 4, expected a multiple of 3"),
        (dict(mesh="tensor=3"), "--hidden: got 8, expected a multiple of 3"),
    ],
)
def test_a_mesh_that_does_not_fit_is_named(options, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(options, **change)


def test_too_few_devices_are_named():
    with pytest.raises(ValueError, match="--mesh: got 4096 devices, expected"):
        make_mesh(parse_mesh("data=4096"))


def test_several_processes_are_refused_before_they_write(options):
    (python, *program), environment = command(options)
    launcher = [python, str(EXAMPLES / "launch.py"), "--processes=2"]
    result = subprocess.run([*launcher, *program], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2
    assert "byte_lm: processes: got 2 from launch.py, expected 1" in result.stderr
    assert not options.out.exists()
