"""Dispatch and combine under TransformerEngine's names: index maps, padding by counts, arguments and errors.

test_token_dispatch.py tests bool maps, values and gradients.
"""

import inspect
import re

import numpy as np
import pytest
import torch

from anabranch.reference import dispatch as reference
from anabranch.torch import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)

T, E, K, D = 12, 6, 3, 4


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape), dtype=dtype)


X, PROBS = normal(T, D), normal(T, E, seed=1)
EXPERTS = torch.tensor(np.argsort(np.random.default_rng(2).random((T, E)), 1)[:, :K].astype(np.int32))
MASK = torch.zeros(T, E, dtype=torch.bool).scatter(1, EXPERTS.long(), True)
COUNTS = MASK.sum(0)
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


def assert_near(got, want, bound):
    want = torch.as_tensor(want)
    assert got.shape == want.shape
    assert (got.double() - want).norm() <= bound * want.norm()


INDEX_CASES = {
    "distinct": EXPERTS,
    "some negative": torch.where(EXPERTS > 3, -1 - EXPERTS, EXPERTS),
    "repeated": EXPERTS // 3,
    "far apart": torch.tensor([0, 2**31 - 2, 7, -(2**31), 99, 3])[EXPERTS.long()].int(),
}


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize("rows", [0, -1, 1, 20, T * K + 5])
@pytest.mark.parametrize("case", INDEX_CASES)
def test_a_map_of_indices_is_the_plan_of_its_experts(case, rows, dtype):
    index = INDEX_CASES[case]
    # The plan numbers the map's experts in ascending order.
    dense = np.unique(index[index >= 0].numpy(), return_inverse=True)
    numbered = np.where(index.numpy() < 0, -1, np.searchsorted(dense[0], index.numpy())).astype(np.int32)
    R = T * K if rows <= 0 else rows
    want = reference.plan(numbered, len(dense[0]), 0, R)

    x = X.to(dtype, copy=True).requires_grad_()
    out, row_id_map = moe_permute(x, index, rows, map_type="index")
    assert out.dtype == dtype and row_id_map.dtype == torch.int32 and row_id_map.shape == (K * T,)
    np.testing.assert_array_equal(row_id_map.reshape(K, T).T, want.row_of_slot)
    np.testing.assert_array_equal(out.detach().double(), reference.dispatch(x.detach().double().numpy(), want))
    d_out = normal(R, D, seed=3, dtype=dtype)
    (d_x,) = torch.autograd.grad(out, x, d_out)
    assert_near(d_x, reference.dispatch_backward(d_out.double().numpy(), want), BOUND[dtype])

    rows_in, weights = normal(R, D, seed=4, dtype=dtype).requires_grad_(), normal(T, K, seed=5).requires_grad_()
    merged = moe_unpermute(rows_in, row_id_map, weights, map_type="index", restore_shape=(T, D))
    values = rows_in.detach().double().numpy(), want, weights.detach().double().numpy()
    assert merged.dtype == dtype
    assert_near(merged, reference.combine(*values), BOUND[dtype])
    d_merged = normal(T, D, seed=6, dtype=dtype)
    d_rows, d_weights = torch.autograd.grad(merged, (rows_in, weights), d_merged)
    want_rows, want_weights = reference.combine_backward(d_merged.double().numpy(), *values)
    assert_near(d_rows, want_rows, BOUND[dtype])
    assert_near(d_weights, want_weights, 2e-6)


def test_rows_of_indices_without_probabilities():
    out, row_id_map = moe_permute(X, EXPERTS[:, :1], 0, map_type="index")
    assert torch.equal(moe_unpermute(out, row_id_map, map_type="index"), X)
    out, row_id_map = moe_permute(X, EXPERTS, 0, map_type="index")
    assert torch.equal(moe_unpermute(out, row_id_map, map_type="index"), X.repeat(K, 1))


def test_any_row_id_map_of_indices_is_safe():
    """Rows out of range are skipped; if two assignments name a row, the last one gets it, forward and backward."""
    inp = torch.arange(1.0, 4.0)[:, None].requires_grad_()
    row_id_map = torch.tensor([2, 3, -1, 2, -(2**31), 2**31 - 1], dtype=torch.int32)
    weights = torch.ones(3, 2, requires_grad=True)
    out = moe_unpermute(inp, row_id_map, weights, map_type="index")
    assert out.tolist() == [[3.0], [0.0], [0.0]]
    out.sum().backward()
    assert inp.grad.ravel().tolist() == [0.0, 0.0, 1.0] and weights.grad.tolist() == [
        [0.0, 3.0],
        [0.0, 0.0],
        [0.0, 0.0],
    ]


