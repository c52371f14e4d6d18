"""Stand-ins for exchanges between GPUs: ranks of a Gloo group on the CPU run the passes of the transport p2p.

The C functions of exchanges are Python functions here, which native code and ctypes call by address. A send is a
collective of Gloo and ends at once. Functions of the experts get their tokens, and return their sums, in the same way.
An exchange knows which buffers are in use, and which copies no call has waited for.
"""

import contextlib
import ctypes
import functools
import platform

import torch
import torch.distributed as dist

from anabranch import _library, _structs
from anabranch.peer_exchange import ALL_BUFFERS, FINISH, START
from anabranch.torch.binding import calls, private
from anabranch.torch.ops import torch_ops
from anabranch.torch.parallel import p2p, parallel, peers
from anabranch.torch.parallel.p2p_passes import PASSES

#: A function that returns a large struct gets its address as the first argument, as the functions below assume.
SUPPORTED = platform.machine() == "x86_64"

_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_void_p, *[ctypes.c_void_p] * 4)
_DTYPES = {number: dtype for dtype, number in calls._DTYPES.items()}
#: By the number that stands for the address of an exchange.
exchanges = {}
#: (function, buffer, part) of all calls that use an exchange, in order.
log = []
#: Functions that fail, and the messages of their statuses; also "pointers" of `GroupExchanges`.
failures = {}


class Exchange:
    """The stand-in for PeerExchange: its buffers, each uint8 [size]."""

    def __init__(self, device, rank, ranks, sizes):
        self.device, self.sizes = device, tuple(sizes)
        self.memory = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
        self.held, self.copying = set(), set()
        self.pointer = ctypes.c_void_p(len(exchanges) + 1)
        exchanges[self.pointer.value] = self

    def handle(self):
        return b""

    def connect(self, handles):
        pass

    def close(self):
        pass

    def run(self, name, stream, buffer=0, part=0, **arrays):
        assert name == "release" and not arrays
        log.append(("release", buffer, part))
        self.release(buffer)

    def begin(self, buffer):
        if buffer in self.held:
            raise RuntimeError(f"exchange: buffer {buffer} is used again before its release")
        self.held.add(buffer)
        self.copying.add(buffer)

    def release(self, buffer):
        if buffer == ALL_BUFFERS:
            self.copying.clear()
            self.held.clear()
        assert buffer not in self.copying
        self.held.discard(buffer)

    def buffer(self, number, like):
        """The beginning of a buffer as a tensor like another one."""
        return self.memory[number][: like.nbytes].view(like.dtype).view(like.shape)


def _check(name):
    if name in failures:
        raise RuntimeError(failures[name])


def _bytes(address, size):
    return (ctypes.c_char * size).from_address(address)


def _tensor(view):
    """The tensor that an ab_tensor describes; None for NULL."""
    if not view:
        return None
    view, shape = view.contents, tuple(view.contents.shape[: view.contents.rank])
    size = _DTYPES[view.dtype].itemsize * torch.Size(shape).numel()
    return torch.frombuffer(_bytes(view.data, size), dtype=_DTYPES[view.dtype]).view(shape)


