"""Exchanges of the GPUs of a mesh on one host, by name.

A program contains the names of its exchanges, and every device takes its own exchange with that name when it runs the
program. So a name says everything that an exchange depends on: the devices of every group, in the order of their ranks,
and the sizes of the buffers. An exchange is made while a program that uses it is traced and is kept until the process
ends: a compiled program may use it at any time. Sizes are powers of two, so the exchanges of a group that have the same
number of buffers, of all sizes together, take less than four times the memory of the largest call.
"""

import ctypes
import dataclasses
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec

from anabranch._library import STATUS_ERRORS
from anabranch.peer_exchange import HANDLE_BYTES, MAX_RANKS, PeerExchange

_LEAST_BYTES = 1 << 20
_REASON_BYTES = 512

#: By name, the exchanges of this process.
_made: dict[str, list[PeerExchange]] = {}
_making = threading.Lock()


def size_class(size: int) -> int:
    """The bytes of the buffer for a call with `size` bytes: a power of two, at least 1 MiB.

    >>> size_class(5), size_class(3 << 20)
    (1048576, 4194304)
    """
    return max(_LEAST_BYTES, 1 << (size - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class Peers:
    """The groups of devices along one axis of a mesh.

    Attributes:
      groups: the devices of every group, in the order of their ranks.
    """

    groups: tuple[tuple[jax.Device, ...], ...]

    def name(self, *sizes: int) -> str:
        """The name of the exchange whose buffers are for calls with these bytes."""
        groups = "/".join(",".join(str(device.id) for device in group) for group in self.groups)
        return f"{' + '.join(str(size_class(size)) for size in sizes)} bytes, devices {groups}"

    def exchange(self, *sizes: int) -> str:
        """Makes the exchange whose buffers are for calls with these bytes, if there is none, and returns its name.

        If the devices belong to several processes, all processes make the same calls in the same order, as they do
        when they trace the same programs.

        Raises:
          ValueError: the exchange cannot be made on a device of some process.
        """
        name = self.name(*sizes)
        with _making:
            if name not in _made:
                # Another thread has no trace and no mesh, so computations there run at once.
                with ThreadPoolExecutor(1) as pool:
                    _made[name] = pool.submit(_make, self.groups, name, tuple(map(size_class, sizes))).result()
        return name


def concrete_mesh(given: Mesh | jax.sharding.AbstractMesh | None) -> Mesh | None:
    """The mesh with devices of a program that is being traced: that of jax.set_mesh, else the given one if it has any.

    jax.sharding.get_mesh does not work while a program is traced.
    """
    try:
        mesh = jax.ShapeDtypeStruct((), "int32", sharding=PartitionSpec()).sharding.mesh
    except TypeError:  # no jax.set_mesh
        mesh = given
    return mesh if isinstance(mesh, Mesh) and not mesh.empty else None


def peers_along(mesh: Mesh, axis: str) -> Peers:
    """The groups of a mesh along an axis."""
    index = mesh.axis_names.index(axis)
    groups = np.moveaxis(mesh.devices, index, -1).reshape(-1, mesh.devices.shape[index])
    return Peers(tuple(map(tuple, groups)))


def reason_against(peers: Peers) -> str:
    """Why the devices cannot use exchanges, as far as this is known without making one; "" if they can."""
    devices = [device for group in peers.groups for device in group]
    if devices[0].platform != "gpu":
        return f"on devices of the platform {devices[0].platform!r}, expected GPUs"
    ranks = len(peers.groups[0])
    if not 2 <= ranks <= MAX_RANKS:
        return f"with {ranks} devices along expert_axis, expected 2 to {MAX_RANKS}"
    processes = {device.process_index for device in devices}
    if processes not in ({jax.process_index()}, set(range(jax.process_count()))):
        return (
            f"on a mesh over the processes {sorted(processes)} of {jax.process_count()}, expected devices of this "
            "process only, or of all processes"
        )
    if sum(device.process_index == jax.process_index() for device in devices) > 1 and _loads_kernels_lazily():
        return (
            "with several GPUs in this process, while CUDA loads kernels at their first launch, which may wait for "
            "another GPU of the process: expected CUDA_MODULE_LOADING=EAGER in the environment of the process"
        )
    return ""


def _loads_kernels_lazily() -> bool:
    """Whether CUDA loads a kernel at its first launch. False before CUDA is initialised."""
    lazy, mode = 2, ctypes.c_int()
    try:
        get_mode = ctypes.CDLL("libcuda.so.1").cuModuleGetLoadingMode
    except (OSError, AttributeError):
        return False
    return get_mode(ctypes.byref(mode)) == 0 and mode.value == lazy


def _make(groups: Sequence[Sequence[jax.Device]], name: str, sizes: Sequence[int]) -> list[PeerExchange]:
    """The connected and registered exchanges of this process's devices."""
    places = [(device, rank, group) for group in groups for rank, device in enumerate(group)]
    own = {i: place for i, place in enumerate(places) if place[0].process_index == jax.process_index()}
    _wait(device for device, *_ in own.values())
    made: dict[int, PeerExchange] = {}
    handles, reasons = [b""] * len(places), [""] * len(places)
    for i, (device, rank, group) in own.items():
        try:
            made[i] = PeerExchange(device.local_hardware_id, rank, len(group), sizes)
            handles[i] = made[i].handle()
        except STATUS_ERRORS as error:
            reasons[i] = str(error)
    is_local = len(own) == len(places)
    handles, reasons = _of_all(handles, reasons, is_local)
    if not any(reasons):
        for i, exchange in made.items():
            first = i - exchange.rank  # places are in the order of groups and ranks
            try:
                exchange.connect(handles[first : first + exchange.ranks])
                exchange.register(name)
            except STATUS_ERRORS as error:
                reasons[i] = str(error)
        _, reasons = _of_all(handles, reasons, is_local)
    if any(reasons):
        for exchange in made.values():
            exchange.close()
        i = next(i for i, reason in enumerate(reasons) if reason)
        raise ValueError(f"transport: got 'p2p', which device {places[i][0].id} cannot use: {reasons[i]}")
    return list(made.values())


def _of_all(handles: list[bytes], reasons: list[str], is_local: bool) -> tuple[list[bytes], list[str]]:
    """The handles and reasons of the devices of all processes; "" where this process does not have the device."""
    if is_local:
        return handles, reasons
    rows = np.zeros((len(handles), HANDLE_BYTES + _REASON_BYTES), np.uint8)
    for row, handle, reason in zip(rows, handles, reasons, strict=True):
        text = handle.ljust(HANDLE_BYTES, b"\0") + reason.encode()[:_REASON_BYTES]
        row[: len(text)] = np.frombuffer(text, np.uint8)
    gathered = np.asarray(multihost_utils.process_allgather(rows)).max(axis=0)  # one process has a row
    return (
        [row[:HANDLE_BYTES].tobytes() for row in gathered],
        [row[HANDLE_BYTES:].tobytes().rstrip(b"\0").decode(errors="replace") for row in gathered],
    )


def _wait(devices: Iterable[jax.Device]) -> None:
    """Waits until the devices have run all programs so far; making an exchange could block the calls of another."""
    jax.block_until_ready([jax.device_put(np.int32(0), device) + 1 for device in devices])
