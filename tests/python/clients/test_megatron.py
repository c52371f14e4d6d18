"""examples/megatron_experts.py with Megatron-Core itself. Only parts that need CUDA are replaced by stand-ins."""

import contextlib
import dataclasses
import itertools
import types
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed: its adapters are not tested")

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts, grouped_gemm_util, moe_utils, router
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_experts

SIZES, R, D, F = (5, 0, 7, 1), 13, 8, 12
E = len(SIZES)
OPTIONS = dict(
    num_layers=1,
    hidden_size=D,
    num_attention_heads=2,
    num_moe_experts=E,
    moe_router_topk=2,
    ffn_hidden_size=F,
    moe_ffn_hidden_size=F,
    gated_linear_unit=True,
    activation_func=nn.functional.silu,
    add_bias_linear=False,
    use_cpu_initialization=True,
)


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    """A process group of one, no compiler, no-op CUDA streams, and the CPU as the CUDA device."""
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
        patch.setattr(torch.cuda, "Stream", mock.MagicMock)
        patch.setattr(torch.cuda, "current_stream", mock.MagicMock())
        patch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        patch.setattr(router, "save_to_aux_losses_tracker", lambda *_, **__: None)  # allocates on CUDA
        for name in (*megatron_experts.FUSED_FUNCTIONS, "HAVE_TE", "te_general_gemm"):
            patch.setattr(moe_utils, name, getattr(moe_utils, name, None), raising=False)
        megatron_experts.use_fused_functions()
        yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def grouped_gemm(monkeypatch):
    """Replaces the package grouped_gemm, which needs CUDA."""

    def gmm(rows, weights, sizes, trans_b):
        return torch.cat([part @ w for part, w in zip(rows.split(sizes.tolist()), weights, strict=True)])

    monkeypatch.setattr(grouped_gemm_util, "grouped_gemm_is_available", lambda: True)
    monkeypatch.setattr(grouped_gemm_util, "ops", types.SimpleNamespace(gmm=gmm))


class GroupedLinear(nn.Module):
    """Replaces TransformerEngine's GroupedLinear, which needs CUDA: one weight per expert."""

    def __init__(self, num_gemms, input_size, output_size, **_):
        super().__init__()
        for e in range(num_gemms):
            weight = normal(output_size, input_size, seed=input_size + e) / input_size**0.5
            self.register_parameter(f"weight{e}", nn.Parameter(weight))

    def forward(self, x, sizes):
        parts = zip(x.split(list(sizes)), self.parameters(), strict=True)
        return torch.cat([part @ weight.T for part, weight in parts]), None


def mlp(kind, config=None, **options):
    """Megatron's experts, or ours."""
    config = config or TransformerConfig(**OPTIONS | options)
    config.bf16 = True  # GroupedMLP requires it; parameters are float32
    groups = ProcessGroupCollection.use_mpu_process_groups(["ep", "expt_tp", "expt_dp"])
    linears = MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
    submodules = [linears] if issubclass(kind, experts.TEGroupedMLP) else []
    torch.manual_seed(0)
    return kind(E, config, *submodules, pg_collection=groups)


KINDS = {
    experts.GroupedMLP: megatron_experts.AnabranchGroupedMLP,
    experts.TEGroupedMLP: megatron_experts.AnabranchTEGroupedMLP,
}


def results(module, rows, sizes):
    """The output and the gradients of rows, probabilities and parameters."""
    leaves = [normal(rows, D, seed=0).requires_grad_(), normal(rows, seed=5).abs().requires_grad_()]
    output, bias = module(leaves[0], torch.tensor(sizes), leaves[1])
    assert bias is None
    return output, *torch.autograd.grad(output, [*leaves, *module.parameters()], normal(rows, D, seed=9))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [SIZES, (0,) * E])
def test_experts_compute_what_they_replace(kind, sizes):
    theirs, ours = mlp(kind), mlp(KINDS[kind])
    ours.load_state_dict(theirs.state_dict())
    close(results(ours, sum(sizes), sizes), results(theirs, sum(sizes), sizes))


