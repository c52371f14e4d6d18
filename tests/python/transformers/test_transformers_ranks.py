"""Expert and tensor parallelism of Transformers on two processes gives the results of one process."""

import os

import pytest
import small_models
import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

import anabranch.torch.transformers as adapter
import gloo_ranks

RANKS = 2
FOLDERS = ("qwen3_moe", "gpt_oss")  # layouts, biases

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no Gloo")


def loaded(path, implementation, distributed=None):
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, experts_implementation=implementation, distributed_config=distributed, dtype=torch.float32
    ).eval()


def whole(parameter):
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def check(path, distributed):
    """Compares logits under no_grad (another path in Transformers), logits, and gradients of all parameters."""
    one, parallel = loaded(path, "eager"), loaded(path, "anabranch", distributed)
    ids = small_models.tokens(one)
    with torch.no_grad():
        torch.testing.assert_close(parallel(ids).logits, one(ids).logits, rtol=1e-4, atol=1e-5)
    cotangent = torch.randn(*ids.shape, one.config.vocab_size, generator=torch.Generator().manual_seed(0))
    for model in (one, parallel):
        model(ids, use_cache=False).logits.backward(cotangent)
    found = dict(parallel.named_parameters())
    for name, parameter in one.named_parameters():
        gradient = whole(found[name].grad)
        error = (gradient - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert error <= 1e-4, (name, float(error))


def run(rank, rendezvous, folder):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    adapter.register()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    for name in FOLDERS:
        check(f"{folder}/{name}", DistributedConfig(tp_size=RANKS, ep_size=RANKS))
        check(f"{folder}/{name}", DistributedConfig(tp_size=RANKS))
    gloo_ranks.leave()


def test_two_processes_equal_one(tmp_path):
    for name in FOLDERS:
        small_models.small_model(name, "cpu").save_pretrained(tmp_path / name)
    gloo_ranks.start(run, RANKS, f"file://{tmp_path / 'rendezvous'}", str(tmp_path))
