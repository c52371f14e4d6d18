"""The names of the layer's phases in timelines of profilers. docs/profiling.md says what each phase is.

The CUDA library has NVTX ranges with these names in the domain "anabranch" (src/core/range.h). torch.profiler and
jax.profiler show them as "anabranch/route" and so on.
"""

from collections.abc import Collection, Mapping
from typing import Any

PREFIX = "anabranch/"
GATE = PREFIX + "gate"
ROUTE = PREFIX + "route"
PLAN = PREFIX + "plan"
EXCHANGE = PREFIX + "exchange"
QUANTIZE = PREFIX + "quantize"
UP = PREFIX + "up"
DOWN = PREFIX + "down"
EXPERTS = PREFIX + "experts"
HIDDEN_GRADIENT = PREFIX + "hidden_gradient"
WEIGHT_GRADIENTS = PREFIX + "weight_gradients"
D_X = PREFIX + "d_x"
ROUTE_BACKWARD = PREFIX + "route_backward"
GATE_BACKWARD = PREFIX + "gate_backward"

#: The phases of a layer in the order of a training step.
NAMES = (
    GATE, ROUTE, PLAN, EXCHANGE, QUANTIZE, UP, DOWN, EXPERTS,
    HIDDEN_GRADIENT, WEIGHT_GRADIENTS, ROUTE_BACKWARD, GATE_BACKWARD, D_X,
)  # fmt: skip

#: The phases that are one C function, by its name.
_OF_FUNCTIONS = {
    "router_forward": ROUTE,
    "router_backward": ROUTE_BACKWARD,
    "plan": PLAN,
    "quantize_rows": QUANTIZE,
    "quantize_weights": QUANTIZE,
    "exchange_all_gather": EXCHANGE,
    "exchange_all_to_all": EXCHANGE,
    "exchange_sum": EXCHANGE,
    "exchange_release": EXCHANGE,
}


def phase_of(function: str, tensors: Collection[str], options: Mapping[str, Any]) -> str | None:
    """The phase that a C call computes; None: none, or several.

    Args:
      function: "plan" of `ab_plan`.
      tensors: the fields that are given or requested.
      options: by field.
    """
    if function == "expert_ffn_forward":
        return None if "y" in tensors else UP
    if function == "expert_ffn_backward":
        if "dx_rows" in tensors:
            return None
        return HIDDEN_GRADIENT if "h" in tensors else WEIGHT_GRADIENTS
    if function == "grouped_matmul_combine":
        return D_X if options.get("backward") else DOWN
    return _OF_FUNCTIONS.get(function)
