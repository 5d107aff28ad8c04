"""Drafting with Medusa heads: every depth from the one hidden state behind the last committed position."""

from typing import Literal

import jax.numpy as jnp

from jaxspec.draft.last_hidden import gather_last, scatter_last
from jaxspec.draft.parallel import draft_from
from jaxspec.draft.vocab_map import expand_to_target_vocab
from jaxspec.models.medusa import Medusa, run_medusa
from jaxspec.models.transformer import Transformer, head
from jaxspec.protocol import NO_CAPTURE, Anchor, CaptureSpec, Commit, Proposal
from jaxspec.pytree import pytree, static
from jaxspec.shapes import Array, Params
from jaxspec.topology import DynamicTree, Topology


@pytree
class MedusaDrafter:
    """Drafts as many tokens as it has heads (Cai 2024, 2401.10774); chains, and trees of the heads' best tokens.

    Attributes:
      params: parameters of the heads.
      base: the target's parameters, whose head is used where they have none of their own.
      draft_id_V: place of each token in the heads' vocabulary, W where it has none; None where they know all tokens.
      net: the heads.
      target: the target's network.
      topology: what is drafted, no deeper than there are heads.
    """

    params: Params
    base: Params
    draft_id_V: Array | None
    net: Medusa = static()
    target: Transformer = static()
    topology: Topology | DynamicTree = static()

    @property
    def needs(self) -> Literal["none", "tokens", "hidden"]:
        """What of the text it must have observed to draft well."""
        return "hidden"

    @property
    def reads(self) -> CaptureSpec:
        """What it reads of the target besides its last hidden states."""
        return NO_CAPTURE

    @property
    def slack(self) -> int:
        """Positions written beyond the committed ones."""
        return 0

    def init_state(self, rows: int, capacity: int, slack: int) -> Array:
        """Allocates the hidden state of empty rows, [B, D]."""
        return jnp.zeros((rows, self.net.spec.dim))

    def propose(self, state: Array, anchor: Anchor, rule: str) -> tuple[Proposal, Array]:
        """Drafts every node; commits nothing."""
        found_MBX = run_medusa(self.net, self.params, state)[: self.topology.max_depth]
        return draft_from(self, found_MBX.swapaxes(0, 1), anchor, rule, anchor.length_B >= 1), state

    def observe(self, state: Array, commit: Commit) -> Array:
        """Takes over committed tokens with the target's hidden states."""
        assert commit.features is not None, "what reads features is never caught up by tokens alone"
        return scatter_last(state, gather_last(commit.features.last_BTD, commit), commit)

    def logits(self, last_BTD: Array) -> Array:
        """Logits over the target's vocabulary, float32 [B, T, V]; tokens that the heads do not know have -inf."""
        spec = self.net.spec
        return (
            expand_to_target_vocab(last_BTD, self.draft_id_V)
            if spec.draft_vocab
            else head(self.target, self.base, last_BTD)
        )

    def experts(self, last_BTD: Array) -> None:
        """It predicts none."""