def test_both_kinds_of_maps_agree():
    by_mask, _ = moe_permute(X, MASK, T * K)
    by_index, _ = moe_permute(X, EXPERTS.long(), T * K, map_type="index")
    assert torch.equal(by_mask, by_index)


@pytest.mark.parametrize("align", [1, 4, 128])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_counts_on_the_host_say_how_many_rows_there_are(align, dtype):
    found = moe_permute_and_pad_with_probs(X, PROBS, MASK, COUNTS.to(dtype), align)
    rows, permuted, row_id_map, pad_offsets, padded = found
    want_padded = -(-COUNTS // align) * align
    R = int(want_padded.sum())
    assert rows.shape == (R, D) and permuted.shape == (R,)
    assert padded.dtype == pad_offsets.dtype == torch.int64 and torch.equal(padded, want_padded)
    want = reference.token_dispatch(X.numpy(), MASK.numpy(), T * K, PROBS.numpy(), align)
    for got, expected in zip((rows, permuted, row_id_map, pad_offsets), want, strict=False):
        np.testing.assert_array_equal(got.double()[:R], expected[:R])
    bound = (T * K + E * (align - 1)) // align * align
    roomy = moe_permute_and_pad_with_probs(X, PROBS, MASK, COUNTS, align, num_rows=bound)
    assert torch.equal(roomy[0][:R], rows) and not roomy[0][R:].any() and not roomy[1][R:].any()
    assert all(torch.equal(a, b) for a, b in zip(roomy[2:], found[2:], strict=True))
    back = moe_unpermute(rows, row_id_map, restore_shape=X.shape, pad_offsets=pad_offsets)
    torch.testing.assert_close(back, K * X)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int16, torch.int32, torch.int64])
def test_masks_of_every_dtype(dtype):
    want = moe_permute_with_probs(X, PROBS, MASK, T * K)
    mask = 3 * MASK.to(dtype) if dtype != torch.bool else MASK
    assert all(torch.equal(a, b) for a, b in zip(moe_permute_with_probs(X, PROBS, mask, T * K), want, strict=True))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_the_number_of_rows_may_be_a_scalar_on_the_host(dtype):
    """Megatron's call with an expert capacity; None and -1 mean all rows of an index map."""
    number = MASK.sum()
    scalar = number.cpu().to(dtype)
    for got, want in [
        (moe_permute(X, MASK, scalar), moe_permute(X, MASK, int(number))),
        (moe_permute_with_probs(X, PROBS, MASK, scalar), moe_permute_with_probs(X, PROBS, MASK, int(number))),
        (moe_permute(X, EXPERTS, None, map_type="index"), moe_permute(X, EXPERTS, T * K, map_type="index")),
        (
            moe_permute(X, EXPERTS, torch.tensor(7, dtype=dtype, device="cpu"), map_type="index"),
            moe_permute(X, EXPERTS, 7, map_type="index"),
        ),
    ]:
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("map_type", ["mask", "index"])
def test_numbers_without_a_gradient_move_too(map_type):
    routing_map = {"mask": MASK, "index": EXPERTS}[map_type]
    for dtype in (torch.uint8, torch.int64, torch.bool):
        moved, _ = moe_permute((10 * X).to(dtype), routing_map, T * K, map_type=map_type)
        want, _ = moe_permute((10 * X).to(dtype).float(), routing_map, T * K, map_type=map_type)
        assert moved.dtype == dtype and torch.equal(moved.float(), want)


@pytest.mark.parametrize(("tokens", "width", "rows"), [(0, D, 0), (0, D, 3), (T, 0, 5), (T, D, 0)])
def test_nothing_to_move(tokens, width, rows):
    x = torch.ones(tokens, width, requires_grad=True)
    probs, mask = PROBS[:tokens].clone().requires_grad_(), MASK[:tokens]
    out, permuted, row_id_map = moe_permute_with_probs(x, probs, mask, rows)
    assert out.shape == (rows, width) and permuted.shape == (rows,)
    back = moe_unpermute(out, row_id_map, probs)
    assert back.shape == (tokens, width)
    (back.sum() + permuted.sum()).backward()
    assert x.grad.shape == (tokens, width) and probs.grad.shape == (tokens, E)
    if tokens == 0:
        out, row_id_map = moe_permute(x, EXPERTS[:0], rows, map_type="index")
        assert out.shape == (rows, width)
        assert moe_unpermute(out, row_id_map, torch.ones(0, K), map_type="index").shape == (0, width)


