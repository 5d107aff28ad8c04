"""The records and the base class through which drafters, verification and the step talk to each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

import jax.numpy as jnp

from jaxspec.errors import ConfigError
from jaxspec.pytree import pytree, replace, static
from jaxspec.shapes import Array, Params
from jaxspec.topology import PLAIN, AnyTopology, Topology

DraftState = Any


@pytree
class Sampling:
    """Sampling settings, one entry per row; neutral values switch a feature off.

    Attributes:
      temperature_B: 0 is greedy.
      top_p_B, min_p_B: 1 and 0 are off.
      top_k_B: 0 is off.
      repetition_B: multiplicative penalty, 1 is off.
      presence_B, frequency_B: additive penalties, 0 is off.
      key_BX: threefry key words, uint32 [B, 2].
      stop_BX: ids that end the row, -1 for unused entries.
      min_length_B: total length below which no stop id may be sampled.
      max_length_B: total length, prompt included, at which the row ends.
      draft_limit_B: deepest draft that may be accepted, 0 for plain decoding.
      logprobs_B: log-probabilities per token to return, -1 for none.
      prompt_length_B: tokens of the prompt; bad words are only looked for after them.
      biased_B: whether the state's ``bias_BV`` applies to the row.
      bad_words_BWL: token sequences that may not be generated, each from its last token backwards; -1 for unused
        entries.
    """

    temperature_B: Array
    top_p_B: Array
    min_p_B: Array
    top_k_B: Array
    repetition_B: Array
    presence_B: Array
    frequency_B: Array
    key_BX: Array
    stop_BX: Array
    min_length_B: Array
    max_length_B: Array
    draft_limit_B: Array
    logprobs_B: Array
    prompt_length_B: Array
    biased_B: Array
    bad_words_BWL: Array


@pytree
class DraftCosts:
    """Costs of one more draft of a chain, and the worth of its tokens; float32 scalars unless axes are named.

    Attributes:
      tok_per_s: tokens per second that the batch commits now; 0 makes time worth nothing, so no draft is pruned for it.
      rows: active rows.
      token_s: seconds that a verified draft adds to a step.
      expert_s: seconds added by a routed expert that no other token of the step touches, all layers together.
      depth_s: seconds that drafting one position deeper adds, all rows together.
      min_confidence: product of a drafter's confidences below which no draft is verified.
      max_drafts: most drafts of a row that are verified.
      accept_MC: share of tried drafts that were accepted, by C equal steps of confidence, for greedy rows (M = 0) and
        sampled rows (M = 1).
      experts, top_k: E and A of the target's routed layers, 0 without any.
    """

    tok_per_s: Array
    rows: Array
    token_s: Array
    expert_s: Array
    depth_s: Array
    min_confidence: Array
    max_drafts: Array
    accept_MC: Array
    experts: int = static(default=0)
    top_k: int = static(default=0)


@pytree
class Anchor:
    """The last committed token of each row, from which drafting starts.

    Attributes:
      token_B: last committed token, not yet in any cache.
      length_B: committed positions, and so the anchor's position.
      history_BS: committed tokens, the anchor included at ``length``.
      sampling: how rows sample.
      draft_costs: by which drafts that do not pay are pruned; None keeps them all.
      bias_BV: added to the logits of biased rows; None if no row is.
      mask_BW: the tokens that grammars allow next, packed as in ``jaxspec.verify.logits.Context``; None without any.
    """

    token_B: Array
    length_B: Array
    history_BS: Array
    sampling: Sampling
    draft_costs: DraftCosts | None = None
    bias_BV: Array | None = None
    mask_BW: Array | None = None


def unpack_mask(mask_BTW: Array, vocab: int) -> Array:
    """Returns the bits of packed masks, bool [B, T, V]."""
    bit_32 = jnp.arange(32, dtype=jnp.uint32)
    bits = (mask_BTW[..., None] >> bit_32) & jnp.uint32(1)
    return bits.reshape(*mask_BTW.shape[:-1], -1)[..., :vocab] > 0


@pytree
class Tree:
    """The tree of nodes of one verification, by row; B is 1 where all rows have the same.

    Attributes:
      parent_BT: int32, parent of each node; -1 for the anchor.
      depth_BT: int32, distance from the anchor.
      path_BTJ: int32 [B, T, K + 1], the nodes from the anchor to each node by depth, then zeros.
      is_chain: whether no node of any row has a sibling.
    """

    parent_BT: Array
    depth_BT: Array
    path_BTJ: Array
    is_chain: bool = static(default=False)

    @property
    def nodes(self) -> int:
        """T."""
        return self.parent_BT.shape[1]

    @property
    def max_depth(self) -> int:
        """K."""
        return self.path_BTJ.shape[2] - 1

    def path_to(self, node_B: Array) -> tuple[Array, Array]:
        """Returns the path from the anchor to one node of each row, [B, K + 1], and its depth."""
        rows_B = jnp.arange(node_B.shape[0], dtype=jnp.int32) if self.parent_BT.shape[0] > 1 else 0
        return self.path_BTJ[rows_B, node_B], self.depth_BT[rows_B, node_B]

    @staticmethod
    def of(topology: Topology) -> Tree:
        """Returns the tree of a topology, the same for all rows."""
        arrays = (jnp.asarray(x, jnp.int32)[None] for x in (topology.parents, topology.depth, topology.path_TJ))
        return Tree(*arrays, is_chain=topology.is_chain)


@pytree
class Proposal:
    """Drafted tokens of the nodes after the anchor.

    Attributes:
      token_BN: a token id per draft node, also where it is not valid.
      valid_BN: whether the node is a real proposal; others are never accepted.
      logp_BNV: log of the distribution that each node was drawn from, None for point masses.
      tree: of each row's nodes, None where the topology says it.
      expert_BKYA: experts that the target is predicted to choose for the drafts of a chain, in some layers; None
        without a prediction. No draft is accepted or refused because of them.
      confidence_BN: largest probability of the distribution that each draft of a chain is drawn from, where drafts have
        costs; 0 where none was drafted.
    """

    token_BN: Array
    valid_BN: Array
    logp_BNV: Array | None
    tree: Tree | None = None
    expert_BKYA: Array | None = None
    confidence_BN: Array | None = None

    def tree_of(self, topology: AnyTopology) -> Tree:
        """Returns the tree of the nodes, its own or that of the topology that it was drafted for."""
        if self.tree is not None:
            return self.tree
        assert isinstance(topology, Topology), "a drafter says what tree it has grown"
        return Tree.of(topology)


@pytree
class Verdict:
    """The outcome of verification.

    Attributes:
      path_BT: node at each depth of the accepted path, the anchor first; node 0 beyond it.
      token_BT: tokens to commit, accepted drafts and then one of the target's own.
      count_B: how many tokens are committed, 0 for an idle row.
    """

    path_BT: Array
    token_BT: Array
    count_B: Array


@dataclass(frozen=True)
class VerifyRule:
    """A verification rule: says which drafts are accepted, so that the text or its distribution stays the target's.

    Attributes:
      name: as drafters know it.
      decide: from proposal, scores, live drafts [B, N], settings, anchors' positions and tree to the verdict.
      exact: whether every token that it commits is the best of its node's scores, noise included.
    """

    name: str
    decide: Callable[[Proposal, Array, Array, Sampling, Array, Tree], Verdict]
    exact: bool = False

    def __call__(
        self, proposal: Proposal, score_BTV: Array, live_BN: Array, sampling: Sampling, length_B: Array, tree: Tree
    ) -> Verdict:
        """Decides what is committed."""
        return self.decide(proposal, score_BTV, live_BN, sampling, length_B, tree)


@dataclass(frozen=True)
class CaptureSpec:
    """The hidden states of the target that a drafter reads besides the last ones.

    Attributes:
      taps: layer boundaries b whose residual stream it reads: b is the input of layer b, the number of layers the
        last output (``hidden_states[b]`` of transformers).
      shared_outputs: expert layers whose shared experts' output it reads, or without shared experts the router's input.
    """

    taps: tuple[int, ...] = ()
    shared_outputs: tuple[int, ...] = ()


NO_CAPTURE = CaptureSpec()


@pytree
class Features:
    """Hidden states of the target at some positions.

    Attributes:
      last_BTD: stream after the final norm, float32.
      stream: the stream before it [B, T, D], or with hyper-connections the streams [B, T, N, D].
      taps, shared_outputs: as of ``CaptureSpec``, one [B, T, D] each.
    """

    last_BTD: Array
    stream: Array
    taps: tuple[Array, ...] = ()
    shared_outputs: tuple[Array, ...] = ()


@pytree
class Commit:
    """Tokens that became part of the text.

    Attributes:
      token_BT: the anchor, then every committed token but the last: the tokens whose positions are now final.
      next_BT: the token after each of them; the last valid one is the next anchor.
      features: of the target at their positions; None where plain decoding kept none.
      count_B: how many of them are valid.
      start_B: position of the first.
      path_BT: their nodes, for drafters that wrote ahead along the topology; None in prefill.
      row_B: the rows that are prefilled, None when all rows step.
    """

    token_BT: Array
    next_BT: Array
    features: Features | None
    count_B: Array
    start_B: Array
    path_BT: Array | None
    row_B: Array | None

    @property
    def hidden(self) -> Features:
        """Features, for drafters that need hidden states."""
        assert self.features is not None, "only a drafter that needs tokens alone catches up without features"
        return self.features

    @property
    def position_BT(self) -> Array:
        """Position of each token."""
        return self.start_B[:, None] + jnp.arange(self.token_BT.shape[1], dtype=jnp.int32)[None]


class Drafter(ABC):
    """A source of drafts. Subclasses are final pytrees: weights are leaves, everything else is static.

    Attributes:
      topology: static shape of what is proposed.
      needs: what it must observe before it can propose: nothing, the committed tokens, or the target's hidden states.
      reads: what it captures of the target besides its last hidden states.
      sparse: whether often no row has a draft; a step may then verify, and the drafter observe, the anchors alone.
      prefix_refusal: why what it knows of a text's first tokens serves no other text that begins alike; empty if
        copies of its caches do, or it keeps nothing.
    """

    topology: AnyTopology
    needs: Literal["none", "tokens", "hidden"] = "none"
    reads: CaptureSpec = NO_CAPTURE
    sparse: bool = False
    prefix_refusal: str = "the drafter does not say what it keeps of a prefix"

    @property
    def remembers(self) -> bool:
        """Whether it wants the texts of requests that ended."""
        return False

    @property
    def slack(self) -> int:
        """Positions beyond the capacity that the drafter's caches must hold while writing ahead."""
        return 0

    def init_state(self, rows: int, capacity: int, slack: int) -> DraftState:
        """Allocates the state of empty rows.

        Args:
          rows: B.
          capacity: longest text in tokens.
          slack: most positions that one forward or one chunk of a prompt writes beyond the committed ones.
        """
        return ()

    @abstractmethod
    def propose(self, state: DraftState, anchor: Anchor, rule: str) -> tuple[Proposal, DraftState]:
        """Drafts every node; never commits."""

    def observe(self, state: DraftState, commit: Commit) -> DraftState:
        """Takes over committed tokens; prompt prefill is the first observation."""
        return state

    def remember(self, state: DraftState, text_S: Array, count: Array) -> DraftState:
        """Takes the first ``count`` tokens of a text that ended, for drafts of other requests."""
        return state

    def with_topology(self, topology: AnyTopology) -> Self:
        """Returns the drafter of another topology, with the same weights and the same state."""
        return replace(self, topology=topology)

    def plain(self) -> Drafter:
        """Returns what takes this drafter's place, with its state, in steps of plain decoding."""
        return NoDrafts()

    def update_params(self, params: Params) -> Self:
        """Returns the drafter with other parameters of the same structure, cast to the dtypes that it has.

        Raises:
          ConfigError: it has no parameters of its own, or structure or shapes differ.
        """
        raise ConfigError(f"update_draft: {type(self).__name__} has no parameters; only draft models and heads do")

    @property
    def cache_layout(self) -> tuple[Any, ...]:
        """Returns what each of its caches holds, and how many layers share it (``jaxspec.models.caches.Layout``)."""
        return ()

    def caches_of(self, state: DraftState) -> tuple[Any, ...]:
        """Returns the caches in its state; besides them only the last observed position counts."""
        return ()

    def with_caches(self, state: DraftState, caches: tuple[Any, ...]) -> DraftState:
        """Returns the state with other caches."""
        return state

    def update_target(self, params: Params) -> Self:
        """Returns the drafter for a target of other parameters, where it reads some of them itself."""
        return self

    def replay_room(self, capacity: int) -> int:
        """Returns how many of a row's latest positions it can be shown after plain decoding."""
        return capacity

    def replay_sizes(self, buckets: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the sizes of the chunks in which it is shown them, ascending."""
        return buckets

    def replay_features(self, state: DraftState, row: Array, position_X: Array) -> Features | None:
        """Returns what plain decoding kept of positions of a row, [1, X, ...], for a drafter that needs it."""
        return None


@pytree
class NoDrafts(Drafter):
    """Plain decoding as the same step: a topology of one node and an empty state."""

    topology = PLAIN
    prefix_refusal = ""

    def propose(self, state: DraftState, anchor: Anchor, rule: str) -> tuple[Proposal, DraftState]:
        return no_proposal(anchor), state


def no_proposal(anchor: Anchor) -> Proposal:
    """Returns the proposal of a topology without drafts."""
    shape = (anchor.token_B.shape[0], 0)
    return Proposal(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), None)
