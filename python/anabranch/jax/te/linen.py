"""Flax Linen layer with the attributes of TransformerEngine's MoEBlock and additional ones."""

from typing import Any

import jax
import jax.numpy as jnp

from anabranch._packages import needed_by
from anabranch.activation import Activation, as_activation
from anabranch.dense_router import normalizes
from anabranch.jax.binding import check
from anabranch.jax.binding.arrays import cast
from anabranch.jax.layer.gate import router_logits
from anabranch.jax.layer.initializers import (
    Initializer,
    default_gate_init,
    default_in_init,
    default_out_init,
    default_shared_in_init,
    initializer,
)
from anabranch.jax.layer.lora import new_factor
from anabranch.jax.layer.moe import layer_config, run_layer
from anabranch.jax.layer.shared_expert import shared_expert
from anabranch.jax.ops.quantized import QuantizedExperts
from anabranch.jax.parallel.parallel import Parallel
from anabranch.jax.te.router import score_function_name
from anabranch.layouts import IN_LAYOUTS, OUT_LAYOUTS, Layouts
from anabranch.lora import PROJECTIONS, Lora, factor_shapes, new_lora
from anabranch.options import LayerOptions
from anabranch.precision import dense_precision
from anabranch.replay import Replay

with needed_by("anabranch.jax.linen"):
    import flax.linen as nn

Axes = tuple[str | None, ...]


def _check_axes(name: str, axes: Any, size: int | None) -> None:
    """Checks logical axes: `size` names (None: any number), or () for none."""
    given = isinstance(axes, (tuple, list)) and all(axis is None or isinstance(axis, str) for axis in axes)
    if not given or (size is not None and len(axes) not in (0, size)):
        error = ValueError if given else TypeError
        expected = "axes" if size is None else f"{size} axes"
        raise error(f"{name}: got {check.describe(axes)}, expected the names of {expected}, or ()")


