"""Signatures, docstrings and checks of both front ends use one description of the layer's options."""

import dataclasses
import inspect
import typing

import jax.numpy as jnp
import pytest
import torch
from flax import nnx

import anabranch.jax
import anabranch.torch
from anabranch import options
from anabranch.jax.nnx import MoE

KEYWORDS = [options.RouterKeywords, options.ExpertsKeywords, options.RoutedKeywords, options.LayerKeywords]
TAKERS = [
    (function, keywords)
    for front in (anabranch.jax, anabranch.torch)
    for function, keywords in zip(
        (front.route, front.expert_ffn, front.routed_experts, front.moe), KEYWORDS, strict=True
    )
] + [(MoE, options.LayoutModuleKeywords), (anabranch.torch.MoE, options.ModuleKeywords)]


def fields_of(keywords):
    """{name: type} of the fields of `LayerOptions` that are in a TypedDict."""
    kinds = typing.get_type_hints(options.LayerOptions)
    return {name: kinds[name] for name in typing.get_type_hints(keywords)}


def test_keyword_types_are_those_of_the_fields():
    own = {field.name for field in dataclasses.fields(options.LayerOptions)} - {"topk", "qb_bins"}
    assert set(typing.get_type_hints(options.LayerKeywords)) == own
    for keywords in (*KEYWORDS, options.ModuleKeywords):
        assert typing.get_type_hints(keywords) == fields_of(keywords)


@pytest.mark.parametrize(("function", "keywords"), TAKERS)
def test_signatures_and_docstrings_have_every_option(function, keywords):
    called = function.__init__ if isinstance(function, type) else function
    parameters = inspect.signature(called).parameters
    defaults = {field.name: field.default for field in dataclasses.fields(options.LayerOptions)}
    for name in fields_of(keywords):
        assert parameters[name].default == defaults[name]
        assert f"{name}:" in function.__doc__ or f"{name}, " in function.__doc__
    assert "{options}" not in function.__doc__


X, GATE, W_IN, W_OUT = (8, 4), (4, 3), (3, 4, 2, 5), (3, 5, 4)
CALLS = {
    "jax.moe": lambda **o: anabranch.jax.moe(*map(jnp.ones, (X, GATE, W_IN, W_OUT)), topk=1, **o),
    "torch.moe": lambda **o: anabranch.torch.moe(*map(torch.ones, (X, GATE, W_IN, W_OUT)), topk=1, **o),
    "jax.routed_experts": lambda **o: anabranch.jax.routed_experts(
        jnp.ones(X), jnp.zeros((8, 1), jnp.int32), jnp.ones((8, 1)), jnp.ones(W_IN), jnp.ones(W_OUT), **o
    ),
    "torch.routed_experts": lambda **o: anabranch.torch.routed_experts(
        torch.ones(X), torch.zeros(8, 1, dtype=torch.int32), torch.ones(8, 1), torch.ones(W_IN), torch.ones(W_OUT), **o
    ),
    "jax.expert_ffn": lambda **o: anabranch.jax.expert_ffn(
        jnp.ones((3, 4)), jnp.ones(W_IN), jnp.ones(W_OUT), jnp.ones(3, jnp.int32), **o
    ),
    "torch.expert_ffn": lambda **o: anabranch.torch.expert_ffn(
        torch.ones(3, 4), torch.ones(W_IN), torch.ones(W_OUT), torch.ones(3, dtype=torch.int32), **o
    ),
    "nnx.MoE": lambda **o: MoE(4, 5, 3, 1, rngs=nnx.Rngs(0), **o),
    "torch.MoE": lambda **o: anabranch.torch.MoE(4, 5, 3, 1, **o),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_unknown_option_is_a_type_error_that_names_the_function(call, request):
    function = request.node.callspec.id.split(".")[1]
    with pytest.raises(TypeError, match=rf"^{function}\(\) got an unexpected keyword argument 'weight_erly'$"):
        call(weight_erly=True)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_precision_auto_names_its_replacement(call):
    with pytest.raises(ValueError, match=r"^precision: got 'auto', .*anabranch\.choose_precision"):
        call(precision="auto")
