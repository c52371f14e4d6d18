"""Routings and layers to time: sizes, FLOPs, bytes, and random experts."""

import functools
from typing import NamedTuple

import numpy as np

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


class RouterCase(NamedTuple):
    """A routing to E experts, K per token. groups: number of groups, and number of groups per token."""

    E: int
    K: int
    score_function: str = "softmax"
    normalize: bool = True
    bias: bool = False
    groups: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        parts = [self.score_function, "normalised" * self.normalize, "bias" * self.bias]
        parts.append("groups {}/{}".format(*self.groups) if self.groups[0] else "")
        return " ".join(part for part in parts if part)


class LayerShape(NamedTuple):
    """T tokens of width D, E experts of width F with gate and up columns, K experts per token."""

    T: int
    D: int
    F: int
    E: int
    K: int

    def __str__(self) -> str:
        return ",".join(map(str, self))

    def forward_flops(self) -> float:
        """Returns the FLOPs of the three GEMMs: x W_gate, x W_up and a W_out for every assignment.

        >>> LayerShape(2, 3, 5, 4, 1).forward_flops()
        180.0
        """
        return 6.0 * self.T * self.K * self.D * self.F

    def weight_bytes(self, itemsize: int) -> int:
        """Returns the bytes of gate, w_in and w_out."""
        return itemsize * self.D * self.E * (1 + 3 * self.F)

    def operand_bytes(self, itemsize: int) -> int:
        """Returns the bytes of the weights, x and the output's cotangent."""
        return self.weight_bytes(itemsize) + 2 * itemsize * self.T * self.D

    def step_bytes(self, itemsize: int) -> int:
        """Returns the bytes that forward and backward must hold: operands, results and h.

        These are weights and x, their gradients, the output and its cotangent, and h [T K, 2, F], the only large array
        that must be saved for backward.
        """
        tokens, h = self.T * self.D, self.T * self.K * 2 * self.F
        return 2 * self.weight_bytes(itemsize) + itemsize * (4 * tokens + h)


#: From many narrow experts to few wide ones.
SHAPES = tuple(
    LayerShape(*sizes)
    for sizes in (
        (40960, 768, 256, 128, 8),
        (40960, 768, 512, 64, 4),
        (40960, 768, 1024, 32, 2),
        (24576, 1536, 256, 128, 8),
        (24576, 1536, 512, 64, 4),
        (24576, 1536, 1024, 32, 2),
        (32768, 4096, 256, 256, 16),
        (32768, 4096, 512, 128, 8),
        (32768, 4096, 1024, 64, 4),
        (32768, 4096, 512, 256, 16),
        (32768, 4096, 1024, 128, 8),
        (32768, 4096, 2048, 64, 4),
    )
)

#: For the CPU.
CPU_SHAPES = (
    LayerShape(1024, 512, 1024, 8, 2),
    LayerShape(2048, 512, 256, 64, 8),
    LayerShape(2048, 512, 256, 128, 8),
)

#: The layer of well-known models.
NAMED = {
    "olmoe": LayerShape(32768, 2048, 1024, 64, 8),
    "qwen3-30b": LayerShape(32768, 2048, 768, 128, 8),
    "qwen3-235b": LayerShape(32768, 4096, 1536, 128, 8),
    "gpt-oss": LayerShape(32768, 2880, 2880, 32, 4),
    "gpt-oss-120b": LayerShape(32768, 2880, 2880, 128, 4),
    "deepseek-v3": LayerShape(32768, 7168, 2048, 256, 8),
    "mixtral": LayerShape(32768, 4096, 14336, 8, 2),
}


#: How experts are chosen: "uniform": by a random gate; "zipf": by draw_experts(zipf=True).
ROUTINGS = ("uniform", "zipf")


@functools.lru_cache(maxsize=64)
def draw_experts(T: int, E: int, K: int, seed: int = 0, *, zipf: bool = False) -> np.ndarray:
    """Draws K distinct experts per token without replacement: int32 [T, K].

    All experts are equally likely, or have shares 1 / (1 + e) (Zipf's law). Every expert draws an exponential time at
    the rate of its share, and the K earliest are taken.
    """
    clocks = np.random.default_rng(seed).standard_exponential((T, E), np.float32)
    if zipf:
        clocks *= np.arange(1, E + 1, dtype=np.float32)
    return np.argsort(clocks, axis=1)[:, :K].astype(np.int32)
