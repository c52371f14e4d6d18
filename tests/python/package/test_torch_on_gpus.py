"""CUDA graphs, streams, several devices in one process, and calls that do not wait for the device."""

import concurrent.futures
import copy
import inspect

import numpy as np
import pytest
import torch
from test_torch_bad_input import CALLS, EXPERTS, K

import anabranch.torch as ab
from anabranch.torch import MoE, moe, plan

pytestmark = pytest.mark.gpu

T, D, F, E = 96, 64, 48, 8


@pytest.fixture(autouse=True)
def on_gpu():
    if not torch.cuda.is_available():
        pytest.skip("NO GPU FOUND: graphs, streams and devices are not tested")
    with torch.device("cuda"):
        yield


def normal(*shape, seed=0, scale=1.0):
    values = scale * np.random.default_rng(seed).standard_normal(shape)
    return torch.tensor(values, dtype=torch.float32).to(torch.bfloat16)


class Step:
    """A forward and a backward pass with its own buffers, of moe, or of MoE with a bias and its counts."""

    def __init__(self, of, wrap=lambda function: function):
        self.x, self.d_out = normal(T, D, seed=1).requires_grad_(), normal(T, D, seed=5)
        if of == "MoE":
            torch.manual_seed(0)
            self.layer = MoE(D, F, E, K, score_function="sigmoid", use_expert_bias=True, dtype=torch.bfloat16)
            self.leaves = [self.x, *self.layer.parameters()]
            self.function = wrap(lambda x: self.layer(x).output)
            return
        w_in, w_out = normal(E, D, 2, F, seed=3, scale=D**-0.5), normal(E, F, D, seed=4, scale=F**-0.5)
        self.leaves = [self.x, *(w.requires_grad_() for w in (normal(D, E, seed=2), w_in, w_out))]
        self.function = wrap(lambda x: moe(x, *self.leaves[1:], topk=K).output)

    def __call__(self):
        output = self.function(self.x)
        return output, *torch.autograd.grad(output, self.leaves, self.d_out)

    def new_tokens(self, seed):
        with torch.no_grad():
            self.x.copy_(normal(T, D, seed=seed))


def assert_same_bits(got, want):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), i


@pytest.mark.parametrize("of", ["moe", "MoE"])
def test_a_captured_graph_has_the_bits_of_eager_calls(of):
    step, eager = Step(of), Step(of)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # autograd has to run once on the stream of the capture
        for _ in range(2):
            step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = step()
    for seed in (11, 12):
        for one in (step, eager):
            one.new_tokens(seed)
        graph.replay()
        assert_same_bits(captured, eager())
    if of == "MoE":  # two warm-up calls and two replays of the graph; two eager calls
        assert step.layer.tokens_per_expert.sum() == 2 * eager.layer.tokens_per_expert.sum() == 4 * T * K


@pytest.mark.parametrize("of", ["moe", "MoE"])
def test_reduce_overhead_has_the_bits_of_the_program_without_graphs(of):
    torch._dynamo.reset()
    plain = Step(of, lambda function: torch.compile(function, fullgraph=True))
    graphs = Step(of, lambda function: torch.compile(function, fullgraph=True, mode="reduce-overhead"))
    eager = Step(of)
    for seed in range(11, 16):  # recorded in the second call, replayed from the third on
        for one in (plain, graphs, eager):
            one.new_tokens(seed)
        torch.compiler.cudagraph_mark_step_begin()
        got = [a.clone() for a in graphs()]
        assert_same_bits(got, plain())
        torch.testing.assert_close(got, list(eager()), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("of", ["moe", "MoE"])
def test_calls_are_on_the_current_stream(of):
    """Calls on a busy side stream read the tokens that earlier work on it writes."""
    step, eager = Step(of), Step(of)
    eager.new_tokens(11)
    want, late = eager(), normal(T, D, seed=11)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        with torch.no_grad():
            step.x.copy_(late)
        got = step()
    side.synchronize()
    assert_same_bits(got, want)


def on_cuda(value):
    """A value of CALLS on the GPU; floating tensors are leaves."""
    if isinstance(value, np.ndarray):
        tensor = torch.from_numpy(value.copy()).to("cuda")
        return tensor.requires_grad_() if tensor.is_floating_point() else tensor
    if isinstance(value, ab.Lora):
        return ab.Lora(*map(on_cuda, value))
    if isinstance(value, (ab.Mxfp4, ab.Fp8Blocks, ab.Replay)):  # their floats are constants
        return type(value)(*(part if part is None else torch.from_numpy(part).to("cuda") for part in value))
    if type(value) is tuple:
        return tuple(map(on_cuda, value))
    if isinstance(value, torch.nn.Module):
        return copy.deepcopy(value).to_empty(device="cuda")
    return plan(torch.from_numpy(EXPERTS).to("cuda"), E) if isinstance(value, ab.Plan) else value


@pytest.mark.parametrize("function", CALLS, ids=lambda f: f.__name__)
def test_nothing_waits_for_the_device(function):
    def arguments():
        return {name: on_cuda(value) for name, value in CALLS[function].items()}

    given = arguments()
    parts = [part for value in given.values() for part in (value if isinstance(value, tuple) else (value,))]
    leaves = [part for part in parts if isinstance(part, torch.Tensor) and part.requires_grad]

    def tensors_of(result):
        parts = result if isinstance(result, tuple) else (result,)
        return [part for part in parts if isinstance(part, torch.Tensor) and part.requires_grad]

    cotangents = [torch.ones_like(part) for part in tensors_of(function(**arguments()))]
    for mode in ("default", "error"):  # the first call lays out calls, loads kernels and allocates memory
        if any(isinstance(value, torch.nn.Module) for value in given.values()):
            given = arguments()  # a call may change a module
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            outputs = tensors_of(function(**given))
            if outputs:
                torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_module_waits_for_nothing():
    layer = MoE(D, F, E, K, score_function="sigmoid", use_expert_bias=True, balance="quantile", qb_bins=64)
    layer.to("cuda")
    x, d_out = torch.randn(T, D, requires_grad=True), torch.randn(T, D)
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            layer(x).output.backward(d_out)
            layer.update_expert_bias(1e-3)
            layer.update_quantile_bias()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_every_public_function_is_called():
    assert set(CALLS) == {f for name in ab.__all__ if inspect.isfunction(f := getattr(ab, name))}


def on_device(index, current):
    """A step on a device and one of its streams, while another device may be current."""
    with torch.device(f"cuda:{index}"), torch.cuda.device(index), torch.cuda.stream(torch.cuda.Stream(index)):
        step = Step("moe")
        with torch.cuda.device(current):
            results = step()
        assert {a.device.index for a in results} == {index}
        return [a.cpu() for a in results]


def test_several_devices_of_one_process():
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("ONE GPU FOUND: several GPUs in one process are not tested")
    want = on_device(0, 0)
    for index in range(1, count):
        assert_same_bits(on_device(index, index), want)
        assert_same_bits(on_device(index, 0), want)  # the device of the tensors, not the current one
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        for got in pool.map(on_device, range(count), range(count)):
            assert_same_bits(got, want)


def test_threads_with_streams_of_their_own():
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = list(pool.map(on_device, [0] * 6, [0] * 6))
    for got in results[1:]:
        assert_same_bits(got, results[0])
