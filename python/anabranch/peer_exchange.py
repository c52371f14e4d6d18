"""One rank of an exchange between the GPUs of a host, see include/anabranch/exchange.h."""

import ctypes
from collections.abc import Sequence

from anabranch import _library, _structs

HANDLE_BYTES = 512
MAX_RANKS = 16
#: Parts of a call.
WHOLE, START, FINISH = 0, 1, 2
#: As the buffer of a release: the calls on all buffers have failed.
ALL_BUFFERS = -1


class PeerExchange:
    """An exchange of this rank.

    Args:
      device: number of the CUDA device.
      rank, ranks: this rank and P.
      sizes: bytes of its buffers, the same on every rank.

    Raises:
      ValueError, NotImplementedError, MemoryError, RuntimeError: by the status of the library.
    """

    def __init__(self, device: int, rank: int, ranks: int, sizes: Sequence[int]):
        self.device, self.rank, self.ranks, self.sizes = device, rank, ranks, tuple(sizes)
        self._library = library = _library.load_cuda()
        self.pointer = ctypes.c_void_p()
        args = _structs.ARGS["exchange_create"](device=device, rank=rank, ranks=ranks)
        args.size = ctypes.sizeof(args)
        args.buffer_bytes[: len(self.sizes)] = self.sizes
        _call(library.ab_cuda_exchange_create, ctypes.byref(args), ctypes.byref(self.pointer))

    def handle(self) -> bytes:
        """What the other ranks need for `connect`."""
        text = ctypes.create_string_buffer(HANDLE_BYTES)
        _call(self._library.ab_cuda_exchange_export, self.pointer, text)
        return text.raw

    def connect(self, handles: Sequence[bytes]) -> None:
        """Opens the memory of all peers, whose handles are in the order of the ranks."""
        joined = b"".join(handles)
        _call(self._library.ab_cuda_exchange_connect, self.pointer, joined, ctypes.c_size_t(len(joined)))

    def register(self, name: str) -> None:
        """Gives it a name, by which custom calls of XLA find it on its device."""
        _call(self._library.ab_cuda_exchange_register, self.pointer, name.encode())

    def address(self, buffer: int) -> int:
        """The address of a buffer on this rank."""
        data, size = ctypes.c_void_p(), ctypes.c_int64()
        results = ctypes.byref(data), ctypes.byref(size)
        _call(self._library.ab_cuda_exchange_buffer, self.pointer, ctypes.c_int32(buffer), *results)
        return data.value or 0

    def run(
        self,
        name: str,
        stream: int,
        buffer: int = 0,
        part: int = WHOLE,
        **arrays: tuple[int, int, Sequence[int]] | None,
    ) -> None:
        """Enqueues ab_cuda_exchange_NAME, with tensors of any dtype but bool.

        Args:
          name: all_gather, all_to_all or release.
          stream: address of the stream.
          buffer: the buffer that blocks arrive in, or that is released.
          part: WHOLE, START or FINISH; not for release.
          arrays: (address, ab_dtype, shape) by field; None: not given.
        """
        args = _structs.ARGS[f"exchange_{name}"](exchange=self.pointer, buffer=buffer)
        if part != WHOLE:
            args.part = part
        args.size = ctypes.sizeof(args)
        for field, array in arrays.items():
            if array is not None:
                address, dtype, shape = array
                view = _structs.Tensor(data=address, dtype=dtype, rank=len(shape))
                view.shape[: len(shape)] = shape
                setattr(args, field, ctypes.pointer(view))
        execution = _structs.Exec(size=ctypes.sizeof(_structs.Exec), stream=stream)
        function = getattr(self._library, f"ab_cuda_exchange_{name}")
        _call(function, ctypes.byref(args), ctypes.byref(execution))

    def close(self) -> None:
        """Waits for the device and destroys the exchange; every rank must do so."""
        pointer, self.pointer = self.pointer, ctypes.c_void_p()
        _call(self._library.ab_cuda_exchange_destroy, pointer)


def _call(function: "ctypes._NamedFuncPointer", *arguments: object) -> None:
    """Calls a function that returns a status; raises its exception."""
    function.restype = _library.Status
    _library.check_status(function(*arguments))
