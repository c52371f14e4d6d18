"""Only the experts, on gathered rows: ours through C and JAX, against torch, ragged_dot and a large GEMM."""

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from anabranch.activation import PLAIN, as_activation
from anabranch.bench import ArgumentError
from anabranch.precision import NUMBERS as PRECISIONS
from benchmarks import timing
from benchmarks.figures import SCALES, UNITS, experts_path, rates, spread
from benchmarks.options import add_by, add_shapes, sized
from benchmarks.product import product_rate
from benchmarks.shapes import CPU_SHAPES, NAMED, LayerShape

CAPTION = """FLOP/s count 6 T K D F for forward and 18 T K D F for both: forward and backward, with gradients of x by
row, weights, w_in and w_out. c: ours through C; jax: ours through JAX; ragged-dot: plain JAX with our ragged_dot; xla:
plain JAX with lax.ragged_dot; torch: grouped_mm. --precision and --activation apply to c and jax; the others compute
SiLU. product: a large GEMM in this run, 2048^3 by oneDNN on the CPU, 8192^3 by cuBLAS on a GPU; share: divided by
product. On a GPU: medians of CUDA graphs and of jitted programs. On the CPU: best of interleaved repeats. A program
that needs too much memory has no row"""

DEVICES = ("cpu", "cuda")
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16", "float16", "float32")}
BY = ("c", "jax", "ragged-dot", "xla", "torch")
#: Implementations whose experts are ours.
OURS = ("c", "jax", "ragged-dot")
#: Activation and precision of the peers.
_SILU, _HIGHEST = "silu", "highest"

