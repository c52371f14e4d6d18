"""The layer's example on one device: bad options and unreadable checkpoints. tests/python/parallel tests meshes."""

import argparse
import shutil

import pytest

import expert_parallel
from launch import main as launch
from mesh import make_mesh, parse_mesh
from run_error import RunError


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--mesh=expert=two"], "--mesh: got 'expert=two', expected AXIS=N with an axis of data, expert, tensor"),
        (["--mesh=pipe=2"], "--mesh: got 'pipe=2', expected AXIS=N"),
        (["--mesh=expert=2,expert=4"], "--mesh: got expert twice in 'expert=2,expert=4', expected every axis once"),
        (["--mesh=expert=3"], "--mesh: got 'expert=3', 3 parts of 8 sequences, expected a divisor of 8"),
        (["--mesh=tensor=3"], "--mesh: got 'tensor=3', 3 parts of 64 columns of an expert, expected a divisor of 64"),
        (["--steps=-5"], "--steps: got -5, expected a number >= 1"),
        (["--steps=many"], "argument --steps: invalid int value: 'many'"),
    ],
)
def test_bad_options_are_refused_with_what_was_expected(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        expert_parallel.parse(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unknown_transport_is_refused():
    options = expert_parallel.parse(["--transport=nope"])
    with pytest.raises(RunError, match=r"^--transport: got 'nope', expected one of 'auto', 'ring', "):
        expert_parallel.train(options, make_mesh(parse_mesh("")))


def train(folder, steps, capsys):
    """(number of steps, printed lines about checkpoints)."""
    options = argparse.Namespace(mesh="", transport="auto", fsdp=False, steps=steps, checkpoint=folder)
    expert_parallel.train(options, make_mesh(parse_mesh("")))
    printed = capsys.readouterr()
    return [int(line.split()[1]) for line in printed.out.splitlines()], printed.err


def test_a_damaged_newest_checkpoint_is_skipped(tmp_path, capsys):
    assert train(tmp_path, 2, capsys) == ([0, 1], "")
    assert train(tmp_path, 3, capsys) == ([2], "")
    shutil.rmtree(tmp_path / "3")
    (tmp_path / "3").mkdir()
    steps, told = train(tmp_path, 3, capsys)
    assert steps == [2]
    assert told.count("\n") == 1 and "The checkpoint of step 3 cannot be read (" in told
    with pytest.raises(RunError, match="--steps: got 2, expected at least 3"):
        train(tmp_path, 2, capsys)
    for step in ("2", "3"):
        shutil.rmtree(tmp_path / step)
        (tmp_path / step).mkdir()
    with pytest.raises(RunError, match=r"step 3: .*; step 2: .* Another --checkpoint starts over\.$"):
        train(tmp_path, 3, capsys)


def test_a_checkpoint_folder_that_cannot_be_created_is_an_error(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match=r"^--checkpoint: got \S+/file, expected a folder to write to: "):
        train(tmp_path / "file", 1, capsys)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "program: got none, expected a Python file or -m module"),
        (["--processes=0", "x.py"], "--processes: got 0, expected a number >= 1"),
        (["--devices=-1", "x.py"], "--devices: got -1, expected a number >= 1"),
    ],
)
def test_bad_options_of_the_launcher_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        launch(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
