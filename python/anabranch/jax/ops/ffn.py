"""The rules of the experts' feed-forward network: forward and backward on rows, and fused with the sum per token.

The names of the fused rules end in `_by_slot`.

Sizes: T tokens, R rows, E experts, K experts per token, D model width, F expert width, P parts of w_in: 2 (gate and up)
for a gated expert, 1 for an ungated one.
"""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from anabranch.activation import Activation
from anabranch.jax.binding import ffi, workspaces
from anabranch.jax.ops.quantized import QuantizedExperts, QuantizedOperand, for_pass
from anabranch.options import ExpertsConfig
from anabranch.precision import BLOCK

SILU = Activation("silu")


@dataclasses.dataclass(frozen=True)
class FfnConfig(ExpertsConfig):
    """The options of the feed-forward network, including those that only this front end has."""

    activation: Activation = SILU
    skip_rest: bool = False
    """The fused rules may leave rows without an assignment undefined, because nothing reads them."""

    @classmethod
    def of(cls, experts: ExpertsConfig, **own: Any) -> Self:
        """Adds the options of this class to those that `ExpertsOptions.experts` returns."""
        return cls(**{field.name: getattr(experts, field.name) for field in dataclasses.fields(experts)}, **own)

    def attributes(self) -> dict[str, Any]:
        """The options that forward and backward calls share."""
        return {name: value for name, value in super().attributes().items() if name != "fp8_scales" or self.fp8}

    def sizes(self, w_in: jax.Array) -> tuple[int, int, int, int]:
        """(E, D, P, F) of w_in."""
        sizes = self.layouts.sizes("w_in", w_in.shape)
        return sizes["e"], sizes["d"], sizes["p"], sizes["f"]

    def orders(self) -> dict[str, str]:
        """The axis orders of all arrays that are not in the default layout, for `ffi.call`."""
        names = ("w_in", "d_w_in", "w_out", "d_w_out", "h", "dh", "b_in", "d_b_in")
        orders = {name: "".join(map(str, self.layouts.order(name))) for name in names}
        return {name: order for name, order in orders.items() if list(order) != sorted(order)}


class FfnOperands(NamedTuple):
    """The operands of the forward rule and, with h, of the backward rule. Shapes are those of the default layouts."""

    x: jax.Array
    """[T, D] with slot_of_row, else [R, D]."""
    slot_of_row: jax.Array | None
    """int32[R]: t*K + k, or -1 for padding. None: x holds the rows."""
    group_sizes: jax.Array | None
    """int32[E]; None only in gradients."""
    w_in: jax.Array
    """[E, D, P, F]."""
    w_out: jax.Array
    """[E, F, D]."""
    b_in: jax.Array | None
    """[E, P, F]."""
    b_out: jax.Array | None
    """[E, D]."""
    weights: jax.Array | None
    """float [T, K] with slot_of_row, else [R]. None: 1."""
    quantized: QuantizedExperts | None = None
    """With FP8; the fused rules require it to contain the operands of their pass."""
    x_quantized: QuantizedOperand | None = None
    """x quantised, which the fused forward rule reads instead of x; None: the rule quantises x."""

    def by_name(self) -> dict[str, jax.Array | None]:
        """The operands of a call of either pass, by their C names."""
        named = {name: array for name, array in self._asdict().items() if name not in ("quantized", "x_quantized")}
        return named | _c_names(self.quantized)


def _c_names(quantized: QuantizedExperts | None) -> dict[str, jax.Array | None]:
    """The quantised weights of one pass, by their C names."""
    if quantized is None:
        return {}
    q = quantized
    return {
        "w_in_q": q.w_in_transposed if q.w_in is None else q.w_in,
        "w_in_scales": q.w_in_scales,
        "w_out_q": q.w_out_transposed if q.w_out is None else q.w_out,
        "w_out_scales": q.w_out_scales,
    }


def with_quantized_weights(config: FfnConfig, operands: FfnOperands, *, backward: bool) -> FfnOperands:
    """The operands with the quantised weights of a pass with FP8; those that are not given are quantised here."""
    if not config.fp8:
        return operands
    o = operands
    quantized = for_pass(o.quantized, o.w_in, o.w_out, config.layouts, config.fp8_scales, backward=backward)
    return operands._replace(quantized=quantized)


