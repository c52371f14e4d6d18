"""The whole layer on torch tensors: operands, implementations, and their times on a GPU."""

from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import timing
from benchmarks.c_call import Calls, c_call
from benchmarks.shapes import ITEMSIZES, LayerShape, draw_experts

PASSES = ("forward", "both")
EAGER, COMPILED, GRAPH, REDUCE = "eager", "compiled", "graph", "reduce-overhead"
#: Implementations in FP8, with experts that are quantised in each pass or once.
FP8 = ("fp8", "fp8-kept")
_HOST_CALLS = 10


class Operands(NamedTuple):
    """leaves: x, gate, w_in, w_out; d_out; experts: int64 [T, K], or None: the gate decides."""

    leaves: tuple[Any, Any, Any, Any]
    d_out: Any
    experts: Any


class Layer(NamedTuple):
    """A layer and its operands.

    function: computes the output from the tokens.
    leaves: the tensors to differentiate: the tokens first.
    d_out: the cotangent of the output.
    """

    function: Callable[[Any], Any]
    leaves: tuple[Any, ...]
    d_out: Any

    def forward(self) -> Any:
        """Returns the output, without an autograd graph."""
        import torch

        with torch.no_grad():
            return self.function(self.leaves[0])

    def both(self) -> tuple[Any, ...]:
        """Returns the output and the gradients of the leaves."""
        import torch

        output = self.function(self.leaves[0])
        return output, *torch.autograd.grad(output, self.leaves, self.d_out)


def operands(shape: LayerShape, dtype: str, routing: str | None, device: str, seed: int = 0) -> Operands:
    """Returns operands with the same distribution as layer_jax.operands, and the same experts if they are given."""
    torch, normal = timing.torch_on(device), timing.normal_on(device, dtype, seed)
    T, D, F, E, K = shape
    leaves = (
        normal(T, D),
        normal(D, E, scale=D**-0.5),
        normal(E, D, 2, F, scale=D**-0.5),
        normal(E, F, D, scale=F**-0.5),
    )
    experts = None
    if routing == "zipf":
        experts = torch.from_numpy(draw_experts(T, E, K, seed, zipf=True)).to(device, torch.int64)
    return Operands(tuple(leaf.requires_grad_() for leaf in leaves), normal(T, D), experts)


def make(by: str, given: Operands, topk: int) -> Layer:
    """Returns the layer `by`, which is not "c", on the values of the operands.

    Args:
      by: torch or grouped_mm, torch-loop, sonicmoe; moe, MoE, fp8, fp8-kept: ours; hf-...: transformers'.
      given: the operands. Only torch and torch-loop support given experts.
      topk: experts per token.
    """
    from anabranch.torch import MoE, moe, quantize_experts
    from benchmarks.peers import sonicmoe, transformers
    from benchmarks.peers import torch as eager

    x, gate, w_in, w_out = (leaf.detach() for leaf in given.leaves)
    E, D, _, F = w_in.shape
    if by == "MoE" or by.startswith("hf-"):
        state = {  # names and layouts of checkpoints
            "gate.weight": gate.T.contiguous(),
            "gate_up_proj": w_in.permute(0, 2, 3, 1).reshape(E, 2 * F, D).contiguous(),
            "down_proj": w_out.transpose(1, 2).contiguous(),
        }
        if by == "MoE":
            module = MoE(D, F, E, topk, device="meta")
        else:
            module = transformers.block(by.removeprefix("hf-"), LayerShape(x.shape[0], D, F, E, topk))
            state = {name if name.startswith("gate.") else f"experts.{name}": value for name, value in state.items()}
        module.load_state_dict(state, assign=True)
        leaves = (x.requires_grad_(), *(module.get_parameter(name).requires_grad_() for name in state))
        if by == "MoE":
            return Layer(lambda tokens: module(tokens).output, leaves, given.d_out)
        return Layer(lambda tokens: module(tokens[None])[0], leaves, given.d_out)
    weights: tuple[Any, ...] = (gate, w_in, w_out)
    options: dict[str, Any] = {"topk": topk}
    if by == "sonicmoe":
        weights, function = sonicmoe.layer(given, topk)
        options = {}
    elif by in ("moe", *FP8):
        options |= {"precision": "fp8"} if by in FP8 else {}
        options |= {"quantized": quantize_experts(w_in, w_out)} if by == "fp8-kept" else {}

        def function(*leaves: Any, **options: Any) -> Any:
            return moe(*leaves, **options).output

    else:
        options["experts"] = given.experts
        function = eager.loop_layer if by == "torch-loop" else eager.layer
    weights = tuple(weight.requires_grad_() for weight in weights)
    return Layer(lambda tokens: function(tokens, *weights, **options), (x.requires_grad_(), *weights), given.d_out)


def calls_of(by: str, given: Operands, topk: int, mode: str = EAGER) -> Calls:
    """Returns the calls of an implementation, compiled in the modes "compiled" and "reduce-overhead".

    "forward" returns the output; "both" returns the output and the gradients of the leaves.
    """
    if by == "c":
        return c_calls(given, topk)
    import torch

    layer = make(by, given, topk)
    if mode in (COMPILED, REDUCE):
        options: dict[str, Any] = {"mode": REDUCE} if mode == REDUCE else {}
        layer = layer._replace(function=torch.compile(layer.function, fullgraph=True, **options))
    return {"forward": layer.forward, "both": layer.both}


