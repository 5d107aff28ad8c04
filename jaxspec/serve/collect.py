"""What a dispatch did, read from its report: each row's tokens, log-probabilities and drafts, and the outcome."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxspec.decode.step import TAIL, Report
from jaxspec.serve.control import Outcome
from jaxspec.serve.metrics import EngineMetrics
from jaxspec.serve.request import Logprob, RequestOutput
from jaxspec.serve.rows import Sample
from jaxspec.topology import AnyTopology


@dataclass(frozen=True)
class Reading:
    """A dispatch's report on the host.

    Attributes:
      report: as the program returned it.
      packed_BX: its packed counts and tokens.
      arm: what was dispatched.
      may_skip: whether the arm's steps verify nothing where few rows have a draft.
    """

    report: Report
    packed_BX: np.ndarray
    arm: AnyTopology
    may_skip: bool

    @classmethod
    def of(cls, report: Report, arm: AnyTopology, may_skip: bool) -> Reading:
        """Waits for the report."""
        return cls(report, np.asarray(jax.device_get(report.packed_BX)), arm, may_skip)

    @property
    def steps(self) -> int:
        """Steps that the dispatch ran."""
        return int(self.packed_BX[0, -1])

    @property
    def width(self) -> int:
        """Columns of one step."""
        return self.arm.max_depth + 3

    @property
    def counts_BX(self) -> np.ndarray:
        """Tokens that each row committed in each step."""
        return self.packed_BX[:, self.width - 2 : -TAIL : self.width][:, : self.steps]

    @property
    def drafted_BX(self) -> np.ndarray:
        """Drafts that each row had in each step; those that were not verified are below zero."""
        return self.packed_BX[:, self.width - 1 : -TAIL : self.width][:, : self.steps]

    @property
    def broken_B(self) -> np.ndarray:
        """Rows that ended because no token could be sampled."""
        return self.packed_BX[:, -TAIL] > 0

    @property
    def skipped_X(self) -> np.ndarray:
        """Which steps verified nothing for want of drafts."""
        return (self.drafted_BX.max(axis=0) <= 0) & self.may_skip

    def verifications(self, row: int) -> Iterator[tuple[int, np.ndarray, int]]:
        """Each verification of a row: its first place in the report, its tokens, and how many drafts it had."""
        depth = self.arm.max_depth + 1
        for index in range(self.steps):
            entry = self.packed_BX[row, index * self.width : (index + 1) * self.width]
            count, drafted = int(entry[depth]), max(int(entry[depth + 1]), 0)
            if count == 0:
                return
            yield index * depth, entry[:count], drafted

    def logprobs(self, row: int, first: int, tokens: np.ndarray, most: int) -> list[dict[int, Logprob]]:
        """Log-probabilities of one verification's tokens: the sampled one and the ``most`` best."""
        # Sliced on the host: a slice on the device would compile a program for each length.
        values = np.asarray(self.report.logprob_BXL)[row, first : first + len(tokens)]
        ids = np.asarray(self.report.top_BXL)[row, first : first + len(tokens)]
        entries = []
        for token, value, top in zip(tokens.tolist(), values, ids, strict=True):
            entry = {
                int(i): Logprob(float(v), r + 1)
                for r, (i, v) in enumerate(zip(top[1:], value[1:], strict=True))
                if r < most
            }
            entry.setdefault(token, Logprob(float(value[0]), int(top[0])))
            entries.append(entry)
        return entries


@dataclass
class Collected:
    """What the rows took of a dispatch.

    Attributes:
      moved: requests that it moved forward.
      ended: rows whose sample ended.
      accepted: accepted drafts of each verification, by how many were tried.
      by_row: the same by row.
      skipped_tokens: tokens of steps without drafts.
    """

    moved: dict[int, RequestOutput] = field(default_factory=dict)
    ended: list[tuple[int, Sample]] = field(default_factory=list)
    accepted: dict[int, list[int]] = field(default_factory=dict)
    by_row: dict[int, list[int]] = field(default_factory=dict)
    skipped_tokens: int = 0


