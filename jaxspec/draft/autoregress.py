"""Drafting token by token with a network that continues from its own output, along a chain or level by level."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.kv import Window
from jaxspec.keys import Purpose, gumbel, within_step
from jaxspec.protocol import Anchor, Proposal
from jaxspec.pytree import pytree
from jaxspec.shapes import Array
from jaxspec.topology import Topology

LAWFUL = ("reject", "block")


class Cell(Protocol):
    """A drafter as its one forward; it has a cache of its own."""

    @property
    def topology(self) -> Topology:
        """What is drafted; a tree's nodes are numbered level by level."""
        ...

    @property
    def block(self) -> int:
        """Positions that attention reads at a time."""
        ...

    @property
    def vocab_size(self) -> int:
        """V of the target."""
        ...

    @property
    def stages(self) -> int:
        """How many of the first cells are programs of their own; the others share one."""
        ...

    def run(
        self, state: Any, token_BT: Array, feature: Any, position_BT: Array, window: Window, stage: int
    ) -> tuple[Array, Any, Any]:
        """Reads T tokens.

        Args:
          state: its caches, written ahead.
          token_BT: the tokens.
          feature: what it continues from, per token [B, T, ...]; None where the cache says everything.
          position_BT: where they are written along the text.
          window: where the caches are written and what is seen.
          stage: number of the cell, at most ``stages``.

        Returns:
          What the head reads [B, T, D], the feature that children continue from, and the state.
        """
        ...

    def logits(self, last_BTD: Array) -> Array:
        """Logits over the target's vocabulary, float32 [B, T, V]."""
        ...


@pytree
class Root:
    """What a drafter knows behind the anchor because it has observed it.

    Attributes:
      last_BTD: what the head reads, T being 1.
      feature: what the first draft's cell continues from, [B, 1, ...].
      valid_B: rows that have observed enough.
    """

    last_BTD: Array
    feature: Any
    valid_B: Array


def draft(cell: Cell, state: Any, anchor: Anchor, rule: str, root: Root | None = None) -> tuple[Proposal, Any]:
    """Drafts every node; commits nothing.

    Args:
      cell: runs.
      state: of the cell.
      anchor: where drafting starts.
      rule: of verification.
      root: None where the first cell reads the anchor. Such a chain takes K + 1 cells, the last of which only fills
        the cache, so that full acceptance leaves no hole in it; with a root it takes K - 1.
    """
    if root is not None and not cell.topology.drafts:
        nothing = jnp.zeros((anchor.token_B.shape[0], 0), jnp.int32)
        return Proposal(nothing, nothing.astype(bool), None), state
    walk = _chain if cell.topology.is_chain else _tree
    return walk(cell, state, anchor, rule, root)


def _scores(cell: Cell, last_BTD: Array, anchor: Anchor, depth_T: Array, rule: str) -> tuple[Array, Array]:
    """Scores at each row's temperature (log-probabilities where the rule needs them), and with ranking noise.

    Args:
      cell: knows the head.
      last_BTD: what the head reads.
      anchor: knows how rows sample.
      depth_T: depth of what is drawn.
      rule: of verification.
    """
    logits = cell.logits(last_BTD)
    if rule == "greedy":
        return logits, logits
    warm_B = (anchor.sampling.temperature_B > 0)[:, None, None]
    score = logits / jnp.where(warm_B, anchor.sampling.temperature_B[:, None, None], 1.0)
    # match: the target's own noise, so that drafts agree; reject and block need draws that no other step sees.
    purpose, place_BT = Purpose.TARGET, anchor.length_B[:, None] + depth_T[None]
    if rule != "match":
        score = jax.nn.log_softmax(score)
        purpose, place_BT = Purpose.DRAFT, within_step(anchor.length_B, jnp.broadcast_to(depth_T[None], place_BT.shape))

    def noisy(score: Array) -> Array:
        noise = gumbel(anchor.sampling.key_BX, place_BT, purpose, score.shape[-1])
        return jnp.where(warm_B, score + noise, score)

    return score, lax.cond(jnp.any(warm_B), noisy, lambda x: x, score)


def _proposal(root: Root | None, token_BN: Array, logp_BNV: Array | None) -> Proposal:
    valid = jnp.ones_like(token_BN, bool)
    return Proposal(token_BN, valid if root is None else valid & root.valid_B[:, None], logp_BNV)


