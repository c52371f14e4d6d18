"""The demo on a mesh: the same training, and checkpoints that move between one device and four."""

import dataclasses
import shutil
import subprocess

import numpy as np
import pytest
from test_run import command

from byte_lm.checkpoint import RunFolder
from byte_lm.step import Program
from byte_lm.train import run
from mesh import make_mesh, parse_mesh

MESH = "expert=2,data=2"


def in_its_own_process(options):
    """Runs the demo where JAX has not looked for devices yet."""
    arguments, environment = command(options)
    environment.pop("XLA_FLAGS", None)
    result = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def saved(options):
    """(step, arrays of the state, history) of the newest checkpoint, read on this process's one device."""
    folder = RunFolder(options.out)
    options = dataclasses.replace(options, mesh="")
    state, history = folder.restore(Program.of(options).shapes, (options.layers, options.experts))
    folder.close()
    return state, history


def assert_close(got, want, rtol):
    (state, history), (wanted_state, wanted_history) = saved(got), saved(want)
    assert int(state.step) == int(wanted_state.step)
    np.testing.assert_allclose(history.train_bits, wanted_history.train_bits, rtol=rtol)
    embedding, wanted_embedding = (s.params["embed"]["embedding"][...] for s in (state, wanted_state))
    np.testing.assert_allclose(embedding, wanted_embedding, rtol=0, atol=1e-3 * np.abs(wanted_embedding).max())


def test_checkpoints_move_between_one_device_and_four(options, tmp_path):
    first = dataclasses.replace(options, batch=4, steps=4, out=tmp_path / "one")
    first_on_mesh = dataclasses.replace(first, mesh=MESH, out=tmp_path / "four")
    run(first)
    in_its_own_process(first_on_mesh)
    assert_close(first_on_mesh, first, 1e-4)

    shutil.copytree(first.out, tmp_path / "one_then_four")
    one_then_four = dataclasses.replace(first, steps=8, mesh=MESH, out=tmp_path / "one_then_four")
    four_then_one = dataclasses.replace(first_on_mesh, steps=8, mesh="")
    one_then_one = dataclasses.replace(first, steps=8)
    in_its_own_process(one_then_four)
    run(four_then_one)
    run(one_then_one)
    assert_close(one_then_four, one_then_one, 1e-3)
    assert_close(four_then_one, one_then_one, 1e-3)


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
