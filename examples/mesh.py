"""The mesh of an example, from the command line."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

AXES = ("data", "expert", "tensor")


def parse_mesh(text: str) -> dict[str, int]:
    """The sizes of a mesh's axes.

    Args:
      text: such as "expert=2,data=2"; omitted axes have one device.

    Raises:
      ValueError: the text is malformed.
    """
    sizes, named = dict.fromkeys(AXES, 1), set()
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if name not in AXES or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"--mesh: got {part!r}, expected AXIS=N with an axis of {', '.join(AXES)}")
        if name in named:
            raise ValueError(f"--mesh: got {name} twice in {text!r}, expected every axis once")
        named.add(name)
        sizes[name] = int(size)
    return sizes


def request_devices(sizes: dict[str, int]) -> None:
    """Makes JAX split the CPU into the mesh's devices; has to be called before JAX initialises devices."""
    import jax

    jax.config.update("jax_num_cpu_devices", math.prod(sizes.values()))


def make_mesh(sizes: dict[str, int]) -> "jax.sharding.Mesh":
    """The mesh on its number of devices.

    Raises:
      ValueError: there are fewer devices, or there are more and several processes, each of which needs a part of the
        mesh.
    """
    import jax

    num_devices = math.prod(sizes.values())
    if num_devices > jax.device_count() or (jax.process_count() > 1 and num_devices != jax.device_count()):
        raise ValueError(f"--mesh: got {num_devices} devices, expected {jax.device_count()}, the number of devices")
    devices = jax.devices()[:num_devices]
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)
