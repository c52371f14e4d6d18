"""Native kernels of torch's operations: the same bits as through ctypes, errors, threads, processes, memory."""

import concurrent.futures
import contextlib
import ctypes
import hashlib
import importlib
import json
import os
import pathlib
import resource
import subprocess
import sys

import pytest
import torch
import torch.utils.flop_counter

import anabranch.torch as ab
from anabranch.activation import as_activation
from anabranch.options import ExpertsConfig, RouterOptions
from anabranch.torch.binding import autograd, define, native
from anabranch.torch.ops import torch_ops
from anabranch.torch.ops.factors import NO_FACTORS
from anabranch.torch.ops.gradients import request

HERE = pathlib.Path(__file__)
T, D, F, E, K = 12, 16, 8, 6, 2
pytestmark = pytest.mark.skipif(native.native is None, reason=f"NO NATIVE OPERATIONS: {native.reason}")


def random(shape, generator, dtype):
    """The same numbers on the CPU and on the default device."""
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device(), dtype)


def operands(tokens=T, dtype=torch.float32, seed=0, gate_dtype=None):
    generator = torch.Generator("cpu").manual_seed(seed)
    shapes = (tokens, D), (D, E), (E, D, 2, F), (E, F, D)
    x, gate, *weights = (random(shape, generator, dtype) for shape in shapes)
    return [x, gate if gate_dtype is None else gate.to(gate_dtype), *weights]


def factors(generator, dtype, shared):
    """The tensors that a Lora views; the last factor is shared."""
    shapes = (E, 3, D), (E, 3, 2, F), (E, F, 2), (1 if shared else E, 2, D)
    return [random(shape, generator, dtype) for shape in shapes]


def as_lora(factors):
    a_in, *others = factors
    return ab.Lora(a_in.mT, *others)


def digest(tensors):
    """A hash of the bits of tensors and of their shapes and dtypes."""
    found = hashlib.sha256()
    for t in tensors:
        found.update(f"{t.dtype} {tuple(t.shape)}".encode())
        flat = t.detach().cpu().contiguous().reshape(-1)
        found.update(bytes(flat.view(torch.uint8).numpy()) if t.numel() else b"")
    return found.hexdigest()


def step(tokens=T, seed=0, dtype=torch.float32, gate_dtype=None, weights_too=False, frozen=(), lora=None, **options):
    """Results and gradients of one step. lora: None: without adapters; else the dtype of the factors."""
    given = operands(tokens, dtype, seed, gate_dtype)
    options = on_default_device(options)
    if lora is not None:
        given += factors(torch.Generator("cpu").manual_seed(seed + 2), lora, shared=True)
        options["lora_scale"] = 0.5, -2.0
    leaves = [a.requires_grad_() for i, a in enumerate(given) if i not in frozen]
    if lora is not None:
        options["lora"] = as_lora(given[4:])
    result = ab.moe(*given[:4], topk=K, **options)
    generator = torch.Generator("cpu").manual_seed(seed + 1)
    outputs = [result.output, *([result.weights] if weights_too else [])]
    outputs += [loss for loss in (result.aux_loss, result.z_loss) if loss.requires_grad]
    torch.autograd.backward(outputs, [random(o.shape, generator, o.dtype) for o in outputs])
    results = [result.output, result.aux_loss, result.tokens_per_expert, result.experts, result.weights]
    return [*results, result.dropped, result.dropped_by_source, *(leaf.grad for leaf in leaves)]


