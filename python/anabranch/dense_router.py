"""Options of the router's dense form (TransformerEngine's functions), shared by the front ends."""

import enum
from typing import Any

from anabranch import checks
from anabranch._text import shown
from anabranch.options import MOST_BINS


class RoutingMapFormat(enum.IntEnum):
    """Formats of a routing map. Functions accept the member, its value, or its name in any case.

    BYTEMAP: bool [..., E].
    BITMAP_U8: uint8 [..., ceil(E/8)]; expert e is bit e % 8 of byte e // 8, unused bits are 0.
    """

    BYTEMAP = 0
    BITMAP_U8 = 1


#: Dictionaries, because every supported version of torch.compile can trace them.
_BY_NAME = {member.name: member for member in RoutingMapFormat}
_BY_VALUE = {member.value: member for member in RoutingMapFormat}


def check_map_format(value: Any) -> RoutingMapFormat:
    """Converts the argument `routing_map_format`."""
    if isinstance(value, RoutingMapFormat):
        return value
    if isinstance(value, str) and value.upper() in _BY_NAME:
        return _BY_NAME[value.upper()]
    if isinstance(value, int) and not isinstance(value, bool) and value in _BY_VALUE:
        return _BY_VALUE[value]
    raise ValueError(
        f"routing_map_format: got {shown(value)}, expected a RoutingMapFormat, its value, 'bytemap' or 'bitmap_u8'"
    )


def check_map_or_indices(routing_map: RoutingMapFormat, indices: str) -> None:
    """Refuses a routing map format together with the argument `indices`, which replaces the map by indices."""
    if routing_map is not RoutingMapFormat.BYTEMAP:
        raise ValueError(
            f"routing_map_format: got {routing_map.name.lower()} together with {indices}, which requests "
            "indices instead of a map, expected one of them"
        )


def check_index_dtype(name: str, dtype: str, num_experts: int) -> None:
    """Refuses an index dtype that cannot represent every expert."""
    if dtype == "int16" and num_experts > 2**15:
        raise ValueError(f"{name}: got int16 for {num_experts} experts, expected at most 32768 experts or a wider type")


def check_histogram_mode(value: Any) -> None:
    """Refuses an unknown `qb_histogram_mode`."""
    if value is not None:
        checks.choice("qb_histogram_mode", value, ("two_kernel", "fused_atomic"))


def check_bins(histogram: Any) -> int:
    """The number of bins of a `qb_histogram` [E, bins]; raises ValueError if it is out of range."""
    num_experts, bins = histogram.shape
    if not 1 <= bins <= MOST_BINS or num_experts * bins >= checks.INDEX_LIMIT:
        raise ValueError(
            f"qb_histogram: got {checks.describe(histogram)}, expected int32 [E, bins] of 1 to 2^20 bins, fewer than "
            "2^31 counts"
        )
    return int(bins)


def check_no_histogram(bounds: Any, mode: Any) -> None:
    """Refuses options of quantile balancing without a histogram."""
    for name, value in (("qb_bin_bounds", bounds), ("qb_histogram_mode", mode)):
        if value is not None:
            raise ValueError(f"{name}: got one without qb_histogram, expected None")


def normalizes(score_function: str, topk: int, use_pre_softmax: bool) -> bool:
    """Whether TransformerEngine normalises over the selected experts.

    Softmax: unless use_pre_softmax. Other score functions: if topk > 1; they ignore use_pre_softmax, which public
    configurations set together with sigmoid.
    """
    return not use_pre_softmax if score_function == "softmax" else topk > 1
