"""Every argument of every public function gets every value of a list: the call returns, or its error names the
argument.

Functions and arguments are read from the package and from signatures, so new ones are tested automatically; a function
needs one valid call in `CALLS`. Tensors are on the device "meta", because bad values must be refused without data.
"""

import copy
import inspect

import numpy as np
import pytest
import torch

import anabranch.torch as ab
from anabranch.torch.binding import check
from bad_values import DTYPES, VALUES, as_dtype, complaint, floats, shown

T, E, K, D, F, R = 4, 4, 2, 3, 5, 8


def given(value):
    """A value of a call: arrays as tensors, and modules as copies, which a call may change."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy()).to("meta")
    if isinstance(value, ab.Lora | ab.Replay | ab.Mxfp4 | ab.Fp8Blocks):
        return type(value)(*map(given, value))
    if type(value) is tuple:
        return tuple(map(given, value))
    return copy.deepcopy(value) if isinstance(value, torch.nn.Module) else value


def tensors(values):
    return {name: given(value) for name, value in values.items()}


EXPERTS = np.arange(T * K, dtype=np.int32).reshape(T, K) % E
PLAN = ab.plan(torch.from_numpy(EXPERTS).to("meta"), E)
MASK = np.ones(T, bool)
SIZES = np.array([2, 0, 3, 3], np.int32)
ROUTING = dict(topk=K, score_function="sigmoid", num_groups=2, group_topk=1, expert_bias=floats(E), token_mask=MASK)
MATRICES = dict(w_in=floats(E, D, 2, F), w_out=floats(E, F, D), b_in=floats(E, 2, F), b_out=floats(E, D))

REPLAY = ab.Replay(EXPERTS, floats(T, K), MASK)
LORA = ab.Lora(floats(E, D, 2), floats(1, 2, 2, F), floats(E, F, 3), floats(E, 3, D))

MAP = np.ones((T, E), bool)
DENSE = dict(use_pre_softmax=False, num_groups=2, group_topk=1, scaling_factor=2.0, score_function="sigmoid")
CHUNKS = dict(split_sizes=np.array([1, 2, 3]), sorted_index=np.array([2, 0, 1]))

#: Public function: a valid call with as many arguments as can be combined.
CALLS = {
    ab.add_lora: dict(module=ab.MoE(D, F, E, K, device="meta"), rank=2, alpha=4.0),
    ab.clip_grad_norm_: dict(model=torch.nn.Linear(2, 2), max_norm=1.0),
    ab.combine: dict(rows=floats(R, D), plan=PLAN, weights=floats(T, K)),
    ab.ddp_ignore_experts: dict(model=torch.nn.Linear(2, 2)),
    ab.dispatch: dict(x=floats(T, D), plan=PLAN),
    ab.expert_ffn: dict(rows=floats(R, D), group_sizes=SIZES, weights=floats(R), lora=LORA, **MATRICES),
    ab.fused_compute_score_for_moe_aux_loss: dict(logits=floats(T, E), topk=K, score_function="softmax"),
    ab.fused_moe_aux_loss: dict(
        probs=floats(T, E), tokens_per_expert=SIZES, total_num_tokens=T, num_experts=E, topk=K, coeff=0.1
    ),
    ab.fused_topk_with_score_function: dict(logits=floats(T, E), topk=K, expert_bias=floats(E), **DENSE),
    ab.grouped_matmul: dict(
        x=floats(R, D), w=floats(E, D, F), group_sizes=SIZES, lora=(floats(E, D, 2), floats(1, 2, F))
    ),
    ab.init_lora: dict(w_in=MATRICES["w_in"], w_out=MATRICES["w_out"], rank=2),
    ab.join_lora: dict(gate=(floats(E, D, 2), floats(1, 2, F)), up=(floats(1, D, 3), floats(E, 3, F))),
    ab.load_balance_loss: dict(score_sum=floats(E), tokens_per_expert=SIZES, topk=K, coeff=0.1, num_tokens=T),
    ab.merge_lora: dict(w_in=MATRICES["w_in"], w_out=MATRICES["w_out"], lora=LORA),
    ab.moe: dict(
        x=floats(T, D), gate=floats(D, E), gate_bias=floats(E), lora=LORA, replay=REPLAY, **MATRICES, **ROUTING
    ),
    ab.moe_permute: dict(inp=floats(T, D), routing_map=MAP, num_out_tokens=T * E),
    ab.moe_permute_and_pad_with_probs: dict(
        inp=floats(T, D), probs=floats(T, E), routing_map=MAP, tokens_per_expert=SIZES, align_size=4, num_rows=T * E
    ),
    ab.moe_permute_with_probs: dict(inp=floats(T, D), probs=floats(T, E), routing_map=MAP, num_out_tokens=T * E),
    ab.moe_sort_chunks_by_index: dict(inp=floats(R, D), **CHUNKS),
    ab.moe_sort_chunks_by_index_with_probs: dict(inp=floats(R, D), probs=floats(R), **CHUNKS),
    ab.moe_unpermute: dict(
        inp=floats(R, D),
        row_id_map=np.zeros((T, 2 * E + 1), np.int32),
        merging_probs=floats(T, E),
        restore_shape=(T, D),
    ),
    ab.pack_experts: dict(module=ab.MoE(32, 64, E, K, device="meta"), packed="mxfp4"),
    ab.pack_fp8: dict(w=floats(2, 128, 256)),
    ab.pack_mxfp4: dict(w=floats(2, 3, 64)),
    ab.plan: dict(experts=EXPERTS, num_experts=E, align_size=2, num_rows=40, num_destinations=2),
    ab.quantile_bias: dict(histogram=np.ones((E, 4), np.int32), lower=-1.0, upper=1.0, topk=K),
    ab.quantize_experts: dict(w_in=floats(E, 128, 2, 128), w_out=floats(E, 128, 128)),
    ab.route: dict(logits=floats(T, E), **ROUTING),
    ab.routed_experts: dict(x=floats(T, D), experts=EXPERTS, weights=floats(T, K), lora=LORA, **MATRICES),
    ab.shared_expert: dict(x=floats(T, D), w_in=floats(D, 2, F), w_out=floats(F, D), w_gate=floats(D), token_mask=MASK),
    ab.unpack: dict(
        packed=ab.Mxfp4(np.zeros((2, 3, 2, 16), np.uint8), np.zeros((2, 3, 2), np.uint8)), dtype=torch.float32
    ),
    ab.z_loss: dict(lse=floats(T), coeff=0.1, token_mask=MASK, num_tokens=T),
}


def variants(good):
    """Variants of a valid tensor: other dtypes, ranks, shapes, layouts and devices."""
    for dtype in DTYPES:
        if dtype in ("int4", "float8_e4m3fn"):
            continue  # numpy dtypes without a torch dtype
        array = as_dtype(good, dtype)
        tensor = (
            torch.from_numpy(array.astype(np.float32)).bfloat16() if dtype == "bfloat16" else torch.from_numpy(array)
        )
        yield tensor.to("meta")
    on_cpu = torch.from_numpy(good.copy())
    tensor = on_cpu.to("meta")
    yield from (tensor[None], tensor.ravel(), tensor[:0], tensor[..., :0], torch.cat([tensor, tensor]))
    yield from (torch.cat([tensor, tensor], -1), on_cpu.tolist(), good, on_cpu.to_sparse(), on_cpu)
    if good.dtype.kind in "iu":
        yield from (torch.full(good.shape, n, dtype=torch.int64, device="meta") for n in (2**32 + 1, -(2**63)))
    if good.dtype.kind == "f":
        yield tensor.to(torch.float8_e4m3fn)
        if tensor.dim() > 1:
            yield torch.nested.nested_tensor([on_cpu], layout=torch.jagged)
            yield torch.nested.nested_tensor([on_cpu], layout=torch.strided)


def public():
    return [f for name in ab.__all__ if inspect.isfunction(f := getattr(ab, name))]


@pytest.mark.parametrize("function", public(), ids=lambda f: f.__name__)
def test_a_bad_value_is_an_error_that_names_its_argument(function):
    good = CALLS[function]
    arguments = list(inspect.signature(function).parameters)
    function(**tensors(good))
    wrong = []
    for argument in arguments:
        usual = good.get(argument)
        values = [*VALUES, torch.float32, torch.Tensor, PLAN]
        values += [torch.zeros((), dtype=torch.int32, device="meta"), torch.zeros(T, E, device="meta")]
        if isinstance(usual, np.ndarray):
            values += variants(usual)
        for value in values:
            try:
                function(**tensors(good) | {argument: value})
            except Exception as error:
                problem = complaint(error, argument, arguments, value, (torch.Tensor,))
                if problem:
                    wrong.append(f"{argument} = {shown(value)}: {problem[:300]}")
    assert not wrong, f"{len(wrong)} calls:\n" + "\n".join(wrong)


def test_changed_calls_are_checked_again():
    found, calls = check.CheckCache(max_entries=2), []

    def checked(per_token, tensors, options):
        return found.check(per_token, tensors, options, lambda: calls.append(options) or len(calls))

    x = torch.zeros(2, 3)
    assert [checked([x], [x, None], [2, "silu"]), checked([torch.ones(2, 3)], [x, None], [2, "silu"])] == [1, 1]
    different = [x.double(), x.T, x.to("meta"), x.to_sparse(), torch.nn.Parameter(x), None]
    assert [checked([x], [other, None], [2, "silu"]) for other in different] == [2, 3, 4, 5, 6, 7]
    assert [checked([x], [x, None], [other, "silu"]) for other in (2.0, True, 3)] == [8, 9, 10]
    assert checked([x], [None, x], [2, "silu"]) == 11
    assert len(found.results) <= 2
    for _ in range(2):  # neither a tensor nor hashable
        before = len(calls)
        assert [checked([x], [[1.0]], [2]), checked([x], [x], [[2]])] == [before + 1, before + 2]


def test_another_number_of_tokens_is_not_checked_again_if_all_arguments_agree_on_it():
    found, calls = check.CheckCache(), []

    def checked(*per_token):
        return found.check(per_token, [None], [2], lambda: calls.append(per_token) or len(calls))

    def arguments(*leading, mask=None, experts=None):
        return (
            torch.zeros(*leading, 3),
            torch.zeros(*(leading if mask is None else mask)),
            torch.zeros(*(leading if experts is None else experts), 2),
        )

    assert [checked(*arguments(n)) for n in (5, 6, 0, 3)] == [1, 1, 1, 1]
    assert [checked(*arguments(2, n)) for n in (5, 6, 3)] == [2, 2, 2]
    assert checked(*arguments(5, mask=[6])) == 3 and checked(*arguments(5, experts=[4])) == 4
    assert checked(*arguments(5, mask=[1, 5])) == 5
    assert [checked(*arguments(n)) for n in (2**16, 2**17, 2**16, 7)] == [6, 7, 6, 1]
    assert checked(arguments(5)[0], None, arguments(5)[2]) == 8


def test_errors_come_again_and_after_good_calls():
    good = tensors(CALLS[ab.moe])
    for _ in range(2):
        ab.moe(**good)
        with pytest.raises(ValueError, match="topk: got 99"):
            ab.moe(**(good | {"topk": 99}))
        with pytest.raises(TypeError, match=r"topk: got .*2\.0"):
            ab.moe(**(good | {"topk": 2.0}))
        with pytest.raises(TypeError, match=r"w_out: got .*float64"):
            ab.moe(**(good | {"w_out": good["w_out"].double()}))
