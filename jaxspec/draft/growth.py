"""How a drafted tree grows level by level: as its topology says, or where the draft is most confident (EAGLE-2)."""

from abc import ABC, abstractmethod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.draft.draft_scores import DraftScores
from jaxspec.protocol import Proposal, Tree
from jaxspec.pytree import replace
from jaxspec.shapes import Array
from jaxspec.topology import AnyTopology, DynamicTree, Topology


class Growth(ABC):
    """A tree while it is drafted."""

    @abstractmethod
    def grow(self, scored: DraftScores, *, drawn: bool) -> tuple[Array, Array]:
        """Adds the children of the L nodes of a level.

        Args:
          scored: ranks the tokens after each node; L may be 1 where all nodes of the level have the same.
          drawn: whether the rule needs the distributions that children are drawn from.

        Returns:
          Tokens of the next level's M nodes, and the indices of their parents in this level, both [B, M].
        """

    @abstractmethod
    def finish(self, valid_B: Array) -> Proposal:
        """Returns the nodes to verify, of the valid rows."""


def growth_of(topology: AnyTopology, rows: int) -> Growth:
    """Returns the growth of a tree that has only its anchor."""
    return ConfidentGrowth(topology, rows) if isinstance(topology, DynamicTree) else StaticGrowth(topology)


def take(x: Array, index_BM: Array) -> Array:
    """Takes entries [B, M, ...] of each row."""
    return x[jnp.arange(x.shape[0], dtype=jnp.int32)[:, None], index_BM]


class StaticGrowth(Growth):
    """Takes the best tokens after a parent as its children; nodes are numbered level by level."""

    def __init__(self, topology: Topology):
        self._topology = topology
        self._level = [0]
        self._token_BM: list[Array] = []
        self._logp_BMV: list[Array] = []

    def grow(self, scored: DraftScores, *, drawn: bool) -> tuple[Array, Array]:
        children, level = self._topology.children, self._level
        width = max(len(children[node]) for node in level)
        parent_M = [index for index, node in enumerate(level) for _ in children[node]]
        rank_M = [rank for node in level for rank in range(len(children[node]))]
        self._level = [child for node in level for child in children[node]]
        rows, nodes = scored.score_BTW.shape[:2]
        own_M = np.minimum(parent_M, nodes - 1)
        best_BLX = scored.best()[..., None] if width == 1 else scored.best_few(width)[1]
        token_BM = best_BLX[:, own_M, np.asarray(rank_M)]
        self._token_BM.append(token_BM)
        if drawn:
            self._logp_BMV.append(scored.logp()[:, own_M])
        return token_BM, jnp.broadcast_to(jnp.asarray(parent_M, jnp.int32), (rows, len(parent_M)))

    def finish(self, valid_B: Array) -> Proposal:
        token_BN = jnp.concatenate(self._token_BM, axis=1)
        logp_BNV = jnp.concatenate(self._logp_BMV, axis=1) if self._logp_BMV else None
        return Proposal(token_BN, jnp.broadcast_to(valid_B[:, None], token_BN.shape), logp_BNV)


class ConfidentGrowth(Growth):
    """Expands the most confident nodes of each level, and verifies the most confident of all.

    A candidate is its token, the log-probability of its path, and the number of its parent. The anchor is candidate 0,
    and parents have lower numbers than their children; among equally confident candidates the lower numbers win, so no
    node is verified without its parent. Nodes are point masses, for they are chosen and not drawn: where a rule needs
    distributions, the draft's own are ranked, without noise.
    """

    def __init__(self, topology: DynamicTree, rows: int):
        self._topology = topology
        zero_B1 = jnp.zeros((rows, 1), jnp.int32)
        self._candidates = [(zero_B1, jnp.zeros((rows, 1), jnp.float32), zero_B1 - 1)]
        self._number_BL, self._logp_BL = zero_B1, self._candidates[0][1]

    def grow(self, scored: DraftScores, *, drawn: bool) -> tuple[Array, Array]:
        width, scored = self._topology.top_k, replace(scored, noise=None) if drawn else scored
        best_BLX, token_BLX = scored.best_few(width)
        logp_BLX = best_BLX - jax.nn.logsumexp(scored.noisy(), axis=-1, keepdims=True) + self._logp_BL[..., None]
        token_BLX = jnp.broadcast_to(token_BLX, logp_BLX.shape)
        parent_BLX = jnp.broadcast_to(self._number_BL[..., None], logp_BLX.shape)
        rows, first = self._number_BL.shape[0], sum(logp.shape[1] for _, logp, _ in self._candidates)
        token_BC, logp_BC, parent_BC = (x.reshape(rows, -1) for x in (token_BLX, logp_BLX, parent_BLX))
        self._candidates.append((token_BC, logp_BC, parent_BC))
        self._logp_BL, best_BM = lax.top_k(logp_BC, width)
        best_BM = best_BM.astype(jnp.int32)
        self._number_BL = best_BM + first
        return take(self._candidates[-1][0], best_BM), best_BM // width

    def finish(self, valid_B: Array) -> Proposal:
        token_BC, logp_BC, parent_BC = (jnp.concatenate(x, axis=1) for x in zip(*self._candidates, strict=True))
        _, chosen_BT = lax.top_k(logp_BC, self._topology.nodes)
        # By number: parents come before children, and siblings in order of confidence.
        chosen_BT = jnp.sort(chosen_BT.astype(jnp.int32), axis=1)
        above_BT = take(parent_BC, chosen_BT)
        parent_BT = jnp.sum(chosen_BT[:, None] < above_BT[..., None], axis=2, dtype=jnp.int32)
        token_BN = take(token_BC, chosen_BT[:, 1:])
        tree = grown(jnp.where(above_BT < 0, -1, parent_BT), self._topology.max_depth)
        return Proposal(token_BN, jnp.broadcast_to(valid_B[:, None], token_BN.shape), None, tree)


def grown(parent_BT: Array, max_depth: int) -> Tree:
    """Returns the tree of nodes whose parents are known."""
    up_BT = jnp.broadcast_to(jnp.arange(parent_BT.shape[1], dtype=jnp.int32), parent_BT.shape)
    ups = [up_BT]
    for _ in range(max_depth):
        up_BT = jnp.maximum(take(parent_BT, up_BT), 0)
        ups.append(up_BT)
    up_BTJ = jnp.stack(ups, axis=2)
    depth_BT = jnp.sum(up_BTJ > 0, axis=2, dtype=jnp.int32)
    back_BTJ = depth_BT[..., None] - jnp.arange(max_depth + 1, dtype=jnp.int32)
    path_BTJ = jnp.take_along_axis(up_BTJ, jnp.maximum(back_BTJ, 0), axis=2)
    return Tree(parent_BT, depth_BT, jnp.where(back_BTJ < 0, 0, path_BTJ))
