"""Which drafts a ``speculative_config`` leaves out before they are drawn."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.errors import ConfigError

PRUNING_KEYS = ("verify_budget", "draft_confidence_threshold")


@dataclass(frozen=True)
class PruningConfig:
    """What a draft needs to be verified; by default nothing.

    Attributes:
      by_cost: its tokens must be worth the time that it takes, both as measured while serving.
      min_confidence: the product of the drafter's confidences in it and in those before it must be at least this.
    """

    by_cost: bool = False
    min_confidence: float = 0.0

    @property
    def enabled(self) -> bool:
        """Whether drafts may be cut at all."""
        return self.by_cost or self.min_confidence > 0


NO_PRUNING = PruningConfig()


def parse_pruning(config: Mapping[str, Any], method: str, chain: bool, synthetic: bool) -> PruningConfig:
    """Reads ``PRUNING_KEYS``.

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
    pruning = PruningConfig(wanted == "auto", float(least))
    key = PRUNING_KEYS[0] if pruning.by_cost else PRUNING_KEYS[1]
    if pruning.enabled and method in ("ngram", "hybrid"):
        raise ConfigError(
            f'speculative_config: method "{method}" drafts without a confidence in what it finds; leave {key} out'
        )
    if pruning.enabled and not chain:
        raise ConfigError(f"speculative_config: {key} cuts chains, not trees; ask for num_speculative_tokens alone")
    if pruning.enabled and synthetic:
        raise ConfigError(f"speculative_config: synthetic acceptance is decreed for all drafts; leave {key} out")
    return pruning
