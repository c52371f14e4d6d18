"""Read and write errors end in one line, and never destroy a complete checkpoint."""

import contextlib
import dataclasses
import resource
import shutil

import pytest
from test_run import assert_same, command, train_until
from write_state import StopAfter

from byte_lm.__main__ import main
from byte_lm.checkpoint import RunFolder
from byte_lm.data import load_corpus
from byte_lm.train import Run
from conftest import tiny
from run_error import RunError


@pytest.fixture(scope="module")
def trained(corpus_folder, tmp_path_factory):
    """A run that was stopped after ten steps, with checkpoints of steps five and ten."""
    return train_until(tiny(corpus_folder, tmp_path_factory.mktemp("run") / "out"), 10)


@pytest.fixture
def copy(trained, tmp_path):
    """The run's options with a copy of its folder."""
    shutil.copytree(trained.options.out, tmp_path / "copy")
    return dataclasses.replace(trained.options, out=tmp_path / "copy")


def error_of_main(options, capsys, *more):
    """The only error line of the command, which is its last one."""
    assert main([*command(options)[0][3:], *more]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    loading, *lines = [line for line in error.splitlines() if line and "step/s" not in line]
    assert loading == "byte_lm: loading JAX and the corpus"
    assert len(lines) == 1 and lines[0].startswith("byte_lm: ")
    return lines[0]


def truncate(checkpoint):
    for path in checkpoint.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:10])


def empty(checkpoint):
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


def lose_history(checkpoint):
    shutil.rmtree(checkpoint / "history")


@pytest.mark.parametrize("damage", [truncate, empty, lose_history])
def test_a_damaged_newest_checkpoint_is_skipped_and_renamed(trained, copy, damage, capsys):
    checkpoints = copy.out / "checkpoints"
    damage(checkpoints / "10")
    resumed = train_until(copy, 10)
    told = [line for line in capsys.readouterr().err.splitlines() if "checkpoint of step" in line]
    assert len(told) == 1 and told[0].startswith("The checkpoint of step 10 cannot be read (")
    assert told[0].endswith(f") and was renamed to {checkpoints}/damaged_10. Resuming from step 5.")
    assert_same(resumed, trained)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["10", "5", "damaged_10"]
    train_until(copy, 10)
    assert "cannot be read" not in capsys.readouterr().err


def test_without_a_complete_checkpoint_fresh_is_the_advice(copy, capsys):
    checkpoints = copy.out / "checkpoints"
    for step in ("5", "10"):
        truncate(checkpoints / step)
    (checkpoints / "damaged_3").mkdir()
    told = error_of_main(copy, capsys)
    assert f"could not read any checkpoint in {checkpoints} (step 10: " in told and "; step 5: " in told
    assert told.endswith("--fresh starts over.")
    assert train_until(copy, 2, "fresh").done == 2
    assert [path.name for path in checkpoints.iterdir()] == ["2"]


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff"])
def test_options_that_cannot_be_read_are_an_error(copy, content, capsys):
    file = copy.out / "config.json"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    told = error_of_main(copy, capsys)
    assert f"{file}: expected the options of the run" in told and told.endswith("--fresh starts over")


@contextlib.contextmanager
def files_of_at_most(size):
    """Limits file sizes, so that larger writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_save_that_fails_loses_no_checkpoint(trained, options):
    folder = RunFolder(options.out)
    run = Run.begin(options, "auto", load_corpus(options.corpus), folder)

    def failing_save(step):
        with files_of_at_most(1 << 15), pytest.raises(RunError) as error:
            run.train(StopAfter(run, step))
        return str(error.value)

    told = failing_save(1)
    assert told.startswith(f"could not save the checkpoint of step 1 in {options.out}/checkpoints: ")
    assert told.endswith("; there is no earlier one")
    run.train(StopAfter(run, 5))
    assert failing_save(6).endswith("; the checkpoint of step 5 is complete, and the same command resumes from it")
    folder.close()
    assert_same(train_until(options, 10, "resume"), trained)


def test_a_failed_write_of_the_options_leaves_no_partial_file(options):
    folder = RunFolder(options.out)
    with files_of_at_most(100), pytest.raises(RunError, match=r"--out: could not write .*config\.json: OSError"):
        folder.write_config({"text": "x" * 10_000})
    folder.close()
    assert not (options.out / "config.json").exists()


def test_a_report_that_cannot_be_written_is_an_error(copy, capsys):
    (copy.out / "loss.png").mkdir()
    assert "could not write the report of 40 steps, all saved: IsADirectoryError: " in error_of_main(copy, capsys)


@pytest.mark.parametrize("below", ["file", "file/out", "/proc/out"])
def test_an_out_folder_that_cannot_be_created_is_an_error(options, below, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    out = tmp_path / below
    told = error_of_main(dataclasses.replace(options, out=out), capsys)
    assert told.startswith(f"byte_lm: --out: got {out}, expected a folder to write to: ")
    assert (tmp_path / "file").read_text() == "mine"