CASES = {
    "plain": {},
    "bfloat16": dict(dtype=torch.bfloat16),
    "float16": dict(dtype=torch.float16),
    "a float32 gate": dict(dtype=torch.bfloat16, gate_dtype=torch.float32),
    "losses": dict(aux_loss_coeff=0.1, z_loss_coeff=0.2),
    "sigmoid": dict(score_function="sigmoid", normalize=False, scaling_factor=2.5),
    "groups": dict(num_groups=3, group_topk=2),
    "aligned rows": dict(align_size=8),
    "a cotangent of the weights": dict(weights_too=True),
    "a mask": dict(token_mask=torch.arange(T) % 3 > 0),
    "a replay": dict(forced_experts=torch.stack([torch.arange(T) % E, torch.arange(T) % 2 - 1], 1)),
    "biases": dict(b_in=torch.full((E, 2, F), 0.1), b_out=torch.full((E, D), 0.2), expert_bias=torch.arange(E) / 9.0),
    "a bias of the gate": dict(gate_bias=torch.arange(E) / 9.0),
    "quantile balancing": dict(expert_bias=torch.arange(E) / 9.0, qb_bins=7, qb_bin_bounds=(-1.0, 1.0)),
    "early weights": dict(weight_early=True, activation="gelu"),
    "no tokens": dict(tokens=0),
    "frozen experts": dict(frozen=(2, 3)),
    "frozen router and x": dict(frozen=(0, 1)),
    "frozen x": dict(frozen=(0,)),
    "x alone": dict(frozen=(1, 2, 3)),
    "adapters": dict(lora=torch.float32),
    "adapters of frozen experts": dict(lora=torch.float32, dtype=torch.bfloat16, frozen=(1, 2, 3)),
    "adapters, a cotangent of the weights": dict(lora=torch.float32, weights_too=True, weight_early=True),
}


def module_step(weights_too=False, dtype=torch.float32, mode=contextlib.nullcontext, **options):
    """Results and gradients of one step of the module. mode: a context around the backward pass."""
    torch.manual_seed(0)  # not the same numbers on every device
    layer = ab.MoE(D, F, E, K, **options).to(dtype)
    generator = torch.Generator("cpu").manual_seed(3)
    x = random((T, D), generator, dtype).requires_grad_()
    result = layer(x)
    outputs = [result.output, *([result.weights] if weights_too else [])]
    with mode():
        torch.autograd.backward(outputs, [random(o.shape, generator, o.dtype) for o in outputs])
    return [result.output, result.aux_loss, x.grad, *(p.grad for p in layer.parameters())]


def routed_step(frozen=(), dtype=torch.float32, lora=False, **options):
    """Results and gradients of one step of `routed_experts`, with an index that is no expert."""
    x, _, w_in, w_out = operands(dtype=dtype)
    experts, generator = torch.arange(T * K).view(T, K) % (E + 1), torch.Generator("cpu").manual_seed(5)
    given = [x, random((T, K), generator, dtype), w_in, w_out]
    if lora:
        given += factors(generator, dtype, shared=False)
    leaves = [a.requires_grad_() for i, a in enumerate(given) if i not in frozen]
    if lora:
        options["lora"] = as_lora(given[4:])
    result = ab.routed_experts(x, experts, *given[1:4], **options)
    result.output.backward(random(result.output.shape, generator, dtype))
    return [*result, *(leaf.grad for leaf in leaves)]


ROUTED = {
    "plain": {},
    "bfloat16": dict(dtype=torch.bfloat16),
    "biases": dict(b_in=torch.full((E, 2, F), 0.1), b_out=torch.full((E, D), 0.2)),
    "weights alone": dict(frozen=(0, 2, 3)),
    "frozen experts": dict(frozen=(2, 3)),
    "adapters": dict(lora=True, frozen=(2, 3)),
}
MODULES = {
    "plain": {},
    "bfloat16": dict(dtype=torch.bfloat16),
    "interleaved, with biases": dict(interleaved=True, use_bias=True),
    "not gated": dict(gated=False, activation="gelu"),
    "a bias of the gate": dict(use_gate_bias=True),
    "an expert bias": dict(use_expert_bias=True, score_function="sigmoid"),
    "a cotangent of the weights": dict(weights_too=True, use_bias=True),
    "a mode in the backward pass": dict(mode=lambda: torch.utils.flop_counter.FlopCounterMode(display=False)),
    "losses": dict(aux_loss_coeff=0.1, z_loss_coeff=0.2),
}


