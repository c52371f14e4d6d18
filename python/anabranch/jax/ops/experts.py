"""The experts: grouped GEMMs and the gated feed-forward network.

Sizes: T tokens, R rows, E experts, K experts per token, D model width, F expert width, P parts of w_in: 2 (gate and up)
for a gated expert, 1 for an ungated one.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from anabranch.activation import Activation
from anabranch.jax.binding import check, ffi, workspaces
from anabranch.jax.binding.derivatives import reverse_mode
from anabranch.jax.binding.sharding import check_whole, vary_alike
from anabranch.jax.ops.ffn import FfnConfig, FfnOperands, ffn_backward, ffn_forward
from anabranch.jax.ops.packed import check_weight, packed_value, refuse_gradients, weight_shape
from anabranch.jax.ops.quantized import QuantizedExperts, check_quantized, quantize_matrix, quantize_rows
from anabranch.layouts import Layouts
from anabranch.lora import NAMES, Lora, check_lora, check_pair
from anabranch.options import EXPERTS_NAMES, ExpertsKeywords, ExpertsOptions, check_names, takes_options
from anabranch.packed import check_precision
from anabranch.precision import FP8, HIGHEST, TF32, check_fp8, check_fp8_widths, precision_number


def activate(h: jax.Array, activation: str) -> jax.Array:
    """act(h) of a plain activation, elementwise, for dense layers. JAX differentiates it."""
    if activation in ("gelu", "gelu_erf"):
        return jax.nn.gelu(h, approximate=activation == "gelu")
    if activation == "quick_gelu":
        return h * jax.nn.sigmoid(1.702 * h)
    if activation in ("relu", "relu2"):
        relu = jax.nn.relu(h)
        return relu * relu if activation == "relu2" else relu
    return jax.nn.silu(h) if activation == "silu" else h


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _at_most(limit: float, symmetric: bool, x: jax.Array) -> jax.Array:
    """min(x, limit), or clamp(x, -limit, limit); the slope at a limit is 1, where JAX's own would be 1/2."""
    return jnp.clip(x, -limit if symmetric else None, limit)


@_at_most.defjvp
def _at_most_jvp(limit: float, symmetric: bool, primals: Any, tangents: Any) -> Any:
    (x,), (d_x,) = primals, tangents
    past = (jnp.abs(x) if symmetric else x) > limit
    return _at_most(limit, symmetric, x), jnp.where(past, jnp.zeros_like(d_x), d_x)


def activate_gated(g: jax.Array, u: jax.Array, activation: Activation) -> jax.Array:
    """phi(g, u), elementwise, for dense layers. JAX differentiates it."""
    alpha, limit = activation.alpha, activation.limit
    if activation.name == "swiglu_clamped":
        return jax.nn.silu(_at_most(limit, False, g)) * _at_most(limit, True, u)
    if activation.name == "swiglu_oai":
        inside = _at_most(limit, False, g)
        return inside * jax.nn.sigmoid(alpha * inside) * (_at_most(limit, True, u) + 1)
    if activation.name == "swiglu_then_clamp":
        return _at_most(limit, False, jax.nn.silu(g)) * _at_most(limit, True, u)
    if activation.name == "situ":
        return alpha * jnp.tanh(g / alpha) * jax.nn.sigmoid(g) * (limit * jnp.tanh(u / limit))
    return activate(g, activation.name) * u


def dtypes_of_factors(x: jax.Array) -> tuple[str, ...]:
    """The dtypes of an adapter's factors beside x."""
    return tuple(dict.fromkeys((str(x.dtype), "float32")))


def grouped_rows(name: str, value: Any) -> jax.Array:
    """Checks the argument `name`, rows [R, D] of groups."""
    rows = check.array(name, value, check.FLOATS, ("R", "D"))
    if rows.shape[0] >= check.INDEX_LIMIT:
        raise ValueError(f"{name}: got {check.describe(rows)}, expected fewer than 2^31 rows")
    return rows


