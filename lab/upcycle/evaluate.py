"""Measures held-out texts: loss with and without the routed experts, and which experts each kind of text uses."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lab.upcycle.network import Array, Kernel, Sizes, Tree, lower, upper_dense, upper_routed
from lab.upcycle.objective import cross_entropy

ROWS = 8


class Meter:
    """Held-out rows of every kind, and what measures them.

    Attributes:
      held: rows [N, length + 1] of each kind.
    """

    def __init__(self, sizes: Sizes, kernel: Kernel, held: Mapping[str, np.ndarray]) -> None:
        self.held = {kind: rows for kind, rows in held.items() if len(rows) >= ROWS}

        @jax.jit
        def dense(frozen: Tree, row_BT: Array) -> Array:
            x_BTD = lower(frozen, row_BT[:, :-1], sizes, kernel)
            return _loss(upper_dense(frozen, x_BTD, sizes, kernel), row_BT, frozen)

        @jax.jit
        def routed(frozen: Tree, experts: Tree, row_BT: Array) -> tuple[Array, Tree]:
            x_BTD = lower(frozen, row_BT[:, :-1], sizes, kernel)
            hidden_BTD, seen = upper_routed(frozen, experts, x_BTD, sizes, kernel)
            return _loss(hidden_BTD, row_BT, frozen), seen

        self._dense, self._routed = dense, routed

    def _parts(self, kind: str) -> list[Array]:
        rows = self.held[kind]
        return [jnp.asarray(rows[i : i + ROWS].astype(np.int32)) for i in range(0, len(rows) - ROWS + 1, ROWS)]

    def dense(self, frozen: Tree) -> dict[str, float]:
        """Returns the dense model's loss, nats per token, of every kind."""
        return {kind: _mean([self._dense(frozen, part) for part in self._parts(kind)]) for kind in self.held}

    def routed(self, frozen: Tree, experts: Tree) -> tuple[dict[str, float], dict[str, Any]]:
        """Returns the losses with experts, and the share of choices [layers, E] of every kind."""
        losses, use = {}, {}
        for kind in self.held:
            seen = [self._routed(frozen, experts, part) for part in self._parts(kind)]
            losses[kind] = _mean([loss for loss, _ in seen])
            share = np.mean([np.asarray(figures["used_E"]) for _, figures in seen], 0)
            use[kind] = np.round(share / share.sum(-1, keepdims=True), 4).tolist()
        return losses, use

    def means(self, frozen: Tree, experts: Tree) -> Array:
        """Returns the mean of what every router reads [layers, D]."""
        seen = [self._routed(frozen, experts, self._parts(kind)[0])[1]["mean_D"] for kind in self.held]
        return jnp.mean(jnp.stack(seen), 0)


def _loss(hidden_BTD: Array, row_BT: Array, frozen: Tree) -> Array:
    flat = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
    return cross_entropy(flat, row_BT[:, 1:].reshape(-1), frozen["embed"])


def _mean(losses: list[Array]) -> float:
    return round(float(np.mean(jax.device_get(losses))), 5)