class MatrixGradient(NamedTuple):
    """Gradients of the experts' matrices and of their biases, None if there are no biases."""

    w: jax.Array
    """[E, D, P, F] or [E, F, D]."""
    b: jax.Array | None
    """[E, P, F] or [E, D]."""


class FfnGradients(NamedTuple):
    """The result of the backward rule."""

    rows: jax.Array
    """[R, D], the gradient of the rows; dtype of x."""
    up: MatrixGradient
    """Gradients of w_in and b_in."""
    down: MatrixGradient
    """Gradients of w_out and b_out."""
    weights: jax.Array | None
    """Shape and dtype of the weights; None without weights."""


def _like(array: jax.Array | None, dtype: Any = None) -> jax.ShapeDtypeStruct | None:
    return None if array is None else jax.ShapeDtypeStruct(array.shape, dtype or array.dtype)


def ffn_forward(config: FfnConfig, operands: FfnOperands, *, save_h: bool) -> tuple[jax.Array, jax.Array | None]:
    """The forward rule: (y [R, D], h [R, P, F] if save_h), both with the dtype of x; padding rows are zero.

    Weights multiply y, or `a` before W_out with weight_early; pass none if combine applies them.
    """
    operands = with_quantized_weights(config, operands, backward=False)
    results = _forward(config, operands, operands.by_name(), "y", operands.x.shape[1], save_h=save_h)
    return results["y"], results["h"]


