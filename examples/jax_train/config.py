"""The options of a run. Those of the model have the names of MaxText's configuration."""

import argparse
import dataclasses
from pathlib import Path

from byte_lm.data import stdlib_folder
from mesh import parse_mesh
from option_fields import add_options, check_ranges, option

#: Names of the residuals of `anabranch.jax.moe` and of the block of ragged_dot, for --remat-policy.
RESIDUALS = ("moe_x", "moe_logits", "moe_routing", "moe_h", "moe_output")


@dataclasses.dataclass(frozen=True)
class Config:
    """The options of a run. Every field is an option of the command line (`num_experts`: --num-experts)."""

    base_emb_dim: int = option("model", 128, "width of the model, D", 2)
    base_num_decoder_layers: int = option("model", 4, "decoder layers", 1)
    base_num_query_heads: int = option("model", 4, "attention heads; must divide the width", 1)
    dtype: str = option("model", "float32", "dtype of the computation", choices=("float32", "bfloat16"))
    remat_policy: str = option(
        "model",
        "none",
        "what each layer saves for its backward pass: none (no rematerialisation), full (its input alone), or names of "
        f"residuals to save besides, separated by commas: {', '.join(RESIDUALS)}",
    )

    moe: str = option("experts", "anabranch", "the MoE block", choices=("anabranch", "ragged_dot"))
    num_experts: int = option("experts", 8, "experts per layer, E", 1)
    num_experts_per_tok: int = option("experts", 2, "experts per token, K", 1)
    base_moe_mlp_dim: int = option("experts", 256, "width of one expert, F", 1)
    load_balance_loss_weight: float = option("experts", 0.01, "coefficient of the load-balance loss; 0: none", 0)
    ragged_buffer_factor: float = option(
        "experts", -1.0, "rows that a device accepts, as a multiple of the mean; others are dropped. -1: drop nothing"
    )
    prefuse_moe_weights: bool = option(
        "experts", False, "store wi [E, D, 2 F] in place of wi_0 and wi_1 [E, D, F]: true or false"
    )

    steps: int = option("training", 200, "total number of training steps", 1)
    global_batch_size: int = option("training", 16, "sequences per step on all devices", 1)
    max_target_length: int = option("training", 128, "bytes per sequence", 2)
    learning_rate: float = option("training", 3e-3, "peak learning rate of AdamW", 0)
    init_weights_seed: int = option("training", 0, "seed of the weights and the batches", 0)
    corpus: Path = option("training", stdlib_folder(), "train on every *.py file below this folder")  # noqa: RUF009

    mesh: str = option("run", "", "devices to train on, such as expert=2,data=2; data is the axis of FSDP")
    base_output_directory: str = option("run", "", "folder of checkpoints to resume from and to save to")
    checkpoint_period: int = option("run", 100, "steps between checkpoints", 1)
    log_period: int = option("run", 10, "steps between lines of output", 1)

    def __post_init__(self):
        check_ranges(self)
        if self.base_emb_dim % (2 * self.base_num_query_heads):
            raise ValueError(
                f"--base-num-query-heads: got {self.base_num_query_heads}, expected an even width of a head, "
                f"{self.base_emb_dim} / heads"
            )
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"--num-experts-per-tok: got {self.num_experts_per_tok}, expected at most {self.num_experts}"
            )
        unknown = [name for name in self.saved_residuals() if name not in RESIDUALS]
        if unknown:
            raise ValueError(
                f"--remat-policy: got {unknown[0]!r}, expected none, full, or names of {', '.join(RESIDUALS)}"
            )
        self._check_capacity()
        self._check_mesh()

    def _check_capacity(self):
        got = f"--ragged-buffer-factor: got {self.ragged_buffer_factor}"
        if self.ragged_buffer_factor != -1.0 and self.ragged_buffer_factor <= 0:
            raise ValueError(f"{got}, expected -1 or a number above 0")
        if self.ragged_buffer_factor > 0 and (self.moe != "anabranch" or not self.mesh):
            raise ValueError(f"{got}, expected -1 without --mesh or with --moe ragged_dot, which drop nothing")

    def _check_mesh(self):
        sizes = parse_mesh(self.mesh)
        if sizes["tensor"] > 1:
            raise ValueError(f"--mesh: got {self.mesh!r}, expected the axes data and expert alone")
        for name, value, parts in (
            ("global-batch-size", self.global_batch_size, sizes["data"] * sizes["expert"]),
            ("num-experts", self.num_experts, sizes["expert"]),
            ("base-emb-dim", self.base_emb_dim, sizes["data"]),
        ):
            if value % parts:
                raise ValueError(f"--{name}: got {value}, expected a multiple of {parts} for --mesh {self.mesh}")

    def saved_residuals(self) -> tuple[str, ...]:
        """The names of the residuals that a layer saves; () for "none" and "full"."""
        return () if self.remat_policy in ("none", "full") else tuple(self.remat_policy.split(","))


def parse(arguments: list[str] | None = None) -> Config:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="jax_train",
        description="Trains a small byte-level Mixture-of-Experts language model on a mesh with expert parallelism and "
        "FSDP, with this library's MoE block or one of jax.lax.ragged_dot.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_options(parser, Config)
    try:
        return Config(**vars(parser.parse_args(arguments)))
    except ValueError as error:
        parser.error(str(error))