def experts_arrays(
    layouts: Layouts,
    x: jax.Array,
    weight_dtypes: Sequence[str],
    w_in: Any,
    w_out: Any,
    b_in: Any,
    b_out: Any,
    num_experts: int | None = None,
) -> tuple[dict[str, Any], int, int]:
    """Checks the experts' arrays against x [..., D]; returns (arrays by argument name, E, P)."""
    experts = "E" if num_experts is None else ("E", num_experts)
    D, dtype = ("D", x.shape[-1]), (str(x.dtype),)
    of_w_in = check_weight("w_in", w_in, weight_dtypes, layouts, e=experts, d=D, p="2 or 1", f="F")
    sizes = layouts.sizes("w_in", weight_shape(of_w_in["w_in"]))
    if sizes["p"] not in (1, 2):
        gated, plain = (", ".join(layouts.shape("w_in", e="E", d="D", p=p, f="F")) for p in "21")
        raise ValueError(f"w_in: got {check.describe(of_w_in['w_in'])}, expected [{gated}] (gate, up) or [{plain}]")
    E, P, F = (("E", sizes["e"]), ("P", sizes["p"]), ("F", sizes["f"]))
    arrays = {
        **of_w_in,
        **check_weight("w_out", w_out, weight_dtypes, layouts, e=E, f=F, d=D),
        "b_in": check.optional_array("b_in", b_in, dtype, layouts.shape("b_in", e=E, p=P, f=F)),
        "b_out": check.optional_array("b_out", b_out, dtype, (E, D)),
    }
    return arrays, sizes["e"], sizes["p"]


def check_fp8_operands(config: FfnConfig, arrays: dict[str, Any], quantized: Any) -> QuantizedExperts | None:
    """Checks the argument `quantized`, packed weights beside the precision, and with FP8 the widths of w_in.

    arrays: from `experts_arrays`.
    """
    check_fp8(config.precision, "float32", quantized)
    check_precision(config.precision, quantized, **{name: packed_value(arrays, name) for name in ("w_in", "w_out")})
    if not config.fp8:
        return None
    w_in = arrays["w_in"]
    E, D, P, F = config.sizes(w_in)
    check_fp8_widths("w_in", check.describe(w_in), D=D, F=F)
    return check_quantized(quantized, E, D, P, F)


# ---------------------------------------------------------------- grouped matmul


def in_one_dtype(dtype: Any, precision: int, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array, int]:
    """The operands and the precision of a GEMM whose operands and result have one dtype.

    Args:
      dtype: dtype of the result.
      precision: precision of float32 operands, a number of anabranch.precision.
      x, w: operands of any float dtype.

    Returns:
      The arguments unchanged if x and w have `dtype`. Otherwise x and w in float32, so that only the result is rounded;
      without a float32 operand the precision is then TF32, which represents every 16-bit value exactly.
    """
    if x.dtype == w.dtype == dtype:
        return x, w, precision
    exact_in_tf32 = jnp.float32 not in (x.dtype, w.dtype)
    return x.astype(jnp.float32), w.astype(jnp.float32), TF32 if exact_in_tf32 else precision


def grouped_gemm(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_w: bool,
    precision: int,
    fp8_scales: int = 0,
    dtype: Any = None,
) -> jax.Array:
    """y[R, N] = x w[e], or x w[e]^T, on the rows of expert e, with the given dtype (None: that of x).

    This is the rule without its gradient. Dtypes may differ, except with FP8; see `in_one_dtype`.
    """
    dtype = x.dtype if dtype is None else dtype
    if precision != FP8:
        x, w, precision = in_one_dtype(dtype, precision, x, w)
    y = jax.ShapeDtypeStruct((x.shape[0], w.shape[1 if transpose_w else 2]), x.dtype)
    operands = {"x": x, "w": w, "group_sizes": group_sizes}
    options: dict[str, Any] = {"transpose_w": int(transpose_w), "precision": precision}
    if precision == FP8:
        rows, weights = quantize_rows(x, fp8_scales), quantize_matrix(w, fp8_scales, transposed=not transpose_w)
        operands = {"x": rows.q, "x_scales": rows.scales, "w_q": weights.q, "w_scales": weights.scales}
        operands["group_sizes"], options["fp8_scales"] = group_sizes, fp8_scales
    results = ffi.call("ab_xla_grouped_matmul", operands, {"y": y}, **options)
    return results["y"].astype(dtype)


