"""The demo's adapters: a run with --lora trains factors alone, on the frozen model of another run."""

import dataclasses

import jax
import numpy as np
import pytest
from write_state import StopAfter

from byte_lm.checkpoint import RunFolder
from byte_lm.data import load_corpus
from byte_lm.generate import main as generate
from byte_lm.train import Run, run
from run_error import RunError


@pytest.fixture
def base(options):
    return run(dataclasses.replace(options, steps=4))


@pytest.fixture
def adapted(base, tmp_path):
    out = tmp_path / "adapted"
    return dataclasses.replace(base.options, lora=2, base=str(base.options.out), out=out, steps=8)


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_adapters_train_on_the_frozen_model_and_resume(base, adapted, capsys):
    folder = RunFolder(adapted.out)
    part = Run.begin(adapted, "auto", load_corpus(adapted.corpus), folder)
    text, starts = part.corpus.held_out, np.arange(8) * adapted.seq
    assert part.program.evaluate(part.state, text, starts) == base.program.evaluate(base.state, text, starts)
    part.train(StopAfter(part, 3))
    folder.close()
    whole = run(dataclasses.replace(adapted, base=""), "resume")  # the checkpoint has the frozen model
    assert whole.done == 8
    for frozen, want in zip(leaves(whole.state.frozen), leaves(base.state.params), strict=True):
        np.testing.assert_array_equal(frozen, want)
    shapes = {leaf.shape for leaf in leaves(whole.state.params)}
    assert shapes == {(4, 16, 2), (4, 2, 2, 8), (4, 8, 2), (4, 2, 16)}
    assert all(np.abs(leaf).max() > 0 for leaf in leaves(whole.state.params))
    assert "trained (adapters of rank 2)" in capsys.readouterr().out
    assert generate([f"--out={adapted.out}", "--bytes=4"]) == 0


def test_a_wrong_base_is_refused(base, adapted, tmp_path):
    for options, message in (
        (dataclasses.replace(adapted, base=""), "--base: got no folder"),
        (dataclasses.replace(adapted, base=str(tmp_path / "none")), "--base: got .*none, expected the --out folder"),
        (dataclasses.replace(adapted, hidden=16), "--hidden: got 16, expected 8 as in the run"),
    ):
        with pytest.raises(RunError, match=message):
            run(options)
    with pytest.raises(ValueError, match="without --lora"):
        dataclasses.replace(adapted, lora=0)
