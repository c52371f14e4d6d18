"""A routing to time: its sizes and options."""

from typing import NamedTuple


class RouterCase(NamedTuple):
    """A routing to E experts, K a token; groups: how many there are, and how many are kept for a token."""

    E: int
    K: int
    score_function: str = "softmax"
    normalize: bool = True
    bias: bool = False
    groups: tuple[int, int] = (0, 0)

    @property
    def balances(self) -> bool:
        """Whether quantile balancing goes together with it."""
        return self.bias and not self.groups[0]

    def __str__(self) -> str:
        parts = [self.score_function, "normalised" * self.normalize, "bias" * self.bias]
        parts.append("groups {}/{}".format(*self.groups) if self.groups[0] else "")
        return " ".join(part for part in parts if part)
