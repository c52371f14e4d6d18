"""TransformerEngine's token dispatch and combine.

A routing map [T, E] marks the experts of each token, any number of them. Sizes: T tokens, E experts, D width, R rows.
Leading dimensions of tokens are flattened: results are [R, D] and [T, D].

With tokens in S shards, each shard dispatches its own tokens to R / S rows, and combines these rows; the rows of the
shards are concatenated.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anabranch.jax.binding import check, ffi, workspaces
from anabranch.jax.binding.arrays import flat, take
from anabranch.jax.binding.derivatives import reverse_mode
from anabranch.jax.binding.sharding import TokenCall, check_alike, token_shard_axes, vary_alike
from anabranch.jax.ops.dispatch import CombineGradients, gather_sum, gather_sum_backward, spread
from anabranch.rows import check_num_rows, check_num_slots

# uint8 is excluded, because it is the dtype of a bitmap.
_MAP_DTYPES = ("bool", "int8", *check.INDICES)


class TokenDispatch(NamedTuple):
    """The result of `token_dispatch`; unpacks like a plain tuple."""

    output: jax.Array
    """[R, D], dtype of inp: the tokens of expert 0, then of expert 1, ...; zero in padding."""
    permuted_probs: jax.Array | None
    """[R], dtype of probs: the probability of every row, zero in padding; None without probs."""
    row_id_map: jax.Array
    """int32[T, 2E+1] for `token_combine`: a token's rows without padding, descending; their experts from column E; the
    number of rows in the last column."""
    pad_offsets: jax.Array | None
    """int32[E]: rows of padding before every expert; None without align_size."""
    tokens_per_expert: jax.Array
    """int32[E]: rows of every expert, padding included."""


def _check_map(name: str, routing_map: Any, num_tokens: int) -> jax.Array:
    """Checks a map [..., T, E] of booleans or integers."""
    routing_map = check.narrow(name, routing_map, _MAP_DTYPES, (..., "T", "E"))
    if routing_map.shape[-1] < 1:
        raise ValueError(f"{name}: got {check.describe(routing_map)}, expected [..., T, E] with E >= 1")
    _check_num_tokens(name, routing_map, num_tokens)
    check_num_slots(name, num_tokens, routing_map.shape[-1])
    return routing_map


def _check_num_tokens(name: str, array: jax.Array, num_tokens: int) -> None:
    got = math.prod(array.shape[:-1])
    if got != num_tokens:
        raise ValueError(f"{name}: got {check.describe(array)}, {got} tokens, expected {num_tokens} tokens")


def _check_probs(name: str, probs: Any, num_tokens: int, num_experts: int) -> jax.Array | None:
    """Checks probs [..., T, E], or None."""
    if probs is None:
        return None
    probs = check.array(name, probs, check.FLOATS, (..., "T", ("E", num_experts)))
    _check_num_tokens(name, probs, num_tokens)
    return probs


class _Maps(NamedTuple):
    row_of_slot: jax.Array  # int32[T, E]
    slot_of_row: jax.Array  # int32[R]


def _expand(row_id_map: jax.Array, pad_offsets: jax.Array | None, num_rows: int) -> _Maps:
    """The gather and scatter indices between slots (all pairs of token and expert) and rows, from a row_id_map."""
    T, E = row_id_map.shape[0], row_id_map.shape[1] // 2
    return _Maps(
        **ffi.call(
            "ab_xla_expand_row_id_map",
            {"row_id_map": row_id_map, "pad_offsets": pad_offsets},
            {
                "row_of_slot": jax.ShapeDtypeStruct((T, E), jnp.int32),
                "slot_of_row": jax.ShapeDtypeStruct((num_rows,), jnp.int32),
            },
        )
    )


# ---------------------------------------------------------------- shards of tokens


class _Shard(NamedTuple):
    """The index of this shard of the tokens, and the number of shards; 0 of 1 if tokens are not sharded."""

    index: Any
    shards: int


def _this_shard(name: str, tokens: jax.Array) -> _Shard:
    axes = token_shard_axes(name, tokens.shape[:1])
    return _Shard(jax.lax.axis_index(axes), jax.lax.psum(1, axes)) if axes else _Shard(0, 1)


def _padded_rows(row_id_map: jax.Array, pad_offsets: jax.Array | None) -> jax.Array:
    """The map's rows, [T, E], numbered with padding."""
    E = row_id_map.shape[1] // 2
    rows, experts = row_id_map[:, :E], row_id_map[:, E : 2 * E]
    return rows if pad_offsets is None else rows + take(pad_offsets, experts)


