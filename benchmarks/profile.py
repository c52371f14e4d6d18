"""Records a timeline of the layer's forward and backward pass, and the time of each phase in it."""

import argparse
import collections
import pathlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anabranch.phases import NAMES, PREFIX
from benchmarks import flags, timing
from benchmarks.processes import rows_of_a_process
from benchmarks.shapes import CPU_SHAPES, NAMED, LayerShape
from benchmarks.tables import selected

CAPTION = """microseconds per step (forward and backward pass), mean of the recorded steps. phase: docs/profiling.md
describes them; other: what is in no phase. host: time of the host in the phase, with the computation on a CPU; none
through JAX, whose programs the host starts as a whole. device: total time of its kernels on a GPU, or of its operations
on the CPU through JAX; kernels that run at the same time all count. share: of the device's time, or else of the host's.
kernels: the three that take most of the device's time. The title of a table names the file of its timeline"""

DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}
BY = ("torch", "jax")
DEFAULT = {"cpu": CPU_SHAPES[0], "cuda": NAMED["qwen3-30b"]}
OPTIONS = {
    **flags.shapes("qwen3-30b on a GPU, a small one on the CPU"),
    **flags.by(BY, "torch"),
    "--out": {"metavar": "FOLDER", "help": "where the timelines are written; default: a new temporary folder"},
}
_WARM_UP = 3
_SHOWN = 3
OTHER = "other"


class _Phase:
    """What is recorded of one phase, in all steps."""

    def __init__(self) -> None:
        self.host: float | None = None
        self.device: float | None = None
        self.kernels: dict[str, float] = collections.defaultdict(float)

    def add_host(self, microseconds: float) -> None:
        self.host = (self.host or 0.0) + microseconds

    def add_kernel(self, name: str, microseconds: float) -> None:
        self.device = (self.device or 0.0) + microseconds
        self.kernels[name] += microseconds


def _phases_in_torch(shape: LayerShape, dtype: str, device: str, steps: int, folder: pathlib.Path) -> Any:
    """Records with torch.profiler. Returns the phases, and the file with the timeline."""
    torch = timing.torch_on(device)
    from torch.profiler import ProfilerActivity, profile

    from benchmarks import layer_torch

    layer = layer_torch.make("moe", layer_torch.operands(shape, dtype, None, device), shape.K)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]

    def run(times: int) -> None:
        for _ in range(times):
            layer.both()
        if device == "cuda":
            torch.cuda.synchronize()

    run(_WARM_UP)
    with profile(activities=activities) as profiler:
        run(steps)
    file = folder / "torch.json"
    profiler.export_chrome_trace(str(file))
    phases: dict[str, _Phase] = collections.defaultdict(_Phase)
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CPU:  # a copy of a range in the GPU's timeline
            continue
        name = _phase_around(event)
        if name is not None and event.name == name:
            phases[name].add_host(event.cpu_time_total)
        for kernel in event.kernels:  # of the innermost range in which the host started it
            phases[name or OTHER].add_kernel(kernel.name, kernel.duration)
    return phases, file


def _phase_around(event: Any) -> str | None:
    """The name of the innermost phase that contains an event of torch, or of the event itself."""
    while event is not None and not event.name.startswith(PREFIX):
        event = event.cpu_parent
    return None if event is None else event.name


def _phases_in_jax(shape: LayerShape, dtype: str, device: str, steps: int, folder: pathlib.Path) -> Any:
    """Records with jax.profiler. Returns the phases, and the file with the timeline."""
    jax = timing.jax_on(device)
    from benchmarks import layer_jax

    given = layer_jax.operands(shape, dtype, None)
    # In a command buffer (CUDA graph) kernels would not know their operation.
    options = {"xla_gpu_enable_command_buffer": ""} if device == "cuda" else None
    step = jax.jit(layer_jax.passes(layer_jax.LAYERS["jax"], shape.K)["both"])
    program = step.lower(*given).compile(compiler_options=options)
    for _ in range(_WARM_UP):
        jax.block_until_ready(program(*given))
    before = set(folder.rglob("*.xplane.pb"))
    with jax.profiler.trace(folder):
        for _ in range(steps):
            jax.block_until_ready(program(*given))
    (file,) = set(folder.rglob("*.xplane.pb")) - before
    phase_of_operation = phases_of_operations(program.as_text())
    phases: dict[str, _Phase] = collections.defaultdict(_Phase)
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if device == "cuda" and not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            for event in line.events:
                operation = dict(event.stats).get("hlo_op")
                if operation is not None:
                    phase = phase_of_operation.get(str(operation), OTHER)
                    phases[phase].add_kernel(event.name, event.duration_ns / 1e3)
    return phases, file


