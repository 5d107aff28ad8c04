"""How often drafts are accepted: ``tokens = 1 + sum_j prod_(i <= j) rate_i``, ``rate_j = level_j * tree_j * kind_j``.

``rate_j`` is the share of verifications that accept draft j among those that accepted all before it, so no
independence between positions is assumed. All chains share the ``level``; a tree's depths and requests that are
sampled alike (``SamplingParams.kind``) differ from it by factors ``(w + hits) / (w + expected hits)``. Old counts fade.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from jaxspec.control.decision import Request
from jaxspec.control.spec import ControlSpec
from jaxspec.topology import AnyTopology


class Factor:
    """Hits by position over those that were expected; ``prior`` expected hits came true before any."""

    def __init__(self, positions: int, prior: float):
        self.hits, self.expected = [0.0] * positions, [0.0] * positions
        self._prior = prior

    def __getitem__(self, at: int) -> float:
        return (self.hits[at] + self._prior) / self.weight(at)

    def weight(self, at: int) -> float:
        """Returns the expected hits that it stands on."""
        return self.expected[at] + self._prior

    def add(self, at: int, hits: float, expected: float, kept: float) -> None:
        """Counts at one position, where a share of what was known is kept."""
        self.hits[at], self.expected[at] = self.hits[at] * kept + hits, self.expected[at] * kept + expected


class Acceptance:
    """What drafts of every arm and of every kind of request have had accepted."""

    def __init__(self, arms: Sequence[AnyTopology], spec: ControlSpec):
        self._spec, self._depth = spec, max(arm.max_depth for arm in arms)
        self._level = Factor(self._depth, 0.0)
        self._trees = {i: Factor(self._depth, spec.prior_hits) for i, arm in enumerate(arms) if not arm.is_chain}
        self._kinds: dict[int, Factor] = {}

    def add(self, arm: int, accepted: Mapping[tuple[int, int], Sequence[int]]) -> None:
        """Counts the verifications of a dispatch, see ``Outcome.accepted``."""
        for (drafts, kind), counts in accepted.items():
            numbers, tried, levels = Counter(counts), len(counts), self._levels()
            factors = self._factors(arm, kind)
            for at in range(self._depth if drafts and counts else 0):
                # What is not tried is known less and less, too.
                kept = max(0.0, 1.0 - (tried if at < drafts else len(counts)) / self._spec.verifications)
                if at >= drafts:
                    self._level.add(at, 0.0, 0.0, kept)
                    continue
                hits = tried - numbers[at]
                expected = tried * math.prod(factor[at] for factor in factors)
                for factor in factors:
                    factor.add(at, hits, levels[at][0] * expected / factor[at], kept)
                self._level.add(at, hits, expected, kept)
                tried = hits

    def _factors(self, arm: int, kind: int) -> list[Factor]:
        by_kind = self._kinds.setdefault(kind, Factor(self._depth, self._spec.prior_hits))
        return [self._trees[arm], by_kind] if arm in self._trees else [by_kind]

    def _levels(self) -> list[tuple[float, float]]:
        """Returns the level of each position, and the tries that it stands on.

        One try more is expected to end as at the position before (the first: one half). So what was never tried
        follows that position, and one that was never accepted is not hopeless for ever.
        """
        levels, rate = [], 0.5
        for hits, tried in zip(self._level.hits, self._level.expected, strict=True):
            rate = (hits + rate) / (tried + 1.0)
            levels.append((rate, tried + 1.0))
        return levels

    def tokens(self, arm: int, drafts: int, requests: Sequence[Request]) -> tuple[float, float]:
        """Returns the tokens that a step of an arm of so many drafts commits per row, and their standard error."""
        levels, tokens, error = self._levels(), 0.0, 0.0
        groups = Counter(requests or [Request()])
        for request, count in groups.items():
            limit = drafts if request.limit is None else min(drafts, request.limit)
            factors, share, variance = self._factors(arm, request.kind), 1.0, 0.0
            for at, (level, tried) in enumerate(levels[:limit]):
                rate = min(1.0, level * math.prod(factor[at] for factor in factors))
                share *= rate
                variance += (1.0 - rate) / (rate * tried) if rate else 1.0  # relative variances of factors add up
                if arm in self._trees:
                    variance += (1.0 - rate) / self._trees[arm].weight(at)
                tokens += count * share
                error += count * min(share * math.sqrt(variance), 0.5)
        total = groups.total()
        return 1.0 + tokens / total, error / total
