"""The named operands and results of the layer's rules, on one device, on shards and on a mesh."""

import dataclasses
from typing import Any, NamedTuple

import jax

from anabranch import phases, replay
from anabranch.jax.binding.arrays import flat
from anabranch.jax.ops.ffn import FfnConfig, FfnOperands
from anabranch.jax.ops.packed import fp8_for_pass
from anabranch.jax.ops.quantized import QuantizedExperts, for_pass
from anabranch.lora import NAMES, Lora
from anabranch.options import RouterOptions


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """The static options of the layer."""

    router: RouterOptions | None
    """None: experts and weights are given, there is no gate."""
    ffn: FfnConfig
    align_size: int
    aux_loss: bool = False
    z_loss: bool = False


class Operands(NamedTuple):
    """The arrays of the layer; x is [..., D]. None: not given."""

    x: jax.Array
    gate: jax.Array | None
    gate_bias: jax.Array | None
    w_in: jax.Array
    w_out: jax.Array
    b_in: jax.Array | None
    b_out: jax.Array | None
    expert_bias: jax.Array | None = None
    token_mask: jax.Array | None = None
    replay_experts: jax.Array | None = None
    """int32 [..., K]. This and the following two fields are those of a Replay."""
    replay_weights: jax.Array | None = None
    replay_mask: jax.Array | None = None
    experts: jax.Array | None = None
    """int32 [..., K]; an index outside [0, E) is no expert."""
    weights: jax.Array | None = None
    """float32 [..., K]."""
    qb_bin_bounds: jax.Array | None = None
    """float32 [2]."""
    quantized_w_in: jax.Array | None = None
    """This and the following fields are those of a QuantizedExperts."""
    quantized_w_in_transposed: jax.Array | None = None
    quantized_w_in_scales: jax.Array | None = None
    quantized_w_out: jax.Array | None = None
    quantized_w_out_transposed: jax.Array | None = None
    quantized_w_out_scales: jax.Array | None = None
    lora_a_in: jax.Array | None = None
    """This and the following fields are those of a Lora."""
    lora_b_in: jax.Array | None = None
    lora_a_out: jax.Array | None = None
    lora_b_out: jax.Array | None = None
    w_in_block_scales: jax.Array | None = None
    """Block scales if w_in is packed; w_in is then its codes or q. The next field is that of w_out."""
    w_out_block_scales: jax.Array | None = None

    @property
    def lora(self) -> Lora | None:
        """The factors of the adapters, if there are any."""
        lora = Lora(*(getattr(self, name) for name in NAMES))
        return None if lora.a_in is None and lora.a_out is None else lora

    @property
    def quantized(self) -> QuantizedExperts | None:
        """The quantised experts, if there are any."""
        quantized = QuantizedExperts(*(getattr(self, f"quantized_{name}") for name in QuantizedExperts._fields))
        return None if quantized.w_in_scales is None else quantized


def quantized_fields(quantized: QuantizedExperts | None) -> dict[str, Any]:
    """The fields of Operands for a QuantizedExperts, or for other values per field such as specs."""
    if quantized is None:
        return {}
    return {f"quantized_{name}": value for name, value in quantized._asdict().items()}


#: Operands with the leading dimensions of x.
TOKENS = ("x", "token_mask", *replay.NAMES, "experts", "weights")
#: Those that have no other dimensions.
_MASKS = ("token_mask", "replay_mask")
#: Operands that have gradients.
DIFFERENTIABLE = ("x", "gate", "gate_bias", "w_in", "w_out", "b_in", "b_out", "weights", *NAMES)


class Selection(NamedTuple):
    """The experts of every token and their weights, given or from the router."""

    experts: jax.Array
    """int32 [..., K]."""
    weights: jax.Array
    """float32 [..., K]."""


class Sums(NamedTuple):
    """The router's sums over all tokens of the layer, for the losses; None without a router."""

    score_sum: jax.Array | None
    """float32 [E]."""
    lse_squares: jax.Array | None
    """float32 []: the sum of lse[t]^2; 0 without a z-loss."""
    tokens_per_expert: jax.Array | None
    """int32 [E]."""
    qb_histogram: jax.Array | None = None
    """int32 [E, bins], with quantile balancing."""


class LayerOutput(NamedTuple):
    """The results of the layer; sums cover all of its tokens. Fields are None without a router where marked."""

    output: jax.Array
    """[..., D], dtype of x."""
    experts: jax.Array | None
    """int32 [..., K]."""
    weights: jax.Array | None
    """float32 [..., K]."""
    score_sum: jax.Array | None
    """See Sums."""
    lse_squares: jax.Array | None
    """See Sums."""
    tokens_per_expert: jax.Array
    """int32 [E]: before any dropping."""
    dropped: jax.Array
    """int32 [S]: assignments without a row, per shard of the tokens that drops on its own."""
    qb_histogram: jax.Array | None = None
    """See Sums."""


#: Results with the leading dimensions of x.
TOKEN_RESULTS = ("output", "experts", "weights")


