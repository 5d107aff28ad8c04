"""How often drafts survive, by position: what is counted, forgotten, and taken for a surprise."""

import math

import pytest

from jaxspec.serve.survival import Survival


def test_survival_counts():
    counts = Survival(3)
    counts.add(3, [0, 1, 3, 3])
    survival, error = zip(*counts.by_position(), strict=True)
    assert survival == pytest.approx((3 / 4, 2 / 4, 2 / 4))
    assert 0 < sum(error) < 1
    counts.add(1, [1, 1, 1, 1])
    # Of those that accepted the first draft and tried more, two of three accepted the second.
    assert [s for s, _ in counts.by_position()] == pytest.approx([7 / 8, 7 / 8 * 2 / 3, 7 / 8 * 2 / 3])


def test_survival_forgets():
    counts = Survival(1, memory=100)
    counts.add(1, [1] * 1000)
    for _ in range(30):
        counts.add(1, [0] * 10)
    assert counts.by_position()[0][0] == pytest.approx(0.9**30, abs=0.1)


def test_what_is_not_tried_any_more_is_known_less_and_less():
    counts = Survival(2, memory=100)
    counts.add(2, [2, 1, 0, 0] * 25)
    before = counts.by_position()
    for _ in range(10):
        counts.add(1, [1, 0] * 30)
    after = counts.by_position()
    assert [s for s, _ in after] == pytest.approx([0.5, 0.25])
    assert after[0][1] == pytest.approx(before[0][1])
    first, second = 0.5 / (0.5 * 100), 0.5 / (0.5 * 50)  # relative variance of either rate, of as many trials
    assert before[1][1] == pytest.approx(0.25 * math.sqrt(first + second))
    assert after[1][1] == pytest.approx(0.25 * math.sqrt(first + second / 0.97**10))


def test_a_surprise_makes_it_forget_what_was_before():
    """A run of rejections that chance does not explain counts alone; one that it explains counts beside the others."""
    settled, lucky = Survival(1, memory=800), Survival(1, memory=800)
    for counts in (settled, lucky):
        counts.add(1, [1, 1, 1, 0] * 200)
    lucky.add(1, [1, 0] * 12)
    assert lucky.by_position()[0][0] == pytest.approx(0.75, abs=0.01)
    settled.add(1, [0] * 24)
    assert settled.by_position()[0][0] < 0.4


def test_untried_positions_follow_the_last_rate_and_are_unsure():
    counts = Survival(4)
    counts.add(2, [2, 2, 1, 0])
    survival, error = zip(*counts.by_position(), strict=True)
    s1, s2 = 3 / 4, 2 / 4
    rate = s2 / s1
    assert survival == pytest.approx((s1, s2, s2 * rate, s2 * rate**2))
    assert error[2:] == survival[2:]
