"""The transport "p2p": the ring's exchanges over the memory of peers (include/anabranch/exchange.h), without NCCL.

The experts read arrived tokens where the peers have written them. Each half of a pass is one operation (p2p_passes.py),
whose GEMMs overlap with the transfers. With fp8_exchange the steps of `Transport` run one after another, and end with
`collect`, which releases the memory of the tokens.

Memory that the peers write to is a result of an operation in plain eager mode only. A compiler may reuse a result,
merge equal operations or compute one again, and a mode may keep results.
"""

from typing import Any

import torch
from torch import Tensor

from anabranch.torch.binding import private
from anabranch.torch.binding.define import _ops
from anabranch.torch.binding.derivatives import reject_derivative
from anabranch.torch.ops import torch_ops
from anabranch.torch.parallel import p2p_passes
from anabranch.torch.parallel.exchange import Ranks, Returning, Ring, Route, Sending
from anabranch.torch.parallel.peers import SUMS, TOKENS, exchanges_of, has_made, unavailable_reason


def _of(group: str) -> Any:
    return exchanges_of(private.resolve_group(group))


def _gather(x: Tensor, ranks: int, group: str) -> Tensor:
    return _of(group).gather(_matrix(x)).view(ranks * x.shape[0], *x.shape[1:])


def _start(x: Tensor, number: int, ranks: int, group: str) -> Tensor:
    return _of(group).start(x, TOKENS[number])


def _finish(x: Tensor, arriving: Tensor, number: int, group: str) -> Tensor:
    _of(group).finish(x, TOKENS[number])
    return arriving.view(arriving.shape)


def _exchange(x: Tensor, group: str) -> Tensor:
    return _of(group).exchange(_matrix(x)).view(x.shape)


def _return(sums: Tensor, group: str) -> Tensor:
    return _of(group).start_return(sums)


def _collect(
    sums: Tensor, returning: Tensor, rows: Tensor, weights: Tensor | None, addend: Tensor | None,
    dtype: torch.dtype, group: str,
) -> Tensor:  # fmt: skip
    exchanges = _of(group)
    exchanges.release(*TOKENS)
    exchanges.finish_return(sums)
    out: Tensor = torch_ops.combine(returning, rows, weights, addend, dtype)
    exchanges.release(SUMS)
    return out


def _matrix(x: Tensor) -> Tensor:
    return x.contiguous().view(x.shape[0], -1)


def _define(schema: str, kernel: Any, fake: Any) -> Any:
    name = schema.split("(")[0]
    _ops.define(schema)
    operation = getattr(torch.ops.anabranch, name).default
    _ops.impl(name, kernel, "CUDA")
    torch.library.register_fake(f"anabranch::{name}", fake, lib=_ops)
    _ops.impl(name, reject_derivative(operation, kernel), "Autograd", with_keyset=True)
    return operation


# Tensors have any dtype but bool. Operations have no derivative: `on_group` calls them in autograd functions.
#: Sends x [n, ...] to all ranks and returns those of all ranks, [P n, ...].
_gather_op = _define(
    "p2p_gather(Tensor x, SymInt ranks, str group) -> Tensor",
    _gather,
    lambda x, ranks, group: x.new_empty((ranks * x.shape[0], *x.shape[1:])),
)
#: Starts to send tokens x [T, D], and waits for those of all ranks, [P T, D]. Both results are the memory that peers
#: write to. number: 0 or 1, which send of the pass it is.
_start_op = _define(
    "p2p_start(Tensor x, int number, SymInt ranks, str group) -> Tensor",
    _start,
    lambda x, number, ranks, group: x.new_empty((ranks * x.shape[0], *x.shape[1:])),
)
_finish_op = _define(
    "p2p_finish(Tensor x, Tensor arriving, int number, str group) -> Tensor",
    _finish,
    lambda x, arriving, number, group: torch.empty_like(arriving),
)
#: Region d of x [P n, ...] of rank s becomes region s of the result [P n, ...] of rank d.
_exchange_op = _define("p2p_exchange(Tensor x, str group) -> Tensor", _exchange, lambda x, group: torch.empty_like(x))
#: Starts to return sums [P T, D], and adds up those that arrive: [T, D] of `dtype`, as in `combine` with the indices
#: rows int32 [T, P], weights float32 [T, P] and an addend [T, D]. In between, `sums` must not change.
_return_op = _define(
    "p2p_return(Tensor sums, str group) -> Tensor", _return, lambda sums, group: torch.empty_like(sums)
)
_collect_op = _define(
    "p2p_collect(Tensor sums, Tensor returning, Tensor rows, Tensor? weights, Tensor? addend, ScalarType dtype, "
    "str group) -> Tensor",
    _collect,
    lambda sums, returning, rows, weights, addend, dtype, group: sums.new_empty(
        (rows.shape[0], sums.shape[1]), dtype=dtype
    ),
)


