"""XLA compiles a routing step to our custom calls and small arithmetic, with no other pass over token-sized arrays."""

import functools
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anabranch.jax import custom_calls as anabranch_custom_calls
from anabranch.jax import expert_ffn, fused_topk_with_score_function, load_balance_loss, moe, plan, route
from anabranch.layouts import IN_LAYOUTS, OUT_LAYOUTS, Layouts

B, S, E, K = 4, 250, 96, 6
T = B * S

#: Instructions that move no data: operands, results and aliases.
_NAMES = {"parameter", "custom-call", "get-tuple-element", "tuple", "bitcast"}
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?\S+ = (\(.*?\)|\S+) ([\w-]+)\(", re.MULTILINE)

OPTIONS = {
    "softmax": {"scaling_factor": 2.5},
    "raw": {"normalize": False},
    "grouped": {"score_function": "sigmoid", "num_groups": 8, "group_topk": 2},
}
options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])


def elements(hlo_type):
    """Elements of the largest array in a type."""
    shapes = re.findall(r"\w+\[([\d,]*)\]", hlo_type)
    return max((math.prod(int(n) for n in shape.split(",") if n) for shape in shapes), default=0)


def custom_calls(text):
    return sorted(re.findall(r'custom_call_target="(\w+)"', text))


def passes_over_tokens(text):
    """Instructions of all computations that write an array of at least T elements."""
    return [(op, kind) for kind, op in _INSTRUCTION.findall(text) if op not in _NAMES and elements(kind) >= T]


def operands(dtype):
    rng = np.random.default_rng(0)
    z, d_weights = rng.standard_normal((B, S, E)), rng.standard_normal((B, S, K))
    mask = rng.random((B, S)) < 0.9
    return {
        "z": jnp.asarray(z, dtype),
        "d_weights": jnp.asarray(d_weights, jnp.float32),
        "expert_bias": jnp.asarray(0.01 * rng.standard_normal(E), jnp.float32),
        "token_mask": jnp.asarray(mask),
        "num_tokens": jnp.int32(mask.sum()),
    }


def step(z, expert_bias, token_mask, num_tokens, **options):
    """The results of the router, its loss, and the plan of the selected experts."""
    routing = route(z, K, expert_bias=expert_bias, token_mask=token_mask, **options)
    loss = load_balance_loss(routing.score_sum, routing.tokens_per_expert, K, 0.01, num_tokens)
    return (routing.weights, loss), (plan(routing.experts, E, align_size=8), routing.tokens_per_expert)


def gradient(z, d_weights, *arrays, **options):
    """`step` and the gradient of the logits from the weights and the loss."""
    results, pull, others = jax.vjp(lambda z: step(z, *arrays, **options), z, has_aux=True)
    return results, others, pull((d_weights, jnp.float32(1)))[0]


def dense_gradient(z, d_probs):
    """TransformerEngine's function and its gradient."""
    (probs, routing_map), pull = jax.vjp(lambda z: fused_topk_with_score_function(z, K), z)
    return probs, routing_map, pull((d_probs, np.zeros(routing_map.shape, jax.dtypes.float0)))[0]


def compiled(function, *arrays, **options):
    return jax.jit(functools.partial(function, **options)).lower(*arrays).compile().as_text()


