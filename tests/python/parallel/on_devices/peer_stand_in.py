"""The calls of the transport "p2p" with XLA's collectives, on CPU devices.

A call without exchanges is a sequence of its own, so the library decodes it. The state of each buffer of an exchange is
checked: a buffer is read only after its tokens have arrived, and no buffer is held at the end of a sequence.
"""

import ctypes
import dataclasses
import math

import jax
import jax.numpy as jnp

from anabranch import _library, _structs
from anabranch.jax.binding import ffi
from anabranch.jax.binding.sequence import Sequence
from anabranch.jax.ops.dispatch import gather_sum
from anabranch.peer_exchange import FINISH, START, WHOLE

AXIS = "expert"
_run_on_one_device = ffi.call_sequence


def gathered(x):
    return jax.lax.all_gather(x, AXIS, tiled=True)


def swapped(x):
    ranks = jax.lax.axis_size(AXIS)
    blocks = x.reshape(ranks, x.shape[0] // ranks, *x.shape[1:])
    return jax.lax.all_to_all(blocks, AXIS, 0, 0, tiled=True).reshape(x.shape)


@dataclasses.dataclass
class Sent:
    """Tokens in a buffer."""

    x: jax.Array
    tokens: jax.Array
    has_arrived: bool = False


class Run:
    """Runs the calls of a sequence."""

    def __init__(self, sequence):
        self.sequence = sequence
        self.values = {("operand", i): array for i, array in enumerate(sequence.operands)}
        self.sent, self.returning = {}, {}

    def get(self, buffer):
        if buffer.kind != "view":
            return self.values[buffer.kind, buffer.index]
        view = self.sequence.views[buffer.index]
        held = self.sent.get((view.exchange, view.buffer))
        if held is None:  # a view of which only the shape is read
            return jnp.full(view.shape, jnp.nan, view.dtype)
        assert held.has_arrived
        assert held.tokens.shape == view.shape and held.tokens.dtype == view.dtype
        return held.tokens

    def put(self, buffer, value):
        key = buffer.kind, buffer.index
        assert buffer.kind == "result" and key not in self.values
        assert value.shape == buffer.shape and value.dtype == buffer.dtype
        self.values[key] = value

    def run(self):
        for call in self.sequence.calls:
            getattr(self, call.function, self.compute)(call, dict(call.options))
        assert not self.sent and not self.returning
        order = {("result", 0): jnp.zeros(1, jnp.int32)}
        return [(self.values | order)["result", i] for i in range(len(self.sequence.results))]

    # ------------------------------------------------------------ calls

    def compute(self, call, options):
        one, made = Sequence(), {}
        if "arriving" in options:
            held = self.sent[options.pop("arriving"), options.pop("arriving_buffer")]
            assert not held.has_arrived
            held.has_arrived = True
        tensors = {}
        for name, buffer in call.tensors.items():
            if buffer.kind == "result" and (buffer.kind, buffer.index) not in self.values:
                tensors[name] = made[name] = one.result(buffer.shape, buffer.dtype)
            else:
                tensors[name] = one.operand(self.get(buffer))
        one.calls.append(dataclasses.replace(call, tensors=tensors, options=options))
        results = _run_on_one_device(one)
        for name, buffer in made.items():
            self.put(call.tensors[name], results[buffer.index])

    def plan(self, call, options):
        assert options.pop("per_rank") == "first_expert:tokens" and options.pop("is_part") == 1
        first = options.pop("first_expert") * jax.lax.axis_index(AXIS)
        experts = self.get(call.tensors["experts"])
        local = experts - first
        is_here = (experts >= 0) & (local >= 0) & (local < options["num_experts"])
        self.values["local", 0] = jnp.where(is_here, local, -1)
        local = dataclasses.replace(call.tensors["experts"], kind="local", index=0)
        self.compute(dataclasses.replace(call, tensors=call.tensors | {"experts": local}), options)

    def grouped_matmul_combine(self, call, options):
        key = options.pop("returning"), options.pop("returning_buffer")
        assert key not in self.returning
        self.returning[key] = call.tensors["out"]
        self.compute(call, options)

    def exchange_sum(self, call, options):
        sums, addend = call.tensors["sums"], call.tensors.get("addend")
        assert self.returning.pop((options["exchange"], options["buffer"])) is sums
        assert options["factor"] == 1
        ranks, out = jax.lax.axis_size(AXIS), call.tensors["out"]
        rows = jnp.arange(sums.shape[0], dtype=jnp.int32).reshape(ranks, -1).T
        given = None if addend is None else self.get(addend)
        self.put(out, gather_sum(swapped(self.get(sums)), rows, None, out.dtype, given))

    def exchange_all_gather(self, call, options):
        key, x = (options["exchange"], options["buffer"]), self.get(call.tensors["x"])
        if options["part"] == START:
            assert key not in self.sent and "out" not in call.tensors
            self.sent[key] = Sent(x, gathered(x))
        elif options["part"] == FINISH:
            assert self.sent[key].x is x and not self.sent[key].has_arrived
            self.sent[key].has_arrived = True
        else:
            assert options["part"] == WHOLE and key not in self.sent
            self.put(call.tensors["out"], gathered(x))

    def exchange_all_to_all(self, call, options):
        assert options["part"] == WHOLE and (options["exchange"], options["buffer"]) not in self.sent
        self.put(call.tensors["out"], swapped(self.get(call.tensors["x"])))

    def exchange_release(self, call, options):
        assert not call.tensors
        assert self.sent.pop((options["exchange"], options["buffer"])).has_arrived


def run_sequence(sequence):
    """`ffi.call_sequence` on a device of a mesh with an axis "expert"."""
    return Run(sequence).run()


def run_exchange(operation, x):
    """`ffi.call_exchange` without the order."""
    return gathered(x) if operation == "all_gather" else swapped(x)


class _Exchange(ctypes.Structure):
    """The beginning of an exchange (src/exchange/check.h, Shape). A query of a workspace reads nothing else."""

    _fields_ = (("rank", ctypes.c_int32), ("ranks", ctypes.c_int32))


def _tensor(buffer, order):
    """An ab_tensor whose axes are axes `order` of a buffer. A query of a workspace does not read its memory."""
    strides = [math.prod(size or 1 for size in buffer.shape[axis + 1 :]) for axis in range(buffer.ndim)]
    axes = [int(axis) for axis in order] if order else range(buffer.ndim)
    view = _structs.Tensor(data=64, dtype=_library.DTYPES[buffer.dtype.name], rank=buffer.ndim)
    view.shape[: buffer.ndim] = [buffer.shape[axis] for axis in axes]
    if order:
        view.memory = (ctypes.c_int64 * buffer.ndim)(*(strides[axis] for axis in axes))
        view.strides = ctypes.addressof(view.memory)
    return ctypes.pointer(view)


def workspace_on_a_gpu(call, ranks):
    """The bytes that the CUDA library needs for a call of a sequence; its checks accept the call."""
    orders = dict(entry.split(":") for entry in call.orders.split(",") if entry)
    fields = {name: _tensor(buffer, orders.get(name)) for name, buffer in call.tensors.items()}
    exchange = _Exchange(0, ranks)
    for name, value in call.options.items():
        if name != "per_rank":
            fields[name] = ctypes.addressof(exchange) if isinstance(value, str) else value
    struct = _structs.ARGS[call.function]
    args, size = struct(size=ctypes.sizeof(struct), **fields), ctypes.c_size_t()
    query = getattr(_library.load_cuda(), f"ab_cuda_{call.function}_workspace")
    query.restype = _library.Status
    _library.check_status(query(ctypes.byref(args), None, ctypes.byref(size)))
    return size.value
