"""The activations of the experts: names, parameters, and values and gradients in numpy float64.

An activation is a function phi(g, u) of a gate g and an up projection u. A plain activation has one input: it computes
act(g) u in a gated expert and act(h) in an ungated one.
"""

import dataclasses
import math
import numbers
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch._text import shown, typed

#: In the order of `ab_activation` in include/anabranch/experts.h.
NAMES = (
    "silu",
    "gelu",
    "relu",
    "relu2",
    "gelu_erf",
    "quick_gelu",
    "linear",
    "swiglu_clamped",
    "swiglu_oai",
    "swiglu_then_clamp",
    "situ",
)
PLAIN = NAMES[:7]
"""Activations with one input."""

_ALIASES = {"swish": "silu"}
_DEFAULTS = {"swiglu_oai": (1.702, 7.0), "situ": (4.0, 25.0)}
"""Default (alpha, limit) of parametrised activations that a name alone may select."""
_FLOAT32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The smallest and the largest normal float32 number."""
_EXPECTED = f"a finite number above 0 that float32 holds, in [{_FLOAT32[0]:.4g}, {_FLOAT32[1]:.4g}]"


def _parameter(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: got {typed(value)}, expected {_EXPECTED}")
    try:
        held = float(value)
    except OverflowError:
        held = math.inf
    if not _FLOAT32[0] <= held <= _FLOAT32[1]:
        raise ValueError(f"{name}: got {shown(value)}, expected {_EXPECTED}")
    return held


@dataclasses.dataclass(frozen=True)
class Activation:
    """An activation with its parameters; `activation=` accepts it or a name.

    Use the constructors `glu`, `swiglu_clamped`, `swiglu_oai`, `swiglu_then_clamp` and `situ`. In their formulas
    g' = min(g, limit) and u' = clamp(u, -limit, limit). A clamp's gradient is 1 inside and at the limit, 0 outside.

    Attributes:
      name: one of `NAMES`.
      alpha, limit: the parameters, finite and above 0; 0 if the activation has none. For `situ` they are a and b.

    Raises:
      TypeError: a parameter is not a number.
      ValueError: an unknown name, or a parameter out of range.

    >>> Activation.swiglu_oai()
    Activation(name='swiglu_oai', alpha=1.702, limit=7.0)
    """

    name: str
    alpha: float = 0.0
    limit: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in NAMES:
            raise ValueError(f"name: got {shown(self.name)}, expected one of {', '.join(map(repr, NAMES))}")
        has = {"alpha": self.name in _DEFAULTS, "limit": self.name not in PLAIN}
        for parameter in ("alpha", "limit"):
            value = getattr(self, parameter)
            if has[parameter]:
                object.__setattr__(self, parameter, _parameter(parameter, value))
            elif isinstance(value, bool) or not isinstance(value, numbers.Real) or value != 0:
                raise ValueError(f"{parameter}: got {shown(value)}, expected 0: {self.name} has no such parameter")

    @classmethod
    def glu(cls, act: str) -> "Activation":
        """act(g) u, or act(h) in an ungated expert. `act`: one of `PLAIN`, or "swish"; `activation=act` is the same."""
        name = _ALIASES.get(act, act) if isinstance(act, str) else act
        if name not in PLAIN:
            raise ValueError(f"act: got {shown(act)}, expected one of {', '.join(map(repr, (*PLAIN, *_ALIASES)))}")
        return cls(name)

    @classmethod
    def swiglu_clamped(cls, limit: float) -> "Activation":
        """silu(g') u', as in DeepSeek-V4 and GLM-5.3-Flash (limit 10)."""
        return cls("swiglu_clamped", limit=limit)

    @classmethod
    def swiglu_oai(cls, alpha: float = 1.702, limit: float = 7.0) -> "Activation":
        """g' sigmoid(alpha g') (u' + 1), as in gpt-oss and MiniMax-M3."""
        return cls("swiglu_oai", alpha, limit)

    @classmethod
    def swiglu_then_clamp(cls, limit: float) -> "Activation":
        """min(silu(g), limit) u', as in Step-3.7."""
        return cls("swiglu_then_clamp", limit=limit)

    @classmethod
    def situ(cls, a: float = 4.0, b: float = 25.0) -> "Activation":
        """a tanh(g/a) sigmoid(g) b tanh(u/b), as in Kimi-K3."""
        return cls("situ", _parameter("a", a), _parameter("b", b))

    @property
    def number(self) -> int:
        """The activation's `ab_activation` value."""
        return NAMES.index(self.name)

    @property
    def gated_only(self) -> bool:
        """Whether the activation has two inputs, so that ungated experts can't use it."""
        return self.name not in PLAIN


def as_activation(value: Any, parts: int | None = None, argument: str = "activation") -> Activation:
    """Converts the argument `activation`, a name or an `Activation`.

    Args:
      value: a plain name, "swish" for "silu", "swiglu_oai" or "situ" with their default parameters, or an `Activation`.
      parts: P of the experts, 2 or 1; None: not known yet.
      argument: the argument's name, for messages.

    Raises:
      TypeError: neither a name nor an `Activation`.
      ValueError: an unknown name, one that needs parameters, or one with two inputs for ungated experts.
    """
    if isinstance(value, str):
        name = _ALIASES.get(value, value)
        if name not in PLAIN and name not in _DEFAULTS:
            names = ", ".join(map(repr, (*PLAIN, *_ALIASES, *_DEFAULTS)))
            raise ValueError(f"{argument}: got {shown(value)}, expected one of {names}, or an Activation")
        value = Activation(name, *_DEFAULTS.get(name, ()))
    if not isinstance(value, Activation):
        raise TypeError(f"{argument}: got {typed(value)}, expected a name or an Activation")
    if parts == 1 and value.gated_only:
        raise ValueError(
            f"{argument}: got {value.name}, which has two inputs, expected one of {', '.join(map(repr, PLAIN))}, since "
            "the experts are ungated"
        )
    return value


# ---------------------------------------------------------------- values and gradients in float64

_GELU_SCALE = np.sqrt(2 / np.pi)
_GELU_CUBIC = 0.044715
"""gelu(h) = h/2 (1 + tanh(_GELU_SCALE (h + _GELU_CUBIC h^3)))."""
_QUICK_GELU_SCALE = 1.702
"""quick_gelu(h) = h sigmoid(_QUICK_GELU_SCALE h)."""


def _sigmoid(h: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-h))