def on_default_device(values):
    """A list, tuple or dict with its tensors moved."""
    if isinstance(values, dict):
        return dict(zip(values, on_default_device(list(values.values())), strict=True))
    return type(values)(v.to(torch.get_default_device()) if isinstance(v, torch.Tensor) else v for v in values)


def digests():
    """By name: the layer in all cases, and every operation on its samples, on the default device."""
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
    with torch.device("cpu"):
        from test_torch_calls import SAMPLES

    found = {name: digest(step(**case)) for name, case in CASES.items()}
    found |= {f"module: {name}": digest(module_step(**case)) for name, case in MODULES.items()}
    found |= {f"routed: {name}": digest(routed_step(**on_default_device(case))) for name, case in ROUTED.items()}
    found |= {f"plain, {n} tokens": digest(step(n)) for n in (1, 31, 12)}
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills memory that is allocated, such as unused rows of h
    for i, (operation, arguments) in enumerate(SAMPLES):
        try:
            results = native.call(operation, *on_default_device(arguments))
        except NotImplementedError as error:  # an FP8 sample that a GPU does not support
            found[f"{i} {operation}"] = str(error)
            continue
        found[f"{i} {operation}"] = digest(results if isinstance(results, list | tuple) else [results])
    torch.use_deterministic_algorithms(False)
    return found


