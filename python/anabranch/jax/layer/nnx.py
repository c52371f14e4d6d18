"""Flax NNX layer: the whole Mixture-of-Experts layer with its parameters and router state."""

import math
from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from anabranch._packages import needed_by
from anabranch.jax.binding import check
from anabranch.jax.binding.arrays import cast
from anabranch.jax.binding.eager import compiled
from anabranch.jax.layer.gate import router_logits
from anabranch.jax.layer.initializers import (
    Initializer,
    default_gate_init,
    default_in_init,
    default_out_init,
    initializer,
)
from anabranch.jax.layer.lora import new_factor
from anabranch.jax.layer.moe import MoEOutput, layer_config, run_layer
from anabranch.jax.layer.shared_expert import shared_expert
from anabranch.jax.ops.packed import pack_fp8, pack_mxfp4
from anabranch.jax.ops.quantile import host_bounds, quantile_bias
from anabranch.jax.ops.quantized import QuantizedExperts
from anabranch.jax.parallel.parallel import Parallel
from anabranch.layouts import OURS, Layouts
from anabranch.lora import PROJECTIONS, Lora, factor_shapes, new_lora
from anabranch.options import (
    LAYOUT_MODULE_NAMES,
    LayerOptions,
    LayoutModuleKeywords,
    check_names,
    takes_options,
)
from anabranch.packed import KINDS, check_kind
from anabranch.precision import check_fp8_widths, dense_precision
from anabranch.replay import Replay

with needed_by("anabranch.jax.nnx"):
    from flax import nnx


class RouterState(nnx.Variable):
    """Router state that no optimiser updates: the expert bias of auxiliary-loss-free load balancing."""


class PackedWeights(nnx.Variable):
    """Arrays of the experts' packed weights, which no optimiser updates."""


def sharding(
    parallel: Parallel, name: str, layouts: Layouts = OURS, shared: Sequence[str] = ()
) -> PartitionSpec | NamedSharding:
    """The sharding of a parameter of `MoE` on the mesh of `parallel`.

    Args:
      parallel: how the layer is spread over the mesh.
      name: the parameter's name in `moe`.
      layouts: the layouts of w_in and w_out.
      shared: the fields of `Lora` that all experts share.

    Returns:
      A PartitionSpec if the context has a mesh or `parallel` has none, else a NamedSharding on the mesh of `parallel`.

    Raises:
      KeyError: `moe` has no sharded argument with this name.
    """
    spec = parallel.specs(*layouts, shared=shared)[name]
    if parallel.mesh is None or not jax.sharding.get_abstract_mesh().empty:
        return spec
    return NamedSharding(parallel.mesh, spec)


def _params_stream(rngs: Any) -> Any:
    """The random-key stream for parameters."""
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"rngs: got {check.describe(rngs)}, expected flax.nnx.Rngs")
    try:
        return rngs.params
    except AttributeError:
        raise ValueError(f"rngs: got the streams {list(rngs)}, expected 'params' or 'default'") from None


#: Functions that pack weights, by the choices of the option `packed`.
_PACK: dict[str, Any] = {"mxfp4": pack_mxfp4, "fp8_blocks": pack_fp8}