def _define_pass(name: str) -> Any:
    """Registers an operation of p2p_passes.py: its arguments without the exchanges, then the name of the group."""
    one = p2p_passes.PASSES[name]

    def kernel(*arguments: Any) -> Any:
        *given, group = arguments
        return one.run(_of(group), given)

    def fake(*arguments: Any) -> Any:
        return one.fake(*arguments[:-1])

    return _define(f"p2p_{name}({one.arguments}, str group) -> ({one.results})", kernel, fake)


experts_op, hidden_op, inputs_op = (_define_pass(name) for name in ("experts", "hidden", "inputs"))


def _may_return_memory() -> bool:
    """Whether a result may be the memory that the peers write to: nothing traces the operations or keeps results."""
    return not torch.compiler.is_compiling() and private.num_dispatch_modes() == 0


class PeerToPeer(Ring):
    """The ring over peer memory, with bitwise the same results."""

    overlaps = fuses = True

    def __init__(self, ranks: Ranks):
        super().__init__(ranks)
        self._sends = 0

    def _gather(self, tensor: Tensor) -> Tensor:
        if tensor.numel() == 0:
            return tensor.new_empty((self.ranks.ranks * tensor.shape[0], *tensor.shape[1:]))
        gathered: Tensor = _gather_op(tensor, self.ranks.ranks, self.ranks.group)
        return gathered

    def _exchange(self, regions: Tensor) -> Tensor:
        if regions.numel() == 0:
            return regions
        exchanged: Tensor = _exchange_op(regions, self.ranks.group)
        return exchanged

    def start(self, tokens: Tensor) -> Sending:
        """See Transport."""
        if tokens.numel() == 0 or not _may_return_memory():
            return super().start(tokens)
        number, tokens = self._sends, tokens.contiguous()
        self._sends += 1
        return Sending(tokens, _start_op(tokens, number, self.ranks.ranks, self.ranks.group), number)

    def arrived(self, route: Route, sending: Sending) -> Tensor:
        """See Transport; [P T, D], in memory that `collect` releases."""
        if sending.arriving is None:
            return super().arrived(route, sending)
        tokens: Tensor = _finish_op(sending.tokens, sending.arriving, sending.number, self.ranks.group)
        return tokens

    def start_return(self, sums: Tensor) -> Returning:
        """See Transport."""
        if sums.numel() == 0 or not _may_return_memory():
            return super().start_return(sums)
        sums = sums.contiguous()
        return Returning(sums, _return_op(sums, self.ranks.group))

    def collect(
        self, route: Route, returning: Returning, weights: Tensor | None, dtype: torch.dtype,
        addend: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See Transport."""
        if returning.arriving is None:
            return super().collect(route, returning, weights, dtype, addend)
        out: Tensor = _collect_op(
            returning.sums, returning.arriving, route.sent_row_of_slot, weights, addend, dtype, self.ranks.group
        )
        return out


def abandon(group: str) -> None:
    """See GroupExchanges."""
    _of(group).abandon()


def is_available(ranks: Ranks, x: Tensor) -> bool:
    """Whether transport="auto" may choose this transport; the same on all ranks. Collective in a group's first call.

    In the capture of a CUDA graph only if an earlier call has made the buffers.
    """
    if x.device.type != "cuda":
        return False
    if not torch.compiler.is_compiling():
        if has_made(ranks.group, ranks.ranks * x.nbytes):
            return True
        if torch.cuda.is_current_stream_capturing():
            return False
    return not unavailable_reason(ranks.group)


def reason_against(ranks: Ranks, device: str) -> str:
    """Why the ranks of a group cannot use this transport; "" if they can. Collective in the first call for a group."""
    if device != "cuda":
        return f"got tensors on {device}, expected GPUs"
    return unavailable_reason(ranks.group)
