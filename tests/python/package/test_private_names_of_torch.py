"""Private names of torch: every one is in binding/private.py, exists in the installed torch, and has a fallback.

A fallback is tested with a copy of the file for which torch lacks a name.
"""

import ast
import importlib.util
import multiprocessing
import operator
import pathlib
import re
import sys
import traceback
import types
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import anabranch.torch as ab
from anabranch import info
from anabranch.activation import Activation
from anabranch.precision import HIGHEST
from anabranch.torch.binding import check, derivatives, eager, private
from anabranch.torch.layer import submodules
from anabranch.torch.ops import torch_ops
from anabranch.torch.parallel.transports import TRANSPORTS
from anabranch.torch.transformers.recognition import recognise_plain

ROOT = pathlib.Path(ab.__file__).parent
T, D, F, E, K = 6, 4, 3, 4, 2


# ---------------------------------------------------------------- the names


def test_the_installed_torch_has_every_name():
    missing = private.missing()
    assert not missing, f"torch {torch.__version__} lacks {', '.join(missing)}: read their fallbacks in private.py"


def _own_names():
    """Names with a leading underscore that the package defines, and those of the standard library that it uses."""
    own = {"_fields", "_replace", "_asdict", "_handle", "_name", "_fields_", "_getframe"}
    for file in ROOT.parent.rglob("*.py"):
        if file.name == "private.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    own.add(node.attr)
            elif isinstance(node, ast.ImportFrom) and node.module.startswith("anabranch"):
                own |= {alias.asname or alias.name for alias in node.names}
    return own


def _root(node):
    while isinstance(node, ast.Attribute):
        node = node.value
    return getattr(node, "id", None)


def _private_uses(text, own, listed):
    """(line, name) of private names, of modules below torch.fx.experimental, and of listed names in strings."""
    for node in ast.walk(ast.parse(text)):
        names, of_torch = [], True
        if isinstance(node, ast.Attribute):
            names, of_torch = [node.attr], _root(node) in ("torch", "nn", "dist", "forward_ad")
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom) and not node.module.startswith("anabranch"):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Constant) and node.value in listed:
            yield node.lineno, node.value
        for name in names:
            if name == "experimental" or (re.match("_[^_]", name) and (of_torch or name not in own)):
                yield node.lineno, name


def test_no_other_file_uses_a_private_name():
    own = _own_names()
    paths = [*private._NAMES, *private._CUDA_NAMES, *private._DISTRIBUTED_NAMES]
    overridden = {"_apply", "_load_from_state_dict"}  # methods of torch.nn.Module that MoE overrides
    listed = {re.split("[.:]", path)[-1] for path in paths} | {
        *private._DDP_MARKS,
        private._FSDP_MARK,
        private._CONSTANT_MARK,
    }
    assert own & listed <= overridden
    uses = {
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in ROOT.rglob("*.py")
        if file.name != "private.py"
        for line, name in _private_uses(file.read_text(), own, {name for name in listed if name[0] == "_"})
    }
    assert not uses
    text = "from torch._ops import x\nimport torch.fx.experimental\ntensor._base\ntorch.x._fields\ngetattr(x, '_ddp_ignored')"
    assert [line for line, _ in _private_uses(text, own, listed)] == [1, 2, 3, 4, 5]


def test_info_names_what_is_missing(monkeypatch):
    assert "torch lacks" not in info._torch()
    monkeypatch.setattr(private, "missing", lambda: ["torch._C._name", "torch._C._other"])
    assert info._torch()["torch lacks"].startswith("torch._C._name, torch._C._other; ")


# ---------------------------------------------------------------- fallbacks


def load_without(*names):
    """A copy of private.py for which torch lacks names."""
    find = operator.attrgetter
    hidden = {name.replace("torch.nn:Module().", "Module:") for name in names}

    def attrgetter(path):
        def get(owner):
            owner_name = owner.__name__ if isinstance(owner, types.ModuleType) else type(owner).__name__
            if f"{owner_name}:{path}" in hidden:
                raise AttributeError(path)
            return find(path)(owner)

        return get

    specification = importlib.util.spec_from_file_location("private_without", private.__file__)
    copy = importlib.util.module_from_spec(specification)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator, "attrgetter", attrgetter)
        specification.loader.exec_module(copy)
        assert copy.missing() == [name.replace(":", ".") for name in names]
    return copy


