"""Selects the K experts of each token in numpy float64, and checks other selections. Semantics, section 1.

Order: larger key first, then smaller index.
"""

from typing import NamedTuple

import numpy as np

from .scores import as_float64, scores

# Where keys are computed, float32 backends may swap experts whose keys differ by at most this many ulp.
KEY_ULPS = {"softmax": 32, "sigmoid": 4, "sqrtsoftplus": 4}
FLOAT32_TINY = float(np.finfo(np.float32).tiny)


def selection_keys(logits, score_function, expert_bias=None):
    """q of section 1: z, or s + b with -inf where z = -inf. float64[..., E]."""
    z = as_float64(logits, "logits")
    if expert_bias is None:
        return z
    return _biased_scores(z, score_function, as_float64(expert_bias, "expert_bias"))


def _biased_scores(z, score_function, bias):
    with np.errstate(invalid="ignore"):
        return np.where(z == -np.inf, -np.inf, scores(z, score_function) + bias)


def best_first(keys):
    """Indices by descending key, then ascending index: NaN above +inf, -0.0 equal to +0.0.

    numpy sorts ascending with NaN last. A stable sort of the reversed row, read backwards, gives this order.
    """
    size = keys.shape[-1]
    return size - 1 - np.argsort(keys[..., ::-1], axis=-1, kind="stable")[..., ::-1]


class Groups(NamedTuple):
    """`number` groups, of which `kept` are selected; a group's score is the sum of its `score_topk` best keys."""

    number: int
    kept: int
    score_topk: int | None

    def members(self, topk):
        """The number of a group's keys in its score; K / kept if score_topk is None."""
        return topk // self.kept if self.score_topk is None else self.score_topk

    def by_logits(self, score_function, normalize, expert_bias):
        """Whether group scores are sums of z; otherwise of s + b."""
        return self.score_topk is None and expert_bias is None and score_function == "softmax" and normalize


def groups_in_use(num_groups, group_topk, group_score_topk=None):
    """`Groups`, or None if they are not used: None, 0 and -1 mean "not used"."""
    unused = (None, 0, -1)
    if (num_groups in unused) != (group_topk in unused):
        raise ValueError(f"num_groups, group_topk: got {num_groups}, {group_topk}, expected both or neither")
    if num_groups not in unused:
        return Groups(num_groups, group_topk, group_score_topk)
    if group_score_topk is not None:
        raise ValueError(f"group_score_topk: got {group_score_topk} without groups, expected None")
    return None


def _check_selection(num_experts, topk, groups):
    if not 1 <= topk <= num_experts:
        raise ValueError(f"topk: got {topk}, expected 1 to {num_experts}")
    if groups is None:
        return
    count, kept, score_topk = groups
    if count < 1 or num_experts % count:
        raise ValueError(f"num_groups: got {count}, expected a divisor of {num_experts}")
    size = num_experts // count
    if score_topk is not None:
        if not 1 <= score_topk <= size:
            raise ValueError(f"group_score_topk: got {score_topk}, expected 1 to {size}")
        if not 1 <= kept <= count or topk > kept * size:
            raise ValueError(
                f"group_topk: got {kept}, expected at most {count}, and groups that hold topk {topk} experts"
            )
    elif not 1 <= kept <= count or topk % kept or topk // kept > size:
        raise ValueError(
            f"group_topk: got {kept}, expected at most {count}, a divisor of topk {topk}, "
            f"and topk / group_topk at most {size}"
        )


