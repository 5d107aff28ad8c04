"""Rounds: who runs when."""

from collections import Counter
from itertools import pairwise, permutations

import pytest

from jaxspec.bench.rounds import run_in_turns, run_rounds, total


@pytest.mark.parametrize("names", ["ab", "abc", "abcdefg", "abcdefgh"])
def test_in_turns_everyone_follows_everyone(names: str):
    turns, begins = len(names) * (1 + len(names) % 2), Counter[str]()
    follows = Counter[tuple[str, str]]()
    seen: list[str] = []
    subjects = {name: (lambda name=name: seen.append(name) or name) for name in names}
    for turn in range(turns):
        seen.clear()
        assert run_in_turns(subjects, turn) == {name: name for name in names}
        assert len(seen) == len(names), "once each"
        begins[seen[0]] += 1
        follows.update(pairwise(seen))
    assert set(begins) == set(names)
    assert len(set(begins.values())) == 1
    assert follows == {pair: turns // len(names) for pair in permutations(names, 2)}


def test_parts_are_in_turns_and_one_round_warms_up():
    seen, ticks = [], Counter[str]()

    def subject(name: str):
        def run(part: slice) -> int:
            seen.append((name, part.start))
            return part.stop

        return run

    parts = [slice(0, 1), slice(1, 3)]
    rounds = list(run_rounds({"a": subject("a"), "b": subject("b")}, parts, 2, lambda: ticks.update("x")))
    assert [total(runs) for runs in rounds] == [{"a": 4, "b": 4}] * 2
    assert seen[:8] == [(name, start) for name, start in zip("abbabaab", [0, 0, 1, 1] * 2, strict=True)]
    assert ticks["x"] == 3 * 2
