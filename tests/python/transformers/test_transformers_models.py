"""Models of Transformers give the same results with "anabranch" as with the eager experts."""

import copy
import pathlib
import re

import pytest
import small_models
import torch
import transformers

import anabranch.torch.transformers as adapter

SOURCES = pathlib.Path(transformers.__file__).parent / "models"


@pytest.fixture(autouse=True)
def registered():
    adapter.register()
    transformers.logging.set_verbosity_error()


def follow_the_interface():
    """Folders of models whose experts follow the interface, in the installed version of Transformers."""
    marked = (path for path in SOURCES.glob("*/modeling_*.py") if "\n@use_experts_implementation" in path.read_text())
    return {path.parent.name for path in marked}


def have_experts():
    """Folders of models that define a class whose name says experts."""
    named = re.compile(r"^class \w*(Experts|SparseMLP|MoE|Moe)(MLP|Block)?\(nn\.", re.MULTILINE)
    return {path.parent.name for path in SOURCES.glob("*/modeling_*.py") if named.search(path.read_text())}


HERE = follow_the_interface()


def here(folders):
    """Test parameters for these folders; those not in the installed version are skipped."""
    absent = pytest.mark.skip(f"not in transformers {transformers.__version__}")
    return [pytest.param(folder, marks=() if folder in HERE else absent) for folder in folders]


def test_every_model_with_experts_is_known():
    """A new model of Transformers must be added to the tables of small_models.py."""
    assert HERE and HERE <= set(small_models.MODELS)
    others = have_experts() - HERE - small_models.WITHOUT_ROUTER
    assert others and others <= set(small_models.WITHOUT_INTERFACE)


@pytest.mark.parametrize("folder", small_models.WITHOUT_INTERFACE)
def test_a_model_that_would_not_use_it_is_refused(folder):
    model_type, fields = small_models.WITHOUT_INTERFACE[folder]
    if not (SOURCES / folder).is_dir():
        pytest.skip(f"not in transformers {transformers.__version__}")
    config = transformers.AutoConfig.for_model(model_type, **fields)
    kind = transformers.AutoModel._model_mapping[type(config)]
    message = (
        r'experts_implementation="anabranch": got .*, which has no experts that follow the interface of '
        r"transformers\.integrations\.moe, .* would ignore this implementation"
    )
    with torch.device("meta"):
        with pytest.raises(NotImplementedError, match=message):
            kind._from_config(config, experts_implementation="anabranch")
        model = kind._from_config(transformers.AutoConfig.for_model(model_type, **fields))
    with pytest.raises(NotImplementedError, match=message):
        adapter.check(model)
    with pytest.raises(NotImplementedError, match=message):
        model.set_experts_implementation("anabranch")


def block_of(model):
    """The first experts module, and its parent."""
    path = next(iter(adapter.check(model)))
    return model.get_submodule(path.rpartition(".")[0]), model.get_submodule(path)


def arguments_of(model, block):
    """The arguments of the block when the model runs."""
    seen = []

    def keep(_, args, kwargs):
        seen.append(copy.deepcopy((args, kwargs)))  # some layers share buffers that they write to

    handle = block.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(small_models.tokens(model))
    handle.remove()
    return seen[0]


def run(block, arguments):
    """Outputs and gradients of a block by name, for fixed cotangents."""
    args, kwargs = copy.deepcopy(arguments)
    inputs = [a.clone().requires_grad_() if torch.is_tensor(a) and a.is_floating_point() else a for a in args]
    named = {name: a.clone().requires_grad_() if name == "hidden_states" else a for name, a in kwargs.items()}
    block.zero_grad(set_to_none=True)
    outputs = block(*inputs, **named)
    outputs = [
        o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if torch.is_tensor(o) and o.requires_grad
    ]
    generator = torch.Generator().manual_seed(1)
    torch.autograd.backward(outputs, [torch.randn(o.shape, generator=generator).to(o.device) for o in outputs])
    found = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    found |= {
        f"argument {i}": a.grad
        for i, a in enumerate([*inputs, *named.values()])
        if torch.is_tensor(a) and a.grad is not None
    }
    return found | {name: p.grad for name, p in block.named_parameters() if p.grad is not None}


def relative_error(found, expected):
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-20))


@pytest.mark.parametrize("folder", here(small_models.MODELS))
def test_block_equals_the_eager_one(folder, device):
    model = small_models.small_model(folder, device)
    model.set_experts_implementation("eager")
    block, experts = block_of(model)
    arguments = arguments_of(model, block)
    expected = run(block, arguments)
    model.set_experts_implementation("anabranch")
    found = run(block, arguments)
    assert experts.config._experts_implementation == "anabranch"
    assert found.keys() == expected.keys() and any("down_proj" in name for name in found)
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    assert max(errors.values()) <= 1e-5, errors
    assert not all(torch.equal(found[name], expected[name]) for name in found)  # otherwise the same code ran twice


@pytest.mark.parametrize("folder", here(name for name, (kind, _) in small_models.MODELS.items() if kind is None))
def test_generates_the_same_tokens(folder):
    model = small_models.small_model(folder, "cpu")
    found = {}
    for implementation in ("eager", "anabranch"):
        model.set_experts_implementation(implementation)
        found[implementation] = model.generate(
            small_models.tokens(model), max_new_tokens=20, min_new_tokens=20, do_sample=False
        )
    assert found["anabranch"].shape[1] == 32
    assert torch.equal(found["anabranch"], found["eager"])


@pytest.mark.parametrize("folder", here(name for name, (kind, _) in small_models.MODELS.items() if kind is not None))
@torch.no_grad()
def test_generates_the_same_tokens_with_a_random_head(folder):
    """For models without a head for causal language modelling."""
    model = small_models.small_model(folder, "cpu")
    width, vocabulary = model.get_input_embeddings().weight.shape[1], small_models.SIZES["vocab_size"]
    head = torch.randn(width, vocabulary, generator=torch.Generator().manual_seed(1))
    found = {}
    for implementation in ("eager", "anabranch"):
        model.set_experts_implementation(implementation)
        ids = small_models.tokens(model, batch=1, length=4)
        for _ in range(20):
            logits = model(ids).last_hidden_state[:, -1] @ head
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        found[implementation] = ids
    assert len(found["eager"].unique()) > 3
    assert torch.equal(found["anabranch"], found["eager"])
