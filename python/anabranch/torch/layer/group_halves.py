"""The halves of the passes of the experts on one rank of a process group.

The forward pass is one half. The backward pass has two, up to the gradients of the intermediate rows and from there on;
the gradients of routing are computed in between. Transports differ in how a half runs: `StepByStep` calls one step of a
transport after another; `InOneCall` is for the transport "p2p", where GEMMs overlap with transfers.
"""

from typing import Any

import torch
from torch import Tensor

from anabranch.torch.binding import private
from anabranch.torch.ops import torch_ops
from anabranch.torch.ops.gradients import FROM_DH, request, requested_names
from anabranch.torch.parallel.exchange import Passed, Route, Sending, Transport
from anabranch.torch.parallel.message import QuantizedOperand, dequantize, pack, quantize_rows, unpack
from anabranch.torch.parallel.p2p import experts_op, hidden_op, inputs_op


class StepByStep:
    """The halves with the steps of a transport.

    Args:
      chosen: the transport of this pass.
      fp8_scales: how tokens are quantised before they are sent; None: they are not.
      has_adapter: whether w_in has an adapter.
    """

    _x: Any
    """The arrived x, which `hidden` leaves to `inputs`."""

    def __init__(self, chosen: Transport, fp8_scales: int | None, has_adapter: bool):
        self._chosen, self._fp8_scales, self._has_adapter = chosen, fp8_scales, has_adapter
        #: K of `network`: assignments per arrived token.
        self.topk = chosen.topk

    def start(self, tokens: Tensor) -> Sending:
        """Starts to send tokens [T, D]."""
        return self._chosen.start(tokens if self._fp8_scales is None else pack(quantize_rows(tokens, self._fp8_scales)))

    def _arrived(self, route: Route, sending: Sending, D: int) -> QuantizedOperand:
        """Tokens that were sent in FP8."""
        return unpack(self._chosen.arrived(route, sending), D)

    def experts(
        self, x: Tensor, sending: Sending, experts: Tensor, weights: Tensor, counts: Tensor, network: Any, early: bool
    ) -> Passed:
        """The forward pass of tokens x that have been started.

        Args:
          experts: int32 [T, K], numbered over all ranks; -1: no expert.
          weights: float32 [T, K].
          counts: int32 [n], added up over the ranks while the experts compute.
          network: the arguments NETWORK of `experts`.
          early: whether weights multiply before w_out.
        """
        chosen = self._chosen
        counting = private.collectives.all_reduce(counts, "sum", chosen.ranks.group)
        route = chosen.plan(experts)
        there = chosen.send_weights(route, weights) if early or chosen.weights_there else None
        arrived: tuple[Any, ...]
        if self._fp8_scales is None:
            arrived = chosen.arrived(route, sending), None, None
        else:
            quantized = self._arrived(route, sending, x.shape[1])
            arrived = dequantize(quantized, x.dtype) if self._has_adapter else x, *quantized
        sums, *saved = torch_ops.experts(
            *arrived, there, route.row_of_slot, route.slot_of_row, route.group_sizes, *network
        )
        output = chosen.collect(route, chosen.start_return(sums), None if there is not None else weights, x.dtype)
        there = weights.new_empty((0,)) if there is None else there
        return Passed(*(output, private.collectives.wait_tensor(counting), *saved, there, route))

    def hidden(
        self, d_output: Tensor, x: Tensor, route: Route, weights: Tensor, there: Tensor, h: Tensor, rest: Any
    ) -> tuple[list[Tensor], Tensor]:
        """The first half of the backward pass.

        Args:
          there: `Passed.there` of the forward pass.
          rest: the arguments ARGUMENTS_OF_HIDDEN of `experts_hidden`.

        Returns:
          (the results of `experts_hidden`; the gradient of the weights, float32 [T, K]).
        """
        chosen, sending = self._chosen, self.start(d_output)
        there = _scaled(there if there.numel() else chosen.send_weights(route, weights), chosen)
        d_rows_sent: tuple[Any, ...] = (None, None)
        if self._fp8_scales is None:
            d_rows = chosen.arrived(route, sending)
            self._x = chosen.arrived(route, self.start(x))
        else:
            d_rows_sent = self._arrived(route, sending, x.shape[1])
            d_rows = dequantize(QuantizedOperand(*d_rows_sent), d_output.dtype)
            self._x = dequantize(self._arrived(route, self.start(x), x.shape[1]), x.dtype)
        found = torch_ops.experts_hidden(
            d_rows, *d_rows_sent, h, self._x, there, route.slot_of_row, route.group_sizes, *rest
        )
        return list(found), chosen.collect_weights(route, found[3])

    def inputs(
        self, route: Route, d_x_dtype: torch.dtype, addend: Tensor | None, requested: int, dh: Any, network: Any
    ) -> list[Tensor]:
        """The second half of the backward pass, after `hidden`: the gradients of x, w_in and b_in.

        Args:
          addend: [T, D] or None, added to the gradient of x before it is rounded to d_x_dtype.
          requested: which gradients of w_in and b_in to compute.
          dh: dh, dh_q, dh_scales, v_in and the dtype of the gradient of w_in.
          network: w_in, b_in and w_out, then the arguments QUANTIZED_NETWORK.
        """
        chosen, x = self._chosen, self._x
        *of_dh, v_in, w_in_dtype = dh
        w_in, b_in, w_out, *others = network

        def gradients(wanted: int) -> Any:
            return torch_ops.experts_inputs(
                *of_dh, x, None, route.row_of_slot, route.slot_of_row, route.group_sizes, w_in, b_in, w_out, v_in,
                w_in_dtype, x.dtype, wanted, *others,
            )  # fmt: skip

        # The sums of d_x return while the weights' gradients are computed.
        of_weights = requested_names(requested) & FROM_DH - {"x"}
        alone = chosen.overlaps and of_weights
        d_arrived, *found = gradients(request(dict.fromkeys({"x"} if alone else {"x", *of_weights}, True)))
        returning = chosen.start_return(d_arrived)
        if alone:
            _, *found = gradients(request(dict.fromkeys(of_weights, True)))
        factor = dh[0].new_full((chosen.ranks.tokens, chosen.returning), chosen.ranks.ranks, dtype=torch.float32)
        return [chosen.collect(route, returning, factor, d_x_dtype, addend), *found]


