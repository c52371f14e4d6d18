"""The whole layer as users of torch write it with grouped products, on the device of its arguments."""

from typing import Any


def grouped_mm(a: Any, b: Any, ends: Any) -> Any:
    """torch's product of rows with the matrix of their expert; `ends` int32 [E]: where the rows of each one end.

    Raises:
      NotImplementedError: this torch has none.
    """
    import torch

    function = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if function is None:
        raise NotImplementedError(f"torch {torch.__version__} has no grouped_mm")
    return function(a, b, offs=ends)


def select(x: Any, gate: Any, experts: Any, *, topk: int) -> tuple[Any, Any]:
    """Weights and experts [T, K], int64: the best ones where none are given."""
    import torch

    logits = (x @ gate).float()
    if experts is None:
        top, experts = logits.topk(topk, dim=-1)
    else:
        top = logits.gather(1, experts)
    return torch.softmax(top, -1), experts


def grouped_mm_layer(x: Any, gate: Any, w_in: Any, w_out: Any, experts: Any = None, *, topk: int) -> Any:
    """topk, a stable sort, two grouped products and index_add; nothing waits for the host.

    Args:
      x: [T, D].
      gate: [D, E].
      w_in: [E, D, 2, F].
      w_out: [E, F, D].
      experts: int64 [T, K], or None: the gate decides.
      topk: K.

    Returns:
      [T, D]; autograd gives the gradients.
    """
    import torch

    E, D, _, F = w_in.shape
    weights, experts = select(x, gate, experts, topk=topk)
    keys, order = experts.flatten().sort(stable=True)
    token = order // topk
    numbers = torch.arange(E, dtype=keys.dtype, device=keys.device)
    ends = torch.searchsorted(keys, numbers, right=True, out_int32=True)
    h = grouped_mm(x.index_select(0, token), w_in.view(E, D, 2 * F), ends)
    y = grouped_mm(torch.nn.functional.silu(h[:, :F]) * h[:, F:], w_out, ends)
    weighted = (y * weights.flatten().index_select(0, order)[:, None]).to(x.dtype)
    return torch.zeros_like(x).index_add(0, token, weighted)
