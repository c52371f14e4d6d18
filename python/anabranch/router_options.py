"""The options of a routing that are part of a program, checked the same way for every front end."""

import dataclasses
from typing import Any

from anabranch import checks
from anabranch._text import shown

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
#: Of a histogram of quantile balancing.
MOST_BINS = 2**20


@dataclasses.dataclass(frozen=True)
class RouterOptions:
    """The options of a routing that are part of the program; `router_options` checks them."""

    topk: int
    score_function: str = "softmax"
    normalize: bool = True
    num_groups: int = 0
    group_topk: int = 0
    scaling_factor: float = 1.0
    sequence_stats: bool = False
    group_score_topk: int = 0
    qb_bins: int = 0


def router_options(
    num_experts: int,
    topk: int,
    *,
    score_function: str = "softmax",
    normalize: bool = True,
    num_groups: int | None = None,
    group_topk: int | None = None,
    group_score_topk: int | None = None,
    scaling_factor: float = 1.0,
    sequence_stats: bool = False,
    qb_bins: int | None = None,
) -> RouterOptions:
    """Checks the options of a routing over `num_experts` experts.

    None, 0 and -1 mean "no groups"; a group_score_topk of None, their scores add up topk / group_topk experts; qb_bins
    of None, no quantile balancing.

    Raises:
      TypeError: an option of a wrong type, a traced array for instance.
      ValueError: an option out of range, or a clash.
    """
    topk = checks.integer("topk", topk, 1, num_experts)
    score_function = checks.choice("score_function", score_function, SCORE_FUNCTIONS)
    normalize = checks.boolean("normalize", normalize)
    sequence_stats = checks.boolean("sequence_stats", sequence_stats)
    scaling_factor = checks.number("scaling_factor", scaling_factor)
    grouping = _grouping(num_experts, topk, num_groups, group_topk, group_score_topk)
    bins = 0
    if qb_bins is not None:
        bins = checks.integer("qb_bins", qb_bins, 1, MOST_BINS)
        if bins * num_experts >= checks.INDEX_LIMIT:
            raise ValueError(f"qb_bins: got {bins} for {num_experts} experts, expected fewer than 2^31 counts")
        if topk >= num_experts:
            raise ValueError(f"topk: got {topk} with quantile balancing, expected fewer than the {num_experts} experts")
        if grouping[0]:
            raise ValueError(f"num_groups: got {grouping[0]} with quantile balancing, expected none")
    groups, kept, score_topk = grouping
    return RouterOptions(
        topk, score_function, normalize, groups, kept, scaling_factor, sequence_stats, score_topk, bins
    )


def _grouping(
    num_experts: int, topk: int, num_groups: int | None, group_topk: int | None, group_score_topk: int | None
) -> tuple[int, int, int]:
    """Groups, how many are kept, and how many scores make theirs; 0 where not used."""
    groups = 0 if num_groups is None else checks.integer("num_groups", num_groups, -1, num_experts)
    kept = 0 if group_topk is None else checks.integer("group_topk", group_topk, -1, num_experts)
    if max(groups, 0) == 0 and max(kept, 0) == 0:
        if group_score_topk is not None:
            raise ValueError(f"group_score_topk: got {shown(group_score_topk)} without groups, expected None")
        return 0, 0, 0
    if groups < 1 or num_experts % groups:
        raise ValueError(
            f"num_groups: got {num_groups}, expected a divisor of {num_experts} experts, with group_topk (or neither)"
        )
    per_group = num_experts // groups
    if group_score_topk is None:
        if not 1 <= kept <= groups or topk % kept or topk // kept > per_group:
            raise ValueError(
                f"group_topk: got {group_topk}, expected 1 <= group_topk <= num_groups {groups}, a divisor of "
                f"topk {topk}, and topk / group_topk <= {per_group} experts of a group"
            )
        return groups, kept, 0
    group_score_topk = checks.integer("group_score_topk", group_score_topk, 1, per_group)
    if not 1 <= kept <= groups or topk > kept * per_group:
        raise ValueError(
            f"group_topk: got {group_topk}, expected 1 <= group_topk <= num_groups {groups}, and groups that hold "
            f"topk {topk} experts"
        )
    return groups, kept, group_score_topk


def attributes(options: RouterOptions) -> dict[str, Any]:
    """The options that forward and backward share, as the handlers take them."""
    return {
        "topk": options.topk,
        "score_function": SCORE_FUNCTIONS.index(options.score_function),
        "normalize": int(options.normalize),
        "scaling_factor": float(options.scaling_factor),
    }


def forward_attributes(options: RouterOptions) -> dict[str, Any]:
    """The options of the forward pass, as the handler takes them."""
    groups = {name: getattr(options, name) for name in ("num_groups", "group_topk", "group_score_topk")}
    return groups | attributes(options)
