"""Four Gloo processes that share a batch and the experts compute as one process: DDP, FSDP2 and checkpoints."""

import copy
import io
import re
import tempfile

import pytest
import torch
import torch.distributed as dist
from one_batch import (
    Block,
    D,
    E,
    F,
    K,
    check_gradients,
    check_results,
    loss_of,
    make_layer,
    one_process,
    rank_batches,
    run_in_processes,
)
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as activation_checkpoint

from anabranch.lora import NAMES
from anabranch.torch import MoE, add_lora, clip_grad_norm_, ddp_ignore_experts

RANKS = 4
WHOLE = StateDictOptions(full_state_dict=True)

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no Gloo")


def two_by_two():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))


def sharded(mesh, **options):
    """A block whose layer is sharded over "data" and whose linear map is sharded over all ranks."""
    block = Block(group=mesh["expert"], loss_group=dist.group.WORLD, **options)
    fully_shard(block.moe, mesh=mesh["data"])
    return fully_shard(block, mesh=init_device_mesh("cpu", (RANKS,)))


def accumulate(model, rank):
    results = []
    for x, real in rank_batches(rank, RANKS):
        results.append(model(x, token_mask=real))
        loss_of(results[-1]).backward()
    return results


def gathered(layer, prefix=""):
    """(name, this rank's part) -> the whole, for a layer with plain tensors."""

    def whole_of(name, part):
        if name.removeprefix(prefix) not in layer.expert_parameters():
            return part
        parts = [torch.empty_like(part) for _ in range(layer.ranks)]
        dist.all_gather(parts, part, group=layer.group)
        return torch.cat(parts)

    return whole_of


def check_fsdp(rank):
    """Checks gradients, the router's state by either group, and an optimizer step."""
    mesh = two_by_two()
    model = sharded(mesh)
    one, want = one_process(RANKS, Block())
    check_results(accumulate(model, rank), rank, want)
    check_gradients(model, one, lambda _, gradient: gradient.full_tensor())
    assert torch.equal(model.moe.expert_bias, one.moe.expert_bias)
    for update in (
        lambda layer, group: layer.update_expert_bias(0.1, group),
        lambda layer, group: layer.update_quantile_bias(group),
    ):
        again = model.moe.qb_histogram.clone(), model.moe.tokens_per_expert.clone()
        update(model.moe, dist.group.WORLD)
        over_all = model.moe.expert_bias.clone()
        model.moe.expert_bias.copy_(one.moe.expert_bias)
        model.moe.qb_histogram, model.moe.tokens_per_expert = again
        update(model.moe, mesh["data"].get_group())
        update(one.moe, None)
        torch.testing.assert_close(model.moe.expert_bias, one.moe.expert_bias)
        torch.testing.assert_close(over_all, one.moe.expert_bias)
    for trained in (model, one):
        torch.optim.SGD(trained.parameters(), lr=0.1).step()
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).full_tensor(), parameter)


def check_fsdp_of_adapters(rank):
    """The second step has factors B that are not 0."""
    options = dict(lora_rank=2, lora_alpha=3.0, lora_shared=("a_in", "b_out"))
    model, one = sharded(two_by_two(), **options), Block(**options)
    for _ in range(2):
        model.zero_grad()
        one.zero_grad()
        _, want = one_process(RANKS, one)
        check_results(accumulate(model, rank), rank, want)
        for name, parameter in one.named_parameters():
            gradient = model.get_parameter(name).grad
            assert (gradient is None) == (not parameter.requires_grad), name
            if gradient is not None:
                torch.testing.assert_close(gradient.full_tensor(), parameter.grad, msg=lambda m, n=name: f"{n}: {m}")
        for trained in (model, one):
            torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], lr=1.0).step()
    assert one.moe.lora_b_out.any() and one.moe.lora_a_in.grad.any()
    with pytest.raises(ValueError, match=r"module: got a layer under fully_shard, expected add_lora before"):
        add_lora(sharded(two_by_two()), 2)


