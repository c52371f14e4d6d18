"""One process with several GPUs: the layer on meshes of 2 and of 4 against the float64 oracle, in bfloat16."""

import math
from typing import NamedTuple

import in_processes  # noqa: F401  adds the folders of the modules below
import jax
import numpy as np
import pytest
from meshes import kept_and_dropped, placed

from anabranch.jax import Parallel
from fp8_layers import check_routed
from mesh import make_mesh, parse_mesh
from moe_cases import check_layer, operands
from routed_cases import routed_operands, run_routed


class Sizes(NamedTuple):
    """Tokens, experts, experts per token, widths."""

    T: int = 256
    E: int = 16
    K: int = 3
    D: int = 64
    F: int = 96


class Case(NamedTuple):
    """A layer on a mesh, as examples/mesh.py reads it.

    one_rank: all assignments go to the last two experts, which are on one rank.
    """

    mesh: str
    transport: str
    sizes: Sizes = Sizes()
    align_size: int = 0
    fsdp: bool = False
    capacity_factor: float | None = None
    one_rank: bool = False


MANY, ONE_EACH = Sizes(E=64, K=8), Sizes(E=4, K=1)
CASES = (
    Case("expert=2", "ring", MANY, align_size=128),
    Case("expert=2", "all_to_all", MANY, align_size=8),
    Case("expert=2", "ragged", MANY),
    Case("expert=2", "ragged", capacity_factor=0.8),
    Case("data=4", "ring", fsdp=True),
    Case("expert=2,data=2", "ring", fsdp=True, align_size=8),
    Case("expert=2,data=2", "all_to_all", align_size=128),
    Case("expert=2,data=2", "ragged", fsdp=True),
    Case("expert=4", "ring", MANY, align_size=128),
    Case("expert=4", "all_to_all", MANY),
    Case("expert=4", "ragged", MANY, align_size=8),
    Case("expert=4", "ring", ONE_EACH),
    Case("expert=4", "all_to_all", ONE_EACH),
    Case("expert=4", "ring", Sizes(E=8), one_rank=True),
    Case("expert=4", "all_to_all", Sizes(E=8), one_rank=True),
    Case("expert=4", "ragged", Sizes(E=8), one_rank=True, align_size=8),
    Case("expert=2,tensor=2", "ring"),
    Case("expert=2,tensor=2", "all_to_all", capacity_factor=0.8),
    Case("expert=4", "ring", capacity_factor=0.8),
    Case("expert=4", "all_to_all", capacity_factor=0.8, align_size=8),
    Case("expert=4", "ragged", capacity_factor=0.8),
)


def name_of(case):
    """The fields without their default values."""
    return "-".join(str(value) for value, usual in zip(case, Case("", ""), strict=True) if value != usual)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_layer_on_a_mesh_of_gpus(gpu, case):
    shape = parse_mesh(case.mesh)
    ranks = math.prod(shape.values())
    if len(jax.devices("gpu")) < ranks:
        pytest.skip(f"FEWER THAN {ranks} GPUS FOUND: the layer was not tested on so many")
    T, E, K, D, F = case.sizes
    arrays = operands(T, E, K, D, F, dtype="bfloat16", bias=True, skew=0.0 if K == 1 else 3.0, cold=E // 8)
    rng = np.random.default_rng(3)
    options = {"topk": K, "aux_loss_coeff": 0.3, "z_loss_coeff": 0.1}
    if case.one_rank:
        options["forced_experts"] = rng.integers(E - 2, E, (T, K)).astype(np.int32)
    else:
        options["token_mask"] = rng.random(T) < 0.9
    parallel = Parallel(
        expert_axis="expert",
        data_axes="data",
        fsdp_axes="data" if case.fsdp else (),
        tensor_axis="tensor",
        transport=case.transport,
        capacity_factor=case.capacity_factor,
    )
    kept, dropped = None, 0
    if case.capacity_factor is not None:
        kept, dropped = kept_and_dropped(arrays, options, parallel, shape["expert"], shape["data"])
        assert dropped.sum() > 10
    mesh = make_mesh(shape)
    with jax.set_mesh(mesh):
        result, _ = check_layer(
            arrays, put=placed(mesh, parallel), parallel=parallel, kept=kept, align_size=case.align_size, **options
        )
    np.testing.assert_array_equal(result.dropped_by_source, dropped)


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["ring", "all_to_all", "ragged"])
def test_tokens_are_sent_between_gpus_as_fp8(gpu, transport):
    """Results agree with the oracle and have the bits of an unquantised exchange, also with a NaN among the tokens."""
    devices = jax.devices("gpu")
    if len(devices) < 2 or devices[0].compute_capability != "9.0":
        pytest.skip("FEWER THAN 2 HOPPER GPUS FOUND: the FP8 exchange between GPUs is not tested")
    arrays = routed_operands(256, 8, 3, 256, 256, dtype="bfloat16", bias=True)
    mesh = make_mesh(parse_mesh("expert=2"))
    options = dict(activation="silu", fp8_scales="float32", weight_early=transport == "all_to_all")
    with jax.set_mesh(mesh):
        found = []
        for fp8_exchange in (False, True):
            parallel = Parallel(expert_axis="expert", transport=transport, fp8_exchange=fp8_exchange)
            given = dict(put=placed(mesh, parallel), parallel=parallel, **options)
            found.append(check_routed(arrays, "gpu", sent=fp8_exchange, **given))
        (want, want_gradients), (got, got_gradients) = found
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(got_gradients["x"], want_gradients["x"])
        arrays["x"][3, 130] = np.nan
        (output, *_), *_ = run_routed(arrays, precision="fp8", **given)
        assert (arrays["experts"][3] >= 0).any()
        np.testing.assert_array_equal(np.isnan(np.asarray(output, np.float32)).any(axis=1).nonzero()[0], [3])
