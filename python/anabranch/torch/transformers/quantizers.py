"""Loading of packed checkpoints by Hugging Face Transformers: the configurations and quantizers registered with it.

The model's experts, and with FP8 its linear layers, are replaced before its weights are loaded. Transformers' own
converters then stack the tensors of single experts, and split them again when the model is saved.
"""

import copy
import re
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers.core_model_loading import WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

from anabranch._versions import OLDEST_PACKED, packed_is_supported
from anabranch.torch.transformers.experts_module import experts_modules, model_name
from anabranch.torch.transformers.packed_modules import Fp8Linear, PackedExperts, PackedModule

MXFP4, FP8 = "anabranch_mxfp4", "anabranch_fp8"


def check_version() -> None:
    """Raises ImportError if this Transformers is too old for packed checkpoints."""
    if not packed_is_supported(transformers.__version__):
        needed = ".".join(map(str, OLDEST_PACKED))
        raise ImportError(f"packed checkpoints: got transformers {transformers.__version__}, expected >= {needed}")


class _Config:
    """The entries of the checkpoint's quantization_config, which `to_dict` returns unchanged."""

    def __init__(self, **entries: Any):
        entries = dict(entries)
        method = entries.pop("quant_method")
        self._checkpoint = entries.pop("checkpoint", {"quant_method": method, **entries})
        super().__init__(**entries)
        self.quant_method = method

    def to_dict(self) -> dict[str, Any]:
        """The entries of the checkpoint."""
        return copy.deepcopy(self._checkpoint)


class PackedMxfp4Config(_Config, Mxfp4Config):  # type: ignore[misc]
    """Configuration of `PackedMxfp4Quantizer`."""


class PackedFp8Config(_Config, FineGrainedFP8Config):  # type: ignore[misc]
    """Configuration of `PackedFp8Quantizer`."""


class _ExpertsConverter(WeightConverter):  # type: ignore[misc]
    """Stacks the tensors of single experts as Transformers does, and requires exactly the experts of the model."""

    __slots__ = ()

    @classmethod
    def of(cls, converter: Any) -> Any:
        """Replaces a converter of Transformers that has a tensor per expert and one target."""
        sources, targets = converter.source_patterns, converter.target_patterns
        if type(converter) is not WeightConverter or len(targets) > 1 or not all("*." in name for name in sources):
            return converter
        new = copy.deepcopy(converter)
        new.__class__ = cls
        return new

    def convert(self, layer_name: str, *args: Any, **kwargs: Any) -> Any:
        """Raises ValueError for an expert that is missing or surplus; stacked, it would shift the others."""
        saving = kwargs.get("loading_info") is None
        module = None if saving else kwargs["model"].get_submodule(layer_name.rpartition(".")[0])
        if isinstance(module, PackedExperts):
            found = set(self.layer_targets[layer_name])
            stems = {re.sub(r"(.*\.)\d+(?=\.)", r"\1*", name) for name in found}
            absent = (pattern for pattern in self.source_patterns if pattern not in self.collected_tensors)
            stems |= {layer_name.replace(self.target_patterns[0], pattern) for pattern in absent}
            expected = {stem.replace("*", str(e)) for stem in stems for e in range(module.num_experts)}
            if found != expected:
                wrong = min(found ^ expected)
                got = "a tensor of no expert" if wrong in found else "no such tensor"
                experts = f"the experts 0 to {module.num_experts - 1} of the model"
                raise ValueError(f"{wrong}: got {got} in the checkpoint, expected {experts}")
        return super().convert(layer_name, *args, **kwargs)


def _names(files: Any) -> set[str]:
    """The names of all tensors in safetensors files."""
    names: set[str] = set()
    for file in files or ():
        if str(file).endswith(".safetensors"):
            with safe_open(file, "pt") as tensors:
                names.update(tensors.keys())
    return names


