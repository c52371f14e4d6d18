import jax
import jax.numpy as jnp
import numpy as np
import pytest

from byte_lm.sampling import generate


def counting(tokens):
    """A model that predicts the sum of the last two bytes, at the last position of its window."""
    before = jnp.roll(tokens, 1, axis=1).at[:, 0].set(0)
    return 50.0 * jax.nn.one_hot((tokens + before) % 256, 256)


@pytest.mark.parametrize("prompt", [b"\x01", b"\x01\x02", b"\x01\x02\x03\x05", b"\x09\x09\x01\x02\x03\x05\x08"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_follows_the_model_before_and_after_the_window_is_full(prompt, temperature):
    text = generate(counting, prompt, 20, 4, temperature, jax.random.key(0))
    expected = [0, *prompt]
    for _ in range(20):
        expected.append((expected[-1] + expected[-2]) % 256)
    assert text == bytes(expected[-20:])


def test_draws_follow_the_tempered_distribution():
    logits = jnp.log(jnp.array([0.6, 0.3, 0.1]))

    def model(tokens):
        return jnp.full((*tokens.shape, 256), -jnp.inf).at[..., :3].set(logits)

    draws = np.frombuffer(generate(model, b"a", 4000, 4, 0.5, jax.random.key(1)), np.uint8)
    expected = np.array([0.36, 0.09, 0.01]) / 0.46
    np.testing.assert_allclose(np.bincount(draws, minlength=3) / 4000, expected, atol=0.03)
