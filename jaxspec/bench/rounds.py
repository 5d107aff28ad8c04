"""Rounds of a measurement, in each of which every way of decoding runs once, in turns."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from operator import add
from typing import Any, TypeVar

from jaxspec.control.decision import Fixed
from jaxspec.serve.llm import LLM
from jaxspec.topology import AnyTopology

PLAIN, SPECULATIVE = "plain", "speculative"

Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")
Subject = Callable[[slice], Any]
"""Runs some of the prompts; its results can be added."""


def run_rounds(
    subjects: Mapping[Name, Subject], parts: Sequence[slice], count: int, tick: Callable[[], None] = lambda: None
) -> Iterator[list[dict[Name, Any]]]:
    """Yields the runs of each measured round, one dictionary per part of the prompts; a round before them warms up.

    Args:
      subjects: ways of decoding.
      parts: of the prompts; the ways take turns at every part.
      count: measured rounds.
      tick: called after every part.
    """
    for turn in range(count + 1):
        runs = []
        for number, part in enumerate(parts):
            runs.append(run_in_turns({name: partial(run, part) for name, run in subjects.items()}, turn + number))
            tick()
        if turn:
            yield runs


def run_in_turns(subjects: Mapping[Name, Callable[[], Result]], turn: int) -> dict[Name, Result]:
    """Runs every subject once, one right after the other, so that ratios are free of a machine's slow drift.

    Each turn begins with another subject, and over as many turns as there are subjects (twice as many where the number
    is odd) each has followed each other one equally often, because what ran before leaves its traces in caches: the
    balanced Latin square of Williams (1949).
    """
    names = list(subjects)
    return {names[i]: subjects[names[i]]() for i in _order(len(names), turn)}


def _order(count: int, turn: int) -> list[int]:
    order = [(turn + (i // 2 if i % 2 == 0 else -(i + 1) // 2)) % count for i in range(count)]
    if count % 2 and turn // count % 2:
        order.reverse()
    return order


def total(runs: Sequence[Mapping[Name, Any]]) -> dict[Name, Any]:
    """Returns the runs of all parts of a round as one run of each subject."""
    return {name: reduce(add, [part[name] for part in runs]) for name in runs[0]}


@contextmanager
def held_at(llm: LLM, arm: AnyTopology) -> Iterator[None]:
    """Holds an engine that may choose at one topology, and lets it learn nothing from these runs."""
    engine = llm.engine
    chooses, engine.control = engine.control, Fixed(arm)
    try:
        yield
    finally:
        engine.control = chooses
