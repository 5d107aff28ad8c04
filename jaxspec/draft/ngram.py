"""Prompt lookup: the continuations of earlier occurrences of the text's last tokens, searched on the device."""

import jax.numpy as jnp

from jaxspec.protocol import Anchor, Drafter, DraftState, Proposal
from jaxspec.pytree import pytree, static
from jaxspec.shapes import Array
from jaxspec.topology import Topology


@pytree
class Ngram(Drafter):
    """Proposes what followed the longest, most recent match of the text's suffix (Saxena 2023).

    Attributes:
      topology: chain or tree; a node's children are its context's best distinct continuations.
      longest, shortest: suffix lengths in tokens that count as a match.
    """

    topology: Topology = static()
    longest: int = static(default=4)
    shortest: int = static(default=2)
    sparse = True

    def propose(self, state: DraftState, anchor: Anchor, rule: str) -> tuple[Proposal, DraftState]:
        if self.topology.is_chain:
            return self._chain(anchor), state
        tokens: dict[int, Array] = {}
        valid: dict[int, Array] = {0: jnp.ones_like(anchor.length_B, bool)}
        for node, children in enumerate(self.topology.children):
            if not children:
                continue
            score_BS = self._matches(anchor, [tokens[n] for n in self._path(node)])
            for child in children:
                best_B, matched_B = _best(score_BS)
                tokens[child] = self._follower(anchor, best_B[:, None] + 1)[:, 0]
                valid[child] = matched_B & valid[node]
                # Siblings must differ: places that continue with the same token are out.
                same = jnp.roll(anchor.history_BS, -1, axis=1) == tokens[child][:, None]
                score_BS = jnp.where(same, -1, score_BS)
        order = range(1, self.topology.nodes)
        token_BN, valid_BN = (jnp.stack([by_node[n] for n in order], 1) for by_node in (tokens, valid))
        return Proposal(token_BN, valid_BN, None), state

    def _path(self, node: int) -> list[int]:
        path: list[int] = []
        while node > 0:
            path.insert(0, node)
            node = self.topology.parents[node]
        return path

    def _chain(self, anchor: Anchor) -> Proposal:
        best_B, matched_B = _best(self._matches(anchor, []))
        place_BN = best_B[:, None] + 1 + jnp.arange(self.topology.drafts, dtype=jnp.int32)[None]
        token_BN = self._follower(anchor, place_BN)
        return Proposal(token_BN, jnp.broadcast_to(matched_B[:, None], token_BN.shape), None)

    def _follower(self, anchor: Anchor, place_BN: Array) -> Array:
        """Returns the token at a place of the history; past its end the matched stretch repeats."""
        first = place_BN[:, :1]
        period = jnp.maximum(anchor.length_B[:, None] + 1 - first, 1)
        inside = first + (place_BN - first) % period
        return jnp.take_along_axis(anchor.history_BS, inside, axis=1, mode="clip")

    def _matches(self, anchor: Anchor, path: list[Array]) -> Array:
        """Scores every place as the last token of an earlier occurrence, -1 where there is none, [B, S]."""
        history, length_B = anchor.history_BS, anchor.length_B
        places = jnp.arange(history.shape[1], dtype=jnp.int32)[None]
        run = jnp.ones(history.shape, bool)
        size = jnp.zeros(history.shape, jnp.int32)
        for back in range(self.longest):
            if back < len(path):
                wanted = path[len(path) - 1 - back]
            else:
                at = length_B - (back - len(path))
                known = jnp.take_along_axis(history, jnp.maximum(at, 0)[:, None], axis=1)[:, 0]
                wanted = jnp.where(at >= 0, known, -1)
            # Place s matches if the text before s, read backwards, equals the suffix.
            shifted = history if back == 0 else jnp.pad(history, ((0, 0), (back, 0)), constant_values=-1)[:, :-back]
            run &= shifted == wanted[:, None]
            size += run.astype(jnp.int32)
        usable = (size >= self.shortest) & (places < length_B[:, None])
        # The longest match first, then the most recent.
        return jnp.where(usable, size * history.shape[1] + places, -1)


def _best(score_BS: Array) -> tuple[Array, Array]:
    """Returns the place of each row's best score, and whether it is a match."""
    best_B = jnp.argmax(score_BS, axis=1)
    return best_B, jnp.take_along_axis(score_BS, best_B[:, None], axis=1)[:, 0] >= 0
