"""Two MoE blocks with the parameters of MaxText's RoutedMoE: this library's layer, and one of grouped GEMMs.

Shape suffixes: T tokens of a device, D width of the model, E experts, F width of an expert, K experts per token, R rows
grouped by expert.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from anabranch.jax import Parallel, moe
from jax_train.config import Config

#: The shardings of the parameters: experts over `expert`, D over `data` (FSDP), as MaxText's axes exp and embed_moe.
SPECS = {
    "gate": P("data", None),
    "wi": P("expert", "data", None),
    "wi_0": P("expert", "data", None),
    "wi_1": P("expert", "data", None),
    "wo": P("expert", None, "data"),
}
#: Tokens [B, S, D]: sequences over both axes.
TOKENS = P(("data", "expert"))
_init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=0)


class MoEBlock(nnx.Module):
    """The parameters of an MoE block: gate [D, E]; wi_0 (gate) and wi_1 (up) [E, D, F]; wo [E, F, D].

    With `prefuse_moe_weights`, wi [E, D, 2 F] has the columns of wi_0 before those of wi_1.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        D, E, F = config.base_emb_dim, config.num_experts, config.base_moe_mlp_dim
        self.config, self.on_mesh = config, bool(config.mesh)
        parameters = {"gate": _init(rngs.params(), (1, D, E))[0]}
        parameters |= {name: _init(rngs.params(), (E, D, F)) for name in ("wi_0", "wi_1")}
        parameters["wo"] = _init(rngs.params(), (E, F, D))
        if config.prefuse_moe_weights:
            parameters["wi"] = jnp.concatenate([parameters.pop("wi_0"), parameters.pop("wi_1")], axis=-1)
        for name, value in parameters.items():
            setattr(self, name, nnx.Param(value, out_sharding=SPECS[name]) if self.on_mesh else nnx.Param(value))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [B, S, D] -> (output [B, S, D], load-balance loss)."""
        raise NotImplementedError


class AnabranchMoE(MoEBlock):
    """This library's layer. It reads wo and a prefused wi in place; wi_0 and wi_1 are stacked in each pass."""

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [B, S, D] -> (output [B, S, D], load-balance loss)."""
        config = self.config
        parallel = None
        if self.on_mesh:
            factor = config.ragged_buffer_factor
            parallel = Parallel(
                expert_axis="expert",
                data_axes="data",
                fsdp_axes="data",
                capacity_factor=factor if factor > 0 else None,
            )
        if config.prefuse_moe_weights:
            E, D, columns = self.wi.shape
            w_in = self.wi[...].reshape(E, D, 2, columns // 2)
        else:
            w_in = jnp.stack([self.wi_0[...], self.wi_1[...]], axis=2)
        result = moe(
            x,
            self.gate[...],
            w_in,
            self.wo[...],
            topk=config.num_experts_per_tok,
            aux_loss_coeff=config.load_balance_loss_weight,
            parallel=parallel,
        )
        return result.output, result.aux_loss


#: product(rows [R, A], weights [E, A, B], sizes [E]) -> [R, B]; rows past the sizes may have any value.
Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class RaggedDotMoE(MoEBlock):
    """The block that JAX trainers write: top_k, sort, grouped GEMMs, and a sum, inside a shard_map on a mesh.

    Its residuals have the names of this library's, so that both blocks have the same remat policies.
    """

    def __init__(self, config: Config, product: Product = jax.lax.ragged_dot, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.product = product

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [B, S, D] -> (output [B, S, D], load-balance loss)."""
        names = ("gate", "wi", "wo") if self.config.prefuse_moe_weights else ("gate", "wi_0", "wi_1", "wo")
        weights = {name: getattr(self, name)[...] for name in names}
        on_device = functools.partial(_on_device, self.config, self.product)
        if self.on_mesh:
            specs = {name: SPECS[name] for name in names}
            on_device = jax.shard_map(on_device, in_specs=(TOKENS, specs), out_specs=(TOKENS, P()), check_vma=False)
        output, loss = on_device(checkpoint_name(x, "moe_x"), weights)
        return checkpoint_name(output, "moe_output"), loss


