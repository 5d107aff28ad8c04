"""The compiled update: loss and gradients of its rows, some at a time, then one change of the parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.nn.shardings import named_shardings
from jaxspec.pytree import pytree
from jaxspec.shapes import Array, Params
from jaxspec.sharding.compiler_options import compiler_options
from jaxspec.train.run_log import SUMS, WEIGHT

AnyBatch = Any  # a pytree with passes and rows as first axes
LossFn = Callable[[Params, Any, AnyBatch, Array], tuple[Array, dict[str, Array]]]
Update = Callable[["TrainState", Any, AnyBatch], tuple["TrainState", dict[str, Array]]]


@pytree
class TrainState:
    """The state that an update changes: float32 parameters, state of the optimizer, and updates done, int32."""

    params: Params
    optimizer: Any
    step: Array


def state_shardings(state: TrainState, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Returns where a state lies on a mesh: moments where their parameters do, counters on each device."""
    replicated: Any = NamedSharding(mesh, PartitionSpec())
    params = named_shardings(state.params, mesh, allow_replication=True)
    moments = optax.tree.map_params(
        optimizer, lambda _, place: place, state.optimizer, params, transform_non_params=lambda _: replicated
    )
    return TrainState(params, moments, replicated)


def make_update(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    seed: int,
    shardings: TrainState | None = None,
    parts: int = 1,
) -> Update:
    """Compiles an update: loss and gradient of every pass, then one change of the parameters.

    The state is donated. Metrics are means over the passes, with ``loss`` and ``grad_norm`` (before it is limited).

    Args:
      loss_fn: see ``TrainRun``.
      optimizer: optax transformation.
      seed: of what the loss draws.
      shardings: of the state on a mesh, None for the default device.
      parts: how many parts the rows of a pass are computed in, one after the other, all with the pass's key.
    """
    both = jax.value_and_grad(loss_fn, has_aux=True)

    def one(params: Params, frozen: Any, part: AnyBatch, key: Array) -> Any:
        (loss, metrics), grads = both(params, frozen, part, key)
        counts = {name: metrics[name] for name in SUMS if name in metrics}
        means = {"loss": loss} | {name: value for name, value in metrics.items() if name not in counts}
        return (counts.get(WEIGHT, jnp.float32(1)), counts), (means, grads)

    def mean(params: Params, frozen: Any, batch: AnyBatch, key: Array) -> tuple[dict[str, Array], Params]:
        passes = jax.tree.leaves(batch)[0].shape[0]
        if passes * parts == 1:
            (_, counts), (means, grads) = one(params, frozen, jax.tree.map(lambda x: x[0], batch), key)
            return means | counts, grads
        batch = jax.tree.map(lambda x: _split(x, parts), batch)

        def add(total: Any, part: tuple[Array, AnyBatch]) -> tuple[Any, None]:
            number, rows = part
            own = key if passes == 1 else jax.random.fold_in(key, number)
            (weight, counts), results = one(params, frozen, rows, own)
            weighted = jax.tree.map(lambda x: weight * x, results)
            return jax.tree.map(jnp.add, total, ((weight, counts), weighted)), None

        shapes = jax.eval_shape(one, params, frozen, jax.tree.map(lambda x: x[0], batch), key)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        numbers = jnp.repeat(jnp.arange(passes, dtype=jnp.uint32), parts)
        ((weight, counts), total), _ = jax.lax.scan(add, zeros, (numbers, batch))
        means, grads = jax.tree.map(lambda x: x / jnp.maximum(weight, 1e-20), total)
        return means | counts, grads

    def update(state: TrainState, frozen: Any, batch: AnyBatch) -> tuple[TrainState, dict[str, Array]]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        metrics, grads = mean(state.params, frozen, batch, key)
        # Optax mixes integers and floats.
        with jax.numpy_dtype_promotion("standard"):
            norm = optax.tree.norm(grads)
            changes, held = optimizer.update(grads, state.optimizer, state.params)
            params: Any = optax.apply_updates(state.params, changes)
        return TrainState(params, held, state.step + 1), metrics | {"grad_norm": norm}

    # Left to the compiler, the state would move, and a resumed run would compile another program than this one.
    out = None if shardings is None else (shardings, None)
    return jax.jit(update, donate_argnums=0, out_shardings=out, compiler_options=compiler_options())


def _split(x_AB: Array, parts: int) -> Array:
    """Reshapes passes [A, B, ...] to [A * parts, B / parts, ...]; every part has rows of all devices."""
    passes, rows = x_AB.shape[:2]
    apart = x_AB.reshape(passes, rows // parts, parts, *x_AB.shape[2:])
    return apart.swapaxes(1, 2).reshape(passes * parts, rows // parts, *x_AB.shape[2:])
