import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from write_state import StopAfter

import progress
from byte_lm.__main__ import main
from byte_lm.checkpoint import RunFolder
from byte_lm.data import load_corpus
from byte_lm.generate import main as generate
from byte_lm.options import Options
from byte_lm.train import Run, run
from run_error import RunError

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def train_until(options, steps, start="auto"):
    """Trains up to that step, saves and returns, like an interrupted process."""
    folder = RunFolder(options.out)
    this = Run.begin(options, start, load_corpus(options.corpus), folder)
    this.train(StopAfter(this, steps))
    folder.close()
    return this


def assert_same(a, b):
    """The whole state has equal bits, and the history is equal except for durations."""
    assert jax.tree.structure(a.state) == jax.tree.structure(b.state)
    for one, other in zip(jax.tree.leaves(a.state), jax.tree.leaves(b.state), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    one, other = a.history.arrays(), b.history.arrays()
    for name in ("train_bits", "held_out_bits", "loads"):
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def environment():
    """This process's environment, with the examples on the path."""
    paths = [str(EXAMPLES), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def command(options):
    """The command line of a run, and its environment."""
    names = [field.name for field in dataclasses.fields(options)]
    values = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    return [sys.executable, "-m", "byte_lm", *values], environment()


@pytest.fixture(scope="module")
def finished(module_options):
    """A finished run and its output."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        this = run(module_options)
    return this, printed.getvalue()


@pytest.fixture
def copy_of_finished(finished, tmp_path):
    """The finished run's options with a copy of its folder."""
    options = finished[0].options
    shutil.copytree(options.out, tmp_path / "copy")
    return dataclasses.replace(options, out=tmp_path / "copy")


def test_a_resumed_run_equals_an_uninterrupted_one(finished, tmp_path):
    whole = finished[0]
    options = whole.options
    parts = dataclasses.replace(options, out=tmp_path / "parts")
    assert train_until(parts, 3).done == 3
    assert train_until(parts, 7).done == 7
    resumed = run(parts, "resume")
    assert resumed.done == whole.done == options.steps
    assert_same(whole, resumed)
    bias = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(resumed.state.router)])
    assert np.abs(bias).max() >= 1e-2 and bias.shape == (2 * options.experts,)


def test_quantile_balancing_evens_the_loads_and_resumes(options, tmp_path):
    options = dataclasses.replace(options, balance="quantile", expert_bias=0.0, aux_loss=0.0, lr=1e-4, batch=16, seq=64)
    whole = train_until(options, 12)
    parts = dataclasses.replace(options, out=tmp_path / "parts")
    train_until(parts, 5)
    assert_same(whole, train_until(parts, 12, "resume"))
    biases = jax.tree.leaves(whole.state.router)
    assert all(np.abs(bias).max() > 1e-3 for bias in biases)
    loads = whole.history.arrays()["loads"]  # [steps, layers, E]
    fair = loads.mean()
    assert loads[0].max() > 1.5 * fair > 1.5 * loads[0].min()
    assert loads[2:].max() < 1.3 * fair and loads[2:].min() > 0.7 * fair


def test_options_incompatible_with_quantile_balancing_are_errors(options):
    for other in ({"expert_bias": 1e-2}, {"expert_bias": 0.0, "topk": 4}):
        with pytest.raises(ValueError, match="--balance: got quantile"):
            run(dataclasses.replace(options, balance="quantile", **other))


def test_ctrl_c_saves_and_the_next_start_resumes(options, tmp_path):
    options = dataclasses.replace(options, steps=1_000_000)
    arguments, variables = command(options)
    log = tmp_path / "progress"
    with log.open("w") as progress:
        process = subprocess.Popen(arguments, env=variables, stdout=subprocess.PIPE, stderr=progress, text=True)
    deadline = time.monotonic() + 200
    saved = options.out / "checkpoints" / str(options.save_every)
    while not saved.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, log.read_text()
    done = int(re.search(r"Stopped after (\d+) of 1000000 steps, all saved", output)[1])
    assert done > 0
    summary = json.loads((options.out / "summary.json").read_text())
    assert summary["steps"] == done and not summary["finished"] and summary["held_out"] is None
    assert (options.out / "loss.png").stat().st_size > 1000

    resumed = train_until(options, done + 2, "resume")
    whole = train_until(dataclasses.replace(options, out=tmp_path / "whole"), done + 2)
    assert resumed.done == done + 2
    assert_same(whole, resumed)


def test_a_finished_run_leaves_its_report(finished):
    this, printed = finished
    options = this.options
    summary = json.loads((options.out / "summary.json").read_text())
    assert summary["finished"] and summary["steps"] == options.steps
    assert summary["bytes_seen"] == 40 * 2 * 16
    assert summary["options"]["experts"] == 4
    held_out = summary["held_out"]
    assert held_out["bytes"] == 192
    assert 0 < held_out["trigram"] < 8 and 0 < held_out["model"] < 10
    assert f"{held_out['model']:.3f}" in printed and f"{held_out['trigram']:.3f}" in printed
    assert summary["sample"].startswith(options.prompt)
    assert (options.out / "sample.txt").read_text() == summary["sample"]
    for name in ("loss.png", "expert_load.png"):
        assert (options.out / name).read_bytes().startswith(b"\x89PNG")
    loads = this.history.arrays()["loads"]
    assert loads.shape == (40, 2, 4)
    assert (loads.sum(axis=-1) == 2 * 16 * options.topk).all()


