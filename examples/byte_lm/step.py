"""The training step and the evaluation, pure functions of (state, batch)."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from anabranch.jax.nnx import RouterState
from byte_lm.data import windows
from byte_lm.model import Balance, ByteLM
from byte_lm.options import Options
from mesh import parse_mesh


class TrainState(NamedTuple):
    """The inputs of the next step, except its batch.

    Attributes:
      step: int32 scalar, steps done.
      params: the parameters that are trained: all, or with --lora the factors of the adapters.
      router: the routers' state (selection biases), which the optimiser does not update.
      opt_state: the optimiser's state.
      frozen: () or, with --lora, (the model's other parameters,).
    """

    step: jax.Array
    params: Any
    router: Any
    opt_state: Any
    frozen: tuple[Any, ...] = ()


class StepMetrics(NamedTuple):
    """The metrics of a step: the batch's loss in bits per byte, float32, and the loads int32 [layers, E]."""

    train_bits: jax.Array
    loads: jax.Array


def make_optimizer(steps: int, lr: float) -> optax.GradientTransformation:
    """AdamW with gradient clipping, a short warm-up and cosine decay to 1/50 of the peak rate `lr`."""
    warmup = min(100, steps // 10)
    rate = optax.warmup_cosine_decay_schedule(0.0, lr, warmup, steps, lr / 50)
    adamw = optax.adamw(
        rate, b2=0.95, weight_decay=0.1, mask=lambda params: jax.tree.map(lambda value: value.ndim >= 2, params)
    )
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


@dataclasses.dataclass(frozen=True)
class Program:
    """The functions of one configuration.

    Attributes:
      options: the configuration.
      graph: structure of the model, which `nnx.merge` combines with the arrays of a state.
      optimizer: the optimiser of the parameters.
    """

    options: Options
    graph: nnx.GraphDef
    optimizer: optax.GradientTransformation

    @classmethod
    def of(cls, options: Options) -> "Program":
        """The program of these options; allocates no array."""
        graph, *_ = nnx.split(nnx.eval_shape(lambda: _model(options)), *_kinds(options))
        return cls(options, graph, make_optimizer(options.steps, options.lr))

    def init(self) -> TrainState:
        """The sharded state before the first step, which the seed determines."""
        return jax.device_put(self._init(), self.shardings)

    def _init(self) -> TrainState:
        _, params, *frozen, router = nnx.split(_model(self.options), *_kinds(self.options))
        return TrainState(jnp.zeros((), jnp.int32), params, router, self.optimizer.init(params), tuple(frozen))

    def adapt(self, base: TrainState) -> TrainState:
        """The state before the first step of adapters on the model of `base`."""
        return self.init()._replace(router=base.router, frozen=(base.params,))

    @functools.cached_property
    def shapes(self) -> TrainState:
        """Shapes, dtypes and shardings of a state, for reading a checkpoint."""
        shapes = jax.eval_shape(self._init)
        return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, self.shardings)

    @functools.cached_property
    def shardings(self) -> Any:
        """The shardings of a state: the one device, or the parameters' shardings on the mesh."""
        shapes = jax.eval_shape(self._init)
        if not self.options.mesh:
            return jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), shapes)
        mesh = jax.sharding.get_mesh()
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), nnx.get_partition_spec(shapes))

    def _put(self, batch: np.ndarray) -> jax.Array | np.ndarray:
        """Shards a batch [B, ...]."""
        if not self.options.mesh:
            return batch
        return jax.device_put(batch, NamedSharding(jax.sharding.get_mesh(), PartitionSpec(("data", "expert"))))

    def train_step(self, state: TrainState, batch: np.ndarray) -> tuple[TrainState, StepMetrics]:
        """(state, batch uint8 [B, seq + 1]) -> (next state, metrics); donates the state."""
        return self._compiled_step(state, self._put(batch))

    @functools.cached_property
    def _compiled_step(self):
        return jax.jit(self._train_step, donate_argnums=0, out_shardings=(self.shardings, None))

    def _train_step(self, state: TrainState, batch: jax.Array) -> tuple[TrainState, StepMetrics]:
        def loss_of(params: Any) -> tuple[jax.Array, tuple[jax.Array, Balance]]:
            nats, aux_loss, balance = self._losses((params, *state.frozen), state.router, batch)
            return nats.mean() + aux_loss, (nats.mean(), balance)

        grads, (nats, balance) = jax.grad(loss_of, has_aux=True)(state.params)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        model = nnx.merge(self.graph, optax.apply_updates(state.params, updates), *state.frozen, state.router)
        model.update_biases(balance)
        _, params, *frozen, router = nnx.split(model, *_kinds(self.options))
        state = TrainState(state.step + 1, params, router, opt_state, tuple(frozen))
        return state, StepMetrics(nats / math.log(2), balance.loads)

    def _losses(self, params: tuple[Any, ...], router: Any, batch: jax.Array) -> tuple[jax.Array, jax.Array, Balance]:
        """(nats per predicted byte [B, seq], load-balance loss, statistics for the biases)."""
        logits, aux_loss, balance = nnx.merge(self.graph, *params, router)(batch[:, :-1])
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:].astype(jnp.int32))
        return nats, aux_loss, balance

    @functools.cached_property
    def _nats(self):
        return jax.jit(lambda params, router, batch: self._losses(params, router, batch)[0].sum(axis=1))

    def evaluate(self, state: TrainState, text: np.ndarray, starts: np.ndarray) -> float:
        """Mean bits per byte over the windows of `text` uint8 [N] at `starts` int [W]."""
        size, total = self.options.batch, 0.0
        for begin in range(0, len(starts), size):
            chosen = starts[begin : begin + size]
            batch = windows(text, np.resize(chosen, size), self.options.seq)
            nats = np.asarray(self._nats((state.params, *state.frozen), state.router, self._put(batch)))
            total += float(nats[: len(chosen)].sum(dtype=np.float64))
        return total / (len(starts) * self.options.seq * math.log(2))

    def logits(self, state: TrainState, tokens: jax.Array) -> jax.Array:
        """float32 [1, S, 256]: logits of the byte after each of `tokens` [1, S]."""
        sizes = parse_mesh(self.options.mesh)
        repeated = jnp.broadcast_to(tokens, (sizes["data"] * sizes["expert"], tokens.shape[1]))  # once per shard
        return nnx.merge(self.graph, state.params, *state.frozen, state.router)(repeated)[0][:1]


def _kinds(options: Options) -> tuple[Any, ...]:
    """The variables of a model by kind: what is trained, with --lora what is frozen, the routers' state."""
    return (nnx.LoRAParam, nnx.Param, RouterState) if options.lora else (nnx.Param, RouterState)


def _model(options: Options) -> ByteLM:
    return ByteLM(options.model(), rngs=nnx.Rngs(options.seed))
