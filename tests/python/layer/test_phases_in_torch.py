"""The phases of a layer in traces of torch.profiler."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import anabranch.torch as ab
from anabranch import phases
from anabranch.torch.binding import native
from anabranch.torch.binding.calls import plan
from anabranch.torch.binding.define import python_run

T, D, F, E, K = 8, 16, 8, 4, 2
FORWARD = [phases.GATE, phases.ROUTE, phases.PLAN, phases.UP, phases.DOWN]
BACKWARD = [
    phases.HIDDEN_GRADIENT, phases.ROUTE_BACKWARD, phases.GATE_BACKWARD, phases.D_X, phases.WEIGHT_GRADIENTS,
]  # fmt: skip


def phases_in(call):
    """The names of the phases of a call, in order, and the operations that they are in."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("test"):
        call()
    found = [e for e in profiler.events() if e.name.startswith(phases.PREFIX)]
    found.sort(key=lambda event: event.time_range.start)
    return [event.name for event in found], {event.cpu_parent.name for event in found}


@pytest.mark.parametrize("in_one_operation", [True, False])
def test_a_trace_has_the_phases_of_both_passes(in_one_operation):
    """A bias of the gate has no native operation for the whole layer; then the gate is torch code of ours."""
    if in_one_operation and native.native is None:
        pytest.skip(f"NO NATIVE OPERATIONS: {native.reason}")
    x, gate, w_in, w_out = (torch.randn(shape).requires_grad_() for shape in ((T, D), (D, E), (E, D, 2, F), (E, F, D)))
    bias = None if in_one_operation else torch.zeros(E)

    def step():
        ab.moe(x, gate, w_in, w_out, topk=K, gate_bias=bias).output.square().sum().backward()

    found, parents = phases_in(step)
    assert found == FORWARD + BACKWARD
    assert ("anabranch::layer_backward" in parents) == in_one_operation


def test_calls_through_ctypes_have_phases():
    """Calls over the memory of peers run in this way, and all calls without the native library."""
    run = python_run(
        "plan_for_trace(Tensor experts) -> (Tensor sizes, Tensor rows)",
        lambda experts: (experts.new_empty((E,)), experts.new_empty((T,))),
        lambda results, experts: plan(
            {"experts": experts, "group_sizes": results[0], "slot_of_row": results[1]}, num_experts=E
        ),
    )
    experts = torch.zeros((T, 1), dtype=torch.int32)
    assert phases_in(lambda: run(experts)) == ([phases.PLAN], {"test"})
    sizes, _ = run(experts)
    assert sizes.tolist() == [T, 0, 0, 0]
