"""The tests of `python -m anabranch info --selftest`, for JAX and PyTorch if they are installed.

With JAX, every transport of expert parallelism is compared with the transport "ring", on all GPUs that JAX finds, or on
4 CPU devices. The test is one layer, forward and backward, with skewed routing and experts without tokens, with
unbounded buffers and with a bound that drops. Outputs, counts and every gradient are compared. With PyTorch, the layer
and its gradients are compared with the float64 oracle on every device that torch finds.
"""

import os
from collections.abc import Iterator
from typing import Any

#: Largest relative difference of a tensor in Frobenius norms: float32 sums in another order, then one rounding.
BOUNDS = {"float32": 1e-5, "bfloat16": 2.0**-8}
#: Bounds for a comparison with float64. They also cover the rounding of h, a and their gradients.
ORACLE_BOUNDS = {"float32": 1e-5, "bfloat16": 2.0**-7}
_CPU_DEVICES = 4

Outcome = tuple[str, str, bool]
"""(what was compared, the outcome in words, whether it passed)."""


def prepare() -> None:
    """Configures JAX with several CPU devices; call it before JAX initialises its backends."""
    try:
        import jax
    except ImportError:  # `info` reports the reason
        return

    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", _CPU_DEVICES)


def run(*, with_jax: bool, with_torch: bool) -> Iterator[Outcome]:
    """Runs the comparisons in the frameworks that are available.

    Args:
      with_jax: whether JAX finds devices.
      with_torch: whether a supported torch is installed.
    """
    if with_jax:
        yield from transports()
    if with_torch:
        yield from layers_in_torch()


def layers_in_torch() -> Iterator[Outcome]:
    """Compares PyTorch's layer and its gradients with the oracle on every device."""
    import torch

    from anabranch import _library

    devices = ["cpu"]
    try:
        if "error" not in _library.describe_cuda():
            devices += [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    except _library.LibraryError:
        pass  # `info` reports it
    for device in devices:
        for dtype, bound in ORACLE_BOUNDS.items():
            try:
                outcome = _layer_in_torch(device, dtype, bound)
            except RuntimeError as error:
                outcome = f"FAILED: {error}", False
            yield f"torch {device} {dtype}", *outcome


def _layer_in_torch(device: str, dtype: str, bound: float) -> tuple[str, bool]:
    import numpy as np
    import torch

    from anabranch.reference import moe as reference
    from anabranch.torch import moe

    T, E, K, D, F = 64, 8, 3, 64, 96
    rng = np.random.default_rng(0)
    shapes = {"x": (T, D), "gate": (D, E), "w_in": (E, D, 2, F), "w_out": (E, F, D), "d_output": (T, D)}
    tensors: dict[str, Any] = {}
    for name, shape in shapes.items():
        values = torch.from_numpy(rng.standard_normal(shape) / np.sqrt(shape[-2] if name != "d_output" else 1))
        tensors[name] = values.to(device, torch.float32 if name == "gate" else getattr(torch, dtype))
    d_output = tensors.pop("d_output")
    result = moe(**{name: tensor.requires_grad_() for name, tensor in tensors.items()}, topk=K)
    gradients = torch.autograd.grad(result.output, list(tensors.values()), d_output)

    def array(tensor: torch.Tensor) -> np.ndarray:
        return tensor.detach().double().cpu().numpy()

    given, experts = {name: array(tensor) for name, tensor in tensors.items()}, result.experts.cpu().numpy()
    d_expected = reference.moe_backward(**given, d_output=array(d_output), topk=K, experts=experts)
    logits = given["x"] @ given["gate"]
    got = {"output": array(result.output), "logits of the experts": np.take_along_axis(logits, experts, 1)}
    got |= {f"gradient of {name}": array(g) for name, g in zip(tensors, gradients, strict=True)}
    want = {
        "output": reference.moe(**given, topk=K, experts=experts).output,
        "logits of the experts": -np.sort(-logits, axis=1)[:, :K],
        **{f"gradient of {name}": d_expected[name] for name in tensors},
    }
    drops = {"drops": np.zeros(1, int)}
    return compare(got | {"drops": result.dropped.cpu().numpy()[None]}, want | drops, bound)


def transports() -> Iterator[Outcome]:
    """Compares every transport of JAX's expert parallelism with "ring"."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from anabranch.jax import Parallel, moe
    from anabranch.jax.parallel.peers import peers_along, reason_against
    from anabranch.jax.parallel.transports import TRANSPORTS

    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("expert",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    T, E, K, D, F = 64 * len(devices), 4 * len(devices), 3, 64, 96
    rng = np.random.default_rng(0)
    shapes = {"x": (T, D), "gate": (D, E), "w_in": (E, D, 2, F), "w_out": (E, F, D)}
    arrays = {name: rng.standard_normal(shape) / np.sqrt(shape[-2]) for name, shape in shapes.items()}
    arrays["x"][:, 0], arrays["gate"][0, E // 2 :] = 1.0, -0.5  # the first half of the ranks gets more tokens
    arrays["gate"][0, -3:] = -60.0  # the last experts get none

    def results(transport: str, dtype: str, capacity_factor: float | None) -> dict[str, np.ndarray]:
        parallel = Parallel(expert_axis="expert", transport=transport, capacity_factor=capacity_factor, mesh=mesh)

        def loss(arrays: dict[str, Any]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            result = moe(**arrays, topk=K, aux_loss_coeff=0.1, align_size=8, parallel=parallel)
            value = jnp.sum(jnp.sin(result.output.astype(jnp.float32))) + result.aux_loss
            return value, (result.output, result.dropped_by_source)

        placed = {
            name: jax.device_put(
                jnp.asarray(array, "float32" if name == "gate" else dtype),
                jax.sharding.NamedSharding(mesh, parallel.specs()[name]),
            )
            for name, array in arrays.items()
        }
        gradients, (output, dropped) = jax.jit(jax.grad(loss, has_aux=True))(placed)
        compared = {"output": output, **{f"gradient of {name}": array for name, array in gradients.items()}}
        return {"drops": np.asarray(dropped), **{n: np.asarray(a, np.float64) for n, a in compared.items()}}

    unusable = {"p2p"} if reason_against(peers_along(mesh, "expert")) else set()
    for dtype, bound in BOUNDS.items():
        for capacity_factor in (None, 0.75):
            expected = results("ring", dtype, capacity_factor)
            for transport in sorted(set(TRANSPORTS) - {"ring"} - unusable):
                name = f"{transport} {dtype}, {'unbounded' if capacity_factor is None else 'bounded'}"
                try:
                    outcome = compare(results(transport, dtype, capacity_factor), expected, bound)
                except (jax.errors.JaxRuntimeError, ValueError) as error:
                    outcome = f"FAILED: {error}", False
                yield name, *outcome


def compare(got: dict[str, Any], expected: dict[str, Any], bound: float) -> tuple[str, bool]:
    """Compares two dicts of arrays: returns the largest relative difference in words and whether it is in bounds."""
    import numpy as np

    if not np.array_equal(got["drops"], expected["drops"]):
        return f"FAILED: dropped {got['drops'].tolist()}, expected {expected['drops'].tolist()}", False
    errors = {
        name: float(np.linalg.norm(got[name] - want) / np.linalg.norm(want))
        for name, want in expected.items()
        if name != "drops"
    }
    worst = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
    text = f"{worst} differs by {errors[worst]:.1e}, bound {bound:.1e}; {int(expected['drops'].sum())} dropped"
    return (f"ok: {text}", True) if errors[worst] <= bound else (f"FAILED: {text}", False)
