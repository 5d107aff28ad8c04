"""Plain decoding that takes turns with a head: what the target computes is kept, and the head observes it later."""

from typing import Literal, cast

import jax
import jax.numpy as jnp

from jaxspec.draft.null import NoDrafts
from jaxspec.models.arch import ArchSpec
from jaxspec.models.mtp import feature_shape
from jaxspec.protocol import Anchor, CaptureSpec, Commit, Drafter, DraftState, Features, Proposal
from jaxspec.pytree import pytree, replace, static
from jaxspec.shapes import Array
from jaxspec.topology import DynamicTree, Topology

RING_SIZE = (
    128  # of the latest positions of each row: older ones would add a hundredth to what is accepted, and take time
)
CHUNK_SIZE = 64  # of them, that the head is shown at once


@pytree
class LazyState:
    """State of a head, and what it has not observed yet.

    Attributes:
      draft: the head's own.
      kept: features of position p at place p modulo R, float32 [B, R, ...].
    """

    draft: DraftState
    kept: Features


@pytree
class LazyObserver:
    """A drafter that reads features, and observes what plain decoding committed many positions at a time.

    To observe each plain step would read the head's weights each time, a tenth of a step and more for small targets;
    64 positions at once read them once. Until then the head's caches have a hole, so ``catch_up`` comes before it
    drafts again. What does not fit into what is kept is never shown: plain decoding costs the head nothing, however
    long, and the hole that is left, with whatever a request before left in it, costs the demo's head few drafts.

    Attributes:
      drafter: drafts, whatever its own topology says.
      topology: what is drafted; one without drafts is plain decoding, which only keeps features.
      arch: of the target.
      ring_size: R, positions per row that are kept.
    """

    drafter: Drafter
    topology: Topology | DynamicTree = static()
    arch: ArchSpec = static()
    ring_size: int = static(default=RING_SIZE)

    @property
    def needs(self) -> Literal["none", "tokens", "hidden"]:
        """What of the text it must have observed to draft well."""
        return "hidden"

    @property
    def reads(self) -> CaptureSpec:
        """What it reads of the target besides its last hidden states."""
        return self.drafter.reads

    @property
    def slack(self) -> int:
        """Positions written beyond the committed ones; a chunk of kept ones is padded."""
        return max(self._inner.slack, min(CHUNK_SIZE, self.ring_size))

    @property
    def _inner(self) -> Drafter:
        return replace(self.drafter, topology=self.topology)

    def init_state(self, rows: int, capacity: int, slack: int) -> LazyState:
        """Allocates the state of empty rows."""
        one, streams = (self.arch.model_dim,), feature_shape(self.arch)
        last, stream, *more = (
            jnp.zeros((rows, self.ring_size, *shape))
            for shape in (one, streams, *[one] * (len(self.reads.taps) + len(self.reads.shared_outputs)))
        )
        taps = len(self.reads.taps)
        kept = Features(last, stream, tuple(more[:taps]), tuple(more[taps:]))
        return LazyState(self._inner.init_state(rows, capacity, max(slack, self.slack)), kept)

    def propose(self, state: LazyState, anchor: Anchor, rule: str) -> tuple[Proposal, LazyState]:
        """Drafts every node; commits nothing."""
        if not self.topology.drafts:
            return NoDrafts().propose((), anchor, rule)[0], state
        proposal, draft = self._inner.propose(state.draft, anchor, rule)
        return proposal, replace(state, draft=draft)

    def observe(self, state: LazyState, commit: Commit) -> LazyState:
        """Takes over committed tokens; plain decoding only keeps the features of its one position per row."""
        if self.topology.drafts or commit.row is not None:
            return replace(state, draft=self._inner.observe(state.draft, commit))
        place_B = commit.start_B % self.ring_size
        rows_B = jnp.arange(place_B.shape[0], dtype=jnp.int32)
        kept = jax.tree.map(
            lambda all_BR, new_BT: all_BR.at[rows_B, place_B].set(new_BT[:, 0].astype(all_BR.dtype)),
            state.kept,
            commit.features,
        )
        return replace(state, kept=kept)

    def replay_features(self, state: LazyState, row: Array, position_X: Array) -> Features:
        """What was kept of some positions of a row, one batch row of X positions."""
        place_X = position_X % self.ring_size
        return cast(Features, jax.tree.map(lambda all_BR: jnp.take(all_BR[row], place_X, axis=0)[None], state.kept))