def test_the_earlier_name_of_merging_probs():
    rows, row_id_map = moe_permute(X, MASK, T * K)
    want = moe_unpermute(rows, row_id_map, PROBS)
    assert torch.equal(moe_unpermute(rows, row_id_map, probs=PROBS), want)
    assert torch.equal(moe_unpermute(rows, row_id_map.long(), merging_probs=PROBS, restore_shape=X.shape), want)


ARGUMENTS = {
    moe_permute: ("inp", "routing_map", "num_out_tokens", "max_token_num", "map_type"),
    moe_permute_with_probs: ("inp", "probs", "routing_map", "num_out_tokens"),
    # num_rows is an additional, keyword-only argument
    moe_permute_and_pad_with_probs: ("inp", "probs", "routing_map", "tokens_per_expert", "align_size", "num_rows"),
    moe_unpermute: ("inp", "row_id_map", "merging_probs", "restore_shape", "map_type", "probs", "pad_offsets"),
    moe_sort_chunks_by_index: ("inp", "split_sizes", "sorted_index"),
    moe_sort_chunks_by_index_with_probs: ("inp", "probs", "split_sizes", "sorted_index"),
}


@pytest.mark.parametrize("function", ARGUMENTS)
def test_argument_order_is_transformer_engines(function):
    parameters = inspect.signature(function).parameters
    assert tuple(parameters) == ARGUMENTS[function]
    keyword_only = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert keyword_only == (["num_rows"] if function is moe_permute_and_pad_with_probs else [])


