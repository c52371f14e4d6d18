"""`packed_config`: loads the packed experts of a checkpoint as they are."""

import copy
from typing import Any

from anabranch._packages import needed_by
from anabranch._text import shown
from anabranch.precision import BLOCK
from anabranch.torch.binding import check


def packed_config(config: Any) -> Any:
    """A model's configuration with which `from_pretrained` keeps the packed experts of a checkpoint.

    The experts are computed by `routed_experts` from `Mxfp4` or `Fp8Blocks` weights, on the CPU and on a GPU, whatever
    `experts_implementation` is. Loading needs no GPU. With FP8 the other linear layers stay packed, too, and are
    decoded in each pass. Packed parameters are frozen; all others can be trained. `save_pretrained` writes the tensors
    that the model has under the checkpoint's names, codes and scales with the same bytes and the others in the model's
    dtype, and the checkpoint's own quantization_config. Adapters by `add_lora` are in the state_dict, but
    `from_pretrained` does not load them: save them separately. PEFT saves its own adapters.

    Args:
      config: a configuration of Transformers whose quantization_config has the quant_method "mxfp4" (experts as in
        gpt-oss), or "fp8" with blocks of 128 x 128 (as in DeepSeek-V3 and Qwen3-FP8: `weight` float8_e4m3fn [N, C] and
        `weight_scale_inv` [N/128, C/128] for every expert and linear layer).

    Returns:
      A copy of config, for the argument `config` of `from_pretrained`. A process that gets it from another one, pickled
      or saved, must call this function or `register` before `from_pretrained`.

    Raises:
      ImportError: Transformers is missing or older than 5.24.
      TypeError: config is no configuration.
      ValueError: it has no quantization_config, or one of another format; the message names it.
      `from_pretrained` raises ValueError for packed tensors that the checkpoint lacks or has in another dtype, for
      tensors of experts that the model lacks, and for sizes that are not multiples of a block, and
      NotImplementedError for models without experts that can be packed. Transformers only reports other missing
      tensors, such as routers and norms.

    Gradients: none of packed weights. Source: semantics, section 13.

    >>> import transformers
    >>> plain = transformers.GptOssConfig(quantization_config={"quant_method": "mxfp4"})
    >>> packed_config(plain).quantization_config["quant_method"]
    'anabranch_mxfp4'
    """
    with needed_by("anabranch.torch.transformers"):
        import transformers
    from anabranch.torch.transformers import quantizers

    quantizers.check_version()
    quantizers.install()  # config may come from another process
    if not isinstance(config, transformers.PreTrainedConfig):
        raise TypeError(f"config: got {check.describe(config)}, expected a configuration of Transformers")
    config = copy.deepcopy(config)
    holder = config
    if getattr(config, "quantization_config", None) is None:
        holder = config.get_text_config(decoder=True)
    given = getattr(holder, "quantization_config", None)
    if given is None:
        raise ValueError("quantization_config: got none, expected that of a checkpoint in MXFP4 or FP8 blocks")
    entries = dict(given if isinstance(given, dict) else given.to_dict())
    if "checkpoint" in entries:  # made by this function
        return config
    _check(entries)
    method = {"mxfp4": quantizers.MXFP4, "fp8": quantizers.FP8}.get(entries["quant_method"], entries["quant_method"])
    holder.quantization_config = {**entries, "quant_method": method, "checkpoint": entries}
    return config


def _check(entries: dict[str, Any]) -> None:
    """Refuses formats that are not supported."""
    method = entries.get("quant_method")
    method = entries["quant_method"] = getattr(method, "value", method)
    if method in ("mxfp4", "anabranch_mxfp4"):
        return
    if method != "fp8":
        algorithm = next((entries[key] for key in ("quant_algo", "format", "fmt") if entries.get(key)), None)
        name = shown(method) + (f" ({algorithm})" if algorithm else "")
        raise ValueError(
            f"quant_method: got {name}, expected 'mxfp4' or 'fp8' with blocks of 128 x 128; other formats such as "
            "NVFP4, MXFP8 and GGUF are not supported"
        )
    block = entries.get("weight_block_size", [BLOCK, BLOCK])
    if block is None or list(block) != [BLOCK, BLOCK]:
        mxfp8 = " (MXFP8)" if block is not None and list(block) == [1, 32] else ""
        raise ValueError(f"weight_block_size: got {shown(block)}{mxfp8}, expected [{BLOCK}, {BLOCK}]")
    for key, expected in (("activation_scheme", "dynamic"), ("expert_dtype", "fp8"), ("fmt", "e4m3")):
        if entries.get(key, expected) != expected:
            raise ValueError(f"{key}: got {shown(entries[key])}, expected {expected!r}")
    if entries.get("modules_to_convert"):
        raise ValueError(f"modules_to_convert: got {shown(entries['modules_to_convert'])}, expected none")
