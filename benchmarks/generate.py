"""Text generation by Transformers with a model like gpt-oss: experts of ours, in bfloat16 and in MXFP4, and its own."""

import argparse
import gc
import importlib.util
import itertools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anabranch.bench import ArgumentError, BenchError
from benchmarks import flags, timing
from benchmarks.tables import selected

CAPTION = """tokens/s: generated tokens of all sequences per second of `generate`, with the prompt; prompt ms: until the
first token; token ms: per further token. Medians of several calls, greedy, sequences of random tokens. cache: of keys
and values; dynamic: the model runs eagerly; static: Transformers compiles the model on a GPU. by: hf: Transformers' own
experts, whose implementation is in the column experts; ours: experts_implementation="anabranch";
mxfp4: packed experts of ours, from a checkpoint in the format of gpt-oss if packed_config supports this Transformers,
else packed in the model (column from). All have the same random weights before packing. On a GPU: four layers with the
sizes of gpt-oss-20b. weights: of the whole model; peak: of the device's memory during generation"""

DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}
BY = ("hf", "ours", "mxfp4")
OPTIONS = {
    **flags.by(BY),
    "--batch": {
        "type": flags.positive,
        "metavar": "N",
        "action": "append",
        "help": "sequences per batch; default: 1 and 32, with --quick 2",
    },
    "--prompt": {"type": flags.positive, "metavar": "N", "help": "tokens per prompt; default: 128, with --quick 8"},
    **flags.choices("--cache", ("dynamic", "static"), "caches of keys and values; default: dynamic"),
    "--new": {"type": flags.positive, "metavar": "N", "help": "generated tokens; default: 64, with --quick 3"},
}
#: The sizes of gpt-oss-20b; the rest are GptOssConfig's defaults.
_GPT_OSS_20B: dict[str, Any] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
}
_SMALL = _GPT_OSS_20B | {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
_TINY = _SMALL | {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
_GIB = 2**30
#: Calls before those that are timed. The second one may compile too. With a static cache each call has a new cache. If
#: its address is new, PyTorch records a CUDA graph again; after several calls addresses are less often new.
_WARM_UPS = {"dynamic": 2, "static": 8}


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields one row per dtype, implementation and batch.

    Raises:
      BenchError: this machine lacks something.
    """
    timing.torch_on(options.device)
    if importlib.util.find_spec("transformers") is None:
        raise BenchError("generate: needs transformers: pip install 'anabranch[transformers]'")
    sizes = _TINY if options.quick else _GPT_OSS_20B if options.device == "cuda" else _SMALL
    prompt, new = options.prompt or (8 if options.quick else 128), options.new or (3 if options.quick else 64)
    if new < 2:
        raise ArgumentError(f"--new: got {new}, expected at least 2")
    batches = dict.fromkeys(options.batch or ((2,) if options.quick else (1, 32)))
    for dtype in options.dtype:
        for by in dict.fromkeys(options.by or BY):
            _free_memory(options.device)
            model, source = _model(by, sizes, dtype, options.device)
            for batch, cache in itertools.product(batches, dict.fromkeys(options.cache or ("dynamic",))):
                yield {
                    "layers,D,F,E,K": _shape(sizes),
                    "dtype": dtype,
                    "by": by,
                    "experts": "packed" if by == "mxfp4" else model.config._experts_implementation,
                    "from": source,
                    "cache": cache,
                    "batch": batch,
                    "prompt": prompt,
                    "new": new,
                    **_measure(model, batch, prompt, new, cache, 1 if options.quick else 5),
                }
            del model


def _free_memory(device: str) -> None:
    """Frees the memory of models that are no longer used."""
    gc.collect()
    if device == "cuda":
        timing.torch_on(device).cuda.empty_cache()


def _shape(sizes: Mapping[str, Any]) -> str:
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_local_experts", "num_experts_per_tok")
    return ",".join(str(sizes[name]) for name in names)


def _model(by: str, sizes: Mapping[str, Any], dtype: str, device: str) -> tuple[Any, str]:
    """Returns a model with the experts `by`, and where its weights come from."""
    model = plain_model(sizes, dtype, device)
    if by == "mxfp4":
        return _packed_model(model)
    if by == "ours":
        from anabranch.torch.transformers import register

        register()
        model.set_experts_implementation("anabranch")
    return model, "config"


def plain_model(sizes: Mapping[str, Any], dtype: str, device: str) -> Any:
    """Returns a GptOssForCausalLM with random weights, the same for equal arguments."""
    import torch
    import transformers

    config = transformers.GptOssConfig(**sizes, pad_token_id=0)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    return model.eval()


def _packed_model(model: Any) -> tuple[Any, str]:
    """The model with packed experts, and where they come from."""
    from transformers import __version__

    from anabranch._versions import packed_is_supported

    if not packed_is_supported(__version__):
        return packed_in_place(model), "model"
    return packed_from_checkpoint(model), "checkpoint"


def packed_in_place(model: Any) -> Any:
    """Replaces the experts of a model by packed ones."""
    from torch import nn

    from anabranch.torch import pack_mxfp4
    from anabranch.torch.transformers import PackedExperts
    from anabranch.torch.transformers.experts_module import experts_modules

    for path, experts in experts_modules(model).items():
        packed = PackedExperts(experts, "mxfp4")
        for name in ("gate_up_proj", "down_proj"):
            codes, scales = pack_mxfp4(getattr(experts, name).detach().mT.contiguous())
            for suffix, value in (("_blocks", codes), ("_scales", scales)):
                setattr(packed, name + suffix, nn.Parameter(value, requires_grad=False))
        model.set_submodule(path, packed)
    return model


def packed_from_checkpoint(model: Any) -> Any:
    """Saves a model, packs its checkpoint, and loads that with its experts as they are."""
    import transformers

    from anabranch.checkpoints import convert
    from anabranch.torch.transformers import packed_config

    device, dtype = model.device, model.dtype
    with tempfile.TemporaryDirectory(prefix="anabranch-generate-") as name:
        plain, packed = pathlib.Path(name, "plain"), pathlib.Path(name, "packed")
        model.save_pretrained(plain)
        convert(plain, packed, "mxfp4", progress=None)
        config = packed_config(transformers.AutoConfig.from_pretrained(packed))
        loaded = transformers.AutoModelForCausalLM.from_pretrained(packed, config=config, dtype=dtype)
    return loaded.to(device).eval()


def generated(model: Any, batch: int, prompt: int, new: int, cache: str = "dynamic") -> Any:
    """Returns the tokens [batch, prompt + new] that a model generates after random prompts."""
    import torch

    generator = torch.Generator("cpu").manual_seed(1)
    tokens = torch.randint(1, model.config.vocab_size, (batch, prompt), generator=generator).to(model.device)
    # Without an end every sequence has all tokens.
    return model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        min_new_tokens=new,
        max_new_tokens=new,
        eos_token_id=None,
        cache_implementation=None if cache == "dynamic" else cache,
    )


def _measure(model: Any, batch: int, prompt: int, new: int, cache: str, repeats: int) -> dict[str, Any]:
    """Times `generate`, and returns the columns of a row."""
    import torch

    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()

    def seconds(count: int) -> float:
        def once() -> float:
            start = time.perf_counter()
            generated(model, batch, prompt, count, cache)
            if on_gpu:
                torch.cuda.synchronize()
            return time.perf_counter() - start

        for _ in range(_WARM_UPS[cache]):
            once()
        return statistics.median(once() for _ in range(repeats))

    first, every = seconds(1), seconds(new)
    return {
        "tokens/s": batch * new / every,
        "prompt ms": 1e3 * first,
        "token ms": 1e3 * (every - first) / (new - 1),
        "weights GiB": _weight_bytes(model) / _GIB,
        "peak GiB": torch.cuda.max_memory_allocated() / _GIB if on_gpu else None,
    }


def _weight_bytes(model: Any) -> int:
    """The bytes of all parameters; tied ones count once."""
    return sum(parameter.nbytes for parameter in model.parameters())


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Returns one table per sizes, dtype and batch."""
    names = ("by", "experts", "from", "cache", "tokens/s", "prompt ms", "token ms", "weights GiB", "peak GiB")
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        title = "layers,D,F,E,K {layers,D,F,E,K}, {dtype}, batch {batch}, prompt {prompt}, {new} new tokens"
        found.setdefault(title.format(**row), []).append(row)
    return {title: selected(of_title, names) for title, of_title in found.items()}
