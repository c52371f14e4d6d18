"""Runs the whole layer and the layer after the router in torch, for the checks of `moe_cases` and `routed_cases`."""

import numpy as np
import torch

import in_torch
from anabranch.lora import NAMES
from anabranch.torch import Replay, moe, route, routed_experts
from anabranch.torch.layer.gate import gate_logits
from lora_cases import takes_factors

_TENSORS = ("expert_bias", "token_mask", "forced_experts")
_POSITIONAL = ("x", "experts", "weights", "w_in", "w_out")


def _options(options):
    """The options of a case, with arrays converted to tensors."""
    given = {name: in_torch.tensor(np.asarray(options[name])) for name in _TENSORS if options.get(name) is not None}
    if options.get("replay") is not None:
        given["replay"] = Replay(*map(in_torch.tensor, options["replay"]))
    return {name: value for name, value in options.items() if name not in _TENSORS} | given


def selected(arrays, topk, options):
    """The experts that route() selects from the layer's own logits."""
    with torch.no_grad():
        logits = gate_logits(in_torch.tensor(arrays["x"]), in_torch.tensor(arrays["gate"]))
        if arrays.get("gate_bias") is not None:
            logits = logits + in_torch.tensor(arrays["gate_bias"]).float()
        return in_torch.array(route(logits, topk, **_options(options)).experts)


def run(present, seed, options):
    """Result, gradients and cotangents of `moe`, all as arrays; see `moe_cases.run_layer`."""
    settings = _options(options)
    result, pull = in_torch.vjp(
        lambda x, gate, w_in, w_out, **rest: takes_factors(moe)(x, gate, w_in, w_out, **rest, **settings),
        {name: np.asarray(array) for name, array in present.items()},
    )
    found = in_torch.arrays(result)
    rng = np.random.default_rng(seed)
    d_output = rng.standard_normal(found.output.shape).astype(found.output.dtype)
    d_aux, d_z = np.float32(rng.standard_normal()), np.float32(rng.standard_normal())
    d_weights = rng.standard_normal(found.weights.shape).astype(np.float32)
    gradients = pull({"output": d_output, "aux_loss": d_aux, "z_loss": d_z, "weights": d_weights})
    for name, gradient in gradients.items():
        assert gradient.dtype == present[name].dtype, name
    return found, gradients, (d_output, d_aux, d_z, d_weights)


def run_routed(present, experts, seed, options):
    """(output, counts, dropped), gradients and the cotangent of `routed_experts`; see `routed_cases.run_routed`."""
    selection = in_torch.tensor(np.asarray(experts))

    def layer(**given):
        main = given | {"experts": selection}
        rest = {name: given[name] for name in ("b_in", "b_out", *NAMES) if name in given}
        return takes_factors(routed_experts)(*(main[name] for name in _POSITIONAL), **rest, **options)

    result, pull = in_torch.vjp(layer, {name: np.asarray(array) for name, array in present.items()})
    found = in_torch.arrays(result)
    d_output = np.random.default_rng(seed).standard_normal(found.output.shape).astype(found.output.dtype)
    return tuple(found), pull({"output": d_output}), d_output
