"""The gate's GEMM of bfloat16 matrices on CUDA, traced by torch without a GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from anabranch.torch import moe
from anabranch.torch.layer import gate as layer_gate

T, D, E, F = 8, 16, 4, 8


@pytest.mark.parametrize("by_ours", [False, True])
def test_a_bfloat16_gate_on_cuda_is_compiled(monkeypatch, by_ours):
    """torch 2.9 cannot infer the shape of a bfloat16 GEMM with float32 output; our operation provides it."""
    if not by_ours and not layer_gate._MM_IS_TRACED:
        pytest.skip("this torch can't trace its own GEMM with a float32 result")
    monkeypatch.setattr(layer_gate, "_MM_IS_TRACED", not by_ours)
    torch._dynamo.reset()

    def backward(x, gate, d_logits):
        return tuple(layer_gate.gate_backward(x, gate, d_logits))

    with FakeTensorMode():
        kind = dict(dtype=torch.bfloat16, device="cuda")
        x, gate = torch.empty(T, D, **kind), torch.empty(D, E, **kind)
        layer = torch.compile(moe, fullgraph=True, backend="eager")
        result = layer(x, gate, torch.empty(E, D, 2, F, **kind), torch.empty(E, F, D, **kind), topk=2)
        d_x, d_gate = torch.compile(backward, fullgraph=True, backend="eager")(
            x, gate, torch.empty(T, E, device="cuda")
        )
    assert result.output.dtype == d_x.dtype == torch.bfloat16 and d_gate.dtype == torch.float32
    assert result.output.shape == d_x.shape == (T, D) and d_gate.shape == (D, E)
