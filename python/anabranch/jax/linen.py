"""Flax Linen layer in the manner of TransformerEngine's MoEBlock."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from anabranch.jax import _check
from anabranch.jax._ffn import ACTIVATIONS
from anabranch.jax._initializers import (
    Initializer,
    default_gate_init,
    default_in_init,
    default_out_init,
    initializer,
)
from anabranch.jax._mixture import FLOATS
from anabranch.jax.moe import layer_config, moe
from anabranch.jax.parallel import Parallel
from anabranch.jax.router_te import normalizes, score_function_name

Axes = tuple[str | None, ...]


def _activation(activation_type: Any) -> str:
    """The name that `moe` takes."""
    name = _check.choice("activation_type", activation_type, (*ACTIVATIONS, "swish"))
    return "silu" if name == "swish" else name


def _check_axes(name: str, axes: Any, size: int) -> None:
    """Logical axes of a kernel: as many names, or () for none."""
    given = isinstance(axes, (tuple, list)) and all(axis is None or isinstance(axis, str) for axis in axes)
    if not given or len(axes) not in (0, size):
        error = ValueError if given else TypeError
        raise error(f"{name}: got {_check.describe(axes)}, expected the names of {size} axes, or ()")


class MoEBlock(nn.Module):
    """A Mixture-of-Experts block, gated: sum over the chosen experts of weight * (act(x W_0) * (x W_1)) W_out.

    Parameters: `gate_kernel` [D, E], `wi` [E, D, 2, F] (W_0 and W_1 side by side: `jnp.stack([wi_0, wi_1], axis=2)` of
    a checkpoint that keeps them apart), `wo` [E, F, D], with `use_bias` also `wi_bias` [E, 2, F] and `wo_bias` [E, D].
    The expert bias is a variable of the collection `router_state`, so that no optimiser sees it.

    Attributes:
      num_experts: E.
      num_experts_per_tok: K.
      intermediate_size: F.
      activation_type: "silu" (also "swish"), "gelu", "relu" or "relu2".
      score_function: "softmax", "sigmoid" or "sqrtsoftplus", or a ScoreFunction.
      use_pre_softmax: weights are the softmax over all experts, not over the chosen ones; other scores take no notice.
      num_groups, group_topk: group-limited routing; None, 0 or -1: none.
      scaling_factor: multiplies the weights.
      use_expert_bias: a selection bias [E]; not with softmax.
      aux_loss_coeff: coefficient of the load-balance loss; 0: none.
      use_bias: biases of the experts.
      align_size: rows of an expert are padded to a multiple of this; 0: not padded.
      parallel: how the block is spread over a mesh; the axes of the kernels are to be mapped to `parallel.specs()`.
      gate_kernel_axes, wi_kernel_axes, wo_kernel_axes: logical axes of the kernels; () leaves one unannotated. Those of
        `wi` name [E, D, F].
      dtype: dtype of the parameters and of the computation, float32 or bfloat16.
      kernel_init, bias_init, expert_bias_init: initialisers; kernel_init None: truncated normal of variance 1 / fan-in,
        the expert axis left out of the fan.

    Raises:
      TypeError, ValueError: when it is made, an attribute is wrong; the message names it.
    """

    num_experts: int = 8
    num_experts_per_tok: int = 2
    intermediate_size: int = 2048
    activation_type: str = "silu"
    score_function: Any = "softmax"
    use_pre_softmax: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    scaling_factor: float = 1.0
    use_expert_bias: bool = False
    aux_loss_coeff: float = 0.0
    use_bias: bool = False
    align_size: int = 0
    parallel: Parallel | None = None
    gate_kernel_axes: Axes = ()
    wi_kernel_axes: Axes = ("exp", "embed", "mlp")
    wo_kernel_axes: Axes = ("exp", "mlp", "embed")
    dtype: Any = jnp.float32
    kernel_init: Initializer | None = None
    bias_init: Initializer = nn.initializers.zeros
    expert_bias_init: Initializer = nn.initializers.zeros

    def __post_init__(self) -> None:
        """Checks the attributes."""
        self._options()
        _check.integer("intermediate_size", self.intermediate_size, 1, _check.INDEX_LIMIT - 1)
        for name in ("use_expert_bias", "use_bias"):
            _check.boolean(name, getattr(self, name))
        if self.use_expert_bias and score_function_name(self.score_function) == "softmax":
            raise ValueError("use_expert_bias: got True with softmax, expected sigmoid or sqrtsoftplus scores")
        for name, size in (("gate_kernel_axes", 2), ("wi_kernel_axes", 3), ("wo_kernel_axes", 3)):
            _check_axes(name, getattr(self, name), size)
        _check.dtype("dtype", self.dtype, FLOATS)
        initializer("kernel_init", self.kernel_init, default_in_init)
        for name in ("bias_init", "expert_bias_init"):
            initializer(name, getattr(self, name))
        super().__post_init__()

    def _options(self) -> dict[str, Any]:
        """The options by the names of `moe`, checked by the names here."""
        E = _check.integer("num_experts", self.num_experts, 1, _check.INDEX_LIMIT - 1)
        K = _check.integer("num_experts_per_tok", self.num_experts_per_tok, 1, E)
        score_function = score_function_name(self.score_function)
        options: dict[str, Any] = dict(
            topk=K,
            score_function=score_function,
            normalize=normalizes(score_function, K, _check.boolean("use_pre_softmax", self.use_pre_softmax)),
            num_groups=self.num_groups,
            group_topk=self.group_topk,
            scaling_factor=self.scaling_factor,
            activation=_activation(self.activation_type),
            aux_loss_coeff=self.aux_loss_coeff,
            align_size=self.align_size,
            parallel=self.parallel,
        )
        layer_config(E, **options)
        return options

    @nn.compact
    def __call__(self, inputs: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Applies the block.

        Args:
          inputs: [..., D] of any float dtype; computed in `dtype`.

        Returns:
          (output [..., D], aux_loss: float32 scalar, or None without `aux_loss_coeff`).
        """
        inputs = _check.array("inputs", inputs, _check.FLOATS, (..., "D")).astype(self.dtype)
        E, D, F = self.num_experts, inputs.shape[-1], self.intermediate_size
        if D < 1:
            raise ValueError(f"inputs: got {_check.describe(inputs)}, expected [..., D] with D >= 1")

        def parameter(name: str, init: Initializer, axes: Axes, shape: tuple[int, ...]) -> jax.Array:
            partitioned = nn.with_logical_partitioning(init, axes) if axes else init
            value: jax.Array = self.param(name, partitioned, shape, self.dtype)  # type: ignore[assignment]
            return value

        wi_axes = (*self.wi_kernel_axes[:2], None, *self.wi_kernel_axes[2:])
        bias_axes = self.wi_kernel_axes and (self.wi_kernel_axes[0], None, self.wi_kernel_axes[2])
        out_bias_axes = self.wo_kernel_axes and (self.wo_kernel_axes[0], self.wo_kernel_axes[2])
        gate_init = initializer("kernel_init", self.kernel_init, default_gate_init)
        in_init = initializer("kernel_init", self.kernel_init, default_in_init)
        out_init = initializer("kernel_init", self.kernel_init, default_out_init)
        bias_init = initializer("bias_init", self.bias_init)
        gate = parameter("gate_kernel", gate_init, self.gate_kernel_axes, (D, E))
        w_in = parameter("wi", in_init, self.wi_kernel_axes and wi_axes, (E, D, 2, F))
        w_out = parameter("wo", out_init, self.wo_kernel_axes, (E, F, D))
        b_in = parameter("wi_bias", bias_init, bias_axes, (E, 2, F)) if self.use_bias else None
        b_out = parameter("wo_bias", bias_init, out_bias_axes, (E, D)) if self.use_bias else None
        expert_bias = None
        if self.use_expert_bias:

            def initial_bias() -> jax.Array:
                init = initializer("expert_bias_init", self.expert_bias_init)
                return init(self.make_rng("params"), (E,), jnp.float32)

            expert_bias = self.variable("router_state", "expert_bias", initial_bias).value

        result = moe(
            inputs,
            gate,
            w_in,
            w_out,
            b_in=b_in,
            b_out=b_out,
            expert_bias=expert_bias,
            **self._options(),
        )
        return result.output, result.aux_loss if self.aux_loss_coeff else None
