"""Acceptance that is decreed instead of decided: for studies of speed at a chosen acceptance, never for text."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxspec.errors import ConfigError
from jaxspec.protocol import Proposal, Sampling, Tree, Verdict, VerifyRule
from jaxspec.shapes import Array
from jaxspec.verify.rules import conclude, draw_coins, live_prefix, target_noise


@dataclass(frozen=True)
class Synthetic:
    """Accepts drafts of a chain by a coin, whatever they are; exactly one of the two is given.

    Its ``rule`` is the value of ``rejection_sample_method``: an object and not a word, so that no file of settings and
    no command line can ask for it by mistake. The text that comes out is not the model's.

    Attributes:
      rates: share of verifications whose accepted prefix covers draft 1, 2, ...: vLLM's unconditional rates.
      length: mean tokens per verification, the target's own included; the number of accepted drafts is then one of the
        two whole numbers next to ``length - 1`` (the schedule of least variance, as in vLLM).
    """

    rates: tuple[float, ...] | None = None
    length: float | None = None

    def __post_init__(self) -> None:
        if (self.rates is None) == (self.length is None):
            raise ConfigError("synthetic acceptance: give rates or a mean length, one of them")
        if self.rates is not None:
            falling = all(a >= b for a, b in zip(self.rates, self.rates[1:], strict=False))
            if not self.rates or not falling or not all(0 <= rate <= 1 for rate in self.rates):
                raise ConfigError(f"synthetic acceptance: rates are from 0 to 1 and never rise, got {self.rates}")
        if self.length is not None and not (self.length >= 1 and math.isfinite(self.length)):
            raise ConfigError(f"synthetic acceptance: a mean length is at least 1, got {self.length}")

    @property
    def rule(self) -> VerifyRule:
        """The rule for a step."""
        return VerifyRule("synthetic", self)

    def __call__(
        self, proposal: Proposal, score_BTV: Array, live_BN: Array, sampling: Sampling, length_B: Array, tree: Tree
    ) -> Verdict:
        """Accepts the drafts whose rates lie above one uniform number per row and step, then the target's token."""
        rates_K = jnp.asarray(self.survival(tree.max_depth), jnp.float32)
        coin_B = draw_coins(sampling, length_B, tree)[:, 0]
        accepted_B = jnp.sum(coin_B[:, None] < rates_K[None], axis=1, dtype=jnp.int32)
        accepted_B = jnp.minimum(accepted_B, live_prefix(live_BN))
        own_BT = target_noise(sampling, length_B, tree).draw(score_BTV)
        last_B = jnp.take_along_axis(own_BT, accepted_B[:, None], axis=1)[:, 0]
        return conclude(proposal.token_BN, accepted_B, last_B)

    def survival(self, drafts: int) -> tuple[float, ...]:
        """Returns the rates of a chain of this many drafts.

        Raises:
          ConfigError: there are fewer.
        """
        if self.rates is not None:
            if len(self.rates) < drafts:
                raise ConfigError(
                    f"synthetic acceptance: {len(self.rates)} rates for {drafts} drafts; give one for each"
                )
            return self.rates[:drafts]
        accepted = (self.length or 1.0) - 1
        return tuple(min(max(accepted - draft, 0.0), 1.0) for draft in range(drafts))

    def check(self, drafts: int) -> None:
        """Refuses chains that are too short.

        Raises:
          ConfigError: there are fewer rates, or no chain of this length has such a mean.
        """
        self.survival(drafts)
        if self.length is not None and self.length - 1 > drafts:
            raise ConfigError(
                f"synthetic acceptance: {drafts} drafts give at most {drafts + 1} tokens per verification, "
                f"got a mean of {self.length}"
            )

    def described(self) -> dict[str, Any]:
        """As plain values, for reports."""
        return {"rates": list(self.rates)} if self.rates is not None else {"mean_length": self.length}