def measure(by: str, shape: LayerShape, dtype: str, routing: str | None, mode: str, repeats: int) -> dict[str, Any]:
    """Measures both passes on a GPU. The process should not have used the device before.

    Returns:
      `times` by pass; `host`: seconds until a call returns, by pass, not for graphs; `note`: what ran out of memory.
    """
    torch = timing.torch_on("cuda")
    count = timing.sets_past_cache("cuda", shape.operand_bytes(ITEMSIZES[dtype]), least=1)
    times, host, notes = {}, {}, []
    for name in PASSES:
        try:
            sets = [operands(shape, dtype, routing, "cuda", seed) for seed in range(count)]
            calls: list[Callable[[], Any]] = [calls_of(by, one, shape.K, mode)[name] for one in sets]
            if mode == GRAPH:
                for call in calls:  # SonicMoE searches for the fastest kernel of every GEMM, for seconds to minutes
                    call()
                times[name] = timing.seconds_of_each(calls, repeats=repeats, seconds=40e-3)
            else:
                calls = [_mark_step(call) for call in calls] if mode == REDUCE else calls
                times[name] = timing.seconds_of_calls(calls, repeats=repeats)
                host[name] = timing.host_seconds(calls[0], calls=_HOST_CALLS, repeats=repeats)
        except torch.cuda.OutOfMemoryError:
            notes.append(f"{name}: out of memory")
        sets, calls = [], []
        torch.cuda.empty_cache()
    return {"times": times, "host": host, "note": "; ".join(notes)}


def _mark_step(call: Callable[[], Any]) -> Callable[[], Any]:
    """Returns the call as a separate CUDA graph step, whose results the next step may overwrite."""

    def step() -> Any:
        timing.torch_on("cuda").compiler.cudagraph_mark_step_begin()
        return call()

    return step


def c_calls(given: Operands, topk: int) -> Calls:
    """Returns our calls through C, as a C++ program would make them.

    torch computes the gate's GEMMs, for which we have no function.
    """
    import torch

    x, gate, w_in, w_out = (leaf.detach() for leaf in given.leaves)
    (T, D), E, F, K = x.shape, gate.shape[1], w_out.shape[1], topk
    R = T * K

    def empty(*shape: int, dtype: Any = x.dtype) -> Any:
        return torch.zeros(shape, dtype=dtype, device=x.device)

    logits, d_logits = (empty(T, E, dtype=torch.float32) for _ in range(2))
    weights, d_weights = (empty(T, K, dtype=torch.float32) for _ in range(2))
    experts, row_of_slot = (empty(T, K, dtype=torch.int32) for _ in range(2))
    lse, score_sum = empty(T, dtype=torch.float32), empty(E, dtype=torch.float32)
    tokens_per_expert, group_sizes = (empty(E, dtype=torch.int32) for _ in range(2))
    slot_of_row, offsets, dropped = (empty(*size, dtype=torch.int32) for size in ((R,), (E + 1,), ()))
    a, h, output, through_logits = empty(R, F), empty(R, 2, F), empty(T, D), empty(T, D)
    d_w_in, d_w_out, d_x, d_gate = (torch.zeros_like(leaf) for leaf in (w_in, w_out, x, gate))

    routing = {"topk": K, "score_function": 0, "normalize": 1, "scaling_factor": 1.0, "logits": logits}
    routed = {"weights": weights, "experts": experts, "score_sum": score_sum, "lse": lse}
    if given.experts is not None:
        routed["forced_experts"] = given.experts.to(torch.int32)
    counts = {"tokens_per_expert": tokens_per_expert}
    route = c_call("router_forward", **routing, **routed, **counts)
    rows = {"slot_of_row": slot_of_row, "group_sizes": group_sizes}
    maps = {**rows, "row_of_slot": row_of_slot, "offsets": offsets, "dropped": dropped}
    plan = c_call("plan", num_experts=E, experts=experts, **counts, **maps)
    ffn = {"topk": K, "x": x, "w_in": w_in, **rows}
    up = {saved: c_call("expert_ffn_forward", **ffn, a=a, **({"h": h} if saved else {})) for saved in (False, True)}
    down = c_call("grouped_matmul_combine", x=a, w=w_out, **rows, row_of_slot=row_of_slot, weights=weights, out=output)
    gradients = {"dh": h, "d_w_in": d_w_in, "d_w_out": d_w_out, "d_weights": d_weights}
    ffn_backward = c_call(
        "expert_ffn_backward", **ffn, w_out=w_out, weights=weights, h=h, d_out=given.d_out, **gradients
    )
    cotangents = {"d_weights": d_weights, "d_logits": d_logits}
    route_backward = c_call("router_backward", **routing, experts=experts, lse=lse, **cotangents)
    dh, w = h.reshape(R, 2 * F), w_in.reshape(E, D, 2 * F)  # h contains dh by then
    sums = {"transpose_w": 1, "backward": 1, "row_of_slot": row_of_slot, "addend": through_logits, "out": d_x}
    add_up = c_call("grouped_matmul_combine", x=dh, w=w, **rows, **sums)

    def forward(save_h: bool = False) -> Any:
        if x.is_cuda:
            torch.mm(x, gate, out_dtype=torch.float32, out=logits)
        else:
            torch.mm(x.float(), gate.float(), out=logits)
        route()
        plan()
        up[save_h]()
        down()
        return output

    def both() -> Any:
        forward(save_h=True)
        ffn_backward()
        route_backward()
        narrow = d_logits.to(x.dtype)  # as in moe() with a bfloat16 gate
        torch.mm(narrow, gate.T, out=through_logits)
        torch.mm(x.T, narrow, out=d_gate)
        add_up()
        return output, d_x, d_gate, d_w_in, d_w_out

    return {"forward": forward, "both": both}