def check_adapters_of_one_expert_per_rank(rank):
    """A shared factor has the same shape as that of the rank's only expert."""
    options = dict(num_experts=RANKS, lora_rank=2, lora_shared=("a_in", "b_out"))
    layer, one = make_layer(group=dist.group.WORLD, loss_group=dist.group.WORLD, **options), make_layer(**options)
    with torch.no_grad():
        one.lora_b_in.normal_()
        one.lora_b_out.normal_()
        layer.lora_b_in.copy_(one.lora_b_in[rank : rank + 1])
        layer.lora_b_out.copy_(one.lora_b_out)
    _, want = one_process(RANKS, one)
    check_results(accumulate(layer, rank), rank, want)
    whole_of = gathered(layer)
    for name in NAMES:
        got = whole_of(name, layer.get_parameter(name).grad)
        torch.testing.assert_close(got, one.get_parameter(name).grad, msg=lambda m, n=name: f"{n}: {m}")


def check_fsdp_of_mixed_precision(rank):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = two_by_two()
    layer = fully_shard(
        make_layer(group=mesh["expert"], loss_group=dist.group.WORLD), mesh=mesh["data"], mp_policy=policy
    )
    one, _ = one_process(RANKS)
    got = accumulate(layer, rank)
    assert got[0].output.dtype == torch.bfloat16
    for name, parameter in one.named_parameters():
        gradient = layer.get_parameter(name).grad.full_tensor()
        assert gradient.dtype == torch.float32
        assert (gradient - parameter.grad).norm() < 16 * 2.0**-8 * parameter.grad.norm(), name


def check_called_gate(rank):
    """A gate with a hook is called; results and gradients have the bits of one without."""
    x, real = rank_batches(rank, RANKS)[0]
    for transport in ("ring", "all_to_all"):
        found = []
        for hooked in (False, True):
            layer, leaf, calls = make_layer(group=dist.group.WORLD, transport=transport), x.clone().requires_grad_(), []
            if hooked:
                layer.gate.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            result = layer(leaf, token_mask=real)
            (loss_of(result) + torch.cos(result.weights).sum()).backward()
            assert len(calls) == hooked
            found.append([*result, leaf.grad, *(parameter.grad for parameter in layer.parameters())])
        for got, want in zip(*found, strict=True):
            assert torch.equal(got, want)


SUBMODULES = ("gate", "shared_expert", "shared_expert_gate")


def check_fsdp_of_submodules(rank):
    """Each submodule is sharded separately with either FSDP; a training step equals that of one process."""
    one, want = one_process(RANKS, Block())
    torch.optim.SGD(one.parameters(), lr=0.1).step()
    for version in (2, 1):
        model = Block(loss_group=dist.group.WORLD)
        for name in SUBMODULES:
            module = getattr(model.moe, name)
            if version == 2:
                fully_shard(module, mesh=init_device_mesh("cpu", (RANKS,)))
            else:
                setattr(model.moe, name, FullyShardedDataParallel(module, device_id=torch.device("cpu")))
        if version == 2:
            fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
        else:
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        check_results(accumulate(model, rank), rank, want)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        if version == 2:
            got = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
        else:
            with FullyShardedDataParallel.summon_full_params(model):
                named = model.named_parameters()
                got = {name.replace("_fsdp_wrapped_module.", ""): parameter.clone() for name, parameter in named}
        for name, parameter in one.named_parameters():
            torch.testing.assert_close(got[name], parameter, msg=lambda text, name=name: f"{name}: {text}")


def check_ddp(rank):
    model = Block(group=dist.group.WORLD)
    parallel = DistributedDataParallel(ddp_ignore_experts(model))
    one, want = one_process(RANKS, Block())
    (first, real), (second, really) = rank_batches(rank, RANKS)
    with parallel.no_sync():
        results = [parallel(first, token_mask=real)]
        loss_of(results[0]).backward()
    results.append(parallel(second, token_mask=really))
    loss_of(results[1]).backward()
    check_results(results, rank, want)
    check_gradients(model, one, gathered(model.moe, "moe."))
    model.moe.update_expert_bias(0.1)
    one.moe.update_expert_bias(0.1)
    assert torch.equal(model.moe.expert_bias, one.moe.expert_bias) and one.moe.expert_bias.any()


def check_ddp_of_a_layer(rank):
    """The layer itself is wrapped: over all ranks, and over the data-parallel ranks, which have the same experts."""
    one, want = one_process(RANKS)
    mesh = two_by_two()
    for group, ranks in ((mesh["expert"].get_group(), mesh["data"].get_group()), (dist.group.WORLD, None)):
        layer = make_layer(group=group, loss_group=dist.group.WORLD)
        wrapped = DistributedDataParallel(ddp_ignore_experts(layer) if ranks is None else layer, process_group=ranks)
        check_results(accumulate(wrapped, rank), rank, want)
        check_gradients(layer, one, gathered(layer))
    before = layer.down_proj.clone()
    DistributedDataParallel(torch.compile(ddp_ignore_experts(layer)))
    assert torch.equal(layer.down_proj, before)