def test_bits_are_those_of_calls_through_ctypes(device):
    environment = {**os.environ, "ANABRANCH_TORCH_NATIVE": "0"}
    child = subprocess.run(
        [sys.executable, str(HERE), device], env=environment, capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr[-4000:]
    want = json.loads(child.stdout.splitlines()[-1])
    assert want.pop("reason") == "ANABRANCH_TORCH_NATIVE=0"
    before = native.native.counts()[1]
    got = digests()
    assert native.native.counts()[1] - before > len(got)
    assert {name for name in want if want[name] != got[name]} == set() and want.keys() == got.keys()


def test_the_whole_layer_is_one_operation_in_each_pass(device):
    with torch.profiler.profile() as profile:
        step()
    names = [event.name for event in profile.events() if event.name.startswith("anabranch::layer")]
    assert names == ["anabranch::layer_forward", "anabranch::layer_backward"]


def test_calls_are_prepared_once_for_all_numbers_of_tokens():
    define.forget_prepared()
    step(3)
    before = native.native.counts()[0]
    for tokens in (7, 0, 100, 3):
        step(tokens)
    assert native.native.counts()[0] == before


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_errors_are_those_of_calls_through_ctypes(mode):
    experts, ids = torch.zeros(4, 1, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)
    with mode():
        with pytest.raises(ValueError, match=r"^num_experts: got 4294967296, expected an integer that int32 holds$"):
            native.call(torch_ops.plan, experts, 2**32, 4, 0, 1)  # raised by Python while calls are prepared
        with pytest.raises(ValueError, match=r"^slot_of_row: got 5 rows, expected a multiple of align_size 2$"):
            native.call(torch_ops.plan, ids, 2, 5, 2, 1)  # the status of a C function


def layer_config():
    layer_config = importlib.import_module("anabranch.torch.layer.operands").layer_config
    return layer_config(RouterOptions(K), ExpertsConfig(as_activation("silu", 2), topk=K), E, 0)


def test_shapes_of_the_layer():
    """Native code reads no memory past the end of a tensor, also if its operations are called directly."""
    x, gate, w_in, w_out = operands()
    number, none = layer_config().number, (None,) * 4
    options = (*none, *NO_FACTORS)
    w_in = w_in.permute(0, 2, 3, 1).reshape(E, 2 * F, D).contiguous()  # a parameter
    for wrong_w_in, b_in, message in (
        (w_in[:, 1:], None, "w_in: got 15 rows, expected a multiple of 8, the last axis of w_out"),
        (w_in, torch.ones(E, F), "b_in: got another shape than the first two axes of w_in"),
        (w_in, torch.ones(E), "b_in: got a tensor of rank 1, expected 2"),
    ):
        with pytest.raises(ValueError, match=message):
            arguments = (x, gate.T, None, None, *none, wrong_w_in, b_in, w_out.mT, None, *options, number)
            native.call(torch.ops.anabranch.layer_forward, *arguments)
    given = (x, gate, None, None, *none, operands()[2], None, w_out, None, *options, number)
    _, _, _, weights, experts, _, lse, _, h, _, _, maps, logits, *_ = native.call(
        torch.ops.anabranch.layer_forward, *given
    )
    with pytest.raises(ValueError, match=r"maps: got \[133\], expected \[134\]"):
        saved = (x, None, None, x, gate, x, operands()[2], w_out, None, None, None, weights, experts, lse, h, logits)
        options = (None, *options, x.dtype, x.dtype, request({"x": True}), True, True, number)
        native.call(torch.ops.anabranch.layer_backward, *saved, maps[1:], *options)


def test_ranks_of_the_layer():
    x, gate, w_in, w_out = operands()
    config = layer_config()
    for name, at in (("x", 0), ("gate", 1), ("w_out", 10)):
        arguments = [x, gate, *[None] * 6, w_in, None, w_out, *[None] * 5, *NO_FACTORS, config.number]
        arguments[at] = arguments[at][0]
        rank = arguments[at].dim()
        with pytest.raises(ValueError, match=f"^{name}: got a tensor of rank {rank}, expected {rank + 1}$"):
            native.call(torch.ops.anabranch.layer_forward, *arguments)


def test_parameters_of_a_module_are_no_operands():
    """A module's call is checked for parameters; the same tensors are no arguments of `moe`."""
    layer = ab.MoE(D, F, E, K)
    x = operands()[0]
    layer(x)
    options = vars(layer.options)
    layouts = {name: options[name] for name in ("w_in_layout", "w_out_layout")}
    with pytest.raises(ValueError, match="w_in: got"):
        ab.moe(x, layer.gate.weight, layer.gate_up_proj, layer.down_proj, topk=K, **layouts)


class _Plan(autograd.Function):
    @staticmethod
    def forward(experts):
        return torch_ops.plan(experts, E, 5, 2, 1)[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, _):
        return None


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_errors_of_autograd_functions_inside_torch_func(mode):
    with mode(), pytest.raises(ValueError, match=r"^slot_of_row: got 5 rows, expected a multiple of align_size 2$"):
        torch.vmap(_Plan.call)(torch.zeros(2, T, K, dtype=torch.int32))


def test_calls_are_prepared_once_for_sizes_given_as_integers():
    define.forget_prepared()
    experts, before = torch.zeros(T, K, dtype=torch.int32), native.native.counts()[0]
    for rows in (T * K, 0, 100):
        assert torch_ops.plan(experts, E, rows, 1, 1)[4].shape == (rows,)
    assert native.native.counts()[0] == before + 1


def test_tensors_that_are_not_contiguous_or_not_aligned(device):
    x, gate, w_in, w_out = operands()
    want = ab.moe(x, gate, w_in, w_out, topk=K).output
    shifted = torch.empty(T * D + 1)[1:].view(T, D).copy_(x)
    for other in (x.T.contiguous().T, shifted, torch.stack([x, x], 1)[:, 0]):
        for w in (w_in, w_in.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)):
            for g in (gate, gate.T.contiguous().T, torch.stack([gate, gate], 2)[..., 0]):
                torch.testing.assert_close(ab.moe(other, g, w, w_out, topk=K).output, want, rtol=1e-4, atol=1e-4)


