"""The halves of the passes of the experts on one device of a mesh.

The forward pass is one half. The backward pass has two, up to the gradients of the intermediate rows and from there on;
the gradients of routing are computed in between. Transports differ in how a half runs: `StepByStep` calls one step of a
transport after another; `InOneCall` is for the transport "p2p", where GEMMs overlap with transfers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from anabranch.jax.layer.names import named_routing
from anabranch.jax.layer.operands import LayerConfig, Operands, ffn_operands
from anabranch.jax.ops.ffn import (
    FfnConfig,
    FfnOperands,
    IntermediateGradients,
    Saved,
    SlotGemm,
    down_gradients,
    ffn_backward_by_slot,
    ffn_forward_by_slot,
    rows_gradient,
    up_gradients,
)
from anabranch.jax.ops.quantized import QuantizedOperand, quantize_rows
from anabranch.jax.parallel.exchange import RingRoute, Transport
from anabranch.jax.parallel.message import dequantize, pack, unpack
from anabranch.jax.parallel.p2p_passes import PeerPasses
from anabranch.jax.parallel.parallel import Placement
from anabranch.jax.parallel.transports import transport

#: For the operands of experts before their tokens are planned.
_NO_ROUTE: Any = RingRoute(None, None, None)  # type: ignore[arg-type]


def tensor_sum(placement: Placement, array: jax.Array) -> jax.Array:
    """The sum over the tensor axis, whose devices each have a shard of F."""
    return array if placement.parallel.tensor_axis is None else jax.lax.psum(array, placement.parallel.tensor_axis)


def _ffn_operands(
    placement: Placement, operands: Operands, route: Any, x: jax.Array, weights: jax.Array | None
) -> FfnOperands:
    """The operands of this device's experts. Only one shard of F adds b_out."""
    b_out = operands.b_out
    if b_out is not None and placement.parallel.tensor_axis is not None:
        b_out = jnp.where(jax.lax.axis_index(placement.parallel.tensor_axis) == 0, b_out, 0)
    return ffn_operands(operands._replace(x=x, b_out=b_out), route, weights)


class StepByStep:
    """The halves with the steps of a transport, for one pass."""

    # The state that `hidden` leaves to `inputs`.
    _given: FfnOperands
    _route: Any
    _wanted: tuple[str, ...]
    _dtypes: tuple[Any, Any]
    _found: IntermediateGradients
    _d_rows: jax.Array

    def __init__(self, config: LayerConfig, placement: Placement, chosen: Transport):
        self._placement, self._chosen = placement, chosen
        self._fp8_scales = config.ffn.fp8_scales if placement.parallel.fp8_exchange else None
        self._config: FfnConfig = dataclasses.replace(config.ffn, topk=chosen.topk)

    def _sent(self, route: Any, tokens: jax.Array) -> tuple[jax.Array, QuantizedOperand | None]:
        """Tokens [T, D] as they arrive at their experts, and their quantised form if they are sent as FP8."""
        if self._fp8_scales is None:
            return self._chosen.send(route, tokens), None
        arrived = unpack(self._chosen.send(route, pack(quantize_rows(tokens, self._fp8_scales))), tokens.shape[1])
        return dequantize(arrived, tokens.dtype), arrived

    def _operands(self, operands: Operands, route: Any, weights: jax.Array | None) -> FfnOperands:
        """The operands of this device's experts, to which the tokens are sent."""
        x, x_quantized = self._sent(route, operands.x)
        return _ffn_operands(self._placement, operands, route, x, weights)._replace(x_quantized=x_quantized)

    def _collected(
        self, route: Any, rows: SlotGemm, weights: jax.Array | None, dtype: Any, addend: jax.Array | None = None
    ) -> jax.Array:
        """The transport's `collect`, summed over the shards of F; the addend is added once, after that."""
        if self._placement.parallel.tensor_axis is None:
            return self._chosen.collect(route, rows, weights, dtype, addend)
        return _rounded(self._placement, self._chosen.collect(route, rows, weights, jnp.float32), dtype, addend)

    def experts(
        self, operands: Operands, experts: jax.Array, weights: jax.Array, *, save: bool
    ) -> tuple[jax.Array, Saved, Any]:
        """The forward pass.

        Args:
          operands: with this device's tokens x [T, D] and its experts.
          experts: int32 [T, K], numbered over all ranks; -1: no expert.
          weights: float32 [T, K].
          save: whether a backward pass follows.

        Returns:
          (the output [T, D], the residuals, the route).
        """
        chosen = self._chosen
        route = named_routing(chosen.plan(experts))
        early = self._config.weight_early
        given = self._operands(operands, route, chosen.send_weights(route, weights) if early else None)
        rows, saved = ffn_forward_by_slot(self._config, given, save=save)
        return self._collected(route, rows, None if early else weights, operands.x.dtype), saved, route

    def hidden(
        self,
        operands: Operands,
        route: Any,
        weights: jax.Array,
        saved: Saved,
        d_output: jax.Array,
        wanted: tuple[str, ...],
        dtypes: tuple[Any, Any],
    ) -> jax.Array:
        """The first half of the backward pass; returns this device's part of the gradient of the weights, [T, K].

        Args:
          operands, weights: as in the forward pass.
          route, saved: from the forward pass.
          d_output: the cotangent of the output, [T, D].
          wanted: the operands whose gradients are computed.
          dtypes: of the gradients of w_in and w_out.
        """
        # The cotangent of the unweighted rows goes to the experts together with the weights. The experts then have all
        # operands of d_weights, and the rows that the forward pass returned need not be saved.
        self._given = self._operands(operands, route, self._chosen.send_weights(route, weights))
        self._d_rows, quantized = self._sent(route, d_output)
        self._route, self._wanted, self._dtypes = route, wanted, dtypes
        self._found = ffn_backward_by_slot(
            self._config, self._given, saved, self._d_rows, wanted, d_out_quantized=quantized
        )
        return self._chosen.collect_weights(route, self._found.weights)

    def inputs(self, dtype: Any, addend: jax.Array | None) -> tuple[jax.Array | None, dict[str, jax.Array]]:
        """The second half of the backward pass, after `hidden`.

        Args:
          dtype: of the gradient of x.
          addend: [T, D] or None, added to the gradient of x before it is rounded.

        Returns:
          (the gradient of x, None if not wanted; the wanted gradients of the experts' parameters).
        """
        config, given, found, wanted = self._config, self._given, self._found, self._wanted
        d_x = None
        if "x" in wanted:
            d_x = self._collected(self._route, rows_gradient(config, given, found), None, dtype, addend)
        # Weight gradients come last, so that XLA can overlap them with the transfer of d_x.
        w_in_dtype, w_out_dtype = self._dtypes
        return d_x, {
            **found.parameters,
            **up_gradients(config, given, found, wanted, w_in_dtype),
            **down_gradients(config, given, found, self._d_rows, wanted, w_out_dtype),
        }


