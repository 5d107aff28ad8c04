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
from jaxspec.nn.shardings import named_shardings
from jaxspec.shapes import Params
from jaxspec.sharding import hosts
from jaxspec.train.checkpoints import Checkpoints, replace_directory
from jaxspec.train.run_log import FILE_ONLY, Entry, Interval, MetricsLog, Watcher
from jaxspec.train.settings import LoggingSettings
from jaxspec.train.update import AnyBatch, LossFn, TrainState, make_update, state_shardings


@dataclass(frozen=True, kw_only=True)
class TrainRun:
    """Everything that a training run is made of.

    Attributes:
      directory: holds everything of the run; a run started again there goes on where it stopped.
      steps: updates in all.
      init: makes the initial float32 parameters, in arrays that nothing else holds.
      optimizer: optax transformation.
      loss_fn: (params, frozen, batch, key) to (loss, metrics). Where the metrics have ``trained_tokens``, loss and
        metrics are means over that many positions, and passes of one update count by it.
      batches: (first update) to endless batches, one per update; leaves have the passes of an update as first axis
        and rows as second. It is called once, and gives the same batches for the same updates.
      frozen: what the loss reads besides, such as the target's parameters; an argument of the compiled update.
      evaluate: params to held-out figures.
      best: evaluated figure, the higher the better, that the parameters in ``best/`` are kept by.
      save: writes params into a directory, None keeps no ``best/`` and ``last/``.
      progress: what follows from the number of updates done and is logged with it, such as the learning rate.
      save_every, log_every, evaluate_every: in updates; the last update always is saved, logged and evaluated.
      seed: of what the loss draws.
      identity: what the result depends on; nested JSON. A directory of other values is refused.
      provenance: what ``best/`` and ``last/`` say of where they come from, besides the step and held-out figures.
      logging: where figures go besides ``metrics.jsonl``.
      mesh: devices that rows and parameters are split over, None for the default one.
      rows_over: axes of the mesh that rows are split over.
      parts: how many parts the rows of a pass are computed in, for want of memory.
      seconds_at_peak: of an update if all its products were computed at the devices' peak, 0 where that is not known;
        the log then has ``mfu``, their share of the time that updates take.
    """

    directory: Path
    steps: int
    init: Callable[[], Params]
    optimizer: optax.GradientTransformation
    loss_fn: LossFn
    batches: Callable[[int], Iterator[AnyBatch]]
    frozen: Any = None
    evaluate: Callable[[Params], Mapping[str, float]] | None = None
    best: str | None = None
    save: Callable[[Params, Path], None] | None = None
    progress: Callable[[int], Mapping[str, float]] = lambda done: {}
    save_every: int = 100
    log_every: int = 10
    evaluate_every: int = 100
    seed: int = 0
    identity: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] | None = None
    logging: LoggingSettings = FILE_ONLY
    mesh: Mesh | None = None
    rows_over: tuple[str, ...] = ("data",)
    parts: int = 1
    seconds_at_peak: float = 0.0


def train(run: TrainRun, watch: Watcher = lambda entry: None) -> Params:
    """Trains from the last checkpoint in the run's directory, or from the beginning, to the last update.

    Killed at any moment and started again, it ends with the same bits: parameters, optimizer state, order of the data
    and logged figures, but for times.

    Args:
      run: what is trained, on what, and for how long.
      watch: receives every logged entry, first of all ``{"step": first, "steps": all}``, and what takes long and is not
        logged:
        ``{"step": n, "compiled_s": seconds}`` and, before acceptance is measured, ``{"step": n, "measuring": 1}``.

    Raises:
      ConfigError: the directory is of another run, or in use.
      JaxspecError: the disk is full, or a loss is not finite; what went before is kept.
    """
    store = Checkpoints(run.directory, run.identity)
    try:
        state, about = _initial_state(run), {}
        if store.step:
            state, about = store.restore(state)
        if store.step < run.steps:
            store.check_room(state, state.params, heads_kept=run.save is not None)
        with _open_log(run, store.step) as log:
            watch({"step": store.step, "steps": run.steps})
            return _Loop(run, store, log, watch, about).go(state, store.step)
    finally:
        store.close()


