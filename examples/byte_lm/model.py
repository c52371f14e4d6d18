"""The language model: a decoder-only transformer over bytes whose feed-forward layers are Mixtures of Experts."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from anabranch.jax import MoEOutput, Parallel
from anabranch.jax.nnx import MoE

VOCABULARY = 256
_init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of `ByteLM`; the fields are described in options.py."""

    width: int
    layers: int
    heads: int
    hidden: int
    experts: int
    topk: int
    precision: str
    score_function: str
    shared_experts: int
    aux_loss: float
    expert_bias: float
    lora: int
    balance: str
    dtype: str
    parallel: Parallel | None


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864): rotates feature pairs of x [B, H, S, d] by angles ~ S."""
    seq, half = x.shape[-2], x.shape[-1] // 2
    angles = np.arange(seq)[:, None] * 10_000.0 ** (-np.arange(half) / half)
    cos, sin = jnp.asarray(np.cos(angles), x.dtype), jnp.asarray(np.sin(angles), x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Attention(nnx.Module):
    """Causal self-attention with rotary positions and normalised queries and keys."""

    def __init__(self, width: int, heads: int, *, dtype: str, rngs: nnx.Rngs):
        D, d = width, width // heads
        self.heads = heads
        self.qkv = nnx.Linear(D, 3 * D, use_bias=False, dtype=dtype, kernel_init=_init, rngs=rngs)
        self.out = nnx.Linear(D, D, use_bias=False, dtype=dtype, kernel_init=_init, rngs=rngs)
        self.query_norm = nnx.RMSNorm(d, dtype=dtype, rngs=rngs)
        self.key_norm = nnx.RMSNorm(d, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [B, S, D] -> [B, S, D]."""
        B, S, D = x.shape
        q, k, v = (part.reshape(B, S, self.heads, -1).swapaxes(1, 2) for part in jnp.split(self.qkv(x), 3, axis=-1))
        q, k = rotate(self.query_norm(q)), rotate(self.key_norm(k))
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        causal = np.tril(np.ones((S, S), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1).astype(x.dtype)
        mixed = jnp.einsum("bhqk,bhkd->bhqd", weights, v)
        return self.out(mixed.swapaxes(1, 2).reshape(B, S, D))


class Block(nnx.Module):
    """x + attention(norm x), then x + experts(norm x)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.attention = Attention(config.width, config.heads, dtype=config.dtype, rngs=rngs)
        self.moe_norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.moe = MoE(
            config.width,
            config.hidden,
            config.experts,
            config.topk,
            score_function=config.score_function,
            use_expert_bias=config.expert_bias > 0,
            balance="quantile" if config.balance == "quantile" else None,
            shared_features=config.shared_experts * config.hidden,
            aux_loss_coeff=config.aux_loss,
            lora_rank=config.lora,
            lora_alpha=2.0 * config.lora if config.lora else None,
            parallel=config.parallel,
            precision=config.precision,
            dtype=config.dtype,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, MoEOutput]:
        """x [B, S, D] -> (x [B, S, D], the result of the experts)."""
        x = x + self.attention(self.attention_norm(x))
        moe = self.moe(self.moe_norm(x))
        return x + moe.output, moe


class Balance(NamedTuple):
    """The statistics that update the layers' selection biases.

    loads: int32 [layers, E], tokens of each expert.
    histograms: int32 [layers, E, bins] with quantile balancing, else None.
    """

    loads: jax.Array
    histograms: jax.Array | None


class ByteLM(nnx.Module):
    """Predicts the next byte at every position."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Embed(VOCABULARY, config.width, dtype=config.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.head = nnx.Linear(
            config.width, VOCABULARY, use_bias=False, dtype=config.dtype, kernel_init=_init, rngs=rngs
        )

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array, Balance]:
        """Reads bytes.

        Args:
          tokens: uint8 or int32 [B, S].

        Returns:
          (logits float32 [B, S, 256] of the next byte, load-balance loss summed over the layers, Balance).
        """
        x = self.embed(tokens.astype(jnp.int32))
        layers = []
        for block in self.blocks:
            x, moe = block(x)
            layers.append(moe)
        histograms = jnp.stack([moe.qb_histogram for moe in layers]) if self.config.balance == "quantile" else None
        balance = Balance(jnp.stack([moe.tokens_per_expert for moe in layers]), histograms)
        return self.head(self.norm(x)).astype(jnp.float32), sum(moe.aux_loss for moe in layers), balance

    def update_biases(self, balance: Balance) -> None:
        """Updates the selection bias of every layer that has one."""
        if balance.histograms is not None:
            for block, histogram in zip(self.blocks, balance.histograms, strict=True):
                block.moe.update_quantile_bias(histogram)
        elif self.config.expert_bias:
            for block, load in zip(self.blocks, balance.loads, strict=True):
                block.moe.update_expert_bias(load, self.config.expert_bias)
