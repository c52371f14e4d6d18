"""Models that `parallelize` shards over processes have the losses, gradients and checkpoints of one process."""

import copy
import functools
import importlib
import os
import warnings

import peft
import pytest
import small_models
import tokenizers
import torch
import torch.distributed as dist
import transformers
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import anabranch.torch.transformers as adapter
import gloo_ranks
from anabranch.torch import clip_grad_norm_

MODELS = ("qwen3_moe", "gpt_oss", "deepseek_v3")  # layouts, biases, shared experts and dense layers
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
STEPS = 2

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no Gloo")


# ---------------------------------------------------------------- models and batches


def build(name, lora=False, experts=8):
    """A small model for training, with adapters that have an effect."""
    transformers.logging.set_verbosity_error()
    adapter.register()
    model = copy.deepcopy(small_models.small_model(name, "cpu")).train()
    torch.manual_seed(0)
    if experts != 8:
        config = copy.deepcopy(model.config)
        config.num_experts = experts
        model = type(model)(config).train()
    model.set_experts_implementation("anabranch")
    if lora:
        names = dict(target_modules=["q_proj", "q_b_proj"], target_parameters=EXPERTS)
        model = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5, **names))
        for path, value in model.named_parameters():
            if "lora_B" in path:
                torch.nn.init.normal_(value, std=0.05)
    return model


def mesh_of(data, expert):
    sizes = {"data": data, "expert": expert} if data else {"expert": expert}
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def batches(ranks, uneven=False):
    """The tokens of every rank."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(3, 90, (1, 7) if uneven and r else (2, 12), generator=draw) for r in range(ranks)]


def backward(model, batch, number, ranks=1):
    """The part of a batch in the mean loss of `number` labels. Gradients are those of the mean of the ranks' losses."""
    loss = model(batch, labels=batch, use_cache=False, num_items_in_batch=number).loss
    (ranks * loss).backward()
    return loss.detach()


def passes(one, model, rank, ranks, uneven=False):
    """Both passes, in one process and on the ranks; checks the loss."""
    parts = batches(ranks, uneven)
    number = sum(part[:, 1:].numel() for part in parts)
    want = sum(backward(one, part, number) for part in parts)
    loss = backward(model, parts[rank], number, ranks)
    dist.all_reduce(loss)
    torch.testing.assert_close(loss, want)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check_gradients(model, one):
    """Compares every gradient, and the norm before and after clipping."""

    def compare():
        expected = dict(one.named_parameters())
        assert [name for name, _ in model.named_parameters()] == list(expected)
        for name, value in model.named_parameters():
            want = expected[name].grad
            assert (value.grad is None) == (want is None), name
            if want is not None:
                error = (whole(value.grad) - want).abs().max() / want.abs().max()
                assert error < 1e-5, (name, float(error))

    compare()
    norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 1e-2)
    assert norm > 1.1e-2
    torch.testing.assert_close(clip_grad_norm_(model, 1e-2), norm)
    compare()


# ---------------------------------------------------------------- checks on the ranks