Calls = dict[str, Callable[[], Any]]
Arrays = Mapping[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_shapes(parser, "three on the CPU, qwen3-30b with T = 8192 on a GPU")
    add_by(parser, BY, "all installed ones")
    parser.add_argument("--precision", choices=list(PRECISIONS), default=_HIGHEST, help="for c and jax")
    parser.add_argument(
        "--activation", choices=[*PLAIN, "swiglu_oai", "situ"], default=_SILU, help="for c and jax; gated"
    )


class Operands:
    """Random operands. Each token has K distinct experts, all equally likely."""

    def __init__(self, shape: LayerShape, dtype: str, device: str, seed: int = 0):
        torch = timing.torch_on(device)
        T, D, F, E, K = shape
        generator, normal = torch.Generator(device).manual_seed(seed), timing.normal_on(device, dtype, seed)
        experts = torch.rand(T, E, device=device, generator=generator).argsort(1)[:, :K].flatten()
        order = experts.argsort(stable=True)
        self.topk = K
        self.x, self.d_out = normal(T, D), normal(T, D)
        self.w_in, self.w_out = normal(E, D, 2, F, scale=D**-0.5), normal(E, F, D, scale=F**-0.5)
        self.weights = torch.rand(T, K, device=device, generator=generator)
        self.token, self.slot_of_row = order // K, order.to(torch.int32)
        self.group_sizes = torch.bincount(experts, minlength=E).to(torch.int32)


def c_calls(given: Operands, precision: str = _HIGHEST, activation: str = _SILU) -> tuple[Calls, dict[str, Any]]:
    """Returns our calls through C, and the tensors that they write. Outputs are allocated before; dh overwrites h."""
    import torch

    from benchmarks.c_call import c_call

    (_, D, P, F), R = given.w_in.shape, given.slot_of_row.numel()
    y, h = given.x.new_empty(R, D), given.x.new_empty(R, P, F)
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
    results = {"dx_rows": torch.empty_like(y), "d_weights": torch.empty_like(given.weights)}
    results |= {f"d_{name}": torch.empty_like(getattr(given, name)) for name in ("w_in", "w_out")}
    forward = c_call("expert_ffn_forward", **shared, y=y)
    saving_h = c_call("expert_ffn_forward", **shared, y=y, h=h)
    backward = c_call("expert_ffn_backward", **shared, weights=given.weights, h=h, dh=h, d_out=given.d_out, **results)

    def both() -> None:
        saving_h()
        backward()

    return {"forward": forward, "both": both}, {"y": y, **results}


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


def jax_programs(
    given: Sequence[Operands], by: str, precision: str = _HIGHEST, activation: str = _SILU
) -> dict[str, timing.Program]:
    """Returns programs through JAX, one call each: ours ("jax"), or plain JAX with our ragged_dot or XLA's."""
    import jax

    from anabranch.jax import ragged_dot
    from anabranch.jax.ops.ffn import FfnConfig, FfnOperands, ffn_backward, ffn_forward
    from benchmarks.peers.xla import network

    config = FfnConfig(topk=given[0].topk, precision=PRECISIONS[precision], activation=as_activation(activation))

    product = ragged_dot if by == "ragged-dot" else jax.lax.ragged_dot

    def operands(a: Arrays, weights: Any = None) -> FfnOperands:
        return FfnOperands(a["x"], a["slot_of_row"], a["group_sizes"], a["w_in"], a["w_out"], None, None, weights)

    def ours_forward(a: Arrays) -> Any:
        return ffn_forward(config, operands(a), save_h=False)[0]

    def ours_both(a: Arrays) -> Any:
        y, h = ffn_forward(config, operands(a), save_h=True)
        return y, ffn_backward(config, operands(a, a["weights"]), cast(jax.Array, h), a["d_out"])

    def plain(a: Arrays, *leaves: Any) -> Any:
        x, w_in, w_out = leaves
        return network(x, w_in, w_out, a["slot_of_row"] // config.topk, a["group_sizes"], product)

    def plain_forward(a: Arrays) -> Any:
        return plain(a, a["x"], a["w_in"], a["w_out"])

    def plain_both(a: Arrays) -> Any:
        y, pull = jax.vjp(functools.partial(plain, a), a["x"], a["w_in"], a["w_out"])
        return y, pull(a["d_out"][a["slot_of_row"] // config.topk])

    forward, both = (ours_forward, ours_both) if by == "jax" else (plain_forward, plain_both)
    names = ("x", "w_in", "w_out", "weights", "d_out", "slot_of_row", "group_sizes")
    sets = [({name: timing.as_jax(getattr(one, name)) for name in names},) for one in given]
    return {
        name: timing.Program(jax.jit(timing.chained(function)), [[one] for one in sets])
        for name, function in (("forward", forward), ("both", both))
    }


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields one row per shape, dtype and implementation."""
    device, unit = options.device, UNITS[options.device]
    chosen = timing.available("experts", options.by or BY, options.by is not None, device)
    default = CPU_SHAPES if device == "cpu" else [NAMED["qwen3-30b"]._replace(T=8192)]
    for shape in sized(options.shape or default, options.tokens, options.quick):
        if options.precision == "fp8" and (shape.D % 128 or shape.F % 128):
            raise ArgumentError(f"--shape: got {shape} with --precision fp8, expected D and F to be multiples of 128")
        dtypes = [d for d in options.dtype if device == "cpu" or options.precision != "fp8" or d != "float32"]
        if not dtypes:
            raise ArgumentError("--dtype: got float32 with --precision fp8 on a GPU, expected bfloat16 or float16")
        for dtype in dtypes:
            itemsize = 4 if dtype == "float32" else 2
            # On a GPU torch's grouped_mm supports only bfloat16.
            by = [who for who in chosen if who != "torch" or device == "cpu" or dtype == "bfloat16"]
            count = timing.sets_past_cache(device, shape.operand_bytes(itemsize), least=1)
            given = [Operands(shape, dtype, device, seed) for seed in range(count)]
            calls: dict[str, list[Calls]] = {}
            if "c" in by:
                calls["c"] = [c_calls(one, options.precision, options.activation)[0] for one in given]
            if "torch" in by:
                calls["torch"] = [torch_calls(one) for one in given]
            programs = {
                who: jax_programs(given, who, options.precision, options.activation)
                for who in by
                if who not in ("c", "torch")
            }
            large = {who for who, of in programs.items() if not all(map(timing.fits, of.values()))}
            programs = {who: of for who, of in programs.items() if who not in large}
            before = product_rate(device, dtype)
            times = {
                name: timing.times_of(
                    device,
                    {who: [one[name] for one in sets] for who, sets in calls.items()},
                    {who: of[name] for who, of in programs.items()},
                    quick=options.quick,
                )
                for name in ("forward", "both")
            }
            known = [rate / SCALES[unit] for rate in (before, product_rate(device, dtype)) if rate is not None]
            ceiling = max(known, default=None)
            for who in (who for who in by if who not in large):
                ours = who in ("c", "jax")
                passes = {name: of[who] for name, of in times.items()}
                pass_rates = rates(shape, {name: timing.seconds for name, timing in passes.items()}, device)
                yield {
                    "T,D,F,E,K": str(shape),
                    "dtype": dtype,
                    "by": who,
                    "precision": options.precision if ours else _HIGHEST,
                    "activation": options.activation if ours else _SILU,
                    "path": experts_path(shape, dtype) if device == "cuda" and who in OURS else None,
                    **pass_rates,
                    **{
                        f"{name} share": None
                        if ceiling is None
                        else cast(float, pass_rates[f"{name} {unit}"]) / ceiling
                        for name in passes
                    },
                    f"product {unit}": ceiling,
                    "host bound": [name for name, timing in passes.items() if timing.host_bound],
                    "spread": spread(passes),
                }