def replace_private(patch, copy):
    """Makes the package use a copy of private.py."""
    for name, value in vars(copy).items():
        if not name.startswith("__"):
            patch.setattr(private, name, value, raising=False)
    parts = {name: vars(derivatives._RejectDerivative)[name] for name in ("forward", "setup_context", "backward")}
    base = copy.SingleLevelFunction
    patch.setattr(
        derivatives, "_RejectDerivative", types.new_class("_Rejects", (base,), exec_body=lambda n: n.update(parts))
    )


@pytest.fixture
def without(monkeypatch):
    """Call it with names to use their fallbacks."""

    def use(*names):
        copy = load_without(*names)
        replace_private(monkeypatch, copy)
        return copy

    yield use
    torch._dynamo.reset()


def operands():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((T, D), (D, E), (E, D, 2, F), (E, F, D))]


def layer(*tensors):
    return ab.moe(*tensors, topk=K).output


def loss(*tensors):
    return (layer(*tensors) * torch.linspace(-1, 1, T * D).view(T, D)).sum()


def grads(function=loss):
    leaves = [t.requires_grad_() for t in operands()]
    value = function(*leaves)
    value.backward()
    return [value.detach(), *(leaf.grad for leaf in leaves)]


def equal(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def jvp(x, *weights):
    return torch.func.jvp(lambda x: loss(x, *weights), (x,), (x,))


def dual(x, *weights):
    with forward_ad.dual_level():
        return loss(forward_ad.make_dual(x, x), *weights)


def check_everything(want, nested="double backward is unsupported"):
    """Results, gradients and errors in eager mode, under torch.func, and in forward mode."""
    assert equal(grads(), want)
    x, *weights = operands()
    with torch.inference_mode():
        assert torch.equal(loss(x, *weights), want[0])
        with pytest.raises(ValueError, match=r"^topk: got 9"):
            ab.moe(x, *weights, topk=9)
    torch.testing.assert_close(torch.func.grad(loss, argnums=(0, 1, 2, 3))(x, *weights), tuple(want[1:]))
    in_batch = torch.vmap(torch.func.grad_and_value(lambda x: loss(x, *weights)))(torch.stack([x, 2 * x]))
    torch.testing.assert_close([part[0] for part in in_batch], [want[1], want[0]])
    leaf = x.clone().requires_grad_()
    (d_x,) = torch.autograd.grad(loss(leaf, *weights), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is unsupported"):
        d_x.sum().backward()
    with pytest.raises(RuntimeError, match=nested):
        torch.func.grad(lambda x: torch.func.grad(loss)(x, *weights).square().sum())(x)
    for function in (jvp, dual):
        with pytest.raises(NotImplementedError, match="forward mode is unsupported"):
            function(x, *weights)
    check_operation()


def multiply(rows):
    sizes = torch.tensor([rows.shape[0]], dtype=torch.int32)
    return torch_ops.grouped_matmul(rows, torch.ones(1, 2, 1), sizes, False, HIGHEST, 0)


def check_operation():
    """An operation that no autograd function calls rejects derivatives."""
    rows = torch.ones(3, 2)
    result = multiply(rows.clone().requires_grad_())
    assert torch.equal(result.detach(), torch.full((3, 1), 2.0))
    with pytest.raises(RuntimeError, match="got a request for its derivative"):
        result.sum().backward()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="got a tangent, expected none"):
        multiply(forward_ad.make_dual(rows, rows))


def check_compiled(want):
    torch._dynamo.reset()
    torch.testing.assert_close(grads(torch.compile(loss, backend="aot_eager", fullgraph=True)), want)
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def want():
    return grads()


def is_plain():
    return eager.is_plain_eager(torch.device("cpu"), [])


STATE = (
    "torch._C:_are_functorch_transforms_active",
    "torch.autograd.forward_ad:_current_level",
    "torch._C:_len_torch_dispatch_stack",
    "torch.utils._device:DeviceContext",
    "torch._C:_get_function_stack_at",
    "torch._C:_len_torch_function_stack",
)


@pytest.mark.parametrize("name", STATE)
def test_a_call_whose_state_is_unknown_is_no_plain_one(without, want, name):
    with torch.device("cpu"):
        assert is_plain()
        copy = without(name)
        assert not is_plain()
        assert equal(grads(), want)
    assert is_plain() == (name in STATE[3:5])  # these matter only where there is a mode
    check_everything(want)
    assert copy.functorch_is_active() == (name == STATE[0])
    if name in (STATE[0], STATE[2]):
        assert check.host_values(torch.ones(2)) is None


@pytest.mark.parametrize(
    "names",
    [
        ["torch._functorch.utils:unwrap_dead_wrappers"],
        ["torch._C:_AutoDispatchBelowAutograd"],
        ["torch._C:_after_autograd_keyset"],
        ["torch._C:DispatchKey", "torch._C:DispatchKeySet"],
    ],
)
def test_without_shortcuts_of_autograd(without, want, names):
    copy = without(*names)
    assert (copy.apply_below is None) == ("unwrap" in names[0])
    assert (copy.plain_keys == ()) == ("Dispatch" in names[0])
    assert copy.after_autograd_keys == private.after_autograd_keys
    check_everything(want)


def test_without_a_way_below_autograd_the_import_fails(monkeypatch):
    monkeypatch.delattr(torch._C, "_dispatch_keyset_full_after")
    with pytest.raises(ImportError, match=r"without torch\._C\._after_autograd_keyset, expected a release"):
        load_without("torch._C:_after_autograd_keyset")


@pytest.mark.parametrize("name", private._SINGLE_LEVEL)
def test_without_functions_of_one_level_operations_refuse_gradients_inside_torch_func(without, want, name):
    copy = without(name)
    assert (copy.apply_below is None) == (name == private._SINGLE_LEVEL[0])
    check_everything(want, nested="which a gradient of an operation inside torch.func needs")
    with pytest.raises(
        NotImplementedError, match=r"without .*_SingleLevelFunction.*, which a gradient of an operation"
    ):
        torch.func.grad(lambda rows: multiply(rows).sum())(torch.ones(3, 2))


def test_compiled_programs_without_names_that_they_contain(without, want):
    without("torch._C:_are_functorch_transforms_active", "torch:ops.aten._unsafe_view")
    x, *weights = operands()
    assert ab.moe(x.view(2, 3, D), *weights, topk=K).output.shape == (2, 3, D)
    check_compiled(want)


def test_sizes_without_guard_or_false(monkeypatch):
    assert private.guard_or_false(True) and not private.guard_or_false(False)
    monkeypatch.delattr("torch.fx.experimental.symbolic_shapes.guard_or_false")
    assert private.missing() == ["torch.fx.experimental.symbolic_shapes.guard_or_false"]
    assert private.guard_or_false(True) and not private.guard_or_false(False)
    with pytest.raises(ValueError, match="more than one element"):  # as a size that depends on data, which has no bool
        private.guard_or_false(np.ones(2))


# ---------------------------------------------------------------- devices and tensors


def test_streams_by_public_functions(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: types.SimpleNamespace(cuda_stream=index + 4))
    copy = load_without(*private._CUDA_NAMES)
    assert copy.current_device() == 3 and copy.current_stream(1) == 5


def test_clipping_without_functions_of_many_tensors(without):
    def clipped():
        layer = ab.MoE(D, F, num_experts=E, topk=K)
        for i, parameter in enumerate(layer.parameters()):
            parameter.grad = torch.full_like(parameter, i + 1.0)
        return [ab.clip_grad_norm_(layer, 0.5), *(parameter.grad for parameter in layer.parameters())]

    want = clipped()
    without("torch:_foreach_norm", "torch:_foreach_mul_")
    torch.testing.assert_close(clipped(), want)


def test_writes_in_place_are_noticed_outside_torch_func(without):
    without("torch._C._functorch:is_functorch_wrapped_tensor")
    w = torch.ones(2, 3)
    before = private.version(w[0])
    assert before is not None and torch.vmap(lambda row: row * (private.version(row) is None))(w).sum() == 6
    w.add_(1)
    assert private.version(w)[0] == before[0] and private.version(w) != before


@pytest.mark.parametrize("name", ["_base", "_is_view", "_version"])
def test_writes_in_place_that_torch_does_not_count(without, name):
    without(f"torch:Tensor.{name}")
    assert private.version(torch.ones(2)) is None


def test_counts_of_a_checkpointed_layer(without, monkeypatch):
    def counts():
        layer = ab.MoE(D, F, num_experts=E, topk=K, use_expert_bias=True)
        x = torch.ones(T, D, requires_grad=True)
        checkpoint(lambda x: layer(x).output, x, use_reentrant=False).sum().backward()
        return layer.tokens_per_expert

    assert counts().sum() == T * K
    without("torch._C:_current_graph_task_id")
    assert counts().sum() == T * K
    monkeypatch.delattr(torch._C, "_current_autograd_node")
    with pytest.raises(NotImplementedError, match="_current_graph_task_id, which counting tokens per expert needs"):
        counts()


def test_recognition_of_activations(without):
    copy = without("torch.utils._python_dispatch:_disable_current_modes")
    assert recognise_plain(nn.functional.silu).activation == Activation.glu("silu")
    with (
        FakeTensorMode(),
        pytest.raises(NotImplementedError, match="which evaluating an activation under a mode needs"),
    ):
        recognise_plain(nn.functional.silu)
    copy = load_without("torch.utils._python_dispatch:TorchDispatchMode")
    with pytest.raises(NotImplementedError, match="TorchDispatchMode, which recognising an activation needs"):
        copy.TorchDispatchMode()


# ---------------------------------------------------------------- modules


@pytest.mark.parametrize("name", [name for name in private._NAMES if name.endswith("_hooks")])
def test_a_gate_whose_hooks_are_unknown_is_called_as_a_module(without, name):
    layer = ab.MoE(D, F, num_experts=E, topk=K)
    x = torch.linspace(-1, 1, T * D).view(T, D)
    want = layer(x).output
    assert submodules.is_plain(layer.gate)
    without(name)
    assert not submodules.is_plain(layer.gate)
    assert torch.equal(layer(x).output, want)


def test_overridden_methods_are_called_by_torch():
    """If torch calls others, the expert bias is rounded and older state dicts do not load."""
    layer = ab.MoE(D, F, num_experts=E, topk=K, use_expert_bias=True, shared_features=F)
    state = {name.replace("down_proj", "down_proj.weight") if "shared" in name else name: value
             for name, value in layer.state_dict().items()}  # fmt: skip
    layer.load_state_dict(state)
    assert layer.bfloat16().expert_bias.dtype == torch.float32


def test_without_fsdps_mark_every_layer_may_be_managed(monkeypatch):
    fsdp = types.SimpleNamespace(FSDPModule=type("FSDPModule", (), {}))
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", fsdp)
    monkeypatch.setattr(private, "_HAS_FSDP_MARK", False)
    assert private.missing() == ["torch.distributed.fsdp.fully_shard, _is_fsdp_managed_module"]
    assert not private.is_fsdp_managed(nn.Linear(1, 1))
    used = type("FSDPLinear", (fsdp.FSDPModule,), {})
    assert private.is_fsdp_managed(nn.Linear(1, 1)) and used
    monkeypatch.delitem(sys.modules, "torch.distributed.fsdp")
    assert not private.is_fsdp_managed(nn.Linear(1, 1))


@pytest.mark.parametrize("has_mark", [True, False])
def test_without_the_mark_of_constants_a_function_is_still_one(monkeypatch, has_mark):
    monkeypatch.setattr(private, "_HAS_CONSTANT_MARK", has_mark)
    assert private.missing() == ([] if has_mark else ["torch.compiler.assume_constant_result, _dynamo_marked_constant"])
    evaluated = []

    @private.constant_when_compiled
    def length(name):
        evaluated.append(name)
        return len(open(name).name)  # nothing that torch can trace

    torch._dynamo.reset()
    function = torch.compile(lambda x: x * length(__file__), fullgraph=True, backend="aot_eager")
    assert [function(torch.ones(1)).item() for _ in range(2)] == [len(__file__)] * 2 and evaluated == [__file__]


# ---------------------------------------------------------------- process groups


GROUP_NAMES = tuple(private._DISTRIBUTED_NAMES)
ACTIVE_DDP = "torch.nn.parallel:DistributedDataParallel._active_ddp_module"


def step(group, transport):
    """Output and gradients of one step of a rank."""
    x, gate, w_in, w_out = operands()
    rank, half = dist.get_rank(), E // 2
    leaves = [t.requires_grad_() for t in (x * (1 + rank), gate, *(w[rank * half :][:half] for w in (w_in, w_out)))]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    output = ab.moe(*leaves, topk=K, group=group, transport=transport).output
    output.sin().sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def wrapped(group, ignore):
    """The output of a layer inside DistributedDataParallel."""
    layer = ab.MoE(D, F, num_experts=E, topk=K, group=group)
    model = nn.parallel.DistributedDataParallel(ab.ddp_ignore_experts(layer) if ignore else layer)
    return model(torch.ones(T, D)).output


def check_group():
    group, transports = dist.group.WORLD, set(TRANSPORTS) - {"p2p"}  # "p2p" needs GPUs
    want = {transport: step(group, transport) for transport in transports}
    for name in GROUP_NAMES:
        with pytest.MonkeyPatch.context() as patch:
            copy = load_without(name)
            replace_private(patch, copy)
            assert (copy.collectives is torch.ops._c10d_functional) == ("_c10d_functional" not in name)
            for transport in transports:
                assert equal(step(group, transport), want[transport]), name
            if "pg_map" in name:
                with pytest.raises(ValueError, match="topk: got 1 on rank 0 and 2 on rank 1"):
                    ab.moe(
                        *operands()[:2],
                        *(w[:2] for w in operands()[2:]),
                        topk=1 + dist.get_rank(),
                        group=group,
                        transport="ring",
                    )
    with pytest.MonkeyPatch.context() as patch:
        replace_private(patch, load_without(ACTIVE_DDP))
        assert private.active_ddp() is None
        with pytest.raises(ValueError, match="DistributedDataParallel, which would average the experts"):
            wrapped(group, ignore=False)
        wrapped(group, ignore=True)
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        with pytest.raises(NotImplementedError, match="which a compiled layer with a group needs"):
            private.active_ddp()


def run_rank(rank, file, results):
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
        check_group()
        results.put("")
        dist.destroy_process_group()
    except BaseException:
        results.put(traceback.format_exc())


def test_groups_by_public_functions(tmp_path):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process with threads
        processes = [context.Process(target=run_rank, args=(r, tmp_path / "file", results)) for r in range(2)]
        for process in processes:
            process.start()
    try:
        assert [results.get(timeout=60) for _ in processes] == ["", ""]
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def test_without_the_marks_of_ddp_experts_cannot_be_excluded(monkeypatch):
    monkeypatch.delattr(nn.parallel.DistributedDataParallel, "_set_params_and_buffers_to_ignore_for_model")
    assert {name.split(", ")[1] for name in private.missing()} == set(private._DDP_MARKS)
    monkeypatch.setattr(private, "_HAS_DDP_MARKS", False)
    with pytest.raises(NotImplementedError, match="_ddp_ignored, which ddp_ignore_experts needs"):
        ab.ddp_ignore_experts(nn.Linear(1, 1))
