"""A batch that processes share, and the results of one process for the whole batch."""

import warnings

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import gloo_ranks
from anabranch.torch import MoE

D, F, E, K = 12, 20, 8, 2
OPTIONS = dict(
    score_function="sigmoid",
    use_bias=True,
    use_gate_bias=True,
    use_expert_bias=True,
    balance="quantile",
    qb_bins=50,
    shared_features=8,
    shared_gate=True,
    aux_loss_coeff=0.3,
    z_loss_coeff=0.2,
)


def batch(ranks):
    """Two micro-batches of one sequence per rank, and masks of their unpadded tokens, which differ per rank."""
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.standard_normal((2, ranks, 9, D)), dtype=torch.float32)
    return x, torch.tensor(rng.random((2, ranks, 9)) < np.linspace(0.9, 0.5, ranks)[:, None])


def rank_batches(rank, ranks):
    """The micro-batches of a rank."""
    return [(part[rank], real[rank]) for part, real in zip(*batch(ranks), strict=True)]


def make_layer(num_experts=E, **options):
    """The layer, with the same parameters on every call and rank."""
    torch.manual_seed(0)
    return MoE(D, F, num_experts, K, **OPTIONS | options)


class Block(nn.Module):
    """A layer after a linear map that every rank has whole."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(1)
        self.before = nn.Linear(D, D)
        self.moe = make_layer(**options)

    def forward(self, x, **given):
        return self.moe(x + self.before(x), **given)


def loss_of(result):
    """A loss whose mean over the ranks is that of the whole batch; the layer's own losses cover all tokens."""
    return result.output.square().mean() + result.aux_loss + result.z_loss


def one_process(ranks, model=None):
    """A model (default: the layer) with gradients accumulated over two micro-batches, and its results."""
    model = make_layer() if model is None else model
    results = [model(part, token_mask=real) for part, real in zip(*batch(ranks), strict=True)]
    for result in results:
        loss_of(result).backward()
    return model, results


def check_results(results, rank, want):
    """Checks a rank's outputs, and the losses over all tokens."""
    for result, whole in zip(results, want, strict=True):
        torch.testing.assert_close(result.output, whole.output[rank])
        for name in ("aux_loss", "z_loss"):
            torch.testing.assert_close(getattr(result, name), getattr(whole, name), rtol=1e-6, atol=0)


def check_gradients(model, one, whole_of):
    """whole_of(name, gradient): gathers the gradient of all ranks."""
    expected = dict(one.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = whole_of(name, parameter.grad)
        torch.testing.assert_close(gradient, expected[name].grad, msg=lambda text, name=name: f"{name}: {text}")


def _run(rank, ranks, rendezvous, checks):
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message=".*returned a view tensor")  # FSDP's warning about outputs
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    for check in checks:
        check(rank)
    gloo_ranks.leave()


def run_in_processes(ranks, checks, folder):
    """Calls every check with the rank in each of the processes of a Gloo group."""
    gloo_ranks.start(_run, ranks, ranks, f"file://{folder / 'rendezvous'}", checks)
