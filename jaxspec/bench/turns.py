"""Who runs when: ways of decoding take turns, whole runs or some tokens at a time."""

import math
from collections.abc import Callable, Generator, Hashable, Mapping
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")
Going = Generator[int, None, Result]  # a run that pauses to say how many tokens there are by now


def at_once(run: Callable[[], Result]) -> Going[Result]:
    """A run that cannot pause, as one that does."""
    yield 0
    return run()


def in_turns(
    subjects: Mapping[Name, Callable[[], Going[Result]]], turn: int, tokens: float = math.inf
) -> dict[Name, Result]:
    """Runs every subject once, one right after the other, or each by so many tokens at a time.

    Ratios between results of one turn are free of what makes a machine slower from minute to minute, and with few
    tokens at a time from second to second; subjects are then at the same place of their texts, too. Each turn, or lap
    of one, begins with another subject, and over as many of them (twice as many where the number is odd) each subject
    has followed each other one equally often, for what ran before leaves its traces in caches: the balanced Latin
    square of Williams (1949).
    """
    going = {name: begin() for name, begin in subjects.items()}
    names, counts = list(subjects), dict.fromkeys(subjects, -1)
    found: dict[Name, Result] = {}
    lap = 0
    try:
        while going:
            for name in (names[place] for place in _order(len(names), turn + lap)):
                try:
                    while name in going and counts[name] < (lap + 1) * tokens:
                        counts[name] = next(going[name])
                except StopIteration as end:
                    found[name] = end.value
                    del going[name]
            lap += 1
    finally:
        for run in going.values():  # none but where one of them failed
            run.close()
    return found


def _order(count: int, turn: int) -> list[int]:
    """Places in the order of a turn."""
    order = [(turn + (place // 2 if place % 2 == 0 else -(place + 1) // 2)) % count for place in range(count)]
    if count % 2 and turn // count % 2:
        order.reverse()
    return order
