"""The published Mixture-of-Experts blocks of the model families, written as loops over tokens in float64.

For each model_type, `MODELS` has the names and shapes of its checkpoint tensors and the block as a function
(np, t, x, top, **inputs) of the tensors t by name and x [T, D]. `np` is numpy, or its functions on torch's tensors
for the gradient of the same code. `top(keys, k)` returns the indices of the k largest of `keys()`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

T, E, D, F, S = 4, 16, 12, 8, 8


@dataclass(frozen=True)
class Model:
    """shapes: shapes of the tensors by name. block: see above. inputs: shapes of further inputs beside x.

    adjust: changes random tensors so that they reach all branches of the block.
    """

    shapes: dict[str, tuple[int, ...]]
    block: Callable[..., Any]
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    adjust: Callable[[dict[str, Any]], None] = lambda t: None


# ---------------------------------------------------------------- activations of (gate, up)


def sigmoid(np, z):
    return 1 / (1 + np.exp(-z))


def swiglu(np, g, u):
    return g * sigmoid(np, g) * u


def geglu_tanh(np, g, u):
    return 0.5 * g * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u


def clamped(limit):
    return lambda np, g, u: swiglu(np, np.minimum(g, limit), np.clip(u, -limit, limit))


def oai(alpha, limit):
    def phi(np, g, u):
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
        return (u + 1) * g * sigmoid(np, alpha * g)

    return phi


def then_clamped(limit):
    return lambda np, g, u: np.minimum(g * sigmoid(np, g), limit) * np.clip(u, -limit, limit)


def softcapped(np, g, u):
    return 4 * np.tanh(g / 4) * sigmoid(np, g) * 25 * np.tanh(u / 25)


def relu(np, h):
    return np.maximum(h, 0)


def relu2(np, h):
    return np.maximum(h, 0) ** 2


# ---------------------------------------------------------------- experts as the checkpoints have them


class Experts(NamedTuple):
    """shapes: shapes of their tensors by name. run(np, t, e, v): the output of expert e for v."""

    shapes: dict[str, tuple[int, ...]]
    run: Callable[..., Any]


def each(phi=swiglu, gate="gate_proj", up="up_proj", down="down_proj", at="experts.{}.", num_experts=E, d=D, f=F):
    """Three linear maps [out, in] per expert."""
    names = [f"{at}{part}.weight" for part in (gate, up, down)]
    shapes = [(f, d), (f, d), (d, f)]

    def run(np, t, e, v):
        w_gate, w_up, w_down = (t[name.format(e)] for name in names)
        return w_down @ phi(np, w_gate @ v, w_up @ v)

    tensors = {name.format(e): s for e in range(num_experts) for name, s in zip(names, shapes, strict=True)}
    return Experts(tensors, run)


w123 = partial(each, gate="w1", up="w3", down="w2")


def shared(name="shared_experts", phi=swiglu, **names):
    """A dense expert of the same kind with width S."""
    return each(phi, at=f"{name}.", num_experts=1, f=S, **names)


def halves(h):
    return h[: len(h) // 2], h[len(h) // 2 :]


def alternating(h):
    return h[0::2], h[1::2]


def stacked(phi=swiglu, split=halves, names=("experts.gate_up_proj", "experts.down_proj"), f=F, d=D):
    """[E, 2F, D] and [E, D, F]."""

    def run(np, t, e, v):
        return t[names[1]][e] @ phi(np, *split(t[names[0]][e] @ v))

    return Experts({names[0]: (E, 2 * f, d), names[1]: (E, d, f)}, run)


def transposed(phi=swiglu, split=halves, names=("experts.gate_up_proj", "experts.down_proj"), biased=False):
    """[E, D, 2F] and [E, F, D], with biases [E, 2F] and [E, D] or without."""
    biases = tuple(f"{name}_bias" for name in names) if biased else ()

    def run(np, t, e, v):
        h = v @ t[names[0]][e] + (t[biases[0]][e] if biased else 0)
        return phi(np, *split(h)) @ t[names[1]][e] + (t[biases[1]][e] if biased else 0)

    shapes = {names[0]: (E, D, 2 * F), names[1]: (E, F, D)}
    return Experts(shapes | dict(zip(biases, [(E, 2 * F), (E, D)], strict=False)), run)


def pair_of_linear(at, f=F, num_experts=E):
    """input_linear [E, 2F, D] and output_linear [E, D, F]; num_experts=0: one dense expert without the axis."""
    lead = (num_experts,) if num_experts else ()
    names = f"{at}input_linear.weight", f"{at}output_linear.weight"

    def run(np, t, e, v):
        w_in, w_out = (t[name][e] if num_experts else t[name] for name in names)
        return w_out @ swiglu(np, *halves(w_in @ v))

    return Experts({names[0]: (*lead, 2 * f, D), names[1]: (*lead, D, f)}, run)


def ungated(act, up, down, num_experts=E, f=F, biased=False):
    """Two linear maps per expert, with biases or without."""

    def run(np, t, e, v):
        first, second = up.format(e), down.format(e)
        if biased:
            return t[f"{second}.weight"] @ act(np, t[f"{first}.weight"] @ v + t[f"{first}.bias"]) + t[f"{second}.bias"]
        return t[f"{second}.weight"] @ act(np, t[f"{first}.weight"] @ v)

    shapes = {}
    for e in range(num_experts):
        shapes |= {f"{up}.weight".format(e): (f, D), f"{down}.weight".format(e): (D, f)}
        if biased:
            shapes |= {f"{up}.bias".format(e): (f,), f"{down}.bias".format(e): (D,)}
    return Experts(shapes, run)


# ---------------------------------------------------------------- routers: [(expert, weight)] of a token


class Router(NamedTuple):
    """shapes: shapes of its tensors by name. route(np, t, v, top): the experts of v and their weights."""

    shapes: dict[str, tuple[int, ...]]
    route: Callable[..., list[tuple[int, Any]]]


def softmax(np, z):
    p = np.exp(z - np.max(z))
    return p / np.sum(p)


def softmax_router(K, normalized=True, gate="gate.weight", bias=None, scaling=1.0, eps=0.0):
    """Softmax over all experts, the K largest (with the bias), divided by their sum or not."""

    def route(np, t, v, top):
        p = softmax(np, t[gate] @ v)
        chosen = top(lambda: p if bias is None else p + t[bias].reshape(-1), K)
        total = sum(p[e] for e in chosen) + eps if normalized else 1
        return [(e, scaling * p[e] / total) for e in chosen]

    shapes = {gate: (E, D)}
    return Router(shapes if bias is None else shapes | {bias: (1, E)}, route)


def softmax_of_chosen(K, gate="router.weight", bias=None, divided_by=1):
    """The K largest logits, then their softmax."""

    def route(np, t, v, top):
        z = t[gate] @ v + (0 if bias is None else t[bias])
        chosen = top(lambda: z, K)
        p = softmax(np, np.stack([z[e] for e in chosen]))
        return [(e, p[k] / divided_by) for k, e in enumerate(chosen)]

    shapes = {gate: (E, D)}
    return Router(shapes if bias is None else shapes | {bias: (E,)}, route)


def sqrtsoftplus(np, z):
    return np.sqrt(np.log1p(np.exp(z)))


def biased_router(
    K,
    scaling=1.0,
    groups=1,
    kept_groups=1,
    gate="gate.weight",
    bias="gate.e_score_correction_bias",
    score=sigmoid,
    eps=1e-20,
    num_experts=E,
):
    """DeepSeek-V3: scores plus a bias select groups by the sum of their two best, then experts; weights are scores."""

    def route(np, t, v, top):
        s = score(np, t[gate] @ v)

        def keys():
            key = s if bias is None else s + t[bias]
            if groups == 1:
                return key
            grouped = key.reshape(groups, -1)
            best = top(lambda: np.sort(grouped, axis=1)[:, -2:].sum(1), kept_groups)
            return np.where(np.isin(np.arange(groups), best)[:, None], grouped, -np.inf).reshape(-1)

        chosen = top(keys, K)
        total = sum(s[e] for e in chosen) + eps
        return [(e, scaling * s[e] / total) for e in chosen]

    shapes = {gate: (num_experts, D)}
    return Router(shapes if bias is None else shapes | {bias: (num_experts,)}, route)


def block_of(router, experts, dense=None, after=None):
    """The usual block: the weighted sum of a token's experts, plus a dense expert."""

    def block(np, t, x, top):
        rows = []
        for v in x:
            y = sum(w * experts.run(np, t, e, v) for e, w in router.route(np, t, v, top))
            if dense is not None:
                y = y + dense.run(np, t, 0, v)
            rows.append(y if after is None else after(np, t, v, y))
        return np.stack(rows)

    return block