def _scaled(there: Tensor, chosen: Transport) -> Tensor:
    """Gradients of the experts are means over the P ranks: the weights carry 1/P, and the sum of d_x P."""
    return there / chosen.ranks.ranks


class InOneCall:
    """The halves over the memory of peers, one operation each. The methods are those of `StepByStep`."""

    _x: Sending
    """x on its way, which `hidden` leaves to `inputs`."""

    def __init__(self, chosen: Transport):
        self._chosen, self.topk = chosen, chosen.topk

    def start(self, tokens: Tensor) -> Sending:
        """See StepByStep."""
        return self._chosen.start(tokens)

    def experts(
        self, x: Tensor, sending: Sending, experts: Tensor, weights: Tensor, counts: Tensor, network: Any, early: bool
    ) -> Passed:
        """See StepByStep."""
        ranks = self._chosen.ranks
        output, *saved, all_counts, row_of_slot, slot_of_row, group_sizes = experts_op(
            sending.tokens, sending.arriving, experts, weights, counts[None], ranks.rows("p2p"), ranks.ranks,
            ranks.rank, ranks.align_size, *network, ranks.group,
        )  # fmt: skip
        route = Route(row_of_slot, slot_of_row, group_sizes, experts.new_empty((0,)), experts.new_empty((0,)))
        return Passed(*(output, all_counts.sum(0, dtype=torch.int32), *saved, route))

    def hidden(
        self, d_output: Tensor, x: Tensor, route: Route, weights: Tensor, there: Tensor, h: Tensor, rest: Any
    ) -> tuple[list[Tensor], Tensor]:
        """See StepByStep."""
        ranks, sending = self._chosen.ranks, self.start(d_output)
        self._x = self.start(x)
        *found, received = hidden_op(
            self._x.tokens, sending.tokens, sending.arriving, h, self._x.arriving, _scaled(there, self._chosen),
            route.slot_of_row, route.group_sizes, *rest, ranks.group,
        )  # fmt: skip
        return found, received.view(ranks.ranks, ranks.tokens, -1).sum(0)

    def inputs(
        self, route: Route, d_x_dtype: torch.dtype, addend: Tensor | None, requested: int, dh: Any, network: Any
    ) -> list[Tensor]:
        """See StepByStep."""
        ranks = self._chosen.ranks
        found: list[Tensor] = inputs_op(
            self._x.tokens, self._x.arriving, addend, route.row_of_slot, route.slot_of_row, route.group_sizes,
            d_x_dtype, float(ranks.ranks), *dh, requested, *network, ranks.group,
        )  # fmt: skip
        return found


Halves = StepByStep | InOneCall


def halves(chosen: Transport, x: Tensor, fp8_scales: int | None, has_adapter: bool) -> Halves:
    """The halves of one pass of tokens x."""
    if chosen.fuses and fp8_scales is None and x.numel() > 0:
        return InOneCall(chosen)
    return StepByStep(chosen, fp8_scales, has_adapter)
