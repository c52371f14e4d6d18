"""Low-rank adapters (LoRA) of the experts: what both front ends share.

Sizes: E experts, D model width, F expert width, P parts of w_in, r and q ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from anabranch import checks

PROJECTIONS = ("in", "out")


class Lora(NamedTuple):
    """The factors of the experts' adapters: W_in + s_in A_in B_in and W_out + s_out A_out B_out for each expert.

    Each projection has both factors or neither. A first dimension of 1 in place of E is one factor for all experts;
    each factor decides for itself. Factors have the dtype of x or float32. Axes are in this order whatever the layouts
    of w_in and w_out. Source: semantics, section 12.

    Attributes:
      a_in: [E or 1, D, r], or None.
      b_in: [E or 1, r, P, F], or None.
      a_out: [E or 1, F, q], or None.
      b_out: [E or 1, q, D], or None.

    Raises:
      TypeError, ValueError: by the function that takes the factors: a dtype or shape differs, or a projection has one
        factor only. The message names the field, such as "lora.a_in".

    Gradients: of every factor, in its dtype. See `init_lora` for an example.
    """

    a_in: Any = None
    b_in: Any = None
    a_out: Any = None
    b_out: Any = None


#: The names of the factors as operands of the layer and in the C library.
NAMES = tuple(f"lora_{name}" for name in Lora._fields)


def check_scales(value: Any, lora: Lora | None) -> tuple[float, float]:
    """Checks the argument lora_scale: (s_in, s_out), 0 for a projection without an adapter."""
    pair = isinstance(value, (tuple, list))
    if pair and len(value) != 2:
        raise ValueError(f"lora_scale: got {len(value)} numbers, expected one, or two (of w_in and of w_out)")
    s_in, s_out = (checks.number("lora_scale", scale) for scale in (value if pair else (value, value)))
    if lora is None:
        return 0.0, 0.0
    return s_in if lora.a_in is not None else 0.0, s_out if lora.a_out is not None else 0.0


def check_pair(
    check: Callable[[str, Any, Sequence[Any], Sequence[Any]], Any],
    dtypes: Sequence[Any],
    names: tuple[str, str],
    factors: tuple[Any, Any],
    num_experts: int,
    inputs: tuple[str, int],
    outputs: Sequence[tuple[str, int]],
) -> tuple[Any, Any]:
    """Checks the two factors of an adapter.

    Args:
      check: the front end's check of an array: (name, value, dtypes, shape) -> array.
      dtypes: the dtype of x and float32.
      names: of the factors in messages.
      factors: (A, B); both None: there is no adapter.
      num_experts: E.
      inputs: the axis that A contracts, a name and a size.
      outputs: the axes of the result of B.

    Returns:
      The checked factors, or (None, None).
    """
    a, b = factors
    if a is None and b is None:
        return None, None
    for name, factor, other in (names[0], a, names[1]), (names[1], b, names[0]):
        if factor is None:
            raise ValueError(f"{name}: got None, expected a factor, since {other} is given")
    a = check(names[0], a, dtypes, ("E or 1", inputs, "r"))
    if a.shape[2] < 1:
        raise ValueError(f"{names[0]}: got {checks.describe(a)}, expected a rank of at least 1")
    b = check(names[1], b, dtypes, ("E or 1", ("r", a.shape[2]), *outputs))
    for name, factor in zip(names, (a, b), strict=True):
        if factor.shape[0] != 1 and factor.shape[0] != num_experts:  # torch does not trace `in` for symbolic sizes
            raise ValueError(
                f"{name}: got {checks.describe(factor)}, expected a first dimension of {num_experts} (experts), or of "
                "1 for a factor that all experts share"
            )
    return a, b


def check_lora(
    check: Callable[[str, Any, Sequence[Any], Sequence[Any]], Any],
    dtypes: Sequence[Any],
    lora: Any,
    sizes: Mapping[str, int],
) -> Lora | None:
    """Checks the argument lora against the sizes "e", "d", "p" and "f". check, dtypes: see `check_pair`.

    Returns:
      The checked factors; None if there are none.
    """
    if lora is None:
        return None
    if not isinstance(lora, Lora):
        raise TypeError(f"lora: got {checks.describe(lora)}, expected a Lora")
    E, D, P, F = (sizes[axis] for axis in "edpf")
    names = tuple(f"lora.{name}" for name in Lora._fields)
    into, out_of, width = ("D", D), (("P", P), ("F", F)), ("F", F)
    a_in, b_in = check_pair(check, dtypes, (names[0], names[1]), (lora.a_in, lora.b_in), E, into, out_of)
    a_out, b_out = check_pair(check, dtypes, (names[2], names[3]), (lora.a_out, lora.b_out), E, width, (into,))
    checked = Lora(a_in, b_in, a_out, b_out)
    return None if a_in is None and a_out is None else checked


def check_join(
    check: Callable[[str, Any, Sequence[Any], Sequence[Any]], Any], dtypes: Sequence[Any], gate: Any, up: Any
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Checks the arguments of `join_lora` and returns them. check: see `check_pair`; dtypes: those of factors."""
    for name, pair in (("gate", gate), ("up", up)):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"{name}: got {checks.describe(pair)}, expected a pair of factors (A, B)")
    gate_a = check("gate[0]", gate[0], dtypes, ("E or 1", "D", "r"))
    D = ("D", gate_a.shape[1])
    dtype = [dtype for dtype in dtypes if dtype in (gate_a.dtype, str(gate_a.dtype))]
    gate_b = check("gate[1]", gate[1], dtype, ("E or 1", ("r", gate_a.shape[2]), "F"))
    up_a = check("up[0]", up[0], dtype, ("E or 1", D, "q"))
    up_b = check("up[1]", up[1], dtype, ("E or 1", ("q", up_a.shape[2]), ("F", gate_b.shape[2])))
    for name, factor, other in (("up[0]", up_a, gate_a), ("up[1]", up_b, gate_b)):
        sizes = {factor.shape[0], other.shape[0]} - {1}
        if len(sizes) > 1:
            raise ValueError(
                f"{name}: got {checks.describe(factor)} beside {other.shape[0]} experts, expected {other.shape[0]} or 1"
            )
    return (gate_a, gate_b), (up_a, up_b)


