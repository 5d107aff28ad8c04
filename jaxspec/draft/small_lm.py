"""A small language model as drafter: dense or MoE, its own cache, chains and trees."""

from typing import Self

import jax.numpy as jnp

from jaxspec.cache.window import Window
from jaxspec.draft.autoregress import draft
from jaxspec.draft.draft_vocab import DraftVocab
from jaxspec.draft.network_drafter import CachedDrafter
from jaxspec.draft.target_product import CutProduct
from jaxspec.models.caches import Layout, init_caches, layout
from jaxspec.models.transformer import Caches, Transformer, forward, head
from jaxspec.nn.inputs import Inputs
from jaxspec.protocol import Anchor, Commit, Proposal
from jaxspec.pytree import pytree, replace, static
from jaxspec.shapes import Array, Params
from jaxspec.topology import DynamicTree, Topology


@pytree
class SmallLm(CachedDrafter):
    """Drafts with a model that shares the target's tokenizer (Leviathan 2023).

    Vocabularies may differ by rows that no token has, which makers add so that devices divide them: such tokens are
    never drafted, and read as another one if the target should ever say one. The text is the target's either way.

    Attributes:
      net: its network.
      target_vocab: V of the target, 0 where it is the model's own.
      vocab, product: the tokens that it drafts, and its vocabulary product for these; None for all.
    """

    params: Params
    net: Transformer = static()
    topology: Topology | DynamicTree = static()
    block: int = static(default=128)
    target_vocab: int = static(default=0)
    vocab: DraftVocab | None = None
    product: CutProduct | None = None
    prefix_refusal = ""
    needs = "tokens"

    @property
    def vocab_size(self) -> int:
        return self.target_vocab or self.net.arch.vocab_size

    def init_state(self, rows: int, capacity: int, slack: int) -> Caches:
        return init_caches(self.net.arch, self.net.policy, self.cache_size(rows, capacity, slack))

    @property
    def cache_layout(self) -> Layout:
        return layout(self.net.arch, self.net.policy)

    def caches_of(self, state: Caches) -> Caches:
        return state

    def with_caches(self, state: Caches, caches: Caches) -> Caches:
        return caches

    def propose(self, state: Caches, anchor: Anchor, rule: str) -> tuple[Proposal, Caches]:
        return draft(self, state, anchor, rule)

    def observe(self, state: Caches, commit: Commit) -> Caches:
        if commit.row_B is None and self.topology.is_chain:
            return state  # the accepted prefix already stands where it belongs
        return self.run(state, commit.token_BT, None, commit.position_BT, self.window_of(commit), 0)[2]

    def run(
        self, state: Caches, token_BT: Array, feature: None, position_BT: Array, window: Window, stage: int
    ) -> tuple[Array, None, Caches]:
        if self.net.arch.vocab_size < self.vocab_size:
            token_BT = jnp.minimum(token_BT, self.net.arch.vocab_size - 1)
        hidden = forward(self.net, self.params, Inputs(token_BT, position_BT, window, state))
        return hidden.last_BTD, None, hidden.caches

    def update_params(self, params: Params) -> Self:
        new = super().update_params(params)
        return new if self.vocab is None else new.with_vocab(self.vocab)

    def with_vocab(self, vocab: DraftVocab) -> Self:
        return replace(self, vocab=vocab, product=CutProduct.of(self.net, self.params, vocab.token))

    def logits(self, last_BTD: Array) -> Array:
        if self.product is not None:
            return self.product.logits(last_BTD)
        logits, lacking = head(self.net, self.params, last_BTD), self.vocab_size - self.net.arch.vocab_size
        if lacking > 0:
            return jnp.pad(logits, ((0, 0), (0, 0), (0, lacking)), constant_values=-jnp.inf)
        return logits[..., : self.vocab_size] if lacking else logits
