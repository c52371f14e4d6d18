"""The router and the plan on a GPU, through C: dense and compact forward, backward, the balance loss, the plan."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from anabranch import _library
from anabranch.bench import c_call
from anabranch.bench.gpu import copies_past_cache, copy_rate, seconds_of_each, torch_with_gpu

CAPTION = (
    "microseconds a call, median of graph replays. dense: probabilities and byte map; compact: weights, experts,\n"
    "counts, score_sum, lse; loss: compact and the balance loss with its gradient; d: backward, from the cotangents\n"
    "of dense probabilities and of compact weights; floor: the bytes of dense, or of reading the logits, at the rate\n"
    "of a copy in this run"
)


class Row(NamedTuple):
    """One routing; T tokens."""

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


ROWS = [
    Row(8, 2),
    Row(64, 8, normalize=False),
    Row(128, 4),
    Row(128, 8, normalize=False),
    Row(256, 8, "sigmoid", bias=True, groups=(8, 4)),
    Row(384, 8, "sigmoid", bias=True),
    Row(512, 10, normalize=False),
    Row(512, 32, "sigmoid", bias=True),
]

_FORWARD = (
    "logits expert_bias token_mask forced_experts weights experts tokens_per_expert score_sum lse probs routing_map "
    "aux_scores"
)
_BACKWARD = "logits experts token_mask lse d_weights d_probs d_score_sum d_aux_scores d_lse d_logits"
_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


def _options(names: str) -> list[tuple[str, Any]]:
    return [(n, ctypes.c_float if n in ("scaling_factor", "coeff") else ctypes.c_int32) for n in names.split()]


def _call(function: str, options: str, tensors: str, values: dict[str, Any], has_workspace: bool) -> Callable[[], None]:
    torch = torch_with_gpu()
    return c_call.call(
        _library.load_cuda(),
        function,
        _options(options),
        tensors.split(),
        values,
        has_workspace=has_workspace,
        allocate=lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"),
        stream=lambda: torch.cuda.current_stream().cuda_stream,
    )


def router_calls(row: Row, T: int, dtype: str, seed: int = 0) -> dict[str, Callable[[], None]]:
    """dense, compact, loss (compact and the balance loss with its gradient), d dense and d compact."""
    torch = torch_with_gpu()
    E, K = row.E, row.K
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, kind: Any = torch.float32) -> Any:
        return torch.randn(shape, device="cuda", generator=generator).to(kind)

    def empty(*shape: int, kind: Any = torch.float32) -> Any:
        return torch.empty(shape, device="cuda", dtype=kind)

    float_type = getattr(torch, dtype)
    logits = normal(T, E, kind=float_type)
    score = {"score_function": _SCORES.index(row.score_function), "normalize": int(row.normalize), "topk": K}
    shared = score | {"scaling_factor": 1.0, "logits": logits}
    forward = shared | {"num_groups": row.groups[0], "group_topk": row.groups[1]}
    if row.bias:
        forward["expert_bias"] = 0.01 * normal(E)
    dense = {"probs": empty(T, E, kind=float_type), "routing_map": empty(T, E, kind=torch.bool)}
    experts = empty(T, K, kind=torch.int32)
    statistics = {"tokens_per_expert": empty(E, kind=torch.int32), "score_sum": empty(E)}
    lse = empty(T)
    compact = {"weights": empty(T, K), "experts": experts, "lse": lse, **statistics}
    options = "topk score_function normalize num_groups group_topk scaling_factor"
    calls = {
        "dense": _call("ab_cuda_router_forward", options, _FORWARD, forward | dense, True),
        "compact": _call("ab_cuda_router_forward", options, _FORWARD, forward | compact, True),
    }
    loss = _call(
        "ab_cuda_load_balance_loss",
        "topk coeff",
        "score_sum tokens_per_expert num_tokens loss d_score_sum",
        {
            "topk": K,
            "coeff": 0.01,
            **statistics,
            "num_tokens": torch.tensor(T, dtype=torch.int32, device="cuda"),
            "loss": empty(),
            "d_score_sum": empty(E),
        },
        False,
    )
    calls["loss"] = lambda: (calls["compact"](), loss())[0]
    options = "topk score_function normalize scaling_factor"
    backward = shared | {"experts": experts, "d_logits": empty(T, E, kind=float_type)}
    if row.score_function == "softmax":
        backward["lse"] = lse
    d_probs = normal(T, E, kind=float_type)
    calls["d dense"] = _call("ab_cuda_router_backward", options, _BACKWARD, backward | {"d_probs": d_probs}, False)
    backward["d_weights"] = normal(T, K)
    calls["d compact"] = _call("ab_cuda_router_backward", options, _BACKWARD, backward, False)
    return calls


def plan_call(T: int, E: int, K: int, skewed: bool, seed: int = 0) -> Callable[[], None]:
    """The plan of random experts, uniform or with a share of 1/(1 + e) for expert e."""
    torch = torch_with_gpu()
    generator = torch.Generator("cuda").manual_seed(seed)
    shares = 1.0 / torch.arange(1, E + 1, device="cuda") if skewed else torch.ones(E, device="cuda")
    experts = torch.multinomial(shares.expand(T, E), K, generator=generator).to(torch.int32)

    def empty(*shape: int) -> Any:
        return torch.empty(shape, device="cuda", dtype=torch.int32)

    results = {"tokens_per_expert": empty(E), "group_sizes": empty(E), "offsets": empty(E + 1)}
    results |= {"row_of_slot": empty(T, K), "slot_of_row": empty(T * K), "dropped": empty()}
    return _call(
        "ab_cuda_plan",
        "num_experts align_size num_destinations",
        "experts routing_map tokens_per_expert group_sizes offsets row_of_slot slot_of_row dropped row_id_map",
        {"num_experts": E, "experts": experts, **results},
        True,
    )


def rows(*, dtypes: list[str], quick: bool) -> Iterator[dict[str, Any]]:
    """One row for every routing and dtype, then plans."""
    rate = copy_rate()
    for dtype in dtypes:
        for T in (65536, 256):
            for row in ROWS[:1] if quick else ROWS:
                size = 4 if dtype == "float32" else 2
                floors = {"dense": T * row.E * (2 * size + 1) / rate, "compact": T * row.E * size / rate}
                sets = [router_calls(row, T, dtype, seed) for seed in range(copies_past_cache(T * row.E * (size + 1)))]
                line: dict[str, Any] = {"T": T, "E": row.E, "K": row.K, "score": str(row), "dtype": dtype}
                for name in sets[0]:
                    line[name] = 1e6 * seconds_of_each([calls[name] for calls in sets])
                for name, floor in floors.items():
                    line[f"{name} floor"] = 1e6 * floor
                yield line | {"copy TB/s": rate / 1e12}
    for T, E, K in [(32768, 128, 8), (65536, 256, 8)]:
        for skewed in (False, True):
            seconds = seconds_of_each([plan_call(T, E, K, skewed, seed) for seed in range(8)])
            name = "plan, " + ("skewed" if skewed else "uniform")
            yield {"T": T, "E": E, "K": K, "score": name, "plan": 1e6 * seconds}
