"""The layer in torch: ours as a function and as a module, and as others write it, on the same operands."""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from anabranch.bench.cuda_layer_graphs import Operands
from anabranch.bench.layer_in_torch import grouped_mm_layer
from anabranch.bench.layer_shape import LayerShape

EAGER, COMPILED, GRAPH, REDUCE = "eager", "compiled", "graph", "reduce-overhead"

#: How each layer is called. "reduce-overhead" would copy the weights that a function is given at every call, not the
#: parameters of a module; "hf-eager" waits for the device, and "hf-batched_mm" copies weights for every slot.
MODES = {
    "moe": (EAGER, COMPILED, GRAPH),
    "MoE": (EAGER, COMPILED, GRAPH, REDUCE),
    "grouped_mm": (EAGER, COMPILED, GRAPH),
    "hf-grouped_mm": (EAGER, COMPILED, GRAPH),
    "hf-batched_mm": (EAGER,),
    "hf-eager": (EAGER,),
}

BY = tuple(MODES)

#: Ours with precision="fp8", on a GPU: experts are quantised in every pass, or were before.
FP8, FP8_KEPT = "fp8", "fp8-kept"
MODES |= {FP8: (EAGER, GRAPH), FP8_KEPT: (EAGER, GRAPH)}
FP8_BY = (FP8, FP8_KEPT)

#: Those whose experts are ours.
OURS = ("moe", "MoE", *FP8_BY)


class Layer(NamedTuple):
    """A layer on its operands.

    function: of the tokens, the output.
    leaves: the tensors whose gradients are wanted: the tokens first.
    d_out: the output's cotangent.
    """

    function: Callable[[Any], Any]
    leaves: tuple[Any, ...]
    d_out: Any

    def forward(self) -> Any:
        """The output, without a graph."""
        import torch

        with torch.no_grad():
            return self.function(self.leaves[0])

    def both(self) -> tuple[Any, ...]:
        """The output and the gradients of the leaves."""
        import torch

        output = self.function(self.leaves[0])
        return output, *torch.autograd.grad(output, self.leaves, self.d_out)


def installed(by: Sequence[str]) -> list[str]:
    """Those of the layers for which everything is installed."""
    found = importlib.util.find_spec("transformers") is not None
    return [name for name in by if found or not name.startswith("hf-")]


def batched_bytes(shape: LayerShape, itemsize: int) -> int:
    """Of the weights that "hf-batched_mm" copies, those of its expert for every slot.

    >>> batched_bytes(LayerShape(256, 64, 32, 8, 2), 4)
    12582912
    """
    return 3 * shape.T * shape.K * shape.D * shape.F * itemsize


def make(by: str, shape: LayerShape, given: Operands) -> Layer:
    """A layer by its name in BY, on the values of operands, the experts of which are not given."""
    x, gate, w_in, w_out = (leaf.detach() for leaf in given.leaves)
    if by in ("moe", "grouped_mm", *FP8_BY):
        weights = tuple(w.requires_grad_() for w in (gate, w_in, w_out))
        function = grouped_mm_layer if by == "grouped_mm" else functools.partial(_ours, **_fp8(by, w_in, w_out))
        return Layer(
            lambda tokens: function(tokens, *weights, topk=shape.K), (x.requires_grad_(), *weights), given.d_out
        )
    _, D, F, E, _ = shape
    state = {  # as checkpoints have them
        "gate.weight": gate.T.contiguous(),
        "gate_up_proj": w_in.permute(0, 2, 3, 1).reshape(E, 2 * F, D).contiguous(),
        "down_proj": w_out.transpose(1, 2).contiguous(),
    }
    module = _module(shape) if by == "MoE" else _of_transformers(by.removeprefix("hf-"), shape)
    if by != "MoE":
        state = {name if name.startswith("gate.") else f"experts.{name}": value for name, value in state.items()}
    module.load_state_dict(state, assign=True)
    leaves = (x.requires_grad_(), *(module.get_parameter(name).requires_grad_() for name in state))
    if by == "MoE":
        return Layer(lambda tokens: module(tokens).output, leaves, given.d_out)
    return Layer(lambda tokens: module(tokens[None])[0], leaves, given.d_out)


def _ours(x: Any, gate: Any, w_in: Any, w_out: Any, *, topk: int, **options: Any) -> Any:
    from anabranch.torch import moe

    return moe(x, gate, w_in, w_out, topk=topk, **options).output


def _fp8(by: str, w_in: Any, w_out: Any) -> dict[str, Any]:
    """The options of moe of such a layer."""
    from anabranch.torch import quantize_experts

    if by not in FP8_BY:
        return {}
    return {"precision": "fp8", "quantized": quantize_experts(w_in, w_out) if by == FP8_KEPT else None}


def _module(shape: LayerShape) -> Any:
    from anabranch.torch import MoE

    return MoE(shape.D, shape.F, shape.E, shape.K, device="meta")


def _of_transformers(implementation: str, shape: LayerShape) -> Any:
    """The layer of Qwen3-MoE in transformers, with one of its implementations of the experts."""
    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=shape.D,
        moe_intermediate_size=shape.F,
        num_experts=shape.E,
        num_experts_per_tok=shape.K,
        norm_topk_prob=True,
        hidden_act="silu",
        experts_implementation=implementation,
    )
    with torch.device("meta"):
        return Qwen3MoeSparseMoeBlock(config)
