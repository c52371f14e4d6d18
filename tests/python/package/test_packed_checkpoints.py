"""Packed checkpoints: tensors come back bit for bit, every expert is there exactly once, and convert packs as the layer."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from anabranch.checkpoints import FAMILIES, Files, check, convert, load, store, write_file
from anabranch.packed import Fp8Blocks, Mxfp4
from anabranch.reference.packed import pack_fp8, pack_mxfp4, unpack

E, D, F = 4, 256, 128
FORMATS = {"gpt_oss": "mxfp4", "qwen3_moe": "fp8_blocks", "deepseek_v3": "fp8_blocks", "mixtral": "mxfp4"}


def random(shape, dtype, generator):
    """Random bits of positive finite numbers, or of any bytes."""
    if np.dtype(dtype) == np.uint8:
        return generator.integers(0, 255, shape, dtype=np.uint8)
    return np.abs(generator.standard_normal(shape)).astype(dtype)


def packed_tensors(name, prefix=""):
    """A packed block of a family, with the shapes of published checkpoints."""
    rng, e4m3 = np.random.default_rng(0), ml_dtypes.float8_e4m3fn
    if name == "gpt_oss":
        shapes = {
            "router.weight": ((E, D), np.float32),
            "router.bias": ((E,), np.float32),
            "experts.gate_up_proj_blocks": ((E, 2 * F, D // 32, 16), np.uint8),
            "experts.gate_up_proj_scales": ((E, 2 * F, D // 32), np.uint8),
            "experts.gate_up_proj_bias": ((E, 2 * F), np.float32),
            "experts.down_proj_blocks": ((E, D, F // 32, 16), np.uint8),
            "experts.down_proj_scales": ((E, D, F // 32), np.uint8),
            "experts.down_proj_bias": ((E, D), np.float32),
        }
    else:
        modules = [f"experts.{e}" for e in range(E)] + ["shared_experts"] * (name == "deepseek_v3")
        shapes = {"gate.weight": ((E, D), ml_dtypes.bfloat16)}
        if name == "deepseek_v3":
            shapes["gate.e_score_correction_bias"] = ((E,), np.float32)
        for module in modules:
            for matrix, (N, C) in {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}.items():
                scales = np.float32 if name == "deepseek_v3" else ml_dtypes.bfloat16
                shapes[f"{module}.{matrix}.weight"] = (N, C), e4m3
                shapes[f"{module}.{matrix}.weight_scale_inv"] = (N // 128, C // 128), scales
    return {prefix + key: random(shape, dtype, rng) for key, (shape, dtype) in shapes.items()}


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_a_packed_block_comes_back_bit_for_bit(name):
    family, tensors = FAMILIES[name].with_packed(FORMATS[name]), packed_tensors(name, "m.")
    block = load(family, tensors, "m.")
    kind = Mxfp4 if name == "gpt_oss" else Fp8Blocks
    w_in, w_out = (block.experts[weight] for weight in ("w_in", "w_out"))
    assert type(w_in) is kind and type(w_out) is kind
    shape = (E, F, 2, D // 32, 16) if name == "gpt_oss" else (E, 2, F, D)
    assert w_in[0].shape == shape and (family.w_in_layout, family.w_out_layout) == (
        "fpd" if kind is Mxfp4 else "pfd",
        "df",
    )
    if name == "gpt_oss":
        assert np.shares_memory(w_in.codes, tensors["m.experts.gate_up_proj_blocks"])
    if name == "deepseek_v3":
        assert [part.shape for part in block.shared["w_in"]] == [(2, F, D), (2, 1, 2)]
        plain = {key: value for key, value in tensors.items() if "shared" not in key}
        decoded = {
            key: unpack(Fp8Blocks(value, tensors[f"{key}_scale_inv"]), np.float32)
            for key, value in tensors.items()
            if "shared" in key and key.endswith("weight")
        }
        assert load(family, plain | decoded, "m.").shared["w_in"].shape == (D, 2, F)
    back = store(family, block, "m.")
    assert back.keys() == tensors.keys()
    for key, value in tensors.items():
        assert back[key].dtype == value.dtype and back[key].tobytes() == value.tobytes(), key


def test_a_loaded_block_is_the_argument_of_the_layer():
    from anabranch.jax import moe

    family = FAMILIES["qwen3_moe"].with_packed("fp8_blocks")
    block = load(family, packed_tensors("qwen3_moe"))
    x = jax.random.normal(jax.random.key(0), (8, D))
    router = {"gate": np.asarray(block.router["gate"], np.float32)}
    decoded = {name: unpack(w, np.float32) for name, w in block.experts.items()}
    outputs = [moe(x, **router, **w, **family.options, topk=2).output for w in (block.experts, decoded)]
    assert np.array_equal(*outputs)


def test_wrong_packed_tensors_are_errors_that_name_them():
    family, tensors = FAMILIES["gpt_oss"].with_packed("mxfp4"), packed_tensors("gpt_oss")
    blocks, scales = "experts.down_proj_blocks", "experts.down_proj_scales"
    for change, kind, message in (
        ({scales: None}, ValueError, f"{scales}: got no such tensor"),
        (
            {blocks: tensors[blocks][:-1]},
            ValueError,
            rf"{blocks}: got \[3, 256, 4, 16\], expected \[E, D, F/32, 16\] with E = 4",
        ),
        ({blocks: tensors[blocks][..., :8]}, ValueError, rf"{blocks}: got \[4, 256, 4, 8\]"),
        ({blocks: tensors[blocks].reshape(E, D, -1)}, ValueError, rf"{blocks}: got \[4, 256, 64\]"),
        ({scales: tensors[scales][..., :2]}, ValueError, rf"{scales}: got \[4, 256, 2\], expected \[E, D, F/32\]"),
        ({blocks: tensors[blocks].astype(np.float32)}, TypeError, f"{blocks}: got float32, expected uint8"),
    ):
        changed = {name: value for name, value in (tensors | change).items() if value is not None}
        with pytest.raises(kind, match=message):
            load(family, changed)
    with pytest.raises(TypeError, match=r"weight: got float8_e4m3fn, .*Family\.with_packed"):
        load("qwen3_moe", packed_tensors("qwen3_moe"))
    with pytest.raises(
        ValueError, match="packed: got 'fp8_blocks' with interleaved gate and up 'e d fp', expected 'mxfp4'"
    ):
        FAMILIES["gpt_oss"].with_packed("fp8_blocks")
    with pytest.raises(ValueError, match="packed: got 'mxfp4' with tensors 'ef d'"):
        FAMILIES["dbrx"].with_packed("mxfp4")
    block = load(family, tensors)
    with pytest.raises(ValueError, match=r"experts\['w_in'\]: got Mxfp4, expected a plain array"):
        store("gpt_oss", block)


def plain_tensors(name, layers=(0, 2)):
    """Random plain blocks of a model."""
    rng = np.random.default_rng(1)
    tensors = {"model.embed_tokens.weight": random((8, D), ml_dtypes.bfloat16, rng)}
    for layer in layers:
        prefix = f"model.layers.{layer}.mlp."
        if name == "gpt_oss":
            shapes = {
                "router.weight": (E, D),
                "router.bias": (E,),
                "experts.gate_up_proj": (E, D, 2 * F),
                "experts.gate_up_proj_bias": (E, 2 * F),
                "experts.down_proj": (E, F, D),
                "experts.down_proj_bias": (E, D),
            }
        else:
            shapes = {"gate.weight": (E, D)}
            for e in range(E):
                names = ("w1", "w3", "w2") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj")
                for matrix, shape in zip(names, ((F, D), (F, D), (D, F)), strict=True):
                    shapes[f"experts.{e}.{matrix}.weight"] = shape
        for key, shape in shapes.items():
            tensors[prefix + key] = rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
    return tensors


def write(folder, name, tensors, files=2):
    """Writes a checkpoint whose tensors are spread over files."""
    folder.mkdir(exist_ok=True)
    names = [f"model-{i}.safetensors" for i in range(files)]
    of = {tensor: names[i * files // len(tensors)] for i, tensor in enumerate(tensors)}
    for file in names:
        write_file(folder / file, {tensor: tensors[tensor] for tensor in tensors if of[tensor] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of}))
    (folder / "config.json").write_text(json.dumps({"model_type": name, "num_local_experts": E}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "mixtral"])
def test_convert_packs_as_the_layer_does(name, tmp_path):
    tensors, packed, told = plain_tensors(name), FORMATS[name], []
    write(tmp_path / "plain", name, tensors)
    report = convert(tmp_path / "plain", tmp_path / "packed", packed, progress=told.append)
    assert [line.split(":")[0] for line in told] == [
        "file 1 of 2", "file 2 of 2", "checking experts 1 of 2", "checking experts 2 of 2",
    ]  # fmt: skip
    found = {}
    for file in ("model-0.safetensors", "model-1.safetensors"):
        found |= load_file(tmp_path / "packed" / file)  # another library reads the files
    expected = {}
    for key, value in tensors.items():
        if "experts" not in key or key.endswith("bias"):
            expected[key] = value
            continue
        w = value.swapaxes(-1, -2) if name == "gpt_oss" else value
        suffixes = ("_blocks", "_scales") if packed == "mxfp4" else ("", "_scale_inv")
        parts = pack_mxfp4(w) if packed == "mxfp4" else pack_fp8(w)
        expected |= {key + suffix: part for suffix, part in zip(suffixes, parts, strict=True)}
    assert found.keys() == expected.keys() == Files(tmp_path / "packed").keys()
    for key, value in expected.items():
        assert str(found[key].dtype).removeprefix("torch.") == value.dtype.name and [*found[key].shape] == [
            *value.shape
        ]
        assert bytes(found[key].contiguous().view(torch.uint8).numpy()) == value.tobytes(), key
    assert report.packed == packed and report.num_experts == E and len(report.norms) == (4 if name == "gpt_oss" else 6)
    first = next(key for key in report.norms if key.startswith("model.layers.2.mlp.experts"))
    exact = check(tmp_path / "plain", progress=None).norms[first]
    assert np.allclose(report.norms[first], exact, rtol=0.05) and np.all(report.norms[first] != exact)
    assert "packed" not in str(check(tmp_path / "plain", progress=None)) and first in str(report)
    config = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    method = {"gpt_oss": "mxfp4", "qwen3_moe": "fp8", "mixtral": "anabranch_mxfp4"}[name]
    gates = [key.removesuffix(".weight") for key in tensors if "gate.weight" in key or "router.weight" in key]
    head = ["lm_head"] if packed == "fp8_blocks" else []  # tied to the embeddings
    assert config["quant_method"] == method
    assert config["modules_to_not_convert"] == [*head, "model.embed_tokens", *gates]
    assert (tmp_path / "packed" / "tokenizer.json").exists()
    with pytest.raises(ValueError, match="source: got a quantization_config"):
        convert(tmp_path / "packed", tmp_path / "again", packed)
    with pytest.raises(ValueError, match="which is not empty, expected a new folder"):
        convert(tmp_path / "plain", tmp_path / "packed", packed)


#: Changes of the plain checkpoint of Qwen3-MoE, and the message of the error.
UP = "model.layers.2.mlp.experts.{}.up_proj.weight"
INCOMPLETE = {
    "missing": ({UP.format(1): None}, rf"experts: got no {UP.format(1)}, expected all 4 experts"),
    "last of all": (
        {UP.format(3).replace("up", m): None for m in ("up", "gate", "down")},
        rf"experts: got no {UP.format(3).replace('up', 'down')}",
    ),
    "surplus": ({UP.format(4): UP.format(0)}, rf"experts: got {UP.format(4)}, expected only experts 0 to 3"),
    "whole block": (
        {UP.format(e).replace("up", m): None for e in range(4) for m in ("up", "gate", "down")},
        "and 8 more",
    ),
    "no router": ({"model.layers.0.mlp.gate.weight": None}, r"got experts of model\.layers\.0\.mlp\. without gate"),
    "duplicate": ({UP.format(2): UP.format(1)}, r"up_proj\.weight: got the same weights for the experts 1 and 2"),
    "zero": ({UP.format(2): 0.0}, rf"{UP.format(2)}: got the norm 0\.0, expected a positive number"),
    "not finite": ({UP.format(2): np.nan}, f"{UP.format(2)}: got the norm nan"),
    "router not finite": ({"model.layers.2.mlp.gate.weight": np.inf}, r"2\.mlp\.gate\.weight: got NaN or an infinity"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("wrong", INCOMPLETE)
def test_incomplete_experts_are_errors(wrong, packed, tmp_path):
    tensors, (changes, message) = plain_tensors("qwen3_moe"), INCOMPLETE[wrong]
    for key, change in changes.items():
        if change is None:
            del tensors[key]
        else:
            value = tensors[change] if isinstance(change, str) else np.full_like(tensors[key], change)
            tensors[key] = value
    folder = write(tmp_path / "plain", "qwen3_moe", tensors)
    with pytest.raises(ValueError, match=message):
        if packed:
            convert(folder, tmp_path / "packed", "fp8_blocks", progress=None)
        else:
            check(folder, progress=None)
    assert not (tmp_path / "packed").exists(), "the files that convert has written"


@pytest.mark.parametrize(
    "key, axis, message",
    [
        (UP.format(2), 0, rf"{UP.format(2)}: got \[256, 256\], expected \[F, D\] with F = 128, D = 256"),
        ("model.layers.0.mlp.gate.weight", 0, r"gate\.weight: got \[8, 256\], expected \[E, D\] with E = 4"),
    ],
)
def test_shapes_of_experts_and_routers_are_checked(key, axis, message, tmp_path):
    tensors = plain_tensors("qwen3_moe")
    tensors[key] = tensors[key].repeat(2, axis)
    with pytest.raises(ValueError, match=message):
        check(write(tmp_path, "qwen3_moe", tensors), progress=None)


BLOCK = "model.layers.0.mlp."
SCALES = BLOCK + "experts.{}.up_proj.weight_scale_inv"
CODES, BIAS = BLOCK + "experts.gate_up_proj_blocks", BLOCK + "experts.down_proj_bias"


@pytest.mark.parametrize(
    "name, change, message",
    [
        (
            "qwen3_moe",
            {SCALES.format(2): np.ones((2, 1), np.float32)},
            rf"{SCALES.format(2)}: got \[2, 1\], expected \[F/128, D/128\] with F = 128, D = 256",
        ),
        (
            "qwen3_moe",
            {SCALES.format(e): np.ones((2, 1), ml_dtypes.bfloat16) for e in range(E)},
            rf"{SCALES.format(0)}: got \[2, 1\], expected \[F/128, D/128\]",
        ),
        (
            "qwen3_moe",
            {SCALES.format(2): np.ones((1, 2), ml_dtypes.float8_e8m0fnu)},
            f"{SCALES.format(2)}: got float8_e8m0fnu, expected bfloat16 like the other tensors",
        ),
        (
            "gpt_oss",
            {CODES: np.ones((E, 2 * F, D // 2), np.uint8)},
            rf"{CODES}: got \[4, 256, 128\], expected \[E, F 2, D/32, 16\] with E = 4, D = 256",
        ),
        ("gpt_oss", {BIAS: None}, f"got no {BIAS}, expected all 4 experts"),
        ("gpt_oss", {BIAS: np.full((E, D), np.nan, np.float32)}, f"{BIAS}: got NaN or an infinity"),
        ("gpt_oss", {BIAS: np.ones((E, F), np.float32)}, rf"{BIAS}: got \[4, 128\], expected \[E, D\] with E = 4"),
        ("gpt_oss", {BLOCK + "router.bias": None}, rf"{BLOCK}router\.bias: got no such tensor, expected .* \[E\]"),
    ],
)
def test_check_names_the_wrong_array_of_packed_experts(name, change, message, tmp_path):
    tensors = packed_tensors(name, BLOCK)
    for key in tensors:
        if key.endswith("_scales"):
            tensors[key] = np.full_like(tensors[key], 120)
    write(tmp_path, name, tensors)
    assert check(tmp_path, progress=None).packed == FORMATS[name]
    changed = {key: value for key, value in (tensors | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        check(write(tmp_path, name, changed), progress=None)


def test_check_knows_routers_with_more_logits_than_experts(tmp_path):
    tensors = {
        key.replace("gate.weight", "router.classifier.weight"): v for key, v in plain_tensors("qwen3_moe").items()
    }
    for logits in (E + 2, E - 1):
        tensors["model.layers.0.mlp.router.classifier.weight"] = np.ones((logits, D), np.float32)
        write(tmp_path, "longcat_flash", tensors)
        if logits > E:
            assert check(tmp_path, progress=None).num_experts == E
    with pytest.raises(ValueError, match="got 3 logits, expected at least E = 4"):
        check(tmp_path, progress=None)


def test_missing_and_damaged_files_are_errors_that_name_them(tmp_path):
    folder = write(tmp_path, "qwen3_moe", plain_tensors("qwen3_moe"))
    for file in ("model-0.safetensors", "model-1.safetensors"):
        content = (folder / file).read_bytes()
        (folder / file).unlink()
        with pytest.raises(ValueError, match=f"got no file .*{file}, expected all files of .*index.json"):
            Files(folder)
        header = int.from_bytes(content[:8], "little")
        for damaged, message in (
            (content[:5], "got a header of"),
            (content[: 8 + header // 2], "got a header of"),
            (content[:8] + b"\0" * header + content[8 + header :], "got a damaged header"),
            (content.replace(b'"data_offsets"', b'"data_offsetz"', 1), "got a damaged header"),
            (content.replace(b'"BF16"', b'"F32" ', 1), r"weight: got \d+ bytes, expected those of F32 "),
        ):
            (folder / file).write_bytes(damaged)
            with pytest.raises(ValueError, match=message) as error:
                Files(folder)
            assert file in str(error.value)
        (folder / file).write_bytes(content)
    for file in ("model.safetensors.index.json", "config.json"):
        content = (folder / file).read_text()
        for damaged in (content[:-9], "", "[]", '{"weight_map": 1}'):
            (folder / file).write_text(damaged)
            with pytest.raises(ValueError, match=f"{file}: got|family: got None"):
                check(folder)
        (folder / file).write_text(content)


def test_an_index_that_save_pretrained_left_is_ignored(tmp_path):
    folder = write(tmp_path, "qwen3_moe", plain_tensors("qwen3_moe"))
    write_file(folder / "model.safetensors", plain_tensors("qwen3_moe", layers=(5,)))
    (folder / "model-0.safetensors").unlink()
    with pytest.raises(ValueError, match=r"got .*model\.safetensors, .* beside model-1\.safetensors of .* delete"):
        Files(folder)
    (folder / "model-1.safetensors").unlink()
    assert "model.layers.5.mlp.gate.weight" in Files(folder) and len(check(folder, progress=None).norms) == 3


def test_convert_can_be_repeated_after_an_error(tmp_path):
    tensors, told, target = plain_tensors("gpt_oss"), [], tmp_path / "a" / "packed"
    key = "model.layers.0.mlp.experts.down_proj"
    changed = tensors | {key: np.array(tensors[key])}
    changed[key][2, 3, 4] = np.nan
    with pytest.raises(ValueError, match=f"{key}, expert 2: got the norm nan"):
        convert(write(tmp_path / "plain", "gpt_oss", changed), target, "mxfp4", progress=told.append)
    assert [line[:11] for line in told] == ["file 1 of 2"], "found before the second file"
    assert not (tmp_path / "a").exists()

    def stop(line):
        if line.startswith("checking"):
            raise KeyboardInterrupt

    write(tmp_path / "plain", "gpt_oss", tensors)
    target.mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "plain", target, "mxfp4", progress=stop)
    assert not [*target.iterdir()]
    assert convert(tmp_path / "plain", target, "mxfp4", progress=None).packed == "mxfp4"


def test_convert_refuses_a_target_that_is_a_file(tmp_path):
    folder, file = write(tmp_path / "plain", "qwen3_moe", plain_tensors("qwen3_moe")), tmp_path / "file"
    file.write_text("")
    for target in (file, file / "packed"):
        with pytest.raises(ValueError, match=f"target: got {target}, expected a new folder; {file} is a file"):
            convert(folder, target, "mxfp4", progress=None)


def test_files_that_disagree_are_errors(tmp_path):
    folder = write(tmp_path, "qwen3_moe", plain_tensors("qwen3_moe"))
    key, index_file = UP.format(3), folder / "model.safetensors.index.json"
    write_file(folder / "model-2.safetensors", {key: Files(folder)[key], "extra": np.zeros(1, np.float32)})
    assert "extra" not in Files(folder), "a file that the index does not list"
    before = index_file.read_text()
    index = json.loads(before)
    index["weight_map"]["extra"] = "model-2.safetensors"
    index_file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"{key}: got it in .*model-1\.safetensors and .*model-2\.safetensors"):
        check(folder)
    index_file.write_text(before)
    (folder / "model-2.safetensors").unlink()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["lost"] = "model-0.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lost: got no file, expected model-0\.safetensors"):
        Files(folder)
    file = folder / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="got a file of"):
        Files(file)
    with pytest.raises(ValueError, match="expected a safetensors file"):
        Files(folder / "config.json")
    with pytest.raises(ValueError, match="path: got"):
        Files(folder / "none")


def test_wrong_arguments_of_check_and_convert(tmp_path):
    folder = write(tmp_path / "plain", "mystery", plain_tensors("qwen3_moe"))
    with pytest.raises(ValueError, match="family: got 'mystery'"):
        check(folder)
    assert check(folder, family="qwen3_moe", progress=None).num_experts == E
    with pytest.raises(ValueError, match="expected it without with_packed"):
        check(folder, family=FAMILIES["qwen3_moe"].with_packed("mxfp4"))
    with pytest.raises(ValueError, match="without experts named"):
        check(folder, family="gpt_oss", num_experts=E)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="num_experts: got None"):
        check(folder, family="qwen3_moe")
    with pytest.raises(ValueError, match="packed: got 'int4'"):
        convert(folder, tmp_path / "new", "int4", family="qwen3_moe", num_experts=E)
    with pytest.raises(ValueError, match=r"family: got experts stored as .* expected a tensor per expert"):
        convert(folder, tmp_path / "new", "mxfp4", family="mistral4", num_experts=E)
    narrow = {
        key: value[:, :64] if "down" not in key else value[:64] for key, value in plain_tensors("qwen3_moe").items()
    }
    write(folder, "qwen3_moe", narrow)
    with pytest.raises(ValueError, match=r"weight: got \[128, 64\], expected D a multiple of 128"):
        convert(folder, tmp_path / "new", "fp8_blocks", progress=None)
    assert not (tmp_path / "new").exists()
