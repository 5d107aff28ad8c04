"""Dispatches of one kind that follow each other, taken for one: there is less to learn from, and as much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from statistics import median

from jaxspec.serve.control import Decision, Outcome
from jaxspec.topology import AnyTopology

MOST_APART = 1.15  # times the median: a dispatch that took longer counts as just so long

Ran = tuple[Decision, Outcome]


def together(ran: Sequence[Ran], full: int, before: AnyTopology | None) -> Iterator[Ran]:
    """Dispatches in their order, alike ones as one with all of their steps.

    Probes, the first dispatch behind one of another arm or behind prompts, shorter ones and those whose experts were
    predicted stay by themselves. Of three and more alike, none counts as much longer than the median: other programs
    take the machine away for a moment now and then.

    Args:
      ran: what was decided, and what came of it.
      full: steps of a full dispatch.
      before: arm of the dispatch before them.
    """
    alike: list[Ran] = []
    for one in ran:
        if alike and not _alike(alike[0], one, full):
            yield _one(alike)
            alike = []
        if one[0].arm == before and _alike(one, one, full):
            alike.append(one)
        else:
            yield one
        before = one[0].arm
    if alike:
        yield _one(alike)


def _alike(first: Ran, other: Ran, full: int) -> bool:
    """Whether two full dispatches of one arm differ in nothing but their luck."""
    (decided, outcome), (decided_too, outcome_too) = first, other
    return (
        not (decided.probe or decided_too.probe or outcome.touched or outcome_too.touched)
        and not (outcome.read or outcome_too.read)
        and decided.arm == decided_too.arm
        and (decided.gain is None) == (decided_too.gain is None)
        and (outcome.rows, full, full) == (outcome_too.rows, outcome.steps, outcome_too.steps)
        and round(outcome.active) == round(outcome_too.active)
    )


def _one(alike: Sequence[Ran]) -> Ran:
    """Several alike as one."""
    (decision, first), count = alike[-1], len(alike)
    if count == 1:
        return alike[0]
    outcomes = [outcome for _, outcome in alike]
    most_s = MOST_APART * median(outcome.time_s for outcome in outcomes) if count > 2 else float("inf")
    tried = dict.fromkeys(tried for outcome in outcomes for tried in outcome.accepted)
    return decision, replace(
        first,
        steps=count * first.steps,
        time_s=sum(min(outcome.time_s, most_s) for outcome in outcomes),
        accepted={k: [*chain.from_iterable(outcome.accepted.get(k, ()) for outcome in outcomes)] for k in tried},
        lost_s=sum(outcome.lost_s for outcome in outcomes),
        skipped=sum(outcome.skipped for outcome in outcomes),
        skipped_tokens=sum(outcome.skipped_tokens for outcome in outcomes),
        found=tuple(chain.from_iterable(outcome.found for outcome in outcomes)),
        active=sum(outcome.active for outcome in outcomes) / count,
    )
