import math

import jax
import numpy as np

from byte_lm.checkpoint import History
from byte_lm.pictures import shares, smooth
from byte_lm.report import Comparison, count_parameters, imbalance, table
from byte_lm.step import Program


def test_shares_are_multiples_of_the_mean_load_of_their_layer():
    loads = np.array([[[2, 6], [4, 4]], [[4, 4], [0, 8]], [[8, 0], [4, 4]]])  # [steps, layers, E]
    np.testing.assert_allclose(shares(loads, 9)[0], [[0.5, 1, 2], [1.5, 1, 0]])
    np.testing.assert_allclose(shares(loads, 2)[1], [[0.5, 1], [1.5, 1]])


def test_smoothing_is_the_mean_of_the_neighbours_that_there_are():
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


def test_active_parameters_are_all_but_those_of_the_experts_not_taken(options):
    params = jax.eval_shape(Program.of(options).init).params
    total, active = count_parameters(options, params)
    assert total == sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    moe = params["blocks"][0]["moe"]
    of_all_experts = math.prod(moe["w_in"].get_value().shape) + math.prod(moe["w_out"].get_value().shape)
    assert total - active == options.layers * of_all_experts * (options.experts - options.topk) // options.experts