def _replace_experts(model: nn.Module, packed: str, excluded: list[str]) -> None:
    """Replaces the experts modules that the checkpoint has packed."""
    found = {path: part for path, part in experts_modules(model).items() if should_convert_module(path, excluded)}
    if not found:
        raise NotImplementedError(
            f"packed_config: got {model_name(model)}, which has no packed experts that follow the interface of "
            "transformers.integrations.moe, expected a model that has"
        )
    for path, experts in found.items():
        model.set_submodule(path, PackedExperts(experts, packed))


class _Packed:
    """What both quantizers share."""

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Needs no device and no further package."""
        check_version()

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> list[Any]:
        """Lets the converters of experts check that every expert is there."""
        updated = super().update_weight_conversions(weight_conversions, model)  # type: ignore[misc]
        return [_ExpertsConverter.of(conversion) for conversion in updated]

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """None for codes and scales, which keep the dtype that they have in the checkpoint."""
        names = converter.target_patterns
        if dtype == torch.float8_e4m3fn or any(name.endswith(("_scales", "_scale_inv")) for name in names):
            return None
        given = str(param.get_dtype() if hasattr(param, "get_dtype") else param.dtype)
        if "F8" in given or "float8" in given:  # a cast would lose the scales
            raise ValueError(
                f"{', '.join(names)}: got {given} in the checkpoint, expected plain weights: this module "
                "is not an expert or a linear layer, is in modules_to_not_convert, or lacks its scales"
            )
        return super().get_new_dtype(converter, param, dtype)  # type: ignore[misc]

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for path, module in model.named_modules():
            if isinstance(module, PackedModule):
                module.check_loaded(path)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """The state dict has the codes and scales of the checkpoint."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters and the parameters that are not packed can be trained."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Lets Trainer accept models with adapters by `add_lora`, which are no models of PEFT."""
        return True

    @property
    def is_compileable(self) -> bool:
        """`generate` may compile the model, as it does with a static cache on a GPU."""
        return True


class PackedMxfp4Quantizer(_Packed, HfQuantizer):  # type: ignore[misc]
    """Loads MXFP4 experts. All other weights are plain."""

    requires_calibration = False
    #: Per-expert tensors, which `anabranch.checkpoints.convert` writes. Those of gpt-oss are parameters as they are.
    serialized_names = {"weight": ["weight_blocks", "weight_scales"]}  # noqa: RUF012

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        config: Any = self.quantization_config
        _replace_experts(model, "mxfp4", config.modules_to_not_convert or [])


class PackedFp8Quantizer(_Packed, FineGrainedFP8HfQuantizer):  # type: ignore[misc]
    """Loads FP8 blocks of experts and of linear layers."""

    def get_load_operations(self) -> dict[str, Any]:
        """None: nothing is decoded."""
        return {}

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> None:
        config: Any = self.quantization_config
        config.dequantize = True  # with it Transformers only converts the names of excluded modules
        super()._process_model_before_weight_loading(model)
        config.dequantize = False
        excluded = self.modules_to_not_convert
        tied = model.get_output_embeddings() if model.config.get_text_config().tie_word_embeddings else None
        _replace_experts(model, "fp8_blocks", excluded)
        body, stored = set(model.base_model.modules()), _names(checkpoint_files)
        for path, module in list(model.named_modules()):
            # Subclasses of Linear, such as routers, are plain. So are heads whose scales the checkpoint lacks.
            if type(module) is not nn.Linear or module is tied or not should_convert_module(path, excluded):
                continue
            if module in body or f"{path}.weight_scale_inv" in stored:
                model.set_submodule(path, Fp8Linear(module))


def install() -> None:
    """Registers both formats with Transformers. Further calls have no effect."""
    for name, config, quantizer in (
        (MXFP4, PackedMxfp4Config, PackedMxfp4Quantizer),
        (FP8, PackedFp8Config, PackedFp8Quantizer),
    ):
        if name not in AUTO_QUANTIZER_MAPPING:
            register_quantization_config(name)(config)
            register_quantizer(name)(quantizer)