@contextmanager
def _open_log(run: TrainRun, step: int) -> Iterator[MetricsLog | None]:
    """Opens the log of process 0; the others have none."""
    opened: list[MetricsLog] = []

    def begin() -> dict[str, Any]:
        opened.append(MetricsLog(run.directory, step, run.logging, settings=run.identity))
        return {}

    hosts.run_on_leader(begin)
    try:
        yield opened[0] if opened else None
    finally:
        for log in opened:
            log.close()


class _Loop:
    """A run from the checkpoint that it goes on from to its end."""

    def __init__(
        self, run: TrainRun, store: Checkpoints, log: MetricsLog | None, watch: Watcher, about: Mapping[str, Any]
    ):
        self.run, self.store, self.log, self.watch = run, store, log, watch
        self.best: float = about.get("best", -math.inf)
        self.interval, self.held_out = Interval(about.get("interval")), dict(about.get("held_out", {}))
        self.began = time.monotonic() - about.get("time_s", 0.0)
        self.pace = _Pace(run.steps, store.step, run.seconds_at_peak)
        self.begun: list[_Begun] = []

    def go(self, state: TrainState, first: int) -> Params:
        """Runs the updates after ``first``."""
        run = self.run
        shardings = None if run.mesh is None else jax.tree.map(lambda x: x.sharding, state)
        update = make_update(run.loss_fn, run.optimizer, run.seed, shardings, run.parts)
        source = run.batches(first)
        for done in range(first + 1, run.steps + 1):
            batch = next(source)
            state, metrics = update(state, run.frozen, _place(batch, run))
            last = done == run.steps
            measured = last or done % run.evaluate_every == 0
            logged, saved = measured or done % run.log_every == 0, last or done % run.save_every == 0
            # The device computes while the next batch is made: an update is looked at when the next one has begun.
            self._wait(keep=0 if logged or saved or self.pace.first else 1, begun=_Begun(done, metrics, batch))
            figures = self._evaluate(done, state.params) if measured else {}
            if logged:
                self._write(done, {**self.interval.take(), **figures})
            if saved:
                self._save(done, state)
            if measured or saved:
                self.pace.restart_clock()
        self._keep("last", state.params, run.steps)
        return state.params

    def _wait(self, keep: int, begun: "_Begun") -> None:
        """Counts updates that were begun, but for the last ``keep``; the first of a process is mostly compilation."""
        self.begun.append(begun)
        while len(self.begun) > keep:
            one = self.begun.pop(0)
            entry = {name: float(value) for name, value in jax.device_get(one.metrics).items()}
            if not all(math.isfinite(entry[name]) for name in ("loss", "grad_norm")):
                raise self._not_finite(one.step, entry, one.batch)
            self.interval.add(entry)
            is_first = self.pace.first
            spent_s = self.pace.add(entry.get("tokens", 0.0))
            if is_first:
                self.watch({"step": one.step, "compiled_s": round(spent_s, 1)})

    def _evaluate(self, done: int, params: Params) -> dict[str, float]:
        """Measures, and keeps the parameters that are the best so far."""
        if self.run.evaluate is None:
            return {}
        self.watch({"step": done, "measuring": 1})
        figures = self.held_out = dict(self.run.evaluate(params))
        if self.run.best is None:
            return figures
        if self.run.best not in figures:
            raise JaxspecError(f"evaluation: no figure {self.run.best!r}; there are {', '.join(sorted(figures))}")
        # The checkpoint of this update is saved after it: a run that crashed in between evaluates again.
        if figures[self.run.best] > self.best:
            self.best = figures[self.run.best]
            self._keep("best", params, done)
        return figures

    def _save(self, done: int, state: TrainState) -> None:
        if self.log is not None:
            self.log.sync()
        about = {"best": self.best, "time_s": self._time_s(), "interval": self.interval.total}
        self.store.save(done, state, about | {"held_out": self.held_out})

    def _keep(self, name: str, params: Params, step: int) -> None:
        """Writes parameters into a directory of the run, and where they come from."""
        save, about = self.run.save, self.run.provenance
        if save is None:
            return
        on_host = hosts.gather_to_host(params)

        def write(directory: Path) -> None:
            save(on_host, directory)
            if about is not None:
                words = json.dumps({"step": step, "held_out": self.held_out, **about}, indent=2, ensure_ascii=False)
                (directory / PROVENANCE).write_text(words + "\n", encoding="utf-8")

        if hosts.is_leader():
            replace_directory(self.run.directory / name, write)

    def _write(self, done: int, entry: Entry) -> None:
        progress = self.run.progress(done)
        entry = {"step": done, "time_s": self._time_s(), **progress, **entry, **self.pace.take(done)}
        if self.log is not None:
            self.log.write(entry)
        self.watch(entry)

    def _time_s(self) -> float:
        return round(time.monotonic() - self.began, 1)

    def _not_finite(self, done: int, entry: Entry, batch: AnyBatch) -> JaxspecError:
        own = f"_{jax.process_index()}" if hosts.is_multiprocess() else ""
        file = self.run.directory / f"nan_batch_{done}{own}.npz"
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


