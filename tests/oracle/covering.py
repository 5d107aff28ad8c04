"""Covering arrays: few cases in which every pair of values of any two factors occurs."""

from collections.abc import Callable, Iterator
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def every_case(factors: dict[str, list[Any]], possible: Callable[[Case], bool]) -> list[Case]:
    """Returns all possible combinations of one value of each factor."""
    cases = (dict(zip(factors, values, strict=True)) for values in product(*factors.values()))
    return [case for case in cases if possible(case)]


def pairwise(cases: list[Case]) -> list[Case]:
    """Returns few of the cases that together have every pair of values that some case has: the greedy choice."""

    def pairs(case: Case) -> Iterator[Any]:
        return combinations(((name, str(value)) for name, value in case.items()), 2)

    missing, chosen = {pair for case in cases for pair in pairs(case)}, []
    while missing:
        best = max(cases, key=lambda case: len(missing.intersection(pairs(case))))
        missing -= set(pairs(best))
        chosen.append(best)
    return chosen
