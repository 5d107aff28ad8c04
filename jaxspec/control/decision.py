"""What a dispatch is to draft, what came of it, and the controls that follow a fixed rule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from jaxspec.topology import AnyTopology


class Request(NamedTuple):
    """A running request: its ``SamplingParams.kind``, and the most drafts that it may accept."""

    kind: int = 0
    limit: int | None = None


@dataclass(frozen=True)
class Decision:
    """What the next dispatch does.

    Attributes:
      arm: the topology that is drafted; the one of a single node decodes plainly.
      probe: whether it runs to learn something and not because it is best.
      gain: predicted tokens per second over those of plain decoding, None where nothing is known yet.
      best: gain of the arm that would run without the probe.
      min_rows: rows that must have a draft for a step to verify, with drafters that often find none.
    """

    arm: AnyTopology
    probe: bool = False
    gain: float | None = None
    best: float = 1.0
    min_rows: int = 1

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
      accepted: accepted drafts of each verification, by (drafts tried, ``Request.kind``); without skipped steps, and
        without rows that had no draft where a drafter often finds none.
      catch_up_s: time spent before it on showing the drafter what was decoded plainly.
      touched: experts per layer that the first 1, 2, ... drafts were predicted to touch, mean over steps; or empty.
      drafted: drafts of all rows that were verified, mean over steps.
      depth: deepest verified draft of any row, mean over steps.
      skipped: steps that verified nothing because too few rows had a draft.
      skipped_tokens: tokens committed in them, and by rows that had no draft in other steps.
      rows_with_drafts: rows that had a draft, of each step; empty where they always have one.
      active: rows that decoded, mean over steps (texts end in between); 0 for all of them.
      after_prompt: whether prompts were read just before it.
    """

    rows: int
    steps: int
    time_s: float
    accepted: Mapping[tuple[int, int], Sequence[int]]
    catch_up_s: float = 0.0
    touched: tuple[float, ...] = ()
    drafted: float = 0.0
    depth: float = 0.0
    skipped: int = 0
    skipped_tokens: int = 0
    rows_with_drafts: tuple[int, ...] = ()
    active: float = 0.0
    after_prompt: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that it committed, those of verifications that were cut short left out."""
        return self.skipped_tokens + sum(len(counts) + sum(counts) for counts in self.accepted.values())


class Control(Protocol):
    """Chooses among arms: topologies whose programs were compiled beforehand and share one state."""

    @property
    def arms(self) -> tuple[AnyTopology, ...]:
        """Returns the arms."""
        ...

    def choose(self, rows: int, waiting: int, requests: Sequence[Request] = (), steps: int | None = None) -> Decision:
        """Decides about the next dispatch.

        Args:
          rows: active.
          waiting: requests without a row.
          requests: that run; empty where nothing is known of them.
          steps: most steps of the dispatch, None for as many as there may be.
        """
        ...

    def record(self, decision: Decision, outcome: Outcome) -> None:
        """Learns from what came of a decision; one that follows a rule learns nothing."""


@dataclass(frozen=True)
class Fixed(Control):
    """Always drafts the same."""

    arm: AnyTopology

    @property
    def arms(self) -> tuple[AnyTopology, ...]:
        return (self.arm,)

    def choose(self, rows: int, waiting: int, requests: Sequence[Request] = (), steps: int | None = None) -> Decision:
        return Decision(self.arm)


@dataclass(frozen=True)
class ByBatchSize(Control):
    """Drafts by the number of requests, as vLLM's ``num_speculative_tokens_per_batch_size`` asks for.

    Attributes:
      ranges: lowest and highest number of requests, running and waiting, and the arm for them.
      otherwise: the arm outside all ranges.
    """

    ranges: tuple[tuple[int, int, AnyTopology], ...]
    otherwise: AnyTopology

    @property
    def arms(self) -> tuple[AnyTopology, ...]:
        return tuple(dict.fromkeys([self.otherwise, *(arm for _, _, arm in self.ranges)]))

    def choose(self, rows: int, waiting: int, requests: Sequence[Request] = (), steps: int | None = None) -> Decision:
        size = rows + waiting
        return Decision(next((arm for low, high, arm in self.ranges if low <= size <= high), self.otherwise))


def bucket(rows: int) -> int:
    """Returns the number of rows as a power of two: 1, 2, 3-4, 5-8, ... are 0, 1, 2, 3, ..."""
    return max(rows - 1, 0).bit_length()
