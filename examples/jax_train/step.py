"""The training step, a pure function of (state, batch), and the shardings of the state."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from byte_lm.step import make_optimizer
from jax_train.blocks import TOKENS, MoEBlock
from jax_train.config import Config
from jax_train.model import Decoder


class TrainState(NamedTuple):
    """The inputs of the next step, except its batch: steps done (int32), parameters, the optimiser's state."""

    step: jax.Array
    params: Any
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class Program:
    """The functions of one configuration, for one device or for the mesh of jax.set_mesh.

    Attributes:
      config: the configuration.
      block: makes the MoE blocks, as in `Decoder`.
    """

    config: Config
    block: Callable[..., MoEBlock] | None = None

    def _model(self) -> Decoder:
        return Decoder(self.config, self.block, rngs=nnx.Rngs(self.config.init_weights_seed))

    @functools.cached_property
    def _graph(self) -> nnx.GraphDef:
        return nnx.split(nnx.eval_shape(self._model))[0]

    @functools.cached_property
    def _optimizer(self) -> optax.GradientTransformation:
        return make_optimizer(self.config.steps, self.config.learning_rate)

    def _init(self) -> TrainState:
        params = nnx.split(self._model())[1]
        return TrainState(jnp.zeros((), jnp.int32), params, self._optimizer.init(params))

    @functools.cached_property
    def shapes(self) -> TrainState:
        """Shapes, dtypes and shardings of a state, for creating one and for reading a checkpoint."""
        shapes = jax.eval_shape(self._init)
        if not self.config.mesh:
            here = SingleDeviceSharding(jax.devices()[0])
            return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), shapes)
        mesh = jax.sharding.get_mesh()

        def placed(array: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(mesh, spec if any(spec) else _fsdp(array.shape, mesh.shape["data"]))
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

        return jax.tree.map(placed, shapes, nnx.get_partition_spec(shapes))

    @property
    def _shardings(self) -> Any:
        return jax.tree.map(lambda array: array.sharding, self.shapes)

    def init(self) -> TrainState:
        """The state before the first step, created in shards."""
        return jax.jit(self._init, out_shardings=self._shardings)()

    def losses(self, params: Any, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(mean nats per predicted byte, load-balance loss) of a batch [B, S + 1]."""
        logits, aux_loss = nnx.merge(self._graph, params)(batch[:, :-1])
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:].astype(jnp.int32))
        return nats.mean(), aux_loss

    def gradients(self, params: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        """(gradients of the sum of both losses, bits per predicted byte)."""

        def total(params: Any) -> tuple[jax.Array, jax.Array]:
            nats, aux_loss = self.losses(params, batch)
            return nats + aux_loss, nats / math.log(2)

        return jax.grad(total, has_aux=True)(params)

    @functools.cached_property
    def compiled_step(self):
        """(state, batch) -> (next state, bits per byte), jitted; donates the state."""

        def step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
            gradients, bits = self.gradients(state.params, batch)
            updates, opt_state = self._optimizer.update(gradients, state.opt_state, state.params)
            return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state), bits

        return jax.jit(step, donate_argnums=0, out_shardings=(self._shardings, None))

    def put(self, batch: np.ndarray) -> jax.Array:
        """Places a batch uint8 [B, S + 1] on the devices."""
        if not self.config.mesh:
            return jnp.asarray(batch)
        return jax.device_put(batch, NamedSharding(jax.sharding.get_mesh(), TOKENS))


def _fsdp(shape: tuple[int, ...], devices: int) -> PartitionSpec:
    """The sharding of a parameter outside the experts: a matrix over its first dimension that the axis divides."""
    for dimension, size in enumerate(shape if len(shape) > 1 else ()):
        if size % devices == 0:
            return PartitionSpec(*[None] * dimension, "data")
    return PartitionSpec()