def check_passes(rank, ranks, name, lora, data=0, uneven=False, experts=8, **options):
    one, model = build(name, lora, experts), build(name, lora, experts)
    model = adapter.parallelize(model, mesh_of(data, ranks // max(data, 1)), equal_tokens=not uneven, **options)
    passes(one, model, rank, ranks, uneven)
    check_gradients(model, one)


def check_mixed_precision(rank, ranks, data):
    """float32 parameters, computed in bfloat16, have float32 gradients. The model has biases."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    one = build("gpt_oss").bfloat16()
    model = adapter.parallelize(build("gpt_oss"), mesh_of(data, ranks // max(data, 1)), mp_policy=policy)
    for part in batches(ranks):
        backward(one, part, 44)
    backward(model, batches(ranks)[rank], 44, ranks)
    for name, value in model.named_parameters():
        want = one.get_parameter(name).grad.float()
        error = (whole(value.grad) - want).norm() / want.norm()
        assert value.grad.dtype == torch.float32 and error < 2e-2, (name, float(error))


def check_evaluation(rank, ranks, **options):
    """Forward passes without a backward pass, before and after a step, do not change the training."""
    losses = []
    for model in (build("gpt_oss"), adapter.parallelize(build("gpt_oss"), mesh_of(0, ranks), **options)):

        def evaluate(model=model):
            with torch.no_grad():
                losses.append(model(batches(1)[0], labels=batches(1)[0], use_cache=False).loss)

        evaluate()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches(STEPS):  # all ranks have one batch
            model.zero_grad()
            losses.append(backward(model, batch, 22))
            evaluate()
            optimizer.step()
            evaluate()
    number = len(losses) // 2
    torch.testing.assert_close(losses[number:], losses[:number])
    assert len({round(float(loss), 4) for loss in losses[1:number:3]}) == STEPS  # the steps have an effect


def check_float32_routers(rank, ranks):
    """A model in bfloat16 whose routers Transformers keeps in float32."""
    config = build("deepseek_v3").config
    torch.manual_seed(1)
    one = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    one.set_experts_implementation("anabranch")
    model = adapter.parallelize(copy.deepcopy(one), mesh_of(0, ranks))
    for part in batches(ranks):
        backward(one, part, 44)
    backward(model, batches(ranks)[rank], 44, ranks)
    dtypes = {name: value.dtype for name, value in model.named_parameters()}
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    for name, value in model.named_parameters():
        want = one.get_parameter(name).grad
        error = (whole(value.grad) - want).float().norm() / want.float().norm()
        assert value.grad.dtype == dtypes[name] and error < 2e-2, (name, float(error))


def check_generation_and_outputs(rank, ranks):
    """PEFT's model generates without a forward pass before; `output_dtype` is that of the logits only."""
    one, model = build("qwen3_moe", lora=True).eval(), build("qwen3_moe", lora=True).eval()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    adapter.parallelize(model, mesh_of(0, ranks))
    tokens = batches(1)[0]
    limits = dict(do_sample=False, max_new_tokens=3, min_new_tokens=3)
    with torch.no_grad():
        assert torch.equal(model.generate(input_ids=tokens, **limits), one.generate(input_ids=tokens, **limits))
        in_bfloat16 = adapter.parallelize(build("qwen3_moe").eval(), mesh_of(0, ranks), mp_policy=policy)
        assert in_bfloat16(tokens).logits.dtype == torch.float32


def check_a_rank_whose_experts_get_no_token(rank, ranks):
    def favoured():
        model = build("gpt_oss")
        with torch.no_grad():
            for path, value in model.named_parameters():
                if path.endswith("router.bias"):
                    value.copy_(torch.tensor([90.0, 80.0] + [0.0] * (len(value) - 2)))
        return model

    one, model = favoured(), adapter.parallelize(favoured(), mesh_of(0, ranks))
    passes(one, model, rank, ranks)
    gradient = model.model.layers[0].mlp.experts.down_proj.grad
    assert bool(gradient.to_local().any()) == (rank == 0)
    for name, value in one.named_parameters():
        if value.grad.any():  # the gradient of the router is the rounding error of zero
            torch.testing.assert_close(whole(model.get_parameter(name).grad), value.grad, rtol=1e-4, atol=1e-6)


def check_checkpointing_and_micro_batches(rank, ranks):
    one, model = build("qwen3_moe", lora=True), build("qwen3_moe", lora=True)
    for each in (one, model):
        each.enable_input_require_grads()
        each.gradient_checkpointing_enable()
    model = adapter.parallelize(model, mesh_of(ranks, 1))
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        passes(one, model, rank, ranks, uneven=last)
    check_gradients(model, one)


def check_whole_state(rank, model, one):
    """The state dict on rank 0 is that of one process."""
    state = get_model_state_dict(model, options=WHOLE)
    if rank == 0:
        assert list(state) == list(one.state_dict())
        for name, value in one.state_dict().items():
            assert torch.equal(state[name], value) and state[name].dtype == value.dtype, name
    return state


def check_saving(rank, ranks, folder, experts):
    """Whole state dicts of 2 x 2 ranks, and checkpoints that one process loads."""
    one = build("qwen3_moe", experts=experts)
    model = adapter.parallelize(build("qwen3_moe", experts=experts), mesh_of(2, ranks // 2))
    check_whole_state(rank, model, one)
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder / str(experts))


def check_checkpoints(rank, ranks, folder):
    """Whole state dicts and files of one process, saving on two ranks, loading what one process saved."""
    one, model = build("qwen3_moe"), adapter.parallelize(build("qwen3_moe"), mesh_of(0, ranks))
    state = check_whole_state(rank, model, one)
    if rank == 0:
        for each, name in ((model, "ours"), (one, "one")):
            each.save_pretrained(folder / name, state_dict=state if each is model else None)
        for name in ("model.safetensors", "config.json"):
            assert (folder / "ours" / name).read_bytes() == (folder / "one" / name).read_bytes(), name
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches(STEPS):
        backward(model, batch, 22)  # all ranks have one batch
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(
        dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder / "two"
    )
    state = {"model": model.state_dict()}
    checkpoint.load(state, checkpoint_id=folder / "one_process")
    model.load_state_dict(state["model"])
    for name, value in model.named_parameters():
        assert torch.equal(whole(value), 2 * one.get_parameter(name)), name


def check_loading_on_the_first_rank(rank, ranks):
    def on_meta():
        with torch.device("meta"):
            return type(expected)(expected.config).train()

    expected = build("deepseek_v3")
    for value in expected.buffers():
        value.add_(0.5)  # a buffer of the checkpoint, and one that only the constructor computes
    model = copy.deepcopy(expected) if rank == 0 else on_meta()
    adapter.parallelize(model, mesh_of(0, ranks))
    for got, want in zip(
        (*model.parameters(), *model.buffers()), (*expected.parameters(), *expected.buffers()), strict=True
    ):
        assert torch.equal(whole(got), want)
    passes(expected, model, rank, ranks)
    check_gradients(model, expected)
    with pytest.raises(ValueError, match=r"got the buffer model.layers.1.mlp.gate.e_score_correction_bias on the meta"):
        adapter.parallelize(on_meta(), mesh_of(0, ranks))
    model = on_meta()
    for (path, name), value in [(path.rpartition(".")[::2], value) for path, value in expected.named_buffers()]:
        setattr(model.get_submodule(path), name, value.clone())
    adapter.parallelize(model, mesh_of(0, ranks))
    assert all(value.isnan().all() for value in model.parameters())


def check_trainer(rank, ranks, folder, data, name="qwen3_moe", lora=True, sft=False):
    """The steps of Trainer in one process; a run that resumes has the same last step."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    logs = []
    for resumed in (False, True):
        fsdp = dict(fsdp=True, fsdp_config={"version": 2, "auto_wrap_policy": "NO_WRAP"})
        saved = folder / f"{name} {lora} {sft}"
        arguments = training_arguments(saved, 2, sft, save_strategy="steps", save_steps=1, **fsdp)
        # accelerate has FSDP for other devices than CPUs only.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
        model = adapter.parallelize(build(name, lora), mesh_of(data, ranks // max(data, 1)))
        trainer = (sft_trainer if sft else transformers.Trainer)(model, arguments, train_dataset=dataset(sft))
        trainer.train(resume_from_checkpoint=str(saved / "checkpoint-1") if resumed else None)
        logs.append(log_of(trainer))
    assert logs[0][1:] == logs[1][1:]
    want = torch.load(folder / f"log of {name} {lora}")
    torch.testing.assert_close(torch.tensor(logs[0]), want, rtol=1e-4, atol=0)


def check_errors(rank, ranks):
    with pytest.raises(ValueError, match=r"mesh: got dimensions \('expert', 'data'\), expected \('expert',\) or"):
        adapter.parallelize(build("qwen3_moe"), init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("expert", "data")))
    with pytest.raises(TypeError, match=r"mesh: got .*ProcessGroup.*, expected a torch.distributed.DeviceMesh"):
        adapter.parallelize(build("qwen3_moe"), dist.group.WORLD)
    other = build("qwen3_moe")
    with pytest.raises(TypeError, match=r"mp_policy: got .*, expected a MixedPrecisionPolicy of FSDP2 or None"):
        adapter.parallelize(other, mesh_of(0, ranks), mp_policy=torch.bfloat16)
    with torch.no_grad():
        other.lm_head.weight[0, 0] += rank
    with pytest.raises(ValueError, match=r"got different values of lm_head.weight on rank 0 and rank 1"):
        adapter.parallelize(other, mesh_of(0, ranks))
    other = build("deepseek_v3")
    other.model.layers[1].mlp.gate.e_score_correction_bias += rank
    with pytest.raises(ValueError, match=r"got different values of model.layers.1.mlp.gate.e_score_correction_bias on"):
        adapter.parallelize(other, mesh_of(0, ranks))
    other = build("qwen3_moe")
    other.config.tie_word_embeddings = True
    with pytest.raises(ValueError, match=r"model: got output embeddings of their own with tie_word_embeddings=True"):
        adapter.parallelize(other, mesh_of(0, ranks))
    mixed = build("qwen3_moe")
    mixed.model.layers[0].mlp.experts.down_proj.data = mixed.model.layers[0].mlp.experts.down_proj.data.bfloat16()
    with pytest.raises(
        NotImplementedError, match=r"experts: got trained parameters of torch.bfloat16 and torch.float3"
    ):
        adapter.parallelize(mixed, mesh_of(0, ranks))
    mixed = build("qwen3_moe").bfloat16()
    mixed.model.layers[0].self_attn.scale = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(NotImplementedError, match=r"0.self_attn: got trained parameters of torch.bfloat16 and torch.f"):
        adapter.parallelize(mixed, mesh_of(0, ranks))
    config = copy.deepcopy(mixed.config)
    config.num_experts, config.num_experts_per_tok = 5, 2
    with pytest.raises(
        ValueError, match=r"mlp.experts.gate_up_proj: got 5 experts, expected a multiple of the 2 ranks"
    ):
        adapter.parallelize(type(other)(config), mesh_of(0, ranks))
    ids = batches(1)[0]
    model = adapter.parallelize(build("qwen3_moe"), mesh_of(0, ranks), equal_tokens=True)
    with pytest.raises(NotImplementedError, match="experts that parallelize has sharded already"):
        adapter.parallelize(model, mesh_of(0, ranks))
    with pytest.raises(ValueError, match=r"x \(tokens\): got 24 on rank 0 and 20 on rank 1"):
        model(ids[:, : 12 - 2 * rank])
    with pytest.raises(TypeError, match="a model with process groups to pickle"):
        copy.copy(model.model.layers[0].mlp.experts._anabranch_group)
    adapted = adapter.parallelize(build("qwen3_moe", lora=True), mesh_of(0, ranks))
    for later in (dict(target_modules=[], target_parameters=EXPERTS), dict(target_modules=["q_proj"])):
        with pytest.raises(
            NotImplementedError, match=r"model: got a new adapter for .*, expected get_peft_model before"
        ):
            adapted.add_adapter("later", peft.LoraConfig(r=2, **later))
        with pytest.raises(NotImplementedError, match="model: got a new adapter for "):
            peft.get_peft_model(model, peft.LoraConfig(r=2, **later))
    with pytest.raises(NotImplementedError, match=r"got a merge of .* with sharded experts"):
        adapted.merge_adapter()


# ---------------------------------------------------------------- one process


def training_arguments(folder, batch, sft=False, **options):
    make = transformers.TrainingArguments
    if sft:
        # The load-balancing loss is that of one rank's tokens, so it depends on the number of ranks.
        make = functools.partial(importlib.import_module("trl").SFTConfig, router_aux_loss_coef=0.0, bf16=False)
    return make(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=batch,
        max_steps=STEPS,
        max_grad_norm=0.05,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **options,
    )


def dataset(sft=False):
    rows = [{"input_ids": row, "labels": row} for row in torch.cat(batches(4))]
    return importlib.import_module("datasets").Dataset.from_list(rows) if sft else rows


def sft_trainer(*arguments, **options):
    """TRL's trainer of sequences without text: its tokenizer only pads."""
    words = tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 2}, unk_token="<pad>")
    names = dict(pad_token="<pad>", eos_token="<eos>")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), **names)
    return importlib.import_module("trl").SFTTrainer(*arguments, processing_class=tokenizer, **options)


