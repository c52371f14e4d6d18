"""The adapters in docs/torch.md do what the modules do whose forward pass they replace: stand-ins with the same
parameters, called alike, that loop over experts.
"""

import pathlib
import re
import types

import numpy as np
import pytest
import torch
from torch import nn

from anabranch.torch import expert_ffn

pytestmark = pytest.mark.usefixtures("device")

GUIDE = pathlib.Path(__file__).parents[3] / "docs" / "torch.md"
SIZES, R, D, F = (5, 0, 7, 1), 16, 8, 12  # of 16 rows three are padding
E = len(SIZES)


def adapter(name):
    """A function of the guide."""
    namespace = {"torch": torch, "expert_ffn": expert_ffn}
    for block in re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE):
        if block.startswith("def ") and "_forward(self" in block:
            exec(block, namespace)
    return namespace[name]


def normal(*shape, seed):
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape), dtype=torch.float32)


def parameter(*shape, seed):
    return nn.Parameter(normal(*shape, seed=seed) / shape[-1] ** 0.5)


def by_expert(rows):
    """(expert, its rows): those past the sum of the sizes are nobody's."""
    return enumerate(rows[: sum(SIZES)].split(SIZES))


def padded(parts):
    parts = torch.cat(parts)
    return torch.cat([parts, parts.new_zeros(R - len(parts), D)])


class GroupedExperts(nn.Module):
    """Called as torchtitan's."""

    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (parameter(E, F, D, seed=seed) for seed in (1, 3))
        self.w2 = parameter(E, D, F, seed=2)

    def forward(self, x, num_tokens_per_expert):
        assert num_tokens_per_expert.tolist() == list(SIZES)
        hidden = [nn.functional.silu(x @ self.w1[e].T) * (x @ self.w3[e].T) for e, x in by_expert(x)]
        return padded([h @ self.w2[e].T for e, h in enumerate(hidden)])


CONFIG = dict(
    hidden_size=D,
    gated_linear_unit=True,
    activation_func=nn.functional.silu,
    add_bias_linear=False,
    moe_apply_probs_on_input=False,
)


class GroupedMLP(nn.Module):
    """Called as Megatron's."""

    def __init__(self):
        super().__init__()
        self.config, self.num_local_experts = types.SimpleNamespace(**CONFIG), E
        self.weight1, self.weight2 = parameter(D, E * 2 * F, seed=1), parameter(E * F, D, seed=2)

    def matrices(self, e):
        return self.weight1.view(E, D, 2 * F)[e], self.weight2.view(E, F, D)[e]

    def forward(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs):
        assert list(tokens_per_expert) == list(SIZES)
        outputs = []
        for (e, x), (_, probs) in zip(by_expert(permuted_local_hidden_states), by_expert(permuted_probs), strict=True):
            up, down = self.matrices(e)
            gate, h = (x @ up).chunk(2, -1)
            outputs.append((nn.functional.silu(gate) * h * probs[:, None]) @ down)
        return padded(outputs), None


class TEGroupedMLP(GroupedMLP):
    """The same with a parameter an expert."""

    def __init__(self):
        nn.Module.__init__(self)
        self.config, self.num_local_experts = types.SimpleNamespace(**CONFIG), E
        self.linear_fc1, self.linear_fc2 = nn.Module(), nn.Module()
        for e in range(E):
            self.linear_fc1.register_parameter(f"weight{e}", parameter(2 * F, D, seed=10 + e))
            self.linear_fc2.register_parameter(f"weight{e}", parameter(D, F, seed=20 + e))

    def matrices(self, e):
        return getattr(self.linear_fc1, f"weight{e}").T, getattr(self.linear_fc2, f"weight{e}").T


def results(module, forward, *floats, counts, of=lambda result: result[0]):
    """The output and the gradients of the floats and the parameters."""
    leaves = [value.clone().requires_grad_() for value in floats]
    output = of(forward(module, leaves[0], counts, *leaves[1:]))
    return output, *torch.autograd.grad(output, [*leaves, *module.parameters()], normal(R, D, seed=9))


@pytest.mark.parametrize("stand_in", [GroupedExperts, GroupedMLP, TEGroupedMLP])
@pytest.mark.parametrize("where", ["device", "host"])
def test_an_adapter_computes_what_it_replaces(stand_in, where):
    module, x = stand_in(), normal(R, D, seed=0)
    name = {GroupedExperts: "grouped_experts", GroupedMLP: "grouped_mlp", TEGroupedMLP: "te_grouped_mlp"}[stand_in]
    given, options = (x, normal(R, seed=5).abs()), {}
    if stand_in is GroupedExperts:
        given, options = (x,), {"of": lambda result: result}
    counts = torch.tensor(SIZES, device="cpu" if where == "host" and len(given) > 1 else None)
    want = results(module, stand_in.forward, *given, counts=counts, **options)
    got = results(module, adapter(f"{name}_forward"), *given, counts=counts, **options)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_an_adapter_refuses_what_it_does_not_do():
    module = GroupedMLP()
    others = dict(gated_linear_unit=False, activation_func=torch.relu, add_bias_linear=True, fp8="hybrid")
    for name, other in others.items():
        module.config = types.SimpleNamespace(**CONFIG | {name: other})
        with pytest.raises(ValueError, match=f"{name}: got"):
            adapter("grouped_mlp_forward")(module, normal(R, D, seed=0), torch.tensor(SIZES), normal(R, seed=5))


def test_float32_weights_beside_bfloat16_rows():
    rows, sizes = normal(R, D, seed=0).to(torch.bfloat16), torch.tensor(SIZES)
    w_in, w_out = parameter(E, D, 2, F, seed=1), parameter(E, F, D, seed=2)
    d_y = normal(R, D, seed=3).to(torch.bfloat16)

    def run(*weights):
        y = expert_ffn(rows, *weights, sizes)
        return y, torch.autograd.grad(y, weights, d_y)

    y, found = run(w_in, w_out)
    rounded_y, rounded = run(*(w.detach().to(torch.bfloat16).requires_grad_() for w in (w_in, w_out)))
    assert torch.equal(y, rounded_y)
    for gradient, other in zip(found, rounded, strict=True):
        assert gradient.dtype == torch.float32 and torch.equal(gradient.to(torch.bfloat16), other)
        assert not torch.equal(gradient, other.float())
