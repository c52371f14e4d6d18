"""Names of phases in traces of torch.profiler, for code in Python; native code has src/torch/phase_range.h."""

import contextlib
from typing import Any

import torch

from anabranch.torch.binding import private


def range_of(phase: str | None) -> Any:
    """A context that is a range with this name in a trace. None, or in a program of torch.compile: no range."""
    if torch.compiler.is_compiling() or phase is None or not private.is_profiling():
        return contextlib.nullcontext()
    return torch.profiler.record_function(phase)