def check_clipping(rank):
    """The norm and the clipped gradients are those of one process, sharded and not."""
    one, _ = one_process(RANKS, Block())
    want = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
    assert want > 0.2
    group = Block(group=dist.group.WORLD)
    for model, wrapped in (
        (group, DistributedDataParallel(ddp_ignore_experts(group))),
        (mesh := sharded(two_by_two()), mesh),
    ):
        accumulate(wrapped, rank)
        torch.testing.assert_close(clip_grad_norm_(model, 0.1), want)
        whole_of = gathered(model.moe, "moe.") if model is group else lambda _, gradient: gradient.full_tensor()
        check_gradients(model, one, whole_of)
        torch.testing.assert_close(clip_grad_norm_(model, 10.0), torch.tensor(0.1))
        check_gradients(model, one, whole_of)


def check_wrapped_wrongly(rank):
    x = rank_batches(rank, RANKS)[0][0]
    for model in (
        Block(group=dist.group.WORLD),
        torch.compile(make_layer(group=dist.group.WORLD), backend="eager"),
        nn.Sequential(ddp_ignore_experts(make_layer(group=dist.group.WORLD))),  # a container hides the layer from DDP
    ):
        with pytest.raises(ValueError, match="group: got a layer inside DistributedDataParallel"):
            DistributedDataParallel(model)(x)
    block = fully_shard(Block(group=dist.group.WORLD), mesh=init_device_mesh("cpu", (RANKS,)))
    with pytest.raises(ValueError, match="group: got a process group under fully_shard"):
        block(x)
    layer = make_layer(group=dist.group.WORLD)
    distribute_module(layer.gate, init_device_mesh("cpu", (RANKS,)))
    with pytest.raises(ValueError, match="weight: got a DTensor in a layer with group"):
        layer(x)
    mesh = two_by_two()
    with pytest.raises((RuntimeError, KeyError), match=r"overlapping meshes|ascending order"):  # the second: torch 2.9
        fully_shard(make_layer(group=mesh["expert"]), mesh=mesh)


def check_initialised_where_its_parameters_are(rank):
    """Results equal those of one process, also if the data-parallel ranks have different numbers of experts."""
    # torch 2.9 concatenates the uneven shards of 3 experts on 2 data-parallel ranks in a wrong order.
    uneven = (6,) if torch.__version__ >= (2, 11) else ()
    for num_experts in (E, *uneven):
        model = sharded(two_by_two(), num_experts=num_experts, device="meta")
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        model.moe.reset_parameters()
        state = get_model_state_dict(model.moe, options=WHOLE)
        for name, value in make_layer(num_experts=num_experts).state_dict().items() if rank == 0 else ():
            assert torch.equal(state[name], value), name


def check_checkpoints(rank):
    """Loads and saves whole checkpoints, and moves checkpoints between numbers of ranks."""
    mesh, one = two_by_two(), make_layer()
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.normal_()
    model = sharded(mesh)
    set_model_state_dict(model.moe, one.state_dict(), options=WHOLE)
    state = get_model_state_dict(model.moe, options=WHOLE)
    for name, value in one.state_dict().items() if rank == 0 else ():
        assert torch.equal(state[name], value), name
    other = MoE(D, F, E, K, **options_of_state(), group=init_device_mesh("cpu", (RANKS,)))
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        checkpoint.save(model.moe.state_dict(), checkpoint_id=folder[0])
        state = other.state_dict()
        checkpoint.load(state, checkpoint_id=folder[0])
        dist.barrier()
        check_old_names(model.moe, one.state_dict(), f"{folder[0]}/old")
    other.load_state_dict(state)
    assert other.gate_up_proj.to_local().shape[0] == E // RANKS
    assert torch.equal(other.gate_up_proj.full_tensor(), one.gate_up_proj)
    assert torch.equal(other.gate.weight, one.gate.weight)