def _with_rows(row_id_map: jax.Array, rows: jax.Array) -> jax.Array:
    """Replaces the map's rows."""
    return row_id_map.at[:, : rows.shape[1]].set(rows)


_WHOLE = "{name}: got {{got}}, expected whole pad_offsets"


# ---------------------------------------------------------------- token_dispatch


@dataclasses.dataclass(frozen=True)
class _DispatchOptions:
    num_rows: int
    align_size: int | None
    dtype: str
    probs_dtype: str | None


def token_dispatch_forward(
    inp: jax.Array, routing_map: jax.Array, probs: jax.Array | None, num_rows: int, align_size: int | None
) -> TokenDispatch:
    """`token_dispatch` on inp [T, D], a bool map [T, E] and probs [T, E], with given R."""
    options = _DispatchOptions(num_rows, align_size, str(inp.dtype), None if probs is None else str(probs.dtype))
    names = [name for name in TokenDispatch._fields if _has(options, name)]
    token_dims = tuple(0 if name in ("pad_offsets", "tokens_per_expert") else 1 for name in names)
    call = TokenCall(_dispatch_shard, options, (1, 1, 1), token_dims)
    results = dict(zip(names, call(inp, routing_map, probs), strict=True))
    return TokenDispatch(**{name: results.get(name) for name in TokenDispatch._fields})  # type: ignore[arg-type]


def _has(options: _DispatchOptions, name: str) -> bool:
    """Whether the results include that field."""
    absent = {"permuted_probs": options.probs_dtype is None, "pad_offsets": options.align_size is None}
    return not absent.get(name, False)


def _dispatch_shard(
    options: _DispatchOptions, inp: jax.Array, routing_map: jax.Array, probs: jax.Array | None
) -> tuple[jax.Array, ...]:
    """The results of a shard, with rows numbered as in the whole result, padding included."""
    shard = _this_shard("inp", inp)
    rows, remainder = divmod(options.num_rows, shard.shards)
    if remainder:
        raise ValueError(
            f"num_out_tokens: got a number that requires {options.num_rows} rows, expected a multiple of the "
            f"{shard.shards} shards of the tokens"
        )
    result = _dispatch_whole(
        inp, routing_map, probs, rows // (options.align_size or 1) * (options.align_size or 1), options.align_size
    )
    if shard.shards > 1:
        own, tail = _padded_rows(result.row_id_map, result.pad_offsets), rows - result.output.shape[0]
        # A pair without a row on this shard must not get a row of the next shard.
        global_rows = jnp.where(own < result.output.shape[0], shard.index * rows + own, options.num_rows)
        result = TokenDispatch(
            output=jnp.pad(result.output, ((0, tail), (0, 0))),
            permuted_probs=None if result.permuted_probs is None else jnp.pad(result.permuted_probs, (0, tail)),
            row_id_map=_with_rows(result.row_id_map, global_rows),
            pad_offsets=None if result.pad_offsets is None else jnp.zeros_like(result.pad_offsets),
            tokens_per_expert=result.tokens_per_expert,
        )
    return tuple(array for array in result if array is not None)


