"""Prompt lookup where the text repeats itself, another drafter where it does not, chosen per row inside the step."""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.draft.ngram import Ngram
from jaxspec.protocol import Anchor, CaptureSpec, Commit, Drafter, DraftState, Proposal
from jaxspec.pytree import pytree, replace, static
from jaxspec.shapes import Array
from jaxspec.topology import Topology


@pytree
class Hybrid:
    """Takes each row's drafts from the n-gram match of its text, or from the other drafter where there is none.

    The choice looks at committed tokens only, so every rule stays lossless: a row's drafts are point masses when they
    come from a match, and draws from the other drafter's distribution when they do not. The other drafter observes
    everything, and drafts only in steps in which some row has no match. What it predicts of experts is left out: it
    would be about its own tokens, also where a match was taken.

    Attributes:
      lookup: n-gram matches.
      other: drafts for the other rows.
      topology: what both draft, whatever their own says.
    """

    lookup: Ngram
    other: Drafter
    topology: Topology = static()

    @property
    def needs(self) -> Literal["none", "tokens", "hidden"]:
        """What of the text it must have observed to draft well."""
        return self.other.needs

    @property
    def reads(self) -> CaptureSpec:
        """What it reads of the target besides its last hidden states."""
        return self.other.reads

    @property
    def slack(self) -> int:
        """Positions written beyond the committed ones."""
        return replace(self.other, topology=self.topology).slack

    def init_state(self, rows: int, capacity: int, slack: int) -> DraftState:
        """Allocates the other drafter's state."""
        return self.other.init_state(rows, capacity, slack)

    def propose(self, state: DraftState, anchor: Anchor, rule: str) -> tuple[Proposal, DraftState]:
        """Drafts every node; commits nothing."""
        match, _ = replace(self.lookup, topology=self.topology).propose((), anchor, rule)
        if not self.topology.drafts:
            return match, state
        found_B = match.valid_BN[:, 0] | (anchor.sampling.draft_limit_B == 0)
        drafted, state = self._unless_all(found_B, state, anchor, rule)
        token_BN = jnp.where(found_B[:, None], match.token_BN, drafted.token_BN)
        valid_BN = jnp.where(found_B[:, None], match.valid_BN, drafted.valid_BN)
        logp_BNV = None
        if drafted.logp_BNV is not None:
            point = jax.nn.one_hot(match.token_BN, drafted.logp_BNV.shape[-1], dtype=bool)
            certain = jnp.where(point, 0.0, -jnp.inf)
            logp_BNV = jnp.where(found_B[:, None, None], certain, drafted.logp_BNV)
        return Proposal(token_BN, valid_BN, logp_BNV), state

    def observe(self, state: DraftState, commit: Commit) -> DraftState:
        """Takes over committed tokens."""
        return replace(self.other, topology=self.topology).observe(state, commit)

    def _unless_all(self, found_B: Array, state: DraftState, anchor: Anchor, rule: str) -> tuple[Proposal, DraftState]:
        """The other drafter's proposal, or an empty one where no row wants it."""
        propose = partial(replace(self.other, topology=self.topology).propose, anchor=anchor, rule=rule)
        if self.other.needs == "tokens":
            # Its own cache grows while it drafts, so a step that it does not run would leave a hole.
            return propose(state)
        shapes, _ = jax.eval_shape(propose, state)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return lax.cond(jnp.all(found_B), lambda s: (nothing, s), propose, state)