def _chain(cell: Cell, state: Any, anchor: Anchor, rule: str, root: Root | None):
    rows, drafts, keep = anchor.token_B.shape[0], cell.topology.drafts, rule in LAWFUL
    known = 0 if root is None else 1

    def draw(last_BTD: Array, k: Array, drawn):
        """Draws the draft of depth k + 1."""
        _, token_BN, logp_BNV = drawn
        logp, score = _scores(cell, last_BTD, anchor, jnp.reshape(k + 1, (1,)), rule)
        token_B = jnp.argmax(score[:, 0], axis=-1).astype(jnp.int32)
        token_BN = lax.dynamic_update_slice(token_BN, token_B[:, None], (jnp.int32(0), k))
        if keep:
            logp_BNV = lax.dynamic_update_slice(logp_BNV, logp, (jnp.int32(0), k, jnp.int32(0)))
        return token_B, token_BN, logp_BNV

    def step(k: Array, carry, stage: int = cell.stages):
        state, feature, drawn = carry
        start_B = anchor.length_B + k - known
        window = Window(start_B, block=cell.block)
        last, feature, state = cell.run(state, drawn[0][:, None], feature, start_B[:, None], window, stage)
        return state, feature, draw(last, k, drawn)

    # Without a root there is one place more than drafts: that of the last cell.
    room = drafts + 1 - known
    kept = jnp.zeros((rows, room if keep else 0, cell.vocab_size), jnp.float32)
    drawn = (anchor.token_B, jnp.zeros((rows, room), jnp.int32), kept)
    if root is not None:
        drawn = draw(root.last_BTD, jnp.int32(0), drawn)
    carry = (state, None if root is None else root.feature, drawn)
    first = min(known + cell.stages, room)
    for k in range(known, first):
        carry = step(jnp.int32(k), carry, k - known)
    if first < room:
        carry = lax.fori_loop(first, room, step, carry)
    state, _, (_, token_BN, logp_BNV) = carry
    return _proposal(root, token_BN[:, :drafts], logp_BNV[:, :drafts] if keep else None), state


def _tree(cell: Cell, state: Any, anchor: Anchor, rule: str, root: Root | None):
    top, known = cell.topology, 0 if root is None else 1
    tokens: dict[int, Array] = {0: anchor.token_B}
    logps: dict[int, Array] = {}
    features: dict[int, Any] = {0: None}
    # Where the anchor is a cell, the last level is run too: the cache keeps what is accepted of it.
    for depth in range(top.max_depth + 1 - known):
        level = [n for n in range(top.nodes) if top.depth[n] == depth]
        if depth < known:
            last, feature = root.last_BTD, root.feature  # pyright: ignore[reportOptionalMemberAccess]
        else:
            token_BT = jnp.stack([tokens[n] for n in level], axis=1)
            before = [features[n] for n in level]
            feature = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *before)
            position_BT = jnp.broadcast_to((anchor.length_B + (depth - known))[:, None], token_BT.shape)
            window = _level(cell, anchor, level, known)
            stage = min(depth - known, cell.stages)
            last, feature, state = cell.run(state, token_BT, feature, position_BT, window, stage)
        if depth == top.max_depth:
            break
        logp, score = _scores(cell, last, anchor, jnp.full(len(level), depth + 1, jnp.int32), rule)
        for place, node in enumerate(level):
            children = top.children[node]
            if not children:
                continue
            _, best = lax.top_k(score[:, place], len(children))
            for rank, child in enumerate(children):
                tokens[child] = best[:, rank].astype(jnp.int32)
                logps[child] = logp[:, place]
                features[child] = jax.tree.map(lambda x, place=place: x[:, place], feature)
    order = range(1, top.nodes)
    token_BN = jnp.stack([tokens[n] for n in order], axis=1)
    logp_BNV = jnp.stack([logps[n] for n in order], axis=1) if rule in LAWFUL else None
    return _proposal(root, token_BN, logp_BNV), state


def _level(cell: Cell, anchor: Anchor, level: list[int], known: int) -> Window:
    """Where one level of a tree is written, and which nodes before it each of its nodes sees."""
    see_TT, first, end = cell.topology.ancestors_TT, level[0], level[-1] + 1
    ancestors = tuple(tuple(bool(v) for v in see_TT[n, known:end]) for n in level)
    return Window(anchor.length_B, ancestors=ancestors, offset=first - known, block=cell.block)