def test_threads_get_the_same_bits(device):
    def run(n):
        with torch.device(device):
            return digest(step(n, seed=n))

    want = {n: run(n) for n in (1, 5, 9, 12)}
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        jobs = [(n, threads.submit(run, n)) for _ in range(20) for n in want]
        assert all(job.result() == want[n] for n, job in jobs)


def test_a_forked_process_computes():
    """In a process of its own: torch refuses autograd after a fork if its threads have run before."""
    child = subprocess.run([sys.executable, str(HERE), "fork"], capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr[-2000:]


def compute_after_fork():
    """Computes before a fork and after it. Returns 0 if the bits are the same."""
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    want = digest(step())
    child = os.fork()
    if child == 0:
        same = False
        try:
            same = digest(step()) == want
        finally:
            os._exit(0 if same else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_memory_is_flat_over_steps_with_changing_numbers_of_tokens(device):
    def steps(number):
        for i in range(number):
            step(i % 97)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    steps(200)
    before = len(native.native._held)
    first = steps(200)
    assert steps(400) - first < 2000  # KiB
    assert len(native.native._held) == before


def test_old_calls_are_removed():
    """The cache has 4,096 keys. Python's memory of a removed entry is released."""
    probs, counts, number = torch.rand(3, 4), torch.ones(4, dtype=torch.int64), torch.tensor(3)
    for i in range(4096 + 30):
        torch_ops.moe_aux_loss(probs, counts, number, 1, 4, 1.0 + i)
    assert len(native.native._held) <= 4096 + 8
    define.forget_prepared()
    assert len(native.native._held) == 0


@pytest.mark.skipif(
    native.native is not None and not native.native.takes_lists, reason="torch 2.9 cannot pass lists, but is tested"
)
@pytest.mark.parametrize("fault", [None, "results", "arguments"])
def test_a_release_of_torch_that_was_never_tested_is_probed(fault):
    """In a process of its own, because an operation can be defined once."""
    program = f"""
import struct
import anabranch._versions as versions
fault = {fault!r}
if fault is None:
    versions.TESTED = versions.TESTED | dict(torch=())
from anabranch.torch.binding import calls, native, probe
unpack, found = struct.unpack_from, native.reason
if fault == "results":
    probe.plan = lambda tensors, **options: calls.plan(tensors, **options | dict(num_experts=1))
if fault == "arguments":
    struct.unpack_from = lambda code, *rest: tuple(-v for v in unpack(code, *rest)) if code == "<1d" else unpack(code, *rest)
print((probe.probe(native.native) if fault else native.reason) or "native")
"""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr[-2000:]
    assert {None: "native", "results": "group_sizes: got", "arguments": "got arguments"}[fault] in child.stdout


def test_a_derivative_past_the_autograd_function_raises():
    """As for every operation: a gradient is never silently missing."""
    x, gate, w_in, w_out = operands()
    config = layer_config()
    none = (None,) * 4
    options = (*none, *NO_FACTORS, config.number)
    arguments = (x.requires_grad_(), gate, None, None, *none, w_in, None, w_out, None, *options)
    output = torch.ops.anabranch.layer_forward(*arguments)[0]
    with pytest.raises(RuntimeError, match=r"layer_forward\.default: got a request for its derivative"):
        output.sum().backward()


def test_structs_have_the_sizes_of_the_library():
    library = native.native.library
    sizes = (ctypes.c_int64 * 7)()
    library.ab_torch_struct_sizes(sizes)
    structs = ("Description", "Node", "Condition", "Result", "Place", "Cell", "Call")
    assert list(sizes) == [ctypes.sizeof(getattr(native, f"_{name}")) for name in structs]


if __name__ == "__main__":
    if sys.argv[1] == "fork":
        sys.exit(compute_after_fork())
    torch.set_default_device(sys.argv[1])
    print(json.dumps(digests() | {"reason": native.reason}))
