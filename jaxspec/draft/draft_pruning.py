"""Which drafts a ``speculative_config`` leaves out before they are drawn."""

from dataclasses import dataclass

from jaxspec.draft.speculative_keys import SpeculativeKeys
from jaxspec.errors import ConfigError


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
        """Whether drafts may be pruned at all."""
        return self.by_cost or self.min_confidence > 0


NO_PRUNING = PruningConfig()


def pruning_of(keys: SpeculativeKeys, method: str, *, all_chains: bool, synthetic: bool) -> PruningConfig:
    """Reads ``verify_budget`` and ``draft_confidence_threshold``.

    Args:
      keys: of the ``speculative_config``.
      method: of drafting.
      all_chains: whether only chains are drafted.
      synthetic: whether acceptance is synthetic.

    Raises:
      ConfigError: nothing could be pruned that way.
    """
    pruning = PruningConfig(keys.verify_budget == "auto", keys.draft_confidence_threshold)
    key = "verify_budget" if pruning.by_cost else "draft_confidence_threshold"
    if pruning.enabled and method in ("ngram", "hybrid"):
        raise ConfigError(
            f'speculative_config: method "{method}" drafts without a confidence in what it finds; leave {key} out'
        )
    if pruning.enabled and not all_chains:
        raise ConfigError(f"speculative_config: {key} cuts chains, not trees; ask for num_speculative_tokens alone")
    if pruning.enabled and synthetic:
        raise ConfigError(f"speculative_config: synthetic acceptance is the same for all drafts; leave {key} out")
    return pruning
