"""The rules of the experts' feed-forward network: forward and backward on rows, and fused with the sum per token.

The names of the fused rules end in `_by_slot`.

Sizes: T tokens, R rows, E experts, K experts per token, D model width, F expert width, P parts of w_in: 2 (gate and up)
for a gated expert, 1 for an ungated one.
"""

import dataclasses
from collections.abc import Collection
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from anabranch.activation import Activation
from anabranch.jax.binding import ffi, workspaces
from anabranch.jax.ops.packed import fp4_names, fp8_for_pass, weight_shape
from anabranch.jax.ops.quantized import E4M3, QuantizedExperts, QuantizedOperand, for_pass
from anabranch.lora import Lora, operand_fields
from anabranch.options import ExpertsConfig
from anabranch.precision import BLOCK

SILU = Activation("silu")


@dataclasses.dataclass(frozen=True)
class FfnConfig(ExpertsConfig):
    """The options of the feed-forward network, including those that only this front end has."""

    activation: Activation = SILU
    skip_rest: bool = False
    """The fused rules may leave rows without an assignment undefined, because nothing reads them."""
    float32_factors: tuple[str, ...] = ()
    """Factors, by the names of operands, whose gradients are float32 even if the rules get rounded factors."""

    @classmethod
    def of(cls, experts: ExpertsConfig, **own: Any) -> Self:
        """Adds the options of this class to those that `ExpertsOptions.experts` returns."""
        return cls(**{field.name: getattr(experts, field.name) for field in dataclasses.fields(experts)}, **own)

    def attributes(self) -> dict[str, Any]:
        """The options that forward and backward calls share."""
        return {name: value for name, value in super().attributes().items() if name != "fp8_scales" or self.fp8}

    def sizes(self, w_in: jax.Array) -> tuple[int, int, int, int]:
        """(E, D, P, F) of w_in."""
        sizes = self.layouts.sizes("w_in", weight_shape(w_in))
        return sizes["e"], sizes["d"], sizes["p"], sizes["f"]

    def gradient_dtype(self, name: str, operand: jax.Array) -> Any:
        """The dtype of the gradient of an operand."""
        return jnp.float32 if name in self.float32_factors else operand.dtype

    def orders(self) -> dict[str, str]:
        """The axis orders of all arrays that are not in the default layout, for `ffi.call`."""
        names = ("w_in", "d_w_in", "w_out", "d_w_out", "h", "dh", "b_in", "d_b_in")
        orders = {name: "".join(map(str, self.layouts.order(name))) for name in names}
        orders |= {f"{name}_block_scales": orders[name] for name in ("w_in", "w_out")}
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
    lora: Lora | None = None
    """The factors of the adapters."""
    w_in_block_scales: jax.Array | None = None
    """Block scales if w_in is packed; w_in is then its codes or q. The next field is that of w_out."""
    w_out_block_scales: jax.Array | None = None

    def by_name(self) -> dict[str, jax.Array | None]:
        """The operands of a call of either pass, by their C names."""
        others = ("quantized", "x_quantized", "lora")
        named = {name: array for name, array in self._asdict().items() if name not in others}
        for name in ("w_in", "w_out"):  # with FP8 the blocks are quantised weights, and w_in determines sizes only
            is_fp8 = getattr(named[name], "dtype", None) == E4M3  # `needed` has bools
            if is_fp8 and named[f"{name}_block_scales"] is None:
                named[name] = None
        return named | _c_names(self.quantized) | operand_fields(self.lora)

    def rank(self, projection: str) -> int:
        """The rank of the adapter of "in" or "out"; 0: there is none."""
        a = None if self.lora is None else getattr(self.lora, f"a_{projection}")
        return 0 if a is None else int(a.shape[2])


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
    if o.w_in_block_scales is not None or o.w_out_block_scales is not None:
        quantized = fp8_for_pass(o, config.layouts, config.fp8_scales, backward=backward)
        return o._replace(quantized=quantized, w_in_block_scales=None, w_out_block_scales=None)
    quantized = for_pass(o.quantized, o.w_in, o.w_out, config.layouts, config.fp8_scales, backward=backward)
    return operands._replace(quantized=quantized)


#: Operands whose gradients are computed from dh, together with dh, and from w a and d_out.
UP = ("w_in", "b_in")
WITH_DH = ("lora_a_in", "lora_b_in")
DOWN = ("w_out", "b_out", "lora_a_out", "lora_b_out")


