"""The layer on a process group has the oracle's outputs, losses, counts, drops and gradients."""

import dataclasses
import json
import math

import in_ranks
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import frameworks
import gloo_ranks
import in_torch
from anabranch.lora import NAMES
from anabranch.reference import moe as reference
from anabranch.replay import Replay, operand_fields
from anabranch.torch import MoEOutput, moe
from anabranch.torch.binding.group import sum_over_ranks
from lora_cases import lora_factors, oracle_options, with_factors
from moe_cases import assert_layer, expected_layer, operands, selected
from oracle import assert_close, assert_close_per_expert
from replay_cases import record
from routed_cases import routed_operands

T, E, K, D, F = 48, 8, 3, 16, 24


@dataclasses.dataclass(frozen=True)
class Case:
    transport: str
    dtype: str = "float32"
    capacity_factor: float | None = None
    routed: bool = False
    one_rank: bool = False
    compiled: bool = False
    module: bool = False
    data: int = 1  # groups of data parallel ranks, each with all experts
    own_stream: bool = False
    num_experts: int = E
    lora: tuple[str, ...] | None = None  # the shared factors of adapters; None: no adapters
    replay: bool = False
    options: dict = dataclasses.field(default_factory=dict)

    def arrays(self):
        """The arrays of the whole batch."""
        factors = {} if self.lora is None else lora_factors(E, D, 2, F, shared=self.lora)
        if self.routed:
            return routed_operands(T, E, K, D, F, dtype=self.dtype, bias=True, wrong=True) | factors
        arrays = operands(T, E, K, D, F, dtype=self.dtype, bias=True, skew=3.0, cold=1) | factors
        rng = np.random.default_rng(3)
        if self.one_rank:
            forced = rng.integers(E - 2, E, (T, K)).astype(np.int32)
            forced[::4, 1] = -1
            return arrays | {"forced_experts": forced}
        arrays["token_mask"] = rng.random(T) < 0.9
        return arrays | (operand_fields(record(T, E, K)) if self.replay else {})


def kept_slots(experts, ranks, capacity):
    """bool [T, K]: assignments within each rank's `capacity`, filled in order of source rank and assignment."""
    taken, kept = np.zeros(ranks, int), np.zeros(experts.shape, bool)
    for slot, expert in np.ndenumerate(experts):
        if 0 <= expert < E:
            rank = expert // (E // ranks)
            kept[slot] = taken[rank] < capacity
            taken[rank] += 1
    return kept


def run(folder, cases, ranks, backend="gloo"):
    """Runs the cases in `ranks` processes; returns (arrays, cotangents, each rank's results) per case."""
    given = []
    for index, case in enumerate(cases):
        arrays, rng = case.arrays(), np.random.default_rng(5)
        cotangents = {"d_output": rng.standard_normal(arrays["x"].shape).astype(arrays["x"].dtype)}
        if not case.routed:
            cotangents |= {"d_aux_loss": np.float32(0.7), "d_z_loss": np.float32(-1.3)}
            cotangents["d_weights"] = rng.standard_normal((T, K)).astype(np.float32)
        saved = {n: in_torch.to_bytes(np.asarray(a)) for n, a in (arrays | cotangents).items() if a is not None}
        np.savez(folder / f"{index}", **saved)
        (folder / f"{index}.json").write_text(json.dumps(dataclasses.asdict(case)))
        given.append((arrays, cotangents))
    gloo_ranks.start(in_ranks.main, ranks, folder, ranks, backend)
    return [
        (*given[i], [in_ranks.load(folder / f"{i}.{rank}.npz") for rank in range(ranks)]) for i in range(len(cases))
    ]


def group_values(parts, data, name):
    """The values of each group, which are equal on its ranks."""
    groups = np.split(np.stack(parts), data)
    for group in groups:
        for part in group[1:]:
            np.testing.assert_array_equal(part, group[0], err_msg=f"{name} differs between ranks")
    return [group[0] for group in groups]


def mean(parts):
    """Sums of gradients in their dtype."""
    return np.mean([np.asarray(part, np.float64) for part in parts], 0).astype(parts[0].dtype)


def whole(found, name, data):
    """The ranks' results by name, in the form of one process. For gradients see `in_ranks.run`."""
    parts = [rank_results[name] for rank_results in found]
    if name in ("output", "experts", "weights"):
        return np.concatenate(parts)
    if name.removeprefix("d_") in in_ranks.TOKENS:
        return np.concatenate([(part / len(parts)).astype(part.dtype) for part in parts])
    if name.removeprefix("d_") in in_ranks.EXPERTS and len(parts[0]) > 1:  # not a shared factor
        expert_ranks = len(parts) // data
        return np.concatenate([mean(parts[rank::expert_ranks]) for rank in range(expert_ranks)])
    groups = group_values(parts, data, name)
    if name.startswith("d_"):
        return mean(groups)
    if name == "dropped_by_source":
        return np.concatenate(groups)
    if name in ("tokens_per_expert", "dropped"):
        return np.sum(groups, 0)
    np.testing.assert_array_equal(groups, groups[:1] * data, err_msg=f"{name} differs between groups")
    return groups[0]


