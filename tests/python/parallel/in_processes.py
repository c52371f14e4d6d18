"""Runs the whole layer in the processes of examples/launch.py; each saves output, losses, counts and every gradient.

    python examples/launch.py --processes 4 tests/python/parallel/in_processes.py FOLDER '{"mesh": "expert=4"}' ...

Process p saves case c as FOLDER/c.p.npz, where `load` finds it.
"""

import dataclasses
import json
import pathlib
import sys

_TESTS = pathlib.Path(__file__).resolve().parents[1]
_FOLDERS = (_TESTS.parents[1] / "examples", _TESTS, _TESTS / "parallel" / "on_devices")
sys.path[:0] = map(str, _FOLDERS)

import jax  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402
from meshes import placed  # noqa: E402

from anabranch.jax import MoEOutput, Parallel  # noqa: E402
from launch import join  # noqa: E402
from mesh import make_mesh, parse_mesh  # noqa: E402
from moe_cases import operands, run_layer  # noqa: E402

T, E, K, D, F = 64, 8, 3, 16, 24
LARGE_T, LARGE_D = 16384, 1280


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer on a mesh, from the command line.

    Args:
      mesh: such as "expert=2,data=2".
      transport, capacity_factor: options of Parallel.
      dtype: dtype of x, weights and biases.
      fsdp: whether matrices are also sharded over the data axis.
      one_rank: whether all assignments go to the last two experts, which are on one rank of 4. Otherwise most go to few
        experts and none to the last one.
    """

    mesh: str
    transport: str = "ring"
    dtype: str = "float32"
    fsdp: bool = False
    capacity_factor: float | None = None
    one_rank: bool = False
    large: bool = False

    def __str__(self):
        return ",".join(str(value) for value in dataclasses.astuple(self) if value not in (None, False))

    @property
    def parallel(self):
        return Parallel(
            expert_axis="expert",
            data_axes="data",
            fsdp_axes="data" if self.fsdp else (),
            tensor_axis="tensor",
            transport=self.transport,
            capacity_factor=self.capacity_factor,
        )

    @property
    def tokens(self):
        """T."""
        return LARGE_T if self.large else T

    def arrays(self):
        return operands(
            self.tokens, E, K, LARGE_D if self.large else D, F, dtype=self.dtype, bias=True, skew=3.0, cold=1
        )

    def options(self):
        rng = np.random.default_rng(3)
        options = {"topk": K, "aux_loss_coeff": 0.3, "z_loss_coeff": 0.1}
        if self.one_rank:
            forced = rng.integers(E - 2, E, (self.tokens, K)).astype(np.int32)
            forced[::4, 1] = -1
            return {**options, "forced_experts": forced}
        return {**options, "token_mask": rng.random(self.tokens) < 0.9}


def load(path):
    """(result, gradients, cotangents) of one process."""
    with np.load(path) as file:
        # numpy stores bfloat16 as two untyped bytes
        arrays = {n: a.view(ml_dtypes.bfloat16) if a.dtype.kind == "V" else a for n, a in file.items()}
    result = MoEOutput(**{name: arrays[name] for name in MoEOutput._fields if name in arrays})
    gradients = {name.removeprefix("d_"): array for name, array in arrays.items() if name.startswith("d_")}
    return result, gradients, [array for name, array in arrays.items() if name.startswith("cotangent_")]


def main(folder, *cases):
    """Runs all cases; every process gathers all results, so that all processes can be compared."""
    join()
    for index, text in enumerate(cases):
        case = Case(**json.loads(text))
        mesh = make_mesh(parse_mesh(case.mesh))
        with jax.set_mesh(mesh):
            result, gradients, cotangents = run_layer(
                case.arrays(), put=placed(mesh, case.parallel), parallel=case.parallel, **case.options()
            )
        arrays = {**result._asdict(), **{f"d_{name}": array for name, array in gradients.items()}}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        # One program for all arrays: multihost_utils.process_allgather compiles one for each of them.
        arrays = jax.jit(lambda arrays: arrays, out_shardings=NamedSharding(mesh, PartitionSpec()))(arrays)
        arrays |= {f"cotangent_{i}": array for i, array in enumerate(cotangents)}
        np.savez(pathlib.Path(folder) / f"{index}.{jax.process_index()}.npz", **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
