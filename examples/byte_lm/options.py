"""The options of a run: one dataclass defines the command line, the help and the saved configuration."""

import argparse
import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.precision import BLOCK, NUMBERS
from byte_lm.data import stdlib_folder
from mesh import parse_mesh
from option_fields import add_options, check_ranges, option

# The command line is read before the import of JAX, which takes seconds and may fail.
if TYPE_CHECKING:
    from anabranch.jax import Parallel
    from byte_lm.model import ModelConfig

#: The folder `out` of this checkout.
DEFAULT_OUT = Path(__file__).resolve().parents[2] / "out" / "byte_lm"


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a run. Every field is an option of the command line (`aux_loss`: --aux-loss)."""

    width: int = option("model", 128, "width of the model, D", 2)
    layers: int = option("model", 4, "transformer layers", 1)
    heads: int = option("model", 4, "attention heads; must divide the width", 1)
    dtype: str = option("model", "float32", "dtype of the computation", choices=("float32", "bfloat16"))

    experts: int = option("experts", 8, "experts per layer, E", 1)
    topk: int = option("experts", 2, "experts per byte (top-k), K", 1)
    hidden: int = option("experts", 256, "width of one expert, F", 1)
    precision: str = option(
        "experts", "highest", "precision of the experts' GEMMs; fp8: quantised operands", choices=tuple(NUMBERS)
    )
    shared_experts: int = option("experts", 0, "shared experts, which process every byte besides its K experts", 0)
    score_function: str = option(
        "experts", "softmax", "router's score function", choices=("softmax", "sigmoid", "sqrtsoftplus")
    )
    aux_loss: float = option("experts", 0.01, "coefficient of the load-balance loss; 0: none", 0)
    expert_bias: float = option(
        "experts", 0.0, "step of the selection bias that balances without a loss (1e-3 to 1e-2); 0: none", 0
    )
    balance: str = option(
        "experts", "none", "quantile: every step sets the selection bias by quantiles", choices=("none", "quantile")
    )
    lora: int = option(
        "experts", 0, "train adapters (LoRA) of this rank on the frozen model of --base, instead of a model; 0: none", 0
    )

    steps: int = option("training", 700, "total number of training steps", 1)
    batch: int = option("training", 16, "windows of text per step", 1)
    seq: int = option("training", 128, "bytes per window", 2)
    lr: float = option("training", 3e-3, "peak learning rate of AdamW", 0)
    seed: int = option("training", 0, "seed of the weights, the batches and the sample", 0)
    corpus: Path = option("training", stdlib_folder(), "train on every *.py file below this folder")  # noqa: RUF009

    out: Path = option("run", DEFAULT_OUT, "folder for checkpoints, pictures and summary.json")  # noqa: RUF009
    base: str = option("run", "", "with --lora: the --out folder of the run whose newest checkpoint is adapted")
    mesh: str = option("run", "", "devices to train on, such as expert=2,data=2 (axes data, expert, tensor)")
    save_every: int = option("run", 200, "steps between checkpoints", 1)
    held_out_bytes: int = option("run", 1 << 18, "maximum number of held-out bytes for the final table", 1)
    prompt: str = option("run", "def read_", "prompt of the sample")
    sample_bytes: int = option("run", 400, "length of the sample in bytes", 1)
    temperature: float = option("run", 0.7, "temperature of the sample; 0: always the likeliest byte", 0)

    def __post_init__(self):
        check_ranges(self)
        if self.width % (2 * self.heads):
            raise ValueError(f"--heads: got {self.heads}, expected an even width of a head, width {self.width} / heads")
        if self.topk > self.experts:
            raise ValueError(f"--topk: got {self.topk}, expected at most the {self.experts} experts")
        if self.balance == "quantile" and (self.expert_bias or self.topk == self.experts):
            got = f"--expert-bias {self.expert_bias}" if self.expert_bias else f"--topk {self.topk}, all experts"
            raise ValueError(f"--balance: got quantile with {got}, expected --expert-bias 0 and --topk below --experts")
        if self.base and not self.lora:
            raise ValueError(f"--base: got {self.base} without --lora, expected --lora RANK")
        sizes = parse_mesh(self.mesh)
        shards = sizes["data"] * sizes["expert"]
        for name, value, parts in (
            ("batch", self.batch, shards),
            ("experts", self.experts, sizes["expert"]),
            ("hidden", self.hidden, sizes["tensor"]),
        ):
            if value % parts:
                raise ValueError(f"--{name}: got {value}, expected a multiple of {parts} for --mesh {self.mesh}")
        for name, value, block in (("width", self.width, BLOCK), ("hidden", self.hidden, BLOCK * sizes["tensor"])):
            if self.precision == "fp8" and value % block:
                raise ValueError(f"--{name}: got {value}, expected a multiple of {block} for --precision fp8")
        if not self.prompt.encode():
            raise ValueError(f"--prompt: got {self.prompt!r}, expected at least one byte")

    @property
    def parallel(self) -> "Parallel | None":
        """The parallelism of the expert layers; None without a mesh."""
        from anabranch.jax import Parallel

        return Parallel(expert_axis="expert", data_axes="data", tensor_axis="tensor") if self.mesh else None

    def model(self) -> "ModelConfig":
        """The options that determine the model."""
        from byte_lm.model import ModelConfig

        return ModelConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(ModelConfig)})

    def fixed(self) -> dict[str, Any]:
        """The options that a resumed run must share with the saved one, as JSON values.

        These are all that determine a step, except `steps`, which may grow, and the corpus, whose text is compared
        instead of its folder.
        """
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.metadata["group"] != "run" and field.name not in ("steps", "corpus")
        }

    def as_json(self) -> dict[str, Any]:
        """All options as JSON values."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def parse(arguments: list[str] | None = None) -> tuple[Options, str]:
    """Reads the command line.

    Returns:
      (options, start): start is "auto" (resume from a checkpoint if there is one), "resume" or "fresh".
    """
    parser = argparse.ArgumentParser(
        prog="byte_lm",
        description="Trains a small byte-level Mixture-of-Experts language model on the Python standard library's own "
        "source on this machine, and compares it with a byte-trigram model on held-out files. "
        "Ctrl-C saves and stops; the same command resumes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    groups = add_options(parser, Options)
    start = groups["run"].add_mutually_exclusive_group()
    flag = functools.partial(start.add_argument, dest="start", action="store_const", default=argparse.SUPPRESS)
    flag("--resume", const="resume", help="resume from the checkpoint in the out folder; an error if there is none")
    flag("--fresh", const="fresh", help="delete the earlier run in the out folder and start over")
    values = vars(parser.parse_args(arguments))
    mode = values.pop("start", "auto")
    try:
        return Options(**values), mode
    except ValueError as error:
        parser.error(str(error))
