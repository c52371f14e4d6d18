"""The example that trains adapters of a Transformers model with PEFT, by PEFT's path and by anabranch's."""

import re

import peft
import pytest
import torch
import transformers

import lora_finetune
from run_error import RunError

FEW = ["--steps=3", "--seq=32", "--batch=2"]


def finetune(*arguments):
    lora_finetune.main(lora_finetune.parse([*arguments]))


def test_losses_agree_and_the_adapter_is_saved(tmp_path, capsys):
    finetune(*FEW, f"--save={tmp_path}", "--lr=1e-2")
    printed = capsys.readouterr().out
    assert "139,264 of 1,487,616 parameters are trained" in printed
    rows = re.findall(r"^ +(\d+) +(\d\.\d+) +(\d\.\d+)$", printed, re.MULTILINE)
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert all(abs(float(theirs) - float(ours)) < 1e-4 for _, theirs, ours in rows)
    adapter = peft.utils.load_peft_weights(str(tmp_path), device="cpu")
    trained = [name for name, value in adapter.items() if "lora_B" in name and torch.any(value != 0)]
    assert len(trained) == 4  # two layers, two projections


def test_a_model_without_fused_experts_is_refused(tmp_path):
    transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=256
    ).save_pretrained(tmp_path)
    with pytest.raises(RunError, match=r"--model: got a model without experts\.gate_up_proj"):
        finetune(*FEW, f"--model={tmp_path}")


@pytest.mark.parametrize("option, message", [("--rank=0", "got 0, expected at least 1"), ("--steps=1", "at least 2")])
def test_options_are_refused_before_anything_is_imported(option, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        lora_finetune.parse([option])
    assert message in capsys.readouterr().err
