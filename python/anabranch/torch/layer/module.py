"""The layer as an nn.Module, with parameters in the layout of common checkpoints and the state of the router."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from anabranch.lora import NAMES as LORA_NAMES
from anabranch.lora import PROJECTIONS, Lora, NewLora, factor_shapes, new_lora
from anabranch.options import MODULE_NAMES, LayerOptions, ModuleKeywords, check_names, takes_options
from anabranch.packed import check_kind, is_packed, parts_of
from anabranch.precision import BLOCK, FP8, check_fp8_widths, dense_precision
from anabranch.replay import Replay, fields_of
from anabranch.torch.binding import check, private
from anabranch.torch.binding.autocast import as_autocast
from anabranch.torch.binding.eager import is_plain_eager
from anabranch.torch.binding.group import check_group, local_part, summed, with_summed_gradients
from anabranch.torch.layer.called_gate import fork
from anabranch.torch.layer.counts import add_counts
from anabranch.torch.layer.moe import LayerTensors, MoEOutput, checked_config, run_layer
from anabranch.torch.layer.packed_buffers import (
    add_buffers,
    buffer_names,
    convert_state,
    pack,
    read_buffers,
    with_dtypes_kept,
    write_buffers,
)
from anabranch.torch.layer.parameters import Initializer, check_plain, draw, factor_uniform_, fan_in_normal_
from anabranch.torch.layer.submodules import Gate, OnRanks, SharedExpert, is_plain
from anabranch.torch.layer.wrapping import check_wrapping
from anabranch.torch.ops.packed import shape_of
from anabranch.torch.ops.quantile import host_bounds, quantile_bias
from anabranch.torch.ops.quantized import QuantizedExperts, check_current, quantize_experts
from anabranch.torch.parallel.parallel import check_parallel, check_ranks, sharded

if TYPE_CHECKING:  # some builds of torch lack it
    from torch.distributed import DeviceMesh, ProcessGroup

#: Fields of the output that a layer may accumulate.
_COUNTS = ("tokens_per_expert", "qb_histogram")
#: Dtypes from which the expert bias is converted back to float32.
_BIAS_DTYPES = (*check.FLOATS, torch.float64)


@takes_options(ModuleKeywords)
class MoE(OnRanks):
    """A Mixture-of-Experts feed-forward layer.

    Parameters have the layout of checkpoints that store the experts of a layer in one tensor. The layer uses views of
    them, without copies:

    | name | shape | condition |
    |---|---|---|
    | `gate.weight`, `gate.bias` | [E, D], [E] | bias with `use_gate_bias` |
    | `gate_up_proj`, `gate_up_proj_bias` | [E, 2 F, D], [E, 2 F] | gate rows, then up; `interleaved`: alternating |
    | `up_proj`, `up_proj_bias` | [E, F, D], [E, F] | instead, if not `gated` |
    | `down_proj`, `down_proj_bias` | [E, D, F], [E, D] | biases with `use_bias` |
    | `shared_expert.gate_up_proj` (`up_proj`) | [2 S, D] ([S, D]) | with `shared_features` S > 0 |
    | `shared_expert.down_proj` | [D, S] | with `shared_features` S > 0 |
    | `shared_expert_gate.weight` | [1, D] | with `shared_gate` |
    | `lora_a_in`, `lora_b_in` | [E, D, r], [E, r, 2 or 1, F] | with `lora_rank` r |
    | `lora_a_out`, `lora_b_out` | [E, F, r], [E, r, D] | with `lora_rank` r |

    With `packed` the two weights of the experts are buffers instead of parameters. They have no gradient and keep their
    dtypes under `.to(dtype)`:

    | name | shape | condition |
    |---|---|---|
    | `gate_up_proj_codes`, `gate_up_proj_scales` | uint8 [E, 2 F, D/32, 16], uint8 [E, 2 F, D/32] | "mxfp4" |
    | `down_proj_codes`, `down_proj_scales` | uint8 [E, D, F/32, 16], uint8 [E, D, F/32] | "mxfp4" |
    | `gate_up_proj_q`, `gate_up_proj_scales` | float8_e4m3fn [E, 2 F, D], float32 [E, 2 F/128, D/128] | "fp8_blocks" |
    | `down_proj_q`, `down_proj_scales` | float8_e4m3fn [E, D, F], float32 [E, D/128, F/128] | "fp8_blocks" |

    With `group`, a rank holds E/P experts.

    State, with `use_expert_bias` or `balance`: the buffer `expert_bias` float32 [E], part of the state dict. It stays
    float32 under `.to(dtype)`. Loading and updates convert a buffer of another float dtype to float32, because 16-bit
    dtypes lose steps of 1e-3. A forward pass reads it as float32.

    Counts since the last update, of this process or, with `group`, of all its ranks: `tokens_per_expert` int64 [E] with
    `use_expert_bias`, and `qb_histogram` int64 [E, bins] with `balance="quantile"`. They are neither buffers nor in the
    state dict. Every forward pass in training mode adds its counts, so all micro-batches of a step count.
    Recomputation under activation checkpointing does not count again. Passes in eval mode, with `forced_experts` or
    with `replay` do not count, so run passes outside training steps in eval mode, also under torch.no_grad(). The mode
    has no other effect.

    Args:
      in_features: D, model width.
      hidden_features: F, expert width.
      num_experts: E.
      topk: K, experts per token.
      use_expert_bias: adds a selection bias that `update_expert_bias` moves.
      balance: "quantile" adds a selection bias that `update_quantile_bias` sets; None: no quantile balancing.
      qb_bin_bounds, qb_bins: bounds (lower, upper) and number of bins of the histogram for quantile balancing. It
        counts the distance from an expert's score up to the threshold of a token.
      use_gate_bias: adds a bias parameter to the router's logits.
      gated: phi(x W_gate, x W_up), or act(x W_gate) * (x W_up) for a plain name; False: act(x W_up).
      interleaved: gate and up rows of gate_up_proj alternate, as in gpt-oss. Does not apply to the shared expert.
      use_bias: adds biases to both projections of the experts.
      shared_features: S, width of a dense expert applied to every token; 0: none.
      shared_gate: multiplies the shared expert's output by sigmoid(<x, shared_expert_gate.weight>).
      loss_group: the process group that shares a batch: losses are those of the whole batch, as in `moe`. None: those
        of the tokens of `group`, or without `group` of the call's tokens.
      group: the P ranks that share the experts, as in `moe`: rank r holds E/P experts, starting at r E/P. With a
        process group, the experts' parameters are plain tensors of this rank's experts. With a one-dimensional
        DeviceMesh (for fully_shard, one dimension of a larger mesh) they are DTensors. None: this process holds all
        experts.
      transport, capacity_factor, fp8_exchange: options of `group`, as in `moe`.
      lora_rank: rank of low-rank adapters of both projections, which start without effect, see `Lora`; 0: no adapters.
        All other parameters of the layer are frozen. The factors are float32. `add_lora` adds them to an existing
        layer.
      lora_alpha: the adapters are multiplied by lora_alpha / lora_rank; None: by 1.
      lora_shared: the fields of `Lora` that all experts share, [1, ...] instead of [E, ...].
      packed: "mxfp4" or "fp8_blocks": the experts' weights are packed and frozen, for loading packed checkpoints;
        `pack_experts` packs those of an existing layer. None: they are parameters.
      dtype: dtype of the computation, float32, bfloat16 or float16, also under torch.autocast. None: the dtype of the
        input, or for a float32 input under torch.autocast the autocast dtype.
      param_dtype: dtype of the parameters; None: torch's default dtype.
      device: device of parameters and state; None: torch's default device. "meta" allocates nothing; use
        `to_empty(device=...)`, then `reset_parameters()` or `load_state_dict`.
      kernel_init: fills a matrix [out, in] in place under torch.no_grad(), like functions of torch.nn.init; it is
        called once per expert. None: a normal distribution of variance 1 / in, truncated at two standard deviations.
        Biases and factors B are initialised to 0, factors A uniformly in +-1/sqrt(in).
      {options}
        With "fp8", shared experts use "highest".

    Raises:
      TypeError, ValueError: an option is wrong; the message names it.

    Gradients: as in `moe`, of every parameter in its own dtype; those of float32 weights in a 16-bit computation are
    not rounded. `expert_bias` has none. With `group`, gradients of all parameters, including the shared expert's, are
    those of the mean of the ranks' losses. They need no averaging over the group; averaging replicated ones again has
    no effect. DistributedDataParallel must not average the experts, see `ddp_ignore_experts`; fully_shard requires a
    layer whose `group` is a DeviceMesh.

    The submodules `gate`, `shared_expert` and `shared_expert_gate` are called as modules: hooks on them,
    parametrizations, adapters and replacement modules work, see docs/torch.md. A forward hook on `gate` receives the
    router's logits, float32 [..., E]. Without any of these, the logits are computed in one operation with the rest of
    the layer, with bitwise the same results.

    A copy of a layer with groups has the same groups. Such a layer cannot be pickled; its state dict can.

    >>> layer = MoE(16, 32, num_experts=4, topk=2, aux_loss_coeff=0.01)
    >>> result = layer(torch.ones(3, 5, 16))
    >>> result.output.shape, int(result.tokens_per_expert.sum())
    (torch.Size([3, 5, 16]), 30)
    """

    expert_bias: Tensor | None
    down_proj: Tensor
    down_proj_bias: Tensor | None
    gate: nn.Module
    tokens_per_expert: Tensor | None
    qb_histogram: Tensor | None
    #: Whether an update restored a bias that FSDP had rounded. If FSDP rounds it again, updates are lost.
    _restored_under_fsdp = False

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        num_experts: int,
        topk: int,
        *,
        use_expert_bias: bool = False,
        balance: str | None = None,
        qb_bin_bounds: tuple[float, float] = (-1.0, 1.0),
        qb_bins: int = 1000,
        use_gate_bias: bool = False,
        gated: bool = True,
        interleaved: bool = False,
        use_bias: bool = False,
        shared_features: int = 0,
        shared_gate: bool = False,
        loss_group: "ProcessGroup | None" = None,
        group: "ProcessGroup | DeviceMesh | None" = None,
        transport: str = "auto",
        capacity_factor: float | None = None,
        fp8_exchange: bool = False,
        lora_rank: int = 0,
        lora_alpha: float | None = None,
        lora_shared: Sequence[str] = (),
        packed: str | None = None,
        dtype: torch.dtype | None = None,
        param_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        kernel_init: Initializer | None = None,
        **options: Unpack[ModuleKeywords],
    ):
        super().__init__()
        check_names("MoE", MODULE_NAMES, options)
        largest = check.INDEX_LIMIT - 1
        self.in_features = D = check.integer("in_features", in_features, 1, largest)
        self.hidden_features = F = check.integer("hidden_features", hidden_features, 1, largest)
        self.num_experts = E = check.integer("num_experts", num_experts, 1, largest)
        self.shared_features = S = check.integer("shared_features", shared_features, 0, largest)
        self.gated, self.interleaved = check.boolean("gated", gated), check.boolean("interleaved", interleaved)
        if self.interleaved and not self.gated:
            raise ValueError("interleaved: got True for experts that are not gated, expected False")
        use_bias = check.boolean("use_bias", use_bias)
        self.use_expert_bias = check.boolean("use_expert_bias", use_expert_bias)
        use_gate_bias = check.boolean("use_gate_bias", use_gate_bias)
        if check.boolean("shared_gate", shared_gate) and not S:
            raise ValueError("shared_gate: got True without a shared expert, expected shared_features > 0")
        self.dtype = None if dtype is None else check.float_dtype("dtype", dtype)
        self.param_dtype = check.float_dtype(
            "param_dtype", torch.get_default_dtype() if param_dtype is None else param_dtype
        )
        if kernel_init is not None and not callable(kernel_init):
            raise TypeError(f"kernel_init: got {check.describe(kernel_init)}, expected a function of a tensor")
        self.kernel_init = fan_in_normal_ if kernel_init is None else kernel_init
        quantile = balance is not None and check.choice("balance", balance, ("quantile",)) == "quantile"
        self.parts = 2 if self.gated else 1
        self.options = LayerOptions(
            topk=topk,
            qb_bins=qb_bins if quantile else None,
            w_in_layout="fpd" if self.interleaved else "pfd",
            w_out_layout="df",
            **options,
        )
        self.options_of_forced = self.options.without_selection()
        self.loss_group = loss_group
        number = checked_config(self.options, E, self.parts, loss_group).network.precision
        if number == FP8:
            check_fp8_widths("hidden_features", f"{F} beside in_features {D}", in_features=D, hidden_features=F)
        widths = dict(in_features=D, hidden_features=F)
        self.packed = check_kind(packed, self.options.layouts(), self.options.precision, **widths)
        self.group, mesh = check_ranks(group)
        if self.packed is not None and mesh is not None:
            raise ValueError("group: got a DeviceMesh with packed experts, expected a process group")
        self.parallel_options: dict[str, Any] = dict(
            group=self.group, transport=transport, capacity_factor=capacity_factor, fp8_exchange=fp8_exchange
        )
        self.ranks, self.rank = 1, 0
        if (parallel := check_parallel(**self.parallel_options, precision=number)) is not None:
            self.ranks, self.rank = parallel.ranks, parallel.rank
        if E % self.ranks:
            raise ValueError(f"num_experts: got {E}, expected a multiple of the {self.ranks} ranks of group")
        self.local_experts = E // self.ranks
        self.qb_bin_bounds = host_bounds(qb_bin_bounds) if quantile else None
        factory: dict[str, Any] = dict(dtype=self.param_dtype, device=device)
        self.up_name = "gate_up_proj" if self.gated else "up_proj"
        self.up_bias_name = f"{self.up_name}_bias"

        def parameter(name: str, present: bool, *shape: int) -> None:
            value = torch.empty((self.local_experts, *shape), **factory) if present else None
            self.register_parameter(name, None if value is None else nn.Parameter(sharded(value, mesh)))

        self.gate = Gate(D, E, use_gate_bias, self.kernel_init, self.group, **factory)
        parameter(self.up_name, self.packed is None, self.parts * F, D)
        parameter(f"{self.up_name}_bias", use_bias, self.parts * F)
        parameter("down_proj", self.packed is None, D, F)
        parameter("down_proj_bias", use_bias, D)
        if self.packed is not None:
            for name, shape in self._shapes().items():
                add_buffers(self, name, self.packed, shape, device)
        self.shared_expert: nn.Module | None = None
        if S:
            dense: dict[str, Any] = dict(
                activation=self.options.activation,
                precision=dense_precision(self.options.precision),
                group=self.group,
            )
            self.shared_expert = SharedExpert(D, S, self.gated, self.kernel_init, **dense, **factory)
        self.shared_expert_gate: nn.Module | None = None
        if shared_gate:
            self.shared_expert_gate = Gate(D, 1, False, self.kernel_init, self.group, **factory)
        has_bias = self.use_expert_bias or quantile
        bias = torch.empty(E, dtype=torch.float32, device=device) if has_bias else None
        self.register_buffer("expert_bias", bias)
        # Not buffers: DDP broadcasts the buffers of rank 0, but each rank has its own counts.
        self.tokens_per_expert = self.qb_histogram = None
        self._reset_counts()
        self.lora = NewLora(0, 1.0, ())
        for name in LORA_NAMES:
            self.register_parameter(name, None)
        self._reset_own_parameters()
        lora = new_lora(lora_rank, lora_alpha, lora_shared)
        if lora.rank:
            self.requires_grad_(False)
            self._add_lora(lora)

    def _reset_counts(self) -> None:
        """Sets the counts to 0, on the device of the bias."""
        if self.expert_bias is None:
            return
        kind: dict[str, Any] = dict(dtype=torch.int64, device=self.expert_bias.device)
        if self.use_expert_bias:
            self.tokens_per_expert = torch.zeros(self.num_experts, **kind)
        if self.options.qb_bins is not None:
            self.qb_histogram = torch.zeros(self.num_experts, self.options.qb_bins, **kind)

    def _shapes(self) -> dict[str, tuple[int, int, int]]:
        """The shapes of this rank's matrices by the names of their parameters."""
        E, F, D = self.local_experts, self.hidden_features, self.in_features
        return {self.up_name: (E, self.parts * F, D), "down_proj": (E, D, F)}

    def _packed_names(self) -> tuple[str, ...]:
        """The buffers of packed weights."""
        packed = self.packed
        return () if packed is None else tuple(n for name in self._shapes() for n in buffer_names(name, packed))

    def _check_packable(self, packed: str) -> None:
        """Raises ValueError if the layer's weights cannot be packed."""
        if self.packed is not None:
            raise ValueError(f"module: got a layer with packed={self.packed!r}, expected one with plain weights")
        for name in self._shapes():
            weight = getattr(self, name)
            if not isinstance(weight, nn.Parameter) or hasattr(weight, "device_mesh"):
                raise ValueError(
                    f"module: got a layer whose {name} is no plain parameter, expected pack_experts before "
                    "fully_shard, parametrizations and adapters of other libraries"
                )
            if weight.dtype not in check.FLOATS:
                expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in check.FLOATS)
                raise ValueError(f"module: got a layer whose {name} is {weight.dtype}, expected {expected}")
        widths = dict(in_features=self.in_features, hidden_features=self.hidden_features)
        check_kind(packed, self.options.layouts(), self.options.precision, **widths)

    def _pack(self, packed: str) -> None:
        """Replaces the weights by packed ones, after all of them have been packed."""
        weights = {name: getattr(self, name) for name in self._shapes()}
        values = {name: pack(packed, weight) for name, weight in weights.items() if not weight.is_meta}
        for name, shape in self._shapes().items():
            setattr(self, name, None)
            add_buffers(self, name, packed, shape, weights[name].device)
            if name in values:
                write_buffers(self, name, packed, values[name])
        self.packed = packed

    def _check_without_lora(self) -> None:
        """Raises ValueError if the layer cannot get adapters."""
        if self.lora.rank:
            raise ValueError(f"module: got a layer with adapters of rank {self.lora.rank}, expected one without")
        mesh = getattr(self.down_proj, "device_mesh", None)
        if mesh is not None and mesh.ndim > 1:
            raise ValueError("module: got a layer under fully_shard, expected add_lora before fully_shard")

    def _add_lora(self, lora: NewLora) -> None:
        """Adds factors with their initial values."""
        self.lora = lora
        self.options = dataclasses.replace(self.options, lora_scale=lora.scale)
        self.options_of_forced = self.options.without_selection()
        sizes = dict(e=self.local_experts, d=self.in_features, p=self.parts, f=self.hidden_features)
        weight = self.down_proj if self.packed is None else getattr(self, self._packed_names()[0])
        device, mesh = local_part(weight).device, getattr(weight, "device_mesh", None)
        for field, shape in factor_shapes(sizes, lora.rank, PROJECTIONS, lora.shared).items():
            value = torch.empty(shape, dtype=torch.float32, device=device)
            setattr(self, f"lora_{field}", nn.Parameter(sharded(value, None if field in lora.shared else mesh)))
        self._reset_factors()

    @torch.no_grad()
    def _reset_factors(self) -> None:
        for field in Lora._fields:
            if (factor := getattr(self, f"lora_{field}")) is None:
                continue
            if field.startswith("b_"):
                factor.zero_()
            elif field in self.lora.shared:
                draw(factor_uniform_, factor)
            else:
                draw(factor_uniform_, factor, self.num_experts, self.rank * self.local_experts)

    @torch.no_grad()
    def _reset_own_parameters(self) -> None:
        for name, value in self.named_parameters(recurse=False):
            if name.endswith("_bias"):
                value.zero_()
            elif name not in LORA_NAMES:
                draw(self.kernel_init, value, self.num_experts, self.rank * self.local_experts)
        if self.packed is not None:
            for name, shape in self._shapes().items():
                buffer = getattr(self, buffer_names(name, self.packed)[0])
                if buffer.is_meta:
                    continue
                weights = torch.empty(shape, dtype=self.param_dtype, device=buffer.device)
                draw(self.kernel_init, weights, self.num_experts, self.rank * self.local_experts)
                write_buffers(self, name, self.packed, pack(self.packed, weights))
        self._reset_factors()
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    def reset_parameters(self) -> None:
        """Initialises every parameter, including those of the submodules, and sets expert bias and counts to 0.

        With one seed, the whole layer does not depend on the number of ranks and the sharding: with a group or
        DTensors, all ranks must use the same seed. Each draws all experts and keeps its own. Adapters and replacement
        modules keep their values.

        Raises:
          ValueError: a tensor is computed from others, by a parametrization or pruning. Then no parameter is changed.
        """
        own = [module for module in self.modules() if isinstance(module, Gate | SharedExpert)]
        check_plain(self, *self._shapes(), f"{self.up_name}_bias", "down_proj_bias", *LORA_NAMES)
        for module in own:
            module.check_plain()
        for module in own:
            module.reset_parameters()
        self._reset_own_parameters()
        self._reset_counts()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MoE":
        before = self.expert_bias
        with_dtypes_kept(self, self._packed_names(), lambda: super(MoE, self)._apply(fn, recurse))
        if before is None or self.expert_bias is None:
            return self
        if self.expert_bias.dtype != torch.float32:  # 16-bit dtypes lose steps of 1e-3
            rounded = self.expert_bias
            self.expert_bias = rounded.float() if before.is_meta else before.to(rounded.device, torch.float32)
        self._move_counts()
        return self

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: Any, unexpected_keys: Any,
        error_msgs: list[str],
    ) -> None:  # fmt: skip
        if self.packed is not None:
            for name in self._shapes():
                convert_state(self, name, self.packed, state_dict, prefix, error_msgs)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if self.expert_bias is not None:  # load_state_dict(assign=True) assigns a tensor of any dtype
            self._restore_bias()

    def _bias(self) -> Tensor | None:
        """The expert bias as float32, or None if the layer has none.

        Raises:
          TypeError, ValueError: the buffer is no longer a float tensor [E].
        """
        if self.expert_bias is None and not self.use_expert_bias and self.qb_bin_bounds is None:
            return None
        return check.tensor("expert_bias", self.expert_bias, _BIAS_DTYPES, (("E", self.num_experts),)).float()

    def _restore_bias(self) -> Tensor:
        """Converts the buffer back to float32, keeping its value."""
        bias = self._bias()
        assert bias is not None and self.expert_bias is not None
        if self.expert_bias.dtype != torch.float32:
            if torch.compiler.is_compiling():
                self.expert_bias = bias
            else:  # keep the tensor object: DDP and FSDP hold references to it
                self.expert_bias.data = bias
        return self.expert_bias

    def _check_not_rounded_again(self) -> None:
        if self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            raise ValueError(
                f"expert_bias: got {check.describe(self.expert_bias)} again, since FSDP's buffer_dtype rounds it after "
                "an evaluation in full precision, expected float32: updates are lost; use "
                "MixedPrecision(buffer_dtype=None)"
            )

    def _move_counts(self) -> None:
        """Moves the counts to the device of the bias."""
        assert self.expert_bias is not None
        device = self.expert_bias.device
        for name in _COUNTS:
            counts = getattr(self, name)
            if counts is not None and counts.device != device:
                setattr(self, name, torch.zeros_like(counts, device=device) if counts.is_meta else counts.to(device))

    def _counts(self) -> dict[str, Tensor]:
        """The counts of the layer by name, on the device of the bias.

        Raises:
          TypeError, ValueError: a count is no longer an int64 tensor of its shape.
        """
        self._move_counts()  # fully_shard moves buffers without calling _apply
        shape = (("E", self.num_experts), ("bins", self.options.qb_bins))
        shapes = dict(zip(_COUNTS, (shape[:1], shape), strict=True))
        counts = {name: value for name in _COUNTS if (value := getattr(self, name)) is not None}
        return {name: check.tensor(name, value, (torch.int64,), shapes[name]) for name, value in counts.items()}

    def forward(
        self,
        x: Tensor,
        *,
        token_mask: Tensor | None = None,
        forced_experts: Tensor | None = None,
        replay: Replay | None = None,
        quantized: QuantizedExperts | None = None,
    ) -> MoEOutput:
        """Applies the layer.

        Args:
          x: [..., D] float32, bfloat16 or float16, on the device of the parameters.
          token_mask: bool [...]; False marks padding, which gets zero output and is not counted.
          forced_experts: int [..., K]; a given selection. Expert bias and groups are ignored, and there is no
            histogram.
          replay: a recorded routing, as in `moe`. Expert bias and groups select for tokens that are not replayed.
          quantized: with precision "fp8", the result of `quantized()`; None: experts are quantised in every call.

        Returns:
          MoEOutput of `moe`; output [..., D] in the dtype of the computation.

        Raises:
          TypeError, ValueError: an argument has a wrong type or value.
        """
        x = check.tensor("x", x, check.FLOATS, (..., ("in_features", self.in_features)))
        x = as_autocast(x) if self.dtype is None else x.to(self.dtype)
        mask = check.optional_tensor("token_mask", token_mask, check.BOOL, tuple(x.shape[:-1]))
        check.same_device("x", x, token_mask=mask)
        is_forced = forced_experts is not None
        if not is_forced and self._restored_under_fsdp:
            self._check_not_rounded_again()
        bias = None if is_forced else self._bias()
        given = dict(expert_bias=bias, token_mask=token_mask, forced_experts=forced_experts)
        tensors = None if quantized is not None else self._parameter_tensors(x, given, replay)
        are_parameters = tensors is not None
        if tensors is None:
            tensors = self._tensors(x, mask, quantized)._replace(**given, replay=replay)
        result = run_layer(
            self.options_of_forced if is_forced else self.options,
            tensors,
            are_parameters=are_parameters,
            quantized=quantized,
            qb_bin_bounds=None if is_forced else self.qb_bin_bounds,
            loss_group=self.loss_group,
            **self.parallel_options,
        )
        if bias is not None and self.training and replay is None:
            self._count(result)
        if self.shared_expert is None:
            return result
        return MoEOutput(result.output + self._shared(x, mask), *result[1:])

    def _tensors(self, x: Tensor, mask: Tensor | None, quantized: Any) -> LayerTensors:
        """The arguments of `run_layer` for x, as tensors whose gradients reach the parameters by autograd."""
        up_bias = getattr(self, self.up_bias_name)
        w_in, w_out = self._matrices()
        lora = self._lora()
        self._check_wrapping(parts_of(w_in)[0], parts_of(w_out)[0], up_bias, self.down_proj_bias, lora)
        if self.group is not None and self.local_experts == 1:
            # `run_layer` cannot tell a shared factor from that of the only expert.
            shared = with_summed_gradients(self.group, *(getattr(lora, name) for name in self.lora.shared))
            lora = lora._replace(**dict(zip(self.lora.shared, shared, strict=True)))
        check_current(quantized, parts_of(w_in)[0], parts_of(w_out)[0])

        def weight(value: Any) -> Any:  # float32 weights get unrounded gradients
            return value if is_packed(value) or value.dtype == torch.float32 else value.to(x.dtype)

        tensors = LayerTensors(
            x=x,
            w_in=weight(w_in),
            w_out=weight(w_out),
            b_in=None if up_bias is None else local_part(up_bias).to(x.dtype).reshape(shape_of(w_in)[:-1]),
            b_out=None if self.down_proj_bias is None else local_part(self.down_proj_bias).to(x.dtype),
            lora=None if not self.lora.rank else Lora(*(f if f is None else weight(f) for f in lora)),
        )
        if is_plain(self.gate):
            return tensors._replace(gate=self.gate.weight.T, gate_bias=self.gate.bias)
        for_gate, port = fork(x, mask)
        logits = _called("gate", self.gate, (*x.shape[:-1], ("E", self.num_experts)), for_gate)
        return tensors._replace(x=x.detach(), logits=logits.float(), port=port)

    def _check_wrapping(self, w_in: Any, w_out: Any, b_in: Any, b_out: Any, lora: Lora | None) -> None:
        """See `check_wrapping`; nothing without a group."""
        if self.group is None:
            return
        factors = {} if lora is None else lora._asdict()
        of_experts = [factor for name, factor in factors.items() if name not in self.lora.shared]
        experts = list(self._expert_tensors().values())
        check_wrapping(self, self.group, experts, (w_in, w_out, b_in, b_out, *of_experts))

    def _lora(self) -> Lora:
        """The factors of this rank's experts."""
        factors = (getattr(self, name) for name in LORA_NAMES)
        return Lora(*(factor if factor is None else local_part(factor) for factor in factors))

    def _parameter_tensors(
        self, x: Tensor, given: dict[str, Tensor | None], replay: Replay | None
    ) -> LayerTensors | None:
        """The arguments of `run_layer` with the parameters themselves, which costs the least host time.

        None: the layer has packed weights, a gate that must be called, or adapters of a single expert in a group; this
        is not the plain eager case; or parameters have another dtype than x, or another shape than the constructor gave
        them.

        Args:
          given: further fields of a LayerTensors.
          replay: its field of this name.
        """
        gate = self.gate
        if self.packed is not None or not is_plain(gate):
            return None
        if self.group is not None and self.local_experts == 1 and self.lora.rank:
            return None
        assert isinstance(gate, Gate)
        up, down, up_bias, down_bias = [
            private.parameter(self, name) for name in (self.up_name, "down_proj", self.up_bias_name, "down_proj_bias")
        ]
        gate_weight, gate_bias = private.parameter(gate, "weight"), private.parameter(gate, "bias")
        tensors = LayerTensors(x, up, down, up_bias, down_bias, gate_weight, gate_bias, **given)
        dtype = x.dtype
        dtypes = (dtype, torch.float32)
        lora = None if not self.lora.rank else self._lora()
        if not is_plain_eager(x.device, tensors if lora is None else (*tensors, *lora)):
            return None
        if replay is not None:
            if not is_plain_eager(x.device, fields_of(replay)):
                return None
            tensors = tensors._replace(replay=replay)
        if lora is not None:
            if any(factor is not None and factor.dtype not in dtypes for factor in lora):
                return None
            tensors = tensors._replace(lora=lora)
        if up.dtype not in dtypes or down.dtype not in dtypes:
            return None
        if (up_bias is not None and up_bias.dtype != dtype) or (down_bias is not None and down_bias.dtype != dtype):
            return None
        E, F, D = self.local_experts, self.hidden_features, self.in_features
        if up.shape != (E, self.parts * F, D) or down.shape != (E, D, F) or gate_weight.shape != (self.num_experts, D):
            return None
        if up_bias is not None and up_bias.shape != up.shape[:2]:
            return None
        self._check_wrapping(up, down, up_bias, down_bias, lora)
        return tensors

    def _shared(self, x: Tensor, token_mask: Tensor | None) -> Tensor:
        """The shared expert's output for x [..., D]."""
        assert self.shared_expert is not None
        if token_mask is not None:  # 0 * NaN in the gradients of the weights would be NaN
            x = torch.where(token_mask[..., None], x, 0)
        given = {}
        if self.shared_expert_gate is not None:
            logits = _called("shared_expert_gate", self.shared_expert_gate, (*x.shape[:-1], ("1", 1)), x)
            given["weights"] = torch.sigmoid(logits.float())
        output = _called("shared_expert", self.shared_expert, tuple(x.shape), x, **given).to(x.dtype)
        return output if token_mask is None else torch.where(token_mask[..., None], output, 0)

    def _matrices(self) -> tuple[Any, Any]:
        """w_in and w_out of this rank's experts, as arguments of `moe`."""
        E, F, D = self.local_experts, self.hidden_features, self.in_features
        if self.packed is not None:
            packed_up, packed_down = (read_buffers(self, name, self.packed) for name in self._shapes())
            parts = (F, 2) if self.interleaved else (self.parts, F)
            # The rows of gate and up become two axes. FP8 blocks do not mix them, so neither do the rows of scales.
            rows_of_scales = parts if self.packed == "mxfp4" else (self.parts, F // BLOCK)
            views = (t.unflatten(1, rows) for t, rows in zip(packed_up, (parts, rows_of_scales), strict=True))
            return type(packed_up)(*views), packed_down
        # reshape accepts any shape with the right number of elements, so these are checked here; `moe` checks the
        # others.
        up, up_bias = local_part(getattr(self, self.up_name)), getattr(self, self.up_bias_name)
        self._check_shape(self.up_name, up, E, self.parts * F, D)
        if up_bias is not None:
            self._check_shape(self.up_bias_name, local_part(up_bias), E, self.parts * F)
        return up.reshape((E, F, 2, D) if self.interleaved else (E, self.parts, F, D)), local_part(self.down_proj)

    @staticmethod
    def _check_shape(name: str, value: Tensor, *shape: int) -> None:
        if tuple(value.shape) != shape:
            raise ValueError(f"{name}: got {check.describe(value)}, expected [{', '.join(map(str, shape))}]")

    def quantized(self, *, gradients: bool = True) -> QuantizedExperts:
        """Quantises this rank's experts with `quantize_experts`, for calls with precision="fp8".

        Call it again when the parameters have changed. Under fully_shard, parameters are unsharded only in a forward
        pass.

        Args:
          gradients: as in `quantize_experts`.

        Raises:
          ValueError: the precision of the layer is not "fp8".
        """
        if (precision := self.options.precision) != "fp8":
            raise ValueError(f'quantized: got a layer with precision={precision!r}, expected "fp8"')
        if self.packed is not None:
            raise ValueError(f"quantized: got a layer with packed={self.packed!r}, whose weights are quantised already")
        names = ("fp8_scales", "w_in_layout", "w_out_layout")
        options = {name: getattr(self.options, name) for name in names}
        return quantize_experts(*self._matrices(), **options, gradients=gradients)

    def expert_parameters(self) -> dict[str, nn.Parameter]:
        """The experts' parameters by name; with a group, those of this rank's experts."""
        return {name: p for name, p in self._expert_tensors().items() if isinstance(p, nn.Parameter)}

    def _expert_tensors(self) -> dict[str, Tensor]:
        """`expert_parameters` and the experts' buffers: pruning masks and state of parametrizations."""
        named = dict(self.named_parameters()) | dict(self.named_buffers())
        # Every rank has the same expert bias and shared factors.
        replicated = {"expert_bias", *(f"lora_{field}" for field in self.lora.shared)}
        found = {}
        for name, tensor in named.items():
            own = name.removeprefix("parametrizations.")
            computed = own.split(".")[0].removesuffix("_orig").removesuffix("_mask")
            if (own != name or "." not in name) and computed not in replicated:
                found[name] = tensor
        return found

    def _groups(self) -> list[Any]:
        return [group for group in (self.group, self.loss_group) if group is not None]

    @torch.no_grad()
    def _count(self, result: MoEOutput) -> None:
        for name, counts in self._counts().items():
            add_counts(counts, getattr(result, name))

    def _state(self, name: str) -> tuple[Tensor, Tensor]:
        """The expert bias, restored to float32, and the named counts, for an update in place."""
        assert self.expert_bias is not None
        rounded = self.expert_bias.dtype != torch.float32
        bias = self._restore_bias()
        if rounded and private.is_fsdp_managed(self):
            self._restored_under_fsdp = True
        if bias.is_meta:
            raise ValueError(
                "expert_bias: got a tensor on meta, expected a tensor with values, which an update can change"
            )
        return bias, self._counts()[name]

    @torch.no_grad()
    def update_expert_bias(self, rate: float | Tensor = 1e-3, group: "ProcessGroup | None" = None) -> None:
        """Moves the selection bias towards balance, b += rate * sign(mean load - load), and resets the counts.

        Auxiliary-loss-free load balancing (Wang et al. 2024, arXiv:2408.15664). The load is the counts since the last
        update. Call it once per step, after the backward pass: activation checkpointing repeats the selection with the
        bias of that moment. The host does not wait for the device.

        Args:
          rate: step of the bias, a number >= 0, or a float scalar tensor, for example from a schedule, on the CPU or on
            the device of the bias. The value of a scalar on a CUDA device or in a compiled program is not checked.
          group: the process group that shares the tokens of a step. Counts are summed with one all-reduce, in which all
            its ranks must take part. `torch.distributed.group.WORLD`: all ranks. None: only the counts of this process;
            with several processes, their biases then differ. A layer with a `group` has already counted the tokens of
            all its ranks: pass the data parallel ranks, or all ranks, or None if there are no others. The bias is
            the same whether a token is counted once, or once on each of the layer's ranks.

        Raises:
          TypeError: an argument has the wrong type or dtype.
          ValueError: an argument is out of range, the layer has no expert bias, or its state is on meta or has another
            shape or dtype.
        """
        if self.expert_bias is None or self.tokens_per_expert is None:
            raise ValueError("update_expert_bias: got a layer without expert bias, expected use_expert_bias=True")
        bias, counts = self._state("tokens_per_expert")
        step = _rate(rate, bias.device)
        load = summed(counts, check_group("group", group))
        bias += step * torch.sign(load.sum() - self.num_experts * load).float()
        counts.zero_()

    @torch.no_grad()
    def update_quantile_bias(self, group: "ProcessGroup | None" = None) -> None:
        """Sets the selection bias by quantile balancing, and resets the counts.

        With the new bias, every expert would have received K/E of the tokens counted since the last update. Without
        counts the bias does not change. Call it like `update_expert_bias`.

        Args:
          group: as in `update_expert_bias`; the all-reduce has E * bins numbers.

        Raises:
          TypeError, ValueError: group is no process group, or the layer has no `balance="quantile"`.
        """
        if self.expert_bias is None or self.qb_histogram is None or self.qb_bin_bounds is None:
            raise ValueError(
                'update_quantile_bias: got a layer without quantile balancing, expected balance="quantile"'
            )
        bias, counts = self._state("qb_histogram")
        total = summed(counts, check_group("group", group))
        balanced = quantile_bias(total, *self.qb_bin_bounds, self.options.topk)
        bias.copy_(torch.where(total.sum() > 0, balanced, bias))
        counts.zero_()

    def extra_repr(self) -> str:
        """Sizes, and options with other values than their defaults."""
        options = (
            vars(self.options)
            | self.parallel_options
            | dict(
                use_expert_bias=self.use_expert_bias,
                balance=None if self.qb_bin_bounds is None else "quantile",
                use_gate_bias=getattr(self.gate, "bias", None) is not None,
                gated=self.gated,
                interleaved=self.interleaved,
                use_bias=self.down_proj_bias is not None,
                shared_features=self.shared_features,
                shared_gate=self.shared_expert_gate is not None,
                lora_rank=self.lora.rank,
                lora_alpha=self.lora.scale * self.lora.rank if self.lora.rank else None,
                lora_shared=self.lora.shared,
                packed=self.packed,
                dtype=self.dtype,
            )
        )
        if self.qb_bin_bounds is not None:
            options["qb_bin_bounds"] = self.qb_bin_bounds
        else:
            del options["qb_bins"]
        defaults = {name: parameter.default for name, parameter in inspect.signature(MoE.__init__).parameters.items()}
        sizes = f"{self.in_features}, {self.hidden_features}, num_experts={self.num_experts}, topk={self.options.topk}"
        for name in ("topk", "group", "w_in_layout", "w_out_layout"):  # shown elsewhere or fixed
            del options[name]
        changed = [f"{k}={v!r}" for k, v in options.items() if k in defaults and v != defaults[k]]
        sharing = [f"rank {self.rank} of {self.ranks}"] if self.group is not None else []
        if self.loss_group is not None:
            sharing.append(f"losses of {self.loss_group.size()} ranks")
        return ", ".join([sizes, *sharing, *changed])


def _called(name: str, module: Any, shape: Sequence[check.Axis], x: Tensor, **given: Tensor) -> Tensor:
    """Calls a submodule on x [..., D] and checks its output.

    Raises:
      TypeError, ValueError: the submodule does not accept these arguments, or its output has a wrong dtype or shape.
    """
    if torch.compiler.is_compiling():
        output = module(x, **given)
    else:
        try:
            output = module(x, **given)
        except TypeError as error:
            arguments = ", ".join(f"{key}={check.describe(value)}" for key, value in dict(x=x, **given).items())
            raise TypeError(
                f"{name}: got {type(module).__name__} which, called with ({arguments}), raised TypeError: {error}; "
                f"expected a module that takes x{''.join(f' and {key}=' for key in given)}"
            ) from error
    output = check.tensor(f"{name}(x)", output, check.FLOATS, shape)
    check.same_device("x", x, **{f"{name}(x)": output})
    return output


def _rate(value: Any, device: torch.device) -> float | Tensor:
    """Checks the step of an update of a bias on a device."""
    if not isinstance(value, Tensor):
        host_value: Any = check.number("rate", value)
    else:
        check.tensor("rate", value, check.FLOATS, ())
        if value.device not in (torch.device("cpu"), device):
            raise ValueError(f"rate: got a tensor on {value.device}, expected the CPU or {device}, where the bias is")
        host_value = check.host_values(value)
    if host_value is not None and not 0 <= host_value < math.inf:
        raise ValueError(f"rate: got {host_value}, expected a finite number >= 0")
    return value if isinstance(value, Tensor) else host_value