def log_of(trainer):
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def run(rank, ranks, folder, checks):
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message=".*returned a view tensor")  # FSDP2's warning about outputs
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=ranks)
    for check in checks:
        check(rank, ranks)
    gloo_ranks.leave()


def start(ranks, folder, checks):
    imported = ("transformers", "peft", "anabranch.torch.transformers")
    gloo_ranks.start(run, ranks, ranks, folder, checks, imported=imported)


def train_alone(folder, name, lora):
    """Trains with Trainer in one process, for `check_trainer`."""
    arguments = training_arguments(folder / "one_trainer", 4, save_strategy="no")
    trainer = transformers.Trainer(build(name, lora), arguments, train_dataset=dataset())
    trainer.train()
    torch.save(torch.tensor(log_of(trainer)), folder / f"log of {name} {lora}")


def test_sft_trainer_equals_trainer_in_one_process(tmp_path):
    pytest.importorskip("trl", reason="trl is not installed, see the extra `test`")
    cases = ("qwen3_moe", True), ("gpt_oss", False)
    for name, lora in cases:
        train_alone(tmp_path, name, lora)
    check = functools.partial(check_trainer, folder=tmp_path, data=0, sft=True)
    start(2, tmp_path, [functools.partial(check, name=name, lora=lora) for name, lora in cases])


