"""Checks that all ranks of a group call the layer with the same sizes and options.

With different ones, ranks would lose tokens, or wait for each other in collectives of different sizes. A rank compares
new values through the group's store, without a collective and without waiting for a device. Values that it has compared
before cost one look-up.
"""

import dataclasses
import json
import typing
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anabranch.options import Network, Router, RouterOptions
from anabranch.torch.binding import private

_ops = torch.library.Library("anabranch", "FRAGMENT")

#: Numbers that are not compared as such: the score function is compared as text, topk with the router's options.
_EXCLUDED = ((Router, "score_function"), (Network, "topk"))
#: All other options of the layer that are numbers.
_NUMBERS = {
    kind: [
        (options, name)
        for options in (Router, Network)
        for name, hint in typing.get_type_hints(options).items()
        if hint in kinds and (options, name) not in _EXCLUDED
    ]
    for kind, kinds in ((int, (int, bool)), (float, (float,)))
}
#: Names of the values that `compare_options` compares, in order.
_NAMES = (
    "x (tokens)",
    *("transport", "x (dtype)", "score_function"),
    *("capacity_factor", *(name for _, name in _NUMBERS[float])),
    *("x (width)", "w_in (experts)", "fp8_exchange"),
    *(name for _, name in _NUMBERS[int]),
    *("replay or forced_experts", "align_size", "qb_bins"),
    *("aux_loss_coeff (used)", "z_loss_coeff (used)", "gate (given)"),
)


@dataclasses.dataclass
class _Compared:
    """Values that the ranks of a group have compared, and the number of comparisons."""

    values: set[tuple[Any, ...]] = dataclasses.field(default_factory=set)
    times: int = 0
    configs: set[Any] = dataclasses.field(default_factory=set)
    """The arguments of `check_alike` with these values."""


_by_group: weakref.WeakKeyDictionary[Any, _Compared] = weakref.WeakKeyDictionary()


def _check(group: Any, values: tuple[Any, ...]) -> None:
    """Raises ValueError on every rank of a group if a value differs between ranks.

    All ranks call this in the same call of the layer. A rank with new values waits for the others until the timeout of
    the group's store. Ranks that have compared their values before do not answer; then this rank raises at the timeout.
    """
    compared = _by_group.setdefault(group, _Compared())
    if private.has_stores and values in compared.values:
        return
    ranks, rank, store = dist.get_world_size(group), dist.get_rank(group), _store(group)
    if ranks == 1 or store is None:
        return
    time = compared.times
    compared.times += 1
    store.set(_key(time, rank), json.dumps(values))
    try:
        all_values = [json.loads(text) for text in store.multi_get([_key(time, other) for other in range(ranks)])]
    except RuntimeError as error:
        shown = ", ".join(f"{name} {value}" for name, value in zip(_NAMES, values, strict=True))
        raise RuntimeError(f"group: got new options on rank {rank} ({shown}), expected them on all ranks") from error
    if time > 0:  # Every rank has read the previous values.
        store.delete_key(_key(time - 1, rank))
    for other, theirs in enumerate(all_values):
        for name, first, value in zip(_NAMES, all_values[0], theirs, strict=True):
            if value != first:
                raise ValueError(
                    f"{name}: got {first} on rank 0 and {value} on rank {other} of the group, expected one value on all"
                )
    compared.values.add(values)


def _key(time: int, rank: int) -> str:
    return f"anabranch/options/{time}/{rank}"


def _store(group: Any) -> Any:
    """The store of a process group, or None without a store or with the "fake" backend."""
    if dist.get_backend(group) == "fake":
        return None
    return private.store_of(group)


def _compare(x: Tensor, group: Any, texts: Any, numbers: Any, integers: Any) -> Tensor:
    _check(private.resolve_group(group), (x.shape[0], *texts, *numbers, *integers))
    return _none_dropped(x)


def _none_dropped(x: Tensor, *_: Any) -> Tensor:
    return x.new_zeros((), dtype=torch.int32)


_ops.define("compare(Tensor x, str group, str[] texts, float[] numbers, SymInt[] integers) -> Tensor")
for _device in ("CPU", "CUDA"):
    _ops.impl("compare", _compare, _device)
torch.library.register_fake("anabranch::compare", _none_dropped, lib=_ops)


def _options(config: Any, x: Tensor) -> tuple[list[str], list[float], list[int]]:
    """The values to compare besides the number of tokens: texts, numbers and integers."""
    layer, ranks, router = config.layer, config.ranks, config.layer.router
    numbers_of = {Network: layer.network, Router: (router or RouterOptions(ranks.topk)).numbers()}
    texts = [config.transport, str(x.dtype), "" if router is None else router.score_function]
    numbers = [
        0.0 if ranks.capacity_factor is None else ranks.capacity_factor,
        *(float(getattr(numbers_of[options], name)) for options, name in _NUMBERS[float]),
    ]
    integers = [
        *(x.shape[1], ranks.local_experts, config.fp8_exchange),
        *(getattr(numbers_of[options], name) for options, name in _NUMBERS[int]),
        *(ranks.slots_per_token, ranks.align_size, 0 if router is None else router.qb_bins),
        *(layer.aux_loss, layer.z_loss, router is not None),
    ]
    return texts, numbers, list(map(int, integers))


def compare_options(config: Any, x: Tensor) -> Tensor:
    """Compares sizes and options with the other ranks. Returns 0, int32 [].

    The caller adds the result to the number of dropped assignments, so that a compiled program keeps the comparison.

    Args:
      config: a GroupConfig.
      x: [T, D] of this rank.

    Raises:
      ValueError: a size or an option differs between ranks. Every rank raises.
    """
    compare = torch.ops.anabranch.compare.default if torch.compiler.is_compiling() else _compare
    zero: Tensor = compare(x, config.ranks.group, *_options(config, x))
    return zero


def check_alike(config: Any, x: Tensor, group: Any) -> None:
    """`compare_options` without a result, for calls that nothing traces. A known config costs one look-up."""
    compared = _by_group.get(group)
    key = config, x.shape, x.dtype
    if compared is not None and key in compared.configs:
        return
    texts, numbers, integers = _options(config, x)
    _check(group, (x.shape[0], *texts, *numbers, *integers))
    if private.has_stores:
        _by_group.setdefault(group, _Compared()).configs.add(key)
