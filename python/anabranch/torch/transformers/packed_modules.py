"""Modules with packed weights for Transformers models: experts, and linear layers of FP8 checkpoints.

Their parameters have the names, shapes and dtypes of the checkpoint, so that the model's own loading and saving moves
bytes. None of these parameters has a gradient.
"""

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from anabranch.layouts import Layouts
from anabranch.lora import NAMES as LORA_NAMES
from anabranch.lora import PROJECTIONS, Lora, NewLora, factor_shapes
from anabranch.packed import KINDS, check_kind, packed_shapes
from anabranch.precision import BLOCK
from anabranch.torch.binding import check
from anabranch.torch.binding.autocast import as_autocast
from anabranch.torch.binding.native import call
from anabranch.torch.layer.parameters import factor_uniform_
from anabranch.torch.ops import torch_ops
from anabranch.torch.ops.packed import Packed
from anabranch.torch.transformers.experts_forward import apply_experts, split_parts, up_name
from anabranch.torch.transformers.experts_module import flag, model_name, take_description

#: What follows the name of a matrix in a checkpoint, by the choices of `KINDS` and the fields of its packed type.
SUFFIXES: Mapping[str, Mapping[str, str]] = {
    "mxfp4": {"codes": "_blocks", "scales": "_scales"},
    "fp8_blocks": {"q": "", "scales": "_scale_inv"},
}
_SCALES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8)


def _dtypes_of(name: str) -> tuple[torch.dtype, ...]:
    """The dtypes that a packed parameter may have."""
    if name.endswith("_blocks"):
        return (torch.uint8,)
    if name.endswith("_scales"):
        return (torch.uint8, torch.float8_e8m0fnu)
    return _SCALES if name.endswith("_scale_inv") else (torch.float8_e4m3fn,)


