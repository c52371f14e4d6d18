"""The halves of the layer's passes over the memory of peers, each as C calls that one operation runs.

In eager mode tokens are sent before (`GroupExchanges.start`), otherwise by the operation. The GEMMs that read them wait
for them, and begin with those that arrive first. Partial sums return in chunks of columns while the next chunk is
computed.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from anabranch.peer_exchange import ALL_BUFFERS, FINISH
from anabranch.torch.binding import calls
from anabranch.torch.binding.calls import Call
from anabranch.torch.binding.define import python_run
from anabranch.torch.ops.experts_ops import (
    ARGUMENTS_OF_HIDDEN,
    NETWORK,
    QUANTIZED_NETWORK,
    RESULTS_OF_HIDDEN,
    allocate_experts,
    allocate_experts_hidden,
    allocate_experts_inputs,
    experts_calls,
    experts_hidden_calls,
    experts_inputs_calls,
    has_adapters,
    local_experts,
)
from anabranch.torch.ops.gradients import request, requested_names
from anabranch.torch.parallel.peers import SUMS, TOKENS, GroupExchanges


class _Exchanges(NamedTuple):
    """The exchanges of a group, for options of C calls."""

    tokens: Any
    small: Any

    def finish(self, tokens: Any, buffer: int) -> Call:
        """Waits for tokens that a started all-gather sends to a buffer."""
        return calls.exchange_all_gather({"x": tokens}, exchange=self.tokens, buffer=buffer, part=FINISH)

    def release(self, buffer: int) -> Call:
        """Allows the peers to overwrite a buffer for tokens."""
        return calls.exchange_release({}, exchange=self.tokens, buffer=buffer)

    def arriving(self, call: Call, buffer: int) -> Call:
        """The call on tokens that are arriving in a buffer."""
        return call._replace(options={**call.options, "arriving": self.tokens, "arriving_buffer": buffer})

    def returning(self, call: Call) -> Call:
        """The call, whose sums return to their ranks."""
        return call._replace(options={**call.options, "returning": self.tokens, "returning_buffer": SUMS})

    def total(self, sums: Any, out: Any, factor: float = 1.0, addend: Any = None) -> Call:
        """Adds up returned sums."""
        tensors = {"sums": sums, "addend": addend, "out": out}
        return calls.exchange_sum(tensors, exchange=self.tokens, buffer=SUMS, factor=factor)


class Pass:
    """An operation on a rank of a group.

    Args:
      name, arguments, results: as in its schema, without the group.
      allocate: allocates the results, given the arguments.
      c_calls: returns the C calls, given the exchanges, results and arguments.
      sent: returns the arguments with the arriving tokens that are None, given a function that sends and the arguments.
      small_bytes: given the arguments, the size of what the rank receives by the exchange for small tensors.
      released: the buffers for tokens that the calls release.
    """

    def __init__(
        self, name: str, arguments: str, results: str, allocate: Callable[..., Any],
        c_calls: Callable[..., Sequence[Call]], sent: Callable[..., tuple[Any, ...]], small_bytes: Callable[..., int],
        released: tuple[int, ...],
    ):  # fmt: skip
        self.arguments, self.results, self.allocate, self._c_calls = arguments, results, allocate, c_calls
        self._sent = sent
        self._small_bytes, self._released = small_bytes, released
        self._run = python_run(
            f"{name}(int tokens, int small, {arguments}) -> ({results})",
            lambda tokens, small, *given: allocate(*given),
            self.calls,
        )

    def calls(self, found: Any, tokens: int, small: int, *given: Any) -> Sequence[Call]:
        """The C calls that compute the results `found`. tokens, small: the addresses of the exchanges."""
        exchanges = _Exchanges(ctypes.c_void_p(tokens), ctypes.c_void_p(small))
        return [*self._c_calls(exchanges, found, *given), exchanges.release(ALL_BUFFERS)._replace(after_error=True)]

    def run(self, exchanges: GroupExchanges, given: Sequence[Any]) -> tuple[Tensor, ...]:
        """Runs the calls on a rank. Tokens are arriving in the buffers of `exchanges`, or are sent first."""
        started: list[int] = []

        def send(tokens: Tensor, buffer: int, rows: int) -> Tensor:
            started.append(buffer)
            return exchanges.start(tokens.contiguous(), buffer)

        try:
            arguments = self._sent(send, *given)
            results: tuple[Tensor, ...] = self._run(*exchanges.pointers(self._small_bytes(*arguments)), *arguments)
        except BaseException:
            exchanges.abandon()
            raise
        exchanges.released(*self._released)
        exchanges.release(*started)
        return results

    def fake(self, *given: Any) -> tuple[Tensor, ...]:
        """Results without values."""
        arguments = self._sent(lambda tokens, buffer, rows: tokens.new_empty((rows, *tokens.shape[1:])), *given)
        results: tuple[Tensor, ...] = self.allocate(
            *[a.contiguous() if isinstance(a, Tensor) else a for a in arguments]
        )
        return results


def padded(num_bytes):
    """The size of a tensor in the buffer of an exchange of several tensors."""
    return -(-num_bytes // 16) * 16


def _allocate_experts(tokens, x, experts, weights, counts, rows, ranks, rank, align_size, *network):
    arrived = experts.shape[0] * ranks, experts.shape[1]
    maps = experts.new_empty(arrived), experts.new_empty((rows,)), experts.new_empty((local_experts(*network),))
    _, h, u, copies = allocate_experts(x, None, None, None, *maps, *network)
    all_counts = counts.new_empty((ranks, counts.shape[1]))
    return tokens.new_empty(tokens.shape), h, u, copies, weights.new_empty(arrived), all_counts, *maps


def _experts_calls(exchanges, results, tokens, x, experts, weights, counts, rows, ranks, rank, align_size, *network):
    out, h, u, copies, there, all_counts, row_of_slot, slot_of_row, group_sizes = results
    all_experts, sums, local = experts.new_empty(row_of_slot.shape), x.new_empty(x.shape), local_experts(*network)
    gathered = {"x": experts, "out": all_experts, "x_2": weights, "out_2": there, "x_3": counts, "out_3": all_counts}
    gather = calls.exchange_all_gather(gathered, exchange=exchanges.small)
    maps = {"group_sizes": group_sizes, "row_of_slot": row_of_slot, "slot_of_row": slot_of_row}
    plan = calls.plan(
        {"experts": all_experts, **maps}, num_experts=local, align_size=align_size, is_part=1, first_expert=local * rank
    )
    *before, up, down = experts_calls(
        (sums, h, u, copies), x, None, None, there, row_of_slot, slot_of_row, group_sizes, *network
    )
    return [
        gather, plan, *before, exchanges.arriving(up, TOKENS[0]), exchanges.release(TOKENS[0]),
        exchanges.returning(down), exchanges.total(sums, out),
    ]  # fmt: skip


def _sent_experts(send, tokens, x, experts, weights, counts, rows, ranks, *others):
    x = send(tokens, TOKENS[0], ranks * experts.shape[0]) if x is None else x
    return tokens, x, experts, weights, counts, rows, ranks, *others


def _allocate_hidden(tokens, d_tokens, d_out, h, x, there, slot_of_row, group_sizes, *rest):
    found = allocate_experts_hidden(d_out, None, None, h, x, there, slot_of_row, group_sizes, *rest)
    return *found, there.new_empty(there.shape)


def _hidden_calls(exchanges, results, tokens, d_tokens, d_out, h, x, there, slot_of_row, group_sizes, *rest):
    *found, received = results
    d_there = found[3]
    *before, hidden = experts_hidden_calls(found, d_out, None, None, h, x, there, slot_of_row, group_sizes, *rest)
    if has_adapters(*rest):  # their gradients read x
        before.insert(0, exchanges.finish(tokens, TOKENS[1]))
    return [
        *before, exchanges.arriving(hidden, TOKENS[0]), exchanges.release(TOKENS[0]),
        calls.exchange_all_to_all({"x": d_there, "out": received}, exchange=exchanges.small),
    ]  # fmt: skip


def _sent_hidden(send, tokens, d_tokens, d_out, h, x, there, slot_of_row, group_sizes, *rest):
    rows = there.shape[0]
    d_out = send(d_tokens, TOKENS[0], rows) if d_out is None else d_out
    if x is None:  # only gradients of factors read it; otherwise a tensor of its shape and dtype will do
        x = send(tokens, TOKENS[1], rows) if has_adapters(*rest) else d_out
    return tokens, d_tokens, d_out, h, x, there, slot_of_row, group_sizes, *rest


def _allocate_inputs(tokens, x, addend, row_of_slot, slot_of_row, group_sizes, d_x_dtype, factor, *rest):
    _, *of_weights = _local_gradients(allocate_experts_inputs, x, row_of_slot, slot_of_row, group_sizes, *rest)
    return tokens.new_empty(tokens.shape, dtype=d_x_dtype), *of_weights


def _inputs_calls(
    exchanges, results, tokens, x, addend, row_of_slot, slot_of_row, group_sizes, d_x_dtype, factor, *rest
):
    d_x, *of_weights = results
    sums = x.new_empty(x.shape)
    found = _local_gradients(
        lambda *given: experts_inputs_calls((sums, *of_weights), *given),
        x, row_of_slot, slot_of_row, group_sizes, *rest,
    )  # fmt: skip
    combined = next(i for i, call in enumerate(found) if call.operation is calls.grouped_matmul_combine)
    found[combined] = exchanges.returning(found[combined])
    return [
        exchanges.finish(tokens, TOKENS[1]), *found, exchanges.release(TOKENS[1]),
        exchanges.total(sums, d_x, factor, addend),
    ]  # fmt: skip


def _sent_inputs(send, tokens, x, addend, row_of_slot, *others):
    x = send(tokens, TOKENS[1], row_of_slot.shape[0]) if x is None else x
    return tokens, x, addend, row_of_slot, *others


def _local_gradients(function, x, row_of_slot, slot_of_row, group_sizes, *rest):
    """Calls a function of `experts_inputs` for this rank's sums of the gradient of x, without an addend."""
    dh, dh_q, dh_scales, v_in, w_in_dtype, requested, w_in, b_in, w_out, *others = rest
    return function(
        dh, dh_q, dh_scales, x, None, row_of_slot, slot_of_row, group_sizes, w_in, b_in, w_out, v_in, w_in_dtype,
        x.dtype, request(dict.fromkeys({"x", *requested_names(requested)}, True)), *others,
    )  # fmt: skip


