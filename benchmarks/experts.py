"""Only the experts, on gathered rows: ours through C, against torch's grouped GEMM and a large GEMM."""

import argparse
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anabranch.activation import PLAIN, as_activation
from anabranch.bench import ArgumentError
from anabranch.precision import NUMBERS as PRECISIONS
from benchmarks import beside, ceilings, flags, timing
from benchmarks.c_call import Calls, c_call
from benchmarks.shapes import CPU_SHAPES, ITEMSIZES, NAMED, LayerShape, draw_experts
from benchmarks.tables import experts_path, rates, selected, unit_of

CAPTION = """FLOP/s count 6 T K D F for forward and 18 T K D F for both: forward and backward, with gradients of x by
row, weights, w_in and w_out. c: ours through C; torch: grouped_mm. --precision and --activation apply to c; torch
computes SiLU. product: a large GEMM in this run, 2048^3 by oneDNN on the CPU, 8192^3 by cuBLAS on a GPU; share: divided
by product. On a GPU: medians of CUDA graphs. On the CPU: best of interleaved repeats"""

DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16", "float16", "float32")}
BY = ("c", "torch")
OPTIONS = {
    **flags.shapes("three on the CPU, qwen3-30b with T = 8192 on a GPU"),
    **flags.by(BY),
    "--precision": {"choices": list(PRECISIONS), "default": "highest", "help": "for c"},
    "--activation": {"choices": [*PLAIN, "swiglu_oai", "situ"], "default": "silu", "help": "for c; gated"},
}


class Operands:
    """Random operands. Each token has K distinct experts, all equally likely."""

    def __init__(self, shape: LayerShape, dtype: str, device: str, seed: int = 0):
        torch = timing.torch_on(device)
        T, D, F, E, K = shape
        generator, normal = torch.Generator(device).manual_seed(seed), timing.normal_on(device, dtype, seed)
        experts = torch.from_numpy(draw_experts(T, E, K, seed)).to(device).flatten()
        order = experts.argsort(stable=True)
        self.topk = K
        self.x, self.d_out = normal(T, D), normal(T, D)
        self.w_in, self.w_out = normal(E, D, 2, F, scale=D**-0.5), normal(E, F, D, scale=F**-0.5)
        self.weights = torch.rand(T, K, device=device, generator=generator)
        self.token, self.slot_of_row = order // K, order.to(torch.int32)
        self.group_sizes = torch.bincount(experts, minlength=E).to(torch.int32)


def c_calls(given: Operands, precision: str = "highest", activation: str = "silu") -> Calls:
    """Returns our calls. Outputs are allocated before; dh overwrites h."""
    import torch

    (_, D, P, F), R = given.w_in.shape, given.slot_of_row.numel()
    y, h = given.x.new_zeros(R, D), given.x.new_zeros(R, P, F)
    act = as_activation(activation)
    shared = {
        "activation": act.number,
        "activation_alpha": act.alpha,
        "activation_limit": act.limit,
        "precision": PRECISIONS[precision],
        "topk": given.topk,
        "x": given.x,
        "slot_of_row": given.slot_of_row,
        "group_sizes": given.group_sizes,
        "w_in": given.w_in,
        "w_out": given.w_out,
    }
    results = {"dx_rows": torch.zeros_like(y), "d_weights": torch.zeros_like(given.weights)}
    results |= {f"d_{name}": torch.zeros_like(getattr(given, name)) for name in ("w_in", "w_out")}
    forward = c_call("expert_ffn_forward", **shared, y=y)
    saving_h = c_call("expert_ffn_forward", **shared, y=y, h=h)
    backward = c_call("expert_ffn_backward", **shared, weights=given.weights, h=h, dh=h, d_out=given.d_out, **results)

    def both() -> Any:
        return {**saving_h(), **backward()}

    return {"forward": forward, "both": both}


def torch_calls(given: Operands) -> Calls:
    """Returns torch's eager calls with grouped_mm."""
    import torch

    from benchmarks.peers.torch import network

    leaves = [leaf.detach().requires_grad_() for leaf in (given.x, given.w_in, given.w_out)]
    ends, d_y = given.group_sizes.cumsum(0, dtype=torch.int32), given.d_out[given.token]

    def output() -> Any:
        x, w_in, w_out = leaves
        return network(x, w_in, w_out, given.token, ends)

    def forward() -> Any:
        with torch.no_grad():
            return output()

    return {"forward": forward, "both": lambda: torch.autograd.grad(output(), leaves, d_y)}


def cases(options: argparse.Namespace) -> Iterator[beside.Case]:
    """Yields the first columns of rows, sets of operands and our calls.

    Raises:
      ArgumentError: FP8 does not support them.
    """
    device, fp8 = options.device, options.precision == "fp8"
    default = CPU_SHAPES if device == "cpu" else [NAMED["qwen3-30b"]._replace(T=8192)]
    dtypes = [dtype for dtype in options.dtype if not (fp8 and device == "cuda" and dtype == "float32")]
    if not dtypes:
        raise ArgumentError("--dtype: got float32 with --precision fp8 on a GPU, expected bfloat16 or float16")
    for shape in flags.sized(options.shape or default, options.tokens, options.quick):
        if fp8 and (shape.D % 128 or shape.F % 128):
            raise ArgumentError(f"--shape: got {shape} with --precision fp8, expected D and F to be multiples of 128")
        for dtype in dtypes:
            count = timing.sets_past_cache(device, shape.operand_bytes(ITEMSIZES[dtype]), least=1)
            head = {"T,D,F,E,K": str(shape), "dtype": dtype}
            make = functools.partial(c_calls, precision=options.precision, activation=options.activation)
            yield head, [Operands(shape, dtype, device, seed) for seed in range(count)], make


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields one row per shape, dtype and implementation."""
    device, by = options.device, timing.available("experts", options.by, BY, options.device)
    for head, given, make in cases(options):
        shape, dtype = flags.parse_shape(head["T,D,F,E,K"]), head["dtype"]
        calls: dict[str, list[Calls]] = {}
        if "c" in by:
            calls["c"] = [make(one) for one in given]
        if "torch" in by and (device == "cpu" or dtype == "bfloat16"):  # all that grouped_mm supports on a GPU
            calls["torch"] = [torch_calls(one) for one in given]
        before = ceilings.product_rate(device, dtype)
        times = {
            name: timing.times_of(
                device, {who: [one[name] for one in sets] for who, sets in calls.items()}, quick=options.quick
            )
            for name in ("forward", "both")
        }
        known = [rate for rate in (before, ceilings.product_rate(device, dtype)) if rate is not None]
        for who in calls:
            yield {
                **head,
                "by": who,
                "precision": options.precision if who == "c" else "highest",
                "activation": options.activation if who == "c" else "silu",
                "path": experts_path(shape, dtype) if device == "cuda" and who == "c" else None,
                **rates(shape, {name: of[who] for name, of in times.items()}, device, max(known, default=None)),
            }


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows as one table."""
    unit = unit_of(rows)
    names = ["T,D,F,E,K", "dtype", "by", "precision", "activation", "path", "forward ms", "both ms"]
    names += [f"{name} {unit}" for name in ("forward", "backward", "both", "product")] + ["forward share", "both share"]
    return {"": selected(rows, names)}
