"""The drafter that proposes nothing: plain decoding as the same step."""

from typing import Literal

import jax.numpy as jnp

from jaxspec.protocol import NO_CAPTURE, Anchor, CaptureSpec, Commit, Proposal
from jaxspec.pytree import pytree
from jaxspec.topology import Topology, chain


@pytree
class NoDrafts:
    """A topology of one node; its state is empty."""

    @property
    def topology(self) -> Topology:
        """The static shape of what is proposed."""
        return chain(0)

    @property
    def needs(self) -> Literal["none", "tokens", "hidden"]:
        """What of the text it must have observed to draft well."""
        return "none"

    @property
    def reads(self) -> CaptureSpec:
        """What it reads of the target besides its last hidden states."""
        return NO_CAPTURE

    @property
    def slack(self) -> int:
        """Positions written beyond the committed ones."""
        return 0

    def init_state(self, rows: int, capacity: int, slack: int) -> tuple[()]:
        """Allocates the state of empty rows."""
        return ()

    def propose(self, state: tuple[()], anchor: Anchor, rule: str) -> tuple[Proposal, tuple[()]]:
        """Drafts every node; commits nothing."""
        shape = (anchor.token_B.shape[0], 0)
        return Proposal(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), None), state

    def observe(self, state: tuple[()], commit: Commit) -> tuple[()]:
        """Takes over committed tokens."""
        return state