def usual(router, experts, dense=None, after=None, **more):
    """A `Model` of the usual block; more: shapes of further tensors."""
    shapes = router.shapes | experts.shapes | (dense.shapes if dense else {}) | more
    return Model(shapes, block_of(router, experts, dense, after))


# ---------------------------------------------------------------- other blocks


def gated_shared(name="shared_expert", gate="shared_expert_gate.weight"):
    """Qwen's: sigmoid(<x, gate>) times a dense expert."""
    dense = shared(name)

    def run(np, t, e, v):
        return sigmoid(np, t[gate] @ v)[0] * dense.run(np, t, e, v)

    return Experts(dense.shapes | {gate: (1, D)}, run)


def deepseek_v4_hash():
    experts, dense = w123(clamped(10)), shared(phi=clamped(10), gate="w1", up="w3", down="w2")

    def block(np, t, x, top, input_ids):
        rows = []
        for v, token in zip(x, input_ids, strict=True):
            s = sqrtsoftplus(np, t["gate.weight"] @ v)
            chosen = [int(e) for e in t["gate.tid2eid"][token]]
            total = sum(s[e] for e in chosen) + 1e-20
            rows.append(sum(1.5 * s[e] / total * experts.run(np, t, e, v) for e in chosen) + dense.run(np, t, 0, v))
        return np.stack(rows)

    shapes = experts.shapes | dense.shapes | {"gate.weight": (E, D), "gate.tid2eid": (20, 6)}
    return Model(shapes, block, {"input_ids": (T,)})


