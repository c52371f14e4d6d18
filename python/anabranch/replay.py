"""Replay of a recorded routing: what both front ends share."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from anabranch import checks


class Replay(NamedTuple):
    """A recorded routing. Replayed tokens get the recorded experts; the router selects those of all other tokens.

    Counts and losses are of the selection that is used. A token that the layer's token_mask masks is not replayed.

    Attributes:
      experts: int16, int32 or int64 [..., K], where K is topk; -1: no expert. Those of other tokens are not read.
      weights: float32 [..., K], the recorded weights, used as constants: they are not multiplied by scaling_factor.
        None: the router computes the weights of the recorded experts, as with `forced_experts`.
      mask: bool [...], True for a replayed token; None: all tokens are replayed.

    Raises:
      TypeError, ValueError: by the function that takes the replay: a dtype or shape differs, or forced_experts is given
        too. The message names the field, such as "replay.experts".

    Gradients: recorded weights have none, so that for these tokens the router has gradients from the losses only.
    Without weights, the router is trained through the weights that it computes. Source: semantics, section 14.

    >>> from anabranch.jax import Replay, moe
    >>> x, gate, w_in, w_out = jnp.ones((3, 4)), jnp.eye(4), jnp.ones((4, 4, 2, 8)), jnp.ones((4, 8, 4))
    >>> recorded = Replay(jnp.array([[3, 1], [0, 2], [1, 0]]), mask=jnp.array([True, True, False]))
    >>> moe(x, gate, w_in, w_out, topk=2, replay=recorded).experts[:2].tolist()
    [[3, 1], [0, 2]]
    """

    experts: Any
    weights: Any = None
    mask: Any = None


def check_replay(
    indices: Callable[[str, Any, Sequence[Any]], Any],
    optional: Callable[[str, Any, Sequence[Any], Sequence[Any]], Any],
    dtypes: tuple[Any, Any],
    replay: Any,
    forced_experts: Any,
    shape: Sequence[int],
) -> Replay | None:
    """Checks the argument replay; returns what the layer replays, None if it replays nothing.

    Args:
      indices, optional: the front end's checks of indices and of an optional array.
      dtypes: its float32 and its bool.
      replay: the argument.
      forced_experts: checked, or None. It is a replay without weights and mask.
      shape: (..., K).
    """
    if replay is None:
        return None if forced_experts is None else Replay(forced_experts)
    if forced_experts is not None:
        raise ValueError("replay: got one together with forced_experts, expected one of them")
    if not isinstance(replay, Replay):
        raise TypeError(f"replay: got {checks.describe(replay)}, expected a Replay")
    return Replay(
        indices("replay.experts", replay.experts, shape),
        optional("replay.weights", replay.weights, dtypes[:1], shape),
        optional("replay.mask", replay.mask, dtypes[1:], shape[:-1]),
    )


def fields_of(replay: Any) -> tuple[Any, ...]:
    """The fields of a Replay; () for None, and for a value that the checks reject."""
    return tuple(replay) if isinstance(replay, Replay) else ()


#: The names of the fields as operands of the layer.
NAMES = tuple(f"replay_{name}" for name in Replay._fields)


def operand_fields(replay: Replay | None) -> dict[str, Any]:
    """The fields of the layer's operands for a Replay."""
    return {} if replay is None else dict(zip(NAMES, replay, strict=True))
