"""The training loop: one compiled update, checkpoints to go on from to the bit, figures, and the best parameters."""

import json
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

from jaxspec.checkpoint.heads.verifier import PROVENANCE
from jaxspec.errors import JaxspecError
from jaxspec.shapes import Params
from jaxspec.sharding import hosts
from jaxspec.sharding.rules import named_shardings
from jaxspec.train.checkpoints import Checkpoints, replace_directory
from jaxspec.train.metrics import Entry, Interval, MetricsLog
from jaxspec.train.update import Batch, LossFn, TrainState, make_update


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
      parts: how many parts the rows of a pass are computed in, for want of memory.
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
    parts: int = 1


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
      epoch: passes over the data that so many updates are, to be logged.
      provenance: what ``best/`` and ``last/`` say of where they come from, besides the step and held-out figures.
    """

    params: Params
    optimizer: optax.GradientTransformation
    loss_fn: LossFn
    batches: Callable[[int], Iterator[Batch]]
    frozen: Any = None
    evaluate: Callable[[Params], Mapping[str, float]] | None = None
    save: Callable[[Params, Path], None] | None = None
    learning_rate: Callable[[int], Any] | None = None
    epoch: Callable[[int], float] | None = None
    provenance: Mapping[str, Any] | None = None


def run(spec: LoopSpec, task: Task, watch: Callable[[Entry], None] = lambda entry: None) -> Params:
    """Trains from the last checkpoint in the run's directory, or from the beginning, to the last update.

    Killed at any moment and started again, it ends with the same bits: parameters, optimizer state, order of the data
    and logged figures, but for times.

    Args:
      spec: run numbers.
      task: what is trained.
      watch: receives every logged entry, first of all ``{"step": first}``, and what takes long and is not logged:
        ``{"step": n, "compiled_s": seconds}`` and, before acceptance is measured, ``{"step": n, "measuring": 1}``.

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
        if store.step < spec.steps:
            store.check_room(state, state.params, task.save is not None)
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

    hosts.run_on_leader(begin)
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
        self.interval, self.held_out = Interval(about.get("interval")), dict(about.get("held_out", {}))
        self.began = time.monotonic() - about.get("time_s", 0.0)
        self.pace = _Pace(spec.steps, store.step)

    def go(self, state: TrainState, first: int) -> Params:
        """Runs the updates after ``first``."""
        spec = self.spec
        places = None if spec.mesh is None else jax.tree.map(lambda x: x.sharding, state)
        update = make_update(self.task.loss_fn, self.task.optimizer, spec.seed, places, spec.parts)
        source = self.task.batches(first)
        for done in range(first + 1, spec.steps + 1):
            batch, began = next(source), time.monotonic()
            state, metrics = update(state, self.task.frozen, _place(batch, spec.mesh))
            entry = {name: float(value) for name, value in jax.device_get(metrics).items()}
            if not all(math.isfinite(entry[name]) for name in ("loss", "grad_norm")):
                raise self._not_finite(done, entry, batch)
            self._count(done, entry, time.monotonic() - began)
            last = done == spec.steps
            measured = last or done % spec.evaluate_every == 0
            found = self._evaluate(done, state.params) if measured else {}
            if measured or done % spec.log_every == 0:
                self._write(done, {**self.interval.take(), **found})
            if last or done % spec.save_every == 0:
                self._save(done, state)
        self._keep("last", state.params, spec.steps)
        return state.params

    def _count(self, done: int, entry: Entry, spent_s: float) -> None:
        """Takes one update into the figures; the first of a process is mostly compilation."""
        self.interval.add(entry)
        if self.pace.first:
            self.watch({"step": done, "compiled_s": round(spent_s, 1)})
        self.pace.add(entry.get("tokens", 0.0), spent_s)

    def _evaluate(self, done: int, params: Params) -> dict[str, float]:
        """Measures, and keeps the parameters that are the best so far."""
        if self.task.evaluate is None:
            return {}
        self.watch({"step": done, "measuring": 1})
        found = self.held_out = dict(self.task.evaluate(params))
        if self.spec.best is None:
            return found
        if self.spec.best not in found:
            raise JaxspecError(f"evaluation: no figure {self.spec.best!r}; there are {', '.join(sorted(found))}")
        # The checkpoint of this update is saved after it, so that a crash in between evaluates again.
        if found[self.spec.best] > self.best:
            self.best = found[self.spec.best]
            self._keep("best", params, done)
        return found

    def _save(self, done: int, state: TrainState) -> None:
        if self.log is not None:
            self.log.sync()
        about = {"best": self.best, "time_s": self._time_s(), "interval": self.interval.total}
        self.store.save(done, state, about | {"held_out": self.held_out})

    def _keep(self, name: str, params: Params, step: int) -> None:
        """Writes parameters into a directory of the run, and where they come from."""
        save, about = self.task.save, self.task.provenance
        if save is None:
            return
        found = hosts.gather_to_host(params)

        def write(place: Path) -> None:
            save(found, place)
            if about is not None:
                words = json.dumps({"step": step, "held_out": self.held_out, **about}, indent=2, ensure_ascii=False)
                (place / PROVENANCE).write_text(words + "\n", encoding="utf-8")

        if hosts.is_leader():
            replace_directory(self.spec.directory / name, write)

    def _write(self, done: int, entry: Entry) -> None:
        rate, epoch = self.task.learning_rate, self.task.epoch
        known = {} if rate is None else {"learning_rate": float(rate(done - 1))}
        known |= {} if epoch is None else {"epoch": epoch(done)}
        entry = {"step": done, "time_s": self._time_s(), **known, **entry, **self.pace.take(done)}
        if self.log is not None:
            self.log.write(entry)
        self.watch(entry)

    def _time_s(self) -> float:
        return round(time.monotonic() - self.began, 1)

    def _not_finite(self, done: int, entry: Entry, batch: Batch) -> JaxspecError:
        own = f"_{jax.process_index()}" if hosts.is_multiprocess() else ""
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


class _Pace:
    """Speed of the updates since the last entry, and time to go at this process's pace.

    Args:
      steps: updates in all.
      before: updates of earlier processes.
    """

    def __init__(self, steps: int, before: int):
        self.steps, self.before, self.began, self.first = steps, before, time.monotonic(), True
        self.tokens = self.spent_s = 0.0

    def add(self, tokens: float, spent_s: float) -> None:
        """Counts one update; the first is mostly compilation, and starts the clock instead."""
        if self.first:
            self.first, self.before, self.began = False, self.before + 1, time.monotonic()
        else:
            self.tokens, self.spent_s = self.tokens + tokens, self.spent_s + spent_s

    def take(self, done: int) -> Entry:
        """What is known of the speed; the next interval begins."""
        found: Entry = {}
        if self.tokens and self.spent_s:
            found["tokens_per_s"] = round(self.tokens / self.spent_s, 1)
        if done > self.before:
            found["left_s"] = round((time.monotonic() - self.began) / (done - self.before) * (self.steps - done), 1)
        self.tokens = self.spent_s = 0.0
        return found


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
