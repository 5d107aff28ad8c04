"""What the next dispatch drafts, and controls that choose by a rule; ``Adaptive`` is the one that measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxspec.serve.survival import RequestSurvival
from jaxspec.topology import AnyTopology


@dataclass(frozen=True)
class Decision:
    """What the next dispatch does.

    Attributes:
      arm: what is drafted; the topology of one node decodes plainly.
      probe: whether it is run to learn something and not because it is best.
      gain: predicted tokens per second over those of plain decoding, None where nothing is known yet.
      best: the gain of what it would have run without the probe.
      least: rows that must have a draft for a step to verify them, with drafters that often find none.
    """

    arm: AnyTopology
    probe: bool = False
    gain: float | None = None
    best: float = 1.0
    least: int = 1

    @property
    def length(self) -> int:
        """K, the most drafts that a row can accept per step."""
        return self.arm.max_depth


@dataclass(frozen=True)
class Outcome:
    """What a dispatch did.

    Attributes:
      rows: active rows at its start.
      steps: steps that it ran.
      time_s: wall time of the dispatch.
      accepted: drafts that were tried per verification, to how many of them each such verification accepted; without
        the skipped steps, and without rows that had no draft where a drafter often finds none.
      lost_s: time spent before it on bringing the drafter up to date.
      touched: experts per layer that the first 1, 2, ... drafts of a step were predicted to touch, mean over its
        steps; empty without a prediction.
      drafted: drafts of all rows that a step verified, mean over its steps.
      deepest: depth to which some row's drafts were verified, likewise.
      skipped: steps that verified nothing because too few rows had a draft.
      skipped_tokens: committed in them, and by rows that had no draft in others.
      found: rows that had a draft, of each step; empty where they always have one.
      active: rows that decoded, mean over its steps, for texts end; 0 for all of them.
      read: whether prompts were read just before it.
    """

    rows: int
    steps: int
    time_s: float
    accepted: Mapping[int, Sequence[int]]
    lost_s: float = 0.0
    touched: tuple[float, ...] = ()
    drafted: float = 0.0
    deepest: float = 0.0
    skipped: int = 0
    skipped_tokens: int = 0
    found: tuple[int, ...] = ()
    active: float = 0.0
    read: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that it committed, those of verifications that were cut short left out."""
        return self.skipped_tokens + sum(len(a) + sum(a) for a in self.accepted.values())


class Control(Protocol):
    """Chooses among arms, programs that were compiled beforehand and share one state; a topology names each."""

    @property
    def arms(self) -> tuple[AnyTopology, ...]:
        """The arms."""
        ...

    def choose(
        self, rows: int, waiting: int, requests: RequestSurvival | None = None, steps: int | None = None
    ) -> Decision:
        """Arm of the next dispatch for this many active rows and waiting requests.

        Args:
          rows: active.
          waiting: requests without a row.
          requests: what is known of each that runs.
          steps: most steps of the dispatch, None for as many as there may be.
        """
        ...

    def ahead(self, decision: Decision, rows: int, requests: RequestSurvival | None = None) -> None:
        """Called while a dispatch runs for so many rows, for whatever need not wait for its end."""
        ...

    def record(self, decision: Decision, outcome: Outcome) -> None:
        """Takes note of what came of a decision."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Always the same arm."""

    arm: AnyTopology

    @property
    def arms(self) -> tuple[AnyTopology, ...]:
        """The one arm."""
        return (self.arm,)

    def choose(
        self, rows: int, waiting: int, requests: RequestSurvival | None = None, steps: int | None = None
    ) -> Decision:
        """Arm of the next dispatch."""
        return Decision(self.arm)

    def ahead(self, decision: Decision, rows: int, requests: RequestSurvival | None = None) -> None:
        """Has nothing to think about."""

    def record(self, decision: Decision, outcome: Outcome) -> None:
        """Learns nothing."""


@dataclass(frozen=True)
class ByBatchSize:
    """An arm for each range of batch sizes, as of vLLM's ``num_speculative_tokens_per_batch_size``.

    Attributes:
      ranges: lowest and highest number of requests, running and waiting, and the arm for them.
      otherwise: the arm outside of all ranges.
    """

    ranges: tuple[tuple[int, int, AnyTopology], ...]
    otherwise: AnyTopology

    @property
    def arms(self) -> tuple[AnyTopology, ...]:
        """The arms, without repetition."""
        return tuple(dict.fromkeys([self.otherwise, *(arm for _, _, arm in self.ranges)]))

    def choose(
        self, rows: int, waiting: int, requests: RequestSurvival | None = None, steps: int | None = None
    ) -> Decision:
        """Arm of the next dispatch."""
        size = rows + waiting
        return Decision(next((arm for low, high, arm in self.ranges if low <= size <= high), self.otherwise))

    def ahead(self, decision: Decision, rows: int, requests: RequestSurvival | None = None) -> None:
        """Has nothing to think about."""

    def record(self, decision: Decision, outcome: Outcome) -> None:
        """Learns nothing."""
