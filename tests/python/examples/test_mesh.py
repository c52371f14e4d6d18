"""The demo on a mesh: the same training, and checkpoints that move between one device and four."""

import dataclasses
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from test_run import EXAMPLES, command, train_until
from write_state import arrays_of

from byte_lm.train import run
from mesh import make_mesh, parse_mesh

MESH = "expert=2,data=2"


def in_its_own_process(arguments, environment):
    """Runs a program where JAX has not looked for devices yet."""
    environment.pop("XLA_FLAGS", None)
    result = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def on_mesh(options):
    """Runs the demo."""
    in_its_own_process(*command(options))


def held_on_mesh(options, file):
    """{name: array} of what a run holds that has gone on to its last step."""
    (python, _, _, *values), environment = command(options)
    in_its_own_process([python, str(Path(__file__).with_name("write_state.py")), str(file), *values], environment)
    with np.load(file) as arrays:
        return dict(arrays)


def held_here(options):
    """The same on this process's one device."""
    return arrays_of(train_until(dataclasses.replace(options, mesh=""), options.steps, "resume"))


def assert_same_bits(got, want):
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].dtype == array.dtype and got[name].shape == array.shape, name
        assert got[name].tobytes() == array.tobytes(), name


def assert_close(got, want, rtol, atol):
    """The same steps, but for the rounding of sums over devices: `atol` is relative to an array's largest element."""
    assert got.keys() == want.keys()
    for name, array in want.items():
        if name == "history.train_bits":
            np.testing.assert_allclose(got[name], array, rtol=rtol)
        elif name.startswith("state"):
            np.testing.assert_allclose(got[name], array, rtol=0, atol=atol * np.abs(array).max(), err_msg=name)


@pytest.fixture(scope="module")
def first_steps(module_options, tmp_path_factory):
    """Four steps on one device and on four: options and what the run held in the end, of each."""
    folder = tmp_path_factory.mktemp("first")
    one = dataclasses.replace(module_options, batch=4, steps=4, out=folder / "one")
    four = dataclasses.replace(one, mesh=MESH, out=folder / "four")
    return (one, arrays_of(train_until(one, 4))), (four, held_on_mesh(four, folder / "four.npz"))


@pytest.fixture
def copies(first_steps, tmp_path):
    """Copies of both runs' folders, to go on in: options."""

    def copy(options):
        shutil.copytree(options.out, tmp_path / options.out.name)
        return dataclasses.replace(options, out=tmp_path / options.out.name)

    return [copy(options) for options, _ in first_steps]


def test_what_is_read_has_the_bits_that_were_saved(first_steps, copies, tmp_path):
    """Every parameter, the routers' and the optimiser's state, steps and history, on whatever mesh they are read."""
    for (options, held), copy in zip(first_steps, copies, strict=True):
        moments = [name for name in held if ".mu" in name or ".nu" in name]
        assert len(moments) == 2 * len([name for name in held if name.startswith("state.params")])
        assert held["state.step"] == len(held["history.train_bits"]) == options.steps
        assert all(held[name].any() for name in moments)
        assert_same_bits(held_here(copy), held)
        there = dataclasses.replace(copy, mesh=MESH)
        assert_same_bits(held_on_mesh(there, tmp_path / f"{copy.out.name}.npz"), held)


def test_checkpoints_move_between_one_device_and_four(first_steps, copies, tmp_path):
    (one, held_by_one), (_, held_by_four) = first_steps
    assert_close(held_by_four, held_by_one, 1e-4, 1e-3)

    one_then_four, four_then_one = (dataclasses.replace(options, steps=8) for options in copies)
    one_then_four = dataclasses.replace(one_then_four, mesh=MESH)
    four_then_one = dataclasses.replace(four_then_one, mesh="")
    shutil.copytree(one.out, tmp_path / "one_then_one")
    one_then_one = dataclasses.replace(one, steps=8, out=tmp_path / "one_then_one")
    on_mesh(one_then_four)
    run(four_then_one)
    run(one_then_one)
    want = held_here(one_then_one)
    assert_close(held_here(one_then_four), want, 1e-3, 1e-3)
    assert_close(held_here(four_then_one), want, 1e-3, 1e-3)


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
    assert "byte_lm: processes: got 2 of launch.py, expected 1" in result.stderr
    assert not options.out.exists()