CHANGED = dict(
    gated_linear_unit=False,
    activation_func=nn.functional.gelu,
    add_bias_linear=True,
    activation_func_clamp_value=7.0,
    activation_func_fp8_input_store=True,
    delay_wgrad_compute=True,
    fine_grained_activation_offloading=True,
    fp4="e2m1",
    fp8="hybrid",
    glu_linear_offset=1.0,
    moe_apply_probs_on_input=True,
    quant_recipe=object(),
    use_te_activation_func=True,
)
#: Options without effect on GroupedMLP.
OF_TE = {
    "activation_func_clamp_value",
    "fine_grained_activation_offloading",
    "glu_linear_offset",
    "use_te_activation_func",
}


@pytest.mark.parametrize("name", CHANGED)
def test_an_option_that_changes_the_result_is_refused(name):
    config = TransformerConfig(**OPTIONS)
    setattr(config, name, CHANGED[name])
    for theirs, ours in KINDS.items():
        if theirs is experts.TEGroupedMLP or name not in OF_TE:
            with pytest.raises(ValueError, match=f"^{name}: got "):
                mlp(ours, config)


def test_an_option_of_a_newer_version_is_refused():
    """Quantisation options are refused by name, others if the replaced class reads them."""

    @dataclasses.dataclass
    class Newer(TransformerConfig):
        fp2: bool = False
        expert_dropout: float = 0.0
        of_attention: float = 0.0

    class NewerMLP:
        def forward(self):
            return self.config.expert_dropout

    megatron_experts.check_config(Newer(**OPTIONS, of_attention=1.0), NewerMLP)
    for name, value in {"fp2": True, "expert_dropout": 0.1}.items():
        with pytest.raises(ValueError, match=f"^{name}: got {value}, expected "):
            megatron_experts.check_config(Newer(**OPTIONS, **{name: value}), NewerMLP)


def test_hooks_that_would_not_run_are_refused():
    module = mlp(megatron_experts.AnabranchTEGroupedMLP)
    module.linear_fc2.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"^linear_fc2: got a module with forward hooks"):
        results(module, R, SIZES)


def both(function, leaf, others=()):
    """(fused, unfused) results of a Megatron function, and the gradients of its floating operands."""
    found = []
    for fused in (True, False):
        leaves = [t.clone().requires_grad_() for t in (leaf, *others)]
        outputs = function(fused, *leaves)
        wanted = [o for o in outputs if o.requires_grad]
        cotangents = [normal(*o.shape, seed=i) for i, o in enumerate(wanted)]
        found.append([*outputs, *torch.autograd.grad(wanted, leaves, cotangents, allow_unused=True)])
    return found


def routings():
    """Every selection and weighting of Megatron's router."""
    for topk, scale, groups in itertools.product((1, 2, 4), (None, 2.5), ((None, None), (4, 2))):
        if groups[1] and topk % groups[1]:
            continue
        options = dict(topk=topk, scaling_factor=scale, num_groups=groups[0], group_topk=groups[1])
        yield options | dict(score_function="softmax", use_pre_softmax=True)
        if topk > 1:
            yield options | dict(score_function="softmax", use_pre_softmax=False)
        for bias in (None, normal(8, seed=2)):
            yield options | dict(score_function="sigmoid", expert_bias=bias)


def test_the_router_is_megatrons():
    count = 0
    for options in routings():
        got, want = both(
            lambda fused, logits, o=options: moe_utils.topk_routing_with_score_function(logits, fused=fused, **o),
            normal(24, 8, seed=1),
        )
        close(got, want)
        count += 1
    assert count == 38


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_scores_and_balance_loss_are_megatrons(score_function):
    def loss(fused, logits):
        routing_map, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, 2, score_function, fused=fused)
        counts = routing_map.sum(0)
        value = moe_utils.switch_load_balancing_loss_func(scores, counts, 24, 2, 8, 0.1, fused=fused)
        return scores, counts, value.reshape(())

    close(*both(loss, normal(24, 8, seed=1)))