def _gemm_with_adapter(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    lora: tuple[jax.Array, jax.Array],
    *,
    transpose_w: bool,
    precision: int,
    fp8_scales: int,
    lora_scale: float,
    transpose_lora: bool,
) -> tuple[jax.Array, jax.Array]:
    """`grouped_gemm` with an adapter: (y, u), with the dtype of x. transpose_lora: the adapter is (B^T, A^T)."""
    a, b = lora[::-1] if transpose_lora else lora
    rank = a.shape[1 if transpose_lora else 2]
    operands = {"x": x, "w": w, "group_sizes": group_sizes, "lora_a": a, "lora_b": b}
    if precision == FP8:  # u is computed from the x that is not quantised
        weights = quantize_matrix(w, fp8_scales, transposed=not transpose_w)
        operands |= {"w_q": weights.q, "w_scales": weights.scales}
    results = ffi.call(
        "ab_xla_grouped_matmul",
        operands,
        {
            "y": jax.ShapeDtypeStruct((x.shape[0], w.shape[1 if transpose_w else 2]), x.dtype),
            "lora_u": jax.ShapeDtypeStruct((x.shape[0], rank), x.dtype),
        },
        workspace=(workspaces.fp8_rows(*x.shape) if precision == FP8 else 0)
        + workspaces.lora(
            x.shape[0], group_sizes.shape[0], x.shape[1], w.shape[1 if transpose_w else 2], rank, x.dtype
        ),
        orders=dict.fromkeys(("lora_a", "lora_b"), "021") if transpose_lora else {},
        transpose_w=int(transpose_w),
        precision=precision,
        fp8_scales=fp8_scales,
        lora_scale=lora_scale,
    )
    return results["y"], results["lora_u"]


def grouped_weight_gradient(
    x: jax.Array, d_y: jax.Array, group_sizes: jax.Array, dtype: Any, *, precision: int, shared: bool = False
) -> jax.Array:
    """d_w[E, D, N] = x^T d_y over the rows of expert e, in any float dtype; zero for an expert without rows.

    shared: d_w [1, D, N] is the sum over the experts.

    A GPU's tensor cores need operands of one dtype and a result of that dtype or float32; others are converted here.
    """
    if x.dtype != d_y.dtype:
        x, d_y = x.astype(jnp.float32), d_y.astype(jnp.float32)
    E, (R, D), N = group_sizes.shape[0], x.shape, d_y.shape[1]
    operands = {"x": x, "d_y": d_y, "group_sizes": group_sizes}
    results = {"d_w": jax.ShapeDtypeStruct((1 if shared else E, D, N), dtype if dtype == x.dtype else jnp.float32)}
    workspace = workspaces.grouped_matmul_dw(R, E, D, N, x.dtype, d_y.dtype)
    called = ffi.call("ab_xla_grouped_matmul_dw", operands, results, workspace=workspace, precision=precision)
    return called["d_w"].astype(dtype)


@dataclasses.dataclass(frozen=True)
class GroupedGemm:
    """The options of a grouped GEMM."""

    transpose_w: bool = False
    precision: int = HIGHEST
    """A number of anabranch.precision.NUMBERS."""
    fp8_scales: int = 0
    """A number of anabranch.precision.FP8_SCALES."""
    dtype: Any = None
    """Dtype of the result; None: that of x."""
    lora_scale: float = 0.0
    """s of the adapter; 0 without one."""


