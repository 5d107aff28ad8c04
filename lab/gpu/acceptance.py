"""Published acceptance lengths of chains on the targets that the suite measures, and the drafter that guesses."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxspec.protocol import Anchor, Drafter, Proposal
from jaxspec.pytree import pytree, static
from jaxspec.topology import Topology, chain


@dataclass(frozen=True)
class Published:
    """An acceptance length that somebody measured.

    Attributes:
      drafts: K.
      length: tokens per target pass, bonus included.
      source: who, on what.
    """

    drafts: int
    length: float
    source: str


PUBLISHED: dict[str, tuple[Published, ...]] = {
    "qwen3-30b-a3b": (Published(2, 2.04, "EAGLE-3, AngelSlim documentation"),),
    "gpt-oss-20b": (Published(7, 3.49, "EAGLE-3 with LK loss, mean at temperature 0, arXiv 2602.23881"),),
    "gpt-oss-120b": (
        Published(2, 1.91, "EAGLE-3, Red Hat, vLLM 0.13"),
        Published(3, 2.07, "EAGLE-3, Red Hat, vLLM 0.13"),
        Published(4, 2.13, "EAGLE-3, Red Hat, vLLM 0.13"),
        Published(7, 2.81, "EAGLE-3 with LK loss, mean at temperature 0, arXiv 2602.23881"),
    ),
    "mixtral-8x7b": (
        Published(3, 2.64, "EAGLE, MoESD (arXiv 2505.19645)"),
        Published(4, 2.90, "EAGLE, MoESD (arXiv 2505.19645)"),
    ),
    "qwen2-57b-a14b": (
        Published(3, 3.72, "a 0.5B draft model on HumanEval, MoESD (arXiv 2505.19645)"),
        Published(4, 4.50, "a 0.5B draft model on HumanEval, MoESD (arXiv 2505.19645)"),
    ),
}


@pytree
class Guesses(Drafter):
    """Proposes tokens at no cost that are hardly ever right, so that a step does all its work and commits one token.

    Attributes:
      length: K.
      vocab_size: V.
    """

    length: int = static()
    vocab_size: int = static()

    @property
    def topology(self) -> Topology:
        """The static shape of what is proposed."""
        return chain(self.length)

    def propose(self, state: tuple[()], anchor: Anchor, rule: str) -> tuple[Proposal, tuple[()]]:
        step_N = 7919 * (1 + jnp.arange(self.length, dtype=jnp.int32))
        token_BN = (anchor.token_B[:, None] + anchor.length_B[:, None] + step_N[None]) % self.vocab_size
        return Proposal(token_BN, jnp.ones(token_BN.shape, bool), None), state