def check_old_names(layer, whole, folder):
    """Checkpoints of the shared expert in the form of version 0.1.0, sharded and whole."""

    def old(state):
        return {f"{name}.weight" if "shared_expert." in name else name: value for name, value in state.items()}

    with pytest.raises(RuntimeError, match=r"shared_expert.down_proj.weight: got a whole tensor for a DTensor"):
        set_model_state_dict(layer, old(whole), options=WHOLE)
    checkpoint.save(old(layer.state_dict()), checkpoint_id=folder)
    with torch.no_grad():
        layer.shared_expert.down_proj.zero_()
    state = old(layer.state_dict())
    checkpoint.load(state, checkpoint_id=folder)
    layer.load_state_dict(state)
    assert torch.equal(layer.shared_expert.down_proj.full_tensor(), whole["shared_expert.down_proj"])
    with torch.no_grad():
        layer.shared_expert.down_proj.zero_()
    renamed = {re.sub(r"(shared_expert\.\w+)\.weight$", r"\1", name): value for name, value in old(whole).items()}
    set_model_state_dict(layer, renamed, options=WHOLE)
    assert torch.equal(layer.shared_expert.down_proj.full_tensor(), whole["shared_expert.down_proj"])


def options_of_state():
    return dict(use_bias=True, use_gate_bias=True, use_expert_bias=True, shared_features=8, shared_gate=True)


def check_activation_checkpoint(rank):
    """The exchange runs again in the backward pass; no token is counted twice."""
    (x, mask), _ = rank_batches(rank, RANKS)
    for reentrant in (False, True):
        kept, again = make_layer(group=dist.group.WORLD), make_layer(group=dist.group.WORLD)
        loss_of(kept(x, token_mask=mask)).backward()

        def call(x, layer=again):
            return loss_of(layer(x, token_mask=mask))

        # A reentrant checkpoint needs an input that requires a gradient.
        activation_checkpoint(call, x.clone().requires_grad_(), use_reentrant=reentrant).backward()
        check_gradients(again, kept, lambda _, gradient: gradient)
        assert torch.equal(again.tokens_per_expert, kept.tokens_per_expert) and kept.tokens_per_expert.any()


def check_copies(rank):
    layer, x = make_layer(group=dist.group.WORLD), rank_batches(rank, RANKS)[0][0]
    other = copy.deepcopy(layer)
    with torch.no_grad():
        layer.down_proj.zero_()
    assert other.group is layer.group and other.down_proj.any()
    assert not torch.equal(other(x).output, layer(x).output)
    meshed = make_layer(group=init_device_mesh("cpu", (RANKS,)))
    torch.testing.assert_close(copy.deepcopy(meshed)(x).output, other(x).output)
    with pytest.raises(TypeError, match="MoE: got a layer with a process group to pickle"):
        torch.save(layer, io.BytesIO())


def check_bad_arguments(rank):
    for options, error, message in (
        (dict(num_experts=6), ValueError, "num_experts: got 6, expected a multiple of the 4 ranks of group"),
        (dict(group="world"), TypeError, "group: got str 'world'"),
        (dict(group=two_by_two()), ValueError, "group: got a DeviceMesh of 2 dimensions"),
        (dict(transport="tree"), ValueError, "transport: got 'tree'"),
        (dict(capacity_factor=0), ValueError, "capacity_factor: got 0"),
        (dict(group=None, capacity_factor=1.0), ValueError, "capacity_factor: got 1.0 without group"),
    ):
        with pytest.raises(error, match=message):
            MoE(D, F, **dict(num_experts=E, topk=K, group=dist.group.WORLD) | options)
    for function in (ddp_ignore_experts, lambda model: clip_grad_norm_(model, 1.0)):
        with pytest.raises(TypeError, match="model: got int 3"):
            function(3)
    with pytest.raises(ValueError, match="max_norm: got 0"):
        clip_grad_norm_(Block(), 0)


CHECKS = (
    check_fsdp,
    check_fsdp_of_adapters,
    check_adapters_of_one_expert_per_rank,
    check_fsdp_of_mixed_precision,
    check_called_gate,
    check_fsdp_of_submodules,
    check_ddp,
    check_ddp_of_a_layer,
    check_clipping,
    check_wrapped_wrongly,
    check_initialised_where_its_parameters_are,
    check_checkpoints,
    check_activation_checkpoint,
    check_copies,
    check_bad_arguments,
)


def test_four_processes_are_one(tmp_path):
    run_in_processes(RANKS, CHECKS, tmp_path)