@pytest.mark.usefixtures("platform")
@dtypes
class TestHlo:
    @options
    def test_a_step_is_two_calls(self, options, dtype):
        given = operands(dtype)
        arrays = [given[name] for name in ("z", "expert_bias", "token_mask", "num_tokens")]
        text = compiled(step, *arrays, **options)
        assert custom_calls(text) == ["ab_xla_plan", "ab_xla_router_forward"]
        assert passes_over_tokens(text) == []

    @options
    def test_its_gradient_is_one_more(self, options, dtype):
        given = operands(dtype)
        arrays = [given[name] for name in ("z", "d_weights", "expert_bias", "token_mask", "num_tokens")]
        text = compiled(gradient, *arrays, **options)
        assert custom_calls(text) == ["ab_xla_plan", "ab_xla_router_backward", "ab_xla_router_forward"]
        assert passes_over_tokens(text) == []

    def test_the_dense_form_is_one_each_way(self, dtype):
        given = operands(dtype)
        text = compiled(dense_gradient, given["z"], given["z"])
        assert custom_calls(text) == ["ab_xla_router_backward", "ab_xla_router_forward"]
        assert passes_over_tokens(text) == []

    def test_the_check_finds_passes_over_tokens(self, dtype):
        """A program that converts or transposes its logits has such passes."""
        z = operands(dtype)["z"]
        other = "float32" if dtype == "bfloat16" else "bfloat16"
        assert passes_over_tokens(compiled(lambda z: route(z.astype(other), K), z))
        assert passes_over_tokens(compiled(lambda z: route(z.reshape(T, E).T.reshape(T, E), K), z))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_only_programs_for_a_gpu_have_workspaces(platform):
    """Workspaces are as large as activations, and the CPU handlers do not use them."""

    def ffn(rows, w_in, w_out, group_sizes):
        return jax.grad(lambda *a: expert_ffn(*a, group_sizes).sum(), (0, 1, 2))(rows, w_in, w_out)

    shapes = [((T, 8), jnp.bfloat16), ((4, 8, 2, 16), jnp.bfloat16), ((4, 16, 8), jnp.bfloat16), ((4,), jnp.int32)]
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in anabranch_custom_calls()]
    exported = jax.export.export(jax.jit(ffn), platforms=[platform], disabled_checks=checks)
    text = exported(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).mlir_module()
    assert text.count("@ab_xla_expert_ffn") == 2
    assert text.count(',workspace"') == (2 if platform == "cuda" else 0)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_layer_stores_no_rows_of_its_width(platform):
    """Rows [R, D] are summed by token as they are computed, forward and backward; h's buffer is reused, not copied."""
    D, F = 56, 24

    def loss(*operands):
        return jnp.sum(jnp.square(moe(*operands, topk=K, weight_early=True).output.astype(jnp.float32)))

    shapes = [(T, D), (D, E), (E, D, 2, F), (E, F, D)]
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in anabranch_custom_calls()]
    gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))
    exported = jax.export.export(gradients, platforms=[platform], disabled_checks=checks)
    text = exported(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)).mlir_module()
    calls = [line for line in text.splitlines() if "custom_call @ab_" in line]
    assert sum("@ab_xla_grouped_matmul_combine(" in line for line in calls) == 2
    assert not any("@ab_xla_combine(" in line or "@ab_xla_dispatch(" in line for line in calls)
    assert f"tensor<{T * K}x2x{F}xbf16>" in text and f"tensor<{T * K}x{D}x" not in text
    backward = [line for line in calls if "@ab_xla_expert_ffn_backward(" in line]
    assert ["output_operand_alias<output_tuple_indices = [0]" in line for line in backward] == [True, False]
    # The first call computes the gradient of w_out. A barrier with d_x puts that of w_in after the sums.
    assert f"tensor<{E}x{F}x{D}xbf16>" in backward[0].split("->")[1], backward[0]
    barrier = re.search(r"%(\w+):2 = stablehlo.optimization_barrier", text)
    assert f"%{barrier[1]}#1" in backward[1], backward[1]
    assert f"tensor<{E}x{D}x2x{F}xbf16>" in backward[1].split("->")[1], backward[1]
    if platform == "cpu":
        compiled = gradients.lower(*(jnp.zeros(shape, jnp.bfloat16) for shape in shapes)).compile().as_text()
        assert "conditional(" not in compiled
        assert not re.search(rf"bf16\[{T * K},2,{F}\]\S* copy\(", compiled)


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("w_in_layout", IN_LAYOUTS)
@pytest.mark.parametrize("w_out_layout", OUT_LAYOUTS)
def test_weights_in_any_layout_are_neither_copied_nor_transposed(w_in_layout, w_out_layout):
    """Outside of the calls, a step allocates no array of the size of the weights or their gradients."""
    D, F = 56, 24
    layouts = Layouts(w_in_layout, w_out_layout)

    def loss(x, gate, w_in, w_out):
        result = moe(x, gate, w_in, w_out, topk=K, w_in_layout=w_in_layout, w_out_layout=w_out_layout)
        return jnp.sum(jnp.square(result.output))

    shapes = [(B, D), (D, E), layouts.shape("w_in", e=E, d=D, p=2, f=F), layouts.shape("w_out", e=E, f=F, d=D)]
    arrays = [jnp.zeros(shape) for shape in shapes]
    text = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3))).lower(*arrays).compile().as_text()
    made = [(op, kind) for kind, op in _INSTRUCTION.findall(text) if op not in _NAMES and elements(kind) >= E * D * F]
    assert not made, made


