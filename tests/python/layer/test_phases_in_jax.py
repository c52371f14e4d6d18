"""The phases of a layer in the metadata of a compiled program, which jax.profiler shows."""

import re

import jax
import jax.numpy as jnp

from anabranch import phases
from anabranch.jax import moe
from moe_cases import operands


def test_every_call_of_a_step_is_in_its_phase():
    arrays = operands(16, 8, 2, 16, 24)
    arguments = {name: arrays[name] for name in ("x", "gate", "w_in", "w_out")}

    def loss(arguments):
        return jnp.sum(jnp.square(moe(**arguments, topk=2).output))

    text = jax.jit(jax.grad(loss)).lower(arguments).compile().as_text()
    found = [
        (target, re.findall(r"anabranch/\w+", name))
        for target, name in re.findall(r'custom_call_target="(ab_xla_\w+)".*?op_name="([^"]*)"', text)
    ]
    # XLA may order calls that do not depend on one another.
    assert sorted(found) == sorted(
        [
            ("ab_xla_router_forward", [phases.ROUTE]),
            ("ab_xla_plan", [phases.PLAN]),
            ("ab_xla_expert_ffn_forward", [phases.UP]),
            ("ab_xla_grouped_matmul_combine", [phases.DOWN]),
            ("ab_xla_expert_ffn_backward", [phases.HIDDEN_GRADIENT]),
            ("ab_xla_router_backward", [phases.ROUTE_BACKWARD]),
            ("ab_xla_grouped_matmul_combine", [phases.D_X]),
            ("ab_xla_expert_ffn_backward", [phases.WEIGHT_GRADIENTS]),
        ]
    )
    for phase in (phases.GATE, phases.GATE_BACKWARD):
        assert re.search(rf'\bdot\(.*op_name="[^"]*{phase}\b', text), f"no GEMM in {phase}"
