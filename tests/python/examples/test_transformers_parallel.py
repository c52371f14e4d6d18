"""The example that trains a Transformers model on several ranks, on one. tests/python/transformers has two and four."""

import re

import pytest
import torch
import torch.distributed as dist
import transformers

import transformers_parallel
from anabranch.torch.transformers import check
from run_error import RunError

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no Gloo")


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(capsys, *arguments):
    """The printed losses by step."""
    chosen = transformers_parallel.parse(["--cpu", "--seq=32", *arguments])
    transformers_parallel.run(chosen, torch.device("cpu"))
    printed = capsys.readouterr().out
    assert re.search(r"^\d+ tokens/s on 1 ranks, peak memory of rank 0: \d+ MiB$", printed, re.MULTILINE)
    return dict(re.findall(r"^step +(\d+)  loss (\d\.\d+)", printed, re.MULTILINE))


@pytest.mark.parametrize("lora", ["--lora=0", "--lora=2"])
def test_a_resumed_run_has_the_losses_of_one_run(lora, one_rank, tmp_path, capsys):
    whole = train(capsys, lora, "--steps=4")
    assert list(whole) == ["0", "1", "2", "3"]
    own = f"--checkpoint={tmp_path / 'steps'}"
    first = train(capsys, lora, own, "--steps=2")
    last = train(capsys, lora, own, "--steps=4", f"--save={tmp_path / 'model'}")
    assert first | last == whole
    with pytest.raises(RunError, match="--steps: got 4, expected more than the 4 of the checkpoint"):
        train(capsys, lora, own, "--steps=4")
    if lora == "--lora=0":
        again = train(capsys, f"--model={tmp_path / 'model'}", "--steps=2")
        assert float(again["0"]) < float(whole["0"])
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        model.set_experts_implementation("anabranch")
        assert len(check(model)) == 2


@pytest.mark.parametrize(
    "option, message", [("--data=0", "got 0, expected at least 1"), ("--lora=-1", "got -1, expected at least 0")]
)
def test_options_are_refused_before_anything_is_imported(option, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        transformers_parallel.parse([option])
    assert f"error: {option.partition('=')[0]}: {message}" in capsys.readouterr().err


def test_errors_name_the_argument(one_rank, capsys):
    with pytest.raises(RunError, match="--data: got 2, expected a divisor of the 1 ranks"):
        train(capsys, "--data=2")
    with pytest.raises(RunError, match=r"could not shard the model: .*transport: got 'nope'"):
        train(capsys, "--transport=nope")


def test_a_start_without_torchrun_is_an_error(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RunError, match="expected a start by torchrun"):
        transformers_parallel.join(transformers_parallel.parse([]))
