"""The gate's GEMMs: tokens to float32 logits, and the backward pass.

If the columns of a gate are similar, differences of logits cancel most digits. So results keep at least 16 bits of
every operand. A CPU multiplies in float32. A GPU multiplies bfloat16 operands on tensor cores; a float32 operand beside
a bfloat16 one is split into the sum of two bfloat16 matrices.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from anabranch.phases import GATE, GATE_BACKWARD
from anabranch.precision import HIGHEST
from anabranch.torch.binding.autocast import without_autocast
from anabranch.torch.binding.autograd import Function, needs_gradient
from anabranch.torch.binding.define import _ops
from anabranch.torch.binding.derivatives import reject_derivative
from anabranch.torch.binding.ranges import range_of
from anabranch.torch.ops import grouped_matmul_ops


def _mm_float32(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32)


#: torch 2.9 cannot trace `torch.mm` with out_dtype; there an operation of ours wraps it.
_MM_IS_TRACED = torch.torch_version.TorchVersion(torch.__version__) >= "2.10"
_ops.define("mm_float32(Tensor a, Tensor b) -> Tensor")
_ops.impl("mm_float32", _mm_float32, "CUDA")
_ops.impl(
    "mm_float32", reject_derivative(torch.ops.anabranch.mm_float32.default, _mm_float32), "Autograd", with_keyset=True
)
torch.library.register_fake(
    "anabranch::mm_float32", lambda a, b: a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32), lib=_ops
)


def _halves(a: Tensor) -> tuple[Tensor, Tensor]:
    """Two bfloat16 tensors whose sum equals a float32 tensor to 16 bits."""
    high = a.to(torch.bfloat16)
    low = a - high.float()
    return high, torch.where(high.isfinite(), low, 0).to(torch.bfloat16)


# On a CPU, our grouped GEMM is used: torch's GEMM waits for every OpenMP thread, also for one that is descheduled.


def _rows_on_cpu(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows [T, M] times matrix [M, N] in float32, for any float dtypes."""
    rows, matrix = rows.float(), matrix.float()
    if 1 in matrix.shape:  # matrix-vector product: the gate of a shared expert
        return rows @ matrix
    transpose = not matrix.is_contiguous()
    sizes = rows.new_full((1,), rows.shape[0], dtype=torch.int32)
    w = (matrix.T if transpose else matrix)[None]
    product: Tensor = grouped_matmul_ops.grouped_matmul(rows, w, sizes, transpose, HIGHEST, 0)
    return product