class GroupedOperands(NamedTuple):
    """The operands of a grouped GEMM, and in gradients their gradients or None."""

    x: jax.Array | None
    w: jax.Array | None
    group_sizes: jax.Array | None
    lora: tuple[jax.Array | None, jax.Array | None] | None = None


def _gemm(options: GroupedGemm, operands: Any, *, transpose_lora: bool = False) -> tuple[jax.Array, jax.Array | None]:
    """The result, and with an adapter u."""
    x, w, group_sizes, lora = operands
    given = dataclasses.asdict(options)
    if lora is None:
        del given["lora_scale"]
        return grouped_gemm(x, w, group_sizes, **given), None
    del given["dtype"]  # an adapter needs one dtype
    return _gemm_with_adapter(x, w, group_sizes, lora, transpose_lora=transpose_lora, **given)


@reverse_mode("grouped_matmul", nondiff_argnums=(0,))
def grouped_matmul_rule(options: GroupedGemm, operands: GroupedOperands) -> jax.Array:
    """`grouped_matmul` on checked arrays, with its gradient."""
    return _gemm(options, operands)[0]


def _grouped_matmul_forward(options: GroupedGemm, operands: GroupedOperands) -> tuple[Any, Any]:
    y, u = _gemm(options, operands)
    return y, (operands, u)


def _grouped_matmul_backward(
    options: GroupedGemm, needed: GroupedOperands, residuals: Any, d_y: jax.Array
) -> tuple[GroupedOperands]:
    (x, w, group_sizes, lora), u = residuals
    o, precision = options, HIGHEST if options.precision == FP8 else options.precision
    d_x = d_w = d_lora = v = None
    needed_a, needed_b = (False, False) if needed.lora is None else needed.lora
    if needed.x or needed_a:
        d_x_options = dataclasses.replace(o, transpose_w=not o.transpose_w, dtype=x.dtype)
        d_x, v = _gemm(d_x_options, (d_y, w, group_sizes, lora), transpose_lora=True)
    if needed.w:
        left, right = (d_y, x) if o.transpose_w else (x, d_y)
        d_w = grouped_weight_gradient(left, right, group_sizes, w.dtype, precision=precision)
    if lora is not None:
        pairs: Any = ((needed_a, lora[0], x, v), (needed_b, lora[1], u, d_y))
        d_a, d_b = (
            grouped_weight_gradient(
                left, right, group_sizes, factor.dtype, precision=precision, shared=factor.shape[0] == 1
            )
            if is_needed
            else None
            for is_needed, factor, left, right in pairs
        )
        d_lora = d_a, d_b
    return (GroupedOperands(d_x if needed.x else None, d_w, None, d_lora),)


grouped_matmul_rule.define_gradients(_grouped_matmul_forward, _grouped_matmul_backward)


