"""LoRA in torch's MoE module, and the functions that make, merge and join factors."""

import copy
import math

import pytest
import torch
import torch.nn.utils.prune

import anabranch.torch as ab
from anabranch.lora import NAMES
from torch_transforms import assert_close, normal

pytestmark = pytest.mark.usefixtures("device")
T, D, F, E, K = 13, 8, 6, 4, 2


def with_random_b(layer):
    """The layer with factors B that are not 0."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "lora_b" in name:
                parameter.copy_(normal(*parameter.shape, seed=len(name), scale=0.5))
    return layer


def trainable(module):
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def plain_and_adapted(**options):
    """A layer without adapters, and one with the same weights and adapters."""
    plain = ab.MoE(D, F, E, K, **options)
    adapted = ab.MoE(D, F, E, K, lora_rank=3, lora_alpha=6, lora_shared=("b_out",), **options)
    missing, unexpected = adapted.load_state_dict(plain.state_dict(), strict=False)
    assert set(missing) == set(NAMES) and not unexpected
    return plain, adapted


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(interleaved=True, use_bias=True),
        dict(gated=False, activation="relu2", shared_features=3),
        dict(use_gate_bias=True),
    ],
    ids=str,
)
def test_the_module_is_the_function(options):
    """At first the adapters change nothing; then they are those of the function, in outputs and gradients."""
    plain, layer = plain_and_adapted(**options)
    x, d_output = normal(T, D, seed=1), normal(T, D, seed=2)
    assert torch.equal(layer(x).output, plain(x).output)
    with_random_b(layer)
    result = layer(x).output
    assert not torch.allclose(result, plain(x).output)
    result.backward(d_output)
    assert trainable(layer) == list(NAMES)
    w_in, w_out = layer._matrices()
    layouts = dict(w_in_layout=layer.options.w_in_layout, w_out_layout="df")
    lora = ab.Lora(*(getattr(layer, name) for name in NAMES))
    merged = ab.merge_lora(w_in.detach(), w_out.detach(), lora, 2.0, **layouts)
    biases = {}
    if layer.down_proj_bias is not None:
        biases = {"b_in": layer.gate_up_proj_bias.view(w_in.shape[:-1]), "b_out": layer.down_proj_bias}
    given = dict(topk=K, gate_bias=layer.gate.bias, activation=layer.options.activation, **biases, **layouts)
    want = ab.moe(x, layer.gate.weight.T, *merged, **given).output
    if layer.shared_expert is not None:
        want = want + layer.shared_expert(x)
    assert_close(result, want, atol=1e-5)
    expected = torch.autograd.grad(want, lora, d_output)
    assert_close([factor.grad for factor in lora], list(expected), rtol=1e-4, atol=1e-5)


def test_a_bfloat16_module_has_float32_factors_or_its_own():
    layer = with_random_b(ab.MoE(D, F, E, K, lora_rank=2, param_dtype=torch.bfloat16))
    x = normal(T, D).to(torch.bfloat16)
    assert layer.lora_a_in.dtype == torch.float32
    output = layer(x).output
    output.sum().backward()
    assert output.dtype == torch.bfloat16 and layer.lora_b_in.grad.dtype == torch.float32
    rounded = copy.deepcopy(layer).to(torch.bfloat16)
    assert torch.equal(rounded(x).output, output) and rounded.lora_a_in.dtype == torch.bfloat16
    layer.lora_a_in.data = layer.lora_a_in.data.to(torch.bfloat16)
    assert layer(x.float()).output.dtype == torch.float32  # converted to the dtype of x


def test_a_model_gets_adapters_and_only_these_train():
    model = torch.nn.Sequential(torch.nn.Linear(D, D), ab.MoE(D, F, E, K), ab.MoE(D, F, E, K, use_expert_bias=True))
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert ab.add_lora(model, 2, shared=("a_in",)) is model
    assert trainable(model) == [f"{i}.{name}" for i in (1, 2) for name in NAMES]
    assert model[1].lora_a_in.shape == (1, D, 2) and model[1].options.lora_scale == 1.0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if name in before)
    state = with_random_b(model).state_dict()
    other = copy.deepcopy(model)
    other.load_state_dict(state)
    x = normal(T, D)
    assert torch.equal(other[1](x).output, model[1](x).output)
    for layer in (model[1], other[1]):
        layer(x).output.sum().backward()
    assert torch.equal(model[1].lora_b_in.grad, other[1].lora_b_in.grad)
    assert "lora_rank=2" in repr(model[1]) and "lora" not in repr(ab.MoE(D, F, E, K))


def test_initial_values():
    torch.manual_seed(0)
    plain = ab.MoE(64, 32, E, K)
    torch.manual_seed(0)
    layer = ab.MoE(64, 32, E, K, lora_rank=16)
    assert torch.equal(layer.gate_up_proj, plain.gate_up_proj) and torch.equal(layer.down_proj, plain.down_proj)
    with torch.no_grad():
        for name in NAMES:
            getattr(layer, name).fill_(7.0)
    layer.reset_parameters()
    for name, width in (("lora_a_in", 64), ("lora_a_out", 32)):
        factor, bound = getattr(layer, name), 1 / math.sqrt(width)
        assert 0.95 * bound < factor.abs().max() <= bound
        assert abs(factor.std() - bound / math.sqrt(3)) < 0.02 * bound
        assert not torch.equal(factor[0], factor[1])
    assert not layer.lora_b_in.any() and not layer.lora_b_out.any()
    meta = ab.MoE(D, F, E, K, lora_rank=2, device="meta")
    assert meta.lora_a_in.is_meta
    meta.to_empty(device=normal(1).device).reset_parameters()
    assert meta.lora_a_in.any() and not meta.lora_b_in.any()
    device = plain.down_proj.device
    first, again = (
        ab.init_lora(plain._matrices()[0], plain.down_proj, 16, w_in_layout="pfd", w_out_layout="df", generator=g)
        for g in (torch.Generator(device).manual_seed(1), torch.Generator(device).manual_seed(1))
    )
    assert torch.equal(first.a_in, again.a_in) and first.a_in.abs().max() <= 1 / 8 and not first.b_out.any()
    assert [tuple(f.shape) for f in first] == [(E, 64, 16), (E, 16, 2, 32), (E, 32, 16), (E, 16, 64)]


def test_compiled_and_hooked_modules():
    """A forward hook on the gate makes the module call it, and torch.compile traces the module."""
    layer = with_random_b(ab.MoE(D, F, E, K, lora_rank=2))
    x, d_output = normal(T, D), normal(T, D, seed=1)

    def gradients(module):
        layer.zero_grad()
        module(x).output.backward(d_output)
        return [getattr(layer, name).grad for name in NAMES]

    want = gradients(layer)
    torch._dynamo.reset()
    assert_close(gradients(torch.compile(layer, fullgraph=True, backend="aot_eager")), want)
    layer.gate.register_forward_hook(lambda *_: None)
    assert_close(gradients(layer), want)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ab.MoE(D, F, E, K, lora_rank=-1), ValueError, r"^lora_rank: got -1, expected"),
        (lambda: ab.MoE(D, F, E, K, lora_alpha=2.0), ValueError, r"^lora_alpha: got 2.0 without adapters, expected"),
        (lambda: ab.MoE(D, F, E, K, lora_shared=("a_in",)), ValueError, r"^lora_shared: got .* without adapters"),
        (lambda: ab.MoE(D, F, E, K, lora_rank=2, lora_shared="a_in"), TypeError, r"^lora_shared: got str 'a_in', exp"),
        (lambda: ab.MoE(D, F, E, K, lora_rank=2, lora_alpha="x"), TypeError, r"^lora_alpha: got"),
        (lambda: ab.add_lora(ab.MoE(D, F, E, K), 0), ValueError, r"^rank: got 0, expected"),
        (lambda: ab.add_lora(ab.MoE(D, F, E, K, lora_rank=2), 2), ValueError, r"^module: got a layer with adapters of"),
        (lambda: ab.add_lora(torch.nn.Linear(2, 2), 2), ValueError, r"^module: got a Linear without a MoE layer"),
        (lambda: ab.add_lora(3, 2), TypeError, r"^module: got int 3, expected a torch.nn.Module"),
        (
            lambda: ab.init_lora(normal(E, D, 2, F), normal(E, F, D), 2, dtype=torch.int32),
            TypeError,
            r"^dtype: got .*, expected float32",
        ),
        (lambda: ab.init_lora(normal(E, D, 2, F), normal(E, D, F), 2), ValueError, r"^w_out: got .*, expected"),
        (lambda: ab.merge_lora(normal(E, D, 2, F), normal(E, F, D), 3), TypeError, r"^lora: got int 3, expected a"),
        (lambda: ab.join_lora(normal(E, D, 2), 3), TypeError, r"^gate: got .*, expected a pair"),
        (
            lambda: ab.join_lora((normal(E, D, 2), normal(E, 2, F)), (normal(E, D, 2), normal(E, 3, F))),
            ValueError,
            r"^up\[1\]: got .*, expected .*q=2",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_nothing_changes_if_a_layer_of_a_model_cannot_get_adapters():
    model = torch.nn.Sequential(ab.MoE(D, F, E, K), ab.MoE(D, F, E, K, lora_rank=2))
    before = trainable(model)
    with pytest.raises(ValueError, match=r"^module: got a layer with adapters of rank 2"):
        ab.add_lora(model, 2)
    assert trainable(model) == before and model[0].lora.rank == 0


@pytest.mark.parametrize(("w_in_layout", "w_out_layout"), [("dpf", "fd"), ("pfd", "df"), ("fpd", "df"), ("dfp", "fd")])
def test_merged_weights_are_the_adapted_ones(w_in_layout, w_out_layout):
    shape = {"dpf": (E, D, 2, F), "pfd": (E, 2, F, D), "fpd": (E, F, 2, D), "dfp": (E, D, F, 2)}[w_in_layout]
    w_in, w_out = normal(*shape, scale=0.3), normal(E, *((F, D) if w_out_layout == "fd" else (D, F)), scale=0.3)
    layouts = dict(w_in_layout=w_in_layout, w_out_layout=w_out_layout)
    lora = ab.Lora(normal(1, D, 3, scale=0.3), normal(E, 3, 2, F), normal(E, F, 2, scale=0.3), normal(1, 2, D))
    rows, sizes = normal(T, D), torch.tensor([5, 0, 6, 2])
    want = ab.expert_ffn(rows, w_in, w_out, sizes, lora=lora, lora_scale=(0.5, -1.5), **layouts)
    merged = ab.merge_lora(w_in, w_out, lora, (0.5, -1.5), **layouts)
    assert_close(ab.expert_ffn(rows, *merged, sizes, **layouts), want, rtol=1e-4, atol=1e-5)
    half, same = ab.merge_lora(w_in.half(), w_out, lora._replace(a_out=None, b_out=None), 0.5, **layouts)
    assert half.dtype == torch.float16 and same is w_out
    assert torch.equal(half, ab.merge_lora(w_in.half().float(), w_out, lora, 0.5, **layouts)[0].half())


def test_joined_factors_are_those_of_gate_and_up():
    gate, up = ((normal(E, D, 2), normal(E, 2, F)), (normal(1, D, 3), normal(E, 3, F)))
    a, b = ab.join_lora(gate, up)
    product = torch.einsum("edr,erpf->edpf", a, b)
    assert a.shape == (E, D, 5) and b.shape == (E, 5, 2, F)
    assert_close(product, torch.stack([gate[0] @ gate[1], up[0] @ up[1]], 2))


def test_shared_factors_are_no_experts_parameters():
    """Every rank of a group has the same; so have parametrizations and pruning masks of them."""
    layer = ab.MoE(D, F, E, K, lora_rank=2, lora_shared=("a_in", "b_out"))
    torch.nn.utils.parametrizations.weight_norm(layer, "lora_a_in")
    torch.nn.utils.parametrizations.weight_norm(layer, "lora_a_out")
    torch.nn.utils.prune.random_unstructured(layer, "lora_b_out", 0.5)
    of_a_out = {f"parametrizations.lora_a_out.original{i}" for i in range(2)}
    assert layer._expert_tensors().keys() == {"gate_up_proj", "down_proj", "lora_b_in"} | of_a_out