class Saved(NamedTuple):
    """What the forward rule computes for the backward rule; fields are None without a gradient."""

    h: jax.Array | None
    """[R, P, F]."""
    u: jax.Array | None = None
    """[R, r], of the adapter of w_in."""


def _like(array: jax.Array | None, dtype: Any = None) -> jax.ShapeDtypeStruct | None:
    return None if array is None else jax.ShapeDtypeStruct(array.shape, dtype or array.dtype)


def _gradients_like(
    config: FfnConfig, operands: FfnOperands, names: Collection[str], w_in_dtype: Any, w_out_dtype: Any
) -> dict[str, jax.ShapeDtypeStruct | None]:
    """The gradients of parameters as results of a call, by their C names."""
    dtypes = {"w_in": w_in_dtype, "w_out": w_out_dtype}
    arrays = operands.by_name()
    given = {name: array for name in names if (array := arrays[name]) is not None}
    return {f"d_{name}": _like(a, dtypes.get(name) or config.gradient_dtype(name, a)) for name, a in given.items()}


def _wanted(operands: FfnOperands, wanted: Collection[str]) -> set[str]:
    """The wanted gradients of operands that are given."""
    return {name for name, array in operands.by_name().items() if array is not None and name in wanted}


def _parameters(results: dict[str, Any]) -> dict[str, jax.Array]:
    """The gradients of parameters among the results of a call, by the names of the parameters."""
    names = (*UP, *WITH_DH, *DOWN)
    return {name: results[f"d_{name}"] for name in names if results.get(f"d_{name}") is not None}


def ffn_forward(config: FfnConfig, operands: FfnOperands, *, save: bool) -> tuple[jax.Array, Saved]:
    """The forward rule: (y [R, D] with the dtype of x, the residuals if `save`); padding rows are zero.

    Weights multiply y, or `a` before W_out with weight_early; pass none if combine applies them.
    """
    operands = with_quantized_weights(config, operands, backward=False)
    results = _forward(config, operands, operands.by_name(), "y", operands.x.shape[1], save=save)
    return results["y"], Saved(results["h"], results["lora_u"])


