"""The layer's submodules, which it calls as modules: the router's gate and the shared expert.

If the gate has no hooks or other modifications (`is_plain`), the fused layer computes the logits instead, with bitwise
the same results.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.activation import Activation
from anabranch.torch.binding import check, private
from anabranch.torch.binding.group import with_mean_gradients
from anabranch.torch.layer.gate import logits
from anabranch.torch.layer.moe import flat, unflat
from anabranch.torch.layer.parameters import Initializer, check_plain, draw
from anabranch.torch.layer.shared_expert import dense_expert


class OnRanks(nn.Module):
    """A module with process groups: copies share the groups, and pickling raises."""

    group: Any
    """None: one process."""

    def _groups(self) -> list[Any]:
        return [] if self.group is None else [self.group]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy with the same process groups."""
        memo |= {id(group): group for group in self._groups()}
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle; raises if there are process groups, which belong to a running program."""
        if self._groups():
            raise TypeError(
                f"{type(self).__name__}: got a layer with a process group to pickle, expected one without; save its "
                "state_dict()"
            )
        return self.__dict__


class Gate(OnRanks, nn.Linear):
    """The router's gate: float32 logits of tokens.

        logits = x weight^T + bias

    The GEMM accumulates in float32 and its result is not rounded, for all dtypes and under torch.autocast. The gradient
    of x has the dtype of x. With `group`, gradients of the parameters are averaged over its ranks.
    """

    init: Initializer

    def __init__(
        self, in_features: int, out_features: int, bias: bool, init: Initializer, group: Any = None, **factory: Any
    ):
        self.__dict__.update(init=init, group=group)  # needed by reset_parameters, which nn.Linear's constructor calls
        super().__init__(in_features, out_features, bias, **factory)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises weight and bias; ValueError if one is computed from other tensors."""
        self.check_plain()
        draw(self.init, self.weight)
        if self.bias is not None:
            self.bias.zero_()

    def check_plain(self) -> None:
        """Raises if a weight is computed from other tensors."""
        check_plain(self, "weight", "bias")

    def forward(self, x: Tensor) -> Tensor:
        """Computes logits, float32 [..., E], from tokens [..., D]."""
        if not _holds_data(self.weight):
            if self.group is not None:
                kind = type(self.weight).__name__
                raise ValueError(f"weight: got a {kind} in a layer with group, expected a plain tensor")
            return super().forward(x).float()  # as the tensor's class defines it
        x = check.tensor("x", x, check.FLOATS, (..., ("in_features", self.in_features)))
        tokens = flat(x)
        assert tokens is not None
        return unflat(logits(tokens, *with_mean_gradients(self.group, self.weight.T, self.bias)), x.shape[:-1])


def _holds_data(parameter: Tensor) -> bool:
    """False for a wrapper subclass, such as a DTensor or a quantised tensor."""
    return not hasattr(type(parameter), "__tensor_flatten__")


_GATE_FORWARD = Gate.forward


def is_plain(gate: nn.Module) -> bool:
    """Whether a call of the gate could have no other effect than the fused computation of logits.

    The gate must be a `Gate` and no subclass (parametrizations and FSDP create one), with its own `forward`, without
    hooks and global hooks, and with plain tensors as parameters.
    """
    return (
        type(gate) is Gate
        and "forward" not in gate.__dict__
        and Gate.forward is _GATE_FORWARD
        and not private.has_hooks(gate)
        and _holds_data(private.parameter(gate, "weight"))
    )


class SharedExpert(OnRanks):
    """A dense expert of width S, applied to every token.

        output = weights * phi(x W_gate, x W_up) W_out        (ungated: act(x W_up))

    Parameters: `gate_up_proj` [2 S, D], gate rows first, then up rows (ungated: `up_proj` [S, D]), and `down_proj`
    [D, S]. State dicts of older versions, with names such as `gate_up_proj.weight`, can be loaded.
    """

    down_proj: Tensor

    def __init__(
        self,
        features: int,
        shared_features: int,
        gated: bool,
        init: Initializer,
        *,
        activation: str | Activation,
        precision: str,
        group: Any = None,
        **factory: Any,
    ):
        super().__init__()
        self.parts, self.up_name = (2, "gate_up_proj") if gated else (1, "up_proj")
        self.init, self.activation, self.precision, self.group = init, activation, precision, group
        shapes = {self.up_name: (self.parts * shared_features, features), "down_proj": (features, shared_features)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **factory)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises both weights; ValueError if one is computed from other tensors."""
        self.check_plain()
        draw(self.init, getattr(self, self.up_name))
        draw(self.init, self.down_proj)

    def check_plain(self) -> None:
        """Raises if a weight is computed from other tensors."""
        check_plain(self, self.up_name, "down_proj")

    def operands(self) -> tuple[Tensor, Tensor]:
        """w_in [2 or 1, S, D] and w_out [D, S] of `shared_expert`, as views."""
        up: Tensor = getattr(self, self.up_name)
        return up.reshape(self.parts, -1, up.shape[-1]), self.down_proj

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Applies the expert.

        Args:
          x: [..., D]. Parameters are rounded to its dtype for the GEMMs; float32 ones get unrounded gradients.
          weights: float [..., 1], multiply the output in float32; None: 1.

        Returns:
          [..., D], dtype of x.
        """
        x = check.tensor("x", x, check.FLOATS, (..., "D"))
        weights = check.optional_tensor("weights", weights, check.FLOATS, (*x.shape[:-1], 1))
        tokens = flat(x)
        assert tokens is not None
        w_in, w_out = (
            w if w.dtype == torch.float32 else w.to(x.dtype) for w in with_mean_gradients(self.group, *self.operands())
        )
        y = dense_expert(
            tokens,
            w_in,
            w_out,
            None if weights is None else weights.reshape(-1),
            activation=self.activation,
            w_in_layout="pfd",
            w_out_layout="df",
            precision=self.precision,
        )
        return unflat(y, x.shape[:-1])

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for name in (prefix + self.up_name, f"{prefix}down_proj"):
            if (old := f"{name}.weight") not in state_dict:
                continue
            value, parameters = state_dict.pop(old), dict(self.named_parameters(recurse=False))
            parameter = parameters.get(name.removeprefix(prefix))
            if hasattr(parameter, "placements") and not hasattr(value, "placements"):
                # Code that shards whole tensors looks for the new name.
                error_msgs.append(f"{old}: got a whole tensor for a DTensor, expected it under its new name, {name}")
                state_dict.pop(name, None)
            else:
                state_dict[name] = value
        arguments = (local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def extra_repr(self) -> str:
        """The sizes."""
        features, shared_features = self.down_proj.shape
        return f"in_features={features}, shared_features={shared_features}, gated={self.parts == 2}"
