"""Packed weights in torch: devices, dtypes, state dicts, modules, compiled programs and refused gradients."""

import copy
import io

import pytest
import torch

from anabranch.torch import (
    Fp8Blocks,
    MoE,
    Mxfp4,
    add_lora,
    expert_ffn,
    moe,
    pack_experts,
    pack_fp8,
    pack_mxfp4,
    routed_experts,
    unpack,
)

T, E, K, D, F = 9, 4, 2, 128, 128
PFD = dict(w_in_layout="pfd", w_out_layout="df")
KINDS = {"mxfp4": Mxfp4, "fp8_blocks": Fp8Blocks}
PACK = {"mxfp4": pack_mxfp4, "fp8_blocks": pack_fp8}


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pair(kind):
    return PACK[kind](normal(E, 2, F, D) / 11), PACK[kind](normal(E, D, F, seed=1) / 11)


def layers(packed, **options):
    """A packed layer, and one with the unpacked values as parameters."""
    torch.manual_seed(0)
    plain = MoE(D, F, E, K, **options)
    layer = pack_experts(copy.deepcopy(plain), packed)
    with torch.no_grad():
        for name in (plain.up_name, "down_proj"):
            fields = KINDS[packed]._fields
            value = KINDS[packed](*(getattr(layer, f"{name}_{field}") for field in fields))
            getattr(plain, name).copy_(unpack(value, torch.float32))
            getattr(plain, name).requires_grad_(False)
    return layer, plain


@pytest.mark.parametrize("packed", KINDS)
@pytest.mark.parametrize(
    "options", [dict(), dict(use_bias=True, shared_features=16), dict(gated=False, activation="relu2")], ids=str
)
def test_a_packed_layer_has_the_bits_of_its_values(packed, options):
    layer, plain = layers(packed, **options)
    outputs = []
    for module in (layer, plain):
        x = normal(T, D).requires_grad_()
        result = module(x).output
        result.square().sum().backward()
        outputs.append((result, x.grad, *(p.grad for p in module.parameters() if p.grad is not None)))
    assert len(outputs[0]) == len(outputs[1]) >= 3
    assert all(torch.equal(got, want) for got, want in zip(*outputs, strict=True))


def test_interleaved_layer():
    layer, plain = layers("mxfp4", interleaved=True, use_bias=True)
    assert torch.equal(layer(normal(T, D)).output, plain(normal(T, D)).output)


@pytest.mark.parametrize("packed", KINDS)
def test_state_dict(packed):
    layer, _ = layers(packed, use_bias=True)
    fields = KINDS[packed]._fields
    names = [f"{name}_{field}" for name in ("gate_up_proj", "down_proj") for field in fields]
    state = layer.state_dict()
    assert set(names) < set(state) and not {"gate_up_proj", "down_proj"} & set(state)
    saved = io.BytesIO()
    torch.save(state, saved)
    saved.seek(0)
    for device in (None, "meta"):
        again = MoE(D, F, E, K, packed=packed, use_bias=True, device=device)
        again.load_state_dict(torch.load(saved), assign=device is not None)
        saved.seek(0)
        assert torch.equal(again(normal(T, D)).output, layer(normal(T, D)).output)
    with pytest.raises(RuntimeError, match=r"Missing key.*gate_up_proj"):
        MoE(D, F, E, K, use_bias=True).load_state_dict(state)


def powers_of_two(layer):
    """The state of an Fp8Blocks layer whose scales are powers of two, and these as the bytes of e8m0."""
    state, exponents = layer.state_dict(), {}
    for name in ("gate_up_proj_scales", "down_proj_scales"):
        exponents[name] = torch.randint(110, 125, state[name].shape, dtype=torch.uint8)
        state[name] = torch.exp2(exponents[name].float() - 127)
    layer.load_state_dict(state)
    return state, exponents


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("packed", KINDS)
def test_scales_of_other_dtypes_are_loaded_by_value(packed, assign):
    layer, _ = layers(packed)
    if packed == "mxfp4":
        state = layer.state_dict()
        others = [{n: s.view(torch.float8_e8m0fnu) for n, s in state.items() if n.endswith("_scales")}]
    else:
        state, exponents = powers_of_two(layer)
        others = [exponents, {n: s.view(torch.float8_e8m0fnu) for n, s in exponents.items()}]
        others.append({n: state[n].bfloat16() for n in exponents})
    for scales in others:
        again = MoE(D, F, E, K, packed=packed)
        again.load_state_dict({**state, **scales}, assign=assign)
        for name in scales:
            assert getattr(again, name).dtype == getattr(layer, name).dtype
        assert torch.equal(again(normal(T, D)).output, layer(normal(T, D)).output)