class MoEBlock(nn.Module):
    """A gated Mixture-of-Experts block: sum over the selected experts of weight * phi(x W_0, x W_1) W_out.

    Parameters: `gate_kernel` [D, E], `wi` [E, D, 2, F] (W_0 and W_1; from a checkpoint with separate arrays:
    `jnp.stack([wi_0, wi_1], axis=2)`), `wo` [E, F, D]; with `use_ffn_bias` also `wi_bias` [E, 2, F]
    (`jnp.stack([wi_0_bias, wi_1_bias], axis=1)`) and `wo_bias` [E, D]; with `use_gate_bias` also `gate_bias` [E]; with
    `shared_features` S > 0 also `shared_wi` [D, 2, S] and `shared_wo` [S, D]; with `shared_gate` also
    `shared_gate_kernel` [D, 1]. With `lora_rank` r > 0 the collection `lora` has the adapters' factors `a_in` [E or 1,
    D, r], `b_in` [E or 1, r, 2, F], `a_out` [E or 1, F, r] and `b_out` [E or 1, r, D]; to train them alone,
    differentiate with respect to this collection: frozen parameters cost nothing. The expert bias is a variable in the
    collection `router_state`, not a parameter.

    Attributes:
      num_experts: E.
      num_experts_per_tok: K.
      intermediate_size: F.
      activation_type: a name or an `Activation`, as `activation` of `moe`.
      score_function: "softmax", "sigmoid" or "sqrtsoftplus", or a ScoreFunction.
      use_pre_softmax: weights are the softmax over all experts, not over the selected ones; other scores ignore it.
      num_groups, group_topk: group-limited routing; None, 0 or -1: none.
      scaling_factor: multiplies the weights.
      use_expert_routing_bias: whether the block has a selection bias [E], which softmax does not allow.
        `use_expert_bias` is its earlier name.
      aux_loss_coeff: coefficient of the load-balance loss; 0: none.
      gate_kernel_axes, wi_kernel_axes, wo_kernel_axes: logical axes of the kernels; () leaves one unannotated. Those of
        `wi` name [E, D, F].
      input_axes: logical axes to which the inputs are constrained; (): none.
      data_parallelism_axes: () or the data axes of `parallel`, which spreads the block over a mesh.
      apply_topk_weights_early: multiply by the weights before W_out instead of at the combine; same result.
      recv_capacity_per_rank: must be None; `Parallel.capacity_factor` bounds buffers.
      dtype: dtype of the parameters and of the computation, float32, bfloat16 or float16.
      kernel_init, bias_init, expert_bias_init: initialisers; kernel_init None: truncated normal with variance
        1 / fan-in, where the fan excludes the expert axis.
      use_ffn_bias: whether the experts have biases. `use_bias` is its earlier name.
      quantization_recipe: must be None; the block computes in `dtype`.
      align_size: rows of an expert are padded to a multiple of this; 0: no padding.
      parallel: spreads the block over a mesh; map the axes of the kernels to `parallel.specs()`.
      z_loss_coeff: coefficient of the mean squared logsumexp of the logits; 0: none.
      group_score_topk: the number of a group's scores in its group score; see `moe`, also for None.
      use_gate_bias: whether the router's logits have a bias parameter.
      shared_features: width S of a dense expert that processes every token; 0: none.
      shared_gate: multiply the shared expert's output by sigmoid(<x, shared_gate_kernel>).
      wi_layout, wo_layout: the order of the axes of `wi`, `wi_bias` and `wo`, as `w_in_layout` and `w_out_layout` of
        `moe`.
      precision: how float32 operands of the experts' GEMMs are multiplied, "highest" or "tf32", as in `moe`; also for
        the shared expert. "fp8": the operands of the experts' GEMMs are quantised, those of a shared expert are not.
      fp8_scales: with "fp8", "float32" or "power_of_two", as in `moe`.
      lora_rank: rank of low-rank adapters of wi and wo, which start without effect; 0: no adapters.
      lora_alpha: the adapters are multiplied by lora_alpha / lora_rank; None: by 1.
      lora_shared: the factors that all experts share, for example ("a_in",).

    Raises:
      TypeError, ValueError: from the constructor, if an attribute is wrong; the message names it.

    Gradients: for the inputs and all parameters, as in `moe` and `shared_expert`; none for the expert bias.
    Source: TransformerEngine (interface); `moe`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from anabranch.jax.linen import MoEBlock
      >>> block, x = MoEBlock(num_experts=4, intermediate_size=8, aux_loss_coeff=0.01), jnp.ones([3, 5, 16])
      >>> variables = block.init(jax.random.key(0), x)
      >>> (output, aux_loss), sown = block.apply(variables, x, mutable=["intermediates"])
      >>> output.shape, int(sown["intermediates"]["tokens_per_expert"][0].sum())
      ((3, 5, 16), 30)
    """

    # TransformerEngine's attributes, in its order.
    num_experts: int = 8
    num_experts_per_tok: int = 2
    intermediate_size: int = 2048
    activation_type: str | Activation = "silu"
    score_function: Any = "softmax"
    use_pre_softmax: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    scaling_factor: float = 1.0
    use_expert_routing_bias: bool = False
    aux_loss_coeff: float = 0.0
    gate_kernel_axes: Axes = ()
    wi_kernel_axes: Axes = ("exp", "embed", "mlp")
    wo_kernel_axes: Axes = ("exp", "mlp", "embed")
    input_axes: Axes = ()
    data_parallelism_axes: tuple[str, ...] = ()
    apply_topk_weights_early: bool = False
    recv_capacity_per_rank: None = None
    dtype: Any = jnp.float32
    kernel_init: Initializer | None = None
    bias_init: Initializer = nn.initializers.zeros
    expert_bias_init: Initializer = nn.initializers.zeros
    use_ffn_bias: bool = False
    quantization_recipe: None = None
    # Earlier names of TransformerEngine's attributes.
    use_expert_bias: bool = False
    use_bias: bool = False
    # Additional attributes.
    align_size: int = 0
    parallel: Parallel | None = None
    z_loss_coeff: float = 0.0
    group_score_topk: int | None = None
    use_gate_bias: bool = False
    shared_features: int = 0
    shared_gate: bool = False
    wi_layout: str = "dpf"
    wo_layout: str = "fd"
    precision: str = "highest"
    fp8_scales: str = "float32"
    lora_rank: int = 0
    lora_alpha: float | None = None
    lora_shared: tuple[str, ...] = ()

    # Helpers are marked nowrap: methods that Flax wraps can't be called before a module is set up (tabulate asserts
    # it), and later calls would appear as rows of tabulate's table.
    def __post_init__(self) -> None:
        """Checks the attributes."""
        self._options()
        largest = check.INDEX_LIMIT - 1
        check.integer("intermediate_size", self.intermediate_size, 1, largest)
        check.integer("shared_features", self.shared_features, 0, largest)
        flags = ("use_expert_routing_bias", "use_expert_bias", "use_ffn_bias", "use_bias", "use_gate_bias")
        for name in (*flags, "shared_gate"):
            check.boolean(name, getattr(self, name))
        if self.shared_gate and not self.shared_features:
            raise ValueError("shared_gate: got True without a shared expert, expected shared_features > 0")
        for name in ("use_expert_routing_bias", "use_expert_bias"):
            if getattr(self, name) and score_function_name(self.score_function) == "softmax":
                raise ValueError(f"{name}: got True with softmax, expected sigmoid or sqrtsoftplus scores")
        for name, size in (("gate_kernel_axes", 2), ("wi_kernel_axes", 3), ("wo_kernel_axes", 3)):
            _check_axes(name, getattr(self, name), size)
        _check_axes("input_axes", self.input_axes, None)
        self._check_unsupported()
        check.dtype("dtype", self.dtype, check.FLOATS)
        initializer("kernel_init", self.kernel_init, default_in_init)
        for name in ("bias_init", "expert_bias_init"):
            initializer(name, getattr(self, name))
        super().__post_init__()

    @nn.nowrap
    def _check_unsupported(self) -> None:
        """Checks TransformerEngine's attributes that allow only one value here."""
        axes, parallel_axes = self.data_parallelism_axes, () if self.parallel is None else self.parallel.data_axes
        if not isinstance(axes, (tuple, list)):
            raise TypeError(f"data_parallelism_axes: got {check.describe(axes)}, expected the names of axes, or ()")
        if tuple(axes) not in ((), tuple(parallel_axes)):
            raise ValueError(
                f"data_parallelism_axes: got {check.shown(axes)}, expected () or the data_axes of parallel, "
                f"{tuple(parallel_axes)}, which spreads the block over a mesh"
            )
        unsupported = {
            "recv_capacity_per_rank": "Parallel(capacity_factor=...) bounds buffers",
            "quantization_recipe": "the block computes in its dtype",
        }
        for name, reason in unsupported.items():
            value = getattr(self, name)
            if value is not None:
                raise ValueError(f"{name}: got {check.describe(value)}, expected None; {reason}")

    @nn.nowrap
    def _options(self) -> LayerOptions:
        """The options by the names of `moe`; errors use the attributes' names."""
        E = check.integer("num_experts", self.num_experts, 1, check.INDEX_LIMIT - 1)
        K = check.integer("num_experts_per_tok", self.num_experts_per_tok, 1, E)
        score_function = score_function_name(self.score_function)
        options = LayerOptions(
            topk=K,
            score_function=score_function,
            normalize=normalizes(score_function, K, check.boolean("use_pre_softmax", self.use_pre_softmax)),
            num_groups=self.num_groups,
            group_topk=self.group_topk,
            group_score_topk=self.group_score_topk,
            scaling_factor=self.scaling_factor,
            activation=as_activation(self.activation_type, 2, "activation_type"),
            weight_early=check.boolean("apply_topk_weights_early", self.apply_topk_weights_early),
            aux_loss_coeff=self.aux_loss_coeff,
            z_loss_coeff=self.z_loss_coeff,
            align_size=self.align_size,
            w_in_layout=check.choice("wi_layout", self.wi_layout, IN_LAYOUTS),
            w_out_layout=check.choice("wo_layout", self.wo_layout, OUT_LAYOUTS),
            precision=self.precision,
            fp8_scales=self.fp8_scales,
            lora_scale=new_lora(self.lora_rank, self.lora_alpha, self.lora_shared).scale,
        )
        layer_config(options, E, 2, self.parallel)
        return options

    @nn.nowrap
    def _parameter(self, name: str, init: Initializer, axes: Axes, shape: tuple[int, ...]) -> jax.Array:
        partitioned = nn.with_logical_partitioning(init, axes) if axes else init
        value: jax.Array = self.param(name, partitioned, shape, self.dtype)  # type: ignore[assignment]
        return value

    @nn.nowrap
    def _expert_parameter(
        self, name: str, argument: str, init: Initializer, axes: Axes, shape: tuple[int, ...]
    ) -> jax.Array:
        """The parameter for an argument of `moe`, in its layout; axes and shape are those of the default layout."""
        order = Layouts(self.wi_layout, self.wo_layout).from_ours(argument)
        if list(order) == sorted(order):
            return self._parameter(name, init, axes, shape)

        def in_layout(key: jax.Array, _: tuple[int, ...], dtype: Any) -> jax.Array:
            value = init(key, shape, dtype)
            if not isinstance(value, jax.Array):  # a box that names the axes of the default layout
                raise ValueError(
                    f"{name}: got an initialiser whose value contains its sharding, expected the axes' names in "
                    "wi_kernel_axes and wo_kernel_axes, since wi_layout or wo_layout is not the default"
                )
            return value.transpose(order)

        def ordered(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(values[axis] for axis in order) if values else ()

        return self._parameter(name, in_layout, ordered(axes), ordered(shape))

    @nn.nowrap
    def _initializer(self, name: str, default: Initializer | None = None) -> Initializer:
        return initializer(name, getattr(self, name), default)

    @nn.nowrap
    def _expert_bias(self) -> jax.Array | None:
        if not (self.use_expert_routing_bias or self.use_expert_bias):
            return None

        def initial() -> jax.Array:
            init = self._initializer("expert_bias_init")
            return init(self.make_rng("params"), (self.num_experts,), jnp.float32)

        value: jax.Array = self.variable("router_state", "expert_bias", initial).value
        return value

    @nn.nowrap
    def _lora(self, D: int) -> Lora | None:
        """The factors of the adapters, None without adapters."""
        if not self.lora_rank:
            return None
        sizes = {"e": self.num_experts, "d": D, "p": 2, "f": self.intermediate_size}
        shapes = factor_shapes(sizes, self.lora_rank, PROJECTIONS, self.lora_shared)
        (experts, d, f), out = self.wi_kernel_axes or (None,) * 3, self.wo_kernel_axes or (None,) * 3
        axes = {"a_in": (d, None), "b_in": (None, None, f), "a_out": (out[1], None), "b_out": (None, out[2])}

        def factor(name: str, shape: tuple[int, ...]) -> jax.Array:
            annotated = self.wi_kernel_axes if name.endswith("in") else self.wo_kernel_axes
            first = None if name in self.lora_shared else experts if name.endswith("in") else out[0]

            def initial() -> Any:
                def init(key: jax.Array) -> jax.Array:
                    return new_factor(name, key, shape, self.dtype)

                boxed = nn.with_logical_partitioning(init, (first, *axes[name])) if annotated else init
                return boxed(self.make_rng("params"))

            value: jax.Array = self.variable("lora", name, initial).value
            return value

        return Lora(**{name: factor(name, shape) for name, shape in shapes.items()})

    @nn.nowrap
    def _shared(self, x: jax.Array, token_mask: jax.Array | None) -> jax.Array:
        """Computes the shared expert's output."""
        D, S, axes = x.shape[-1], self.shared_features, self.wi_kernel_axes
        in_init = self._initializer("kernel_init", default_shared_in_init)
        out_init = self._initializer("kernel_init", default_gate_init)
        w_in = self._parameter("shared_wi", in_init, axes and (axes[1], None, axes[2]), (D, 2, S))
        w_out = self._parameter("shared_wo", out_init, self.wo_kernel_axes and self.wo_kernel_axes[1:], (S, D))
        gate = None
        if self.shared_gate:
            gate_init = self._initializer("kernel_init", default_gate_init)
            gate_axes = self.gate_kernel_axes and (self.gate_kernel_axes[0], None)
            gate = self._parameter("shared_gate_kernel", gate_init, gate_axes, (D, 1))
        options: dict[str, Any] = dict(activation=self.activation_type, precision=dense_precision(self.precision))
        return shared_expert(x, w_in, w_out, w_gate=gate, token_mask=token_mask, **options)

    @nn.compact
    def __call__(
        self,
        inputs: jax.Array,
        *,
        token_mask: jax.Array | None = None,
        forced_experts: jax.Array | None = None,
        replay: Replay | None = None,
        quantized: QuantizedExperts | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Applies the block.

        Args:
          inputs: [..., D] of any float dtype; the block computes in `dtype`.
          token_mask: bool [...]; False marks padding, which has zero output and is not counted.
          forced_experts: int [..., K]; gives the selection; an error with an expert bias or groups, unlike replay.
          replay: a recorded routing, as in `moe`.
          quantized: with precision "fp8", wi and wo as returned by `quantize_experts`; None: quantised here.

        Returns:
          (output [..., D], aux_loss). aux_loss is a float32 scalar to add to the loss, the sum of the load-balance loss
          and the z-loss, or None if neither has a coefficient.
          The block sows `tokens_per_expert` int32 [E], `dropped` int32, `dropped_by_source` int32 [S], `aux_loss` and
          `z_loss` float32, `experts` int32 [..., K] and `weights` float32 [..., K], the fields of a `Replay`, into the
          collection `intermediates`. If the collection
          `router_logits` is mutable, the block computes `logits`, float32 [..., E], and sows them into it.

        Raises:
          TypeError: an argument or a parameter has the wrong type or dtype.
          ValueError: a shape does not fit, or an argument contradicts the block's attributes.
        """
        inputs = check.array("inputs", inputs, check.FLOATS, (..., "D"))
        inputs = cast(inputs, self.dtype)
        E, D, F = self.num_experts, inputs.shape[-1], self.intermediate_size
        if D < 1:
            raise ValueError(f"inputs: got {check.describe(inputs)}, expected [..., D] with D >= 1")
        if self.input_axes:
            _check_axes("input_axes", self.input_axes, inputs.ndim)
            inputs = nn.with_logical_constraint(inputs, self.input_axes)

        wi_axes = (*self.wi_kernel_axes[:2], None, *self.wi_kernel_axes[2:])
        bias_axes = self.wi_kernel_axes and (self.wi_kernel_axes[0], None, self.wi_kernel_axes[2])
        out_bias_axes = self.wo_kernel_axes and (self.wo_kernel_axes[0], self.wo_kernel_axes[2])
        gate_init = self._initializer("kernel_init", default_gate_init)
        in_init = self._initializer("kernel_init", default_in_init)
        out_init = self._initializer("kernel_init", default_out_init)
        bias_init, use_bias = self._initializer("bias_init"), self.use_ffn_bias or self.use_bias
        gate = self._parameter("gate_kernel", gate_init, self.gate_kernel_axes, (D, E))
        gate_bias = self._parameter("gate_bias", bias_init, (), (E,)) if self.use_gate_bias else None
        if self.is_mutable_collection("router_logits") and not self.is_initializing():
            self.sow("router_logits", "logits", router_logits(inputs, gate, gate_bias))
        arrays = dict(
            x=inputs,
            gate=gate,
            w_in=self._expert_parameter("wi", "w_in", in_init, self.wi_kernel_axes and wi_axes, (E, D, 2, F)),
            w_out=self._expert_parameter("wo", "w_out", out_init, self.wo_kernel_axes, (E, F, D)),
            b_in=self._expert_parameter("wi_bias", "b_in", bias_init, bias_axes, (E, 2, F)) if use_bias else None,
            b_out=self._parameter("wo_bias", bias_init, out_bias_axes, (E, D)) if use_bias else None,
            gate_bias=gate_bias,
            expert_bias=self._expert_bias(),
            token_mask=token_mask,
            forced_experts=forced_experts,
            replay=replay,
        )
        result = run_layer(self._options(), arrays, self.parallel, quantized, self._lora(D))
        for name in ("tokens_per_expert", "dropped", "dropped_by_source", "aux_loss", "z_loss", "experts", "weights"):
            self.sow("intermediates", name, getattr(result, name))
        output = result.output
        if self.shared_features:
            output = output + self._shared(inputs, token_mask)
        has_loss = self.aux_loss_coeff or self.z_loss_coeff
        return output, result.aux_loss + result.z_loss if has_loss else None