class PackedModule(nn.Module):
    """A module with parameters that contain codes and scales. They keep their dtypes under `.to(dtype)`."""

    #: Transformers does not initialise parameters that a checkpoint lacks: `check_loaded` refuses them.
    _is_hf_initialized = True

    def _add_packed(self, name: str, packed: str, shape: tuple[int, ...]) -> None:
        """Adds the parameters of packed weights of a shape, on the meta device."""
        for field, (part, dtype) in packed_shapes(packed, shape).items():
            value = torch.empty(part, dtype=getattr(torch, dtype), device="meta")
            setattr(self, name + SUFFIXES[packed][field], nn.Parameter(value, requires_grad=False))

    def packed_names(self) -> tuple[str, ...]:
        """The names of the parameters with codes and scales."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        packed = {id(getattr(self, name)) for name in self.packed_names()}

        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if id(tensor) not in packed or result.dtype == tensor.dtype else tensor.to(result.device)

        return super()._apply(moved, recurse)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Refuses packed tensors of another dtype, whose values would be converted."""
        kept = dict(state_dict)
        for name in self.packed_names():
            value, own = kept.get(prefix + name), getattr(self, name)
            replaces = local_metadata.get("assign_to_params_buffers", False)
            expected = _dtypes_of(name) if replaces or own.is_meta else (own.dtype,)
            if value is not None and value.dtype not in expected:
                error_msgs.append(f"{prefix}{name}: got {value.dtype}, expected {' or '.join(map(str, expected))}")
                kept[prefix + name] = own.detach()
        super()._load_from_state_dict(kept, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def check_loaded(self, path: str) -> None:
        """Freezes the packed parameters after loading.

        Raises:
          ValueError: the checkpoint lacks one, or has it with another dtype.
          NotImplementedError: one is sharded, or scales are offloaded.
        """
        packed = self.packed_names()
        for name, value in self.named_parameters(recurse=False):
            if value.is_meta:  # offloaded, and loaded in the forward pass
                if name.endswith("_scale_inv"):
                    raise NotImplementedError(
                        f"{path}.{name}: got offloaded scales, which would be converted to the dtype of their "
                        "placeholder, expected a device_map with CPUs and GPUs only"
                    )
                continue
            if not getattr(value, "_is_hf_initialized", False):
                raise ValueError(f"{path}.{name}: got no such tensor in the checkpoint, expected {list(value.shape)}")
            if name not in packed:
                continue
            if type(value) is not nn.Parameter:
                raise NotImplementedError(
                    f"{path}.{name}: got a {type(value).__name__}, expected a tensor that is not sharded: packed "
                    "weights do not support the parallelism of Transformers"
                )
            expected = _dtypes_of(name)
            if value.dtype not in expected:
                raise ValueError(f"{path}.{name}: got {value.dtype}, expected {' or '.join(map(str, expected))}")
            value.requires_grad_(False)


class PackedExperts(PackedModule):
    """Experts of a Transformers model with packed weights, computed by `routed_experts`.

    | parameter | "mxfp4" | "fp8_blocks" |
    |---|---|---|
    | w_in | `gate_up_proj_blocks` uint8 [E, 2F, D/32, 16], `gate_up_proj_scales` uint8 [E, 2F, D/32] | `gate_up_proj` float8_e4m3fn [E, 2F, D], `gate_up_proj_scale_inv` [E, 2F/128, D/128] |
    | w_out | `down_proj_blocks` uint8 [E, D, F/32, 16], `down_proj_scales` uint8 [E, D, F/32] | `down_proj` float8_e4m3fn [E, D, F], `down_proj_scale_inv` [E, D/128, F/128] |
    | biases | `gate_up_proj_bias` [E, 2F], `down_proj_bias` [E, D] of the model's dtype | |

    Ungated experts have `up_proj` [E, F, D] in the place of `gate_up_proj`. `add_lora` adds `lora_a_in` and so on.
    """  # noqa: E501

    def __init__(self, source: nn.Module, packed: str):
        """Replaces `source`, an experts module on the meta device.

        Raises:
          NotImplementedError: the module computes something that `Experts` cannot express.
          ValueError: its sizes are not multiples of a block, or its columns have an order that the format cannot have.
        """
        super().__init__()
        source_any: Any = source
        self.config = source_any.config
        self.packed = packed
        self.has_gate, self.has_bias = flag(source, "has_gate", True), flag(source, "has_bias", False)
        self.is_transposed = False
        experts = take_description(self, source)
        if experts.post_expert_norm:
            raise NotImplementedError(f"{model_name(source)}: got a norm of every expert's output, expected none")
        up = up_name(self)
        E, *matrix = getattr(source, up).shape
        D, columns = matrix if flag(source, "is_transposed", False) else matrix[::-1]
        self.parts = 2 if self.has_gate else 1
        self.num_experts, self.D, self.F = E, D, columns // self.parts
        layouts = Layouts(experts.w_in_layout, experts.w_out_layout)
        check_kind(packed, layouts, "highest", hidden_size=D, intermediate_size=self.F)
        self._add_packed(up, packed, (E, columns, D))
        self._add_packed("down_proj", packed, (E, D, self.F))
        for name in (f"{up}_bias", "down_proj_bias") if self.has_bias else ():
            setattr(self, name, getattr(source, name))
        self.lora = NewLora(0, 1.0, ())
        self._layout = experts.w_in_layout

    def packed_names(self) -> tuple[str, ...]:
        """The names of the parameters with codes and scales."""
        return tuple(
            name + suffix for name in (up_name(self), "down_proj") for suffix in SUFFIXES[self.packed].values()
        )

    def weights(self) -> tuple[Packed, Packed]:
        """w_in and w_out."""
        w_in, w_out = (
            KINDS[self.packed](*(getattr(self, name + suffix) for suffix in SUFFIXES[self.packed].values()))
            for name in (up_name(self), "down_proj")
        )
        return type(w_in)(*(split_parts(part, 1, self._layout, self.parts) for part in w_in)), w_out

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """See `experts_forward`."""
        if nn.utils.parametrize.is_parametrized(self):
            raise NotImplementedError(
                f"{model_name(self)}: got a parametrization of packed weights, expected none; adapters of PEFT need "
                "anabranch.torch.transformers.register() before the call"
            )
        w_in, w_out = self.weights()
        lora = None
        if self.lora.rank:
            lora = Lora(*(getattr(self, name) for name in LORA_NAMES)), self.lora.scale
        return apply_experts(self, w_in, w_out, hidden_states, top_k_index, top_k_weights, lora)

    def _check_without_lora(self) -> None:
        """Raises ValueError if the module cannot get adapters."""
        if self.lora.rank:
            raise ValueError(
                f"module: got experts with adapters of rank {self.lora.rank}, expected experts without adapters"
            )

    def _add_lora(self, lora: NewLora) -> None:
        """Adds factors with their initial values."""
        self.lora = lora
        sizes = dict(e=self.num_experts, d=self.D, p=self.parts, f=self.F)
        device = getattr(self, self.packed_names()[0]).device
        for field, shape in factor_shapes(sizes, lora.rank, PROJECTIONS, lora.shared).items():
            value = torch.zeros(shape, dtype=torch.float32, device=device)
            setattr(self, f"lora_{field}", nn.Parameter(factor_uniform_(value) if field.startswith("a") else value))

    def extra_repr(self) -> str:
        """The format and sizes."""
        return f"{self.packed}, E={self.num_experts}, D={self.D}, F={self.F}, lora_rank={self.lora.rank}"


def _decoded(q: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights [N, C]. The last blocks of a checkpoint may be smaller than 128 x 128.

    Checks nothing in Python, which torch.compile does not trace in a backward pass.
    """
    N, C = q.shape
    if N % BLOCK or C % BLOCK:
        padded = nn.functional.pad(q.view(torch.uint8), (0, -C % BLOCK, 0, -N % BLOCK))
        q = padded.view(torch.float8_e4m3fn)
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    w: Tensor = call(torch_ops.unpack, q[None], scales[None], dtype)
    return w[0, :N, :C]


class _Product(torch.autograd.Function):
    """x W^T. Saves the packed weights for the backward pass and decodes them again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, q: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(q, scales)
        return x @ _decoded(q, scales, x.dtype).mT

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        q, scales = ctx.saved_tensors
        return gradients[0] @ _decoded(q, scales, gradients[0].dtype), None, None


class Fp8Linear(PackedModule, nn.Linear):
    """A linear layer with weights of FP8 blocks, decoded in every pass to the dtype of its input.

    | parameter | shape |
    |---|---|
    | `weight` | float8_e4m3fn [N, C] |
    | `weight_scale_inv` | [N/128, C/128], rounded up |
    | `bias` | [N], if the replaced layer has one |
    """

    def __init__(self, source: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = source.in_features, source.out_features
        N, C = source.out_features, source.in_features
        self._add_packed("weight", "fp8_blocks", (N, C))
        blocks = torch.empty(-(-N // BLOCK), -(-C // BLOCK), device="meta")
        self.weight_scale_inv = nn.Parameter(blocks, requires_grad=False)
        self.bias = source.bias

    def packed_names(self) -> tuple[str, ...]:
        """The names of the parameters with codes and scales."""
        return "weight", "weight_scale_inv"

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] to [..., N]."""
        if self.weight.dtype != torch.float8_e4m3fn:
            raise TypeError(f"weight: got {check.describe(self.weight)}, expected torch.float8_e4m3fn")
        x = check.tensor("x", as_autocast(x), check.FLOATS, (..., ("C", self.in_features)))
        y: Tensor = _Product.apply(x, self.weight, self.weight_scale_inv)
        return y if self.bias is None else y + self.bias.to(y.dtype)
