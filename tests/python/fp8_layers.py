"""Compares the layer with precision="fp8" with the oracle, using the bounds of `fp8` for the rows of its plan."""

import types

import numpy as np

import fp8
from anabranch.reference import moe as reference
from anabranch.reference.dispatch import plan
from moe_cases import EXPERT_AXIS
from routed_cases import run_routed


def rows_of(arrays, experts, weights, d_output):
    """(the network on the dispatched rows, the token of each row); rows without an assignment follow the groups."""
    layout = plan(experts, len(arrays["w_in"]))
    used = layout.slot_of_row >= 0
    slot = np.maximum(layout.slot_of_row, 0)
    token = slot // experts.shape[1]
    named = {name: arrays[name] for name in ("w_in", "w_out", "b_in", "b_out") if arrays[name] is not None}
    rows = np.where(used[:, None], arrays["x"][token], 0).astype(arrays["x"].dtype)
    of_rows = np.where(used, weights.reshape(-1)[slot], 0).astype(np.float32)
    d_y = np.where(used[:, None], d_output[token], 0).astype(d_output.dtype)
    given = named | {"rows": rows, "weights": of_rows}
    return types.SimpleNamespace(rows=rows, arrays=given, group_sizes=layout.group_sizes, d_y=d_y), token


def by_token(rows, token, num_tokens):
    """Sums `rows` over the rows of each token."""
    out = np.zeros((num_tokens, rows.shape[1]))
    np.add.at(out, token, rows)
    return out


def assert_layer(arrays, experts, weights, d_output, got, want, options, platform="cpu", sent=False):
    """Checks the output and the gradients of x, of the experts and, if present, of the weights.

    sent: tokens are exchanged as FP8. The output and the gradient of x sum rounded rows, and are rounded themselves.
    """
    net, token = rows_of(arrays, experts, weights, d_output)
    delta, early = fp8.DELTA[platform], options.get("weight_early", False)
    bound_options = dict(weight_early=early, delta=delta, sent=sent)
    moved = fp8.bounds(net, options["activation"], options["fp8_scales"], **bound_options)._asdict()
    dtype, T = arrays["x"].dtype, len(experts)
    whole = [slice(0, T)]
    for name, of_rows in (("output", "y"), ("x", "rows")):
        # The sum of K rows is float32 until its rounding.
        moved_tokens = by_token(moved[of_rows], token, T) + delta * np.abs(want[name])
        assert str(got[name].dtype) == str(dtype)
        fp8.assert_within(got[name], want[name], moved_tokens, dtype, 2, name, whole)
    for name in EXPERT_AXIS:
        if name in moved and got.get(name) is not None:
            each = [slice(e, e + 1) for e in range(len(arrays["w_in"]))]
            assert got[name].dtype == arrays[name].dtype
            fp8.assert_within(got[name], want[name], moved[name], dtype, fp8.ROUNDINGS[name], name, each)
    if "weights" in got:
        moved_weights = np.zeros(weights.size)
        slot = plan(experts, len(arrays["w_in"])).slot_of_row
        moved_weights[slot[slot >= 0]] = moved["weights"][slot >= 0]
        fp8.assert_within(
            got["weights"], want["weights"], moved_weights.reshape(weights.shape), dtype, 0, "weights", whole
        )


def check_routed(arrays, platform="cpu", quantized=None, put=None, sent=False, kept=None, **options):
    """Compares `routed_experts` with the oracle: outputs, counts, and every gradient for one random cotangent.

    sent: tokens are exchanged as FP8. kept: bool [T, K], the assignments within capacity; None: all.
    """
    given = options | ({} if quantized is None else {"quantized": quantized})
    (output, counts, dropped), gradients, d_output = run_routed(arrays, precision="fp8", put=put, **given)
    names = ("activation", "weight_early", "fp8_scales")
    settings = {name: options[name] for name in names if name in options}
    found = reference.routed_experts(**arrays, **settings, kept=kept)
    np.testing.assert_array_equal(counts, found.tokens_per_expert)
    assert int(dropped) == int(found.dropped)
    dtype = arrays["x"].dtype
    backward_options = settings | dict(kept=kept, saved_dtype=dtype, sent_dtype=dtype if sent else None)
    want = reference.routed_experts_backward(**arrays, **backward_options, d_output=d_output)
    got = {name: np.asarray(array) for name, array in gradients.items()} | {"output": np.asarray(output)}
    experts, weights = arrays["experts"], np.asarray(arrays["weights"], np.float32)
    experts = experts if kept is None else np.where(kept, experts, -1)
    assert_layer(arrays, experts, weights, d_output, got, want | {"output": found.output}, settings, platform, sent)
    return output, gradients