@pytest.mark.parametrize(
    ("packed", "name", "dtype"),
    [
        ("mxfp4", "down_proj_scales", torch.float32),
        ("mxfp4", "gate_up_proj_codes", torch.int8),
        ("fp8_blocks", "down_proj_q", torch.float32),
        ("fp8_blocks", "gate_up_proj_scales", torch.int32),
    ],
)
def test_loading_another_dtype_is_an_error(packed, name, dtype):
    layer, _ = layers(packed)
    before = getattr(layer, name).clone()
    with pytest.raises(RuntimeError, match=f"{name}: got {dtype}, expected {before.dtype}"):
        layer.load_state_dict({**layer.state_dict(), name: before.to(dtype)})
    assert torch.equal(getattr(layer, name).view(torch.uint8), before.view(torch.uint8))


def test_layers_that_cannot_be_packed_change_nothing():
    model = torch.nn.Sequential(MoE(D, F, E, K), MoE(D, F, E, K).double())
    with pytest.raises(ValueError, match=r"module: got a layer whose gate_up_proj is torch.float64, expected float32"):
        pack_experts(model, "mxfp4")
    assert all(layer.packed is None and layer.down_proj is not None for layer in model)


@pytest.mark.parametrize("packed", KINDS)
def test_a_packed_layer_refuses_quantized_experts(packed):
    layer, _ = layers(packed, precision="fp8" if packed == "fp8_blocks" else "highest")
    quantized = MoE(D, F, E, K, precision="fp8").quantized()
    with pytest.raises(ValueError, match="quantized: "):
        layer(normal(T, D), quantized=quantized)


@pytest.mark.parametrize("packed", KINDS)
def test_conversions_keep_the_dtypes_of_packed_weights(packed):
    layer, _ = layers(packed, use_expert_bias=True)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    layer.to(torch.bfloat16)
    assert layer.gate.weight.dtype == torch.bfloat16
    for name, buffer in layer.named_buffers():
        assert buffer.dtype == before[name].dtype
        assert torch.equal(buffer.view(torch.uint8), before[name].view(torch.uint8)), name
    x = normal(T, D).bfloat16()
    assert layer(x).output.dtype == torch.bfloat16
    meta = MoE(D, F, E, K, packed=packed, device="meta").to(torch.bfloat16).to_empty(device="cpu")
    meta.reset_parameters()
    assert torch.isfinite(meta(x).output).all()


def test_reset_parameters_draws_what_a_plain_layer_draws():
    torch.manual_seed(3)
    plain = MoE(D, F, E, K)
    torch.manual_seed(3)
    layer = MoE(D, F, E, K, packed="mxfp4")
    packed = pack_mxfp4(plain.down_proj)
    assert torch.equal(layer.down_proj_codes, packed.codes) and torch.equal(layer.down_proj_scales, packed.scales)
    assert torch.equal(layer.gate_up_proj_codes, pack_mxfp4(plain.gate_up_proj).codes)
    # The gate is drawn first, then the matrices in the order of the layer.
    assert torch.equal(layer.gate.weight, plain.gate.weight)
    error = (unpack(packed, torch.float32) - plain.down_proj).abs().max()
    assert 0 < error < 0.3 * plain.down_proj.abs().max()


@pytest.mark.parametrize("packed", KINDS)
def test_adapters_on_packed_weights(packed):
    layer, plain = layers(packed)
    gradients = []
    for module in (layer, plain):
        torch.manual_seed(1)
        add_lora(module, 3)
        with torch.no_grad():
            module.lora_b_in.normal_(std=0.1)
            module.lora_b_out.normal_(std=0.1)
        module(normal(T, D)).output.square().sum().backward()
        gradients.append([module.get_parameter(f"lora_{name}").grad for name in ("a_in", "b_in", "a_out", "b_out")])
    assert all(torch.equal(got, want) for got, want in zip(*gradients, strict=True))