def phases_of_operations(program: str) -> dict[str, str]:
    """Returns the innermost phase of each operation that has one, by its name in the text of a compiled program.

    >>> phases_of_operations('  %dot.5 = f32[2] dot(%a), metadata={op_name="jit(f)/anabranch/gate/dot_general"}')
    {'dot.5': 'anabranch/gate'}
    """
    found = {}
    for name, path in re.findall(r'^\s*(?:ROOT )?%?([\w.-]+) = .*?op_name="([^"]*)"', program, re.MULTILINE):
        phases = [phase for phase in re.findall(rf"{PREFIX}\w+", path) if phase in NAMES]
        if phases:
            found[name] = phases[-1]
    return found


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields one row per shape, dtype, front end and phase.

    Raises:
      BenchError: this machine lacks something.
    """
    folder = pathlib.Path(options.out or tempfile.mkdtemp(prefix="anabranch-profile-")).resolve()
    steps = 2 if options.quick else 10
    record = {"torch": _phases_in_torch, "jax": _phases_in_jax}
    front_ends = dict.fromkeys(options.by or BY[:1])
    for shape in flags.sized(options.shape or [DEFAULT[options.device]], options.tokens, options.quick):
        for dtype in options.dtype:
            for by in front_ends:
                if len(front_ends) > 1:  # a process can have one profiler of a GPU
                    given = {"device": options.device, "shape": shape, "dtype": dtype, "by": by, "out": folder}
                    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
                    yield from rows_of_a_process(["profile", *words, *["--quick"] * options.quick], quiet=True)
                    continue
                place = folder / f"{shape}_{dtype}_{by}"
                place.mkdir(parents=True, exist_ok=True)
                phases, file = record[by](shape, dtype, options.device, steps, place)
                head = {"T,D,F,E,K": str(shape), "dtype": dtype, "by": by}
                yield from ({**head, **row, "timeline": str(file)} for row in _rows(phases, steps))


def _rows(phases: Mapping[str, _Phase], steps: int) -> Iterator[dict[str, Any]]:
    on_device = any(phase.device is not None for phase in phases.values())
    total = sum((phase.device if on_device else phase.host) or 0.0 for phase in phases.values())
    for name in (*NAMES, OTHER):
        if name not in phases:
            continue
        phase = phases[name]
        spent = (phase.device if on_device else phase.host) or 0.0
        longest = sorted(phase.kernels.items(), key=lambda kernel: -kernel[1])[:_SHOWN]
        yield {
            "phase": name.removeprefix(PREFIX),
            "host": None if phase.host is None else phase.host / steps,
            "device": None if phase.device is None else phase.device / steps,
            "share": spent / total if total > 0 else None,
            "kernels": [{"name": kernel, "us": time / steps} for kernel, time in longest],
        }


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns one table per timeline."""
    found: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    names = ("phase", "host", "device", "share", "kernels")
    for row in rows:
        kernels = ", ".join(f"{_short(kernel['name'])} {kernel['us']:.3g}" for kernel in row.get("kernels", ()))
        title = f"{row['by']}, {row['T,D,F,E,K']}, {row['dtype']}: {row['timeline']}"
        found[title] += selected([{**row, "kernels": kernels}], names)
    return dict(found)


def _short(kernel: str) -> str:
    """The name of a kernel without its namespaces, template arguments and parameters.

    >>> _short("void anabranch::cuda::(anonymous namespace)::route<A, B<1>>(C)"), _short("ffi_call.3")
    ('route', 'ffi_call.3')
    """
    return re.sub(r"[<(].*", "", kernel.replace("(anonymous namespace)::", "")).split(" ")[-1].split("::")[-1]
