"""The options of a router, of the experts and of the whole layer: names, types, defaults, checks and documentation.

Both front ends share them. A public function takes them as keyword arguments (`**options: Unpack[LayerKeywords]`) and
builds a `LayerOptions`, which checks them. `takes_options` adds them to the function's signature and docstring.
`RouterOptions` and `ExpertsConfig` are the checked forms that the operations take.
"""

import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, Self, TypedDict, TypeVar

from anabranch import checks
from anabranch._text import shown
from anabranch.activation import Activation, as_activation
from anabranch.layouts import IN_LAYOUTS, OURS, OUT_LAYOUTS, Layouts
from anabranch.lora import Lora, check_scales
from anabranch.precision import FP8, HIGHEST, check_fp8, precision_number

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
MOST_BINS = 2**20
"""Upper bound on the bins of a quantile-balancing histogram."""


# ---------------------------------------------------------------- names and types


class RouterKeywords(TypedDict, total=False):
    """The options of a router except topk and qb_bins."""

    score_function: str
    normalize: bool
    num_groups: int | None
    group_topk: int | None
    group_score_topk: int | None
    scaling_factor: float


class NetworkKeywords(TypedDict, total=False):
    """The options of the experts except the layouts of their weights."""

    activation: str | Activation
    weight_early: bool
    precision: str
    fp8_scales: str


class LayoutKeywords(TypedDict, total=False):
    """The layouts of the experts' weights."""

    w_in_layout: str
    w_out_layout: str


class ExpertsKeywords(NetworkKeywords, LayoutKeywords, total=False):
    """The options of the experts."""

    lora_scale: float | tuple[float, float]


class RoutedKeywords(ExpertsKeywords, total=False):
    """The options of `routed_experts`."""

    align_size: int


class ModuleKeywords(RouterKeywords, NetworkKeywords, total=False):
    """The options of a layer that determines the layouts of its weights itself."""

    aux_loss_coeff: float
    z_loss_coeff: float
    align_size: int


class LayoutModuleKeywords(ModuleKeywords, LayoutKeywords, total=False):
    """The options of a layer whose caller chooses the layouts of its weights."""


class LayerKeywords(ModuleKeywords, RoutedKeywords, total=False):
    """The options of `moe` except topk and qb_bins."""


ROUTER_NAMES = tuple(typing.get_type_hints(RouterKeywords))
EXPERTS_NAMES = tuple(typing.get_type_hints(ExpertsKeywords))
ROUTED_NAMES = tuple(typing.get_type_hints(RoutedKeywords))
MODULE_NAMES = tuple(typing.get_type_hints(ModuleKeywords))
LAYOUT_MODULE_NAMES = tuple(typing.get_type_hints(LayoutModuleKeywords))
LAYER_NAMES = tuple(typing.get_type_hints(LayerKeywords))


# ---------------------------------------------------------------- routers