def deepseek_v2():
    """Groups by their largest probability; the weights are probabilities, times 16."""
    experts, dense = each(), shared()

    def route(np, t, v, top):
        p = softmax(np, t["gate.weight"] @ v)

        def keys():
            grouped = p.reshape(8, -1)
            best = top(lambda: grouped.max(1), 3)
            return np.where(np.isin(np.arange(8), best)[:, None], grouped, 0).reshape(-1)

        return [(e, 16 * p[e]) for e in top(keys, 6)]

    return usual(Router({"gate.weight": (E, D)}, route), experts, dense)


def llama4():
    """The sigmoid of an expert's logit multiplies the expert's input."""
    experts, dense = transposed(), shared("shared_expert")

    def block(np, t, x, top):
        rows = []
        for v in x:
            z = t["router.weight"] @ v
            (e,) = top(lambda z=z: z, 1)
            rows.append(experts.run(np, t, e, sigmoid(np, z[e]) * v) + dense.run(np, t, 0, v))
        return np.stack(rows)

    return Model(experts.shapes | dense.shapes | {"router.weight": (E, D)}, block)


def phimoe():
    """SparseMixer-v2 without sampling: the best expert, weighted among those near it; then again without it."""
    experts = w123()

    def near(z, left):
        best = max(left, key=lambda i: z[i])
        return best, [i for i in left if (z[best] - z[i]) / max(abs(z[i]), z[best]) <= 2 * 0.01]

    def block(np, t, x, top):
        rows = []
        for v in x:
            z = t["gate.weight"] @ v
            left, y = list(range(E)), 0
            for _ in range(2):
                e, near_best = top.remember(lambda z=z, left=left: near(z, left))
                y = y + np.exp(z[e]) / sum(np.exp(z[i]) for i in near_best) * experts.run(np, t, e, v)
                left = [i for i in left if i != e]
            rows.append(y)
        return np.stack(rows)

    def adjust(t):
        """Neighbouring experts have nearly the same logits."""
        t["gate.weight"][1::2] = 0.99 * t["gate.weight"][::2]

    return Model(experts.shapes | {"gate.weight": (E, D)}, block, adjust=adjust)


