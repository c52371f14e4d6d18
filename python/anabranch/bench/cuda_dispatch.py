"""Dispatch, combine, their backward passes and the chunk sort on a GPU, through C, beside a copy and torch eager."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from anabranch.bench.cuda_call import cuda_call
from anabranch.bench.dispatch import least_bytes
from anabranch.bench.gpu import copies_past_cache, copy_rate, seconds_of_each, torch_with_gpu

CAPTION = (
    "microseconds a call, median of graph replays over operands rotated past the L2 cache. GB/s: of the bytes that\n"
    "have to be read and written; share: of the rate of a copy in this run. to float32: from bfloat16 rows. torch:\n"
    "eager index_select and index_add"
)

T = 32768
E = 128
WIDTHS = (768, 1536, 2048, 2880, 4096, 7168)
SLOTS = (8, 2)

Calls = dict[str, Callable[[], Any]]


class Operands:
    """Random tokens, rows and weights, and the maps of a routing of each token to K distinct experts."""

    def __init__(self, tokens: int, K: int, D: int, dtype: str, seed: int):
        torch = torch_with_gpu()
        generator = torch.Generator("cuda").manual_seed(seed)
        R, kind = tokens * K, getattr(torch, dtype)

        def normal(*shape: int) -> Any:
            return torch.empty(shape, device="cuda", dtype=kind).normal_(generator=generator)

        self.experts = torch.rand(tokens, E, device="cuda", generator=generator).argsort(1)[:, :K]
        order = self.experts.reshape(-1).argsort(stable=True)
        self.token = order // K
        self.slot_of_row = order.to(torch.int32)
        self.row_of_slot = torch.empty_like(self.slot_of_row)
        self.row_of_slot[order] = torch.arange(R, device="cuda", dtype=torch.int32)
        self.row_of_slot = self.row_of_slot.reshape(tokens, K)
        self.x, self.d_out, self.rows = normal(tokens, D), normal(tokens, D), normal(R, D)
        self.weights = torch.rand(tokens, K, device="cuda", generator=generator)
        self.weights_by_row = self.weights.reshape(-1)[order][:, None]
        self.sizes = torch.bincount(self.experts.reshape(-1), minlength=E).to(torch.int32)
        self.order = torch.randperm(E, device="cuda", generator=generator).to(torch.int32)
        # results
        self.out, self.wide_out = torch.empty_like(self.x), torch.empty(tokens, D, device="cuda")
        self.to_rows = torch.empty_like(self.rows)
        self.d_weights = torch.empty_like(self.weights)

    def ours(self) -> Calls:
        """The operations by name."""
        maps = {"row_of_slot": self.row_of_slot, "slot_of_row": self.slot_of_row}
        slots, weights = {"row_of_slot": self.row_of_slot}, {"weights": self.weights}
        calls = {
            "dispatch": cuda_call("ab_cuda_dispatch", x=self.x, rows=self.to_rows, **maps),
            "dispatch backward": cuda_call("ab_cuda_combine", rows=self.rows, out=self.out, **slots),
            "combine": cuda_call("ab_cuda_combine", rows=self.rows, out=self.out, **slots, **weights),
            "combine backward": cuda_call(
                "ab_cuda_combine_backward",
                d_out=self.d_out,
                rows=self.rows,
                d_rows=self.to_rows,
                d_weights=self.d_weights,
                **maps,
                **weights,
            ),
            "sort chunks": cuda_call(
                "ab_cuda_sort_chunks",
                x=self.rows,
                split_sizes=self.sizes,
                sorted_indices=self.order,
                out=self.to_rows,
            ),
        }
        if self.rows.element_size() == 2:
            wide = {"rows": self.rows, "out": self.wide_out}
            calls["dispatch backward to float32"] = cuda_call("ab_cuda_combine", **wide, **slots)
            plus = {"rows": self.rows, "out": self.out, "addend": self.x}
            calls["dispatch backward with addend"] = cuda_call("ab_cuda_combine", **plus, **slots)
        return calls

    def torch(self) -> Calls:
        """The same as torch's users write it."""

        def backward() -> tuple[Any, Any]:
            gathered = self.d_out.index_select(0, self.token)
            return gathered * self.weights_by_row.to(gathered.dtype), (gathered * self.rows).sum(1)

        def gather_sum(rows: Any) -> Any:
            return self.out.zero_().index_add_(0, self.token, rows)

        return {
            "dispatch": lambda: self.x.index_select(0, self.token),
            "dispatch backward": lambda: gather_sum(self.rows),
            "combine": lambda: gather_sum(self.rows * self.weights_by_row.to(self.rows.dtype)),
            "combine backward": backward,
        }


def tokens_that_fit(K: int, D: int, itemsize: int) -> int:
    """T, halved until two sets of operands and torch's intermediate results fit into the device's free memory."""
    torch = torch_with_gpu()
    free, _ = torch.cuda.mem_get_info()
    tokens = T
    while tokens * D * (10 * K + 10) * itemsize > 0.8 * free:
        tokens //= 2
    return tokens


def rows(*, dtypes: Sequence[str], quick: bool) -> Iterator[dict[str, Any]]:
    """One row for every operation, width, number of slots and dtype."""
    torch = torch_with_gpu()
    rate = copy_rate()
    for dtype in dtypes:
        itemsize = 4 if dtype == "float32" else 2
        for K in SLOTS:
            for D in WIDTHS[2:3] if quick else WIDTHS:
                torch.cuda.empty_cache()
                tokens = tokens_that_fit(K, D, itemsize)
                moved = least_bytes((tokens, E, K, D), itemsize)
                moved["dispatch backward to float32"] = moved["dispatch backward"] + tokens * D * itemsize
                moved["dispatch backward with addend"] = moved["dispatch backward"] + tokens * D * itemsize
                moved["sort chunks"] = 2 * tokens * K * D * itemsize
                sets = [Operands(tokens, K, D, dtype, seed) for seed in range(copies_past_cache(moved["dispatch"]))]
                ours, peers = [operands.ours() for operands in sets], [operands.torch() for operands in sets]
                for operation in ours[0]:
                    seconds = seconds_of_each([calls[operation] for calls in ours], least_calls=8).median
                    peer = None
                    if operation in peers[0]:
                        peer = seconds_of_each([calls[operation] for calls in peers], repeats=5, least_calls=2).median
                    yield {
                        "operation": operation,
                        "T,K,D": f"{tokens},{K},{D}",
                        "dtype": dtype,
                        "us": seconds * 1e6,
                        "GB/s": moved[operation] / seconds / 1e9,
                        "share": moved[operation] / seconds / rate,
                        "torch us": None if peer is None else peer * 1e6,
                        "copy GB/s": rate / 1e9,
                    }
                del sets, ours, peers
