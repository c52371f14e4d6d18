"""The layer as an nn.Module: its parameters as checkpoints have them, and the state of its router."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn

from anabranch._text import shown
from anabranch.options import MODULE_NAMES, LayerOptions, ModuleKeywords, check_names, takes_options
from anabranch.precision import FP8, check_fp8_widths, dense_precision
from anabranch.torch.binding import check
from anabranch.torch.binding.autocast import as_autocast
from anabranch.torch.binding.group import check_group, part_of, summed
from anabranch.torch.layer.called_gate import fork
from anabranch.torch.layer.counts import add_counts
from anabranch.torch.layer.moe import MoEOutput, checked_config, layer_of
from anabranch.torch.layer.parameters import Initializer, check_plain, draw, fan_in_normal_
from anabranch.torch.layer.submodules import Gate, OnRanks, SharedExpert, is_plain
from anabranch.torch.layer.wrapping import check_wrapping
from anabranch.torch.ops.quantile import host_bounds, quantile_bias
from anabranch.torch.ops.quantized import QuantizedExperts, check_current, quantize_experts
from anabranch.torch.parallel.parallel import check_parallel, check_ranks, sharded

if TYPE_CHECKING:  # not every build of torch has it
    from torch.distributed import DeviceMesh, ProcessGroup

#: Fields of the output that a layer adds up, where it keeps them.
_COUNTS = ("tokens_per_expert", "qb_histogram")
#: What the expert bias is restored to float32 from.
_BIAS_DTYPES = (*check.FLOATS, torch.float64)


@takes_options(ModuleKeywords)
class MoE(OnRanks):
    """A Mixture-of-Experts feed-forward layer.

    Parameters, as checkpoints that keep the experts of a layer together have them; the layer takes views of them,
    nothing is copied or transposed:

    | name | shape | where |
    |---|---|---|
    | `gate.weight`, `gate.bias` | [E, D], [E] | the bias with `use_gate_bias` |
    | `gate_up_proj`, `gate_up_proj_bias` | [E, 2 F, D], [E, 2 F] | gate rows, then up rows; `interleaved`: in turns |
    | `up_proj`, `up_proj_bias` | [E, F, D], [E, F] | in their place where not `gated` |
    | `down_proj`, `down_proj_bias` | [E, D, F], [E, D] | biases with `use_bias` |
    | `shared_expert.gate_up_proj` (`up_proj`) | [2 S, D] ([S, D]) | with `shared_features` S > 0 |
    | `shared_expert.down_proj` | [D, S] | the same |
    | `shared_expert_gate.weight` | [1, D] | with `shared_gate` |

    With `group` a rank has E/P of the experts.

    State, with `use_expert_bias` or `balance`: the buffer `expert_bias` float32 [E], which is part of the state dict.
    It stays float32 under `.to(dtype)`. Loading or updating converts a buffer of another float dtype to float32,
    because 16 bits lose steps of 1e-3; a forward pass reads it as float32.

    Counts since the last update, of this process or with `group` of all its ranks: `tokens_per_expert` int64 [E] with
    `use_expert_bias`, and `qb_histogram` int64 [E, bins] with `balance="quantile"`. They are neither buffers nor in the
    state dict. Every forward pass in training mode adds its counts, so gradient accumulation adds up; recomputation
    under activation checkpointing does not count again. Nothing is counted in eval mode or with `forced_experts`, so
    run passes that are no training step in eval mode, also under torch.no_grad(). The mode changes nothing else.

    Args:
      in_features: D, width of the model.
      hidden_features: F, width of one expert.
      num_experts: E.
      topk: K, experts per token.
      use_expert_bias: keep a selection bias, which `update_expert_bias` moves.
      balance: "quantile": `update_quantile_bias` sets the selection bias; None: it does not.
      qb_bin_bounds, qb_bins: of the histogram for that: (lower, upper) for how far an expert's score is below the
        threshold of a token, and the number of bins.
      use_gate_bias: a bias of the router's logits, a parameter.
      gated: phi(x W_gate, x W_up), for a plain name act(x W_gate) * (x W_up); False: act(x W_up).
      interleaved: gate and up rows of gate_up_proj alternate, as in gpt-oss; not those of the shared expert.
      use_bias: biases of the experts' two projections.
      shared_features: width S of a dense expert that every token passes through; 0: none.
      shared_gate: multiply the shared expert's output by sigmoid(<x, shared_expert_gate.weight>).
      loss_group: a process group over whose ranks the tokens of a batch are spread: losses of the whole batch, as in
        `moe`; None: of the tokens of `group`, without one of the call's.
      group: ranks that share the experts, P of them, as in `moe`: rank r has experts r E/P and on. With a process group
        the experts' parameters are plain tensors, this rank's part; with a DeviceMesh of one dimension (for fully_shard
        one of a larger mesh) they are DTensors. None: this process has all.
      transport, capacity_factor, fp8_exchange: of `group`, as in `moe`.
      dtype: dtype of the computation, float32, bfloat16 or float16, under torch.autocast too; None: that of the input,
        under torch.autocast autocast's for a float32 input.
      param_dtype: dtype of the parameters; None: torch's default dtype.
      device: of the parameters and of the state; None: torch's default device. On "meta" nothing is allocated:
        `to_empty(device=...)`, then `reset_parameters()` or `load_state_dict`.
      kernel_init: fills each matrix [out, in], one expert's after the other, in place under torch.no_grad(), as those
        of torch.nn.init do; None: a normal of variance 1 / in, cut at two deviations. Biases begin at 0.
      {options}
        Shared experts have the precision "highest" where the experts have "fp8".

    Raises:
      TypeError, ValueError: an option is wrong; the message names it.

    Gradients: as `moe`, to every parameter in its own dtype; those of float32 weights beside a 16-bit computation are
    not rounded. None to `expert_bias`. With `group` every parameter's is that of the mean of the losses of its ranks,
    the shared expert's too: nothing is left to average over them, and it does no harm. DistributedDataParallel has to
    leave the experts alone, see `ddp_ignore_experts`; fully_shard takes a layer whose `group` is a DeviceMesh.

    The submodules `gate`, `shared_expert` and `shared_expert_gate` are called as modules: hooks on them,
    parametrizations, adapters and other modules in their place work, see docs/torch.md. A forward hook on `gate` sees
    the router's logits, float32 [..., E]. A gate without any of these is computed in one operation with the rest, with
    the same bits.

    A copy of a layer with groups is on the same ranks; it can't be pickled, and its state dict can.

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
    #: FSDP has rounded the bias before the first update; if it rounds it again, updates are lost.
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
        self.dtype = None if dtype is None else _dtype("dtype", dtype)
        self.param_dtype = _dtype("param_dtype", torch.get_default_dtype() if param_dtype is None else param_dtype)
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
        self.options_of_replay = self.options.without_selection()
        self.loss_group = loss_group
        number = checked_config(self.options, E, self.parts, loss_group).network.precision
        if number == FP8:
            check_fp8_widths("hidden_features", f"{F} beside in_features {D}", in_features=D, hidden_features=F)
        self.group, mesh = check_ranks(group)
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

        def parameter(name: str, wanted: bool, *shape: int) -> None:
            value = torch.empty((self.local_experts, *shape), **factory) if wanted else None
            self.register_parameter(name, None if value is None else nn.Parameter(sharded(value, mesh)))

        self.gate = Gate(D, E, use_gate_bias, self.kernel_init, self.group, **factory)
        parameter(self.up_name, True, self.parts * F, D)
        parameter(f"{self.up_name}_bias", use_bias, self.parts * F)
        parameter("down_proj", True, D, F)
        parameter("down_proj_bias", use_bias, D)
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
        # No buffers: DDP gives every rank the buffers of the first one, and these are each rank's own.
        self.tokens_per_expert = self.qb_histogram = None
        self._begin_counting()
        self._reset_own_parameters()

    def _begin_counting(self) -> None:
        """The counts at 0, where the bias is."""
        if self.expert_bias is None:
            return
        kind: dict[str, Any] = dict(dtype=torch.int64, device=self.expert_bias.device)
        if self.use_expert_bias:
            self.tokens_per_expert = torch.zeros(self.num_experts, **kind)
        if self.options.qb_bins is not None:
            self.qb_histogram = torch.zeros(self.num_experts, self.options.qb_bins, **kind)

    @torch.no_grad()
    def _reset_own_parameters(self) -> None:
        for name, value in self.named_parameters(recurse=False):
            if name.endswith("_bias"):
                value.zero_()
            else:
                draw(self.kernel_init, value, self.num_experts, self.rank * self.local_experts)
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    def reset_parameters(self) -> None:
        """Draws every parameter anew, those of the submodules too; the expert bias and the counts are 0 again.

        From one seed the whole layer is the same for any number of ranks, and however its parameters are sharded: with
        a group, or as DTensors, every rank has to have the same seed, and draws all experts to keep its own. Adapters
        and modules that have replaced submodules keep their values.

        Raises:
          ValueError: a tensor is computed from others, by a parametrization or by pruning; nothing has changed then.
        """
        own = [module for module in self.modules() if isinstance(module, Gate | SharedExpert)]
        check_plain(self, self.up_name, f"{self.up_name}_bias", "down_proj", "down_proj_bias")
        for module in own:
            module.check_plain()
        for module in own:
            module.reset_parameters()
        self._reset_own_parameters()
        self._begin_counting()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "MoE":
        before = self.expert_bias
        super()._apply(fn, recurse)
        if before is None or self.expert_bias is None:
            return self
        if self.expert_bias.dtype != torch.float32:  # steps of 1e-3 would be lost in 16 bits
            rounded = self.expert_bias
            self.expert_bias = rounded.float() if before.is_meta else before.to(rounded.device, torch.float32)
        self._move_counts()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self.expert_bias is not None:  # load_state_dict(assign=True) takes the tensor of the state dict as it is
            self._restore_bias()

    def _bias(self) -> Tensor | None:
        """The expert bias as float32; None: the layer has none.

        Raises:
          TypeError, ValueError: the buffer was replaced by something else than a float tensor [E].
        """
        if self.expert_bias is None and not self.use_expert_bias and self.qb_bin_bounds is None:
            return None
        return check.tensor("expert_bias", self.expert_bias, _BIAS_DTYPES, (("E", self.num_experts),)).float()

    def _restore_bias(self) -> Tensor:
        """Makes the buffer float32 if something has made it another float dtype; its value stays."""
        bias = self._bias()
        assert bias is not None and self.expert_bias is not None
        if self.expert_bias.dtype != torch.float32:
            if torch.compiler.is_compiling():
                self.expert_bias = bias
            else:  # DDP and FSDP hold the tensor object
                self.expert_bias.data = bias
        return self.expert_bias

    def _check_not_rounded_again(self) -> None:
        if self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            raise ValueError(
                f"expert_bias: got {check.describe(self.expert_bias)} again, as FSDP's buffer_dtype rounds it after an "
                "evaluation in full precision, expected float32: updates are lost; use "
                "MixedPrecision(buffer_dtype=None)"
            )

    def _move_counts(self) -> None:
        """The counts to where the bias is."""
        assert self.expert_bias is not None
        device = self.expert_bias.device
        for name in _COUNTS:
            counts = getattr(self, name)
            if counts is not None and counts.device != device:
                setattr(self, name, torch.zeros_like(counts, device=device) if counts.is_meta else counts.to(device))

    def _counts(self) -> dict[str, Tensor]:
        """The counts that the layer keeps, by name, where the bias is.

        Raises:
          TypeError, ValueError: one was replaced by something else than an int64 tensor of its shape.
        """
        self._move_counts()  # fully_shard moves buffers by itself
        shape = (("E", self.num_experts), ("bins", self.options.qb_bins))
        of_shape = dict(zip(_COUNTS, (shape[:1], shape), strict=True))
        kept = {name: value for name in _COUNTS if (value := getattr(self, name)) is not None}
        return {name: check.tensor(name, value, (torch.int64,), of_shape[name]) for name, value in kept.items()}

    def forward(
        self,
        x: Tensor,
        *,
        token_mask: Tensor | None = None,
        forced_experts: Tensor | None = None,
        quantized: QuantizedExperts | None = None,
    ) -> MoEOutput:
        """Applies the layer.

        Args:
          x: [..., D] float32, bfloat16 or float16, where the parameters are.
          token_mask: bool [...]; False marks padding, which gets zero output and counts nowhere.
          forced_experts: int [..., K]; the selection is given (replay). What only selects, the expert bias and groups,
            has then no part, and there is no histogram.
          quantized: with precision "fp8", what `quantized()` returned; None: the experts are quantised here.

        Returns:
          MoEOutput of `moe`; output [..., D] of the dtype of the computation.

        Raises:
          TypeError, ValueError: an argument is wrong; the message names it.
        """
        x = check.tensor("x", x, check.FLOATS, (..., ("in_features", self.in_features)))
        x = as_autocast(x) if self.dtype is None else x.to(self.dtype)
        mask = check.optional_tensor("token_mask", token_mask, check.BOOL, tuple(x.shape[:-1]))
        check.on_device_of("x", x, token_mask=mask)
        replays = forced_experts is not None
        if not replays and self._restored_under_fsdp:
            self._check_not_rounded_again()
        up_bias = getattr(self, f"{self.up_name}_bias")
        w_in, w_out = self._matrices()
        if self.group is not None:
            check_wrapping(
                self, self.group, list(self._expert_tensors().values()), (w_in, w_out, up_bias, self.down_proj_bias)
            )
        check_current(quantized, w_in, w_out)

        def weight(value: Tensor) -> Tensor:  # of float32 ones moe() gives gradients that are not rounded
            return value if value.dtype == torch.float32 else value.to(x.dtype)

        tensors: dict[str, Any] = dict(
            w_in=weight(w_in),
            w_out=weight(w_out),
            b_in=None if up_bias is None else part_of(up_bias).to(x.dtype).reshape(w_in.shape[:-1]),
            b_out=None if self.down_proj_bias is None else part_of(self.down_proj_bias).to(x.dtype),
            expert_bias=None if replays else self._bias(),
            token_mask=token_mask,
            forced_experts=forced_experts,
        )
        if is_plain(self.gate):
            tensors |= dict(x=x, gate=self.gate.weight.T, gate_bias=self.gate.bias)
        else:
            for_gate, port = fork(x, mask)
            logits = _called("gate", self.gate, (*x.shape[:-1], ("E", self.num_experts)), for_gate)
            tensors |= dict(x=x.detach(), logits=logits.float(), port=port)
        result = layer_of(
            self.options_of_replay if replays else self.options,
            tensors,
            quantized=quantized,
            qb_bin_bounds=None if replays else self.qb_bin_bounds,
            loss_group=self.loss_group,
            **self.parallel_options,
        )
        if self.training and not replays:
            self._count(result)
        if self.shared_expert is None:
            return result
        return MoEOutput(result.output + self._shared(x, mask), *result[1:])

    def _shared(self, x: Tensor, token_mask: Tensor | None) -> Tensor:
        """What the shared expert makes of x [..., D]."""
        assert self.shared_expert is not None
        if token_mask is not None:  # 0 * NaN in the gradients of the weights would be NaN
            x = torch.where(token_mask[..., None], x, 0)
        given = {}
        if self.shared_expert_gate is not None:
            logits = _called("shared_expert_gate", self.shared_expert_gate, (*x.shape[:-1], ("1", 1)), x)
            given["weights"] = torch.sigmoid(logits.float())
        output = _called("shared_expert", self.shared_expert, tuple(x.shape), x, **given).to(x.dtype)
        return output if token_mask is None else torch.where(token_mask[..., None], output, 0)

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """w_in and w_out of `moe`, of this rank's experts."""
        E, F, D = self.local_experts, self.hidden_features, self.in_features
        # These are reshaped, which takes any shape of as many elements; `moe` checks the others.
        for name, shape in ((self.up_name, (E, self.parts * F, D)), (f"{self.up_name}_bias", (E, self.parts * F))):
            value = getattr(self, name)
            if value is not None and tuple(part_of(value).shape) != shape:
                got = check.describe(part_of(value))
                raise ValueError(f"{name}: got {got}, expected [{', '.join(map(str, shape))}]")
        halves = (E, F, 2) if self.interleaved else (E, self.parts, F)
        return part_of(getattr(self, self.up_name)).reshape(*halves, D), part_of(self.down_proj)

    def quantized(self, *, gradients: bool = True) -> QuantizedExperts:
        """The layer's experts as `quantize_experts` makes them, of this rank, for calls with precision="fp8".

        Call it again when the parameters have changed, see `quantize_experts`. Under fully_shard parameters are whole
        in a forward pass only.

        Args:
          gradients: as in `quantize_experts`.

        Raises:
          ValueError: the layer has another precision.
        """
        if (precision := self.options.precision) != "fp8":
            raise ValueError(f'quantized: got a layer with precision={precision!r}, expected "fp8"')
        names = ("fp8_scales", "w_in_layout", "w_out_layout")
        options = {name: getattr(self.options, name) for name in names}
        return quantize_experts(*self._matrices(), **options, gradients=gradients)

    def expert_parameters(self) -> dict[str, nn.Parameter]:
        """The experts' parameters by name: with a group this rank's own, which on no other rank are the same."""
        return {name: p for name, p in self._expert_tensors().items() if isinstance(p, nn.Parameter)}

    def _expert_tensors(self) -> dict[str, Tensor]:
        """`expert_parameters` and the experts' buffers, which are masks of pruning and state of parametrizations."""
        named = dict(self.named_parameters()) | dict(self.named_buffers())
        named.pop("expert_bias", None)
        return {name: t for name, t in named.items() if "." not in name or name.startswith("parametrizations.")}

    def _groups(self) -> list[Any]:
        return [group for group in (self.group, self.loss_group) if group is not None]

    @torch.no_grad()
    def _count(self, result: MoEOutput) -> None:
        if self.expert_bias is not None:
            for name, counts in self._counts().items():
                add_counts(counts, getattr(result, name))

    def _state(self, name: str) -> tuple[Tensor, Tensor]:
        """The expert bias, float32 again, and the counts of this name, for an update in place."""
        assert self.expert_bias is not None
        rounded = self.expert_bias.dtype != torch.float32
        bias = self._restore_bias()
        if rounded and getattr(self, "_is_fsdp_managed_module", False):
            self._restored_under_fsdp = True
        if bias.is_meta:
            raise ValueError("expert_bias: got a tensor on meta, expected one with values, in which an update is kept")
        return bias, self._counts()[name]

    @torch.no_grad()
    def update_expert_bias(self, rate: float | Tensor = 1e-3, group: "ProcessGroup | None" = None) -> None:
        """Moves the selection bias towards balance: b += rate * sign(mean load - load), and begins to count anew.

        Auxiliary-loss-free load balancing (Wang et al. 2024, arXiv:2408.15664). The load is what was counted since the
        last update. Call it once a step, when the backward pass is over (an activation checkpoint selects again, by the
        bias of then); the host does not wait for the device.

        Args:
          rate: step of the bias, a number >= 0; or a float scalar, for example a schedule's, on the CPU or where the
            bias is. The value of a scalar on a CUDA device, or in a compiled program, is not checked.
          group: the process group over whose ranks the tokens of a step are spread: their counts are added up by one
            all-reduce, which every rank of it has to take part in. None: the counts of this process; where there are
            more, biases then differ from rank to rank. `torch.distributed.group.WORLD`: all. A layer with a `group`
            has counted the tokens of all its ranks: None where there are no others, else the data parallel ranks, or
            all; the bias is the same whether a token is counted once or once on each of the layer's ranks.

        Raises:
          TypeError: an argument has the wrong type or dtype.
          ValueError: an argument is out of range, the layer was made without `use_expert_bias`, or its state has no
            values (on meta) or no longer the shape or dtype that it was made with.
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
        """Sets the selection bias to the one under which every expert would have had its share of the tokens.

        Quantile balancing, by what was counted since the last update; where that is nothing, the bias stays. Then it
        begins to count anew. Call it when and as `update_expert_bias`.

        Args:
          group: as in `update_expert_bias`: the all-reduce is one of E * bins numbers.

        Raises:
          TypeError, ValueError: no group, or the layer was made without `balance="quantile"`.
        """
        if self.expert_bias is None or self.qb_histogram is None or self.qb_bin_bounds is None:
            raise ValueError('update_quantile_bias: got a layer of another balance, expected balance="quantile"')
        bias, counts = self._state("qb_histogram")
        total = summed(counts, check_group("group", group))
        balanced = quantile_bias(total, *self.qb_bin_bounds, self.options.topk)
        bias.copy_(torch.where(total.sum() > 0, balanced, bias))
        counts.zero_()

    def extra_repr(self) -> str:
        """The sizes, and the options that are not the default ones."""
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
                dtype=self.dtype,
            )
        )
        if self.qb_bin_bounds is not None:
            options["qb_bin_bounds"] = self.qb_bin_bounds
        else:
            del options["qb_bins"]
        defaults = {name: of.default for name, of in inspect.signature(MoE.__init__).parameters.items()}
        sizes = f"{self.in_features}, {self.hidden_features}, num_experts={self.num_experts}, topk={self.options.topk}"
        for name in ("topk", "group", "w_in_layout", "w_out_layout"):  # shown otherwise
            del options[name]
        changed = [f"{k}={v!r}" for k, v in options.items() if k in defaults and v != defaults[k]]
        placed = [f"rank {self.rank} of {self.ranks}"] if self.group is not None else []
        if self.loss_group is not None:
            placed.append(f"losses of {self.loss_group.size()} ranks")
        return ", ".join([sizes, *placed, *changed])


def _dtype(name: str, value: Any) -> torch.dtype:
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{name}: got {shown(value)}, expected a torch.dtype")
    if value not in check.FLOATS:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in check.FLOATS)
        raise TypeError(f"{name}: got {str(value).removeprefix('torch.')}, expected {names}")
    return value


def _called(name: str, module: Any, shape: Sequence[check.Axis], x: Tensor, **given: Tensor) -> Tensor:
    """What a submodule returns for x [..., D], checked.

    Raises:
      TypeError, ValueError: the submodule takes or returns something else than the layer's own does.
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
    check.on_device_of("x", x, **{f"{name}(x)": output})
    return output


def _rate(value: Any, device: torch.device) -> float | Tensor:
    """The step of an update of a bias on a device."""
    if not isinstance(value, Tensor):
        known: Any = check.number("rate", value)
    else:
        check.tensor("rate", value, check.FLOATS, ())
        if value.device not in (torch.device("cpu"), device):
            raise ValueError(f"rate: got a tensor on {value.device}, expected the CPU or {device}, where the bias is")
        known = check.host_values(value)
    if known is not None and not 0 <= known < math.inf:
        raise ValueError(f"rate: got {known}, expected a finite number >= 0")
    return value if isinstance(value, Tensor) else known
