"""The transport "p2p": the ring's exchanges over the memory of peers (include/anabranch/exchange.h), without NCCL.

Each half of a pass is one custom call, whose GEMMs overlap with the transfers (p2p_passes.py). With fp8_exchange the
steps of `Transport` run one after another, and every exchange is a custom call. On each device these calls push blocks
to the peers and wait for theirs. This is correct and cannot deadlock if all devices run the same calls in the same
order, one after another:

- All devices of a mesh run one program, in which XLA has fixed the order of the calls, as for its own collectives. The
  custom calls have no side effects, so XLA may remove unused calls and merge equal ones, for all devices alike.
- Calls of one pass may use the same exchange. Each call has the result `order` of the previous one as an operand, so
  XLA cannot run two of them at the same time, not even in a command buffer with independent branches.
- A backward pass reads residuals of its forward pass, and a layer the output of an earlier one. Layers that do not
  depend on one another run in the order of the program, since XLA executes its operations on one stream.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from anabranch.jax.binding.ffi import call_exchange
from anabranch.jax.parallel.exchange import Ring
from anabranch.phases import EXCHANGE


@dataclasses.dataclass(frozen=True)
class PeerToPeer(Ring):
    """The ring over peer memory, with bitwise the same results. An object serves the calls of one pass."""

    fuses = True

    _order: list[jax.Array] = dataclasses.field(default_factory=list, compare=False, repr=False)
    """The result `order` of the last call, if there was one."""

    def _gather(self, array: jax.Array) -> jax.Array:
        shape = (self.bounds.ranks * array.shape[0], *array.shape[1:])
        return array if self._alone else self._run("all_gather", array, shape)

    def _exchange(self, blocks: jax.Array) -> jax.Array:
        return self._run("all_to_all", blocks, blocks.shape)

    def _reduce(self, array: jax.Array) -> jax.Array:
        # At most one rank has a value other than 0, so the order of the sum does not matter.
        if self._alone:
            return array
        P, T = self.bounds.ranks, self.bounds.tokens
        return jnp.sum(self._exchange(array).reshape(P, T, *array.shape[1:]), axis=0)

    @jax.named_scope(EXCHANGE)
    def _run(self, operation: str, array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        assert self.bounds.peers is not None
        name = self.bounds.peers.exchange(math.prod(shape) * array.dtype.itemsize)
        result, self._order[:] = call_exchange(operation, array, self._order, shape, name)
        return result