ROWS, MAP = moe_permute(X, MASK, T * K)
SIZES, ORDER = torch.tensor([3, 4]), torch.tensor([1, 0])
GOOD = {
    moe_permute: dict(inp=X, routing_map=MASK, num_out_tokens=5),
    moe_permute_with_probs: dict(inp=X, probs=PROBS, routing_map=MASK, num_out_tokens=5),
    moe_permute_and_pad_with_probs: dict(inp=X, probs=PROBS, routing_map=MASK, tokens_per_expert=COUNTS, align_size=4),
    moe_unpermute: dict(inp=ROWS, row_id_map=MAP),
    moe_sort_chunks_by_index: dict(inp=X, split_sizes=SIZES, sorted_index=ORDER),
    moe_sort_chunks_by_index_with_probs: dict(inp=X, probs=PROBS[:, 0], split_sizes=SIZES, sorted_index=ORDER),
}
INDEX = dict(map_type="index")
BAD = [
    (moe_permute, dict(inp=X[0]), ValueError, "inp: got float32[4], expected"),
    (moe_permute, dict(inp=X.double()), TypeError, "inp: got float64[12, 4], expected"),
    (moe_permute, dict(routing_map=MASK[1:]), ValueError, "routing_map: got bool[11, 6], expected"),
    (moe_permute, dict(routing_map=MASK[:, :0]), ValueError, "routing_map: got bool[12, 0], expected [T, E] with E >= 1"),
    (moe_permute, dict(routing_map=MASK.to(torch.uint8)), TypeError, "routing_map: got uint8[12, 6], expected bool or int8"),
    (moe_permute, dict(routing_map=MASK.float()), TypeError, "routing_map: got float32[12, 6]"),
    (moe_permute, dict(routing_map=MASK.to("meta")), ValueError, "routing_map: got a tensor on meta"),
    (moe_permute, dict(num_out_tokens=-2), ValueError, "num_out_tokens: got -2, expected an integer in [0, "),
    (moe_permute, dict(num_out_tokens=-1), ValueError, "num_out_tokens: got none with a mask, expected the number of"),
    (moe_permute, dict(num_out_tokens=None), ValueError, "num_out_tokens: got none with a mask, expected the number of"),
    (moe_permute, dict(num_out_tokens=torch.tensor(-1)), ValueError, "num_out_tokens: got none with a mask"),
    (moe_permute, dict(num_out_tokens=torch.tensor(5.0)), TypeError, "num_out_tokens: got float32[]"),
    (moe_permute, dict(num_out_tokens=torch.tensor([5])), TypeError, "num_out_tokens: got int64[1]"),
    (moe_permute, dict(num_out_tokens=COUNTS.sum().to("meta")), TypeError, "num_out_tokens: got int64[] on meta"),
    (moe_permute_with_probs, dict(num_out_tokens=None), ValueError, "num_out_tokens: got none with a mask"),
    (moe_permute, dict(max_token_num=-2), ValueError, "max_token_num: got -2"),
    (moe_permute, dict(map_type="both"), ValueError, "map_type: got 'both', expected one of 'mask', 'index'"),
    (moe_permute, INDEX, TypeError, "routing_map: got bool[12, 6], expected int16 or int32 or int64"),
    (moe_permute, INDEX | dict(routing_map=EXPERTS[:, :0]), ValueError, "routing_map: got int32[12, 0], expected [T, K]"),
    (moe_permute, INDEX | dict(routing_map=EXPERTS, num_out_tokens=-2), ValueError, "num_out_tokens: got -2"),
    (moe_permute_with_probs, dict(probs=None), TypeError, "probs: got NoneType None, expected a tensor"),
    (moe_permute_with_probs, dict(probs=PROBS[:, :1]), ValueError, "probs: got float32[12, 1], expected"),
    (moe_permute_with_probs, dict(probs=PROBS.int()), TypeError, "probs: got int32[12, 6], expected"),
    (moe_permute_with_probs, dict(probs=PROBS.to("meta")), ValueError, "probs: got a tensor on meta"),
    (moe_permute_and_pad_with_probs, dict(tokens_per_expert=None), TypeError, "tokens_per_expert: got NoneType None"),
    (moe_permute_and_pad_with_probs, dict(tokens_per_expert=COUNTS.float()), TypeError, "tokens_per_expert: got float32[6]"),
    (moe_permute_and_pad_with_probs, dict(tokens_per_expert=COUNTS[1:]), ValueError, "tokens_per_expert: got int64[5]"),
    (
        moe_permute_and_pad_with_probs, dict(tokens_per_expert=COUNTS.to("meta")), ValueError,
        "tokens_per_expert: got a tensor on meta, expected one on the CPU",
    ),
    (
        moe_permute_and_pad_with_probs, dict(tokens_per_expert=2**31 + COUNTS), ValueError, "tokens_per_expert: got 12884",
    ),
    (moe_permute_and_pad_with_probs, dict(align_size=0), ValueError, "align_size: got 0"),
    (moe_permute_and_pad_with_probs, dict(num_rows=50), ValueError, "num_rows: got 50, expected a multiple of align_size 4"),
    (moe_unpermute, dict(inp=ROWS.int()), TypeError, "inp: got int32[36, 4]"),
    (moe_unpermute, dict(row_id_map=MAP[:, :-1]), ValueError, "row_id_map: got int32[12, 12], expected [T, 2E+1]"),
    (moe_unpermute, dict(row_id_map=MAP.float()), TypeError, "row_id_map: got float32[12, 13]"),
    (moe_unpermute, dict(merging_probs=PROBS[:, 1:]), ValueError, "merging_probs: got float32[12, 5], expected"),
    (moe_unpermute, dict(probs=PROBS[:, 1:]), ValueError, "probs: got float32[12, 5], expected"),
    (moe_unpermute, dict(probs=PROBS, merging_probs=PROBS), ValueError, "probs: got one together with merging_probs"),
    (moe_unpermute, dict(restore_shape=ROWS.shape), ValueError, "restore_shape: got (36, 4), expected (12, 4)"),
    (moe_unpermute, dict(pad_offsets=COUNTS[1:]), ValueError, "pad_offsets: got int64[5], expected"),
    (moe_unpermute, dict(map_type=None), ValueError, "map_type: got None"),
    (moe_unpermute, INDEX, ValueError, "row_id_map: got int32[12, 13], expected"),
    (moe_unpermute, INDEX | dict(row_id_map=MAP[:, 0], pad_offsets=COUNTS), ValueError, "pad_offsets: got one with map_type"),
    (
        moe_unpermute, INDEX | dict(row_id_map=MAP[:, 0], merging_probs=PROBS), ValueError,
        "merging_probs: got float32[12, 6], expected the 12 probabilities",
    ),
    (moe_sort_chunks_by_index, dict(inp=X[0]), ValueError, "inp: got float32[4]"),
    (moe_sort_chunks_by_index, dict(split_sizes=[3, 4]), TypeError, "split_sizes: got list [3, 4]"),
    (moe_sort_chunks_by_index, dict(sorted_index=ORDER[1:]), ValueError, "sorted_index: got int64[1], expected"),
    (moe_sort_chunks_by_index, dict(sorted_index=ORDER.to("meta")), ValueError, "sorted_index: got a tensor on meta"),
    (moe_sort_chunks_by_index_with_probs, dict(probs=PROBS), ValueError, "probs: got float32[12, 6], expected"),
    (moe_sort_chunks_by_index_with_probs, dict(probs=ORDER), TypeError, "probs: got int64[2]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "changes", "error", "message"), BAD, ids=[f"{function.__name__}-{m[:40]}" for function, _, _, m in BAD]
)
def test_a_bad_argument_is_named(function, changes, error, message):
    function(**GOOD[function])
    with pytest.raises(error, match="^" + re.escape(message)):
        function(**GOOD[function] | changes)
