"""The transport p2p in compiled graphs and under modes: no result of an operation is memory that the peers write to.

The exchange of one rank is memory on the CPU, and the operations of a pass compute without it.
"""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from anabranch.torch import moe
from anabranch.torch.ops import torch_ops
from anabranch.torch.ops.gradients import request, requested_names
from anabranch.torch.parallel import p2p, parallel
from anabranch.torch.parallel.p2p_passes import PASSES

E, K, D, F, T = 4, 2, 16, 32, 24


class Memory:
    """The buffers of an exchange; records sends and releases."""

    def __init__(self):
        self.buffers, self.log = torch.zeros(3, T * D), []

    def start(self, x, buffer):
        self.log.append(("start", buffer))
        memory = self.buffers[buffer].view(T, D)
        return memory.copy_(x)

    def released(self, *buffers):
        self.log.append(("released", *buffers))

    def release(self, *buffers):
        self.log.append(("release", *buffers))

    def pointers(self, small_bytes):
        return 0, 0


def experts(tokens, small, own, x, experts, weights, counts, rows, ranks, rank, align_size, *network):
    _, sizes, _, row_of_slot, slot_of_row, _ = torch_ops.plan(experts, E, rows, align_size, 1)
    results = torch_ops.experts(x, None, None, weights, row_of_slot, slot_of_row, sizes, *network)
    return *results, weights.clone(), counts.clone(), row_of_slot, slot_of_row, sizes


def hidden(tokens, small, own, d_own, d_out, h, x, weights, slot_of_row, group_sizes, *rest):
    found = torch_ops.experts_hidden(d_out, None, None, h, x, weights, slot_of_row, group_sizes, *rest)
    return *found, found[3].clone()


def inputs(
    tokens, small, own, x, addend, row_of_slot, slot_of_row, group_sizes, d_x_dtype, factor, dh, dh_q, dh_scales, v_in,
    w_in_dtype, requested, w_in, b_in, w_out, *others,
):  # fmt: skip
    wanted = request(dict.fromkeys({"x", *requested_names(requested)}, True))
    return torch_ops.experts_inputs(
        dh, dh_q, dh_scales, x, addend, row_of_slot, slot_of_row, group_sizes, w_in, b_in, w_out, v_in, w_in_dtype,
        d_x_dtype, wanted, *others,
    )  # fmt: skip


@pytest.fixture
def memory(monkeypatch):
    found = Memory()
    monkeypatch.setattr(parallel, "reason_against", lambda *arguments: "")
    monkeypatch.setattr(p2p, "_of", lambda group: found)
    library = torch.library.Library("anabranch", "IMPL")
    library.impl("p2p_start", p2p._start, "CPU")
    library.impl("p2p_gather", lambda x, ranks, group: x.clone(), "CPU")
    library.impl("p2p_exchange", lambda x, group: x.clone(), "CPU")
    for name, function in {"experts": experts, "hidden": hidden, "inputs": inputs}.items():
        one = PASSES[name]
        monkeypatch.setattr(one, "_run", function)
        library.impl(f"p2p_{name}", lambda *arguments, one=one: one.run(found, arguments[:-1]), "CPU")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch._dynamo.reset()
    yield found
    dist.destroy_process_group()
    library._destroy()


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = (D, E), (E, D, 2, F), (E, F, D)
    return [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]


def layer(x, w, transport):
    return moe(x, *w, topk=K, group=dist.group.WORLD, transport=transport).output


def one_layer(x, w, v, transport):
    y = layer(x * 2, w, transport)
    return (torch.sin(y) + 1) * torch.cos(y)


def with_checkpoint(x, w, v, transport):
    return checkpoint(layer, x, w, transport, use_reentrant=False)


def two_layers_on_equal_tokens(x, w, v, transport):
    return layer(x, w, transport) + layer(x, v, transport)


def gradients(function, transport, seed=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, D, generator=generator).requires_grad_()
    w, v = weights(1), weights(2)
    y = function(x, w, v, transport)
    cotangent = torch.randn(T, D, generator=generator)
    found = torch.autograd.grad(y, [x, *w, *v], cotangent, allow_unused=True)
    return [y.detach(), *(g for g in found if g is not None)]


@pytest.mark.parametrize("function", [one_layer, with_checkpoint, two_layers_on_equal_tokens])
def test_compiled_layers_have_the_bits_of_ring(memory, function):
    want = gradients(function, "ring")
    got = gradients(torch.compile(function, backend="aot_eager", fullgraph=True), "p2p")
    assert len(got) == len(want) and all(map(torch.equal, got, want))
    assert any(entry[0] == "start" for entry in memory.log)


def test_a_compiled_graph_sends_in_the_operations_that_read(memory):
    names = []

    def backend(graph, examples):
        names.extend(str(node.target) for node in graph.graph.nodes if "p2p" in str(node.target))
        return graph

    from torch._dynamo.backends.common import aot_autograd

    gradients(torch.compile(one_layer, backend=aot_autograd(fw_compiler=backend), fullgraph=True), "p2p")
    assert [name.split(".")[1] for name in names] == ["p2p_experts", "p2p_hidden", "p2p_inputs"]
    starts = [entry for entry in memory.log if entry[0] != "released"]
    assert starts == [
        ("start", 0), ("release", 0), ("start", 0), ("release", 0), ("start", 1), ("release", 1),
    ]  # fmt: skip


class Keeping(TorchDispatchMode):
    """Keeps all results, as selective checkpoints do."""

    def __init__(self):
        super().__init__()
        self.results = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        self.results += [r for r in torch.utils._pytree.tree_leaves(result) if isinstance(r, torch.Tensor)]
        return result


def test_a_mode_sees_no_memory_of_the_exchange(memory):
    want = gradients(one_layer, "ring")
    with Keeping() as kept:
        got = gradients(one_layer, "p2p")
    assert all(map(torch.equal, got, want))
    storage = memory.buffers.untyped_storage().data_ptr()
    assert all(result.untyped_storage().data_ptr() != storage for result in kept.results)
