"""The drafter that proposes nothing: plain decoding as the same step."""

import jax.numpy as jnp

from jaxspec.protocol import Anchor, Commit, Proposal
from jaxspec.pytree import pytree
from jaxspec.topology import Topology, chain


@pytree
class NoDrafts:
    """A topology of one node; its state is empty."""

    @property
    def topology(self) -> Topology:
        return chain(0)

    @property
    def slack(self) -> int:
        return 0

    def init_state(self, rows: int, capacity: int) -> tuple[()]:
        return ()

    def propose(self, state: tuple[()], anchor: Anchor, rule: str) -> tuple[Proposal, tuple[()]]:
        shape = (anchor.token_B.shape[0], 0)
        return Proposal(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), None), state

    def observe(self, state: tuple[()], commit: Commit) -> tuple[()]:
        return state