def rms(np, v, eps):
    return v / np.sqrt(np.mean(v * v) + eps)


def gemma4():
    """The router reads the normalised residual; the experts read another norm of it, x here."""
    experts = stacked(geglu_tanh)

    def block(np, t, x, top, residual):
        rows = []
        for v, r in zip(x, residual, strict=True):
            p = softmax(np, t["router.proj.weight"] @ (rms(np, r, 1e-6) * t["router.scale"] * D**-0.5))
            chosen = top(lambda p=p: p, 8)
            total, scale = sum(p[e] for e in chosen), t["router.per_expert_scale"]
            rows.append(sum(p[e] / total * scale[e] * experts.run(np, t, e, v) for e in chosen))
        return np.stack(rows)

    router = {"router.proj.weight": (E, D), "router.scale": (D,), "router.per_expert_scale": (E,)}
    return Model(experts.shapes | router, block, {"residual": (T, D)})


def longcat():
    """Probabilities over E experts and 8 identity experts."""
    experts = each()

    def block(np, t, x, top):
        rows = []
        for v in x:
            p = softmax(np, t["router.classifier.weight"] @ v)
            chosen = top(lambda p=p: p + t["router.e_score_correction_bias"], 12)
            rows.append(sum(6 * p[e] * (experts.run(np, t, e, v) if e < E else v) for e in chosen))
        return np.stack(rows)

    router = {"router.classifier.weight": (E + 8, D), "router.e_score_correction_bias": (E + 8,)}
    return Model(experts.shapes | router, block)


def kimi_k3():
    """Experts of a smaller width L; their sum is normalised before the projection back to D."""
    L = F
    router, dense = biased_router(16, 2.827, num_experts=32), shared(phi=softcapped)
    experts = w123(softcapped, d=L, num_experts=32)
    down, norm, up = (f"routed_expert_{name}.weight" for name in ("down_proj", "norm", "up_proj"))

    def block(np, t, x, top):
        rows = []
        for v in x:
            small = t[down] @ v
            y = sum(w * experts.run(np, t, e, small) for e, w in router.route(np, t, v, top))
            rows.append(t[up] @ (rms(np, y, 1e-5) * t[norm]) + dense.run(np, t, 0, v))
        return np.stack(rows)

    return Model(router.shapes | experts.shapes | dense.shapes | {down: (L, D), norm: (L,), up: (D, L)}, block)


def inkling():
    """The weights of 6 experts and of 2 shared ones are sigmoids divided by their common sum."""
    experts = stacked(split=alternating, names=("experts.w13_weight", "experts.w2_weight"))
    dense = stacked(
        split=alternating, names=("shared_experts.shared_w13_weight", "shared_experts.shared_w2_weight"), f=S
    )

    def block(np, t, x, top):
        rows = []
        for v in x:
            s = sigmoid(np, t["gate.weight"] @ v)
            chosen = top(lambda s=s: s[:E] + t["gate.bias"], 6)
            total = sum(s[e] for e in chosen) + s[E] + s[E + 1]
            y = sum(s[e] / total * experts.run(np, t, e, v) for e in chosen)
            y = y + sum(s[E + i] / total * dense.run(np, t, i, v) for i in range(2))
            rows.append(8 * t["gate.global_scale"][0] * y)
        return np.stack(rows)

    two = {name: (2, *shape[1:]) for name, shape in dense.shapes.items()}
    router = {"gate.weight": (E + 2, D), "gate.bias": (E,), "gate.global_scale": (1,)}
    return Model(router | experts.shapes | two, block)


