"""A head that takes turns with plain decoding, and observes what that committed many positions at a time."""

from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxspec.models.arch import ArchSpec
from jaxspec.models.mtp import feature_shape
from jaxspec.protocol import Anchor, CaptureSpec, Commit, Drafter, DraftState, Features, Proposal, no_proposal
from jaxspec.pytree import pytree, replace, static
from jaxspec.shapes import Array, Params
from jaxspec.topology import PLAIN, AnyTopology

RING_SIZE = 128  # positions kept per row: older ones would add one per cent to what is accepted, and take time
CHUNK_SIZES = (8, 64)  # positions that the head is shown at once


@pytree
class LazyState:
    """State of a head, and the features that it has not observed yet.

    Attributes:
      draft: the head's own.
      ring: features of position p at index p modulo R, float32 [B, R, ...].
    """

    draft: DraftState
    ring: Features


@pytree
class LazyObserver(Drafter):
    """A drafter that needs hidden states, and skips observing in steps of plain decoding.

    To observe each plain step would read the head's weights each time, a tenth of a step and more for small targets;
    64 positions at once read them once. Only the last R positions are kept for that. Older ones stay stale in the
    head's cache, possibly from an earlier request; on the demo's head this costs few drafts
    (``tests/oracle/test_demo_head.py``).

    Attributes:
      drafter: drafts.
      arch: of the target.
      ring_size: R, positions per row that are kept.
      is_plain: whether this is the plain decoding that the drafter takes turns with, which only keeps features.
    """

    drafter: Drafter
    arch: ArchSpec = static()
    ring_size: int = static(default=RING_SIZE)
    is_plain: bool = static(default=False)
    needs = "hidden"

    @property
    def topology(self) -> AnyTopology:
        """The drafter's, or that of plain decoding."""
        return PLAIN if self.is_plain else self.drafter.topology

    @property
    def reads(self) -> CaptureSpec:
        """The hidden states of the target that the drafter reads."""
        return self.drafter.reads

    @property
    def slack(self) -> int:
        return max(self.drafter.slack, self.replay_sizes(())[-1])  # a chunk of kept positions is padded

    def with_topology(self, topology: AnyTopology) -> Self:
        return replace(self, drafter=self.drafter.with_topology(topology), is_plain=False)

    def plain(self) -> Drafter:
        return replace(self, is_plain=True)

    def update_params(self, params: Params) -> Self:
        return replace(self, drafter=self.drafter.update_params(params))

    def update_target(self, params: Params) -> Self:
        return replace(self, drafter=self.drafter.update_target(params))

    def init_state(self, rows: int, capacity: int, slack: int) -> LazyState:
        one, reads = (self.arch.model_dim,), self.reads

        def ring(*shape: int) -> Array:
            return jnp.zeros((rows, self.ring_size, *shape))

        kept = Features(
            ring(*one), ring(*feature_shape(self.arch)), tuple(ring(*one) for _ in reads.taps),
            tuple(ring(*one) for _ in reads.shared_outputs),
        )  # fmt: skip
        return LazyState(self.drafter.init_state(rows, capacity, max(slack, self.slack)), kept)

    @property
    def prefix_refusal(self) -> str:
        """As of the drafter."""
        return self.drafter.prefix_refusal

    @property
    def cache_layout(self) -> tuple[Any, ...]:
        return self.drafter.cache_layout

    def caches_of(self, state: LazyState) -> tuple[Any, ...]:
        return self.drafter.caches_of(state.draft)

    def with_caches(self, state: LazyState, caches: tuple[Any, ...]) -> LazyState:
        return replace(state, draft=self.drafter.with_caches(state.draft, caches))

    def propose(self, state: LazyState, anchor: Anchor, rule: str) -> tuple[Proposal, LazyState]:
        if self.is_plain:
            return no_proposal(anchor), state
        proposal, draft = self.drafter.propose(state.draft, anchor, rule)
        return proposal, replace(state, draft=draft)

    def observe(self, state: LazyState, commit: Commit) -> LazyState:
        # Prompts and replayed chunks come row by row; they are observed at once.
        if commit.row_B is not None or not self.is_plain:
            return replace(state, draft=self.drafter.observe(state.draft, commit))
        index_B = commit.start_B % self.ring_size
        rows_B = jnp.arange(index_B.shape[0], dtype=jnp.int32)

        def keep(ring_BR: Array, new_BT: Array) -> Array:
            return ring_BR.at[rows_B, index_B].set(new_BT[:, 0].astype(ring_BR.dtype))

        return replace(state, ring=jax.tree.map(keep, state.ring, commit.features))

    def replay_room(self, capacity: int) -> int:
        return self.ring_size

    def replay_sizes(self, buckets: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(min(size, self.ring_size) for size in CHUNK_SIZES)

    def replay_features(self, state: LazyState, row: Array, position_X: Array) -> Features:
        index_X = position_X % self.ring_size
        ring: Any = jax.tree.map(lambda ring_BR: jnp.take(ring_BR[row], index_X, axis=0)[None], state.ring)
        return ring
