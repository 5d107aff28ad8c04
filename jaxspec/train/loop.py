"""The training loop: one compiled update, checkpoints to go on from to the bit, figures, and the best parameters."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.errors import JaxspecError
from jaxspec.pytree import pytree
from jaxspec.shapes import Array, Params
from jaxspec.sharding import hosts
from jaxspec.sharding.rules import named_shardings
from jaxspec.train.checkpoints import Checkpoints, replace_directory
from jaxspec.train.metrics import Entry, MetricsLog

WEIGHT = "trained_tokens"
Batch = Any
LossFn = Callable[[Params, Any, Batch, Array], tuple[Array, dict[str, Array]]]
Update = Callable[["TrainState", Any, Batch], tuple["TrainState", dict[str, Array]]]


@dataclass(frozen=True)
class LoopSpec:
    """What a run is made of.

    Attributes:
      steps: updates in all.
      directory: holds everything of the run; a run started again there goes on where it stopped.
      save_every, log_every, evaluate_every: in updates; the last update always is saved, logged and evaluated.
      seed: of what the loss draws.
      best: evaluated figure, the higher the better, that the parameters in ``best/`` are kept by.
      identity: what the result depends on; nested JSON. A directory of other values is refused.
      tensorboard: whether TensorBoard files are written.
      wandb: project of Weights & Biases, None for not at all.
      mesh: devices that rows and parameters are split over, None for the default one.
    """

    steps: int
    directory: Path
    save_every: int = 100
    log_every: int = 10
    evaluate_every: int = 100
    seed: int = 0
    best: str | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    tensorboard: bool = False
    wandb: str | None = None
    mesh: Mesh | None = None


@dataclass(frozen=True)
class Task:
    """What is trained, and on what.

    Attributes:
      params: initial float32 parameters.
      optimizer: optax transformation.
      loss_fn: (params, frozen, batch, key) to (loss, metrics). Where the metrics have ``trained_tokens``, loss and
        metrics are means over that many positions, and passes of one update count by it.
      batches: (first update) to endless batches, one per update; leaves have the passes of an update as first axis
        and rows as second. It is called once, and gives the same batches for the same updates.
      frozen: what the loss reads besides, such as the target's parameters; an argument of the compiled update.
      evaluate: params to held-out figures.
      save: writes params into a directory, None keeps no ``best/`` and ``last/``.
      learning_rate: by update, to be logged.
    """

    params: Params
    optimizer: optax.GradientTransformation
    loss_fn: LossFn
    batches: Callable[[int], Iterator[Batch]]
    frozen: Any = None
    evaluate: Callable[[Params], Mapping[str, float]] | None = None
    save: Callable[[Params, Path], None] | None = None
    learning_rate: Callable[[int], Any] | None = None


@pytree
class TrainState:
    """What an update changes.

    Attributes:
      params: float32 parameters.
      optimizer: state of the optimizer.
      step: updates done, int32.
    """

    params: Params
    optimizer: Any
    step: Array


def run(spec: LoopSpec, task: Task, watch: Callable[[Entry], None] = lambda entry: None) -> Params:
    """Trains from the last checkpoint in the run's directory, or from the beginning, to the last update.

    Killed at any moment and started again, it ends with the same bits: parameters, optimizer state, order of the data
    and logged figures, but for times.

    Args:
      spec: run numbers.
      task: what is trained.
      watch: receives every logged entry, first of all ``{"step": first}``.

    Returns:
      The parameters after the last update.

    Raises:
      ConfigError: the directory is of another run, or in use.
      JaxspecError: the disk is full, or a loss is not finite; what went before is kept.
    """
    store = Checkpoints(spec.directory, spec.identity)
    try:
        state, about = _begin(spec, task), {}
        if store.step:
            state, about = store.restore(state)
        with _log(spec, store.step) as log:
            watch({"step": store.step})
            return _Loop(spec, task, store, log, watch, about).go(state, store.step)
    finally:
        store.close()


@contextmanager
def _log(spec: LoopSpec, step: int) -> Iterator[MetricsLog | None]:
    """The log of process 0; the others have none."""
    opened: list[MetricsLog] = []

    def begin() -> dict[str, Any]:
        opened.append(
            MetricsLog(spec.directory, step, tensorboard=spec.tensorboard, wandb=spec.wandb, settings=spec.identity)
        )
        return {}

    hosts.led(begin)
    try:
        yield opened[0] if opened else None
    finally:
        for log in opened:
            log.close()


class _Loop:
    """A run between two stops."""

    def __init__(
        self,
        spec: LoopSpec,
        task: Task,
        store: Checkpoints,
        log: MetricsLog | None,
        watch: Callable[[Entry], None],
        about: Mapping[str, Any],
    ):
        self.spec, self.task, self.store, self.log, self.watch = spec, task, store, log, watch
        self.best: float = about.get("best", -math.inf)
        self.began = time.monotonic() - about.get("time_s", 0.0)

    def go(self, state: TrainState, first: int) -> Params:
        """Runs the updates behind ``first``."""
        spec = self.spec
        places = None if spec.mesh is None else jax.tree.map(lambda x: x.sharding, state)
        update = make_update(self.task.loss_fn, self.task.optimizer, spec.seed, places)
        source = self.task.batches(first)
        for done in range(first + 1, spec.steps + 1):
            batch = next(source)
            state, metrics = update(state, self.task.frozen, _place(batch, spec.mesh))
            entry = {name: float(value) for name, value in jax.device_get(metrics).items()}
            if not all(math.isfinite(entry[name]) for name in ("loss", "grad_norm")):
                raise self._not_finite(done, entry, batch)
            last = done == spec.steps
            measured = last or done % spec.evaluate_every == 0
            if measured:
                entry |= self._evaluate(done, state.params)
            if measured or done % spec.log_every == 0:
                self._write(done, entry)
            if last or done % spec.save_every == 0:
                if self.log is not None:
                    self.log.sync()
                self.store.save(done, state, {"best": self.best, "time_s": self._time_s()})
        self._keep("last", state.params)
        return state.params

    def _evaluate(self, done: int, params: Params) -> dict[str, float]:
        """Measures, and keeps the parameters that are the best so far."""
        if self.task.evaluate is None:
            return {}
        found = dict(self.task.evaluate(params))
        if self.spec.best is None:
            return found
        if self.spec.best not in found:
            raise JaxspecError(f"evaluation: no figure {self.spec.best!r}; there are {', '.join(sorted(found))}")
        # The checkpoint of this update is saved behind it, so that a crash in between evaluates again.
        if found[self.spec.best] > self.best:
            self.best = found[self.spec.best]
            self._keep("best", params)
        return found

    def _keep(self, name: str, params: Params) -> None:
        """Writes parameters into a directory of the run."""
        save = self.task.save
        if save is None:
            return
        found = hosts.whole(params)
        if hosts.first():
            replace_directory(self.spec.directory / name, lambda place: save(found, place))

    def _write(self, done: int, entry: Entry) -> None:
        rate = self.task.learning_rate
        known = {} if rate is None else {"learning_rate": float(rate(done - 1))}
        entry = {"step": done, "time_s": self._time_s(), **known, **entry}
        if self.log is not None:
            self.log.write(entry)
        self.watch(entry)

    def _time_s(self) -> float:
        return round(time.monotonic() - self.began, 1)

    def _not_finite(self, done: int, entry: Entry, batch: Batch) -> JaxspecError:
        own = f"_{jax.process_index()}" if hosts.several() else ""
        file = self.spec.directory / f"nan_batch_{done}{own}.npz"
        leaves, _ = jax.tree_util.tree_flatten_with_path(batch)
        try:
            np.savez(file, **{jax.tree_util.keystr(path).strip(".[]'") or "batch": leaf for path, leaf in leaves})
            where = f"its batch is in {file}"
        except OSError as error:
            where = f"its batch could not be written ({error.strerror})"
        return JaxspecError(
            f"step {done}: not finite: loss {entry['loss']:.4g}, gradient norm {entry['grad_norm']:.4g}; {where}; "
            "lower the learning rate, or look at that data"
        )


def make_update(
    loss_fn: LossFn, optimizer: optax.GradientTransformation, seed: int, places: TrainState | None = None
) -> Update:
    """One compiled update: loss and gradient of every pass, then one change of the parameters.

    The state is donated. Metrics are means over the passes, with ``loss`` and ``grad_norm`` (before it is limited).

    Args:
      loss_fn: see ``Task``.
      optimizer: optax transformation.
      seed: of what the loss draws.
      places: where the state lies on a mesh, None for the default device.
    """
    both = jax.value_and_grad(loss_fn, has_aux=True)

    def one(params: Params, frozen: Any, part: Batch, key: Array) -> tuple[Array, Any]:
        (loss, metrics), grads = both(params, frozen, part, key)
        return metrics.get(WEIGHT, jnp.float32(1)), ({"loss": loss, **metrics}, grads)

    def mean(params: Params, frozen: Any, batch: Batch, key: Array) -> tuple[dict[str, Array], Params]:
        passes = jax.tree.leaves(batch)[0].shape[0]
        first = jax.tree.map(lambda x: x[0], batch)
        if passes == 1:
            return one(params, frozen, first, key)[1]

        def add(total: Any, part: tuple[Array, Batch]) -> tuple[Any, None]:
            number, rows = part
            weight, found = one(params, frozen, rows, jax.random.fold_in(key, number))
            return jax.tree.map(jnp.add, total, (weight, jax.tree.map(lambda x: weight * x, found))), None

        shapes = jax.eval_shape(one, params, frozen, first, key)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        parts = (jnp.arange(passes, dtype=jnp.uint32), batch)
        (weight, total), _ = jax.lax.scan(add, zeros, parts)
        metrics, grads = jax.tree.map(lambda x: x / jnp.maximum(weight, 1e-20), total)
        return {**metrics, **({WEIGHT: weight} if WEIGHT in metrics else {})}, grads

    def update(state: TrainState, frozen: Any, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        metrics, grads = mean(state.params, frozen, batch, key)
        # Optax mixes integers and floats.
        with jax.numpy_dtype_promotion("standard"):
            norm = optax.tree.norm(grads)
            changes, held = optimizer.update(grads, state.optimizer, state.params)
            params: Any = optax.apply_updates(state.params, changes)
        return TrainState(params, held, state.step + 1), metrics | {"grad_norm": norm}

    # Left to the compiler, the state would move, and a resumed run would compile another program than this one.
    return jax.jit(update, donate_argnums=0, out_shardings=None if places is None else (places, None))


def _begin(spec: LoopSpec, task: Task) -> TrainState:
    """The state before the first update, on its devices; the caller's parameters stay as they are."""
    params: Any = jax.tree.map(jnp.copy, task.params)
    if spec.mesh is None:
        return TrainState(params, task.optimizer.init(params), jnp.int32(0))
    whole = NamedSharding(spec.mesh, PartitionSpec())
    places = named_shardings(params, spec.mesh, allow_replication=True)
    params = jax.device_put(params, places)
    held = task.optimizer.init(params)
    where = optax.tree.map_params(
        task.optimizer, lambda _, place: place, held, places, transform_non_params=lambda _: whole
    )
    return TrainState(params, jax.device_put(held, where), jax.device_put(jnp.int32(0), whole))


def _place(batch: Batch, mesh: Mesh | None) -> Batch:
    """A batch on its devices: rows are split over ``data``, every process giving its own."""
    if mesh is None:
        return batch
    rows = NamedSharding(mesh, PartitionSpec(None, "data"))
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(rows, np.asarray(x)), batch)
