"""A self-test of native kernels, for releases of torch with which the tests have not run."""

from typing import Any

import torch

from anabranch.torch.binding.calls import plan
from anabranch.torch.binding.keys import kinds_of

_SCHEMA = (
    "probe(Tensor experts, Tensor? mask, Tensor? none, SymInt rows, int integer, bool flag, float number, "
    "ScalarType dtype, ScalarType? no_dtype, int[] integers, float[] numbers, str text) -> (Tensor, Tensor)"
)
_OPTIONS = (7, True, 0.5, torch.bfloat16, None, (3, -1), (0.25,), "text")


def probe(library: Any) -> str:
    """Runs an operation with arguments of every kind. library: a `Native`.

    Returns:
      What is wrong: the kernel got other arguments or has other results than expected. Empty: nothing.
    """
    got: list[Any] = []

    def allocate(experts: Any, mask: Any, none: Any, rows: Any, *options: Any) -> Any:
        got[:] = [mask.dtype, len(mask.shape), none, options]
        return experts.new_empty((2,)), experts.new_empty((rows,))

    def calls(results: Any, experts: Any, *_: Any) -> Any:
        return plan({"experts": experts, "group_sizes": results[0], "slot_of_row": results[1]}, num_experts=2)

    space = torch.library.Library("anabranch_probe", "DEF")  # the operation exists as long as this object
    space.define(_SCHEMA)
    operation = torch.ops.anabranch_probe.probe.default
    arguments = [list(option) if isinstance(option, tuple) else option for option in _OPTIONS]
    try:
        library.add_kernel(library.add("probe", kinds_of(_SCHEMA), allocate, calls), "anabranch_probe", "CPU")
        for rows in (4, 6):  # sizes are written per call
            experts = torch.tensor([[0], [1], [1], [-1]], dtype=torch.int32)
            results = [result.tolist() for result in operation(experts, experts > 0, None, rows, *arguments)]
            if results != [[1, 2], [0, 1, 2, *[-1] * (rows - 3)]]:
                return f"got results {results}"
    except RuntimeError as error:
        return str(library.translated(error))
    return "" if got == [torch.bool, 2, None, _OPTIONS] else f"got arguments {got}"
