"""Drafting with a head that continues from the target's features and then from its own output."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxspec.cache.window import Window
from jaxspec.draft.autoregress import Root, draft
from jaxspec.draft.block_drafter import BlockDrafter
from jaxspec.draft.draft_vocab import DraftVocab, make_draft_vocab
from jaxspec.draft.last_hidden import last_index, scatter_last
from jaxspec.draft.medusa_drafter import MedusaDrafter
from jaxspec.draft.mtp_drafter import MtpHeads
from jaxspec.draft.network_drafter import CachedDrafter
from jaxspec.draft.parallel import draft_from
from jaxspec.draft.target_product import CutProduct, TargetDrafter
from jaxspec.models.apply import apply
from jaxspec.models.block_head import BlockHead
from jaxspec.models.caches import Layout, init_layer_caches, unstacked
from jaxspec.models.draft_head import DraftHead
from jaxspec.models.medusa import Medusa
from jaxspec.models.mtp import Mtp
from jaxspec.models.trained_head import Head
from jaxspec.models.transformer import Transformer, embed
from jaxspec.nn.inputs import Inputs
from jaxspec.protocol import Anchor, CaptureSpec, Commit, Proposal
from jaxspec.pytree import pytree, replace, static
from jaxspec.shapes import Array, Params
from jaxspec.topology import AnyTopology


@pytree
class HeadState:
    """State of a head for B rows.

    Attributes:
      caches: one per layer.
      last_BD: what its vocabulary product reads after the last committed slot.
      next_BD: what the next draft continues from.
    """

    caches: tuple[Any, ...]
    last_BD: Array
    next_BD: Array


@pytree
class HeadDrafter(TargetDrafter, CachedDrafter):
    """Drafts with a head of the EAGLE family, token by token or, with a mask token, all in one pass.

    Observing runs the head over the committed positions with what the target computed there, which predicts the
    first draft. The others follow from the head's own output; the next observation overwrites their slots. A head with
    a mask token runs the other drafts' slots at once, every one on the mask (P-EAGLE).

    Attributes:
      net: the head.
    """

    params: Params
    base: Params
    vocab: DraftVocab | None
    net: DraftHead = static()
    target: Transformer = static()
    topology: AnyTopology = static()
    block: int = static(default=128)
    product: CutProduct | None = None
    prefix_refusal = ""
    needs = "hidden"

    @property
    def reads(self) -> CaptureSpec:
        """The hidden states of the target that the head reads."""
        return self.net.spec.reads

    @property
    def own_product(self) -> bool:
        return bool(self.net.spec.draft_vocab)

    def init_state(self, rows: int, capacity: int, slack: int) -> HeadState:
        arch = self.net.spec.arch
        caches = init_layer_caches(arch.layers, self.net.policy, self.cache_size(rows, capacity, slack))
        # Two arrays: a state is donated, and no buffer may be donated twice.
        return HeadState(caches, jnp.zeros((rows, arch.model_dim)), jnp.zeros((rows, arch.model_dim)))

    @property
    def cache_layout(self) -> Layout:
        return unstacked(self.net.spec.arch.layers)

    def caches_of(self, state: HeadState) -> tuple[Any, ...]:
        return state.caches

    def with_caches(self, state: HeadState, caches: tuple[Any, ...]) -> HeadState:
        return replace(state, caches=caches)

    def propose(self, state: HeadState, anchor: Anchor, rule: str) -> tuple[Proposal, HeadState]:
        root = Root(state.last_BD[:, None], state.next_BD[:, None], anchor.length_B >= 1)
        if self.net.spec.mask_token is None:
            proposal, caches = draft(self, state.caches, anchor, rule, root)
            return proposal, replace(state, caches=caches)
        lasts, caches = self._at_once(state, anchor)
        return draft_from(self, lasts, anchor, rule, root.valid_B), replace(state, caches=caches)

    def observe(self, state: HeadState, commit: Commit) -> HeadState:
        window = self.window_of(commit, last_index(commit))
        g_BTD = apply(self.net, self.params, self.net.spec.feature(commit.hidden), method="join")
        last, following, caches = self._slots(commit.next_BT, g_BTD, commit.position_BT, state.caches, window)
        last_BD = scatter_last(state.last_BD, last[:, 0], commit)
        return HeadState(caches, last_BD, scatter_last(state.next_BD, following[:, 0], commit))

    def run(
        self, state: Any, token_BT: Array, feature: Array, position_BT: Array, window: Window, stage: int
    ) -> tuple[Array, Array, Any]:
        return self._slots(token_BT, feature, position_BT, state, window)

    def logits(self, last_BTD: Array) -> Array:
        own = self.own_product
        return apply(self.net, self.params, last_BTD, method="logits") if own else self.target_logits(last_BTD)

    def experts(self, last_BTD: Array) -> Array | None:
        spec = self.net.spec
        if not spec.routing:
            return None
        chosen = max(getattr(self.target.arch.layers[y].ffn, "top_k", 0) for y in spec.routing)
        return lax.top_k(apply(self.net, self.params, last_BTD, method="routes"), chosen)[1].astype(jnp.int32)

    def _slots(self, token_BT: Array, g_BTD: Array, position_BT: Array, caches: Any, window: Window):
        if self.net.spec.own_embedding:
            embedded = apply(self.net, self.params, token_BT, method="embed")
        else:
            embedded = embed(self.target, self.base, token_BT)
        return apply(self.net, self.params, embedded, g_BTD, Inputs(token_BT, position_BT, window, caches))

    def _at_once(self, state: HeadState, anchor: Anchor) -> tuple[Array, Any]:
        """Runs all depths in one pass; returns what the vocabulary product reads [B, K, D], and the caches."""
        rows, further, mask = anchor.token_B.shape[0], self.topology.max_depth - 1, self.net.spec.mask_token
        if further < 1 or mask is None:
            return state.last_BD[:, None], state.caches
        token_BT = jnp.full((rows, further), mask, jnp.int32)
        g_BTD = jnp.broadcast_to(
            apply(self.net, self.params, method="mask"), (rows, further, self.net.spec.arch.model_dim)
        )
        position_BT = anchor.length_B[:, None] + jnp.arange(further, dtype=jnp.int32)[None]
        window = Window(anchor.length_B, block=self.block)
        last, _, caches = self._slots(token_BT, g_BTD, position_BT, state.caches, window)
        return jnp.concatenate([state.last_BD[:, None], last], axis=1), caches


def head_drafter(
    head: Head, target: tuple[Transformer, Params], topology: AnyTopology, block: int
) -> HeadDrafter | BlockDrafter | MedusaDrafter | MtpHeads:
    """Returns the drafter that a head becomes for a target.

    Args:
      head: what drafts.
      target: network and parameters that it drafts for.
      topology: what is drafted.
      block: positions that attention reads at a time.
    """
    net, params = target
    if isinstance(head.net, Mtp):
        return MtpHeads(head.params, params, head.net, net, topology, block)
    vocab = make_draft_vocab(head.ids_W, net.arch.vocab_size)
    if isinstance(head.net, Medusa):
        return MedusaDrafter(head.params, params, vocab, head.net, net, topology)
    if isinstance(head.net, BlockHead):
        return BlockDrafter(head.params, params, vocab, head.net, net, topology, block)
    return HeadDrafter(head.params, params, vocab, head.net, net, topology, block)