def check(case, arrays, cotangents, found, ranks):
    arrays = dict(arrays)
    options = {name: value for name, value in case.options.items() if name != "use_expert_bias"}
    options |= {n: arrays.pop(n) for n in ("token_mask", "forced_experts") if n in arrays}
    if case.replay:
        options["replay"] = Replay(*map(arrays.pop, in_ranks.REPLAY))
    if case.routed:
        experts = arrays["experts"]
    else:
        options["topk"] = K
        experts = options.get("forced_experts")
        experts = selected(arrays, options) if experts is None else experts
    kept, drops = None, 0
    if case.capacity_factor is not None:
        kept = kept_slots(experts, ranks, math.ceil(case.capacity_factor * (T // ranks) * K))
        drops = ((experts >= 0) & (experts < E) & ~kept).reshape(ranks, -1).sum(1)
        assert drops.sum() > 10
    gradients = {name[2:]: whole(found, name, case.data) for name in found[0] if name.startswith("d_")}
    if case.routed:
        check_routed(case, arrays, cotangents, found, gradients, kept)
        return
    result = MoEOutput(**{n: whole(found, n, case.data) for n in MoEOutput._fields if n in found[0]})
    in_order = [cotangents[name] for name in ("d_output", "d_aux_loss", "d_z_loss", "d_weights")]
    assert_layer(result, gradients, expected_layer(arrays, in_order, kept=kept, **options), case.dtype)
    np.testing.assert_array_equal(result.dropped_by_source, np.broadcast_to(drops, ranks))


def check_routed(case, arrays, cotangents, found, gradients, kept):
    options = oracle_options(arrays) | {"kept": kept}
    arrays = {name: array for name, array in arrays.items() if name not in NAMES}
    expected = reference.routed_experts(**arrays, **options)
    assert_close(whole(found, "output", case.data), expected.output, 8e-6, "output")
    np.testing.assert_array_equal(whole(found, "tokens_per_expert", case.data), expected.tokens_per_expert)
    assert int(whole(found, "dropped", case.data)) == int(expected.dropped)
    want = with_factors(reference.routed_experts_backward(**arrays, **options, d_output=cotangents["d_output"]))
    for name, gradient in gradients.items():
        assert_close(gradient, want[name], 8e-6, f"d_{name}")
        if name in in_ranks.EXPERTS:
            assert_close_per_expert(gradient, want[name], 4 * 8e-6, f"d_{name}", 0)


LOSSES = {"topk": K, "aux_loss_coeff": 0.3, "z_loss_coeff": 0.1}
CASES = [
    Case("ring", options=LOSSES),
    Case("all_to_all", options=LOSSES),
    Case("ring", "bfloat16", options=LOSSES | {"score_function": "sigmoid", "weight_early": True}),
    Case("all_to_all", "bfloat16", options=LOSSES | {"align_size": 8, "weight_early": True}),
    Case("ring", capacity_factor=0.7, options=LOSSES),
    Case("all_to_all", capacity_factor=0.7, options=LOSSES | {"align_size": 4}),
    Case("all_to_all", capacity_factor=0.8, one_rank=True, options=LOSSES),
    Case("ring", one_rank=True, options=LOSSES),
    Case("ring", routed=True),
    Case("all_to_all", routed=True, options={"align_size": 8}),
    Case("all_to_all", capacity_factor=0.5, routed=True),
    Case("all_to_all", compiled=True, capacity_factor=0.7, options=LOSSES),
    Case("all_to_all", data=2, own_stream=True, options=LOSSES),
    Case("ring", data=2, routed=True),
    Case("ring", module=True, own_stream=True, options=LOSSES | {"score_function": "sigmoid", "use_expert_bias": True}),
    Case("all_to_all", "bfloat16", 0.7, module=True, options=LOSSES | {"align_size": 4}),
    Case("auto", module=True, data=2, compiled=True, options=LOSSES),
    Case("ring", lora=("a_in", "b_out"), options=LOSSES | {"lora_scale": (0.7, -1.3)}),
    Case("all_to_all", lora=(), routed=True, capacity_factor=0.7),
    Case("all_to_all", "bfloat16", data=2, lora=("b_in",), options=LOSSES | {"weight_early": True}),
    Case("ring", replay=True, options=LOSSES | {"score_function": "sigmoid", "num_groups": 2, "group_topk": 1}),
    Case("all_to_all", replay=True, capacity_factor=0.7, module=True, compiled=True, options=LOSSES),
]


@pytest.fixture
def torch_cases():
    """Selects torch, which the checks' helpers call."""
    in_torch.on("cpu")
    frameworks.choose("torch")
    yield
    frameworks.choose("jax")


def check_cases(folder, ranks, backend="gloo", compiles=lambda case: True):
    cases = [case for case in CASES if ranks % case.data == 0]
    cases = [dataclasses.replace(case, compiled=case.compiled and compiles(case)) for case in cases]
    for case, (arrays, cotangents, found) in zip(cases, run(folder, cases, ranks, backend), strict=True):
        try:
            check(case, arrays, cotangents, found, ranks)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.usefixtures("torch_cases")
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_give_the_results_and_gradients_of_one_process(tmp_path, ranks):
    """Each compiled case is compiled for one number of ranks, because compilation takes most of the time."""
    check_cases(tmp_path, ranks, compiles=lambda case: case.data == ranks // 2)


@pytest.mark.gpu
@pytest.mark.usefixtures("torch_cases")
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_of_a_gpu_each_give_the_results_and_gradients_of_one_process(tmp_path, ranks):
    """The ranks use NCCL and never synchronise with the host."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"FEWER THAN {ranks} GPUS FOUND: the layer was not tested on so many")
    check_cases(tmp_path, ranks, "nccl")


@pytest.mark.gpu
@pytest.mark.usefixtures("torch_cases")
@pytest.mark.parametrize("ranks", [2, 4])
def test_p2p_gives_the_bits_of_ring(tmp_path, ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"FEWER THAN {ranks} GPUS FOUND: the transport p2p was not tested on so many")
    cases = [case for case in CASES if case.transport == "ring" and ranks % case.data == 0]
    cases += [dataclasses.replace(cases[0], compiled=True)]
    both = [dataclasses.replace(case, transport=name) for case in cases for name in ("ring", "p2p")]
    found = [found for *_, found in run(tmp_path, both, ranks, "nccl")]
    for case, ring, p2p in zip(cases, found[::2], found[1::2], strict=True):
        for rank, (want, got) in enumerate(zip(ring, p2p, strict=True)):
            assert want.keys() == got.keys()
            for name in want:
                np.testing.assert_array_equal(got[name], want[name], err_msg=f"{case}, rank {rank}: {name}")


@pytest.fixture
def group_of_one(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("transport", ["ring", "all_to_all"])
def test_a_group_of_one_is_the_layer(group_of_one, transport):
    arrays = {n: in_torch.tensor(a) for n, a in operands(T, E, K, D, F, bias=True).items()}
    want = moe(**arrays, **LOSSES)
    got = moe(**arrays, **LOSSES, group=group_of_one, transport=transport)
    for name in ("output", "aux_loss", "z_loss"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name))
    for name in ("tokens_per_expert", "dropped", "dropped_by_source", "experts", "weights"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize("transport", ["ring", "all_to_all"])
def test_a_capacity_beyond_all_slots_drops_nothing(group_of_one, transport):
    """3e7 T K exceeds int32; 1e38 T K exceeds int64."""
    arrays = {n: in_torch.tensor(a) for n, a in operands(T, E, K, D, F).items() if a is not None}
    want = moe(**arrays, topk=K)
    for factor in (3e7, 1e38):
        got = moe(**arrays, topk=K, group=group_of_one, transport=transport, capacity_factor=factor)
        assert got.dropped == 0
        torch.testing.assert_close(got.output, want.output)


class Collectives(TorchDispatchMode):
    """Records the names of torch's functional collectives."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.namespace == "_c10d_functional":
            self.names.add(function.overloadpacket.__name__)
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("transport", ["ring", "all_to_all"])
def test_no_all_gather_corrupts_the_heap_on_the_cpu(group_of_one, transport):
    """torch's all-gather over Gloo may corrupt it."""
    arrays = {n: in_torch.tensor(a).requires_grad_() for n, a in operands(T, E, K, D, F).items() if a is not None}
    with Collectives() as collectives:
        result = moe(**arrays, **LOSSES, group=group_of_one, transport=transport, capacity_factor=0.5)
        (result.output.sum() + result.aux_loss + result.z_loss).backward()
    assert collectives.names == {"all_reduce", "all_to_all_single", "wait_tensor"}


def test_counts_are_added_up_over_ranks_in_int64(group_of_one):
    most, half = torch.tensor([2**31 - 1], dtype=torch.int32), torch.tensor([0.5])
    counts, floats = sum_over_ranks(group_of_one, most, half)
    assert counts.dtype == torch.int64 and counts.item() == 2**31 - 1 and torch.equal(floats, half)


def test_inconsistent_options_are_errors(group_of_one):
    arrays = {n: in_torch.tensor(a) for n, a in operands(T, E, K, D, F).items() if a is not None}
    for changes, error, message in (
        (dict(transport="ring"), ValueError, "transport: got 'ring' without group"),
        (dict(capacity_factor=1.0), ValueError, "capacity_factor: got 1.0 without group"),
        (dict(group="world"), TypeError, "group: got str 'world', expected a torch.distributed.ProcessGroup"),
        (dict(group=group_of_one, transport="tree"), ValueError, "transport: got 'tree', expected one of"),
        (dict(group=group_of_one, capacity_factor=-1.0), ValueError, "capacity_factor: got -1.0"),
        (dict(align_size=2**31 - 1), ValueError, "align_size: got 2147483647, which requires 17179869176 rows"),
        (
            dict(group=group_of_one, align_size=2**31 - 1),
            ValueError,
            "align_size: got 2147483647, with which transport",
        ),
        (dict(group=group_of_one, gate=torch.zeros(D, E + 1)), ValueError, "gate: got"),
    ):
        with pytest.raises(error, match=message):
            moe(**arrays | LOSSES | changes)