def laguna():
    """Logits pass through 8 tanh(z / 8)."""

    def score(np, z):
        return sigmoid(np, 8 * np.tanh(z / 8))

    return usual(
        biased_router(8, 2.5, bias="experts.e_score_correction_bias", score=score, eps=0),
        each(),
        shared("shared_expert"),
    )


def kolibri():
    """Logits with a bias choose; the weights are the sigmoids of logits."""
    experts, dense = each(at="mlp.experts.{}."), shared("mlp.shared_experts")

    def route(np, t, v, top):
        z = t["mlp.gate.weight"] @ v
        chosen = top(lambda: z + t["moe.router.expert_bias"], 8)
        s = [sigmoid(np, z[e]) for e in chosen]
        return [(e, w / sum(s)) for e, w in zip(chosen, s, strict=True)]

    return usual(Router({"mlp.gate.weight": (E, D), "moe.router.expert_bias": (E,)}, route), experts, dense)


def gelu_erf(np, z):
    erf = getattr(np, "erf", None) or (lambda z: np.stack([math.erf(v) for v in z]))
    return 0.5 * z * (1 + erf(z / math.sqrt(2)))


def zaya():
    """The router is a network on a state that is passed from layer to layer; class E means no expert."""
    experts, C = stacked(), S
    at = "gate.router_mlp."

    def block(np, t, x, top, states):
        rows = []
        for v, state in zip(x, states, strict=True):
            r = t["gate.down_proj.weight"] @ v + t["gate.down_proj.bias"] + state * t["gate.router_states_scale"]
            r = rms(np, r, 1e-6) * t[f"{at}norm.weight"]
            for layer in ("fc1", "fc2"):
                r = gelu_erf(np, t[f"{at}{layer}.weight"] @ r + t[f"{at}{layer}.bias"])
            p = softmax(np, t[f"{at}out_proj.weight"] @ r)
            (e,) = top(lambda p=p: p + t["gate.balancing_biases"], 1)
            rows.append(p[e] * experts.run(np, t, e, v) if e < E else 0 * v)
        return np.stack(rows)

    router = {
        "gate.down_proj.weight": (C, D),
        "gate.down_proj.bias": (C,),
        "gate.router_states_scale": (C,),
        f"{at}norm.weight": (C,),
        f"{at}fc1.weight": (C, C),
        f"{at}fc1.bias": (C,),
        f"{at}fc2.weight": (C, C),
        f"{at}fc2.bias": (C,),
        f"{at}out_proj.weight": (E + 1, C),
        "gate.balancing_biases": (E + 1,),
    }

    def adjust(t):
        """Removes the common positive part of intermediate values, so that tokens select different experts, one none."""
        t[f"{at}out_proj.weight"] -= t[f"{at}out_proj.weight"].mean(axis=1, keepdims=True)
        t["gate.balancing_biases"] *= 0.1
        t["gate.balancing_biases"][E] = 0.2

    return Model(experts.shapes | router, block, {"states": (T, C)}, adjust)


def muse_spark():
    """Experts of a smaller width L between two linear maps; the output of each is normalised before its weight."""
    L = F
    experts = stacked(d=L)
    names = (
        "pre_expert_proj.weight",
        "pre_expert_norm.weight",
        "experts.post_expert_norm.weight",
        "post_expert_proj.weight",
    )

    def score(np, z):
        return sigmoid(np, z * 0.1767766952966369)

    router = biased_router(8, score=score, eps=1e-15)

    def block(np, t, x, top):
        down, norm, expert_norm, up = (t[name] for name in names)
        rows = []
        for v in x:
            small = rms(np, down @ v, 1e-5) * (1 + norm)
            chosen = router.route(np, t, v, top)
            rows.append(
                up @ sum(w * rms(np, experts.run(np, t, e, small) * (1 + expert_norm), 1e-8) for e, w in chosen)
            )
        return np.stack(rows)

    shapes = router.shapes | experts.shapes | dict(zip(names, [(L, D), (L,), (L,), (D, L)], strict=True))
    return Model(shapes, block)


