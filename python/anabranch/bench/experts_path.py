"""Which of our kernels the experts of a layer run on, for the rows of benchmarks on a GPU."""

import ctypes

from anabranch import _library
from anabranch.bench.errors import BenchError
from anabranch.bench.layer_shape import LayerShape

_GATED = 2


def experts_path(shape: LayerShape, dtype: str) -> str:
    """What the library takes on the current GPU (ab_cuda_experts_path): hopper or portable.

    `info` prints which of them the device tries first.

    Args:
      shape: of the layer.
      dtype: of its operands.

    Raises:
      BenchError: the library takes none; the message says why.
    """
    ask = _library.load_cuda().ab_cuda_experts_path
    ask.restype = _library.Status
    sizes = map(ctypes.c_int64, (shape.T, shape.K, shape.E, shape.D, _GATED, shape.F))
    path = ctypes.c_char_p()
    status = ask(ctypes.c_int32(_library.DTYPES[dtype]), *sizes, ctypes.byref(path), None)
    if status.code != 0:
        raise BenchError(f"path: {status.message.decode()}")
    assert path.value is not None
    return path.value.decode()
