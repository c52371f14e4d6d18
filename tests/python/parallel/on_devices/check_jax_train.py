"""The training example on meshes: both MoE blocks have equal losses and gradients; runs resume on other meshes."""

import contextlib
import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from byte_lm.data import training_batch
from jax_train.config import Config
from jax_train.step import Program
from jax_train.train import train
from mesh import make_mesh, parse_mesh
from oracle import assert_close, assert_close_per_expert

TINY = Config(
    base_emb_dim=16,
    base_num_decoder_layers=1,
    base_num_query_heads=2,
    num_experts=16,
    base_moe_mlp_dim=8,
    global_batch_size=8,
    max_target_length=8,
    load_balance_loss_weight=0.1,
)
TEXT = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)


def on_mesh(config):
    return jax.set_mesh(make_mesh(parse_mesh(config.mesh))) if config.mesh else contextlib.nullcontext()


def by_name(params):
    """{path: array} of a tree; wi is split into wi_0 and wi_1."""
    found = {}
    for path, array in jax.tree_util.tree_leaves_with_path(params):
        name, array = jax.tree_util.keystr(path), np.asarray(array)
        if "'wi'" in name:
            halves = np.split(array, 2, axis=-1)
            found |= {name.replace("'wi'", f"'wi_{i}'"): half for i, half in enumerate(halves)}
        else:
            found[name] = array
    return found


def with_cold_experts(path, array):
    """Of experts e and e + 8 one has a logit above 0, except for e = 0: experts 0 and 8 are never selected."""
    if "'gate'" not in jax.tree_util.keystr(path):
        return array
    half = (4 * array[:, :8]).at[:, 0].set(0)
    return jnp.concatenate([half, -half], axis=1)


def gradients(**changes):
    config = dataclasses.replace(TINY, **changes)
    with on_mesh(config):
        program = Program(config)
        params = jax.tree_util.tree_map_with_path(with_cold_experts, program.init().params)
        batch = program.put(training_batch(TEXT, 0, config.global_batch_size, config.max_target_length, 0))
        found, bits = jax.jit(program.gradients)(params, batch)
        return by_name(found), float(bits)


@pytest.fixture(scope="module")
def expected():
    """The block of ragged_dot on one device."""
    return gradients(moe="ragged_dot")


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(mesh="expert=2,data=2", remat_policy="moe_h,moe_routing"),
        dict(mesh="expert=4,data=2", prefuse_moe_weights=True, remat_policy="full"),
        dict(mesh="expert=2,data=4", moe="ragged_dot", prefuse_moe_weights=True, remat_policy="moe_h,moe_logits"),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_ragged_dot_on_one_device(changes, expected):
    got, bits = gradients(**changes)
    want, want_bits = expected
    assert got.keys() == want.keys() and bits == pytest.approx(want_bits, rel=1e-6)
    cold = 0
    for name, array in want.items():
        is_of_experts = any(f"'{part}'" in name for part in ("wi_0", "wi_1", "wo"))
        (assert_close_per_expert if is_of_experts else assert_close)(got[name], array, 1e-5, name)
        cold += is_of_experts and not array[[0, 8]].any()
    assert cold == 3  # in wi_0, wi_1 and wo


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(20):
        (folder / f"module_{i}.py").write_text(f"def f_{i}(x):\n    return x + {i}\n" * 10)
    return folder


def test_a_run_resumes_on_another_mesh_with_the_other_block(corpus, tmp_path, capsys):
    config = dataclasses.replace(
        TINY, steps=4, corpus=corpus, mesh="expert=2,data=2", checkpoint_period=2, base_output_directory=str(tmp_path)
    )

    def run(**changes):
        this = dataclasses.replace(config, **changes)
        with on_mesh(this):
            return by_name(train(this))

    want = run()
    shutil.rmtree(tmp_path / "4")
    same = run()
    for name, array in want.items():
        np.testing.assert_array_equal(same[name], array, err_msg=name)
    shutil.rmtree(tmp_path / "4")
    other = run(mesh="expert=4,data=1", moe="ragged_dot")
    for name, array in want.items():
        np.testing.assert_allclose(other[name], array, rtol=0, atol=1e-3 * np.abs(array).max(), err_msg=name)
    assert capsys.readouterr().out.count("step 4 bits per byte") == 3
