"""The halves of the layer's passes over the memory of peers, each as one custom call of several C calls.

The forward pass is one half, `experts`. The backward pass has two: `hidden` up to the gradients of the intermediate
rows, and `inputs` from there on. Each half starts its own transfers and releases all buffers at its end: XLA may run
the call of another layer between two halves. The GEMMs that read tokens wait for them, and begin with those that arrive
first. Partial sums return in chunks of columns while the next chunk is computed. x is sent again in `inputs`, while its
gradient is computed: so it need not be copied out of the exchange.
"""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anabranch.jax.binding import ffi, workspaces
from anabranch.jax.binding.sequence import Buffer
from anabranch.jax.binding.sequence import Sequence as CallSequence
from anabranch.jax.ops.ffn import (
    UP,
    WITH_DH,
    FfnConfig,
    FfnOperands,
    IntermediateGradients,
    Returning,
    Saved,
    ffn_backward_by_slot,
    ffn_forward_by_slot,
    rows_gradient,
    up_gradients,
)
from anabranch.jax.parallel.exchange import Bounds, RingRoute
from anabranch.peer_exchange import FINISH, START, WHOLE
from anabranch.rows import num_rows_needed

#: The buffers of the exchange for tokens, all of one size.
TOKENS, SUMS = (0, 1), 2