def group_keys(logits, topk, score_function, normalize, expert_bias, groups):
    """The keys that group scores sum, [..., G, E/G], and the group scores, [..., G].

    A group's score is the sum of its n largest s + b (b = 0 without a bias; -inf where z = -inf). If n is not given it
    is K/g, and normalised softmax without a bias sums z instead of s + b.
    """
    z = as_float64(logits, "logits")
    if groups.by_logits(score_function, normalize, expert_bias):
        keys = z
    else:
        bias = 0.0 if expert_bias is None else as_float64(expert_bias, "expert_bias")
        keys = _biased_scores(z, score_function, bias)
    keys = keys.reshape(*z.shape[:-1], groups.number, z.shape[-1] // groups.number)
    largest = np.take_along_axis(keys, best_first(keys)[..., : groups.members(topk)], axis=-1)
    with np.errstate(invalid="ignore"):
        return keys, largest.sum(axis=-1)


def select_within(keys, topk, kept_groups, num_groups):
    """The K best experts of the selected groups, [..., K]; `kept_groups` [..., g] ascending.

    The sorted row contains only experts of these groups, so that no other can be selected even if every key is -inf.
    """
    size = keys.shape[-1] // num_groups
    experts = (kept_groups[..., :, None] * size + np.arange(size)).reshape(*kept_groups.shape[:-1], -1)
    order = best_first(np.take_along_axis(keys, experts, axis=-1))[..., :topk]
    return np.take_along_axis(experts, order, axis=-1)


def select(
    logits,
    topk,
    *,
    score_function="softmax",
    normalize=True,
    expert_bias=None,
    num_groups=None,
    group_topk=None,
    group_score_topk=None,
    token_mask=None,
):
    """The K selected experts of each token, best first, -1 where masked. int32[..., K]."""
    z = as_float64(logits, "logits")
    groups = groups_in_use(num_groups, group_topk, group_score_topk)
    _check_selection(z.shape[-1], topk, groups)
    keys = selection_keys(z, score_function, expert_bias)
    if groups is None:
        experts = best_first(keys)[..., :topk]
    else:
        _, group_scores = group_keys(z, topk, score_function, normalize, expert_bias, groups)
        kept = np.sort(best_first(group_scores)[..., : groups.kept], axis=-1)
        experts = select_within(keys, topk, kept, groups.number)
    if token_mask is not None:
        experts = np.where(np.asarray(token_mask)[..., None], experts, -1)
    return experts.astype(np.int32)


def selection_agrees(
    experts,
    logits,
    *,
    score_function="softmax",
    normalize=True,
    expert_bias=None,
    num_groups=None,
    group_topk=None,
    group_score_topk=None,
    token_mask=None,
):
    """Whether each token's `experts` int[..., K] are a correct selection up to float32 rounding. bool[...].

    The check is exact without a bias or groups, and between experts (groups) with equal inputs. Otherwise two experts
    may swap places, or one replace the other, if their keys differ by at most 4 float32 ulp (softmax: 32) of
    max(|s|, |b|). For two groups the bound is multiplied by the number of keys in a score. Keys below the smallest
    normal float32 number are equal.
    """
    z = as_float64(logits, "logits")
    got = np.asarray(experts).astype(np.int64)
    topk = got.shape[-1]
    groups = groups_in_use(num_groups, group_topk, group_score_topk)
    scoring = {"score_function": score_function, "normalize": normalize, "expert_bias": expert_bias}
    grouping = {"num_groups": num_groups, "group_topk": group_topk, "group_score_topk": group_score_topk}
    want = select(z, topk, token_mask=token_mask, **grouping, **scoring)
    agrees = (got == want).all(-1)
    if expert_bias is None and groups is None:
        return agrees
    near_misses = ~agrees & (want >= 0).all(-1) & (got >= 0).all(-1) & (got < z.shape[-1]).all(-1)
    for token in zip(*np.nonzero(near_misses), strict=True):
        agrees[token] = _row_agrees(got[token], z[token], groups, **scoring)
    return agrees


def _rounding(magnitude, score_function):
    ulp = np.spacing(magnitude.astype(np.float32)).astype(np.float64)
    return np.maximum(KEY_ULPS[score_function] * ulp, FLOAT32_TINY)


def _precedes(keys, rounding, inputs, others):
    """bool[n, len(others)]: whether index i has to precede others[j] on a backend that rounds to float32.

    inputs [n, ...]: the inputs of a key; equal inputs give equal keys on every backend.
    """
    rank = np.empty(keys.size, np.int64)
    rank[best_first(keys)] = np.arange(keys.size)
    with np.errstate(invalid="ignore"):
        near = np.abs(keys[:, None] - keys[others]) <= np.maximum(rounding[:, None], rounding[others])
    equal = (inputs[:, None] == inputs[others]).all(-1)
    return (rank[:, None] < rank[others]) & (~near | equal)


def _row_agrees(got, z, groups, score_function, normalize, expert_bias):
    if np.unique(got).size != got.size:
        return False
    bias = np.zeros_like(z) if expert_bias is None else as_float64(expert_bias, "expert_bias")
    inputs = np.stack([z, bias], axis=-1)
    computed = _rounding(np.maximum(np.abs(scores(z, score_function)), np.abs(bias)), score_function)
    keys = selection_keys(z, score_function, expert_bias)
    precedes = _precedes(keys, np.zeros_like(z) if expert_bias is None else computed, inputs, got)
    # place[e]: the position of expert e in `got`, K if it is not selected
    place = np.full(z.size, got.size)
    place[got] = np.arange(got.size)
    overtaken = precedes & (place[:, None] > np.arange(got.size))
    if groups is None:
        return not overtaken.any()
    kept = _kept_groups(got, z, inputs, computed, overtaken, groups, score_function, normalize, expert_bias)
    return kept is not None and not overtaken.reshape(groups.number, -1, got.size)[kept].any()


def _kept_groups(got, z, inputs, computed, overtaken, groups, score_function, normalize, expert_bias):
    """bool[G]: the g groups that a backend which selected `got` must have selected; None if that is impossible."""
    count, kept_count, _ = groups
    members = groups.members(got.size)
    _, group_scores = group_keys(z, got.size, score_function, normalize, expert_bias, groups)
    if groups.by_logits(score_function, normalize, expert_bias):
        # A score that is one logit is exact; a sum of several is rounded.
        computed = _rounding(np.abs(z), score_function) if members > 1 else np.zeros_like(z)
    rounding = members * computed.reshape(count, -1).max(-1)
    precedes = _precedes(group_scores, rounding, inputs.reshape(count, -1), np.arange(count))

    kept = np.zeros(count, bool)
    kept[got // (z.size // count)] = True
    # A selected group without a selected expert must not contain an expert that precedes a selected one.
    compatible = ~overtaken.reshape(count, -1).any(-1)
    for group in best_first(group_scores):
        if kept.sum() < kept_count and compatible[group]:
            kept[group] = True
    if kept.sum() != kept_count or precedes[~kept][:, kept].any():
        return None
    return kept