@dataclass(frozen=True)
class _Begun:
    """An update that the device may still compute: its number, its figures to be, and its batch."""

    step: int
    metrics: Mapping[str, Any]
    batch: AnyBatch


class _Pace:
    """Speed of the updates since the last entry, and time left at this process's pace; ``before`` were done earlier."""

    def __init__(self, steps: int, before: int, seconds_at_peak: float = 0.0):
        self.steps, self.before, self.first, self.seconds_at_peak = steps, before, True, seconds_at_peak
        self.began = self.seen = time.monotonic()
        self.tokens = self.spent_s = 0.0
        self.updates = 0

    def add(self, tokens: float) -> float:
        """Counts one update; the first is mostly compilation, and starts the clock instead; returns its seconds."""
        now = time.monotonic()
        spent_s, self.seen = now - self.seen, now
        if self.first:
            self.first, self.before, self.began = False, self.before + 1, now
        else:
            self.tokens, self.spent_s, self.updates = self.tokens + tokens, self.spent_s + spent_s, self.updates + 1
        return spent_s

    def restart_clock(self) -> None:
        """Leaves out the time since the last update, which was spent on something else."""
        self.seen = time.monotonic()

    def take(self, done: int) -> Entry:
        """Returns what is known of the speed; the next interval begins."""
        speed: Entry = {}
        if self.tokens and self.spent_s:
            speed["tokens_per_s"] = round(self.tokens / self.spent_s, 1)
        if self.seconds_at_peak and self.spent_s:
            speed["mfu"] = round(self.updates * self.seconds_at_peak / self.spent_s, 4)
        if done > self.before:
            speed["left_s"] = round((time.monotonic() - self.began) / (done - self.before) * (self.steps - done), 1)
        self.tokens = self.spent_s = 0.0
        self.updates = 0
        return speed


def _initial_state(run: TrainRun) -> TrainState:
    """Makes the state before the first update, on its devices."""
    params: Any = run.init()
    if run.mesh is None:
        return TrainState(params, run.optimizer.init(params), jnp.int32(0))
    params = jax.device_put(params, named_shardings(params, run.mesh, allow_replication=True))
    state = TrainState(params, run.optimizer.init(params), jnp.int32(0))
    return jax.device_put(state, state_shardings(state, run.optimizer, run.mesh))


def _place(batch: AnyBatch, run: TrainRun) -> AnyBatch:
    """Puts a batch on its devices, every process giving its own rows."""
    if run.mesh is None:
        return batch
    rows = NamedSharding(run.mesh, PartitionSpec(None, run.rows_over))
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(rows, np.asarray(x)), batch)
