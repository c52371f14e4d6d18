"""The shared expert: a dense network for every token, in addition to the routed experts."""

import torch
from torch import Tensor

from anabranch.activation import Activation
from anabranch.options import ExpertsOptions
from anabranch.precision import dense_precision_number
from anabranch.torch.binding import check
from anabranch.torch.binding.autocast import as_autocast
from anabranch.torch.layer.gate import logits
from anabranch.torch.layer.moe import flat, unflat
from anabranch.torch.ops.experts import grouped_rows, run_ffn


def shared_expert(
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    *,
    activation: str | Activation = "silu",
    w_gate: Tensor | None = None,
    token_mask: Tensor | None = None,
    w_in_layout: str = "dpf",
    w_out_layout: str = "fd",
    precision: str = "highest",
) -> Tensor:
    """A dense expert for every token, whose output is added to that of `moe`.

        output = sigmoid(<x, w_gate>) * phi(x W_gate, x W_up) W_out        (ungated: act(x W_in) W_out)

    It uses the kernels of the experts, with one expert that owns all rows.

    Args:
      x: [..., D] float32, bfloat16 or float16.
      w_in: [D, 2, S] (gate and up columns) or [D, 1, S]; dtype of x, or float32, as for w_out.
      w_out: [S, D].
      activation: as in `moe`.
      w_gate: [D] or [D, 1] float, the gate of the expert's output; None: no gate.
      token_mask: bool [...]; False marks padding, which gets zero output and gradient even if it contains NaN.
      w_in_layout, w_out_layout: as in `moe`, without E: "pfd" is [2, S, D], "df" [D, S].
      precision: "highest" or "tf32" for float32 x and weights, as in `moe`.

    Returns:
      [..., D], dtype of x. GEMMs accumulate in float32. The gate is computed in float32, and its product with the
      output is rounded once.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not match, or the activation or precision is unknown.

    Gradients: of x, w_in, w_out and w_gate, each in its own dtype; those of float32 weights are not rounded. No
    double backward. Saved for backward: the arguments, h [T, 2 or 1, S] and the gate's logits. Under torch.autocast a
    float32 x is rounded to the autocast dtype first.

    Source: semantics, section 9; DeepSeekMoE (arXiv:2401.06066), the gate is Qwen's.

    >>> w_in, w_out = torch.ones(2, 1, 3), torch.ones(3, 2)
    >>> shared_expert(torch.ones(1, 2), w_in, w_out, activation="relu", w_gate=torch.zeros(2)).tolist()
    [[3.0, 3.0]]
    """
    x = check.tensor("x", as_autocast(x), check.FLOATS, (..., "D"))
    D = ("D", x.shape[-1])
    column = isinstance(w_gate, Tensor) and w_gate.dim() == 2
    w_gate = check.optional_tensor("w_gate", w_gate, check.FLOATS, (D, 1) if column else (D,))
    mask = check.optional_tensor("token_mask", token_mask, check.BOOL, tuple(x.shape[:-1]))
    check.same_device("x", x, w_gate=w_gate, token_mask=mask)
    if mask is not None:  # x is masked, too: 0 * NaN in the gradients of the weights would be NaN
        x = torch.where(mask[..., None], x, 0)
    tokens = grouped_rows("x", flat(x))
    weights = None if w_gate is None else torch.sigmoid(logits(tokens, w_gate.reshape(-1, 1))[:, 0])
    y = dense_expert(
        tokens,
        w_in,
        w_out,
        weights,
        activation=activation,
        w_in_layout=w_in_layout,
        w_out_layout=w_out_layout,
        precision=precision,
    )
    output = unflat(y, x.shape[:-1])
    return output if mask is None else torch.where(mask[..., None], output, 0)


def dense_expert(
    tokens: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    weights: Tensor | None,
    *,
    activation: str | Activation,
    w_in_layout: str,
    w_out_layout: str,
    precision: str,
) -> Tensor:
    """`shared_expert` of tokens [T, D] without a mask, multiplied by weights float32 [T]; None: 1."""
    D, dtypes = ("D", tokens.shape[-1]), tuple(dict.fromkeys((tokens.dtype, torch.float32)))
    given = ExpertsOptions(
        activation=activation, w_in_layout=w_in_layout, w_out_layout=w_out_layout, precision=precision
    )
    layouts = given.layouts()
    w_in = check.tensor("w_in", w_in, dtypes, layouts.shape("w_in", e="", d=D, p="2 or 1", f="S")[1:])
    sizes = layouts.sizes("w_in", (1, *w_in.shape))
    P, S = sizes["p"], sizes["f"]
    if P not in (1, 2):
        gated, plain = (", ".join(layouts.shape("w_in", e="", d="D", p=p, f="S")[1:]) for p in "21")
        raise ValueError(f"w_in: got {check.describe(w_in)}, expected [{gated}] (gate, up) or [{plain}]")
    w_out = check.tensor("w_out", w_out, dtypes, layouts.shape("w_out", e="", f=("S", S), d=D)[1:])
    check.same_device("x", tokens, w_in=w_in, w_out=w_out)
    dense_precision_number(precision)
    rows = torch.full((1,), tokens.shape[0], dtype=torch.int32, device=tokens.device)
    return run_ffn(given.experts(P, 0).network(), tokens, rows, w_in[None], w_out[None], None, None, weights)
