"""What drafters, verification and the step say to each other."""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeVar

from jaxspec.pytree import pytree
from jaxspec.shapes import Array
from jaxspec.topology import Topology

DraftState = Any
D = TypeVar("D", bound="Drafter")


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


@pytree
class Anchor:
    """Where drafting starts.

    Attributes:
      token_B: last committed token, not yet in any cache.
      length_B: committed positions, and so the anchor's position.
      history_BS: committed tokens, the anchor included at ``length``.
      sampling: how rows sample.
    """

    token_B: Array
    length_B: Array
    history_BS: Array
    sampling: Sampling


@pytree
class Proposal:
    """Drafted tokens of the nodes behind the anchor.

    Attributes:
      token_BN: one token id of the vocabulary per draft node, also where it is not valid.
      valid_BN: whether the node is a real proposal; others are never accepted.
      logp_BNV: log of the distribution that each node was drawn from, None for point masses.
    """

    token_BN: Array
    valid_BN: Array
    logp_BNV: Array | None


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


@pytree
class Features:
    """What the target computed at some positions.

    Attributes:
      last_BTD: stream behind the final norm, float32.
      stream: the stream before it [B, T, D], or with hyper-connections the streams [B, T, N, D].
    """

    last_BTD: Array
    stream: Array


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


class Drafter(Protocol):
    """A source of drafts; implementers are final pytrees, so weights are leaves and everything else is static."""

    @property
    def topology(self) -> Topology:
        """The static shape of what is proposed."""
        ...

    @property
    def slack(self) -> int:
        """Positions beyond the capacity that the drafter's caches must hold while writing ahead."""
        ...

    @property
    def follows(self) -> Literal["nothing", "tokens", "features"]:
        """What of the text it must have observed to draft well."""
        ...

    def init_state(self, rows: int, capacity: int, slack: int) -> DraftState:
        """Allocates the state of empty rows.

        Args:
          rows: B.
          capacity: longest text in tokens.
          slack: most positions that one forward or one chunk of a prompt writes beyond the committed ones.
        """
        ...

    def propose(self, state: DraftState, anchor: Anchor, rule: str) -> tuple[Proposal, DraftState]:
        """Drafts every node; never commits."""
        ...

    def observe(self, state: DraftState, commit: Commit) -> DraftState:
        """Takes over committed tokens; prompt prefill is the first observation."""
        ...