@pytest.mark.parametrize("capacity", [None, 4], ids=["dropless", "padded to capacity"])
def test_permutation_is_megatrons(capacity):
    """Permute and unpermute, with probabilities beside the rows or at the end; then chunks in another order."""
    T, order = 24, torch.tensor([2, 0, 3, 1])
    probs = torch.rand(T, E, generator=torch.Generator().manual_seed(3))
    routing_map = probs >= probs.topk(2, 1).values[:, 1:]
    if capacity:  # every expert has the same number of tokens
        routing_map = torch.zeros(T, E, dtype=torch.bool)
        for e in range(E):
            routing_map[torch.randperm(T, generator=torch.Generator().manual_seed(e))[:capacity], e] = True
    sizes = routing_map.sum(0)

    def early(fused, x, probs):
        rows, row_probs, indices = moe_utils.permute(
            x, routing_map, probs, int(sizes.sum()), fused=fused, drop_and_pad=bool(capacity)
        )
        rows, row_probs = moe_utils.sort_chunks_by_idxs(rows, sizes, order, row_probs, fused=fused)
        back, sizes_back = torch.argsort(order), sizes[order]
        again, _ = moe_utils.sort_chunks_by_idxs(rows * row_probs[:, None], sizes_back, back, fused=fused)
        return rows, row_probs, moe_utils.unpermute(again, indices, x.shape, fused=fused, drop_and_pad=bool(capacity))

    def late(fused, x, probs):
        rows, _, indices = moe_utils.permute(
            x, routing_map, num_out_tokens=int(sizes.sum()), fused=fused, drop_and_pad=bool(capacity)
        )
        options = dict(probs=probs, routing_map=routing_map, fused=fused, drop_and_pad=bool(capacity))
        return rows, moe_utils.unpermute(rows, indices, x.shape, **options)

    for function in (early, late):
        close(*both(function, normal(T, D, seed=1), [probs]))


SIGMOID = dict(moe_router_score_function="sigmoid")
SCALED = dict(moe_router_topk_scaling_factor=2.5)
IN_GROUPS = dict(moe_router_topk=4, moe_router_num_groups=4, moe_router_group_topk=2)
ROUTERS = {
    "best of softmax": dict(moe_router_topk=1, moe_router_pre_softmax=True),
    "softmax before": dict(moe_router_pre_softmax=True, **SCALED),
    "softmax after": dict(moe_router_topk=3),
    "softmax before, groups": dict(moe_router_pre_softmax=True, **IN_GROUPS),
    "softmax after, groups": IN_GROUPS,
    "best of sigmoid": SIGMOID | dict(moe_router_topk=1),
    "sigmoid": SIGMOID | SCALED,
    "sigmoid, bias": SIGMOID | dict(moe_router_enable_expert_bias=True),
    "sigmoid, bias, groups": SIGMOID | IN_GROUPS | SCALED | dict(moe_router_enable_expert_bias=True),
}
BALANCE = {
    "none": dict(moe_router_load_balancing_type="none"),
    "aux, z": dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.01),
    "sequences": dict(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.1),
    "all": dict(
        moe_router_load_balancing_type=["aux_loss", "seq_aux_loss", "global_aux_loss"],
        moe_aux_loss_coeff=[0.1, 0.2, 0.3],
        calculate_per_token_loss=True,
    ),
}
ALL_TO_ALL = dict(moe_token_dispatcher_type="alltoall")
TO_CAPACITY = ALL_TO_ALL | dict(moe_expert_capacity_factor=0.6)
DISPATCHERS = {
    "all-gather": dict(moe_token_dispatcher_type="allgather"),
    "all-to-all, shared expert": ALL_TO_ALL | dict(moe_shared_expert_intermediate_size=F),
    "all-to-all, overlapped shared expert": ALL_TO_ALL
    | dict(moe_shared_expert_intermediate_size=F, moe_shared_expert_overlap=True),
    "all-gather, drops": dict(moe_token_dispatcher_type="allgather", moe_expert_capacity_factor=0.6),
    "drops by position": TO_CAPACITY | dict(moe_token_drop_policy="position"),
    "drops and padding": TO_CAPACITY | dict(moe_pad_expert_input_to_capacity=True),
}
EXPERTS = 8