def test_two_processes_equal_one(tmp_path):
    train_alone(tmp_path, "qwen3_moe", lora=True)
    one = build("qwen3_moe")
    checkpoint.save(
        {"model": {n: 2 * v for n, v in one.state_dict().items()}}, checkpoint_id=tmp_path / "one_process", no_dist=True
    )
    checks = [
        *(functools.partial(check_passes, name=name, lora=lora) for name in MODELS for lora in (False, True)),
        functools.partial(check_passes, name="gpt_oss", lora=False, data=2),
        functools.partial(check_passes, name="qwen3_moe", lora=True, uneven=True),
        functools.partial(check_passes, name="gpt_oss", lora=True, transport="all_to_all", capacity_factor=8.0),
        *(functools.partial(check_mixed_precision, data=data) for data in (0, 2)),
        *(functools.partial(check_evaluation, reshard_after_forward=value) for value in (True, False)),
        check_float32_routers,
        check_generation_and_outputs,
        check_a_rank_whose_experts_get_no_token,
        check_checkpointing_and_micro_batches,
        functools.partial(check_checkpoints, folder=tmp_path),
        check_loading_on_the_first_rank,
        check_errors,
        functools.partial(check_trainer, folder=tmp_path, data=0),
    ]
    start(2, tmp_path, checks)
    optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
    for batch in batches(STEPS):
        backward(one, batch, 22)
        optimizer.step()
        optimizer.zero_grad()
    trained = dict(zip(("model", "optimizer"), get_state_dict(one, optimizer), strict=True))
    found = copy.deepcopy(trained)
    checkpoint.load(found, checkpoint_id=tmp_path / "two", no_dist=True)
    for name, value in trained["model"].items():
        torch.testing.assert_close(found["model"][name], value, rtol=1e-4, atol=2e-5)
        for moment, want in trained["optimizer"]["state"].get(name, {}).items():
            torch.testing.assert_close(found["optimizer"]["state"][name][moment], want, rtol=1e-3, atol=1e-6)


def test_two_by_two_processes_equal_one(tmp_path):
    checks = [
        functools.partial(check_passes, name="gpt_oss", lora=False, data=2),
        # FSDP2 cannot divide three experts per rank by two.
        functools.partial(check_passes, name="qwen3_moe", lora=True, data=2, experts=6),
        functools.partial(check_passes, name="qwen3_moe", lora=False, data=2, experts=6),
        *(functools.partial(check_saving, folder=tmp_path, experts=experts) for experts in (6, 8)),
    ]
    start(4, tmp_path, checks)
    for experts in (6, 8):
        want = build("qwen3_moe", experts=experts).state_dict()
        found = {"model": {name: torch.zeros_like(value) for name, value in want.items()}}
        checkpoint.load(found, checkpoint_id=tmp_path / str(experts), no_dist=True)
        for name, value in want.items():
            assert torch.equal(found["model"][name], value), name
