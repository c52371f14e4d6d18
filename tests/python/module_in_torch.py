"""Converts the oracle's arrays to parameters of `MoE`, and its gradients to the oracle's names and layouts."""

import torch

import in_torch
from anabranch.layouts import Layouts
from anabranch.torch import MoE


def layouts_of(options):
    """The layouts of the expert weights of a layer with these options."""
    return Layouts("fpd" if options.get("interleaved") else "pfd", "df")


def make_layer(arrays, num_experts, topk, **options):
    """A layer with the arrays as parameters; with a group, those of this rank's experts."""
    local, D, parts, F = arrays["w_in"].shape
    tensors = {name: in_torch.tensor(array) for name, array in arrays.items()}
    layouts, dtype = layouts_of(options), tensors["x"].dtype
    layer = MoE(
        *(D, F, num_experts, topk),
        **options,
        device=in_torch.device(),
        use_bias=True,
        use_gate_bias=True,
        param_dtype=dtype,
    )
    up = layer.up_name
    state = {
        up: tensors["w_in"].permute(layouts.from_ours("w_in")).reshape(local, parts * F, D),
        f"{up}_bias": tensors["b_in"].permute(layouts.from_ours("b_in")).reshape(local, parts * F),
        "down_proj": tensors["w_out"].permute(0, 2, 1),
        "down_proj_bias": tensors["b_out"],
    }
    for name, value in (("weight", tensors["gate"].T), ("bias", tensors["gate_bias"])):
        layer.gate._parameters[name] = torch.nn.Parameter(value.contiguous())  # in the case's dtype
    layer.load_state_dict(state, strict=False)
    return layer


def with_oracle_names(gradients, layer, options):
    """The gradients of x and of a layer's parameters by the oracle's names, in its layouts."""
    layouts, parts, up = layouts_of(options), layer.parts, layer.up_name
    inside = dict(e=layer.local_experts, d=layer.in_features, p=parts, f=layer.hidden_features)
    found = {"x": gradients["x"], "gate": gradients["gate.weight"].T, "gate_bias": gradients["gate.bias"]}
    found["w_in"] = gradients[up].reshape([inside[axis] for axis in "e" + layouts.w_in]).permute(layouts.order("w_in"))
    found["b_in"] = gradients[f"{up}_bias"].reshape([inside[a] for a in layouts.letters("b_in")])
    found["b_in"] = found["b_in"].permute(layouts.order("b_in"))
    return found | {"w_out": gradients["down_proj"].permute(0, 2, 1), "b_out": gradients["down_proj_bias"]}
