"""The router under TransformerEngine's names: in-place outputs, arguments and errors."""

import inspect
import re

import numpy as np
import pytest
import torch

from anabranch.torch import (
    RoutingMapFormat,
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
    route,
)

T, E, K = 20, 8, 2


def normal(*shape, seed=0):
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape), dtype=torch.float32)


Z, BIAS = normal(T, E), normal(E, seed=1)
DENSE = dict(
    logits=Z,
    topk=K,
    use_pre_softmax=False,
    num_groups=None,
    group_topk=None,
    scaling_factor=None,
    score_function="sigmoid",
    expert_bias=BIAS,
)


def dense(**changes):
    return fused_topk_with_score_function(**DENSE | changes)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
def test_indices_are_written_to_the_callers_buffer(dtype, layout):
    z = Z.reshape(4, 5, E)
    buffer = {
        "contiguous": lambda: torch.full((4, 5, K), -7, dtype=dtype),
        "transposed": lambda: torch.full((K, 5, 4), -7, dtype=dtype).permute(2, 1, 0),
        "strided": lambda: torch.full((4, 5, 2 * K), -7, dtype=dtype)[..., ::2],
    }[layout]()
    leaf = z.clone().requires_grad_()
    probs, indices = dense(logits=leaf, topk_indices=buffer)
    assert indices is buffer
    want = route(z, K, score_function="sigmoid", expert_bias=BIAS)
    assert torch.equal(buffer, want.experts.to(dtype))
    assert torch.equal(probs, torch.zeros_like(z).scatter(-1, want.experts.long(), want.weights))
    # Later writes to the buffer do not change the gradient.
    buffer.fill_(0)
    d = normal(4, 5, E, seed=2)
    (gradient,) = torch.autograd.grad(probs, leaf, d)
    again = z.clone().requires_grad_()
    (expected,) = torch.autograd.grad(dense(logits=again)[0], again, d)
    assert torch.equal(gradient, expected) and gradient.abs().sum() > 0


def test_a_map_may_be_changed_before_the_backward_pass():
    leaf = Z.clone().requires_grad_()
    probs, routing_map = dense(logits=leaf)
    routing_map.zero_()
    probs.square().sum().backward()
    assert leaf.grad.abs().sum() > 0


@pytest.mark.parametrize("mode", [None, "two_kernel", "fused_atomic"])
@pytest.mark.parametrize("bounds", [(-1.0, 1.5), torch.tensor([-1.0, 1.5])], ids=["pair", "tensor"])
def test_counts_are_added_to_the_callers_histogram(mode, bounds):
    histogram = torch.arange(E * 5, dtype=torch.int32).reshape(E, 5)
    before = histogram.clone()
    options = dict(qb_histogram=histogram, qb_bin_bounds=bounds, qb_histogram_mode=mode)
    probs, routing_map = dense(**options)
    counts = route(Z, K, score_function="sigmoid", expert_bias=BIAS, qb_bin_bounds=bounds, qb_bins=5).qb_histogram
    assert torch.equal(histogram, before + counts) and counts.sum() == T * E
    dense(**options)
    assert torch.equal(histogram, before + 2 * counts)
    plain = dense()
    assert torch.equal(probs, plain[0]) and torch.equal(routing_map, plain[1])


def test_values_that_mean_unused():
    want = dense()
    for unused in ({"num_groups": 0, "group_topk": -1}, {"scaling_factor": 1.0}, {"use_pre_softmax": True}):
        assert torch.equal(dense(**unused)[0], want[0])
    torch.testing.assert_close(dense(scaling_factor=2.5)[0], 2.5 * want[0])


def test_formats_by_member_value_and_name():
    bits = dense(routing_map_format=RoutingMapFormat.BITMAP_U8)[1]
    assert bits.dtype == torch.uint8 and bits.shape == (T, 1)
    for layout in (1, "bitmap_u8", "BITMAP_U8"):
        assert torch.equal(dense(routing_map_format=layout)[1], bits)
    assert [(m.name, int(m)) for m in RoutingMapFormat] == [("BYTEMAP", 0), ("BITMAP_U8", 1)]