def grouped_matmul(
    x: Any,
    w: Any,
    group_sizes: Any,
    *,
    transpose_w: bool = False,
    precision: str = "highest",
    fp8_scales: str = "float32",
    lora: tuple[Any, Any] | None = None,
    lora_scale: float = 1.0,
) -> jax.Array:
    """Multiplies the rows of each expert by that expert's matrix: y = x w[e].

    Args:
      x: float32, bfloat16 or float16 [R, D]; rows of one expert are contiguous, expert 0 first.
      w: [E, D, N], or with transpose_w [E, N, D]; dtype of x.
      group_sizes: integers [E] on the device, the number of rows per expert. Sizes past R are clipped, negative ones
        count as 0.
      transpose_w: y = x w[e]^T; w is read in place without a copy.
      precision: how float32 x and w are multiplied, "highest" or "tf32", also in the gradient; see `moe`. "fp8": x and
        w are quantised, and for the gradient of x, d_y and w; D and N must be multiples of 128.
      fp8_scales: with "fp8", "float32" or "power_of_two", see `moe`.
      lora: the factors (A [E or 1, D, r], B [E or 1, r, N]) of a low-rank adapter, with the dtype of x or float32: y =
        x w[e] + u B[e], where u = lora_scale x A[e] is rounded to the dtype of x. A first dimension of 1 is one factor
        for all experts. None: no adapter.
      lora_scale: a finite number.

    Returns:
      [R, N] with the dtype of x, accumulated in float32. Rows past the sum of the sizes are zero.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not fit, or an unknown precision.

    Gradient: d_x = d_y w[e]^T + v A[e]^T with v = lora_scale d_y B[e]^T, zero past the sizes; d_w[e] = x^T d_y, d_A[e]
    = x^T v and d_B[e] = u^T d_y, zero for an expert without rows; each in the dtype of its operand. Gradients of
    operands that are not differentiated are not computed. Source: semantics, sections 6, 11 and 12.

    >>> w = jnp.array([[[1.0], [1.0]], [[2.0], [3.0]]])
    >>> grouped_matmul(jnp.ones((3, 2)), w, jnp.array([1, 2])).ravel().tolist()
    [2.0, 5.0, 5.0]
    """
    x = grouped_rows("x", x)
    sizes = check.sizes("group_sizes", group_sizes, ("E",))
    E, D = sizes.shape[0], x.shape[1]
    transpose_w = check.boolean("transpose_w", transpose_w)
    w = check.array("w", w, (str(x.dtype),), (("E", E), "N", ("D", D)) if transpose_w else (("E", E), ("D", D), "N"))
    number = precision_number(precision)
    N = w.shape[1 if transpose_w else 2]
    if number == FP8:
        check_fp8_widths("w", check.describe(w), D=D, N=N)
    scale = check.number("lora_scale", lora_scale)
    factors = None
    if lora is not None:
        if not isinstance(lora, (tuple, list)) or len(lora) != 2:
            raise TypeError(f"lora: got {check.describe(lora)}, expected a pair of factors (A, B)")
        a, b = lora
        dtypes = dtypes_of_factors(x)
        factors = check_pair(check.array, dtypes, ("lora[0]", "lora[1]"), (a, b), E, ("D", D), (("N", N),))
        if factors[0] is None:
            raise ValueError("lora: got (None, None), expected two factors, or None")
    options = GroupedGemm(
        transpose_w, number, check_fp8(number, fp8_scales), lora_scale=0.0 if factors is None else scale
    )
    named = {} if factors is None else dict(zip(("lora[0]", "lora[1]"), factors, strict=True))
    check_whole("grouped_matmul", x=x, w=w, group_sizes=sizes, **named)
    x, w, sizes, *varying = vary_alike(x, w, sizes, *(factors or ()))
    return grouped_matmul_rule(options, GroupedOperands(x, w, sizes, tuple(varying) if varying else None))


# ---------------------------------------------------------------- feed-forward network


@reverse_mode("expert_ffn", nondiff_argnums=(0,))
def _expert_ffn(config: FfnConfig, operands: FfnOperands) -> jax.Array:
    return ffn_forward(config, operands, save=False)[0]


def _expert_ffn_forward(config: FfnConfig, operands: FfnOperands) -> tuple[jax.Array, Any]:
    y, saved = ffn_forward(config, operands, save=True)
    return y, (operands, saved)


def _expert_ffn_backward(config: FfnConfig, needed: FfnOperands, residuals: Any, d_y: jax.Array) -> tuple[FfnOperands]:
    operands, saved = residuals
    refuse_gradients(operands, needed)
    wanted = [name for name, is_needed in needed.by_name().items() if is_needed]
    gradients = ffn_backward(config, operands, saved, d_y, wanted)
    fields = {name: gradients.get(name) for name in FfnOperands._fields if name != "lora"}
    lora = None if operands.lora is None else Lora(*map(gradients.get, NAMES))
    return (FfnOperands(**fields, lora=lora),)  # type: ignore[arg-type]


_expert_ffn.define_gradients(_expert_ffn_forward, _expert_ffn_backward)


