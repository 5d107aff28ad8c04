"""Prompt lookup: the continuations of earlier occurrences of the text's last tokens, searched on the device."""

import jax.numpy as jnp

from jaxspec.draft.corpus import LookupCorpus
from jaxspec.protocol import Anchor, Drafter, DraftState, Proposal
from jaxspec.pytree import pytree, static
from jaxspec.shapes import Array
from jaxspec.topology import Topology


@pytree
class PastTexts:
    """Texts of requests that ended, one after another in a ring.

    Attributes:
      token_N: their tokens, -1 where nothing was written yet.
      cursor: int32 scalar, where the next text begins.
    """

    token_N: Array
    cursor: Array


@pytree
class Ngram(Drafter):
    """Proposes what followed the longest, most recent match of the text's suffix (Saxena 2023).

    With ``past_tokens`` it is suffix decoding (Oliaro et al. 2024, arXiv:2411.04975): it looks in texts of earlier
    requests, too, and drafts no further than a match is long. What it looks in changes drafts, never text.

    Attributes:
      topology: chain or tree; a node's children are its context's best distinct continuations. Chains alone look
        outside the row's own text.
      longest, shortest: suffix lengths in tokens that count as a match.
      past_tokens: how many tokens of earlier requests are kept, 0 for none.
      spec_factor: drafts per matched token, at most; 0 drafts all of the chain.
      corpus: texts that the user named; None without.
    """

    topology: Topology = static()
    longest: int = static(default=4)
    shortest: int = static(default=2)
    past_tokens: int = static(default=0)
    spec_factor: float = static(default=0.0)
    corpus: LookupCorpus | None = None
    sparse = True
    prefix_refusal = ""

    @property
    def remembers(self) -> bool:
        """Whether it keeps texts of earlier requests."""
        return self.past_tokens > 0

    def init_state(self, rows: int, capacity: int, slack: int) -> DraftState:
        if not self.remembers:
            return ()
        return PastTexts(jnp.full(self.past_tokens, -1, jnp.int32), jnp.int32(0))

    def remember(self, state: DraftState, text_S: Array, count: Array) -> DraftState:
        size = self.past_tokens
        place_S = jnp.arange(text_S.shape[0], dtype=jnp.int32)
        written_S = (place_S < count) & (place_S >= count - size)
        target_S = jnp.where(written_S, (state.cursor + place_S) % size, size)
        token_N = state.token_N.at[target_S].set(text_S, mode="drop")
        return PastTexts(token_N, (state.cursor + count) % size)

    def propose(self, state: DraftState, anchor: Anchor, rule: str) -> tuple[Proposal, DraftState]:
        if self.topology.is_chain:
            return self._chain(state, anchor), state
        tokens: dict[int, Array] = {}
        valid: dict[int, Array] = {0: jnp.ones_like(anchor.length_B, bool)}
        for node, children in enumerate(self.topology.children):
            if not children:
                continue
            score_BS = self._matches(anchor, [tokens[n] for n in self._path(node)])
            for child in children:
                best_B, matched_B = _best(score_BS)
                tokens[child] = _follower(anchor, best_B[:, None] + 1)[:, 0]
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

    def _chain(self, state: DraftState, anchor: Anchor) -> Proposal:
        """Drafts from the longest match; among equals from the row's own text, then past ones, then the corpus."""
        step_N = 1 + jnp.arange(self.topology.drafts, dtype=jnp.int32)[None]
        score_BS = self._matches(anchor, [])
        best_B, matched_B = _best(score_BS)
        score_B = jnp.take_along_axis(score_BS, best_B[:, None], axis=1)[:, 0]
        size_B = jnp.where(matched_B, score_B // score_BS.shape[1], 0)
        token_BN = _follower(anchor, best_B[:, None] + step_N)
        others = []
        if self.remembers or self.corpus is not None:
            suffix_BJ = jnp.stack([_suffix_token(anchor, back) for back in range(self.longest)], axis=1)
            if self.remembers:
                others.append(_in_past(state, suffix_BJ, step_N))
            if self.corpus is not None:
                others.append(self.corpus.continuation(suffix_BJ, step_N))
        for other_B, other_BN in others:
            longer_B = other_B > size_B
            token_BN, size_B = jnp.where(longer_B[:, None], other_BN, token_BN), jnp.maximum(size_B, other_B)
        valid_BN = (size_B >= self.shortest)[:, None] & (token_BN >= 0)
        if self.spec_factor:
            most_B = jnp.floor(size_B.astype(jnp.float32) * self.spec_factor).astype(jnp.int32)
            valid_BN &= step_N <= jnp.maximum(most_B, 1)[:, None]
        valid_BN = jnp.cumprod(valid_BN, axis=1, dtype=jnp.int32) > 0
        return Proposal(jnp.maximum(token_BN, 0), valid_BN, None)

    def _matches(self, anchor: Anchor, path: list[Array]) -> Array:
        """Scores every place as the last token of an earlier occurrence, -1 where there is none, [B, S]."""
        history, length_B = anchor.history_BS, anchor.length_B
        places = jnp.arange(history.shape[1], dtype=jnp.int32)[None]
        suffix = [*reversed(path), *(_suffix_token(anchor, back) for back in range(self.longest - len(path)))]
        size = _matched(history, jnp.stack(suffix[: self.longest], axis=1))
        usable = (size >= self.shortest) & (places < length_B[:, None])
        # The longest match first, then the most recent.
        return jnp.where(usable, size * history.shape[1] + places, -1)


def _suffix_token(anchor: Anchor, back: int) -> Array:
    """Returns the token so many before each row's last one, -1 before its text."""
    at = anchor.length_B - back
    token_B = jnp.take_along_axis(anchor.history_BS, jnp.maximum(at, 0)[:, None], axis=1)[:, 0]
    return jnp.where(at >= 0, token_B, -1)


def _matched(text_BL: Array, suffix_BJ: Array) -> Array:
    """Counts for every place how many tokens of the suffix, the last first, the text that ends there has."""
    run = jnp.ones((suffix_BJ.shape[0], text_BL.shape[1]), bool)
    size = jnp.zeros(run.shape, jnp.int32)
    for back in range(suffix_BJ.shape[1]):
        shifted = text_BL if back == 0 else jnp.pad(text_BL, ((0, 0), (back, 0)), constant_values=-1)[:, :-back]
        run &= (shifted == suffix_BJ[:, back, None]) & (suffix_BJ[:, back, None] >= 0)
        size += run.astype(jnp.int32)
    return size


def _best(score_BS: Array) -> tuple[Array, Array]:
    """Returns the place of each row's best score, and whether it is a match."""
    best_B = jnp.argmax(score_BS, axis=1)
    return best_B, jnp.take_along_axis(score_BS, best_B[:, None], axis=1)[:, 0] >= 0


def _follower(anchor: Anchor, place_BN: Array) -> Array:
    """Returns the token at a place of the history; past its end the matched stretch repeats."""
    first = place_BN[:, :1]
    period = jnp.maximum(anchor.length_B[:, None] + 1 - first, 1)
    inside = first + (place_BN - first) % period
    return jnp.take_along_axis(anchor.history_BS, inside, axis=1, mode="clip")


def _in_past(past: PastTexts, suffix_BJ: Array, step_N: Array) -> tuple[Array, Array]:
    """Returns the length of the best match in past texts, the latest of the longest, and what followed it."""
    capacity = past.token_N.shape[0]
    place_N = jnp.arange(capacity, dtype=jnp.int32)
    age_N = (past.cursor - 1 - place_N) % capacity
    score_BN = _matched(past.token_N[None], suffix_BJ) * capacity + (capacity - 1 - age_N)[None]
    best_B = jnp.argmax(score_BN, axis=1).astype(jnp.int32)
    size_B = jnp.take_along_axis(score_BN, best_B[:, None], axis=1)[:, 0] // capacity
    # After the newest token come the oldest.
    known_BN = step_N <= age_N[best_B][:, None]
    token_BN = past.token_N[(best_B[:, None] + step_N) % capacity]
    return size_B, jnp.where(known_BN, token_BN, -1)
