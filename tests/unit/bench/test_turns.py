"""Turns: who runs when."""

from collections import Counter
from functools import partial
from itertools import pairwise, permutations

import pytest

from jaxspec.bench.turns import at_once, in_turns


@pytest.mark.parametrize("names", ["ab", "abc", "abcdefg", "abcdefgh"])
def test_in_turns_everyone_follows_everyone(names: str):
    turns, begins = len(names) * (1 + len(names) % 2), Counter[str]()
    follows = Counter[tuple[str, str]]()
    seen: list[str] = []
    subjects = {name: partial(at_once, lambda name=name: seen.append(name) or name) for name in names}
    for turn in range(turns):
        seen.clear()
        assert in_turns(subjects, turn) == {name: name for name in names}
        assert len(seen) == len(names), "once each"
        begins[seen[0]] += 1
        follows.update(pairwise(seen))
    assert set(begins) == set(names)
    assert len(set(begins.values())) == 1
    assert follows == {pair: turns // len(names) for pair in permutations(names, 2)}


def test_subjects_are_at_the_same_place_of_their_texts():
    """Turns of eight tokens: dispatches of 1, 3 and 20 tokens, each subject goes on until it is not behind."""
    seen: list[tuple[str, int]] = []

    def going(name: str, size: int):
        for tokens in range(size, 41, size):
            seen.append((name, tokens))
            yield tokens
        return size

    sizes = {"a": 1, "b": 3, "c": 20}
    found = in_turns({name: partial(going, name, size) for name, size in sizes.items()}, 0, 8)
    assert found == sizes
    counts = [[at for name, at in seen if name == who] for who in sizes]
    assert counts == [list(range(size, 41, size)) for size in sizes.values()], "every dispatch once"
    order = "".join(name for name, _ in seen)
    laps = ("aaaaaaaa", "c", "bbb"), ("bbb", "aaaaaaaa"), ("c", "bb", "aaaaaaaa")
    assert order.startswith("".join(map("".join, laps))), "c is ahead in the second lap"
