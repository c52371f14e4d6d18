"""Which of our kernels the experts of a layer run on, for the rows of benchmarks on a GPU."""

import ctypes

from anabranch import _library
from anabranch.bench.errors import BenchError
from anabranch.bench.layer_shape import LayerShape

_GATED = 2


def experts_path(shape: LayerShape, dtype: str, w_in_layout: str = "dpf", w_out_layout: str = "fd") -> str:
    """The kernels of a forward and a backward pass on the current GPU (ab_cuda_experts_path).

    Those of few_rows, hopper and portable that run, with + between them.

    `info` prints which of them the device tries first.

    Args:
      shape: of the layer.
      dtype: of its operands.
      w_in_layout, w_out_layout: of its weights, as `moe` has them.

    Raises:
      BenchError: the library takes none; the message says why.
    """
    ask = _library.load_cuda().ab_cuda_experts_path
    ask.restype = _library.Status
    sizes = map(ctypes.c_int64, (shape.T, shape.K, shape.E, shape.D, _GATED, shape.F))
    path = ctypes.c_char_p()
    flags = map(ctypes.c_int32, (w_in_layout[-1] == "d", w_out_layout[-1] == "f", True))
    status = ask(ctypes.c_int32(_library.DTYPES[dtype]), *sizes, *flags, ctypes.byref(path), None)
    if status.code != 0:
        raise BenchError(f"path: {status.message.decode()}")
    assert path.value is not None
    return path.value.decode()