#: tokens, d_tokens: x and d_out of this rank, [T, D]. x, d_out: where those of all ranks arrive, [P T, D], or None: the
#: operation sends them. Except in plain eager mode they must be None, since no result of an operation of a graph may be
#: memory that the peers write to. there: the weights of arrived
#: tokens, float32 [P T, K]. counts: int32 [1, n] of this rank; all_counts: int32 [P, n] of all ranks. received:
#: d_weights from all ranks, float32 [P T, K], 0 where another rank has the expert. The other results are those of
#: `experts`, `experts_hidden` and `experts_inputs`; d_x = factor times the sum over the ranks, plus addend.
PASSES = {
    "experts": Pass(
        "experts",
        "Tensor tokens, Tensor? x, Tensor experts, Tensor weights, Tensor counts, SymInt rows, int ranks, int rank, "
        f"int align_size, {NETWORK}",
        "Tensor output, Tensor h, Tensor lora_u, Tensor lora_copies, Tensor there, Tensor all_counts, "
        "Tensor row_of_slot, Tensor slot_of_row, Tensor group_sizes",
        _allocate_experts,
        _experts_calls,
        _sent_experts,
        lambda tokens, x, experts, weights, counts, rows, ranks, *others: sum(
            padded(ranks * own.nbytes) for own in (experts, weights, counts)
        ),
        TOKENS[:1],
    ),
    "hidden": Pass(
        "hidden",
        "Tensor tokens, Tensor d_tokens, Tensor? d_out, Tensor h, Tensor? x, Tensor there, Tensor slot_of_row, "
        f"Tensor group_sizes, {ARGUMENTS_OF_HIDDEN}",
        f"{RESULTS_OF_HIDDEN}, Tensor received",
        _allocate_hidden,
        _hidden_calls,
        _sent_hidden,
        lambda tokens, d_tokens, d_out, h, x, there, *others: there.nbytes,
        TOKENS[:1],
    ),
    "inputs": Pass(
        "inputs",
        "Tensor tokens, Tensor? x, Tensor? addend, Tensor row_of_slot, Tensor slot_of_row, Tensor group_sizes, "
        "ScalarType d_x_dtype, float factor, Tensor dh, Tensor dh_q, Tensor dh_scales, Tensor? lora_v_in, "
        f"ScalarType w_in_dtype, int requested, Tensor w_in, Tensor? b_in, Tensor w_out, {QUANTIZED_NETWORK}",
        "Tensor d_x, Tensor d_w_in, Tensor d_b_in",
        _allocate_inputs,
        _inputs_calls,
        _sent_inputs,
        lambda *arguments: 0,
        TOKENS[1:],
    ),
}