def _on_device(
    config: Config, product: Product, x: jax.Array, weights: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The work of one device on its tokens x [B, S, D] and its shards of the weights."""
    gather, scatter, total = _collectives(bool(config.mesh))
    weights = {name: gather(array, "data", SPECS[name].index("data")) for name, array in weights.items()}
    x_TD = x.reshape(-1, x.shape[-1])
    weights_TK, experts_TK, loss = _route(config, x_TD, weights["gate"], total)
    # Every device along the expert axis gets all of their tokens and computes the rows of its own experts.
    x_TD, weights_TK, experts_TK = (gather(array, "expert", 0) for array in (x_TD, weights_TK, experts_TK))
    y_TD = _experts(config, product, x_TD, weights_TK, experts_TK, weights)
    return scatter(y_TD).reshape(x.shape), loss


def _collectives(on_mesh: bool):
    """(gather(array, axis name, dimension), scatter(sums) over the expert axis, total over all devices)."""
    if not on_mesh:
        return lambda array, *_: array, lambda array: array, lambda array: array
    return (
        lambda array, axis, dimension: jax.lax.all_gather(array, axis, axis=dimension, tiled=True),
        lambda array: jax.lax.psum_scatter(array, "expert", tiled=True),
        lambda array: jax.lax.psum(array, ("data", "expert")),
    )


def _route(
    config: Config, x_TD: jax.Array, gate_DE: jax.Array, total: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(weights [T, K] float32, experts [T, K], load-balance loss over the tokens of all devices)."""
    E, K = config.num_experts, config.num_experts_per_tok
    logits_TE = checkpoint_name(jnp.dot(x_TD.astype(jnp.float32), gate_DE), "moe_logits")
    top_TK, experts_TK = jax.lax.top_k(logits_TE, K)
    # Fedus et al. 2021, arXiv:2101.03961: E * sum_e (share of assignments) * (mean probability).
    counts_E = total(jnp.bincount(experts_TK.ravel(), length=E).astype(jnp.float32))
    scores_E = total(jax.nn.softmax(logits_TE).sum(0))
    tokens = counts_E.sum() / K
    loss = config.load_balance_loss_weight * E * jnp.sum(counts_E / (K * tokens) * scores_E / tokens)
    return checkpoint_name(jax.nn.softmax(top_TK), "moe_routing"), checkpoint_name(experts_TK, "moe_routing"), loss


def _experts(
    config: Config,
    product: Product,
    x_TD: jax.Array,
    weights_TK: jax.Array,
    experts_TK: jax.Array,
    weights: dict[str, jax.Array],
) -> jax.Array:
    """The sums over this device's experts for every token, [T, D]."""
    E, K, held = config.num_experts, config.num_experts_per_tok, weights["wo"].shape[0]
    first = jax.lax.axis_index("expert") * held if config.mesh else 0
    keys = (experts_TK.ravel() - first) % E  # this device's experts are first
    order_R = checkpoint_name(jnp.argsort(keys, stable=True), "moe_routing")
    sizes = checkpoint_name(jnp.bincount(keys, length=E)[:held].astype(jnp.int32), "moe_routing")

    def multiply(rows: jax.Array, name: str) -> jax.Array:
        return product(rows, weights[name].astype(rows.dtype), sizes)

    rows_RD = x_TD[order_R // K]
    if "wi" in weights:
        gate_RF, up_RF = jnp.split(checkpoint_name(multiply(rows_RD, "wi"), "moe_h"), 2, axis=-1)
    else:
        gate_RF, up_RF = (checkpoint_name(multiply(rows_RD, name), "moe_h") for name in ("wi_0", "wi_1"))
    y_RD = multiply(jax.nn.silu(gate_RF) * up_RF, "wo")
    computed = jnp.arange(len(order_R)) < sizes.sum()
    weighted = jnp.where(computed[:, None], y_RD * weights_TK.ravel()[order_R][:, None], 0)
    return jax.ops.segment_sum(weighted, order_R // K, x_TD.shape[0]).astype(x_TD.dtype)


BLOCKS: dict[str, type[MoEBlock]] = {"anabranch": AnabranchMoE, "ragged_dot": RaggedDotMoE}
