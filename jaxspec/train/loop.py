"""A resumable training loop for language models: one compiled update, periodic checkpoints, a JSONL log."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax
import orbax.checkpoint as ocp

from jaxspec.shapes import Array, Params

Batch = Any
LossFn = Callable[[Params, Batch], tuple[Array, dict[str, Array]]]


@dataclass(frozen=True)
class LoopSpec:
    """What a run is made of.

    Attributes:
      steps: updates in all.
      save_every, log_every, evaluate_every: in steps.
      directory: holds ``checkpoints/`` and ``log.jsonl``; a run started again there goes on where it stopped.
    """

    steps: int
    directory: Path
    save_every: int = 100
    log_every: int = 10
    evaluate_every: int = 100


def run(
    spec: LoopSpec,
    params: Params,
    optimizer: optax.GradientTransformation,
    loss_fn: LossFn,
    batch_of: Callable[[int], Batch],
    evaluate: Callable[[Params], dict[str, float]],
    show: Callable[[str], None],
) -> Params:
    """Trains from the last checkpoint in the run's directory, or from ``params``, to the last step.

    Args:
      spec: run numbers.
      params: initial float32 parameters.
      optimizer: optax transformation.
      loss_fn: (params, batch) to (loss, metrics).
      batch_of: step to batch, a pytree; a pure function, so that a resumed run sees the same data.
      evaluate: params to held-out figures.
      show: receives one line per log entry.

    Returns:
      The parameters after the last step.
    """

    @jax.jit
    def update(params: Params, state: optax.OptState, batch: Batch):
        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state, {"loss": loss, **metrics}

    state = optimizer.init(params)
    manager = ocp.CheckpointManager(
        (spec.directory / "checkpoints").absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=1)
    )
    first = 0
    if manager.latest_step() is not None:
        first = int(manager.latest_step() or 0)
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"params": params, "state": state})
        restored: Any = manager.restore(first, args=ocp.args.StandardRestore(target))
        params, state = restored["params"], restored["state"]
        show(f"resumed at step {first}")
    began = time.monotonic()
    for step in range(first, spec.steps):
        params, state, metrics = update(params, state, batch_of(step))
        done = step + 1
        entry: dict[str, float] = {}
        if done % spec.evaluate_every == 0 or done == spec.steps:
            entry |= evaluate(params)
        if entry or done % spec.log_every == 0:
            entry |= {name: float(value) for name, value in metrics.items()}
            entry = {"step": done, "time_s": round(time.monotonic() - began, 1), **entry}
            with (spec.directory / "log.jsonl").open("a") as log:
                log.write(json.dumps(entry) + "\n")
            show("  ".join(f"{k} {v:.4g}" for k, v in entry.items()))
        if done % spec.save_every == 0 or done == spec.steps:
            manager.save(done, args=ocp.args.StandardSave({"params": params, "state": state}))
    manager.wait_until_finished()
    manager.close()
    return params
