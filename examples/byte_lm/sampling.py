"""Sampling text from the model."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from byte_lm.step import Program, TrainState


def generate(
    logits_of: Callable[[jax.Array], jax.Array],
    prompt: bytes,
    length: int,
    seq: int,
    temperature: float,
    key: jax.Array,
) -> bytes:
    """Continues `prompt` by `length` bytes, each drawn from softmax(logits / temperature).

    The model reads a sliding window of at most `seq` bytes. Shorter texts are padded on the right, which a causal model
    does not read.

    Args:
      logits_of: int32 [1, seq] -> float32 [1, seq, 256].
      prompt: at least one byte; only its last `seq` bytes are read.
      temperature: 0 selects the likeliest byte.
      key: random key.
    """
    recent = prompt[-seq:]
    window = jnp.zeros((seq,), jnp.int32).at[: len(recent)].set(jnp.frombuffer(recent, jnp.uint8).astype(jnp.int32))

    def extend(carry: tuple[jax.Array, jax.Array], key: jax.Array):
        window, used = carry
        logits = logits_of(window[None])[0, used - 1]
        byte = jnp.argmax(logits) if temperature == 0 else jax.random.categorical(key, logits / temperature)
        full = used == seq
        window = jnp.where(full, jnp.roll(window, -1), window)
        window = window.at[jnp.where(full, seq - 1, used)].set(byte)
        return (window, jnp.minimum(used + 1, seq)), byte.astype(jnp.uint8)

    _, text = jax.jit(lambda start, keys: jax.lax.scan(extend, start, keys))(
        (window, jnp.int32(len(recent))), jax.random.split(key, length)
    )
    return bytes(np.asarray(text))


def continued(program: Program, state: TrainState, prompt: str, length: int, temperature: float, seed: int) -> str:
    """The prompt, continued by `length` bytes from the model of a run."""
    text = prompt.encode()
    added = generate(
        lambda tokens: program.logits(state, tokens),
        text,
        length,
        program.options.seq,
        temperature,
        jax.random.key(seed),
    )
    return (text + added).decode(errors="replace")
