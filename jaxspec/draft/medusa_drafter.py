"""Drafting with Medusa heads: every depth from the one hidden state of the last committed position."""

import jax.numpy as jnp

from jaxspec.draft.draft_vocab import DraftVocab
from jaxspec.draft.last_hidden import gather_last, scatter_last
from jaxspec.draft.parallel import draft_from
from jaxspec.draft.target_product import CutProduct, TargetDrafter
from jaxspec.models.apply import apply
from jaxspec.models.medusa import Medusa
from jaxspec.models.transformer import Transformer
from jaxspec.protocol import Anchor, Commit, Proposal
from jaxspec.pytree import pytree, static
from jaxspec.shapes import Array, Params
from jaxspec.topology import AnyTopology


@pytree
class MedusaDrafter(TargetDrafter):
    """Drafts as many tokens as it has heads (Cai 2024, 2401.10774); chains, and trees of the heads' best tokens.

    Attributes:
      net: the heads.
    """

    params: Params
    base: Params
    vocab: DraftVocab | None
    net: Medusa = static()
    target: Transformer = static()
    topology: AnyTopology = static()
    product: CutProduct | None = None
    prefix_refusal = ""
    needs = "hidden"

    @property
    def own_product(self) -> bool:
        return bool(self.net.spec.draft_vocab)

    def init_state(self, rows: int, capacity: int, slack: int) -> Array:
        return jnp.zeros((rows, self.net.spec.dim))

    def propose(self, state: Array, anchor: Anchor, rule: str) -> tuple[Proposal, Array]:
        last_KBD = apply(self.net, self.params, state)[: self.topology.max_depth]
        return draft_from(self, last_KBD.swapaxes(0, 1), anchor, rule, anchor.length_B >= 1), state

    def observe(self, state: Array, commit: Commit) -> Array:
        return scatter_last(state, gather_last(commit.hidden.last_BTD, commit), commit)

    def logits(self, last_BTD: Array) -> Array:
        return last_BTD if self.own_product else self.target_logits(last_BTD)