class _Half:
    """The C calls of a half. Methods return Buffers, which take the place of arrays in the rules of ops/ffn.py.

    Args:
      bounds: the sizes of the exchange.
      tokens: [T, D], of the shape and dtype of all tokens and sums.
      small: the arrays of this rank that are sent to all ranks or back.
      order: the result `order` of the previous half; [] for the first one.
    """

    def __init__(self, bounds: Bounds, tokens: jax.Array, small: Sequence[jax.Array], order: list[jax.Array]):
        assert bounds.peers is not None
        self._ranks, self._dtype = bounds.ranks, tokens.dtype
        self._rows = bounds.ranks * tokens.shape[0], tokens.shape[1]
        all_tokens, *of_small = (bounds.ranks * array.size * array.dtype.itemsize for array in (tokens, *small))
        names = {"tokens": bounds.peers.exchange(*(all_tokens,) * (len(TOKENS) + 1))}
        if small:
            names["small"] = bounds.peers.exchange(max(of_small))
        self.calls = CallSequence(names)
        self._order = self.calls.result((1,), jnp.int32)
        for array in order:
            self.calls.operand(array)

    def send(self, tokens: jax.Array, buffer: int) -> Any:
        """Starts to send tokens [T, D] to a buffer of all ranks; returns where they arrive."""
        self._exchange("all_gather", {"x": tokens}, "tokens", buffer=buffer, part=START)
        return self.place(buffer)

    def place(self, buffer: int) -> Any:
        """A buffer for tokens."""
        return self.calls.view("tokens", buffer, self._rows, self._dtype)

    def arriving(self, buffer: int) -> None:
        """The last call waits for the tokens of a buffer, which have been sent."""
        call = self.calls.calls[-1]
        call.options |= {"arriving": "tokens", "arriving_buffer": buffer}
        call.workspace += workspaces.arriving(call.tensors["group_sizes"].shape[0])

    def finish(self, tokens: jax.Array, buffer: int) -> None:
        """Waits for the tokens of a buffer."""
        self._exchange("all_gather", {"x": tokens}, "tokens", buffer=buffer, part=FINISH)

    def release(self, buffer: int) -> None:
        """Allows the peers to overwrite a buffer for tokens."""
        self._exchange("release", {}, "tokens", buffer=buffer)

    def gather(self, array: jax.Array) -> Any:
        """A small array [n, m] of all ranks, [P n, m]."""
        return self._small("all_gather", array, self._ranks * array.shape[0])

    def swap(self, blocks: Any) -> Any:
        """Block d of a small array [P n, m] of rank s becomes block s of rank d."""
        return self._small("all_to_all", blocks, blocks.shape[0])

    def _small(self, operation: str, array: Any, rows: int) -> Any:
        out = self.calls.result((rows, *array.shape[1:]), array.dtype)
        self._exchange(operation, {"x": array, "out": out}, "small", buffer=0, part=WHOLE)
        return out

    def total(self, sums: Any, dtype: Any, addend: jax.Array | None = None) -> Any:
        """Adds up the sums that return to this rank, plus an addend: [T, D] of a dtype."""
        out = jax.ShapeDtypeStruct((self._rows[0] // self._ranks, self._rows[1]), dtype)
        given = {"sums": sums, "addend": addend}
        aliases = {"addend": "out"} if addend is not None and addend.dtype == dtype else None
        made = self._exchange("sum", given, "tokens", {"out": out}, aliases=aliases, buffer=SUMS, factor=1.0)
        return made["out"]

    def _exchange(
        self,
        operation: str,
        operands: dict[str, Any],
        exchange: str,
        results: dict[str, Any] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        return self.calls.call(f"exchange_{operation}", operands, results or {}, exchange=exchange, **options)

    def run(self, wanted: Any) -> tuple[Any, list[jax.Array]]:
        """Runs the calls; returns `wanted` with arrays in the place of its Buffers, and the result `order`."""
        results = ffi.call_sequence(self.calls)

        def found(leaf: Any) -> Any:
            return results[leaf.index] if isinstance(leaf, Buffer) else leaf

        return jax.tree.map(found, wanted), [found(self._order)]


def _wanted(operands: FfnOperands, names: Sequence[str], wanted: Collection[str]) -> list[str]:
    """The names of operands that are given and whose gradients are wanted."""
    arrays = operands.by_name()
    return [name for name in names if name in wanted and arrays.get(name) is not None]


@dataclasses.dataclass
class PeerPasses:
    """The halves of one pass, whose calls run one after another."""

    bounds: Bounds
    _order: list[jax.Array] = dataclasses.field(default_factory=list)
    """The result `order` of the last half, if there was one."""

    def _half(self, tokens: jax.Array, small: Sequence[jax.Array] = ()) -> _Half:
        return _Half(self.bounds, tokens, small, self._order)

    def _run(self, half: _Half, wanted: Any) -> Any:
        found, self._order = half.run(wanted)
        return found

    def experts(
        self,
        config: FfnConfig,
        operands: FfnOperands,
        experts: jax.Array,
        weights: jax.Array,
        dtype: Any,
        *,
        save: bool,
    ) -> tuple[jax.Array, Saved, RingRoute]:
        """The forward pass.

        Args:
          config: the options of the experts.
          operands: those of this rank's experts; x are its tokens [T, D]. Without slot_of_row, group_sizes and weights.
          experts: int32 [T, K], numbered over all ranks; -1: no expert.
          weights: float32 [T, K].
          dtype: of the output.
          save: whether a backward pass follows.

        Returns:
          (the output [T, D], the residuals, the route).
        """
        half = self._half(operands.x, (experts, weights))
        x = half.send(operands.x, TOKENS[0])
        route = self._plan(half, half.gather(experts))
        there = half.gather(weights)
        early, late = (there, None) if config.weight_early else (None, there)
        given = operands._replace(x=x, slot_of_row=route.slot_of_row, group_sizes=route.group_sizes, weights=early)
        rows, saved = ffn_forward_by_slot(config, given, save=save)
        half.arriving(TOKENS[0])
        half.release(TOKENS[0])
        sums = rows.sum(route.row_of_slot, late, rows.dtype, returning=self._returning)
        return self._run(half, (half.total(sums, dtype), saved, route))

    @property
    def _returning(self) -> Returning:
        return Returning("tokens", SUMS, self.bounds.ranks)

    def _plan(self, half: _Half, experts: Any) -> Any:
        """The plan of this rank's experts among all."""
        b, int32 = self.bounds, jnp.int32
        rows = num_rows_needed(b.arriving_slots, b.local_experts, b.align_size)
        found = ffi.call(
            "ab_xla_plan",
            {"experts": experts},
            {
                "row_of_slot": jax.ShapeDtypeStruct(experts.shape, int32),
                "slot_of_row": jax.ShapeDtypeStruct((rows,), int32),
                "group_sizes": jax.ShapeDtypeStruct((b.local_experts,), int32),
            },
            workspace=workspaces.plan(math.prod(experts.shape), b.local_experts),
            num_experts=b.local_experts,
            align_size=b.align_size,
            num_destinations=1,
            is_part=1,
            first_expert=b.local_experts,
        )
        half.calls.calls[-1].options["per_rank"] = "first_expert:tokens"
        return RingRoute(**found)

    def hidden(
        self,
        config: FfnConfig,
        operands: FfnOperands,
        route: RingRoute,
        weights: jax.Array,
        saved: Saved,
        d_out: jax.Array,
        wanted: Collection[str],
        w_out_dtype: Any,
    ) -> tuple[IntermediateGradients, jax.Array]:
        """The first half of the backward pass.

        Args:
          config, operands, weights: as in the forward pass.
          route, saved: from the forward pass.
          d_out: the cotangent of the output, [T, D].
          wanted: as for `ffn_backward_by_slot`.
          w_out_dtype: dtype of the gradient of w_out.

        Returns:
          (the results of `ffn_backward_by_slot`, with the gradients of DOWN; the gradients of the weights from all
          ranks, float32 [P T, K], 0 where another rank has the expert).
        """
        half = self._half(d_out, (weights,))
        d_rows = half.send(d_out, TOKENS[0])
        reads_x = bool(_wanted(operands, WITH_DH, wanted))
        x = half.send(operands.x, TOKENS[1]) if reads_x else half.place(TOKENS[1])
        there = half.gather(weights)
        if reads_x:
            half.finish(operands.x, TOKENS[1])
        arrived = operands._replace(x=x, slot_of_row=route.slot_of_row, group_sizes=route.group_sizes, weights=there)
        found = ffn_backward_by_slot(config, arrived, saved, d_rows, wanted, w_out_dtype)
        half.arriving(TOKENS[0])
        for buffer in TOKENS if reads_x else TOKENS[:1]:
            half.release(buffer)
        return self._run(half, (found, half.swap(found.weights)))

    def inputs(
        self,
        config: FfnConfig,
        operands: FfnOperands,
        route: RingRoute,
        intermediate: IntermediateGradients,
        wanted: Collection[str],
        dtype: Any,
        addend: jax.Array | None,
        w_in_dtype: Any,
    ) -> tuple[jax.Array | None, dict[str, jax.Array]]:
        """The second half of the backward pass, after `hidden`.

        Args:
          config, operands: as in the forward pass.
          route: from the forward pass.
          intermediate: from `hidden`.
          wanted: which gradients of "x" and of operands in UP to compute.
          dtype: of the gradient of x.
          addend: [T, D] or None, added to the gradient of x before it is rounded.
          w_in_dtype: dtype of the gradient of w_in.

        Returns:
          (the gradient of x, None if not wanted; the wanted gradients of operands in UP).
        """
        up = _wanted(operands, UP, wanted)
        if "x" not in wanted and not up:
            return None, {}
        half = self._half(operands.x)
        x = half.send(operands.x, TOKENS[1]) if up else half.place(TOKENS[1])
        slots: Any = half.calls.operand(route.slot_of_row)
        given, sums = operands._replace(x=x, slot_of_row=slots, group_sizes=route.group_sizes), None
        if "x" in wanted:
            rows = rows_gradient(config, given, intermediate)
            sums = rows.sum(route.row_of_slot, None, rows.dtype, returning=self._returning)
        found: Any = {}
        if up:
            half.finish(operands.x, TOKENS[1])
            found = up_gradients(config, given, intermediate, up, w_in_dtype)
            half.release(TOKENS[1])
        return self._run(half, (None if sums is None else half.total(sums, dtype, addend), found))