def _gelu_tanh(h: np.ndarray) -> np.ndarray:
    return np.tanh(_GELU_SCALE * (h + _GELU_CUBIC * h**3))


def _normal_cdf(h: np.ndarray) -> np.ndarray:
    """Phi(h), the cumulative distribution function of the standard normal distribution."""
    return np.vectorize(math.erfc, otypes=[float])(-h / np.sqrt(2)) / 2


def activation(h: npt.ArrayLike, name: str) -> np.ndarray:
    """act(h) for one of `PLAIN`: float64, shape of h."""
    h = np.asarray(h, np.float64)
    if name in ("silu", "swish"):
        return h * _sigmoid(h)
    if name == "gelu":
        return h / 2 * (1 + _gelu_tanh(h))
    if name == "gelu_erf":
        return h * _normal_cdf(h)
    if name == "quick_gelu":
        return h * _sigmoid(_QUICK_GELU_SCALE * h)
    if name == "relu":
        return np.maximum(h, 0)
    if name == "relu2":
        return np.maximum(h, 0) ** 2
    if name == "linear":
        return h.copy()
    raise ValueError(f"activation: got {name!r}, expected one of {', '.join(map(repr, PLAIN))}")


def activation_gradient(h: npt.ArrayLike, name: str) -> np.ndarray:
    """act'(h), with relu'(0) = 0: float64, shape of h."""
    h = np.asarray(h, np.float64)
    if name in ("silu", "swish"):
        s = _sigmoid(h)
        return s * (1 + h * (1 - s))
    if name == "gelu":
        t = _gelu_tanh(h)
        return (1 + t) / 2 + h / 2 * (1 - t**2) * _GELU_SCALE * (1 + 3 * _GELU_CUBIC * h**2)
    if name == "gelu_erf":
        return _normal_cdf(h) + h * np.exp(-(h**2) / 2) / np.sqrt(2 * np.pi)
    if name == "quick_gelu":
        s = _sigmoid(_QUICK_GELU_SCALE * h)
        return s * (1 + _QUICK_GELU_SCALE * h * (1 - s))
    if name == "relu":
        return np.where(h > 0, 1.0, np.where(np.isnan(h), h, 0.0))
    if name == "relu2":
        return 2 * np.maximum(h, 0)
    if name == "linear":
        return np.ones_like(h)
    raise ValueError(f"activation: got {name!r}, expected one of {', '.join(map(repr, PLAIN))}")


def gated_activation(g: npt.ArrayLike, u: npt.ArrayLike, act: str | Activation) -> np.ndarray:
    """phi(g, u) of gate g and up u: float64, shape of g."""
    g, u, act = np.asarray(g, np.float64), np.asarray(u, np.float64), as_activation(act)
    inside, clamped = np.minimum(g, act.limit), np.clip(u, -act.limit, act.limit)
    if act.name == "swiglu_clamped":
        return activation(inside, "silu") * clamped
    if act.name == "swiglu_oai":
        return inside * _sigmoid(act.alpha * inside) * (clamped + 1)
    if act.name == "swiglu_then_clamp":
        return np.minimum(activation(g, "silu"), act.limit) * clamped
    if act.name == "situ":
        return act.alpha * np.tanh(g / act.alpha) * _sigmoid(g) * act.limit * np.tanh(u / act.limit)
    return activation(g, act.name) * u


def gated_activation_gradients(
    g: npt.ArrayLike, u: npt.ArrayLike, act: str | Activation
) -> tuple[np.ndarray, np.ndarray]:
    """(dphi/dg, dphi/du), float64, shape of g each. At a limit: the derivative from inside; past it: 0."""
    g, u, act = np.asarray(g, np.float64), np.asarray(u, np.float64), as_activation(act)
    inside, clamped = np.minimum(g, act.limit), np.clip(u, -act.limit, act.limit)
    g_passes = np.where(g > act.limit, 0.0, 1.0)
    u_passes = np.where(np.abs(u) > act.limit, 0.0, 1.0)
    if act.name == "swiglu_clamped":
        return (
            activation_gradient(inside, "silu") * clamped * g_passes,
            activation(inside, "silu") * u_passes,
        )
    if act.name == "swiglu_oai":
        s = _sigmoid(act.alpha * inside)
        slope = s * (1 + act.alpha * inside * (1 - s))
        return slope * (clamped + 1) * g_passes, inside * s * u_passes
    if act.name == "swiglu_then_clamp":
        value = activation(g, "silu")
        passes = np.where(value > act.limit, 0.0, 1.0)
        return activation_gradient(g, "silu") * clamped * passes, np.minimum(value, act.limit) * u_passes
    if act.name == "situ":
        s, t, v = _sigmoid(g), np.tanh(g / act.alpha), np.tanh(u / act.limit)
        by_gate = s / np.cosh(g / act.alpha) ** 2 + act.alpha * t * s * (1 - s)
        return by_gate * act.limit * v, act.alpha * t * s / np.cosh(u / act.limit) ** 2
    return activation_gradient(g, act.name) * u, activation(g, act.name)