def _parts(x):
    """The x of all ranks. Gloo gets a copy, because its threads release tensors later than the memory of x."""
    parts = [torch.empty(x.nbytes, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.reshape(-1).view(torch.uint8).clone())
    return [part.view(x.dtype).view(x.shape) for part in parts]


def _exchanged(x):
    """Block s is block r of the x of rank s, where r is this rank."""
    return torch.cat([part.chunk(dist.get_world_size())[dist.get_rank()] for part in _parts(x)])


def _all_gather_call(a, exchange):
    if a.part == FINISH:
        return exchange.copying.discard(a.buffer)
    if a.part == START:
        exchange.begin(a.buffer)
    for x, out in ((a.x, a.out), (a.x_2, a.out_2), (a.x_3, a.out_3)):
        if x:
            found = torch.cat(_parts(_tensor(x)))
            (exchange.buffer(a.buffer, found) if not out else _tensor(out)).copy_(found)


def _all_to_all_call(a, exchange):
    _tensor(a.out).copy_(_exchanged(_tensor(a.x)))


def _sum_call(a, exchange):
    exchange.copying.remove(a.buffer)
    exchange.release(a.buffer)
    sums, out = _tensor(a.sums), _tensor(a.out)
    T, P = out.shape[0], dist.get_world_size()
    rows = torch.arange(P * T, dtype=torch.int32).view(P, T).t().contiguous()
    factor = None if a.factor == 1 else torch.full((T, P), a.factor)
    out.copy_(torch_ops.combine(exchange.buffer(a.buffer, sums), rows, factor, _tensor(a.addend), out.dtype))


_CALLS = {
    "exchange_all_gather": _all_gather_call,
    "exchange_all_to_all": _all_to_all_call,
    "exchange_sum": _sum_call,
    "exchange_release": lambda a, exchange: exchange.release(a.buffer),
}


class Library:
    """The CPU library with stand-ins."""

    def __init__(self, library):
        self._library, self._callbacks = library, []
        for name, function in _CALLS.items():
            self._add(f"ab_{name}", _structs.ARGS[name], functools.partial(self._exchange, name, function))
        for name in ("expert_ffn_forward", "expert_ffn_backward", "grouped_matmul_combine"):
            for full_name in (f"ab_{name}", f"ab_{name}_workspace"):
                self._add(full_name, _structs.ARGS[name], functools.partial(self._compute, full_name))

    def __getattr__(self, name):
        return getattr(self._library, name)

    def _add(self, name, struct, function):
        """Adds a function of the library that calls function(struct, *addresses)."""

        def callback(status, args, *others):
            result = _library.Status.from_address(status)
            result.code, result.message = 0, b""
            try:
                _check(name)
                function(struct.from_buffer_copy(_bytes(args, ctypes.sizeof(struct))), *others[: 1 + is_query])
            except Exception as error:
                result.code, result.message = 4, str(error).encode()[:500]
            return status

        is_query = name.endswith("_workspace")
        self._callbacks.append(_CALLBACK(callback))
        function_type = ctypes.CFUNCTYPE(_library.Status, *[ctypes.c_void_p] * (2 + is_query))
        setattr(self, name, function_type(ctypes.cast(self._callbacks[-1], ctypes.c_void_p).value))

    def _exchange(self, name, function, a, execution):
        log.append((name, a.buffer, getattr(a, "part", 0)))
        function(a, exchanges[a.exchange])

    def _compute(self, name, a, *others):
        field = "returning" if "combine" in name else "arriving"
        exchange, buffer = exchanges.get(getattr(a, field)), getattr(a, f"{field}_buffer")
        setattr(a, field, None)
        setattr(a, f"{field}_buffer", 0)
        function = getattr(self._library, name)
        function.restype = _library.Status
        _library.check_status(function(ctypes.byref(a), *map(ctypes.c_void_p, others)))
        if exchange is None or name.endswith("_workspace"):
            return
        log.append((name, buffer, 0))
        if field == "arriving":
            exchange.copying.remove(buffer)
        else:
            exchange.begin(buffer)
            found = _exchanged(_tensor(a.out))
            exchange.buffer(buffer, found).copy_(found)


class _Stream:
    def wait_stream(self, other):
        pass


@contextlib.contextmanager
def stand_ins(patch):
    """A context in which p2p runs on the CPU. patch: a pytest.MonkeyPatch."""
    library, stream = Library(_library.load()), _Stream()
    patch.setattr(_library, "load", lambda: library)
    patch.setattr(peers, "PeerExchange", Exchange)
    patch.setattr(peers, "_memory_of", lambda exchange: exchange.memory)
    patch.setattr(parallel, "reason_against", lambda *arguments: "")
    pointers = peers.GroupExchanges.pointers
    patch.setattr(peers.GroupExchanges, "pointers", lambda *arguments: _check("pointers") or pointers(*arguments))
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    patch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    patch.setattr(private, "current_stream", lambda device: 0)
    kernels = torch.library.Library("anabranch", "IMPL")
    kernels.impl("p2p_start", p2p._start, "CPU")
    for name, one in PASSES.items():
        kernels.impl(f"p2p_{name}", lambda *a, one=one: one.run(p2p._of(a[-1]), a[:-1]), "CPU")
    yield
    kernels._destroy()