@dataclasses.dataclass(frozen=True)
class RouterOptions:
    """The checked options of a router, as `router_options` returns them; 0 means "no groups" and "no histogram"."""

    topk: int
    score_function: str = "softmax"
    normalize: bool = True
    num_groups: int = 0
    group_topk: int = 0
    scaling_factor: float = 1.0
    sequence_stats: bool = False
    group_score_topk: int = 0
    qb_bins: int = 0

    def numbers(self) -> "Router":
        """These options in the C library's form."""
        return Router(
            self.topk,
            SCORE_FUNCTIONS.index(self.score_function),
            self.normalize,
            float(self.scaling_factor),
            self.num_groups,
            self.group_topk,
            self.group_score_topk,
        )

    def without_selection(self) -> "RouterOptions":
        """These options without groups and quantile balancing, which have no effect if the selection is given."""
        return RouterOptions(
            self.topk,
            self.score_function,
            self.normalize,
            scaling_factor=self.scaling_factor,
            sequence_stats=self.sequence_stats,
        )

    @property
    def reads_lse(self) -> bool:
        """Whether the backward pass reads lse even if lse has no cotangent."""
        return self.score_function == "softmax"


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
    """Checks the options of a router over `num_experts` experts.

    num_groups, group_topk: None, 0 and -1 mean "no groups". group_score_topk None: a group's score is the sum of its
    topk / group_topk best scores. qb_bins None: no quantile balancing.

    Raises:
      TypeError: an option has the wrong type, for example a traced array.
      ValueError: an option is out of range, or options contradict each other.
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
    groups, chosen, score_topk = grouping
    return RouterOptions(
        topk, score_function, normalize, groups, chosen, scaling_factor, sequence_stats, score_topk, bins
    )


def _grouping(
    num_experts: int, topk: int, num_groups: int | None, group_topk: int | None, group_score_topk: int | None
) -> tuple[int, int, int]:
    """Checked (num_groups, group_topk, group_score_topk); 0 where unused."""
    groups = 0 if num_groups is None else checks.integer("num_groups", num_groups, -1, num_experts)
    chosen = 0 if group_topk is None else checks.integer("group_topk", group_topk, -1, num_experts)
    if max(groups, 0) == 0 and max(chosen, 0) == 0:
        if group_score_topk is not None:
            raise ValueError(f"group_score_topk: got {shown(group_score_topk)} without groups, expected None")
        return 0, 0, 0
    if groups < 1 or num_experts % groups:
        raise ValueError(
            f"num_groups: got {num_groups}, expected a divisor of {num_experts} experts, with group_topk (or neither)"
        )
    per_group = num_experts // groups
    if group_score_topk is None:
        if not 1 <= chosen <= groups or topk % chosen or topk // chosen > per_group:
            raise ValueError(
                f"group_topk: got {group_topk}, expected 1 <= group_topk <= num_groups {groups}, a divisor of "
                f"topk {topk}, and topk / group_topk <= {per_group} experts per group"
            )
        return groups, chosen, 0
    group_score_topk = checks.integer("group_score_topk", group_score_topk, 1, per_group)
    if not 1 <= chosen <= groups or topk > chosen * per_group:
        raise ValueError(
            f"group_topk: got {group_topk}, expected 1 <= group_topk <= num_groups {groups}, and topk {topk} <= "
            f"group_topk * {per_group} experts per group"
        )
    return groups, chosen, group_score_topk


class Router(NamedTuple):
    """The options that the C library's router takes, as numbers."""

    topk: int
    score_function: int
    normalize: bool
    scaling_factor: float
    num_groups: int
    group_topk: int
    group_score_topk: int

    def forward(self) -> dict[str, Any]:
        """The options of the forward pass."""
        return self._asdict() | {"normalize": int(self.normalize)}

    def backward(self) -> dict[str, Any]:
        """The options of the backward pass, which does not need the groups."""
        selection = ("num_groups", "group_topk", "group_score_topk")
        return {name: value for name, value in self.forward().items() if name not in selection}


# ---------------------------------------------------------------- experts


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The checked options of the experts' feed-forward network."""

    activation: Activation
    weight_early: bool = False
    """Weights multiply before W_out instead of after it."""
    topk: int = 0
    """K where x holds tokens and slot_of_row says which token a row reads; 0 where x holds rows."""
    layouts: Layouts = OURS
    """Layouts of w_in and w_out, and so of b_in and h."""
    precision: int = HIGHEST
    """A number of `anabranch.precision.NUMBERS`."""
    fp8_scales: int = 0
    """A number of `anabranch.precision.FP8_SCALES`."""
    lora_scales: tuple[float, float] = (0.0, 0.0)
    """(s_in, s_out); 0 for a projection without an adapter."""

    @property
    def fp8(self) -> bool:
        """Whether operands of the GEMMs are quantised."""
        return self.precision == FP8

    def attributes(self) -> dict[str, Any]:
        """The options that the C library's feed-forward network takes in both passes."""
        return self.network().attributes()

    def network(self) -> "Network":
        """These options as a `Network`."""
        return Network(
            self.activation.number,
            self.activation.alpha,
            self.activation.limit,
            self.weight_early,
            self.topk,
            *self.layouts,
            self.precision,
            self.fp8_scales,
            *self.lora_scales,
        )


class Network(NamedTuple):
    """An `ExpertsConfig` as numbers and names, the form in which a torch operator's schema contains it."""

    activation: int
    activation_alpha: float
    activation_limit: float
    weight_early: bool
    topk: int
    w_in_layout: str
    w_out_layout: str
    precision: int
    fp8_scales: int
    lora_scale_in: float
    lora_scale_out: float

    def attributes(self) -> dict[str, Any]:
        """The options that the C library's feed-forward network takes in both passes."""
        python_only = ("weight_early", "w_in_layout", "w_out_layout")
        return {name: value for name, value in self._asdict().items() if name not in python_only}


