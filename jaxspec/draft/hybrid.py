"""Prompt lookup where the text repeats itself, another drafter where it does not, chosen per row inside the step."""

from functools import partial
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.draft.ngram import Ngram
from jaxspec.protocol import Anchor, CaptureSpec, Commit, Drafter, DraftState, Proposal
from jaxspec.pytree import pytree, replace
from jaxspec.shapes import Array, Params
from jaxspec.topology import AnyTopology, Topology


@pytree
class Hybrid(Drafter):
    """Takes each row's drafts from the n-gram match of its text, or from the other drafter where there is none.

    The choice looks at committed tokens only, so every rule stays lossless: a row's drafts are point masses when they
    come from a match, and draws from the other drafter's distribution when they do not. The other drafter observes
    everything, and drafts only in steps in which some row has no match. What it predicts of experts is left out: it
    would be about its own tokens, also where a match was taken.

    Attributes:
      lookup: n-gram matches.
      other: drafts for the other rows, along the same topology.
    """

    lookup: Ngram
    other: Drafter

    @property
    def topology(self) -> Topology:
        """The topology of both."""
        return self.lookup.topology

    @property
    def needs(self) -> Literal["none", "tokens", "hidden"]:
        """As of the other drafter."""
        return self.other.needs

    @property
    def reads(self) -> CaptureSpec:
        """As of the other drafter."""
        return self.other.reads

    @property
    def slack(self) -> int:
        return self.other.slack

    def with_topology(self, topology: AnyTopology) -> Self:
        lookup, other = self.lookup.with_topology(topology), self.other.with_topology(topology)
        return replace(self, lookup=lookup, other=other)

    def update_params(self, params: Params) -> Self:
        return replace(self, other=self.other.update_params(params))

    def update_target(self, params: Params) -> Self:
        return replace(self, other=self.other.update_target(params))

    def init_state(self, rows: int, capacity: int, slack: int) -> DraftState:
        return self.other.init_state(rows, capacity, slack)

    @property
    def prefix_refusal(self) -> str:
        """As of the other drafter."""
        return self.other.prefix_refusal

    @property
    def cache_layout(self) -> tuple[Any, ...]:
        return self.other.cache_layout

    def caches_of(self, state: DraftState) -> tuple[Any, ...]:
        return self.other.caches_of(state)

    def with_caches(self, state: DraftState, caches: tuple[Any, ...]) -> DraftState:
        return self.other.with_caches(state, caches)

    def propose(self, state: DraftState, anchor: Anchor, rule: str) -> tuple[Proposal, DraftState]:
        match, _ = self.lookup.propose((), anchor, rule)
        if not self.topology.drafts:
            return match, state
        # A row that may not draft needs no drafts of the other drafter either.
        settled_B = match.valid_BN[:, 0] | (anchor.sampling.draft_limit_B == 0)
        drafted, state = self._unless_all(settled_B, state, anchor, rule)
        token_BN = jnp.where(settled_B[:, None], match.token_BN, drafted.token_BN)
        valid_BN = jnp.where(settled_B[:, None], match.valid_BN, drafted.valid_BN)
        logp_BNV = None
        if drafted.logp_BNV is not None:
            # A match was not drawn: all of its distribution is on its token.
            point = jax.nn.one_hot(match.token_BN, drafted.logp_BNV.shape[-1], dtype=bool)
            certain = jnp.where(point, 0.0, -jnp.inf)
            logp_BNV = jnp.where(settled_B[:, None, None], certain, drafted.logp_BNV)
        return Proposal(token_BN, valid_BN, logp_BNV), state

    def observe(self, state: DraftState, commit: Commit) -> DraftState:
        return self.other.observe(state, commit)

    def _unless_all(
        self, settled_B: Array, state: DraftState, anchor: Anchor, rule: str
    ) -> tuple[Proposal, DraftState]:
        """Returns the other drafter's proposal, or an empty one where no row wants it."""
        propose = partial(self.other.propose, anchor=anchor, rule=rule)
        if self.other.needs == "tokens":
            # Its own cache grows while it drafts, so a step that it does not run would leave a hole.
            return propose(state)
        shapes, _ = jax.eval_shape(propose, state)
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return lax.cond(jnp.all(settled_B), lambda s: (empty, s), propose, state)
