"""Runs one training of the pair, resumable."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.models.catalog import arch_of
from jaxspec.models.transformer import Transformer
from jaxspec.nn.policy import make_policy
from jaxspec.shapes import Array, Params
from jaxspec.train import loop
from lab.pair.optimizer import build as muon_for
from lab.pair.recipe import Stage


def initial(config: dict[str, Any], seed: int) -> Params:
    """Returns random float32 parameters, residual outputs scaled down by depth."""
    net = Transformer(arch_of(config), make_policy("float32"))
    scale = (2 * len(net.arch.layers)) ** -0.5

    def shrink(path: tuple, leaf: Array) -> Array:
        return leaf * scale if path[-1].key.startswith(("down_", "out_HCD")) else leaf

    return jax.tree_util.tree_map_with_path(shrink, net.initial(jax.random.key(seed)))


def run(
    directory: Path, config: dict[str, Any], stage: Stage, every: int, batch_of: Callable[[int], Any], **more: Any
) -> Params:
    """Trains a model of a config, on from where an earlier call stopped.

    Args:
      directory: of the run.
      config: published config.
      stage: numbers.
      every: updates between two checkpoints.
      batch_of: batch of an update, a pure function of its number.
      more: of ``jaxspec.train.loop.TrainRun``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    about = loop.TrainRun(
        directory=directory, steps=stage.steps, init=lambda: initial(config, stage.seed),
        optimizer=muon_for(stage.steps, matrix_peak=stage.peak, other_peak=stage.peak, warmup=stage.steps // 40),
        batches=lambda first: (np.asarray(batch_of(step))[None] for step in count(first)),
        save_every=every, log_every=max(1, every // 10), evaluate_every=every, **more,
    )  # fmt: skip
    return loop.train(about, show)


def show(entry: dict[str, float]) -> None:
    """Prints a log entry."""
    print("  ".join(f"{name} {value:.4g}" for name, value in entry.items()), flush=True)