def schema_of(options: type) -> str:
    """The fields of a NamedTuple as part of the schema of a torch operator.

    >>> schema_of(Router)[:42]
    'int topk, int score_function, bool normali'
    """
    return ", ".join(f"{kind.__name__} {name}" for name, kind in typing.get_type_hints(options).items())


def _option(default: Any, doc: str = "") -> Any:
    """A field with its documentation; "" if the documentation of the next field covers it."""
    return dataclasses.field(default=default, metadata={"doc": doc})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsOptions:
    """The options of the experts as a caller gives them."""

    activation: str | Activation = _option(
        "silu",
        'a name, "silu" (or "swish"), "gelu" (tanh form), "gelu_erf", "quick_gelu", "relu", "relu2" or "linear", for '
        "act(h_gate) h_up, or an `Activation`, which may have two inputs and parameters.",
    )
    weight_early: bool = _option(False, "multiply by the weights before W_out instead of at the combine; same result.")
    w_in_layout: str = _option("dpf")
    w_out_layout: str = _option(
        "fd",
        'the order of the axes of w_in and w_out after E. "pfd" and "df" are those of PyTorch\'s Linear, '
        '[E, 2, F, D] and [E, D, F]; "dfp" and "fpd" interleave gate and up, with b_in [E, F, 2 or 1]. Nothing is '
        "copied or transposed, and gradients have the layout of their weights.",
    )
    precision: str = _option(
        "highest",
        'how the experts\' GEMMs, forward and backward, multiply float32 operands. "highest": as float32; a GPU '
        "splits operands into 16-bit parts for tensor cores, with an error at float32's level. "
        '"tf32": a GPU may round operands to TF32, with a relative error of at most 2^-10; sums stay float32, and a '
        'CPU computes as with "highest". Neither affects bfloat16, float16 or the logits. "fp8": x, w_in, w_out and '
        "the intermediate activations are quantised to float8_e4m3fn as operands of the GEMMs, from any dtype, with "
        "one scale per 128 elements of a row and per 128 x 128 block of a matrix; so are the operands of the gradient "
        "of x. Gradients of the experts' matrices, the gate and all sums are not affected. D and F are multiples of "
        "128; on a GPU, which must have compute capability 9.0, x is bfloat16 or float16. "
        "`anabranch.choose_precision` predicts whether FP8 is faster.",
    )
    fp8_scales: str = _option(
        "float32",
        'with "fp8", the scale of a block: "float32" is its largest absolute value / 448, "power_of_two" is that value '
        "rounded up to a power of two.",
    )
    lora_scale: float | tuple[float, float] = _option(
        1.0,
        "with `lora`, the finite number s that multiplies A B, or one for w_in and one for w_out. It has no gradient.",
    )

    def experts(self, parts: int, topk: int, lora: Lora | None = None) -> ExpertsConfig:
        """Checks the options of the experts.

        Args:
          parts: P of w_in, 2 (gate and up) or 1.
          topk: K where x holds tokens, 0 where it holds rows.
          lora: the checked factors of the adapters.
        """
        precision = precision_number(self.precision)
        return ExpertsConfig(
            as_activation(self.activation, parts),
            checks.boolean("weight_early", self.weight_early),
            topk,
            self.layouts(),
            precision,
            check_fp8(precision, self.fp8_scales),
            check_scales(self.lora_scale, lora),
        )

    def layouts(self) -> Layouts:
        """The checked layouts of w_in and w_out."""
        return check_layouts(self.w_in_layout, self.w_out_layout)

    def key(self) -> Any:
        """The values with their types, for a cache: 2.0 and True are distinct from 2. It may be unhashable."""
        key = self.__dict__.get("_key")
        if key is None:
            values = tuple(getattr(self, field.name) for field in dataclasses.fields(self))
            key = values, tuple(map(type, values))
            object.__setattr__(self, "_key", key)
        return key


