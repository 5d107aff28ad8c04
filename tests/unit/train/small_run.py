"""A run of the real loop on a problem of a few numbers; as a script it kills itself where it is told to."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.nn.param import Param
from jaxspec.train.loop import TrainRun, train
from jaxspec.train.optimizer import adamw, schedule_of
from jaxspec.train.run_log import without_times
from jaxspec.train.settings import OptimizerSettings

STEPS, ROWS, WIDTH = 12, 4, 8
SQUARE = Param("w_XX", ("in", "out"))  # a mesh splits neither
OPTIMIZER = OptimizerSettings(learning_rate=0.05, warmup=2, weight_decay=0.1)


def loss_fn(params: Any, frozen: Any, batch: Any, key: Any) -> Any:
    """Mean squared error over the trained rows, with noise that depends on the key."""
    noise = 0.01 * jax.random.normal(key, batch["x"].shape)
    found = jnp.tanh((batch["x"] + noise) @ params["w_XX"]) @ frozen
    tokens = jnp.sum(batch["on"])
    loss = jnp.sum((found - batch["y"]) ** 2 * batch["on"]) / jnp.maximum(tokens, 1)
    return loss, {"trained_tokens": tokens, "largest": jnp.max(jnp.abs(params["w_XX"]))}


def batches(first: int, passes: int = 1) -> Iterator[dict[str, np.ndarray]]:
    for step in count(first):
        rng = np.random.default_rng(step % 2)
        x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
        made = {"x": x, "y": np.sin(x[:, 0]), "on": (rng.random(ROWS) < 0.7).astype(np.float32)}
        yield {name: leaf.reshape(passes, ROWS // passes, *leaf.shape[1:]) for name, leaf in made.items()}


def save(params: Any, place: Path) -> None:
    np.save(place / "w.npy", np.asarray(params["w_XX"]))


def init() -> Any:
    return {"w_XX": 0.3 * jax.random.normal(jax.random.key(0), (WIDTH, WIDTH))}


def small_run(directory: Path, **changes: Any) -> TrainRun:
    schedule = schedule_of(OPTIMIZER, STEPS)
    settings: dict[str, Any] = {
        "directory": directory,
        "steps": STEPS,
        "init": init,
        "optimizer": adamw(OPTIMIZER, STEPS),
        "loss_fn": loss_fn,
        "batches": batches,
        "frozen": jnp.linspace(-1, 1, WIDTH),
        "evaluate": lambda p: {"length": -float(jnp.sum(p["w_XX"] ** 2))},
        "best": "length",
        "save": save,
        "progress": lambda done: {"learning_rate": float(schedule(done - 1))},
        "save_every": 3,
        "log_every": 1,
        "evaluate_every": 4,
        "seed": 5,
        "identity": {"seed": 5},
    }
    return TrainRun(**settings | changes)


def logged(directory: Path) -> list[dict[str, float]]:
    """Entries without the times."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [without_times(json.loads(line)) for line in lines]


def killing(at: list[int], directory: Path) -> Any:
    """Batches that end the process before the update after the first of ``at`` that it has not died at."""

    def made(first: int) -> Iterator[Any]:
        for step, batch in zip(count(first), batches(first), strict=False):
            mark = directory / f"killed-{step}"
            if step in at and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    return made


if __name__ == "__main__":
    place = Path(sys.argv[1])
    train(small_run(place, batches=killing([int(n) for n in sys.argv[2:]], place)))
