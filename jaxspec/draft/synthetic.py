"""Acceptance that is decreed instead of found: for studies of speed at a chosen acceptance, never for text."""

import math
from dataclasses import dataclass
from typing import Any

from jaxspec.errors import ConfigError


@dataclass(frozen=True)
class Synthetic:
    """What a verification accepts, whatever was drafted; exactly one of the two is given.

    As a value of ``rejection_sample_method`` it is an object and not a word, so that no file of settings and no
    command line can ask for it by mistake: the text that comes out is not the model's.

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

    def survival(self, drafts: int) -> tuple[float, ...]:
        """Rates of a chain of this many drafts.

        Raises:
          ConfigError: there are fewer rates, or no chain of this length has such a mean.
        """
        if self.rates is not None:
            if len(self.rates) < drafts:
                raise ConfigError(
                    f"synthetic acceptance: {len(self.rates)} rates for {drafts} drafts; give one for each"
                )
            return self.rates[:drafts]
        accepted = (self.length or 1.0) - 1
        if accepted > drafts:
            raise ConfigError(
                f"synthetic acceptance: {drafts} drafts give at most {drafts + 1} tokens per verification, "
                f"got a mean of {self.length}"
            )
        return tuple(min(max(accepted - place, 0.0), 1.0) for place in range(drafts))

    def described(self) -> dict[str, Any]:
        """As plain values, for reports."""
        return {"rates": list(self.rates)} if self.rates is not None else {"mean_length": self.length}