def layers(options):
    """(ours, Megatron's): the layer with our functions and experts, and the unchanged layer with SequentialMLP."""
    options = OPTIONS | dict(num_moe_experts=EXPERTS, moe_router_dtype="fp32") | options
    submodules = get_gpt_layer_local_spec(num_experts=EXPERTS).submodules.mlp.submodules
    torch.manual_seed(0)
    theirs = MoELayer(TransformerConfig(**options), submodules)
    submodules = dataclasses.replace(submodules, experts=megatron_experts.AnabranchGroupedMLP)
    ours = MoELayer(TransformerConfig(**options), submodules)
    ours.config.moe_router_fusion = ours.config.moe_permute_fusion = True  # set after the constructor's GPU check
    with torch.no_grad():
        if theirs.router.enable_expert_bias:
            theirs.router.expert_bias.copy_(normal(EXPERTS, seed=4) / 4)
        missing, _ = ours.load_state_dict(theirs.state_dict(), strict=False)
        assert set(missing) == {"experts.weight1", "experts.weight2"}
        for weight, whole in zip(ours.experts.parameters(), stacked(theirs.experts), strict=True):
            weight.copy_(whole.reshape(weight.shape))
    return ours, theirs


def stacked(sequential, select=lambda parameter: parameter):
    """SequentialMLP's parameters, or what `select` returns for them (gradients), as [E, D, 2 F] and [E, F, D]."""
    for name in ("linear_fc1", "linear_fc2"):
        yield torch.stack([select(getattr(mlp, name).weight).T for mlp in sequential.local_experts])


def layer_results(layer, mask):
    """The output, the logged losses, and the gradients of the input and of every parameter."""

    def gradient(parameter):
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    x = normal(6, 2, D, seed=1).requires_grad_()
    with mock.patch.object(router, "save_to_aux_losses_tracker") as logged:
        output, _ = layer(x, padding_mask=mask)
        output.backward(normal(6, 2, D, seed=2))
    others = [gradient(p) for name, p in layer.named_parameters() if not name.startswith("experts.")]
    if isinstance(layer.experts, experts.GroupedMLP):
        w1, w2 = (gradient(p) for p in layer.experts.parameters())
        expert_gradients = [w1.view(EXPERTS, D, 2 * F), w2.view(EXPERTS, F, D)]
    else:
        expert_gradients = list(stacked(layer.experts, gradient))
    losses = {call.args[0]: call.args[1].detach() for call in logged.call_args_list}
    return {"output": output.detach(), "x": x.grad, "others": others, "experts": expert_gradients, "losses": losses}


def test_the_layer_is_megatrons(monkeypatch):
    """Every router with every dispatcher, losses and padding alternating: 54 configurations, all eight functions."""
    functions = {name: mock.Mock(wraps=getattr(moe_utils, name)) for name in megatron_experts.FUSED_FUNCTIONS}
    for name, function in functions.items():
        monkeypatch.setattr(moe_utils, name, function)
    padding = torch.arange(6) >= torch.tensor([[6], [3]])  # [batch, sequence]; the second sequence has 3 tokens
    numbers = list(itertools.product(range(len(ROUTERS)), range(len(DISPATCHERS))))
    assert len(numbers) == 54
    for r, d in numbers:  # every pair of choices
        routing, dispatcher, balance = list(ROUTERS)[r], list(DISPATCHERS)[d], list(BALANCE)[(r + d) % len(BALANCE)]
        # With a bias, Megatron adds the mask and the map in incompatible shapes.
        mask = padding if (r // 2 + d) % 2 and "bias" not in routing else None
        ours, theirs = layers(ROUTERS[routing] | DISPATCHERS[dispatcher] | BALANCE[balance])
        got, want = layer_results(ours, mask), layer_results(theirs, mask)
        assert (balance == "none") == (not want["losses"])
        torch.testing.assert_close(
            got,
            want,
            rtol=1e-5,
            atol=1e-6,
            msg=lambda text, of=(routing, dispatcher, balance, mask is not None): f"{of}: {text}",
        )
    assert all(function.called for function in functions.values())


def test_a_router_in_float64_is_refused():
    """The functions compute in float32."""
    ours, _ = layers(dict(moe_router_dtype="fp64"))
    with pytest.raises(TypeError, match=r"^logits: got float64"):
        ours(normal(6, 2, D, seed=1))