def _rounded(placement: Placement, sums: jax.Array, dtype: Any, addend: jax.Array | None) -> jax.Array:
    """The sum over the shards of F, plus the addend, in `dtype`."""
    total = tensor_sum(placement, sums)
    return (total if addend is None else total + addend).astype(dtype)


class InOneCall:
    """The halves over the memory of peers, one call each. The methods are those of `StepByStep`."""

    # The state that `hidden` leaves to `inputs`.
    _given: FfnOperands
    _route: Any
    _wanted: tuple[str, ...]
    _dtypes: tuple[Any, Any]
    _found: IntermediateGradients

    def __init__(self, config: LayerConfig, placement: Placement, chosen: Transport):
        self._config: FfnConfig = dataclasses.replace(config.ffn, topk=chosen.topk)
        self._placement, self._passes = placement, PeerPasses(placement.bounds)

    def _operands(self, operands: Operands) -> FfnOperands:
        """The operands of this device's experts, with its own tokens."""
        return _ffn_operands(self._placement, operands, _NO_ROUTE, operands.x, None)

    @property
    def _is_part(self) -> bool:
        """Whether sums are those of a shard of F."""
        return self._placement.parallel.tensor_axis is not None

    def experts(
        self, operands: Operands, experts: jax.Array, weights: jax.Array, *, save: bool
    ) -> tuple[jax.Array, Saved, Any]:
        """See StepByStep."""
        dtype = operands.x.dtype
        output, saved, route = self._passes.experts(
            self._config, self._operands(operands), experts, weights, jnp.float32 if self._is_part else dtype, save=save
        )
        return _rounded(self._placement, output, dtype, None), saved, named_routing(route)

    def hidden(
        self,
        operands: Operands,
        route: Any,
        weights: jax.Array,
        saved: Saved,
        d_output: jax.Array,
        wanted: tuple[str, ...],
        dtypes: tuple[Any, Any],
    ) -> jax.Array:
        """See StepByStep."""
        self._given, self._route, self._wanted, self._dtypes = self._operands(operands), route, wanted, dtypes
        self._found, received = self._passes.hidden(
            self._config, self._given, route, weights, saved, d_output, wanted, dtypes[1]
        )
        return jnp.sum(received.reshape(self._placement.bounds.ranks, *weights.shape), axis=0)

    def inputs(self, dtype: Any, addend: jax.Array | None) -> tuple[jax.Array | None, dict[str, jax.Array]]:
        """See StepByStep."""
        sent = (jnp.float32, None) if self._is_part else (dtype, addend)
        d_x, of_up = self._passes.inputs(
            self._config, self._given, self._route, self._found, self._wanted, *sent, self._dtypes[0]
        )
        if d_x is not None and self._is_part:
            d_x = _rounded(self._placement, d_x, dtype, addend)
        return d_x, {**self._found.parameters, **of_up}


def halves(config: LayerConfig, placement: Placement) -> StepByStep | InOneCall:
    """The halves of one pass."""
    chosen = transport(placement.transport, placement.bounds)
    fuses = chosen.fuses and not placement.parallel.fp8_exchange and placement.bounds.tokens > 0
    return (InOneCall if fuses else StepByStep)(config, placement, chosen)