def check_names_of(argument: str, value: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Checks an argument that is a sequence of distinct names."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{argument}: got {checks.describe(value)}, expected a sequence of names of {names}")
    chosen = tuple(checks.choice(argument, name, names) for name in value)
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"{argument}: got {chosen}, expected distinct names")
    return chosen


def factor_shapes(
    sizes: Mapping[str, int], rank: int, projections: Sequence[str], shared: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """The shapes of the factors of new adapters, by field of `Lora`. sizes: see `check_lora`."""
    E, D, P, F = (sizes[axis] for axis in "edpf")
    shapes = {"a_in": (D, rank), "b_in": (rank, P, F), "a_out": (F, rank), "b_out": (rank, D)}
    return {
        name: (1 if name in shared else E, *shape)
        for name, shape in shapes.items()
        if name.split("_")[1] in projections
    }


class NewLora(NamedTuple):
    """The checked options of a module that has adapters of its own, in both projections."""

    rank: int
    """0: no adapters."""
    scale: float
    shared: tuple[str, ...]


def new_lora(lora_rank: Any, lora_alpha: Any, lora_shared: Any) -> NewLora:
    """Checks the arguments lora_rank, lora_alpha and lora_shared of a module."""
    rank = checks.integer("lora_rank", lora_rank, 0, checks.INDEX_LIMIT - 1)
    alpha = None if lora_alpha is None else checks.number("lora_alpha", lora_alpha)
    shared = check_names_of("lora_shared", lora_shared, Lora._fields)
    if not rank and (alpha is not None or shared):
        name, value = ("lora_shared", shared) if alpha is None else ("lora_alpha", alpha)
        raise ValueError(f"{name}: got {value} without adapters, expected lora_rank >= 1")
    return NewLora(rank, 1.0 if alpha is None else alpha / rank, shared)


def operand_fields(lora: Lora | None) -> dict[str, Any]:
    """The factors by the names of the layer's operands; empty without adapters."""
    return {} if lora is None else dict(zip(NAMES, lora, strict=True))
