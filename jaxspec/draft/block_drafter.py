"""Drafting a block of tokens in one pass, as a chain or as a tree of its distributions."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.addressing import init_layer
from jaxspec.cache.window import Window
from jaxspec.draft.autoregress import Root, draft
from jaxspec.draft.draft_vocab import Candidates, DraftVocab
from jaxspec.draft.network_drafter import CachedDrafter
from jaxspec.draft.parallel import draft_from
from jaxspec.draft.target_product import CutProduct, TargetDrafter
from jaxspec.models.apply import apply
from jaxspec.models.block_head import BlockHead
from jaxspec.models.caches import Layout
from jaxspec.models.transformer import Transformer, embed
from jaxspec.nn.block_attention import streams_of
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.steady import row_top_k
from jaxspec.protocol import Anchor, CaptureSpec, Commit, Proposal, no_proposal
from jaxspec.pytree import pytree, static
from jaxspec.shapes import Array, Params
from jaxspec.topology import AnyTopology


@pytree
class Rows:
    """The rows of a block that predict, for drafts that depend on the one before.

    Attributes:
      last_BKD: their hidden states.
      logits_BKW: from the vocabulary product; where there are candidates, of these alone, [B, K, X].
      candidate_BKX: the ids of the best tokens of each row; None where all are drafted from.
      length_B: the anchors' positions.
    """

    last_BKD: Array
    logits_BKW: Array
    candidate_BKX: Array | None
    length_B: Array


@pytree
class Draws:
    """What drafts are drawn from.

    Attributes:
      logits_BTW: of the tokens that are drafted from.
      candidate_BTW: their ids where each node has candidates of its own.
      confidence_BT: probability that a draft is accepted, None where nothing predicts it.
    """

    logits_BTW: Array
    candidate_BTW: Array | None = None
    confidence_BT: Array | None = None


@pytree
class BlockDrafter(TargetDrafter, CachedDrafter):
    """Drafts with a head that fills in a block of masks after the anchor (DFlash; DDTree 2026, 2604.12989).

    Observing writes what the target's streams at committed positions project to, which depends on nothing else. The
    block itself stands after them while it is drafted, and the next observation overwrites it. It is always as long as
    in training, however many of its drafts are asked for.

    Attributes:
      net: the head.
    """

    params: Params
    base: Params
    vocab: DraftVocab | None
    net: BlockHead = static()
    target: Transformer = static()
    topology: AnyTopology = static()
    block: int = static(default=128)
    product: CutProduct | None = None
    prefix_refusal = ""
    needs = "hidden"

    @property
    def reads(self) -> CaptureSpec:
        """The streams of the target that the head reads."""
        return self.net.spec.reads

    @property
    def own_product(self) -> bool:
        return bool(self.net.spec.draft_vocab)

    @property
    def slack(self) -> int:
        return max(self.topology.write_ahead, self.net.spec.block_size)

    @property
    def cache_layout(self) -> Layout:
        specs: Any = (layer.attention for layer in self.net.spec.arch.layers)
        return tuple((streams_of(spec), 1) for spec in specs)

    def caches_of(self, state: tuple[Any, ...]) -> tuple[Any, ...]:
        return state

    def with_caches(self, state: tuple[Any, ...], caches: tuple[Any, ...]) -> tuple[Any, ...]:
        return caches

    def init_state(self, rows: int, capacity: int, slack: int) -> tuple[Any, ...]:
        size, compute = self.cache_size(rows, capacity, slack), self.net.policy.compute
        dtype, as_bits = jnp.dtype(compute.dtype), compute.kernels != "triton"
        return tuple(init_layer(streams, size, dtype, as_bits=as_bits) for streams, _ in self.cache_layout)

    def observe(self, state: tuple[Any, ...], commit: Commit) -> tuple[Any, ...]:
        c_BTD = apply(self.net, self.params, self.net.spec.feature(commit.hidden), method="join")
        inputs = Inputs(commit.token_BT, commit.position_BT, self.window_of(commit), state)
        return apply(self.net, self.params, c_BTD, inputs, method="observe")

    def propose(self, state: tuple[Any, ...], anchor: Anchor, rule: str) -> tuple[Proposal, tuple[Any, ...]]:
        if not self.topology.drafts:
            return no_proposal(anchor), state
        last_BKD, state = self._fill_in(state, anchor)
        logits_BKW = self._unary(last_BKD)
        every_B = jnp.ones(anchor.token_B.shape, bool)
        if not self.net.spec.follows:
            draws: Any = Draws(logits_BKW)
            return draft_from(self, draws, anchor, rule, every_B), state
        rows = self._rows(last_BKD, logits_BKW, anchor)
        token_B1, rank = anchor.token_B[:, None], self.net.spec.markov_rank
        first: Any
        first, feature = self._after(rows, jnp.int32(0), token_B1, jnp.zeros((*token_B1.shape, rank)))
        return draft(self, rows, anchor, rule, Root(first, feature, every_B))[0], state

    def run(
        self, state: Rows, token_BT: Array, feature: Array, position_BT: Array, window: Window, stage: int
    ) -> tuple[Any, Array, Rows]:
        # All rows are at the same depth.
        depth = position_BT[0, 0] - state.length_B[0] + 1
        draws, feature = self._after(state, depth, token_BT, feature)
        return draws, feature, state

    def logits(self, last_BTD: Any) -> Array:
        return last_BTD.logits_BTW

    def known(self, last_BTD: Any) -> DraftVocab | Candidates | None:
        candidate = last_BTD.candidate_BTW
        return self.vocab if candidate is None else Candidates(candidate, self.vocab_size)

    def confidence(self, last_BTD: Any) -> Array | None:
        return last_BTD.confidence_BT

    def _fill_in(self, state: tuple[Any, ...], anchor: Anchor) -> tuple[Array, tuple[Any, ...]]:
        """Runs the block; returns the hidden states of the rows that are asked for [B, K, D], and the caches."""
        spec, start_B = self.net.spec, anchor.length_B
        place_S = jnp.arange(spec.block_size, dtype=jnp.int32)
        token_BS = jnp.where(place_S == 0, anchor.token_B[:, None], spec.mask_token)
        if spec.own_embedding:
            embedded = apply(self.net, self.params, token_BS, method="embed")
        else:
            embedded = embed(self.target, self.base, token_BS)
        inputs = Inputs(token_BS, start_B[:, None] + place_S, Window(start_B, block=self.block), state)
        last_BSD, state = apply(self.net, self.params, embedded, inputs)
        return last_BSD[:, spec.first : spec.first + self.topology.max_depth], state

    def _unary(self, last_BKD: Array) -> Array:
        """Logits of each row by itself, over the head's own vocabulary or the target's."""
        last_BKD = apply(self.net, self.params, last_BKD, method="normed")
        if self.own_product:
            return self.net.spec.shaped(apply(self.net, self.params, last_BKD, method="logits"))
        return self.net.spec.shaped(self.target_logits(last_BKD))

    def _rows(self, last_BKD: Array, logits_BKW: Array, anchor: Anchor) -> Rows:
        if not self.net.spec.selector_rank:
            return Rows(last_BKD, logits_BKW, None, anchor.length_B)
        best_BKX, index_BKX = row_top_k(logits_BKW, self.net.spec.selector_top_k)
        candidate_BKX = index_BKX if self.vocab is None else self.vocab.ids(index_BKX)
        return Rows(last_BKD, best_BKX, candidate_BKX, anchor.length_B)

    def _after(self, rows: Rows, depth: Array, token_BT: Array, state: Array) -> tuple[Draws, Array]:
        """Returns what the drafts of a depth are drawn from after tokens, and the next state of the Markov head."""
        spec, count = self.net.spec, token_BT.shape[1]

        def here(x_BK: Array) -> Array:
            one = lax.dynamic_index_in_dim(x_BK, depth, axis=1)
            return jnp.broadcast_to(one, (one.shape[0], count, *one.shape[2:]))

        last, logits, e, confidence = here(rows.last_BKD), here(rows.logits_BKW), None, None
        if spec.markov_rank:
            e = apply(self.net, self.params, token_BT, method="markov_embed")
            z, state = apply(self.net, self.params, e, last, state, method="markov_advance")
            bias = apply(self.net, self.params, z, method="markov_bias")
            logits = logits + (bias if self.product is None or self.vocab is None else self.vocab.pick(bias))
        if spec.confidence != "none":
            confidence = jax.nn.sigmoid(apply(self.net, self.params, last, e, method="confidence"))
        if rows.candidate_BKX is None:
            return Draws(logits, None, confidence), state
        candidate = here(rows.candidate_BKX)
        context = apply(self.net, self.params, token_BT, last, method="context")
        logits = logits + apply(self.net, self.params, context, candidate, method="candidate_scores")
        return Draws(logits, candidate, confidence), state