@takes_options(ExpertsKeywords)
def expert_ffn(
    rows: Any,
    w_in: Any,
    w_out: Any,
    group_sizes: Any,
    *,
    b_in: Any = None,
    b_out: Any = None,
    weights: Any = None,
    quantized: QuantizedExperts | None = None,
    lora: Lora | None = None,
    **options: Unpack[ExpertsKeywords],
) -> jax.Array:
    """Applies each expert's feed-forward network to its rows: y = w (a W_out[e] + b_out[e]).

    h = x W_in[e] + b_in[e]; gated (P = 2): a = phi(h_gate, h_up), ungated (P = 1): a = act(h).

    Args:
      rows: float32, bfloat16 or float16 [R, D]; rows of one expert are contiguous, expert 0 first.
      w_in: [E, D, 2, F] (gate, up) or [E, D, 1, F]; dtype of rows, as for w_out and the biases.
      w_out: [E, F, D]. w_in and w_out, each by itself, may be packed: an `Mxfp4` or an `Fp8Blocks`.
      group_sizes: integers [E] on the device, the number of rows per expert. Sizes past R are clipped, negative ones
        count as 0.
      b_in: [E, 2 or 1, F], or None.
      b_out: [E, D], or None.
      weights: w, float [R]; None: 1.
      quantized: with precision "fp8", w_in and w_out as returned by `quantize_experts`; None: quantised here.
      lora: the factors of low-rank adapters, which add s_in A_in[e] B_in[e] to W_in[e] and s_out A_out[e] B_out[e] to
        W_out[e]; None: no adapters.
      {options}

    Returns:
      y [R, D] with the dtype of rows. GEMMs accumulate in float32. Rows past the sum of the sizes are zero.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not fit, an unknown activation or precision, or weight_early without weights.

    Gradient: for rows, w_in, w_out, b_in, b_out, weights and the factors of lora, each in its own dtype; exact even if
    a weight is 0. An expert without rows has zero gradients. Gradients of operands that are not differentiated are not
    computed. Saved for the backward pass: the arguments, h [R, P, F], and with an adapter of w_in u [R, r]. Source:
    semantics, sections 6, 11 and 12.

    >>> w_in, w_out = jnp.ones((1, 1, 1, 3)), jnp.ones((1, 3, 1))
    >>> expert_ffn(jnp.ones((2, 1)), w_in, w_out, jnp.array([1]), activation="relu").tolist()
    [[3.0], [0.0]]
    """
    rows = grouped_rows("rows", rows)
    sizes = check.sizes("group_sizes", group_sizes, ("E",))
    check_names("expert_ffn", EXPERTS_NAMES, options)
    checked = ExpertsOptions(**options)
    given = w_in, w_out, b_in, b_out
    arrays, _, P = experts_arrays(checked.layouts(), rows, (str(rows.dtype),), *given, num_experts=sizes.shape[0])
    operands = FfnOperands(
        x=rows,
        slot_of_row=None,
        group_sizes=sizes,
        weights=check.optional_array("weights", weights, check.FLOATS, (("R", rows.shape[0]),)),
        **arrays,
    )
    w_in_sizes = checked.layouts().sizes("w_in", weight_shape(arrays["w_in"]))
    lora = check_lora(check.array, dtypes_of_factors(rows), lora, w_in_sizes)
    config = FfnConfig.of(checked.experts(P, 0, lora))
    if config.weight_early and weights is None:
        raise ValueError("weight_early: got True without weights, expected weights [R]")
    quantized = check_fp8_operands(config, arrays, quantized)
    operands = operands._replace(quantized=quantized, lora=lora)
    check_whole("expert_ffn", rows=rows, **{n: a for n, a in operands.by_name().items() if n != "x"})
    leaves, tree = jax.tree.flatten(operands)
    return _expert_ffn(config, jax.tree.unflatten(tree, vary_alike(*leaves)))
