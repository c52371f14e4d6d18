import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from byte_lm import compare
from byte_lm.checkpoint import SUMMARY, History
from byte_lm.pictures import shares, smooth
from byte_lm.report import Comparison, count_parameters, curves, imbalance, table
from byte_lm.step import Program


def test_shares_are_multiples_of_the_mean_load_of_their_layer():
    loads = np.array([[[2, 6], [4, 4]], [[4, 4], [0, 8]], [[8, 0], [4, 4]]])  # [steps, layers, E]
    np.testing.assert_allclose(shares(loads, 9)[0], [[0.5, 1, 2], [1.5, 1, 0]])
    np.testing.assert_allclose(shares(loads, 2)[1], [[0.5, 1], [1.5, 1]])


def test_smoothing_is_the_mean_of_the_existing_neighbours():
    np.testing.assert_allclose(smooth(np.array([3.0, 1.0, 2.0, 6.0]), 1), [2, 2, 3, 4])
    np.testing.assert_allclose(smooth(np.array([3.0, 1.0]), 0), [3, 1])


def test_imbalance_is_the_largest_over_the_mean_load_of_each_layer():
    history = History()
    history.append(8.0, np.nan, 1.0, np.array([[3, 1], [0, 4]]))
    history.append(8.0, np.nan, 1.0, np.array([[3, 1], [4, 0]]))
    np.testing.assert_allclose(imbalance(history), [1.5, 1.0])


def test_the_table_says_on_which_side_of_the_trigram_the_model_is():
    assert "25.0% below the trigram" in table(Comparison(1000, 1.5, 2.0), 3)
    assert "50.0% above the trigram" in table(Comparison(1000, 3.0, 2.0), 3)


@pytest.mark.parametrize("lora", [0, 2])
def test_active_parameters_exclude_unselected_experts(options, lora):
    options = dataclasses.replace(options, lora=lora)
    state = jax.eval_shape(Program.of(options).init)
    total, active = count_parameters(options, state)
    parts = (state.params, *state.frozen)
    assert total == sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(parts))
    of_experts = [
        value.get_value() for part in parts for name, value in part["blocks"][0]["moe"].items() if name != "gate"
    ]
    expert_parameters = sum(math.prod(value.shape) for value in of_experts)
    assert total - active == options.layers * expert_parameters * (options.experts - options.topk) // options.experts


def test_several_runs_are_plotted_in_one_figure(tmp_path, capsys):
    history = History()
    for step in range(9):
        history.append(8.0 - step / 2, 7.00004 if step % 4 == 0 else np.nan, 1.0, np.array([[3, 1]]))
    found = curves(history)
    assert found["train_bits"] == [8.0 - step / 2 for step in range(9)]
    assert found["held_out_bits"] == [[1, 7.0], [5, 7.0], [9, 7.0]]
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / SUMMARY).write_text(json.dumps({"curves": found}))
    picture = tmp_path / "both.png"
    assert compare.main([f"a={tmp_path / 'one'}", f"b={tmp_path / 'other'}", "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "other" / SUMMARY).write_text("{}")
    assert compare.main([f"b={tmp_path / 'other'}"]) == 2
    assert "got no curves, expected the summary of a run" in capsys.readouterr().err
    assert compare.main([f"b={tmp_path / 'nothing'}"]) == 2
    assert "FileNotFoundError" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compare.main(["folder"])
    assert "got 'folder', expected NAME=FOLDER" in capsys.readouterr().err
