"""The layer as an nn.Module of torch, against the oracle: its own parameters, in their layouts."""

import numpy as np
import pytest
import torch
from moe_cases import assert_layer, operands, wanted_layer

import in_torch
from anabranch.layouts import Layouts
from anabranch.torch import Activation, MoE

pytestmark = [
    pytest.mark.usefixtures("platform", "framework"),
    pytest.mark.parametrize("framework", ["torch"], indirect=True),
]

D, F, E, K = 12, 20, 6, 2
BIASED = dict(score_function="sigmoid", use_expert_bias=True)


def of_module(gradients, layouts, parts):
    """The gradients of a layer by the names and in the layouts of the oracle."""
    layout = layouts.w_in
    inside = dict(e=E, d=D, p=parts, f=F)
    found = {"x": gradients["x"], "gate": gradients["gate.weight"].T, "gate_bias": gradients["gate.bias"]}
    up = "gate_up_proj" if parts == 2 else "up_proj"
    found["w_in"] = gradients[up].reshape([inside[axis] for axis in "e" + layout]).permute(layouts.order("w_in"))
    found["b_in"] = gradients[f"{up}_bias"].reshape([inside[a] for a in layouts.letters("b_in")])
    found["b_in"] = found["b_in"].permute(layouts.order("b_in"))
    found["w_out"], found["b_out"] = gradients["down_proj"].permute(0, 2, 1), gradients["down_proj_bias"]
    return {name: in_torch.array(gradient) for name, gradient in found.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        dict(aux_loss_coeff=0.1, z_loss_coeff=0.01),
        dict(**BIASED, activation="gelu", gated=False, aux_loss_coeff=0.1, align_size=4),
        dict(interleaved=True, activation=Activation.swiglu_oai(1.3, 0.8), z_loss_coeff=0.1, weight_early=True),
    ],
    ids=str,
)
def test_random_cotangents_against_the_oracle(options, dtype):
    parts = 2 if options.get("gated", True) else 1
    layouts = Layouts("fpd" if options.get("interleaved") else "pfd", "df")
    arrays = operands(64, E, K, D, F, parts=parts, dtype=dtype, bias=True, seed=3)
    param_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
    layer = MoE(
        D, F, E, K, **options, device=in_torch.device(), use_bias=True, use_gate_bias=True, param_dtype=param_dtype
    )
    tensors = {name: in_torch.tensor(array) for name, array in arrays.items()}
    up = "gate_up_proj" if parts == 2 else "up_proj"
    state = {
        "gate.weight": tensors["gate"].T,
        "gate.bias": tensors["gate_bias"],
        up: tensors["w_in"].permute(layouts.from_ours("w_in")).reshape(E, parts * F, D),
        f"{up}_bias": tensors["b_in"].permute(layouts.from_ours("b_in")).reshape(E, parts * F),
        "down_proj": tensors["w_out"].permute(0, 2, 1),
        "down_proj_bias": tensors["b_out"],
    }
    for name in ("gate.weight", "gate.bias"):  # as the functional layer has them here
        layer.gate._parameters[name.removeprefix("gate.")] = torch.nn.Parameter(state.pop(name).contiguous())
    layer.load_state_dict(state, strict=False)
    if layer.expert_bias is not None:
        layer.expert_bias.copy_(torch.linspace(-0.2, 0.2, E))
    x = tensors["x"].requires_grad_()
    result = layer(x)
    rng = np.random.default_rng(1)
    d_output = rng.standard_normal(result.output.shape).astype(arrays["x"].dtype)
    d_aux, d_z = np.float32(rng.standard_normal()), np.float32(rng.standard_normal())
    d_weights = rng.standard_normal(result.weights.shape).astype(np.float32)
    outputs = {"output": d_output, "aux_loss": d_aux, "z_loss": d_z, "weights": d_weights}
    pairs = [(getattr(result, n), in_torch.tensor(d)) for n, d in outputs.items() if getattr(result, n).requires_grad]
    named = dict(layer.named_parameters())
    found = torch.autograd.grad([o for o, _ in pairs], [x, *named.values()], [d for _, d in pairs])
    got = of_module(dict(zip(["x", *named], found, strict=True)), layouts, parts)
    settings = {n: v for n, v in options.items() if n not in ("gated", "interleaved", "use_expert_bias")} | {"topk": K}
    if layer.expert_bias is not None:
        settings["expert_bias"] = in_torch.array(layer.expert_bias)
    wanted = wanted_layer(arrays, tuple(outputs.values()), **settings)
    assert_layer(in_torch.arrays(result), got, wanted, dtype)
