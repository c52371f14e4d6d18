"""The layer as an nn.Module of torch against the oracle, with its own parameters and layouts."""

import numpy as np
import pytest
import torch

import in_torch
from anabranch.torch import Activation
from module_in_torch import make_layer, with_oracle_names
from moe_cases import assert_layer, expected_layer, operands

pytestmark = [
    pytest.mark.usefixtures("platform", "framework"),
    pytest.mark.parametrize("framework", ["torch"], indirect=True),
]

D, F, E, K = 12, 20, 6, 2
BIASED = dict(score_function="sigmoid", use_expert_bias=True)


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
    arrays = operands(64, E, K, D, F, parts=parts, dtype=dtype, bias=True, seed=3)
    layer = make_layer(arrays, E, K, **options)
    if layer.expert_bias is not None:
        layer.expert_bias.copy_(torch.linspace(-0.2, 0.2, E))
    x = in_torch.tensor(arrays["x"]).requires_grad_()
    result = layer(x)
    rng = np.random.default_rng(1)
    d_output = rng.standard_normal(result.output.shape).astype(arrays["x"].dtype)
    d_aux, d_z = np.float32(rng.standard_normal()), np.float32(rng.standard_normal())
    d_weights = rng.standard_normal(result.weights.shape).astype(np.float32)
    outputs = {"output": d_output, "aux_loss": d_aux, "z_loss": d_z, "weights": d_weights}
    pairs = [(getattr(result, n), in_torch.tensor(d)) for n, d in outputs.items()]
    found = with_oracle_names(in_torch.gradients_of(pairs, {"x": x, **dict(layer.named_parameters())}), layer, options)
    got = {name: in_torch.array(gradient) for name, gradient in found.items()}
    settings = {n: v for n, v in options.items() if n not in ("gated", "interleaved", "use_expert_bias")} | {"topk": K}
    if layer.expert_bias is not None:
        settings["expert_bias"] = in_torch.array(layer.expert_bias)
    wanted = expected_layer(arrays, tuple(outputs.values()), **settings)
    assert_layer(in_torch.arrays(result), got, wanted, dtype)


def test_losses_of_several_layers_are_added_in_place():
    """The losses of a layer without losses are two tensors."""
    arrays = operands(16, E, K, D, F, bias=True)
    with_losses = make_layer(arrays, E, K, aux_loss_coeff=0.1, z_loss_coeff=0.01)
    x = in_torch.tensor(arrays["x"])
    for coefficients in ({}, {"z_loss_coeff": 0.0, "aux_loss_coeff": 0.0}):
        first, second = make_layer(arrays, E, K, **coefficients)(x), with_losses(x)
        aux, z = first.aux_loss, first.z_loss
        aux += second.aux_loss
        z += second.z_loss
        torch.testing.assert_close((aux, z), (second.aux_loss, second.z_loss), rtol=0, atol=0)
        assert aux > 0 and z > 0 and aux != z
        assert first.dropped == 0 and first.tokens_per_expert.sum() == 16 * K
