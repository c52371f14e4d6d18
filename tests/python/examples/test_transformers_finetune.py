"""The example that trains a Transformers model with its own experts and with anabranch's."""

import json
import re

import pytest
import transformers

import transformers_finetune
from run_error import RunError

FEW = ["--steps=3", "--seq=32", "--batch=2"]


def finetune(*arguments):
    transformers_finetune.main(transformers_finetune.parse([*arguments]))


def test_trains_the_small_model_with_both(capsys):
    finetune("--steps=6", *FEW[1:])
    printed = capsys.readouterr().out
    assert re.search(r"model\.layers\.1\.mlp\.experts: Activation\(name='silu'.*pfd, df", printed)
    step, theirs, ours = re.findall(r"^ +(\d+) +(\d\.\d+) +(\d\.\d+)$", printed, re.MULTILINE)[-1]
    assert step == "5" and abs(float(theirs) - float(ours)) < 1e-4 and float(theirs) < 5.2  # below log 256 = 5.5
    assert re.search(r"^a step takes .* ms with default, .* ms with anabranch", printed, re.MULTILINE)


def written(folder, **fields):
    """A small gpt-oss: its configuration, and the constructor of its model."""
    config = transformers.GptOssConfig(
        num_hidden_layers=1, hidden_size=64, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, vocab_size=fields.get("vocab_size", 256),
    )  # fmt: skip
    config.save_pretrained(folder)
    return config


def test_trains_a_checkpoint_from_a_folder(tmp_path, capsys):
    transformers.GptOssForCausalLM(written(tmp_path)).save_pretrained(tmp_path)
    finetune(f"--model={tmp_path}", "--beside=eager", *FEW)
    printed = capsys.readouterr().out
    assert "swiglu_oai" in printed and "ms with eager" in printed


def test_trains_a_configuration(tmp_path, capsys):
    written(tmp_path)
    finetune(f"--model={tmp_path / 'config.json'}", "--dtype=bfloat16", *FEW)
    assert "largest relative difference of losses" in capsys.readouterr().out


@pytest.mark.parametrize(
    "option, message", [("--model=none", "got none, expected a folder"), ("--steps=0", "got 0, expected at least 2")]
)
def test_options_are_refused_before_anything_is_imported(option, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        transformers_finetune.parse([option])
    assert f"error: {option.partition('=')[0]}: {message}" in capsys.readouterr().err


def test_errors_name_the_argument(tmp_path):
    def refused(*arguments):
        with pytest.raises(RunError) as error:
            finetune(*FEW, *arguments)
        return str(error.value)

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such model"}))
    assert refused(f"--model={tmp_path}").startswith(f"--model: could not make {tmp_path}")
    written(tmp_path, vocab_size=100)
    assert refused(f"--model={tmp_path}").startswith("--model: got a vocabulary of 100, expected more than ")
    assert refused("--beside=none").startswith("--beside: got none, expected one of default, eager, ")
    assert refused("--device=abacus").startswith("--device: could not use abacus: RuntimeError")