def switch():
    """The best expert, if fewer than its capacity of 2 tokens precede; its probability is the weight."""
    experts = ungated(relu, "experts.expert_{}.wi", "experts.expert_{}.wo")

    def block(np, t, x, top):
        rows, load = [], [0] * E
        for v in x:
            p = softmax(np, t["router.classifier.weight"] @ v)
            (e,) = top(lambda p=p: p, 1)
            load[e] += 1
            rows.append(p[e] * experts.run(np, t, e, v) if load[e] <= 2 else 0 * v)
        return np.stack(rows)

    return Model(experts.shapes | {"router.classifier.weight": (E, D)}, block)


MIXTRAL = usual(softmax_router(2), w123())
QWEN3 = usual(softmax_router(8), each())
OLMOE = usual(softmax_router(8, normalized=False), each())
DEEPSEEK_V3 = usual(biased_router(8, 2.5, 8, 4), each(), shared())
WITHOUT_GROUPS = usual(biased_router(8, 2.5), each(), shared())
WITHOUT_SHARED = usual(biased_router(8, 2.5), each())
OAI = oai(1.702, 7)
LINEAR_ROUTER = "router.layer.weight"
HY_V4 = usual(biased_router(8, 2.827), stacked(clamped(10)), shared())
INKLING2 = usual(
    biased_router(8, 8.0, bias="gate.bias"),
    stacked(softcapped, alternating, ("experts.w13_weight", "experts.w2_weight")),
)

