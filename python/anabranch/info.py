"""The facts that `python -m anabranch info` prints: what this machine has, and why a backend is missing."""

import json
import os
import platform

import anabranch
from anabranch import _library, _versions


def _jax_backends() -> dict[str, str]:
    """The devices that JAX sees, or the reason why it sees none."""
    try:
        import jax
    except ImportError as error:
        return {"jax devices": f"none: {error}"}
    try:
        return {"jax devices": ", ".join(f"{d.platform}:{d.id} ({d.device_kind})" for d in jax.devices())}
    except RuntimeError as error:
        return {"jax devices": f"none: {error}"}


def _torch() -> dict[str, str]:
    """The devices that torch sees, or the reason why it sees none."""
    version = _versions.installed("torch")
    if version is None:
        return {"torch devices": "none: torch is not installed"}
    if not _versions.torch_is_supported(version):
        oldest = ".".join(map(str, _versions.OLDEST_TORCH))
        return {"torch devices": f"none: torch {version} is too old for anabranch.torch, which needs {oldest} or newer"}
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of torch's own libraries does not load
        return {"torch devices": f"none: {error}"}
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU alone"
    devices = ["cpu"]
    devices += [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    facts = {"torch built for": built, "torch devices": ", ".join(devices), "torch operations": _torch_operations()}
    if missing := _missing_in_torch():
        facts["torch lacks"] = f"{missing}; slower or more limited functions take their place"
    return facts


def _torch_operations() -> str:
    """How torch's operations call the C libraries."""
    try:
        from anabranch.torch.binding import native
    except (ImportError, _library.LibraryError) as error:
        return f"none: {error}"
    return f"through ctypes: {native.reason}" if native.native is None else native.native.describe()


def _missing_in_torch() -> str:
    """The private names that the installed torch lacks."""
    try:
        from anabranch.torch.binding import private
    except (ImportError, _library.LibraryError):
        return ""  # see "torch operations"
    return ", ".join(private.missing())


def _cuda() -> dict[str, str]:
    """Whether the CUDA backend can be used, or the reason why not."""
    try:
        library = _library.load_cuda()
        facts = _library.describe_cuda()
    except _library.LibraryError as error:
        return {"cuda backend": f"missing: {error}"}
    state = f"unusable: {facts['error']}" if "error" in facts else "available"
    return {
        "cuda backend": state,
        "cuda library": library._name,
        **{f"cuda {name}": value for name, value in facts.items() if name != "error"},
    }


def collect() -> dict[str, str]:
    """Everything that `info` prints, as text by name."""
    facts = {
        "anabranch": anabranch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} logical CPUs, {len(os.sched_getaffinity(0))} usable",
    }
    try:
        library = _library.load()
        facts["cpu backend"] = "available"
        facts["library"] = library._name
        facts |= {f"library {name}": value for name, value in _library.describe().items()}
    except _library.LibraryError as error:
        facts["cpu backend"] = f"missing: {error}"
    facts |= _cuda()
    packages = ("jax", "jaxlib", "flax", "numpy", "onednn-cpu-gomp", "torch", "transformers", "peft")
    facts |= {package: _versions.installed(package) or "not installed" for package in packages}
    untested = _versions.untested({package: _versions.installed(package) for package in _versions.TESTED})
    if untested:
        facts["warning"] = "; ".join(untested)
    facts |= _jax_backends()
    facts |= _torch()
    settings = (
        "ANABRANCH_LIBRARY",
        "ANABRANCH_CUDA_LIBRARY",
        "ANABRANCH_CUDA_PATH",
        "ANABRANCH_CUDA_PACKED",
        "ANABRANCH_EXCHANGE_TIMEOUT",
        "ANABRANCH_ISA",
        "ANABRANCH_BF16",
        "ANABRANCH_TORCH_NATIVE",
        "OMP_NUM_THREADS",
        "OMP_WAIT_POLICY",
    )
    environment = [f"{name}={os.environ[name]}" for name in settings if name in os.environ]
    facts["environment"] = ", ".join(environment) or "no Anabranch settings"
    return facts


def run(*, as_json: bool, selftest: bool = False) -> int:
    """Prints the facts, and with `selftest` its results; returns 1 if no backend works or the self-test failed."""
    passed = True
    if selftest:
        from anabranch import selftest as test

        test.prepare()
    facts = collect()
    if selftest and facts["cpu backend"] == "available":
        with_jax, with_torch = (not facts[f"{name} devices"].startswith("none: ") for name in ("jax", "torch"))
        for name, outcome, ok in test.run(with_jax=with_jax, with_torch=with_torch):
            facts[f"selftest {name}"] = outcome
            passed = passed and ok
        if not (with_jax or with_torch):
            facts["selftest"] = "FAILED: nothing was tested, neither JAX nor PyTorch can be used"
            passed = False
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"{name:<{width}}  {value}")
    return 0 if passed and facts["cpu backend"] == "available" else 1
