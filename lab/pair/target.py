"""Trains the target of the pair, and measures it."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.shapes import Array, Params
from lab.pair import corpus, losses
from lab.pair.forward import ROOM, forward
from lab.pair.recipe import Recipe
from lab.pair.training import run


def measure(params: Params, rows: np.ndarray, config: dict[str, Any], size: int = 8) -> tuple[float, np.ndarray]:
    """Returns the loss in nats per token over rows, and each expert's share [Y, E] of its layer's choices."""

    @partial(jax.jit, static_argnums=2)
    def one(params: Params, rows: Array, room: float) -> tuple[Array, Array]:
        logits, routing = forward(params, rows[:, :-1], config, room)
        shares = [jnp.mean(jax.nn.one_hot(layer.expert_MA, config["num_experts"]), (0, 1)) for layer in routing]
        return losses.cross_entropy(logits, rows[:, 1:]), jnp.stack(shares)

    size, everything = min(size, len(rows)), float(config["num_experts"])  # nothing is left out
    parts = [one(params, rows[i : i + size], everything) for i in range(0, len(rows) - size + 1, size)]
    return float(np.mean([loss for loss, _ in parts])), np.mean([np.asarray(share) for _, share in parts], axis=0)


def train(data: Path, directory: Path, recipe: Recipe) -> Params:
    """Trains the target on the corpus, experts balanced."""
    stage, config, tokens = recipe.of_target, recipe.target, np.load(data / "train.npy")
    rows = corpus.batch(np.load(data / "held_out.npy"), 0, recipe.windows, recipe.length, seed=1)

    def loss_fn(params: Params, frozen: None, rows: Array, key: Array) -> tuple[Array, dict[str, Array]]:
        logits, routing = forward(params, rows[:, :-1], config, ROOM)
        ce, balance = losses.cross_entropy(logits, rows[:, 1:]), losses.load_balance(routing)
        total = ce + recipe.balance * balance + recipe.router_z * losses.router_z(routing)
        return total, {"ce": ce, "balance": balance}

    def evaluate(params: Params) -> dict[str, float]:
        loss, share_YE = measure(params, rows, config)
        return {"held_out_loss": loss, "busiest": float(share_YE.max()), "idlest": float(share_YE.min())}

    def batch_of(step: int) -> np.ndarray:
        return corpus.batch(tokens, step, *stage.rows(step), seed=stage.seed)

    return run(directory, config, stage, recipe.every, batch_of, loss_fn=loss_fn, evaluate=evaluate)