MODELS: dict[str, Model] = {
    "mixtral": MIXTRAL,
    "minimax": MIXTRAL,
    "qwen2_moe": usual(softmax_router(4, normalized=False), each(), gated_shared()),
    "qwen3_moe": QWEN3,
    "qwen3_omni_moe": QWEN3,
    "mellum": QWEN3,
    "qwen3_vl_moe": usual(softmax_router(8), transposed()),
    "qwen3_next": usual(softmax_router(10), each(), gated_shared()),
    "qwen3_5_moe": usual(softmax_router(10), each(), gated_shared()),
    "olmoe": OLMOE,
    "flex_olmo": OLMOE,
    "jamba": usual(softmax_router(2, normalized=False, gate="router.weight"), each()),
    "granitemoe": usual(softmax_of_chosen(8, LINEAR_ROUTER), pair_of_linear("")),
    "granitemoeshared": usual(
        softmax_of_chosen(8, f"block_sparse_moe.{LINEAR_ROUTER}"),
        pair_of_linear("block_sparse_moe."),
        pair_of_linear("shared_mlp.", S, 0),
    ),
    "jetmoe": usual(
        softmax_of_chosen(2, LINEAR_ROUTER), pair_of_linear(""), after=lambda np, t, v, y: y + t["bias"], bias=(D,)
    ),
    "aria": usual(softmax_of_chosen(6), transposed(names=("experts.fc1.weight", "experts.fc2.weight")), shared()),
    "hunyuan_v1_moe": usual(softmax_router(8, gate="gate.wg.weight"), each(), shared("shared_mlp")),
    "cohere2_moe": usual(softmax_of_chosen(2, "gate.weight"), each(), shared(), after=lambda np, t, v, y: y / 2),
    "ernie4_5_moe": usual(softmax_router(6, bias="moe_statics.e_score_correction_bias"), each(), shared()),
    "deepseek_v2": usual(softmax_router(6, normalized=False), each(), shared()),
    "deepseek_v2 groups": deepseek_v2(),
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V3,
    "kimi_k25": DEEPSEEK_V3,
    "bailing_hybrid": usual(biased_router(8, 2.5, 8, 4, bias="gate.expert_bias"), each(), shared()),
    **dict.fromkeys(
        ("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "dots1", "solar_open", "axk1", "axk2"), WITHOUT_GROUPS
    ),
    "exaone_moe": usual(biased_router(8, 2.5, bias="e_score_correction_bias"), each(), shared()),
    "afmoe": usual(biased_router(8, 2.5, gate="router.gate.weight", bias="expert_bias"), each(), shared()),
    "hy_v3": usual(biased_router(8, 2.5, gate="router.gate.weight", bias="expert_bias"), each(), shared("shared_mlp")),
    "kimi_linear": usual(biased_router(8, 2.446), w123(), shared()),
    "mimo_v2_flash": WITHOUT_SHARED,
    "beam": WITHOUT_SHARED,
    "glm5_next": usual(biased_router(8, 2.5), each(clamped(10)), shared(phi=clamped(10))),
    "hy_v4": HY_V4,
    "hy_v4_vl": HY_V4,
    "deepseek_v4": usual(
        biased_router(6, 1.5, bias="gate.bias", score=sqrtsoftplus),
        w123(clamped(10)),
        shared(phi=clamped(10), gate="w1", up="w3", down="w2"),
    ),
    "deepseek_v4_hash": deepseek_v4_hash(),
    "minimax_m2": usual(biased_router(8, bias="e_score_correction_bias", eps=0), w123()),
    "minimax_m3_vl": usual(biased_router(4, 2.0, bias="e_score_correction_bias", eps=0), w123(OAI), shared(phi=OAI)),
    "gpt_oss": usual(softmax_of_chosen(4, bias="router.bias"), transposed(OAI, alternating, biased=True)),
    "openai_privacy_filter": usual(
        softmax_of_chosen(4, bias="router.bias", divided_by=4), transposed(OAI, biased=True)
    ),
    "inkling2": INKLING2,
    "inkling2_loop": INKLING2,
    "nemotron_h": usual(
        biased_router(6, 2.5),
        ungated(relu2, "experts.{}.up_proj", "experts.{}.down_proj"),
        ungated(relu2, "shared_experts.up_proj", "shared_experts.down_proj", 1, S),
    ),
    "lfm2_moe": usual(biased_router(4, bias="expert_bias", eps=1e-6), w123()),
    "mistral4": usual(softmax_router(4, eps=1e-20), stacked(), shared()),
    "lara_mini": usual(softmax_router(4), stacked(), shared("shared_expert")),
    "flint": usual(biased_router(8, bias=None, eps=0), each(), shared("shared_expert")),
    "nllb_moe": usual(
        softmax_router(2, gate="router.classifier.weight"),
        ungated(relu, "experts.expert_{}.fc1", "experts.expert_{}.fc2", biased=True),
    ),
    "llama4": llama4(),
    "phimoe": phimoe(),
    "gemma4": gemma4(),
    "diffusion_gemma": gemma4(),
    "longcat_flash": longcat(),
    "kimi_k3": kimi_k3(),
    "inkling": inkling(),
    "laguna": laguna(),
    "kolibri1": kolibri(),
    "zaya": zaya(),
    "muse_spark": muse_spark(),
    "switch_transformers": switch(),
}


def _step3p7():
    names = "moe.gate_proj.weight", "moe.up_proj.weight", "moe.down_proj.weight"

    def run(np, t, e, v):
        w_gate, w_up, w_down = (t[name][e] for name in names)
        return w_down @ then_clamped(7)(np, w_gate @ v, w_up @ v)

    experts = Experts(dict(zip(names, [(E, F, D), (E, F, D), (E, D, F)], strict=True)), run)
    return usual(
        biased_router(8, 3.0, gate="moe.gate.weight", bias="moe.router_bias", eps=0),
        experts,
        shared("share_expert", then_clamped(16)),
    )


def _dbrx():
    """w1, v1 and w2 are all [E F, D]; w2 is transposed relative to a linear map's weight."""
    names = [f"experts.mlp.{name}" for name in ("w1", "v1", "w2")]

    def run(np, t, e, v):
        w1, v1, w2 = (t[name][e * F : (e + 1) * F] for name in names)
        return swiglu(np, w1 @ v, v1 @ v) @ w2

    experts = Experts(dict.fromkeys(names, (E * F, D)), run)
    return usual(softmax_router(4, gate=LINEAR_ROUTER), experts)


MODELS |= {"step3p7": _step3p7(), "dbrx": _dbrx()}