def test_a_finished_run_started_again_reports_without_training(finished, copy_of_finished):
    again = run(copy_of_finished)
    assert again.history.seconds == finished[0].history.seconds
    assert_same(finished[0], again)


def test_a_text_is_continued_as_the_sample_of_the_run(finished, capsys):
    options = finished[0].options
    arguments = [f"--out={options.out}", f"--bytes={options.sample_bytes}", f"--seed={options.seed}"]
    assert generate(arguments) == 0
    assert capsys.readouterr().out == (options.out / "sample.txt").read_text() + "\n"


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--out=/nowhere", "--out: got /nowhere, expected the folder of a run of byte_lm"),
        ("--bytes=0", "--bytes: got 0, expected a number from 1"),
        ("--temperature=nan", "--temperature: got nan, expected a number from 0"),
        ("--prompt=", "--prompt: got '', expected at least one byte"),
    ],
)
def test_a_text_that_cannot_be_continued_is_an_error(argument, message, capsys):
    try:
        status = generate([argument])
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_lines_in_a_log_and_a_bar_on_a_terminal(terminal, monkeypatch):
    monkeypatch.setattr(progress, "IN_LOG", 0)
    written = io.StringIO()
    written.isatty = lambda: terminal
    with progress.Progress(range(3), desc="training", file=written) as steps:
        for _ in steps:
            pass
    assert ("\r" in written.getvalue()) == terminal
    lines = written.getvalue().splitlines()
    assert terminal or [line.split(" steps, ")[0] for line in lines if line][:4] == [
        f"training: {done}/3" for done in range(4)
    ]


def test_the_model_learns(finished):
    bits = finished[0].history.train_bits
    assert bits[0] > 7.5
    assert np.mean(bits[-8:]) < 6


def test_fresh_starts_over_and_keeps_other_files(copy_of_finished):
    (copy_of_finished.out / "notes.txt").write_text("mine")
    other = dataclasses.replace(copy_of_finished, seed=1)
    assert train_until(other, 4, "fresh").done == 4
    assert (other.out / "notes.txt").read_text() == "mine"
    assert not (other.out / "summary.json").exists()
    folder = RunFolder(other.out)
    assert folder.saved_step() == 4
    folder.close()


def test_other_options_than_the_saved_ones_are_an_error(copy_of_finished):
    with pytest.raises(RunError, match=r"experts: got 3, expected 4.*--fresh"):
        run(dataclasses.replace(copy_of_finished, experts=3))
    with pytest.raises(RunError, match=r"--steps: got 5, expected at least 40"):
        run(dataclasses.replace(copy_of_finished, steps=5))


def test_another_corpus_than_the_saved_one_is_an_error(copy_of_finished, tmp_path):
    shutil.copytree(copy_of_finished.corpus, tmp_path / "text")
    (tmp_path / "text" / "more.py").write_text("more = True\n")
    with pytest.raises(RunError, match=r"corpus: got .*, expected "):
        run(dataclasses.replace(copy_of_finished, corpus=tmp_path / "text"))


def test_a_larger_number_of_steps_continues_the_run(finished, copy_of_finished):
    longer = train_until(dataclasses.replace(copy_of_finished, steps=42), 42)
    assert longer.done == 42
    assert longer.history.train_bits[:40] == finished[0].history.train_bits


def test_resume_without_a_checkpoint_is_an_error(options, capsys):
    arguments = command(options)[0][3:]
    assert main([*arguments, "--resume"]) == 2
    assert "--resume: got no checkpoint" in capsys.readouterr().err


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    printed = capsys.readouterr().out
    names = [field.name.replace("_", "-") for field in dataclasses.fields(Options)]
    for name in [*names, "resume", "fresh"]:
        assert f"--{name}" in printed


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--topk", "9"], "--topk: got 9, expected at most the 8 experts"),
        (["--heads", "3"], "--heads: got 3"),
        (["--steps", "0"], "--steps: got 0, expected a number from 1 to 2147483647"),
        (["--lr", "nan"], "--lr: got nan"),
        (["--seed", "9" * 20], f"--seed: got {'9' * 20}, expected a number from 0 to 2147483647"),
        (["--steps", "9" * 400], f"--steps: got {'9' * 400}"),
        (["--mesh", "expert=2,expert=2"], "--mesh: got expert twice in 'expert=2,expert=2'"),
        (["--prompt", ""], "--prompt: got ''"),
        (["--dtype", "float64"], "invalid choice: 'float64'"),
        (["--precision", "fp8", "--width", "96"], "--width: got 96, expected a multiple of 128 for --precision fp8"),
        (["--precision", "fp8", "--mesh", "tensor=4"], "--hidden: got 256, expected a multiple of 512"),
        (["--resume", "--fresh"], "not allowed with"),
    ],
)
def test_bad_options_are_refused_with_what_was_expected(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
