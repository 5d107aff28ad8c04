"""What drafters, verification and the step say to each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

import jax.numpy as jnp
from typing_extensions import override

from jaxspec.errors import ConfigError
from jaxspec.pytree import pytree, replace, static
from jaxspec.shapes import Array, Params
from jaxspec.topology import PLAIN, AnyTopology, Topology

DraftState = Any


@pytree
class Sampling:
    """How each row samples; one entry per row, neutral values switch a feature off.

    Attributes:
      temperature_B: 0 is greedy.
      top_p_B, min_p_B: 1 and 0 are off.
      top_k_B: 0 is off.
      repetition_B: multiplicative penalty, 1 is off.
      presence_B, frequency_B: additive penalties, 0 is off.
      key_BX: threefry key words, uint32 [B, 2].
      stop_BX: ids that end the row, -1 for unused places.
      min_length_B: total length below which no stop id may be sampled.
      max_length_B: total length, prompt included, at which the row ends.
      draft_limit_B: deepest draft that may be accepted, 0 for plain decoding.
      logprobs_B: wanted log-probabilities per token, -1 for none.
      prompt_length_B: tokens of the prompt; bad words are looked for in what comes after them.
      biased_B: whether the row's ``bias_BV`` of the state counts.
      bad_words_BWL: token sequences that may not be generated, each from its last token backwards; -1 for unused
        places.
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
    """What one more draft of a chain costs, and what its tokens are worth; float32 scalars but where axes are named.

    Attributes:
      tok_per_s: tokens per second that the batch commits now; 0 makes time worth nothing, so that it cuts none.
      rows: rows that decode.
      token_s: seconds that a verified draft adds to a step.
      expert_s: seconds that a routed expert adds which no other token of the step touches, all layers together.
      depth_s: seconds that drafting one position deeper adds, all rows together.
      min_confidence: product of a drafter's confidences below which nothing is verified.
      max_drafts: drafts of a row that are verified at most.
      accept_MC: share of tried drafts that were accepted, by C equal steps of confidence; of greedy rows (M = 0) and of
        rows that sample (M = 1).
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
    """Where drafting starts.

    Attributes:
      token_B: last committed token, not yet in any cache.
      length_B: committed positions, and so the anchor's position.
      history_BS: committed tokens, the anchor included at ``length``.
      sampling: how rows sample.
      draft_costs: of drafts, which are then cut where they do not pay; None keeps them all.
      bias_BV: added to the logits of rows that are biased, None for nowhere.
    """

    token_B: Array
    length_B: Array
    history_BS: Array
    sampling: Sampling
    draft_costs: DraftCosts | None = None
    bias_BV: Array | None = None


@pytree
class Tree:
    """How the nodes of one verification hang together, by row; B is 1 where all rows have the same.

    Attributes:
      parent_BT: int32, parent of each node; -1 for the anchor.
      depth_BT: int32, distance from the anchor.
      path_BTJ: int32 [B, T, K + 1], the nodes from the anchor to each node by depth, and 0 behind its end.
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
        """The path from the anchor to one node of each row, [B, K + 1], and its depth."""
        rows_B = jnp.arange(node_B.shape[0], dtype=jnp.int32) if self.parent_BT.shape[0] > 1 else 0
        return self.path_BTJ[rows_B, node_B], self.depth_BT[rows_B, node_B]

    @staticmethod
    def of(topology: Topology) -> Tree:
        """The same tree for all rows."""
        made = (jnp.asarray(x, jnp.int32)[None] for x in (topology.parents, topology.depth, topology.path_TJ))
        return Tree(*made, is_chain=topology.is_chain)


@pytree
class Proposal:
    """Drafted tokens of the nodes behind the anchor.

    Attributes:
      token_BN: one token id of the vocabulary per draft node, also where it is not valid.
      valid_BN: whether the node is a real proposal; others are never accepted.
      logp_BNV: log of the distribution that each node was drawn from, None for point masses.
      tree: how each row's nodes hang together, None where the topology says it.
      expert_BKYA: experts that the target is predicted to choose for the drafts of a chain, in some layers; None
        where the drafter predicts none. Nothing is accepted or refused because of them.
      confidence_BN: largest probability of what each draft of a chain is drawn from, where drafts have prices; 0 where
        nothing was drafted.
    """

    token_BN: Array
    valid_BN: Array
    logp_BNV: Array | None
    tree: Tree | None = None
    expert_BKYA: Array | None = None
    confidence_BN: Array | None = None

    def tree_of(self, topology: AnyTopology) -> Tree:
        """How the nodes hang together, from itself or from the topology that it was drafted for."""
        if self.tree is not None:
            return self.tree
        assert isinstance(topology, Topology), "a drafter says what tree it has grown"
        return Tree.of(topology)


@pytree
class Verdict:
    """What verification decided.

    Attributes:
      path_BT: node at each depth of the accepted path, the anchor first; node 0 beyond it.
      token_BT: tokens to commit, accepted drafts and then one of the target's own.
      count_B: how many tokens are committed, 0 for an idle row.
    """

    path_BT: Array
    token_BT: Array
    count_B: Array


@dataclass(frozen=True)
class Rule:
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
    """What a drafter reads of the target besides its last hidden states.

    Attributes:
      taps: layer boundaries b whose residual stream it reads; b is the input of layer b, the number of layers the
        last output (``hidden_states[b]`` of transformers).
      shared_outputs: expert layers of which it reads what their shared experts return, or what their router reads where
        there are none.
    """

    taps: tuple[int, ...] = ()
    shared_outputs: tuple[int, ...] = ()


NO_CAPTURE = CaptureSpec()


@pytree
class Features:
    """What the target computed at some positions.

    Attributes:
      last_BTD: stream behind the final norm, float32.
      stream: the stream before it [B, T, D], or with hyper-connections the streams [B, T, N, D].
      taps, shared_outputs: what ``CaptureSpec`` asked for, one [B, T, D] each.
    """

    last_BTD: Array
    stream: Array
    taps: tuple[Array, ...] = ()
    shared_outputs: tuple[Array, ...] = ()


@pytree
class Commit:
    """What became part of the text.

    Attributes:
      token_BT: the anchor first, then every committed token but the last: the tokens whose positions are now final.
      next_BT: the token behind each of them, so the last one that counts is the next anchor.
      features: of the target at their positions; None where plain decoding left none behind.
      count_B: how many of them count.
      start_B: position of the first.
      path_BT: nodes that they stood at, for drafters that wrote ahead along the topology; None in prefill.
      row: the row that is prefilled, None when all rows step.
    """

    token_BT: Array
    next_BT: Array
    features: Features | None
    count_B: Array
    start_B: Array
    path_BT: Array | None
    row: Array | None

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
    """

    topology: AnyTopology
    needs: Literal["none", "tokens", "hidden"] = "none"
    reads: CaptureSpec = NO_CAPTURE
    sparse: bool = False

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

    @override
    def propose(self, state: DraftState, anchor: Anchor, rule: str) -> tuple[Proposal, DraftState]:
        return no_proposal(anchor), state


def no_proposal(anchor: Anchor) -> Proposal:
    """Returns the proposal of a topology without drafts."""
    shape = (anchor.token_B.shape[0], 0)
    return Proposal(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), None)