def collect(
    reading: Reading, rows: Sequence[Sample | None], eos: set[int], metrics: EngineMetrics, cuts: bool
) -> Collected:
    """Hands each row's tokens to its sample.

    Args:
      reading: of the dispatch.
      rows: sample in each row.
      eos: ids that end a text.
      metrics: of the engine, which counts.
      cuts: whether drafts may have been cut.
    """
    taken, length = Collected(), reading.arm.max_depth
    for row, sample in enumerate(rows):
        if sample is None:
            continue
        taken.moved[id(sample.output)] = sample.output
        tried = sample.tried(length)
        try:
            took = _take(reading, row, sample, eos, metrics, tried if cuts else None)
        except Exception as error:  # its own failure, such as of its text; the others go on
            took = []
            sample.fail(f"this text could not be taken over ({type(error).__name__}: {error})")
        if reading.broken_B[row] and sample.completion.finish_reason is None:
            sample.fail(_broken(sample))
        had = zip(took, reading.drafted_BX[row] > 0, strict=False)
        taken.by_row[row] = [count for count, some in had if some] if reading.may_skip else took
        taken.skipped_tokens += len(took) - len(taken.by_row[row])
        taken.accepted.setdefault(tried, []).extend(taken.by_row[row])
        if sample.completion.finish_reason is not None:
            taken.ended.append((row, sample))
    return taken


def _broken(sample: Sample) -> str:
    p, where = sample.params, f"the model's logits are not finite at position {sample.length}"
    advice = "look for NaN or infinity in the weights, or try dtype float32"
    if sample.biased or sample.bad_words or p.min_tokens:
        return f"{where}, or every token is banned there; allow more tokens, or {advice}"
    return f"{where}; {advice}"


def _take(
    reading: Reading, row: int, sample: Sample, eos: set[int], metrics: EngineMetrics, uncut: int | None
) -> list[int]:
    """Hands the tokens of a dispatch to a sample, step by step.

    Returns:
      What each verification accepted of the drafts that were tried, but for a last one that was cut short.
    """
    counts: list[int] = []
    for first, tokens, drafted in reading.verifications(row):
        logprobs = None
        if sample.params.logprobs is not None:
            logprobs = reading.logprobs(row, first, tokens, sample.params.logprobs)
        metrics.cut_drafts += 0 if uncut is None else uncut - drafted
        before = sample.output.metrics.num_accepted_tokens
        ended = sample.take(tokens, drafted, logprobs, eos)
        metrics.add(drafted, sample.output.metrics.num_accepted_tokens - before, sample.completion)
        if ended:
            break
        counts.append(len(tokens) - 1)
    if reading.arm.max_depth:
        sample.observed = sample.length
    return counts


def outcome_of(reading: Reading, taken: Collected, rows: int, **measured: Any) -> Outcome:
    """The outcome of a dispatch for whoever decides about the next.

    Args:
      reading: of the dispatch.
      taken: what its rows took.
      rows: that ran.
      measured: times and circumstances, by the names of ``Outcome``.
    """
    steps, drafted_BX, touched = max(reading.steps, 1), reading.drafted_BX, reading.report.touched_K
    return Outcome(
        rows=rows, steps=reading.steps, accepted=taken.accepted, skipped_tokens=taken.skipped_tokens,
        touched=() if touched is None else tuple(np.asarray(touched) / steps),
        drafted=float(drafted_BX.clip(0).sum() / steps),
        deepest=float(drafted_BX.clip(0).max(axis=0).sum() / steps),
        skipped=int(reading.skipped_X.sum()),
        found=tuple((drafted_BX != 0).sum(axis=0).tolist()) if reading.may_skip else (),
        active=float((reading.counts_BX > 0).sum() / steps),
        **measured,
    )  # fmt: skip