def _dispatch_whole(
    inp: jax.Array, routing_map: jax.Array, probs: jax.Array | None, num_rows: int, align_size: int | None
) -> TokenDispatch:
    """The results for whole arrays on one device."""
    T, E = routing_map.shape
    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    plan = ffi.call(
        "ab_xla_plan",
        {"routing_map": routing_map},
        {
            "tokens_per_expert": int32((E,)),
            "row_of_slot": int32((T, E)),
            "slot_of_row": int32((num_rows,)),
            "row_id_map": int32((T, 2 * E + 1)),
        },
        num_experts=E,
        align_size=align_size or 0,
        num_destinations=1,
        workspace=workspaces.plan(T * E, E),
    )
    output = spread(inp, plan["row_of_slot"], plan["slot_of_row"])
    permuted_probs = None if probs is None else take(probs.ravel(), plan["slot_of_row"])
    counts = plan["tokens_per_expert"]
    if align_size is None:
        return TokenDispatch(output, permuted_probs, plan["row_id_map"], None, counts)
    aligned = -(-counts // align_size) * align_size
    padding = aligned - counts
    return TokenDispatch(output, permuted_probs, plan["row_id_map"], jnp.cumsum(padding) - padding, aligned)


class TokenDispatchGradients(NamedTuple):
    """The result of `token_dispatch_backward`."""

    inp: jax.Array
    """[T, D]"""
    probs: jax.Array | None
    """[T, E], None without probs."""


def token_dispatch_backward(
    d_output: jax.Array,
    d_permuted_probs: jax.Array | None,
    row_id_map: jax.Array,
    pad_offsets: jax.Array | None,
    dtype: Any,
    probs_dtype: Any,
) -> TokenDispatchGradients:
    """d_inp[t] = the sum of the token's d_output rows; d_probs[t, e] = d_permuted_probs[row], also if prob is 0."""
    results = (1,) if d_permuted_probs is None else (1, 1)
    whole = _WHOLE.format(name="token_dispatch backward")
    call = TokenCall(_dispatch_backward_shard, (str(dtype), str(probs_dtype)), (1, 1, 1, 0), results, whole)
    d_inp, *d_probs = call(row_id_map, d_output, d_permuted_probs, pad_offsets)
    return TokenDispatchGradients(d_inp, d_probs[0] if d_probs else None)


def _dispatch_backward_shard(
    dtypes: tuple[str, str],
    row_id_map: jax.Array,
    d_output: jax.Array,
    d_permuted_probs: jax.Array | None,
    pad_offsets: jax.Array | None,
) -> tuple[jax.Array, ...]:
    dtype, probs_dtype = dtypes
    own = _own_rows(row_id_map, d_output.shape[0])
    row_of_slot, _ = _expand(own, pad_offsets, d_output.shape[0])
    d_inp = gather_sum(d_output, row_of_slot, None, dtype)
    if d_permuted_probs is None:
        return (d_inp,)
    return d_inp, take(d_permuted_probs.astype(probs_dtype), row_of_slot)


def _own_rows(row_id_map: jax.Array, num_rows: int) -> jax.Array:
    """The map of a shard with the shard's own row numbers; the shard has num_rows rows."""
    shard = _this_shard("row_id_map", row_id_map)
    if shard.shards == 1:
        return row_id_map
    return _with_rows(row_id_map, _padded_rows(row_id_map, None) - shard.index * num_rows)


@reverse_mode("token_dispatch", nondiff_argnums=(0,))
def _token_dispatch(
    options: _DispatchOptions, inp: jax.Array, routing_map: jax.Array, probs: jax.Array | None
) -> TokenDispatch:
    return token_dispatch_forward(inp, routing_map, probs, options.num_rows, options.align_size)


def _token_dispatch_fwd(
    options: _DispatchOptions, inp: jax.Array, routing_map: jax.Array, probs: jax.Array | None
) -> tuple[TokenDispatch, tuple[jax.Array, jax.Array | None]]:
    result = token_dispatch_forward(inp, routing_map, probs, options.num_rows, options.align_size)
    return result, (result.row_id_map, result.pad_offsets)


def _token_dispatch_bwd(
    options: _DispatchOptions, residuals: tuple[jax.Array, jax.Array | None], d: TokenDispatch
) -> tuple[jax.Array, None, jax.Array | None]:
    gradients = token_dispatch_backward(d.output, d.permuted_probs, *residuals, options.dtype, options.probs_dtype)
    return gradients.inp, None, gradients.probs


_token_dispatch.defvjp(_token_dispatch_fwd, _token_dispatch_bwd)


def token_dispatch(
    inp: Any, routing_map: Any, num_out_tokens: int, probs: Any = None, align_size: int | None = None
) -> TokenDispatch:
    """Copies every token to one row per expert of the token; rows of an expert are contiguous, in token order.

    Args:
      inp: [..., D] float32, bfloat16 or float16; leading dimensions are flattened to T.
      routing_map: bool, int8, int16, int32 or int64 [..., E], nonzero where the token goes to the expert. uint8 is
        refused, since RoutingMapFormat.BITMAP_U8 packs eight experts into a byte.
      num_out_tokens: n, the number of nonzero entries; entries past the buffer get no row.
      probs: [..., E] float32, bfloat16 or float16, or None.
      align_size: a >= 1: every expert's rows are padded to a multiple of a, and R = floor((n + E (a-1)) / a) a.
        None: no padding, R = n.

    With tokens in S shards, each shard has R / S rows for its own tokens, laid out independently; the only
    communication is the sum of tokens_per_expert. The row_id_map contains rows of the whole output; with align_size it
    already includes padding, and pad_offsets are 0. Inside a jax.shard_map, the results are those of the shard alone.

    Returns:
      (output, permuted_probs, row_id_map, pad_offsets, tokens_per_expert), a `TokenDispatch`.

    Gradient: for inp the sum of the token's rows, in float32; for probs d_permuted_probs of the row, also if a
    probability is 0, and 0 without a row.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not fit, a size is out of range, or R does not divide into the shards of the tokens.

    Source: the function of this name in transformer_engine.jax.permutation.

    >>> routing_map = jnp.array([[True, True], [False, True]])
    >>> token_dispatch(jnp.array([[1.0], [2.0]]), routing_map, 3).output.ravel().tolist()
    [1.0, 1.0, 2.0]
    """
    inp = check.array("inp", inp, check.FLOATS, (..., "T", "D"))
    T = math.prod(inp.shape[:-1])
    routing_map = _check_map("routing_map", routing_map, T)
    E = routing_map.shape[-1]
    num_rows = check_num_rows("num_out_tokens", num_out_tokens, 1)
    if align_size is not None:
        a = check.integer("align_size", align_size, 1, check.INDEX_LIMIT - 1)
        padded = (num_rows + E * (a - 1)) // a * a
        if padded >= check.INDEX_LIMIT:
            raise ValueError(
                f"align_size: got {a}, which requires {padded} rows for num_out_tokens {num_rows}, expected fewer than "
                "2^31"
            )
        num_rows = padded
    probs = _check_probs("probs", probs, T, E)
    check_alike(inp=inp, routing_map=routing_map, probs=probs)
    options = _DispatchOptions(num_rows, align_size, str(inp.dtype), None if probs is None else str(probs.dtype))
    operands = vary_alike(flat(inp), flat(routing_map) != 0, None if probs is None else flat(probs))
    return _token_dispatch(options, *operands)


# ---------------------------------------------------------------- token_combine


@dataclasses.dataclass(frozen=True)
class _CombineOptions:
    num_rows: int
    dtype: str


class _CombineResiduals(NamedTuple):
    inp: jax.Array | None
    row_id_map: jax.Array
    merging_probs: jax.Array | None
    pad_offsets: jax.Array | None


def token_combine_forward(
    inp: jax.Array, row_id_map: jax.Array, merging_probs: jax.Array | None, pad_offsets: jax.Array | None
) -> jax.Array:
    """`token_combine` on inp [R, D] and merging_probs [T, E]."""
    call = TokenCall(_combine_shard, inp.shape[0], (1, 1, 1, 0), (1,), _WHOLE.format(name="token_combine"))
    return call(row_id_map, inp, merging_probs, pad_offsets)[0]


def _combine_shard(
    num_rows: int,
    row_id_map: jax.Array,
    inp: jax.Array,
    merging_probs: jax.Array | None,
    pad_offsets: jax.Array | None,
) -> tuple[jax.Array]:
    """Combines the rows of a shard; num_rows: those of all shards. A token with rows on another shard is NaN."""
    own = _own_rows(row_id_map, inp.shape[0])
    row_of_slot, _ = _expand(own, pad_offsets, inp.shape[0])
    out = gather_sum(inp, row_of_slot, merging_probs, inp.dtype)
    if inp.shape[0] < num_rows:
        global_rows = _padded_rows(row_id_map, pad_offsets)
        listed = jnp.arange(global_rows.shape[1]) < row_id_map[:, -1:]
        on_any_shard = (global_rows >= 0) & (global_rows < num_rows) & listed
        has_foreign_rows = jnp.sum(on_any_shard, axis=1) > jnp.sum(row_of_slot >= 0, axis=1)
        out = jnp.where(has_foreign_rows[:, None], jnp.nan, out)
    return (out,)


def token_combine_backward(
    d_out: jax.Array, dtype: str, num_rows: int, residuals: "_CombineResiduals"
) -> CombineGradients:
    """d_rows[row] = merging_probs[t, e] d_out[t] and d_merging_probs[t, e] = <d_out[t], inp[row]>."""
    inp, row_id_map, merging_probs, pad_offsets = residuals
    results = (1,) if merging_probs is None else (1, 1)
    whole = _WHOLE.format(name="token_combine backward")
    call = TokenCall(_combine_backward_shard, (dtype, num_rows), (1, 1, 1, 1, 0), results, whole)
    d_rows, *d_weights = call(row_id_map, d_out, inp, merging_probs, pad_offsets)
    return CombineGradients(d_rows, d_weights[0] if d_weights else None)


def _combine_backward_shard(
    static: tuple[str, int],
    row_id_map: jax.Array,
    d_out: jax.Array,
    inp: jax.Array | None,
    merging_probs: jax.Array | None,
    pad_offsets: jax.Array | None,
) -> tuple[jax.Array, ...]:
    dtype, num_rows = static
    rows = num_rows // _this_shard("row_id_map", row_id_map).shards
    maps = _expand(_own_rows(row_id_map, rows), pad_offsets, rows)
    gradients = gather_sum_backward(d_out, inp, *maps, merging_probs, dtype)
    return tuple(gradient for gradient in gradients if gradient is not None)


@reverse_mode("token_combine", nondiff_argnums=(0,))
def _token_combine(
    options: _CombineOptions,
    inp: jax.Array,
    row_id_map: jax.Array,
    merging_probs: jax.Array | None,
    pad_offsets: jax.Array | None,
) -> jax.Array:
    return token_combine_forward(inp, row_id_map, merging_probs, pad_offsets)


def _token_combine_fwd(
    options: _CombineOptions,
    inp: jax.Array,
    row_id_map: jax.Array,
    merging_probs: jax.Array | None,
    pad_offsets: jax.Array | None,
) -> tuple[jax.Array, _CombineResiduals]:
    saved_inp = None if merging_probs is None else inp
    residuals = _CombineResiduals(saved_inp, row_id_map, merging_probs, pad_offsets)
    return token_combine_forward(inp, row_id_map, merging_probs, pad_offsets), residuals


def _token_combine_bwd(
    options: _CombineOptions, residuals: _CombineResiduals, d_out: jax.Array
) -> tuple[jax.Array, None, jax.Array | None, None]:
    gradients = token_combine_backward(d_out, options.dtype, options.num_rows, residuals)
    return gradients.rows, None, gradients.weights, None


_token_combine.defvjp(_token_combine_fwd, _token_combine_bwd)


def token_combine(inp: Any, row_id_map: Any, merging_probs: Any = None, pad_offsets: Any = None) -> jax.Array:
    """Sums the rows of every token: the sum over its experts e of merging_probs[t, e] * inp[row].

    Args:
      inp: [R, D] float32, bfloat16 or float16.
      row_id_map: int32[T, 2E+1] from `token_dispatch`.
      merging_probs: [..., E] float32, bfloat16 or float16; None: ones.
      pad_offsets: int32[E] from `token_dispatch` with align_size, else None.

    Returns:
      [T, D], dtype of inp, accumulated in float32 by ascending expert.

    With sharded tokens, each shard combines the rows that it dispatched; inp and row_id_map must be sharded as
    `token_dispatch` returned them. A token with rows on another shard, after a later resharding, is NaN.

    Gradient: for inp merging_probs[t, e] d_out[t], zero in padding; for merging_probs <d_out[t], inp[row]>, also if a
    probability is 0, and 0 without a row.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not fit, or arrays are sharded differently from the results of `token_dispatch`.

    Source: the function of this name in transformer_engine.jax.permutation.

    >>> routed = token_dispatch(jnp.array([[1.0], [2.0]]), jnp.array([[True, True], [False, True]]), 3)
    >>> token_combine(routed.output, routed.row_id_map).ravel().tolist()
    [2.0, 2.0]
    """
    inp = check.array("inp", inp, check.FLOATS, ("R", "D"))
    check_num_rows("inp", inp.shape[0], 1)
    row_id_map = check.array("row_id_map", row_id_map, ("int32",), ("T", "2E+1"))
    T, width = row_id_map.shape
    if width < 3 or width % 2 == 0:
        raise ValueError(f"row_id_map: got {check.describe(row_id_map)}, expected int32 [T, 2E+1] with E >= 1")
    E = width // 2
    check_num_slots("row_id_map", T, E)
    merging_probs = _check_probs("merging_probs", merging_probs, T, E)
    pad_offsets = check.optional_array("pad_offsets", pad_offsets, ("int32",), (("E", E),))
    check_alike(row_id_map=row_id_map, inp=inp, merging_probs=None if merging_probs is None else flat(merging_probs))
    options = _CombineOptions(inp.shape[0], str(inp.dtype))
    merging_probs = None if merging_probs is None else flat(merging_probs)
    return _token_combine(options, *vary_alike(inp, row_id_map, merging_probs, pad_offsets))


# ---------------------------------------------------------------- selected experts


def _descending(_: None, routing_map: jax.Array) -> tuple[jax.Array, jax.Array]:
    *leading, E = routing_map.shape
    T = math.prod(leading)
    row_id_map = ffi.call(
        "ab_xla_plan",
        {"routing_map": routing_map.reshape(T, E)},
        {
            "row_id_map": jax.ShapeDtypeStruct((T, 2 * E + 1), jnp.int32),
            "slot_of_row": jax.ShapeDtypeStruct((0,), jnp.int32),
        },
        num_experts=E,
        align_size=0,
        num_destinations=1,
        workspace=workspaces.plan(T * E, E),
    )["row_id_map"]
    return row_id_map[:, E : 2 * E].reshape(routing_map.shape), row_id_map[:, 2 * E :].reshape(*leading, 1)


@jax.custom_vjp
def _experts_descending(routing_map: jax.Array) -> tuple[jax.Array, ...]:
    """The experts of every token, descending, int32[..., E], and their number, int32[..., 1]."""
    t = routing_map.ndim - 1
    return TokenCall(_descending, None, operands=(t,), results=(t, t))(routing_map)


_experts_descending.defvjp(lambda routing_map: (_experts_descending(routing_map), None), lambda _, d: (None,))


def routing_map_to_selected_experts(sparse_probs: Any, routing_map: Any, topk: int) -> tuple[jax.Array, jax.Array]:
    """Converts the dense forms of a selection to the experts of every token and their probabilities.

    Args:
      sparse_probs: [..., E] float32, bfloat16 or float16.
      routing_map: bool, int8, int16, int32 or int64 [..., E], nonzero at the selected experts.
      topk: K <= E, the number of experts per token.

    Returns:
      (experts int32[..., K], ascending; probs [..., K], dtype of sparse_probs). A token with fewer than K experts has
      expert -1 and probability 0 in the remaining columns; a token with more has its K lowest experts.

    Gradient: for sparse_probs, at the selected experts; 0 elsewhere.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes do not fit, or topk is not in [1, E].

    Source: semantics, section 5.

    >>> experts, probs = routing_map_to_selected_experts(
    ...     jnp.array([[0.0, 0.25, 0.75]]), jnp.array([[False, True, True]]), 2)
    >>> experts.tolist(), probs.tolist()
    ([[1, 2]], [[0.25, 0.75]])
    """
    sparse_probs = check.array("sparse_probs", sparse_probs, check.FLOATS, (..., "T", "E"))
    *leading, E = sparse_probs.shape
    routing_map = check.narrow("routing_map", routing_map, _MAP_DTYPES, sparse_probs.shape)
    check_num_slots("routing_map", math.prod(leading), E)
    K = check.integer("topk", topk, 1, E)
    descending, count = _experts_descending(routing_map != 0)
    position = count - 1 - jnp.arange(K, dtype=jnp.int32)
    experts = jnp.take_along_axis(descending, jnp.maximum(position, 0), axis=-1, mode="clip")
    experts = jnp.where(position >= 0, experts, -1)
    probs = jnp.take_along_axis(sparse_probs, jnp.maximum(experts, 0), axis=-1, mode="clip")
    return experts, jnp.where(experts >= 0, probs, 0)