def _forward(
    config: FfnConfig, operands: FfnOperands, inputs: dict[str, Any], result: str, columns: int, *, save: bool
) -> dict[str, Any]:
    """Computes `result`, "y" or "a", with this many columns, and the residuals.

    With FP8 `a` is quantised and has scales. With an adapter of w_out, lora_z comes with `a`.
    """
    x, w_in, slots = operands.x, operands.w_in, operands.slot_of_row
    R = x.shape[0] if slots is None else slots.shape[0]
    _, _, P, F = config.sizes(w_in)
    quantised = config.fp8 and result == "a"
    r, q = operands.rank("in"), operands.rank("out")
    return ffi.call(
        "ab_xla_expert_ffn_forward",
        inputs,
        {
            result: jax.ShapeDtypeStruct((R, columns), jnp.float8_e4m3fn if quantised else x.dtype),
            "a_scales": jax.ShapeDtypeStruct((R, F // BLOCK), jnp.float32) if quantised else None,
            "h": jax.ShapeDtypeStruct(config.layouts.shape("h", r=R, p=P, f=F), x.dtype) if save else None,
            "lora_u": jax.ShapeDtypeStruct((R, r), x.dtype) if save and r else None,
            "lora_z": jax.ShapeDtypeStruct((R, q), x.dtype) if result == "a" and q else None,
        },
        workspace=_forward_workspace(config, operands, R, F, result),
        orders=config.orders(),
        fp4=fp4_names(inputs),
        **config.attributes(),
        weight_early=int(config.weight_early),
        skip_rest=int(config.skip_rest and result == "a"),
    )


def _forward_workspace(config: FfnConfig, operands: FfnOperands, R: int, F: int, result: str) -> int:
    x = operands.x
    x_bytes = workspaces.fp8_rows(*x.shape) if config.fp8 and operands.x_quantized is None else 0
    x_bytes += _lora_workspace(config, operands, R) + _unpacked_workspace(config, operands, R)
    if config.fp8 and operands.rank("out"):  # the adapter reads `a` in the dtype of x
        x_bytes += workspaces.ffn_forward(R, F, x.dtype)
    if result == "a":
        return x_bytes
    return x_bytes + (workspaces.fp8_rows(R, F) if config.fp8 else workspaces.ffn_forward(R, F, x.dtype))


def _unpacked_workspace(config: FfnConfig, operands: FfnOperands, R: int, *, backward: bool = False) -> int:
    """The workspace for packed weights in a call of either pass."""
    E, D, P, F = config.sizes(operands.w_in)
    scales = (operands.w_in_block_scales, P * F, D), (operands.w_out_block_scales, D, F)
    return max(
        0 if given is None else workspaces.unpacked(R, E, N, C, operands.x.dtype, backward=backward)
        for given, N, C in scales
    )


def _lora_workspace(config: FfnConfig, operands: FfnOperands, R: int, *, backward: bool = False) -> int:
    """The workspace of the adapters in a call of either pass."""
    E, D, P, F = config.sizes(operands.w_in)
    return sum(
        workspaces.lora(R, E, M, N, operands.rank(projection), operands.x.dtype, backward=backward)
        for projection, M, N in (("in", D, P * F), ("out", F, D))
    )


def ffn_backward(
    config: FfnConfig, operands: FfnOperands, saved: Saved, d_out: jax.Array, wanted: Collection[str]
) -> dict[str, jax.Array]:
    """The backward rule, the same for early and late weights.

    Args:
      config: as in the forward pass.
      operands: as in the forward pass, and always with weights, even if combine applied them.
      saved: from the forward rule. The buffer of h is reused.
      d_out: float [T, D] with slot_of_row, else [R, D]: the cotangent of the weighted output, of any float dtype.
      wanted: the operands whose gradients are computed: "x" (of the rows), "weights", and names in UP, WITH_DH and
        DOWN.

    Returns:
      Gradients by operand: of "x" [R, D], of parameters and weights in their own shapes and dtypes.
    """
    operands = with_quantized_weights(config, operands, backward=True)
    x, weights, h = operands.x, operands.weights, saved.h
    assert h is not None
    wanted = _wanted(operands, wanted)
    needs_dh, needs_a = bool({"x", *UP, *WITH_DH} & wanted), bool(({*DOWN} - {"b_out"}) & wanted)
    called = {
        "dh": _like(h) if needs_dh else None,
        "dx_rows": jax.ShapeDtypeStruct((h.shape[0], x.shape[1]), x.dtype) if "x" in wanted else None,
        "d_weights": _like(weights, jnp.float32) if "weights" in wanted else None,
        **_gradients_like(config, operands, [n for n in (*UP, *WITH_DH, *DOWN) if n in wanted], x.dtype, x.dtype),
    }
    if not any(result is not None for result in called.values()):
        return {}
    results = _backward(
        config,
        operands,
        d_out,
        {"h": h, "lora_u": saved.u if "lora_b_in" in wanted else None},
        called,
        workspaces.ffn_backward(
            h.shape[0],
            config.sizes(operands.w_in),
            x.dtype,
            d_out.dtype,
            weighted_a=needs_a,
            d_weights="weights" in wanted,
            d_w_out=bool({"w_out", "b_out"} & wanted),
            d_w_in=bool({"w_in", "b_in"} & wanted),
        )
        + (workspaces.fp8_rows(h.shape[0], h.size // max(h.shape[0], 1)) if config.fp8 and "x" in wanted else 0),
    )
    gradients = _parameters(results)
    if results.get("dx_rows") is not None:
        gradients["x"] = results["dx_rows"]
    if weights is not None and results.get("d_weights") is not None:
        gradients["weights"] = results["d_weights"].astype(weights.dtype)
    return gradients


def _backward(
    config: FfnConfig,
    operands: FfnOperands,
    d_out: jax.Array | None,
    intermediates: dict[str, jax.Array | None],
    results: dict[str, Any],
    workspace: int,
    skip_rest: int = 0,
) -> dict[str, Any]:
    """Computes the results from h or from the results of an earlier call; dh reuses the buffer of h."""
    inputs = operands.by_name()
    del inputs["b_in"]
    slots = operands.slot_of_row
    R = operands.x.shape[0] if slots is None else slots.shape[0]
    workspace += _lora_workspace(config, operands, R, backward=True)
    workspace += _unpacked_workspace(config, operands, R, backward=True)
    if config.fp8 and d_out is not None and "h" in intermediates and "d_out_q" not in intermediates:
        workspace += workspaces.fp8_rows(*d_out.shape)
    return ffi.call(
        "ab_xla_expert_ffn_backward",
        {**inputs, "d_out": d_out, **intermediates},
        results,
        aliases={"h": "dh"} if "h" in intermediates and results.get("dh") is not None else None,
        workspace=workspace,
        orders=config.orders(),
        fp4=fp4_names(inputs),
        **config.attributes(),
        skip_rest=skip_rest,
    )


# ---------------------------------------------------------------- fused with the sum per token


class Returning(NamedTuple):
    """Sums that return to their ranks while they are computed, in a sequence of calls (binding/sequence.py)."""

    exchange: str
    """The key of the exchange."""
    buffer: int
    """The buffer that they arrive in."""
    ranks: int
    """P."""


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
    lora_u: jax.Array | None = None
    """[R, r]: the rows contain u B of an adapter."""
    lora_b: jax.Array | None = None
    """B [E or 1, r, N]; if the rows are gradients A [E or 1, N, r], whose transpose then takes the place of B."""
    w_block_scales: jax.Array | None = None
    """The scales of a packed w."""

    @property
    def dtype(self) -> Any:
        """Dtype in which rows are sent."""
        return self.x.dtype if self.row_dtype is None else self.row_dtype

    def sum(
        self,
        row_of_slot: jax.Array,
        weights: jax.Array | None,
        dtype: Any,
        addend: jax.Array | None = None,
        returning: Returning | None = None,
    ) -> jax.Array:
        """`dispatch.gather_sum` of the rows, [T, N]: sum_k weights[t, k] rows[row_of_slot[t, k]] + addend[t].

        Weights are [T, K]; they must be None if x has early weights. If the addend has the dtype of the sums, its
        buffer is reused for them. With `returning` the sums return to their ranks, which must then add them up.
        """
        assert weights is None or self.early_weights is None
        (R, D), E = self.x.shape, self.group_sizes.shape[0]
        if self.w_quantized is not None:
            N = self.w_quantized.q.shape[1]
        else:
            assert self.w is not None
            N = weight_shape(self.w)[1 if self.transpose_w else 2]
        # With quantised operands the rows are rounded to the dtype of their sums.
        row_dtype = self.x.dtype if self.w_quantized is None else dtype
        workspace = workspaces.grouped_matmul_combine(R, E, D, N, self.x.dtype, backward=self.backward)
        options: dict[str, Any] = {}
        if returning is not None:
            workspace = workspaces.returning(R, returning.ranks, row_of_slot.shape[0] // returning.ranks, N, dtype)
            options = {"returning": returning.exchange, "returning_buffer": returning.buffer}
        unpacked = 0
        if self.w_block_scales is not None:
            matrix = (N, D) if self.transpose_w else (D, N)
            unpacked = workspaces.unpacked(R, E, *matrix, row_dtype, backward=not self.transpose_w)
        results = ffi.call(
            "ab_xla_grouped_matmul_combine",
            {
                "x": self.x,
                "w": self.w,
                "w_block_scales": self.w_block_scales,
                "group_sizes": self.group_sizes,
                "bias": None if self.bias is None else self.bias.astype(row_dtype),
                "x_scales": self.x_scales,
                "w_q": self.w_quantized.q if self.w_quantized is not None else None,
                "w_scales": self.w_quantized.scales if self.w_quantized is not None else None,
                "slot_of_row": self.slot_of_row,
                "row_of_slot": row_of_slot,
                "weights": weights if self.early_weights is None else self.early_weights,
                "addend": addend,
                "lora_u": self.lora_u,
                "lora_b": self.lora_b,
            },
            {"out": jax.ShapeDtypeStruct((row_of_slot.shape[0], N), dtype)},
            aliases={"addend": "out"} if addend is not None and addend.dtype == dtype else None,
            workspace=workspace
            + workspaces.lora(R, E, 0, N, 0 if self.lora_u is None else self.lora_u.shape[1], row_dtype)
            + unpacked,
            fp4=fp4_names({"w": self.w}),
            transpose_w=int(self.transpose_w),
            weight_early=int(self.early_weights is not None),
            skip_rest=int(self.skip_rest),
            backward=int(self.backward),
            precision=self.precision,
            orders={"lora_b": "021"} if self.backward else {},
            **options,
        )
        out: jax.Array = results["out"]
        return out


class IntermediateGradients(NamedTuple):
    """The result of `ffn_backward_by_slot`; fields that no wanted gradient needs are None."""

    dh: jax.Array | None
    """[R, P, F], in the buffer of h."""
    weighted_a: jax.Array | None
    """[R, F]: w a. Both have the dtype of x."""
    parameters: dict[str, jax.Array]
    """Gradients of operands in DOWN, unless `down_gradients` computes them, and of operands in WITH_DH."""
    weights: jax.Array
    """Shape and dtype of the weights."""
    dh_quantized: QuantizedOperand | None = None
    """dh quantised, with scales [R, P, F/128]; None without FP8."""
    v_in: jax.Array | None = None
    """[R, r], and v_out [R, q]: see semantics, section 12."""
    v_out: jax.Array | None = None


def ffn_forward_by_slot(config: FfnConfig, operands: FfnOperands, *, save: bool) -> tuple[SlotGemm, Saved]:
    """The forward rule with slot_of_row, for rows that are then summed per token: (y as a grouped GEMM, residuals).

    Early weights are those of the operands; late weights are passed to the sum.
    """
    assert operands.slot_of_row is not None and operands.group_sizes is not None
    inputs = operands.by_name() | dict.fromkeys(("w_out", "b_out", "w_out_q", "w_out_scales", "w_out_block_scales"))
    if operands.x_quantized is not None:
        inputs |= {"x_q": operands.x_quantized.q, "x_scales": operands.x_quantized.scales}
        if not operands.rank("in"):
            inputs["x"] = None
    F = config.sizes(operands.w_in)[3]
    results = _forward(config, operands, inputs, "a", F, save=save)
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
        lora_u=results["lora_z"],
        lora_b=None if operands.lora is None else operands.lora.b_out,
        w_block_scales=operands.w_out_block_scales,
    )
    return y, Saved(results["h"], results["lora_u"])


def ffn_backward_by_slot(
    config: FfnConfig,
    operands: FfnOperands,
    saved: Saved,
    d_out: jax.Array,
    wanted: Collection[str],
    w_out_dtype: Any = None,
    d_out_quantized: QuantizedOperand | None = None,
) -> IntermediateGradients:
    """The first part of `ffn_backward` with slot_of_row, for gradients of rows that are then summed per token.

    The caller then computes the sum of `rows_gradient`, `up_gradients`, and `down_gradients` if w_out_dtype is None.
    In this order, and with the gradient of w_out computed here, temporaries and w a can use the memory of the gradient
    of w_in. Gradients of operands in WITH_DH are always computed here: GEMMs for them and for v_in share operands.

    Args:
      config: as in the forward pass.
      operands: as for `ffn_backward`.
      saved: from the forward rule.
      d_out: as for `ffn_backward`.
      wanted: as for `ffn_backward`.
      w_out_dtype: dtype of the gradient of w_out, that of x or float32; None: gradients of DOWN are not computed here.
      d_out_quantized: d_out quantised, an operand of da'; None: it is quantised here.
    """
    assert operands.slot_of_row is not None and operands.group_sizes is not None and operands.weights is not None
    h = saved.h
    assert h is not None  # the forward rule ran with save
    R, (E, D, P, F), dtype = h.shape[0], config.sizes(operands.w_in), operands.x.dtype
    r, q = operands.rank("in"), operands.rank("out")
    wanted = _wanted(operands, wanted)
    down = [name for name in DOWN if name in wanted]
    here = down if w_out_dtype is not None else []
    needs_dh, needs_a = bool({"x", *UP, *WITH_DH} & wanted), bool(set(down) - {"b_out"})
    needs_v_in, needs_v_out = bool(r and "x" in wanted), "lora_a_out" in down and not here
    intermediates: dict[str, jax.Array | None] = {"h": h, "lora_u": saved.u if "lora_b_in" in wanted else None}
    if d_out_quantized is not None:
        intermediates |= {"d_out_q": d_out_quantized.q, "d_out_scales": d_out_quantized.scales}
    quantised = config.fp8 and "x" in wanted
    results = _backward(
        config,
        operands,
        d_out,
        intermediates,
        {
            "dh": _like(h) if needs_dh else None,
            "dh_q": jax.ShapeDtypeStruct((R, P, F), jnp.float8_e4m3fn) if quantised else None,
            "dh_scales": jax.ShapeDtypeStruct((R, P, F // BLOCK), jnp.float32) if quantised else None,
            "weighted_a": jax.ShapeDtypeStruct((R, F), dtype) if needs_a else None,
            "d_weights": _like(operands.weights, jnp.float32),
            "lora_v_in": jax.ShapeDtypeStruct((R, r), dtype) if needs_v_in else None,
            "lora_v_out": jax.ShapeDtypeStruct((R, q), dtype) if needs_v_out else None,
            **_gradients_like(
                config, operands, [*here, *(name for name in WITH_DH if name in wanted)], dtype, w_out_dtype
            ),
        },
        workspaces.ffn_backward(
            R, (E, D, P, F), dtype, d_out.dtype, d_weights=True, d_w_out=bool({"w_out", "b_out"} & set(here))
        ),
        skip_rest=int(config.skip_rest),
    )
    return IntermediateGradients(
        results["dh"],
        results["weighted_a"],
        _parameters(results),
        results["d_weights"].astype(operands.weights.dtype),
        QuantizedOperand(results["dh_q"], results["dh_scales"]) if quantised else None,
        results["lora_v_in"],
        results["lora_v_out"],
    )


def down_gradients(
    config: FfnConfig,
    operands: FfnOperands,
    intermediate: IntermediateGradients,
    d_out: jax.Array,
    wanted: Collection[str],
    w_out_dtype: Any,
) -> dict[str, jax.Array]:
    """The wanted gradients of operands in DOWN.

    Args:
      config, operands, d_out, wanted, w_out_dtype: as for `ffn_backward_by_slot`.
      intermediate: from that call.
    """
    names = [name for name in DOWN if name in _wanted(operands, wanted)]
    if not names:
        return {}
    R = d_out.shape[0] if operands.slot_of_row is None else operands.slot_of_row.shape[0]
    results = _backward(
        config,
        operands,
        d_out,
        {"weighted_a": intermediate.weighted_a, "lora_v_out": intermediate.v_out},
        _gradients_like(config, operands, names, None, w_out_dtype),
        workspaces.ffn_backward(R, config.sizes(operands.w_in), operands.x.dtype, d_out.dtype, d_w_out=True),
    )
    return _parameters(results)


def rows_gradient(config: FfnConfig, operands: FfnOperands, intermediate: IntermediateGradients) -> SlotGemm:
    """The gradient of the rows, [R, D], from the result of `ffn_backward_by_slot` for a wanted "x"."""
    assert operands.slot_of_row is not None and operands.group_sizes is not None and intermediate.dh is not None
    dh, dh_quantized = intermediate.dh, intermediate.dh_quantized
    E, D, P, F = config.sizes(operands.w_in)
    R, row_arguments = dh.shape[0], (operands.group_sizes, operands.slot_of_row, config.precision)
    options: dict[str, Any] = dict(skip_rest=config.skip_rest, backward=True, row_dtype=operands.x.dtype)
    if intermediate.v_in is not None:
        assert operands.lora is not None
        options |= {"lora_u": intermediate.v_in, "lora_b": operands.lora.a_in}
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
    w_in, scales = operands.w_in, operands.w_in_block_scales
    shape: tuple[int, ...] = (E, D, P * F) if transposed else (E, P * F, D)
    if w_in.dtype == jnp.uint8:
        shape = (*shape[:2], *w_in.shape[-2:])
    if scales is not None:
        options["w_block_scales"] = scales.reshape(E, -1, scales.shape[-1])
    w_in = w_in.reshape(shape)
    return SlotGemm(dh.reshape(R, P * F), w_in, *row_arguments, transpose_w=transposed, **options)


def up_gradients(
    config: FfnConfig,
    operands: FfnOperands,
    intermediate: IntermediateGradients,
    wanted: Collection[str],
    w_in_dtype: Any,
) -> dict[str, jax.Array]:
    """The wanted gradients of operands in UP.

    Args:
      config, operands, wanted: as for `ffn_backward_by_slot`.
      intermediate: from that call.
      w_in_dtype: dtype of the gradient of w_in, that of x or float32.
    """
    names = [name for name in UP if name in _wanted(operands, wanted)]
    if not names:
        return {}
    dh = intermediate.dh
    assert dh is not None
    results = _backward(
        config,
        operands,
        None,
        {
            "dh": dh,
        },
        _gradients_like(config, operands, names, w_in_dtype, None),
        workspaces.ffn_backward(
            dh.shape[0], config.sizes(operands.w_in), operands.x.dtype, operands.x.dtype, d_w_in=True
        ),
    )
    return _parameters(results)
