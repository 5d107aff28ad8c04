"""Distills the dense draft of the pair from its target, and measures it."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.shapes import Array, Params
from lab.pair import corpus, losses
from lab.pair.forward import AMPLE, forward
from lab.pair.recipe import Recipe
from lab.pair.training import run


def measure(params: Params, target: Params, rows: np.ndarray, recipe: Recipe) -> dict[str, float]:
    """Returns how the draft follows the target in what that wrote: KL(target || draft), and agreement on the top token.

    Args:
      params: of the draft.
      target: parameters of the target.
      rows: texts; what was given is left out.
      recipe: configs and lengths.
    """

    @jax.jit
    def one(params: Params, target: Params, rows: Array) -> Array:
        logits = forward(params, rows[:, :-1], recipe.draft)[0][:, recipe.prompt - 1 :]
        wanted = forward(target, rows[:, :-1], recipe.target, AMPLE)[0][:, recipe.prompt - 1 :]
        same = jnp.mean(jnp.argmax(logits, -1) == jnp.argmax(wanted, -1))
        return jnp.stack([losses.distillation(logits, wanted), same])

    size = min(16, len(rows))
    parts = [one(params, target, rows[i : i + size]) for i in range(0, len(rows) - size + 1, size)]
    kl, agreement = np.mean([np.asarray(part) for part in parts], axis=0).tolist()
    return {"held_out_kl": kl, "held_out_agreement": agreement}


def train(data: Path, directory: Path, target: Params, texts: dict[str, np.ndarray], recipe: Recipe) -> Params:
    """Trains the draft towards the target's distribution, half on the corpus, half on the target's own texts.

    Args:
      data: token streams.
      directory: of the run.
      target: parameters of the target.
      texts: what the target wrote, ``train`` and ``held_out``.
      recipe: numbers.
    """
    stage, tokens = recipe.of_draft, np.load(data / "train.npy")

    def loss_fn(params: Params, frozen: Params, rows: Array, key: Array) -> tuple[Array, dict[str, Array]]:
        wanted = forward(frozen, rows[:, :-1], recipe.target, AMPLE)[0]
        return losses.distillation(forward(params, rows[:, :-1], recipe.draft)[0], jax.lax.stop_gradient(wanted)), {}

    def batch_of(step: int) -> np.ndarray:
        count, length = stage.rows(step)
        rng = np.random.default_rng((stage.seed, step))
        own = texts["train"][rng.integers(len(texts["train"]), size=count // 2), : length + 1]
        return np.concatenate([corpus.batch(tokens, step, count - len(own), own.shape[1] - 1, stage.seed), own])

    def evaluate(params: Params) -> dict[str, float]:
        return measure(params, target, texts["held_out"], recipe)

    more: dict[str, Any] = {"loss_fn": loss_fn, "evaluate": evaluate, "frozen": target}
    return run(directory, recipe.draft, stage, recipe.every, batch_of, **more)
