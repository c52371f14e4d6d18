"""Flax Linen layer with the attribute names of TransformerEngine's MoEBlock."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from anabranch.jax import _check
from anabranch.jax._ffn import ACTIVATIONS
from anabranch.jax.moe import moe
from anabranch.jax.nnx import default_gate_init, default_in_init, default_out_init
from anabranch.jax.parallel import Parallel
from anabranch.jax.router_te import normalizes, score_function_name

Initializer = Callable[..., jax.Array]
Axes = tuple[str | None, ...]


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
      use_pre_softmax: weights are the softmax over all experts, not over the chosen ones.
      num_groups, group_topk: group-limited routing; <= 0: none.
      scaling_factor: multiplies the weights.
      use_expert_bias: a selection bias [E]; not with softmax.
      aux_loss_coeff: coefficient of the load-balance loss; 0: none.
      use_bias: biases of the experts.
      align_size: rows of an expert are padded to a multiple of this; 0: not padded.
      parallel: how the block is spread over a mesh; the axes of the kernels are to be mapped to `parallel.specs()`.
      gate_kernel_axes, wi_kernel_axes, wo_kernel_axes: logical axes of the kernels; () leaves one unannotated. Those of
        `wi` name [E, D, F].
      dtype: dtype of the parameters and of the computation.
      kernel_init, bias_init, expert_bias_init: initialisers; kernel_init None: truncated normal of variance 1 / fan-in,
        the expert axis left out of the fan.
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
        activation = "silu" if self.activation_type == "swish" else self.activation_type
        _check.choice("activation_type", activation, ACTIVATIONS)
        score_function = score_function_name(self.score_function)
        if self.use_expert_bias and score_function == "softmax":
            raise ValueError("use_expert_bias: got True with softmax, expected sigmoid or sqrtsoftplus scores")

        def parameter(name: str, init: Initializer, axes: Axes, shape: tuple[int, ...]) -> jax.Array:
            partitioned = nn.with_logical_partitioning(init, axes) if axes else init
            value: jax.Array = self.param(name, partitioned, shape, self.dtype)  # type: ignore[assignment]
            return value

        wi_axes = (*self.wi_kernel_axes[:2], None, *self.wi_kernel_axes[2:])
        bias_axes = self.wi_kernel_axes and (self.wi_kernel_axes[0], None, self.wi_kernel_axes[2])
        out_bias_axes = self.wo_kernel_axes and (self.wo_kernel_axes[0], self.wo_kernel_axes[2])
        gate = parameter("gate_kernel", self.kernel_init or default_gate_init, self.gate_kernel_axes, (D, E))
        w_in = parameter("wi", self.kernel_init or default_in_init, self.wi_kernel_axes and wi_axes, (E, D, 2, F))
        w_out = parameter("wo", self.kernel_init or default_out_init, self.wo_kernel_axes, (E, F, D))
        b_in = parameter("wi_bias", self.bias_init, bias_axes, (E, 2, F)) if self.use_bias else None
        b_out = parameter("wo_bias", self.bias_init, out_bias_axes, (E, D)) if self.use_bias else None
        expert_bias = None
        if self.use_expert_bias:

            def initial_bias() -> jax.Array:
                return self.expert_bias_init(self.make_rng("params"), (E,), jnp.float32)

            expert_bias = self.variable("router_state", "expert_bias", initial_bias).value

        result = moe(
            inputs,
            gate,
            w_in,
            w_out,
            b_in=b_in,
            b_out=b_out,
            topk=self.num_experts_per_tok,
            score_function=score_function,
            normalize=normalizes(score_function, self.num_experts_per_tok, self.use_pre_softmax),
            expert_bias=expert_bias,
            num_groups=self.num_groups if (self.num_groups or 0) > 0 else None,
            group_topk=self.group_topk if (self.group_topk or 0) > 0 else None,
            scaling_factor=self.scaling_factor,
            activation=activation,
            aux_loss_coeff=self.aux_loss_coeff,
            align_size=self.align_size,
            parallel=self.parallel,
        )
        return result.output, result.aux_loss if self.aux_loss_coeff else None
