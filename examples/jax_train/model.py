"""A decoder-only transformer over bytes: RMSNorm, rotary attention, and an MoE block in every layer."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from byte_lm.model import VOCABULARY, Attention
from jax_train.blocks import BLOCKS, MoEBlock
from jax_train.config import Config

_init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


class Layer(nnx.Module):
    """x + attention(norm x), then x + experts(norm x)."""

    def __init__(self, config: Config, block: Callable[..., MoEBlock], *, rngs: nnx.Rngs):
        D, dtype = config.base_emb_dim, config.dtype
        self.attention_norm = nnx.RMSNorm(D, dtype=dtype, rngs=rngs)
        self.attention = Attention(D, config.base_num_query_heads, dtype=dtype, rngs=rngs)
        self.moe_norm = nnx.RMSNorm(D, dtype=dtype, rngs=rngs)
        self.moe = block(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [B, S, D] -> (x [B, S, D], load-balance loss)."""
        x = x + self.attention(self.attention_norm(x))
        output, loss = self.moe(self.moe_norm(x))
        return x + output, loss


class Decoder(nnx.Module):
    """Predicts the next byte at every position.

    Args:
      config: sizes and options.
      block: makes an MoE block, called with (config, rngs=...); None: the class of `config.moe`.
      rngs: random keys.
    """

    def __init__(self, config: Config, block: Callable[..., MoEBlock] | None = None, *, rngs: nnx.Rngs):
        D, dtype, block = config.base_emb_dim, config.dtype, block or BLOCKS[config.moe]
        self.config = config
        self.embed = nnx.Embed(VOCABULARY, D, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(config, block, rngs=rngs) for _ in range(config.base_num_decoder_layers)])
        self.norm = nnx.RMSNorm(D, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(D, VOCABULARY, use_bias=False, dtype=dtype, kernel_init=_init, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """tokens [B, S] -> (logits float32 [B, S, 256] of the next byte, load-balance loss of all layers)."""
        x, losses = self.embed(tokens.astype(jnp.int32)), []
        for layer in self.layers:
            x, loss = _rematerialised(layer, x)
            losses.append(loss)
        return self.head(self.norm(x)).astype(jnp.float32), sum(losses)


def _rematerialised(layer: Layer, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Applies the layer; its backward pass recomputes what the policy of the configuration does not save."""
    config = layer.moe.config
    if config.remat_policy == "none":
        return layer(x)
    graph, state = nnx.split(layer)
    policy = jax.checkpoint_policies.save_only_these_names(*config.saved_residuals())
    return jax.checkpoint(lambda state, x: nnx.merge(graph, state)(x), policy=policy)(state, x)
