import doctest
import math
from collections import Counter

import numpy as np
import pytest

from byte_lm import trigram
from byte_lm.trigram import Trigram


def brute_force(text: bytes, context: bytes, byte: int) -> float:
    """P(byte | context) by counting, as defined."""
    shorter = brute_force(text, context[1:], byte) if context else 1 / 256
    n = len(context)
    followers = Counter(text[i + n] for i in range(len(text) - n) if text[i : i + n] == context)
    if not followers:
        return shorter
    return (followers[byte] + len(followers) * shorter) / (followers.total() + len(followers))


@pytest.fixture(scope="module")
def text():
    return np.random.default_rng(0).choice([0, 97, 98, 99, 255], size=60, p=[0.1, 0.5, 0.2, 0.1, 0.1]).astype(np.uint8)


@pytest.fixture(scope="module")
def model(text):
    return Trigram(text)


def test_probabilities_are_those_counted_by_hand(text, model):
    rng = np.random.default_rng(1)
    cases = rng.choice([0, 97, 98, 99, 255, 7], size=(300, 3))
    expected = [brute_force(text.tobytes(), bytes([a, b]), c) for a, b, c in cases.tolist()]
    np.testing.assert_allclose(model.probability(*cases.T), expected, rtol=1e-12)


def test_probabilities_of_a_context_sum_to_one(model):
    for first, second in ((97, 97), (97, 7), (7, 97), (7, 7), (255, 0)):
        total = model.probability(np.full(256, first), np.full(256, second), np.arange(256)).sum()
        assert total == pytest.approx(1, rel=1e-12)


def test_bits_per_byte_is_the_mean_surprise(text, model):
    other = np.random.default_rng(2).choice([97, 98, 7], size=40).astype(np.uint8)
    positions = np.array([2, 3, 17, 39])
    surprises = [-math.log2(brute_force(text.tobytes(), other[i - 2 : i].tobytes(), int(other[i]))) for i in positions]
    assert model.bits_per_byte(other, positions) == pytest.approx(np.mean(surprises), rel=1e-12)


def test_it_predicts_seen_continuations():
    model = Trigram(np.frombuffer(b"abcabc" * 500, np.uint8))
    fitting, noise = np.frombuffer(b"abcabc" * 20, np.uint8), np.frombuffer(b"cbacba" * 20, np.uint8)
    positions = np.arange(2, 120)
    assert model.bits_per_byte(fitting, positions) < 0.1
    assert model.bits_per_byte(noise, positions) > 5


def test_the_docstring_example_runs():
    result = doctest.testmod(trigram)
    assert result.attempted > 0 and result.failed == 0