def test_fp8_layer_of_fp8_blocks():
    plain = MoE(D, F, E, K, precision="fp8")
    layer = pack_experts(copy.deepcopy(plain), "fp8_blocks")
    outputs = []
    for module in (layer, plain):
        x = normal(T, D).requires_grad_()
        result = module(x).output
        result.sum().backward()
        outputs.append((result, x.grad))
    assert all(torch.equal(got, want) for got, want in zip(*outputs, strict=True))
    with pytest.raises(ValueError, match=r"^quantized: got a layer with packed='fp8_blocks'"):
        layer.quantized()


def test_packed_weights_move():
    w_in, _ = pair("mxfp4")
    moved = w_in.to("meta")
    assert isinstance(moved, Mxfp4) and moved.codes.is_meta and moved.scales.is_meta


def test_a_packed_tensor_that_requires_a_gradient_raises():
    w_in, w_out = pair("fp8_blocks")
    x, gate, experts = normal(T, D), normal(D, E), torch.zeros(T, K, dtype=torch.int32)
    sizes = torch.tensor([T, 0, 0, 0])
    for field in Fp8Blocks._fields:
        wrong = w_in._replace(**{field: getattr(w_in, field).clone().requires_grad_()})
        message = f"^w_in.{field}: got a tensor that requires a gradient, expected one without"
        with pytest.raises(ValueError, match=message.replace("w_in", "packed")):
            unpack(wrong, torch.float32)
        for _ in range(2):  # equal arguments are not checked again, but this is
            moe(x, gate, w_in, w_out, topk=K, **PFD)
            with pytest.raises(ValueError, match=message):
                moe(x, gate, wrong, w_out, topk=K, **PFD)
        with pytest.raises(ValueError, match=message):
            routed_experts(x, experts, normal(T, K), wrong, w_out, **PFD)
        with pytest.raises(ValueError, match=message):
            expert_ffn(x, wrong, w_out, sizes, **PFD)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind):
    weights = pair(kind)

    def loss(x, gate, w_in, w_out):
        return moe(x, gate, w_in, w_out, topk=K, **PFD).output.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    gradients = []
    for function in (loss, compiled):
        x, gate = normal(T, D).requires_grad_(), normal(D, E).requires_grad_()
        function(x, gate, *weights).backward()
        gradients.append((x.grad, gate.grad))
    assert all(torch.equal(got, want) for got, want in zip(*gradients, strict=True))


def test_compiled_layer():
    layer, _ = layers("mxfp4")
    x = normal(T, D)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x).output, layer(x).output)


def test_functional_gradient():
    weights = pair("mxfp4")
    gate = normal(D, E)

    def loss(x):
        return moe(x, gate, *weights, topk=K, **PFD).output.square().sum()

    x = normal(T, D).requires_grad_()
    loss(x).backward()
    assert torch.equal(torch.func.grad(loss)(x.detach()), x.grad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(packed="gguf"), "packed: got 'gguf', expected one of 'mxfp4', 'fp8_blocks'"),
        (
            dict(packed="fp8_blocks", interleaved=True),
            "packed: got 'fp8_blocks' with w_in_layout 'fpd', expected 'pfd'",
        ),
        (dict(packed="mxfp4", precision="fp8"), "precision: got 'fp8' with packed='mxfp4'"),
    ],
)
def test_errors_of_the_layer(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        MoE(D, F, E, K, **options)


def test_errors_of_pack_experts():
    layer = MoE(96, 64, E, K)
    with pytest.raises(ValueError, match=r"^in_features: got 96 with packed='fp8_blocks', expected a multiple of 128"):
        pack_experts(layer, "fp8_blocks")
    assert layer.packed is None and isinstance(layer.down_proj, torch.nn.Parameter)
    pack_experts(layer, "mxfp4")
    with pytest.raises(ValueError, match=r"^module: got a layer with packed='mxfp4', expected one with plain weights"):
        pack_experts(layer, "mxfp4")
    with pytest.raises(ValueError, match=r"^module: got a Linear without a MoE layer"):
        pack_experts(torch.nn.Linear(2, 2), "mxfp4")
    with pytest.raises(ValueError, match=r"^packed: got 'nf4'"):
        pack_experts(layer, "nf4")