@takes_options(LayoutModuleKeywords)
class MoE(nnx.Module):
    """A Mixture-of-Experts feed-forward layer.

    Parameters (`nnx.Param`): `gate` [D, E], `w_in` [E, D, 2, F] (gate and up columns; [E, D, 1, F] if not gated),
    `w_out` [E, F, D]; with `use_gate_bias` also `gate_bias` [E]; with `use_bias` also `b_in` [E, 2 or 1, F] and `b_out`
    [E, D]; with `shared_features` S > 0 also `shared_in` [D, 2 or 1, S] and `shared_out` [S, D]; with `shared_gate`
    also `shared_gate` [D, 1]. With `lora_rank` r > 0 also the adapters' factors (`nnx.LoRAParam`) `lora_a_in` [E or 1,
    D, r], `lora_b_in` [E or 1, r, 2 or 1, F], `lora_a_out` [E or 1, F, r] and `lora_b_out` [E or 1, r, D]; to train
    them alone, differentiate and update `nnx.LoRAParam`: frozen weights cost nothing. With `packed` the arrays of the
    two weights are `PackedWeights` in the place of w_in and w_out: `w_in_codes` and `w_in_scales`, `w_out_codes` and
    `w_out_scales` for "mxfp4" (see `Mxfp4`), `w_in_q` and so on for "fp8_blocks" (see `Fp8Blocks`). State
    (`RouterState`): `expert_bias` float32 [E] with `use_expert_bias` or `balance`. If `nnx.update`, `nnx.merge` or a
    cast of the state changes its float dtype, a forward pass reads it as float32 and an update makes it float32 again,
    because 16 bits lose steps of 1e-3.

    Args:
      in_features: D, width of the model.
      hidden_features: F, width of one expert.
      num_experts: E.
      topk: K, experts per token.
      use_expert_bias: whether the layer has a selection bias, which `update_expert_bias` updates.
      balance: "quantile": `update_quantile_bias` sets the selection bias; None: no quantile balancing.
      qb_bin_bounds, qb_bins: the histogram for quantile balancing: (lower, upper) bounds on the distance of an expert's
        score below a token's threshold, and the number of bins.
      use_gate_bias: whether the router's logits have a bias parameter.
      gated: phi(x W_gate, x W_up), for a plain name act(x W_gate) * (x W_up); False: act(x W_up).
      use_bias: whether the experts have biases b_in and b_out.
      shared_features: width S of a dense expert that processes every token; 0: none.
      shared_gate: multiply the shared expert's output by sigmoid(<x, shared_gate>).
      lora_rank: rank of low-rank adapters of w_in and w_out, which start without effect; 0: no adapters. For a saved
        layer without adapters, build the layer with `lora_rank` and update it with the saved state.
      lora_alpha: the adapters are multiplied by lora_alpha / lora_rank; None: by 1.
      lora_shared: the fields of `Lora` that all experts share, for example ("a_in",).
      packed: "mxfp4" or "fp8_blocks": the experts' weights are packed and frozen, for loading packed checkpoints. They
        require w_in_layout "pfd" (or "fpd" with "mxfp4") and w_out_layout "df". None: they are parameters.
      parallel: spreads the layer over a mesh. The parameters then have shardings (`out_sharding`). Under jax.set_mesh,
        or with a `Parallel` that has a mesh, they are created in shards. A shared expert is replicated.
      dtype: dtype of the computation, float32, bfloat16 or float16; None: that of the input.
      param_dtype: dtype of the parameters.
      kernel_init: initialiser of all matrices, called with (key, shape, dtype); None: truncated normal with variance
        1 / fan-in, where the fan excludes the expert axis.
      rngs: random keys; the layer uses the stream `params`.
      {options}
        Shared experts have the layouts "dpf" and "fd", and with "fp8" the precision "highest".

    Raises:
      TypeError, ValueError: an option is wrong; the message names it.

    Gradients: for x and all parameters, as in `moe` and `shared_expert`, in the dtype of each; none for expert_bias.
    Source: as for `moe` and `shared_expert`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from anabranch.jax.nnx import MoE
      >>> layer = MoE(16, 32, num_experts=4, topk=2, aux_loss_coeff=0.01, rngs=nnx.Rngs(0))
      >>> result = layer(jnp.ones([3, 5, 16]))
      >>> result.output.shape, int(result.tokens_per_expert.sum())
      ((3, 5, 16), 30)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        num_experts: int,
        topk: int,
        *,
        use_expert_bias: bool = False,
        balance: str | None = None,
        qb_bin_bounds: tuple[float, float] = (-1.0, 1.0),
        qb_bins: int = 1000,
        use_gate_bias: bool = False,
        gated: bool = True,
        use_bias: bool = False,
        shared_features: int = 0,
        shared_gate: bool = False,
        lora_rank: int = 0,
        lora_alpha: float | None = None,
        lora_shared: Sequence[str] = (),
        packed: str | None = None,
        parallel: Parallel | None = None,
        dtype: Any | None = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer | None = None,
        rngs: nnx.Rngs,
        **options: Unpack[LayoutModuleKeywords],
    ):
        check_names("MoE", LAYOUT_MODULE_NAMES, options)
        largest = check.INDEX_LIMIT - 1
        D = check.integer("in_features", in_features, 1, largest)
        F = check.integer("hidden_features", hidden_features, 1, largest)
        E = check.integer("num_experts", num_experts, 1, largest)
        S = check.integer("shared_features", shared_features, 0, largest)
        parts = 2 if check.boolean("gated", gated) else 1
        use_bias = check.boolean("use_bias", use_bias)
        use_expert_bias = check.boolean("use_expert_bias", use_expert_bias)
        use_gate_bias = check.boolean("use_gate_bias", use_gate_bias)
        if check.boolean("shared_gate", shared_gate) and not S:
            raise ValueError("shared_gate: got True without a shared expert, expected shared_features > 0")
        param_dtype = jnp.dtype(check.dtype("param_dtype", param_dtype, check.FLOATS))
        gate_init = initializer("kernel_init", kernel_init, default_gate_init)
        in_init = initializer("kernel_init", kernel_init, default_in_init)
        out_init = initializer("kernel_init", kernel_init, default_out_init)
        quantile = balance is not None and check.choice("balance", balance, ("quantile",)) == "quantile"
        lora = new_lora(lora_rank, lora_alpha, lora_shared)
        given = LayerOptions(
            topk=topk, qb_bins=qb_bins if quantile else None, lora_scale=lora.scale if lora.rank else 1.0, **options
        )
        layouts = given.layouts()
        if layer_config(given, E, parts, parallel).ffn.fp8:
            check_fp8_widths("hidden_features", f"{F} beside in_features {D}", in_features=D, hidden_features=F)
        self.packed = check_kind(packed, layouts, given.precision, in_features=D, hidden_features=F)
        self.options, self.parallel, self.in_features = given, parallel, D
        self.dtype = None if dtype is None else jnp.dtype(check.dtype("dtype", dtype, check.FLOATS))
        self.qb_bin_bounds = host_bounds(qb_bin_bounds) if quantile else None
        key = _params_stream(rngs)

        def parameter(name: str, value: jax.Array, kind: type[nnx.Variable] = nnx.Param) -> Any:
            if kind is nnx.Param and name in ("w_in", "w_out", "b_in"):
                value = value.transpose(layouts.from_ours(name))
            if parallel is None:
                return kind(value)
            try:
                return kind(value, out_sharding=sharding(parallel, name, layouts, lora.shared))
            except ValueError as error:  # flax found no mesh, or the mesh does not fit the parameter
                raise ValueError(
                    f"parallel: got {parallel}, which does not place {name} {check.describe(value)}, expected one "
                    f"with a mesh, or jax.set_mesh(mesh): {error}"
                ) from error

        self.gate = parameter("gate", gate_init(key(), (D, E), param_dtype))
        matrices = {"w_in": in_init(key(), (E, D, parts, F), param_dtype)}
        matrices["w_out"] = out_init(key(), (E, F, D), param_dtype)
        for name, value in matrices.items():
            setattr(self, name, parameter(name, value) if self.packed is None else None)
            if self.packed is not None:
                arrays = _PACK[self.packed](value.transpose(layouts.from_ours(name)))
                spec_names = (name, f"{name}_block_scales")
                for field, spec_name, array in zip(arrays._fields, spec_names, arrays, strict=True):
                    setattr(self, f"{name}_{field}", parameter(spec_name, array, PackedWeights))
        self.gate_bias = parameter("gate_bias", jnp.zeros((E,), param_dtype)) if use_gate_bias else None
        self.b_in = parameter("b_in", jnp.zeros((E, parts, F), param_dtype)) if use_bias else None
        self.b_out = parameter("b_out", jnp.zeros((E, D), param_dtype)) if use_bias else None
        self.expert_bias = RouterState(jnp.zeros((E,), jnp.float32)) if use_expert_bias or quantile else None
        self.shared_in = nnx.Param(in_init(key(), (1, D, parts, S), param_dtype)[0]) if S else None
        self.shared_out = nnx.Param(out_init(key(), (1, S, D), param_dtype)[0]) if S else None
        self.shared_gate = nnx.Param(gate_init(key(), (D, 1), param_dtype)) if shared_gate else None
        sizes = {"e": E, "d": D, "p": parts, "f": F}
        shapes = factor_shapes(sizes, lora.rank, PROJECTIONS, lora.shared) if lora.rank else {}
        for name in Lora._fields:
            factor = None
            if name in shapes:
                new = new_factor(name, key() if name.startswith("a") else None, shapes[name], param_dtype)
                factor = parameter(f"lora_{name}", new, nnx.LoRAParam)
            setattr(self, f"lora_{name}", factor)

    def __call__(
        self,
        x: jax.Array,
        *,
        token_mask: jax.Array | None = None,
        forced_experts: jax.Array | None = None,
        replay: Replay | None = None,
        quantized: QuantizedExperts | None = None,
    ) -> MoEOutput:
        """Applies the layer.

        Args:
          x: [..., D] float32, bfloat16 or float16.
          token_mask: bool [...]; False marks padding, which has zero output and is not counted.
          forced_experts: int [..., K]; gives the selection; an error with an expert bias or groups, unlike replay.
          replay: a recorded routing, as in `moe`.
          quantized: with precision "fp8", w_in and w_out as returned by `quantize_experts`; None: quantised here.

        Returns:
          MoEOutput of `moe`; output [..., D] in the dtype of the computation. Inside `nnx.capture` with
          `nnx.Intermediate` the layer also computes and sows `router_logits`, float32 [..., E].

        Raises:
          TypeError: an argument or a replaced parameter has the wrong type or dtype.
          ValueError: a shape does not fit, or an argument contradicts the layer's options.
        """
        x = check.array("x", x, check.FLOATS, (..., ("in_features", self.in_features)))
        dtype = x.dtype if self.dtype is None else self.dtype
        x = cast(x, dtype)

        def value(variable: nnx.Variable | None) -> Any:
            return None if variable is None else cast(variable[...], dtype)

        def weights(variable: nnx.Variable) -> jax.Array:  # float32 stays: moe() then does not round the gradients
            return variable[...] if variable[...].dtype == jnp.float32 else value(variable)

        arrays = dict(
            x=x,
            gate=self.gate[...],
            w_in=self._weight("w_in", weights),
            w_out=self._weight("w_out", weights),
            gate_bias=None if self.gate_bias is None else self.gate_bias[...],
            b_in=value(self.b_in),
            b_out=value(self.b_out),
            expert_bias=None if self.expert_bias is None else self._bias(),
            token_mask=token_mask,
            forced_experts=forced_experts,
            replay=replay,
            qb_bin_bounds=self.qb_bin_bounds,
        )
        factors = (getattr(self, f"lora_{name}") for name in Lora._fields)
        lora = Lora(*(None if factor is None else weights(factor) for factor in factors))
        result = run_layer(self.options, arrays, self.parallel, quantized, lora)
        if any(type(captured) is nnx.Intermediate for captured in getattr(self, "__captures__", ())):
            bias = None if self.gate_bias is None else self.gate_bias[...]
            self.sow(nnx.Intermediate, "router_logits", router_logits(x, self.gate[...], bias))
        if self.shared_in is None:
            return result
        shared = shared_expert(
            x,
            value(self.shared_in),
            value(self.shared_out),
            activation=self.options.activation,
            w_gate=None if self.shared_gate is None else self.shared_gate[...],
            token_mask=token_mask,
            precision=dense_precision(self.options.precision),
        )
        return result._replace(output=result.output + shared)

    def _weight(self, name: str, plain: Any) -> Any:
        """The argument w_in or w_out of `moe`. plain: reads a variable that is not packed."""
        if self.packed is None:
            return plain(getattr(self, name))
        kind = KINDS[self.packed]
        return kind(*(getattr(self, f"{name}_{field}")[...] for field in kind._fields))

    def _bias(self) -> jax.Array:
        """The expert bias as float32.

        Raises:
          TypeError, ValueError: the variable is not a float array [E].
        """
        bias = jnp.asarray(self.expert_bias[...])  # type: ignore[index]
        dtypes, E = (*check.FLOATS, "float64"), self.gate.shape[1]
        return cast(check.array("expert_bias", bias, dtypes, (("E", E),)), jnp.float32)

    def update_quantile_bias(self, qb_histogram: jax.Array) -> None:
        """Sets the selection bias with which every expert would have received an equal share of the tokens.

        This is quantile balancing. Call it once per step, outside the differentiated function.

        Args:
          qb_histogram: int32 [E, bins], summed over all tokens of the step.

        Raises:
          TypeError, ValueError: the histogram is wrong, or the layer does not have `balance="quantile"`.
        """
        if self.expert_bias is None or self.qb_bin_bounds is None:
            raise ValueError(
                'update_quantile_bias: got a layer without quantile balancing, expected balance="quantile"'
            )
        shape = (("E", self.gate.shape[1]), ("bins", self.options.qb_bins))
        lower, upper = self.qb_bin_bounds
        counts = check.array("qb_histogram", qb_histogram, ("int32",), shape)
        # set_value adopts the dtype of the new value; assigning to [...] would round to the old dtype.
        self.expert_bias.set_value(quantile_bias(counts, lower, upper, self.options.topk))

    def update_expert_bias(self, tokens_per_expert: jax.Array, rate: float = 1e-3) -> None:
        """Moves the selection bias towards balance: b += rate * sign(mean load - load).

        Auxiliary-loss-free load balancing (Wang et al. 2024, arXiv:2408.15664). Call it once per step with the counts
        of the whole batch, outside the differentiated function.

        Args:
          tokens_per_expert: int [E], summed over all tokens of the step.
          rate: step size of the bias, a number >= 0 or a float scalar, for example from a schedule. The value of a
            scalar on a GPU, or in a jitted program, is not checked.

        Raises:
          TypeError: an argument has the wrong type or dtype.
          ValueError: an argument is out of range, or the layer does not have `use_expert_bias`.
        """
        if self.expert_bias is None:
            raise ValueError("update_expert_bias: got a layer without expert bias, expected use_expert_bias=True")
        bias = self._bias()
        load = check.amounts("tokens_per_expert", tokens_per_expert, check.INDICES, bias.shape)
        self.expert_bias.set_value(_moved(bias, load, _rate(rate)))


@compiled()
def _moved(bias: jax.Array, load: jax.Array, rate: Any) -> jax.Array:
    """The expert bias after a step of `update_expert_bias`."""
    load = load.astype(jnp.float32)
    return (bias + rate * jnp.sign(load.mean() - load)).astype(jnp.float32)


def _rate(value: Any) -> Any:
    """Checks the step size: a number >= 0, or a float scalar, whose value is checked if it is on the host."""
    if isinstance(value, jax.Array):
        check.array("rate", value, check.FLOATS, ())
        if isinstance(value, jax.core.Tracer) or any(device.platform != "cpu" for device in value.devices()):
            return value
    known = float(value) if isinstance(value, jax.Array) else check.number("rate", value)
    if not 0 <= known < math.inf:
        raise ValueError(f"rate: got {known}, expected a finite number >= 0")
    return value if isinstance(value, jax.Array) else known