def _forward(
    config: FfnConfig, operands: FfnOperands, inputs: dict[str, Any], result: str, columns: int, *, save_h: bool
) -> dict[str, Any]:
    """Computes `result`, "y" or "a", with this many columns, and h. With FP8 `a` is quantised and has scales."""
    x, w_in, slots = operands.x, operands.w_in, operands.slot_of_row
    R = x.shape[0] if slots is None else slots.shape[0]
    _, _, P, F = config.sizes(w_in)
    quantised = config.fp8 and result == "a"
    return ffi.call(
        "ab_xla_expert_ffn_forward",
        inputs,
        {
            result: jax.ShapeDtypeStruct((R, columns), jnp.float8_e4m3fn if quantised else x.dtype),
            "a_scales": jax.ShapeDtypeStruct((R, F // BLOCK), jnp.float32) if quantised else None,
            "h": jax.ShapeDtypeStruct(config.layouts.shape("h", r=R, p=P, f=F), x.dtype) if save_h else None,
        },
        workspace=_forward_workspace(config, operands, R, F, result),
        orders=config.orders(),
        **config.attributes(),
        weight_early=int(config.weight_early),
        skip_rest=int(config.skip_rest and result == "a"),
    )


def _forward_workspace(config: FfnConfig, operands: FfnOperands, R: int, F: int, result: str) -> int:
    x = operands.x
    x_bytes = workspaces.fp8_rows(*x.shape) if config.fp8 and operands.x_quantized is None else 0
    if result == "a":
        return x_bytes
    return x_bytes + (workspaces.fp8_rows(R, F) if config.fp8 else workspaces.ffn_forward(R, F, x.dtype))


def ffn_backward(config: FfnConfig, operands: FfnOperands, h: jax.Array, d_out: jax.Array) -> FfnGradients:
    """The backward rule, the same for early and late weights.

    Args:
      config: as in the forward pass.
      operands: as in the forward pass, and always with weights, even if combine applied them.
      h: [R, P, F], saved by the forward rule. Its buffer is reused.
      d_out: float [T, D] with slot_of_row, else [R, D]: the cotangent of the weighted output, of any float dtype.
    """
    operands = with_quantized_weights(config, operands, backward=True)
    x, weights, w_in = operands.x, operands.weights, operands.w_in
    results = _backward(
        config,
        operands,
        d_out,
        {"h": h},
        {
            "dh": _like(h),
            "dx_rows": jax.ShapeDtypeStruct((h.shape[0], x.shape[1]), x.dtype),
            "d_weights": _like(weights, jnp.float32),
            "d_w_in": _like(operands.w_in, x.dtype),
            "d_w_out": _like(operands.w_out, x.dtype),
            "d_b_in": _like(operands.b_in),
            "d_b_out": _like(operands.b_out),
        },
        workspaces.ffn_backward(
            h.shape[0],
            config.sizes(w_in),
            x.dtype,
            d_out.dtype,
            weighted_a=True,
            d_weights=True,
            d_w_out=True,
            d_w_in=True,
        )
        + (workspaces.fp8_rows(h.shape[0], h.size // max(h.shape[0], 1)) if config.fp8 else 0),
    )
    d_weights = None if weights is None else results["d_weights"].astype(weights.dtype)
    return FfnGradients(
        results["dx_rows"],
        MatrixGradient(results["d_w_in"], results["d_b_in"]),
        MatrixGradient(results["d_w_out"], results["d_b_out"]),
        d_weights,
    )


def _backward(
    config: FfnConfig,
    operands: FfnOperands,
    d_out: jax.Array | None,
    intermediates: dict[str, jax.Array],
    results: dict[str, Any],
    workspace: int,
    skip_rest: int = 0,
) -> dict[str, Any]:
    """Computes the results from h or from the results of an earlier call; dh reuses the buffer of h."""
    inputs = operands.by_name()
    del inputs["b_in"]
    if config.fp8 and d_out is not None and "h" in intermediates and "d_out_q" not in intermediates:
        workspace += workspaces.fp8_rows(*d_out.shape)
    return ffi.call(
        "ab_xla_expert_ffn_backward",
        {**inputs, "d_out": d_out, **intermediates},
        results,
        aliases={"h": "dh"} if "h" in intermediates else None,
        workspace=workspace,
        orders=config.orders(),
        **config.attributes(),
        skip_rest=skip_rest,
    )


# ---------------------------------------------------------------- fused with the sum per token


@dataclasses.dataclass(frozen=True)
class SlotGemm:
    """A grouped GEMM whose rows [R, N] are not stored: x w[e] + bias[e], or x w[e]^T, on the rows of expert e.

    Only the sum per token is stored. A GPU computes the rows in chunks of columns, so they need little memory.
    """

    x: jax.Array
    """[R, D]"""
    w: jax.Array | None
    """[E, D, N]; with transpose_w [E, N, D]; None with w_quantized."""
    group_sizes: jax.Array
    """int32 [E]"""
    slot_of_row: jax.Array
    """int32 [R]: t*K + k, or -1 for padding."""
    precision: int
    """See anabranch.precision."""
    bias: jax.Array | None = None
    """[E, N]"""
    early_weights: jax.Array | None = None
    """float [T, K]: x is already multiplied by them; they multiply the bias."""
    transpose_w: bool = False
    skip_rest: bool = False
    """See FfnConfig."""
    backward: bool = False
    """Whether the rows are gradients, which determines the bound on their memory."""
    x_scales: jax.Array | None = None
    """float32 [R, D/128]: x is e4m3; requires w_quantized."""
    w_quantized: QuantizedOperand | None = None
    """e4m3 [E, N, D], and scales in the order of w."""
    row_dtype: Any = None
    """Dtype in which rows are sent; None: that of x."""

    @property
    def dtype(self) -> Any:
        """Dtype in which rows are sent."""
        return self.x.dtype if self.row_dtype is None else self.row_dtype

    def sum(
        self, row_of_slot: jax.Array, weights: jax.Array | None, dtype: Any, addend: jax.Array | None = None
    ) -> jax.Array:
        """`dispatch.gather_sum` of the rows, [T, N]: sum_k weights[t, k] rows[row_of_slot[t, k]] + addend[t].

        Weights are [T, K]; they must be None if x has early weights. If the addend has the dtype of the sums, its
        buffer is reused for them.
        """
        assert weights is None or self.early_weights is None
        (R, D), E = self.x.shape, self.group_sizes.shape[0]
        if self.w_quantized is not None:
            N = self.w_quantized.q.shape[1]
        else:
            assert self.w is not None
            N = self.w.shape[1 if self.transpose_w else 2]
        # With quantised operands the rows are rounded to the dtype of their sums.
        row_dtype = self.x.dtype if self.w_quantized is None else dtype
        results = ffi.call(
            "ab_xla_grouped_matmul_combine",
            {
                "x": self.x,
                "w": self.w,
                "group_sizes": self.group_sizes,
                "bias": None if self.bias is None else self.bias.astype(row_dtype),
                "x_scales": self.x_scales,
                "w_q": self.w_quantized.q if self.w_quantized is not None else None,
                "w_scales": self.w_quantized.scales if self.w_quantized is not None else None,
                "slot_of_row": self.slot_of_row,
                "row_of_slot": row_of_slot,
                "weights": weights if self.early_weights is None else self.early_weights,
                "addend": addend,
            },
            {"out": jax.ShapeDtypeStruct((row_of_slot.shape[0], N), dtype)},
            aliases={"addend": "out"} if addend is not None and addend.dtype == dtype else None,
            workspace=workspaces.grouped_matmul_combine(R, E, D, N, self.x.dtype, backward=self.backward),
            transpose_w=int(self.transpose_w),
            weight_early=int(self.early_weights is not None),
            skip_rest=int(self.skip_rest),
            backward=int(self.backward),
            precision=self.precision,
        )
        out: jax.Array = results["out"]
        return out


class IntermediateGradients(NamedTuple):
    """The result of `ffn_backward_by_slot`."""

    dh: jax.Array
    """[R, P, F], in the buffer of h."""
    weighted_a: jax.Array
    """[R, F]: w a. Both have the dtype of x."""
    down: MatrixGradient | None
    """Gradients of w_out and b_out; None: to be computed by `w_out_gradient`."""
    weights: jax.Array
    """Shape and dtype of the weights."""
    dh_quantized: QuantizedOperand | None = None
    """dh quantised, with scales [R, P, F/128]; None without FP8."""


def ffn_forward_by_slot(config: FfnConfig, operands: FfnOperands, *, save_h: bool) -> tuple[SlotGemm, jax.Array | None]:
    """The forward rule with slot_of_row, for rows that are then summed per token: (y as a grouped GEMM, h).

    Early weights are those of the operands; late weights are passed to the sum.
    """
    assert operands.slot_of_row is not None and operands.group_sizes is not None
    inputs = operands.by_name() | dict.fromkeys(("w_out", "b_out", "w_out_q", "w_out_scales"))
    if operands.x_quantized is not None:
        inputs |= {"x": None, "x_q": operands.x_quantized.q, "x_scales": operands.x_quantized.scales}
    F = config.sizes(operands.w_in)[3]
    results = _forward(config, operands, inputs, "a", F, save_h=save_h)
    y = SlotGemm(
        results["a"],
        None if config.fp8 else operands.w_out,
        operands.group_sizes,
        operands.slot_of_row,
        config.precision,
        operands.b_out,
        operands.weights,
        transpose_w=config.layouts.w_out == "df" and not config.fp8,
        skip_rest=config.skip_rest,
        x_scales=results["a_scales"],
        w_quantized=None if operands.quantized is None else operands.quantized.operand("w_out", transposed=True),
        row_dtype=operands.x.dtype,
    )
    return y, results["h"]


def ffn_backward_by_slot(
    config: FfnConfig,
    operands: FfnOperands,
    h: jax.Array,
    d_out: jax.Array,
    w_out_dtype: Any = None,
    d_out_quantized: QuantizedOperand | None = None,
) -> IntermediateGradients:
    """The first part of `ffn_backward` with slot_of_row, for gradients of rows that are then summed per token.

    The caller then computes the sum of `rows_gradient`, `w_in_gradient`, and `w_out_gradient` if w_out_dtype is None.
    In this order, and with the gradient of w_out computed here, temporaries and w a can use the memory of the gradient
    of w_in.

    Args:
      config: as in the forward pass.
      operands: as for `ffn_backward`.
      h: as for `ffn_backward`.
      d_out: as for `ffn_backward`.
      w_out_dtype: dtype of the gradient of w_out, that of x or float32; None: the gradient is not computed here.
      d_out_quantized: d_out quantised, an operand of da'; None: it is quantised here.
    """
    assert operands.slot_of_row is not None and operands.group_sizes is not None and operands.weights is not None
    R, (E, D, P, F), dtype = h.shape[0], config.sizes(operands.w_in), operands.x.dtype
    has_w_out = w_out_dtype is not None
    intermediates = {"h": h}
    if d_out_quantized is not None:
        intermediates |= {"d_out_q": d_out_quantized.q, "d_out_scales": d_out_quantized.scales}
    results = _backward(
        config,
        operands,
        d_out,
        intermediates,
        {
            "dh": _like(h),
            "dh_q": jax.ShapeDtypeStruct((R, P, F), jnp.float8_e4m3fn) if config.fp8 else None,
            "dh_scales": jax.ShapeDtypeStruct((R, P, F // BLOCK), jnp.float32) if config.fp8 else None,
            "weighted_a": jax.ShapeDtypeStruct((R, F), dtype),
            "d_w_out": _like(operands.w_out, w_out_dtype) if has_w_out else None,
            "d_b_out": _like(operands.b_out) if has_w_out else None,
            "d_weights": _like(operands.weights, jnp.float32),
        },
        workspaces.ffn_backward(R, (E, D, P, F), dtype, d_out.dtype, d_weights=True, d_w_out=has_w_out),
        skip_rest=int(config.skip_rest),
    )
    return IntermediateGradients(
        results["dh"],
        results["weighted_a"],
        MatrixGradient(results["d_w_out"], results["d_b_out"]) if has_w_out else None,
        results["d_weights"].astype(operands.weights.dtype),
        QuantizedOperand(results["dh_q"], results["dh_scales"]) if config.fp8 else None,
    )


def w_out_gradient(
    config: FfnConfig, operands: FfnOperands, weighted_a: jax.Array, d_out: jax.Array, dtype: Any
) -> MatrixGradient:
    """The gradients of w_out, with `dtype`, that of x or float32, and of b_out.

    Args:
      config: as for `ffn_backward_by_slot`.
      operands: as for `ffn_backward_by_slot`.
      weighted_a: [R, F], from that call.
      d_out: as for `ffn_backward_by_slot`.
      dtype: dtype of the gradient of w_out.
    """
    R = weighted_a.shape[0]
    results = _backward(
        config,
        operands,
        d_out,
        {"weighted_a": weighted_a},
        {"d_w_out": _like(operands.w_out, dtype), "d_b_out": _like(operands.b_out)},
        workspaces.ffn_backward(R, config.sizes(operands.w_in), operands.x.dtype, d_out.dtype, d_w_out=True),
    )
    return MatrixGradient(results["d_w_out"], results["d_b_out"])


def rows_gradient(
    config: FfnConfig, operands: FfnOperands, dh: jax.Array, dh_quantized: QuantizedOperand | None = None
) -> SlotGemm:
    """The gradient of the rows, [R, D], from dh of `ffn_backward_by_slot`, with FP8 from its quantised dh."""
    assert operands.slot_of_row is not None and operands.group_sizes is not None
    E, D, P, F = config.sizes(operands.w_in)
    R, row_arguments = dh.shape[0], (operands.group_sizes, operands.slot_of_row, config.precision)
    options: dict[str, Any] = dict(skip_rest=config.skip_rest, backward=True, row_dtype=operands.x.dtype)
    if dh_quantized is not None:
        assert operands.quantized is not None
        q, scales = operands.quantized.w_in, operands.quantized.w_in_scales
        assert q is not None and scales is not None
        return SlotGemm(
            dh_quantized.q.reshape(R, P * F),
            None,
            *row_arguments,
            transpose_w=True,
            x_scales=dh_quantized.scales.reshape(R, P * F // BLOCK),
            w_quantized=QuantizedOperand(q.reshape(E, D, P * F), scales.reshape(E, D // BLOCK, P * F // BLOCK)),
            **options,
        )
    transposed = config.layouts.w_in.startswith("d")  # w_in is then [E, D, P F]
    w_in = operands.w_in.reshape((E, D, P * F) if transposed else (E, P * F, D))
    return SlotGemm(dh.reshape(R, P * F), w_in, *row_arguments, transpose_w=transposed, **options)


def w_in_gradient(config: FfnConfig, operands: FfnOperands, dh: jax.Array, dtype: Any) -> MatrixGradient:
    """The gradients of w_in, with `dtype`, that of x or float32, and of b_in, from dh [R, P, F]."""
    results = _backward(
        config,
        operands,
        None,
        {"dh": dh},
        {"d_w_in": _like(operands.w_in, dtype), "d_b_in": _like(operands.b_in)},
        workspaces.ffn_backward(
            dh.shape[0], config.sizes(operands.w_in), operands.x.dtype, operands.x.dtype, d_w_in=True
        ),
    )
    return MatrixGradient(results["d_w_in"], results["d_b_in"])