def test_a_scalar_number_of_tokens_stays_on_its_device():
    probs, counts = normal(T, E).softmax(-1), torch.arange(E)
    want = fused_moe_aux_loss(probs, counts, T, E, K, 0.1)
    for dtype in (torch.int16, torch.int32, torch.int64):
        assert torch.equal(fused_moe_aux_loss(probs, counts, torch.tensor(T, dtype=dtype), E, K, 0.1), want)
    assert fused_moe_aux_loss(probs, counts, torch.tensor(-3), E, K, 0.1) == 0


ARGUMENTS = {
    fused_topk_with_score_function: (
        *DENSE, "routing_map_format", "topk_indices", "qb_histogram", "qb_bin_bounds", "qb_histogram_mode",
    ),
    fused_compute_score_for_moe_aux_loss: ("logits", "topk", "score_function", "routing_map_format"),
    fused_moe_aux_loss: ("probs", "tokens_per_expert", "total_num_tokens", "num_experts", "topk", "coeff"),
}  # fmt: skip


@pytest.mark.parametrize("function", ARGUMENTS)
def test_argument_order_is_transformer_engines(function):
    assert tuple(inspect.signature(function).parameters) == ARGUMENTS[function]


INDICES, HISTOGRAM = torch.zeros(T, K, dtype=torch.int32), torch.zeros(E, 4, dtype=torch.int32)
QB = dict(qb_histogram=HISTOGRAM, qb_bin_bounds=(0.0, 1.0))
BAD = [
    (dict(logits=Z.double()), TypeError, "logits: got float64[20, 8], expected float32 or bfloat16 or float16 [..., E]"),
    (dict(logits=Z.numpy()), TypeError, "logits: got float32[20, 8], expected a tensor"),
    (dict(topk=9), ValueError, "topk: got 9, expected an integer in [1, 8]"),
    (dict(topk=True), TypeError, "topk: got bool True"),
    (dict(use_pre_softmax=1), TypeError, "use_pre_softmax: got int 1"),
    (dict(num_groups=3, group_topk=1), ValueError, "num_groups: got 3"),
    (dict(num_groups=4), ValueError, "group_topk: got None"),
    (dict(scaling_factor=float("nan")), ValueError, "scaling_factor: got nan"),
    (dict(scaling_factor=torch.tensor(1.0)), TypeError, "scaling_factor: got float32[]"),
    (dict(score_function="relu"), ValueError, "score_function: got 'relu', expected one of 'softmax'"),
    (dict(score_function="softmax"), ValueError, "expert_bias: got one with score_function 'softmax', expected none"),
    (dict(expert_bias=BIAS[1:]), ValueError, "expert_bias: got float32[7], expected"),
    (dict(expert_bias=BIAS.to("meta")), ValueError, "expert_bias: got a tensor on meta, expected cpu"),
    (dict(routing_map_format="bitmap"), ValueError, "routing_map_format: got 'bitmap', expected a RoutingMapFormat"),
    (dict(routing_map_format=2), ValueError, "routing_map_format: got 2"),
    (dict(routing_map_format=True), ValueError, "routing_map_format: got True"),
    (dict(topk_indices=INDICES[:, :1]), ValueError, "topk_indices: got int32[20, 1], expected"),
    (dict(topk_indices=INDICES.float()), TypeError, "topk_indices: got float32[20, 2], expected int16 or int32 or int64"),
    (dict(topk_indices=INDICES[:1].expand(T, K)), ValueError, "topk_indices: got int32[20, 2] with strides (0, 1)"),
    (
        dict(topk_indices=INDICES.flatten()[: T + 1].as_strided((T, K), (1, 1))), ValueError,
        "topk_indices: got int32[20, 2] with strides (1, 1), expected elements that do not overlap",
    ),
    (dict(topk_indices=INDICES.to("meta")), ValueError, "topk_indices: got a tensor on meta"),
    (dict(topk_indices=INDICES, routing_map_format=1), ValueError, "routing_map_format: got bitmap_u8 together with topk_"),
    (dict(qb_bin_bounds=(0.0, 1.0)), ValueError, "qb_bin_bounds: got one without qb_histogram"),
    (dict(qb_histogram_mode="two_kernel"), ValueError, "qb_histogram_mode: got one without qb_histogram"),
    (dict(qb_histogram=HISTOGRAM), ValueError, "qb_bin_bounds: got None with qb_histogram"),
    (QB | dict(qb_histogram_mode="atomic"), ValueError, "qb_histogram_mode: got 'atomic', expected one of"),
    (QB | dict(qb_histogram=HISTOGRAM.long()), TypeError, "qb_histogram: got int64[8, 4], expected int32"),
    (QB | dict(qb_histogram=HISTOGRAM[1:]), ValueError, "qb_histogram: got int32[7, 4], expected int32 [E=8, bins]"),
    (QB | dict(qb_histogram=HISTOGRAM[:, :0]), ValueError, "qb_histogram: got int32[8, 0]"),
    (QB | dict(qb_histogram=HISTOGRAM[:, :1].expand(E, 4)), ValueError, "qb_histogram: got int32[8, 4] with strides (4, 0)"),
    (QB | dict(qb_bin_bounds=(1.0, 0.0)), ValueError, "qb_bin_bounds: got 1.0, 0.0, expected lower < upper"),
    (QB | dict(expert_bias=None), ValueError, "expert_bias: got None with quantile balancing"),
    (QB | dict(num_groups=2, group_topk=1), ValueError, "num_groups: got 2 with quantile balancing"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=[message[:50] for _, _, message in BAD])
def test_a_bad_argument_is_named(changes, error, message):
    with pytest.raises(error, match="^" + re.escape(message)):
        dense(**changes)


def test_a_short_index_needs_few_experts():
    z = torch.zeros(2, 2**15 + 1)
    with pytest.raises(ValueError, match="topk_indices: got int16 for 32769 experts"):
        dense(logits=z, expert_bias=None, topk_indices=torch.zeros(2, K, dtype=torch.int16))
    probs, _ = dense(logits=z[:, 1:], expert_bias=None, topk_indices=torch.zeros(2, K, dtype=torch.int16))
    assert probs.shape == (2, 2**15)


LOSS = dict(probs=Z, tokens_per_expert=torch.ones(E), total_num_tokens=T, num_experts=E, topk=K, coeff=0.1)
BAD_LOSS = [
    (dict(probs=Z[0]), ValueError, "probs: got float32[8], expected"),
    (dict(tokens_per_expert=torch.ones(E) > 0), TypeError, "tokens_per_expert: got bool[8]"),
    (dict(tokens_per_expert=torch.ones(7)), ValueError, "tokens_per_expert: got float32[7], expected"),
    (dict(total_num_tokens=-1), ValueError, "total_num_tokens: got -1"),
    (dict(total_num_tokens=2.0), TypeError, "total_num_tokens: got float 2.0"),
    (dict(total_num_tokens=torch.tensor(2.0).double()), TypeError, "total_num_tokens: got float64[]"),
    (dict(total_num_tokens=torch.tensor([2])), ValueError, "total_num_tokens: got int64[1]"),
    (dict(num_experts=3), ValueError, "num_experts: got 3, expected a divisor of the 8 columns of probs"),
    (dict(topk=9), ValueError, "topk: got 9"),
    (dict(coeff=1e300), ValueError, "coeff: got 1e+300"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD_LOSS, ids=[message[:50] for _, _, message in BAD_LOSS])
def test_a_bad_argument_of_the_loss_is_named(changes, error, message):
    with pytest.raises(error, match="^" + re.escape(message)):
        fused_moe_aux_loss(**LOSS | changes)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((Z.int(), K, "softmax"), TypeError, "logits: got int32[20, 8]"),
        ((Z, 0, "softmax"), ValueError, "topk: got 0"),
        ((Z, K, None), ValueError, "score_function: got None"),
        ((Z, K, "softmax", "bits"), ValueError, "routing_map_format: got 'bits'"),
    ],
)
def test_a_bad_argument_of_the_auxiliary_scores_is_named(arguments, error, message):
    with pytest.raises(error, match="^" + re.escape(message)):
        fused_compute_score_for_moe_aux_loss(*arguments)
