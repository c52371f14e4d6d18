"""Shapes of layers to time: their names, their work and memory, and skewed routing."""

import math

import jax
import numpy as np
import pytest

from anabranch.bench import layer_in_jax
from anabranch.bench.layer_shape import NAMED, SHAPES, LayerShape, parse_shape, zipf_experts


def test_names_and_sizes_are_shapes():
    assert parse_shape("mixtral") == LayerShape(T=32768, D=4096, F=14336, E=8, K=2)
    for shape in (*SHAPES, *NAMED.values()):
        assert parse_shape(str(shape)) == shape


@pytest.mark.parametrize(
    "text, message",
    [
        ("qwen", "got 'qwen', expected T,D,F,E,K such as"),
        ("1,2,3,4", "got '1,2,3,4', expected T,D,F,E,K such as"),
        ("1,2,0,4,1", "got '1,2,0,4,1', expected T,D,F,E,K such as"),
        ("8,8,8,2,3", "expected T,D,F,E,K with K <= E"),
        ("1073741824,8,8,2,2", "expected T,D,F,E,K with T * K < 2^31"),
    ],
)
def test_other_shapes_are_errors(text, message):
    with pytest.raises(ValueError) as error:
        parse_shape(text)
    assert message in str(error.value)


def test_a_step_needs_its_operands_its_results_and_h():
    """As counted from what is traced; x and the experts' weights are kept as operands."""
    shape = LayerShape(T=96, D=32, F=48, E=4, K=2)
    given = layer_in_jax.operands(shape, "bfloat16", "uniform")
    step = layer_in_jax.forward_and_backward(layer_in_jax.LAYERS["jax"], shape.K)
    results = jax.tree.leaves(jax.eval_shape(step, *given))
    h = jax.ShapeDtypeStruct((shape.T * shape.K, 2, shape.F), given.x.dtype)
    operands = jax.tree.leaves(given)

    def size(arrays):
        return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)

    assert shape.operand_bytes(2) == size(operands)
    assert shape.step_bytes(2) == size([*operands, *results, h])


def test_zipf_experts_are_distinct_and_have_their_shares():
    shape = LayerShape(T=40000, D=1, F=1, E=12, K=3)
    experts = zipf_experts(shape)
    assert experts.shape == (shape.T, shape.K) and experts.dtype == np.int32
    assert all(len(set(row)) == shape.K for row in experts[:2000].tolist())
    assert set(np.unique(experts)) == set(range(shape.E))
    # The first is drawn with shares 1 / (1 + e); the second, given the first, with those of the others.
    weights = 1 / np.arange(1, shape.E + 1)
    shares = weights / weights.sum()
    second = sum(
        shares[first] * np.where(np.arange(12) == first, 0, shares / (1 - shares[first])) for first in range(12)
    )
    for slot, want in enumerate((shares, second)):
        got = np.bincount(experts[:, slot], minlength=shape.E) / shape.T
        assert np.abs(got - want).max() < 5 * np.sqrt(want * (1 - want) / shape.T).max()
    np.testing.assert_array_equal(zipf_experts(shape), experts)
    assert (zipf_experts(shape, seed=1) != experts).any()


def test_every_expert_of_a_token_that_has_all():
    shape = LayerShape(T=5, D=1, F=1, E=4, K=4)
    np.testing.assert_array_equal(np.sort(zipf_experts(shape), axis=1), np.tile(np.arange(4), (5, 1)))
