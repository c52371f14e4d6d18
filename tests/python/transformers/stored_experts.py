"""Experts like those of Transformers models, with a custom gate function."""

import types

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

E, D, F, K, T = 4, 12, 10, 2, 17


class Stored(nn.Module):
    """Experts like those of Transformers models."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = E
        shapes = (E, 2 * F, D), (E, D, F)
        if config.transposed:
            shapes = (E, D, 2 * F), (E, F, D)
        self.gate_up_proj = nn.Parameter(torch.randn(shapes[0]))
        self.down_proj = nn.Parameter(torch.randn(shapes[1]))
        if config.bias:
            self.gate_up_proj_bias = nn.Parameter(torch.randn(E, 2 * F))
            self.down_proj_bias = nn.Parameter(torch.randn(E, D))
        self.act_fn = ACT2FN[config.act]
        for name, value in config.numbers.items():
            setattr(self, name, value)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """Applies every expert to every token."""
        up, down = self.gate_up_proj, self.down_proj
        if not self.is_transposed:
            up, down = up.mT, down.mT
        h = torch.einsum("td,edh->teh", hidden_states, up)
        h = h + self.gate_up_proj_bias if self.has_bias else h
        y = torch.einsum("teh,ehd->ted", self._apply_gate(h), down)
        y = y + self.down_proj_bias if self.has_bias else y
        selected = torch.nn.functional.one_hot(top_k_index.clamp(max=E), E + 1)[..., :E].to(y.dtype)
        return torch.einsum("ted,tke,tk->td", y, selected, top_k_weights.to(y.dtype)).to(hidden_states.dtype)


def make_experts(gate=None, *, act="silu", transposed=False, bias=False, **numbers):
    """Experts with the given gate function, or the default of Transformers."""
    body = {} if gate is None else {"_apply_gate": gate}
    kind = type("TestExperts", (Stored,), body)
    kind = use_experts_implementation(kind, is_transposed=transposed, has_bias=bias)
    config = types.SimpleNamespace(
        transposed=transposed,
        bias=bias,
        act=act,
        numbers=numbers,
        model_type="a_test",
        _experts_implementation="anabranch",
    )
    torch.manual_seed(0)
    return kind(config)


def operands(dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, D, generator=generator).to(device, dtype).requires_grad_()
    index = torch.rand(T, E, generator=generator).topk(K).indices.to(device)
    return x, index, torch.rand(T, K, generator=generator).to(device).requires_grad_()


def gradients(experts, implementation, operands, forward=None):
    """Output and all gradients for a random cotangent."""
    experts.config._experts_implementation = implementation
    x, index, weights = operands
    for tensor in (x, weights, *experts.parameters()):
        tensor.grad = None
    output = (experts if forward is None else forward)(x, index, weights)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output))
    named = {"x": x, "weights": weights, **dict(experts.named_parameters())}
    return {"output": output.detach(), **{name: tensor.grad for name, tensor in named.items()}}


def check_same(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].dtype == expected[name].dtype and found[name].shape == expected[name].shape
        error = (found[name] - expected[name]).abs().max() / expected[name].abs().max()
        assert error <= tolerance, (name, float(error))


def parts(gate_up):
    return gate_up.chunk(2, dim=-1)