def _gradient_on_cpu(x: Tensor, d_logits: Tensor) -> Tensor:
    """x^T d_logits [D, E] in float32, from [T, D] and [T, E] of any float dtypes."""
    x, d_logits = x.float(), d_logits.float()
    if 1 in (x.shape[1], d_logits.shape[1]):
        return x.T @ d_logits
    sizes = x.new_full((1,), x.shape[0], dtype=torch.int32)
    product: Tensor = grouped_matmul_ops.grouped_matmul_dw(x, d_logits, sizes, torch.float32, HIGHEST, False)
    return product[0]


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a b for matrices of one dtype, accumulated and returned in float32."""
    if a.dtype == torch.float32:
        return a @ b
    if torch.compiler.is_compiling() and not _MM_IS_TRACED:
        return torch.ops.anabranch.mm_float32(a, b)
    return torch.mm(a, b, out_dtype=torch.float32)


def _matmul_of_halves(a: Tensor, b: Tensor) -> Tensor:
    """a b for float32 or bfloat16 matrices, with at least 16 bits of each operand."""
    left = (a,) if a.dtype == torch.bfloat16 else _halves(a)
    right = (b,) if b.dtype == torch.bfloat16 else _halves(b)
    pairs = [
        (i, j) for i in range(len(left)) for j in range(len(right)) if i + j < 2
    ]  # low times low is below the precision
    return _matmul(torch.cat([left[i] for i, _ in pairs], 1), torch.cat([right[j] for _, j in pairs], 0))


def gate_logits(x: Tensor, gate: Tensor) -> Tensor:
    """x gate, float32 [T, E], from x [T, D] and gate [D, E]."""
    if x.device.type != "cuda":
        return _rows_on_cpu(x, gate)
    if x.dtype == gate.dtype:
        return _matmul(x, gate)
    exact = (torch.float32, torch.bfloat16)
    if x.dtype in exact and gate.dtype in exact:
        return _matmul_of_halves(x, gate)
    if x.dtype == torch.float16:
        return _matmul_of_halves(x.float(), gate.float())
    return x.float() @ gate.float()


def biased_gate_logits(x: Tensor, gate: Tensor, bias: Tensor | None) -> Tensor:
    """x gate + bias, float32 [T, E]; the bias [E] may be None."""
    with range_of(GATE):
        logits = gate_logits(x, gate)
        return logits if bias is None else logits + bias.float()


class GateGradients(NamedTuple):
    """The results of `gate_backward`."""

    x: Tensor | None
    """[T, D], dtype of x."""
    gate: Tensor | None
    """[D, E] float32."""


def gate_backward(
    x: Tensor, gate: Tensor, d_logits: Tensor, *, needs_x: bool = True, needs_gate: bool = True
) -> GateGradients:
    """Gradients of x and gate from d_logits, float32 [T, E]; None for one that is not needed.

    If x and gate are bfloat16, a GPU rounds d_logits to bfloat16. It is never rounded to float16, whose range of 6e-8
    to 65504 is too small; float16 operands are converted to float32.
    """
    with range_of(GATE_BACKWARD):
        return GateGradients(
            _x_gradient(x, gate, d_logits).to(x.dtype) if needs_x else None,
            _gate_gradient(x, gate, d_logits) if needs_gate else None,
        )


def _x_gradient(x: Tensor, gate: Tensor, d_logits: Tensor) -> Tensor:
    if x.device.type != "cuda":
        return _rows_on_cpu(d_logits, gate.T)
    if x.dtype == gate.dtype == torch.bfloat16:
        return d_logits.to(torch.bfloat16) @ gate.T
    if torch.float16 in (x.dtype, gate.dtype):
        gate = gate.float()
    elif x.dtype == gate.dtype == torch.float32:
        return d_logits @ gate.T
    return _matmul_of_halves(d_logits, gate.T)


def _gate_gradient(x: Tensor, gate: Tensor, d_logits: Tensor) -> Tensor:
    if x.device.type != "cuda":
        return _gradient_on_cpu(x, d_logits)
    if x.dtype == gate.dtype == torch.bfloat16:
        return _matmul(x.T, d_logits.to(torch.bfloat16))
    if torch.float16 in (x.dtype, gate.dtype):
        x = x.float()
    elif x.dtype == gate.dtype == torch.float32:
        return x.T @ d_logits
    return _matmul_of_halves(x.T, d_logits)


class _Logits(Function):
    @staticmethod
    def forward(x, gate, bias):
        with without_autocast(x.device):
            return biased_gate_logits(x, gate, bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, gate, bias = inputs
        ctx.save_for_backward(x, gate)
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx, d_logits):
        x, gate = ctx.saved_tensors
        with without_autocast(x.device):
            d_x, d_gate = gate_backward(
                x, gate, d_logits, needs_x=needs_gradient(ctx, 0), needs_gate=needs_gradient(ctx, 1)
            )
        d_bias = d_logits.sum(0).to(ctx.bias_dtype) if needs_gradient(ctx, 2) else None
        return d_x, None if d_gate is None else d_gate.to(gate.dtype), d_bias


def logits(x: Tensor, gate: Tensor, bias: Tensor | None = None) -> Tensor:
    """Differentiable `biased_gate_logits`."""
    result: Tensor = _Logits.call(x, gate, bias)
    return result
