"""Which drafts a ``speculative_config`` leaves out before they are drawn."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.errors import ConfigError

CUT_KEYS = ("verify_budget", "draft_confidence_threshold")


@dataclass(frozen=True)
class Cuts:
    """What a draft needs to be verified; by default nothing.

    Attributes:
      priced: its tokens must be worth the time that it takes, both as measured while serving.
      least: the product of the drafter's confidences in it and in those before it must be at least this.
    """

    priced: bool = False
    least: float = 0.0

    @property
    def any(self) -> bool:
        """Whether drafts may be cut at all."""
        return self.priced or self.least > 0


NO_CUTS = Cuts()


def parse_cuts(config: Mapping[str, Any], method: str, chain: bool, synthetic: bool) -> Cuts:
    """Reads ``CUT_KEYS``.

    Args:
      config: ``verify_budget`` is ``auto`` or ``off`` (default). ``draft_confidence_threshold`` is from 0 (off) to
        below 1: a draft is verified while the product of the drafter's confidences stays as large. A confidence is the
        largest probability of the distribution that a draft will be drawn from, not that of the token that was drawn,
        which transformers' ``assistant_confidence_threshold`` looks at: that would change the law of sampled text.
      method: of drafting.
      chain: whether only chains are drafted.
      synthetic: whether acceptance is decreed.

    Raises:
      ConfigError: a value is out of range, or nothing could be cut that way.
    """
    wanted, least = config.get("verify_budget", "off"), config.get("draft_confidence_threshold", 0.0)
    if wanted not in ("auto", "off"):
        raise ConfigError(f'speculative_config: verify_budget must be "auto" or "off", got {wanted!r}')
    if not isinstance(least, int | float) or isinstance(least, bool) or not 0 <= least < 1:
        raise ConfigError(
            f"speculative_config: draft_confidence_threshold must be a number from 0 to below 1, got {least!r}"
        )
    cuts = Cuts(wanted == "auto", float(least))
    key = CUT_KEYS[0] if cuts.priced else CUT_KEYS[1]
    if cuts.any and method in ("ngram", "hybrid"):
        raise ConfigError(
            f'speculative_config: method "{method}" drafts without a confidence in what it finds; leave {key} out'
        )
    if cuts.any and not chain:
        raise ConfigError(f"speculative_config: {key} cuts chains, not trees; ask for num_speculative_tokens alone")
    if cuts.any and synthetic:
        raise ConfigError(f"speculative_config: synthetic acceptance is decreed for all drafts; leave {key} out")
    return cuts