def check_layouts(w_in_layout: Any, w_out_layout: Any) -> Layouts:
    """Checks the arguments w_in_layout and w_out_layout."""
    return Layouts(
        checks.choice("w_in_layout", w_in_layout, IN_LAYOUTS), checks.choice("w_out_layout", w_out_layout, OUT_LAYOUTS)
    )


# ---------------------------------------------------------------- layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutedOptions(ExpertsOptions):
    """The options of `routed_experts` as a caller gives them."""

    align_size: int = _option(
        0, "pad the rows of each expert to a multiple of this; 0: no padding. The result does not change."
    )

    def checked_align_size(self) -> int:
        """The checked `align_size`."""
        return checks.integer("align_size", self.align_size, 0, checks.INDEX_LIMIT - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerOptions(RoutedOptions):
    """The options of the whole layer as a caller gives them."""

    topk: int
    score_function: str = _option("softmax", '"softmax", "sigmoid" or "sqrtsoftplus".')
    normalize: bool = _option(True, "make the weights of a token sum to `scaling_factor`; False: raw scores.")
    num_groups: int | None = _option(None)
    group_topk: int | None = _option(None)
    group_score_topk: int | None = _option(
        None,
        "group-limited routing: first choose `group_topk` of `num_groups` contiguous groups of experts, by the sum of "
        "a group's `group_score_topk` best scores; see `route`. None: no groups.",
    )
    scaling_factor: float = _option(1.0, "finite number that multiplies the weights.")
    aux_loss_coeff: float = _option(
        0.0, "coefficient of the load-balance loss coeff E / (K N^2) sum_e score_sum[e] tokens_per_expert[e]."
    )
    z_loss_coeff: float = _option(0.0, "coefficient of the mean squared logsumexp of the logits.")
    qb_bins: int | None = _option(None, "number of bins of the histogram of quantile balancing; None: no balancing.")

    def router(self, num_experts: int) -> RouterOptions:
        """Checks the options of the router."""
        options = {name: getattr(self, name) for name in ROUTER_NAMES}
        return router_options(num_experts, self.topk, qb_bins=self.qb_bins, **options)

    def loss_coefficients(self) -> tuple[float, float]:
        """The checked (aux_loss_coeff, z_loss_coeff)."""
        return (
            checks.number("aux_loss_coeff", self.aux_loss_coeff),
            checks.number("z_loss_coeff", self.z_loss_coeff),
        )

    def without_selection(self) -> Self:
        """These options without groups and quantile balancing, which have no effect if the selection is given."""
        return dataclasses.replace(self, num_groups=None, group_topk=None, group_score_topk=None, qb_bins=None)


# ---------------------------------------------------------------- signatures and docstrings

_Function = TypeVar("_Function", bound=Callable[..., Any])


def check_names(function: str, names: Collection[str], given: Iterable[str]) -> None:
    """Raises Python's TypeError for a keyword argument that a function does not have."""
    for name in given:
        if name not in names:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def takes_options(keywords: type) -> Callable[[_Function], _Function]:
    """Adds options to a function or class that takes them as `**options: Unpack[keywords]`.

    The names, types and defaults are added to its signature. In its docstring the documentation replaces the line
    "{options}".
    """
    fields = {field.name: field for field in dataclasses.fields(LayerOptions)}
    types = typing.get_type_hints(keywords)

    def decorate(function: _Function) -> _Function:
        called = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
        signature = inspect.signature(called)
        parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters += [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=fields[name].default, annotation=types[name]
            )
            for name in types
        ]
        called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[union-attr]
        function.__doc__ = _documented(function.__doc__, [fields[name] for name in types])
        return function

    return decorate


def _documented(doc: str | None, options: list[dataclasses.Field[Any]]) -> str | None:
    """The docstring with the line "{options}" replaced by the documentation of the options."""
    if doc is None:  # python -OO
        return None
    lines = []
    for line in doc.splitlines():
        if line.strip() != "{options}":
            lines.append(line)
            continue
        indent, names = line[: line.index("{")], []
        for option in options:
            names.append(option.name)
            if text := option.metadata["doc"]:
                entry = f"{', '.join(names)}: {text}"
                lines += textwrap.wrap(entry, 120, initial_indent=indent, subsequent_indent=indent + "  ")
                names = []
        assert not names, "the last of several options that share a text must have it"
    return "\n".join(lines)