def output_names(config: LayerConfig) -> tuple[str, ...]:
    """The fields of LayerOutput that are not None."""
    if config.router is None:
        return "output", "tokens_per_expert", "dropped"
    return tuple(name for name in LayerOutput._fields if name != "qb_histogram" or config.router.qb_bins)


def layer_output(
    config: LayerConfig,
    leading: tuple[int, ...],
    output: jax.Array,
    selection: Selection,
    sums: Sums,
    dropped: jax.Array,
) -> LayerOutput:
    """Restores the leading dimensions of x in the results of a rule on flat tokens."""
    assert sums.tokens_per_expert is not None
    experts = weights = None
    if config.router is not None:
        experts, weights = (array.reshape(*leading, array.shape[1]) for array in selection)
    return LayerOutput(
        output=output.reshape(*leading, output.shape[1]),
        experts=experts,
        weights=weights,
        score_sum=sums.score_sum,
        lse_squares=sums.lse_squares,
        tokens_per_expert=sums.tokens_per_expert,
        dropped=dropped,
        qb_histogram=sums.qb_histogram,
    )


class Cotangents(NamedTuple):
    """The cotangents of the differentiable results."""

    output: jax.Array
    weights: jax.Array | None
    score_sum: jax.Array | None
    lse_squares: jax.Array | None

    @property
    def sums(self) -> Sums:
        """The cotangents of the router's sums."""
        return Sums(self.score_sum, self.lse_squares, None)

    def total_d_weights(self, through_experts: jax.Array) -> jax.Array:
        """The whole cotangent of the weights [T, K]: the part through the experts plus that of the returned weights."""
        return through_experts if self.weights is None else through_experts + flat(self.weights)


def gradients(given: dict[str, jax.Array | None]) -> Operands:
    """Gradients as Operands; None for all operands without one."""
    return Operands(**dict.fromkeys(Operands._fields) | given)  # type: ignore[arg-type]


def flat_tokens(operands: Operands) -> Operands:
    """Flattens the token dimensions of x and of all operands that have them."""
    given: dict[str, Any] = {name: a for name in TOKENS if (a := getattr(operands, name)) is not None}
    rows = {name: a.reshape(a.size) if name in _MASKS else flat(a) for name, a in given.items()}
    return operands._replace(**rows)


def flat_selection(selection: Selection) -> Selection:
    """Flattens the token dimensions of the selection."""
    return Selection(*map(flat, selection))


def round_weights(config: LayerConfig, operands: Operands) -> Operands:
    """Casts plain weights of the experts to the dtype of x, in which they are multiplied unless they are quantised."""
    if config.ffn.fp8:
        return operands
    dtype = operands.x.dtype
    scales = {"w_in": operands.w_in_block_scales, "w_out": operands.w_out_block_scales}
    rounded: dict[str, Any] = {n: getattr(operands, n).astype(dtype) for n, packed in scales.items() if packed is None}
    return operands._replace(**rounded)


def round_factors(operands: Operands) -> Operands:
    """Casts the factors of adapters to the dtype of x, in which they are multiplied."""
    dtype = operands.x.dtype
    rounded: dict[str, Any] = {n: None if (a := getattr(operands, n)) is None else a.astype(dtype) for n in NAMES}
    return operands._replace(**rounded)


@jax.named_scope(phases.QUANTIZE)
def quantize_weights(config: LayerConfig, operands: Operands, *, backward: bool) -> Operands:
    """Adds the quantised weights that a pass needs with FP8; returns other operands unchanged."""
    if not config.ffn.fp8:
        return operands
    o, ffn = operands, config.ffn
    if o.w_in_block_scales is not None or o.w_out_block_scales is not None:
        quantized = fp8_for_pass(o, ffn.layouts, ffn.fp8_scales, backward=backward)
        fields = quantized_fields(quantized)
        return operands._replace(**fields, w_in_block_scales=None, w_out_block_scales=None)
    quantized = for_pass(o.quantized, o.w_in, o.w_out, ffn.layouts, ffn.fp8_scales, backward=backward)
    return operands._replace(**quantized_fields(quantized))


def weight_dtypes(operands: Operands) -> tuple[Any, Any]:
    """The dtypes of w_in and w_out as the caller passed them, which their gradients have too."""
    return operands.w_in.dtype, operands.w_out.dtype


def ffn_operands(operands: Operands, route: Any, weights: jax.Array | None) -> FfnOperands:
    """The experts' operands: the layer's tokens, gathered with the indices of a plan or of a transport's route."""
    return FfnOperands(
        x=operands.x,
        slot_of_row=route.slot_of_row,
        group_sizes=route.group_sizes,
        w_in=operands.w_in,
        w_out=operands.w_out,
        b_in=operands.b_in,
        b_out=operands.b_out,
        weights=weights,
        quantized=operands.quantized,
        lora=operands.lora,
        w_in_block_scales=operands.w_in_block_scales,
        w_out_block_scales=operands.w_out_block_scales,
    )