def device_events(directory, call):
    """The names of the kernels and copies that ran on the GPU during `call`."""
    with jax.profiler.trace(directory):
        call()
    (file,) = pathlib.Path(directory).rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    lines = [line for plane in planes if plane.name.startswith("/device:GPU") for line in plane.lines]
    return [event.name for line in lines for event in line.events]


def copies_to_the_host(names):
    return [name for name in names if re.search("memcpy.*d(evice)?(2| to )h", name, re.IGNORECASE)]


def assert_no_copies(run, directory):
    """Checks with the profiler that `run()`, which returns an array, copies nothing to or from the host."""
    jax.block_until_ready(run())
    fetched = device_events(directory / "fetched", lambda: np.asarray(run()))
    if not copies_to_the_host(fetched):
        pytest.skip(f"THE PROFILER SHOWS NO COPIES HERE: no step was checked; it showed {fetched[:20]}")
    events = device_events(directory / "step", lambda: jax.block_until_ready(run()))
    assert len(events) >= 3 and not copies_to_the_host(events)


@pytest.mark.gpu
def test_a_step_copies_nothing_to_the_host(gpu, tmp_path):
    given = operands("bfloat16")
    arrays = [given[name] for name in ("z", "d_weights", "expert_bias", "token_mask", "num_tokens")]
    run = jax.jit(functools.partial(gradient, **OPTIONS["grouped"]))
    assert_no_copies(lambda: run(*arrays)[-1], tmp_path)


def training_step(dtype):
    """A jitted step of a layer's training, and its operands."""
    rng = np.random.default_rng(1)
    D, F = 64, 128
    shapes = [(T, D), (D, E), (E, D, 2, F), (E, F, D)]
    arrays = [jnp.asarray(rng.standard_normal(shape) / 8, dtype) for shape in shapes]

    @jax.jit
    def train(*arrays):
        def loss(*arrays):
            result = moe(*arrays, topk=K, aux_loss_coeff=0.01)
            return jnp.sum(jnp.square(result.output.astype(jnp.float32))) + result.aux_loss

        gradients = jax.grad(loss, argnums=(0, 1, 2, 3))(*arrays)
        return [array - 0.01 * gradient for array, gradient in zip(arrays, gradients, strict=True)]

    return train, arrays


@pytest.mark.gpu
@dtypes
def test_training_a_layer_copies_nothing_to_the_host(gpu, tmp_path, dtype):
    """Group sizes stay on the device, forward and backward."""
    train, arrays = training_step(dtype)
    assert_no_copies(lambda: train(*arrays)[2], tmp_path)


@pytest.mark.gpu
@dtypes
def test_command_buffers_contain_every_call(gpu, tmp_path, dtype):
    """XLA launches a step's calls as graphs: each of them can be captured."""
    train, arrays = training_step(dtype)
    dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    text = train.lower(*arrays).compile(compiler_options=dump).as_text()
    files = list(tmp_path.glob("*thunk_sequence_after_thunk_passes*"))
    if not files:
        pytest.skip(f"XLA DUMPED NO SEQUENCE OF THUNKS: got {sorted(file.name for file in tmp_path.iterdir())}")
    (file,) = files
    in_buffer, calls = False, []  # a command buffer's commands follow it, indented
    for line in file.read_text().splitlines():
        if not line.startswith(" "):
            in_buffer = "kCommandBuffer" in line
        if re.match(r"\s*\d+: kCustomCall\b", line):
            calls.append(in_buffer)
    assert calls == [True] * len(custom_calls(text))
