"""What "auto" chooses is said as the layers choose it, for the GPU that is there."""

import json
import pathlib

import pytest

from anabranch import _library
from anabranch.__main__ import main
from anabranch.bench.auto_choice import auto_choice, of_models
from anabranch.bench.layer_shape import NAMED
from anabranch.precision_choice import FORWARD, PASSES, LayerSize, choose_precision

H200 = "NVIDIA H200, compute capability 9.0, 132 multiprocessors, 143156 MiB"


def machine_with(monkeypatch, *devices):
    facts = {"version": "0.2.0"} | {f"device {number}": device for number, device in enumerate(devices)}
    monkeypatch.setattr(_library, "load_cuda", lambda: type("Library", (), {"_name": "a library"}))
    monkeypatch.setattr(_library, "describe_cuda", lambda: facts)


def chosen(shape, passes):
    return choose_precision(LayerSize(*shape), dtype="bfloat16", capability="9.0", passes=passes).precision


@pytest.mark.parametrize("tokens", [256, 2048, 8192, 32768])
@pytest.mark.parametrize("name", NAMED)
def test_it_is_what_a_layer_chooses(name, tokens, monkeypatch):
    machine_with(monkeypatch, H200)
    shape = NAMED[name]._replace(T=tokens)
    forward, both = chosen(shape, (FORWARD,)), chosen(shape, PASSES)
    assert auto_choice(shape, "bfloat16") == (both if forward == both else f"forward {forward}, both {both}")


def test_passes_may_have_different_answers(monkeypatch):
    machine_with(monkeypatch, H200)
    found = {auto_choice(NAMED["qwen3-30b"]._replace(T=T), "bfloat16") for T in range(8192, 32769, 256)}
    assert {"fp8", "highest"} < found and found - {"fp8", "highest"} <= {
        "forward fp8, both highest",
        "forward highest, both fp8",
    }


def test_it_is_highest_elsewhere(monkeypatch):
    shape = NAMED["qwen3-30b"]
    machine_with(monkeypatch, "NVIDIA A100, compute capability 8.0, 108 multiprocessors, 81037 MiB")
    assert auto_choice(shape, "bfloat16") == "highest"
    machine_with(monkeypatch)
    assert auto_choice(shape, "bfloat16") == "highest"
    machine_with(monkeypatch, H200)
    assert (auto_choice(shape, "bfloat16"), auto_choice(shape, "float32")) == ("fp8", "highest")


def test_info_has_a_line_for_each_model(monkeypatch, capsys):
    machine_with(monkeypatch, H200)
    main(["info", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["precision auto"] == "predicted for bfloat16 and T = 32768:"
    for name, shape in NAMED.items():
        line = facts[f"auto {name}"]
        if name == "gpt-oss":
            assert line == "highest: D or F of a device is no multiple of 128"
            continue
        choice = choose_precision(LayerSize(*shape), dtype="bfloat16", capability="9.0")
        assert line.startswith("forward ")
        assert line.endswith(
            f", both {choice.precision} (fp8 {1e3 * choice.fp8:.3g} ms, highest {1e3 * choice.highest:.3g})"
        )


def test_the_guide_has_what_info_prints():
    guide = (pathlib.Path(__file__).parents[3] / "docs/notes/fp8.md").read_text()
    lines = of_models(["9.0"])
    assert "\n".join(f"{name:<17}  {line}" for name, line in lines.items()) in guide


def test_info_predicts_nothing_where_no_gpu_runs_fp8(monkeypatch):
    why = '"highest": got no GPU of compute capability 9.0, expected one for FP8'
    assert of_models(["8.0"]) == of_models([]) == {"precision auto": why}
    assert of_models(["8.0", "9.0"]) == of_models(["9.0"])
    monkeypatch.setenv("ANABRANCH_CUDA_PATH", "portable")
    assert of_models(["9.0"]) == {"precision auto": '"highest": ANABRANCH_CUDA_PATH names another path than hopper'}
