"""How often drafts survive, by position: what is counted, forgotten, and taken for a surprise."""

import math

import pytest

from jaxspec.serve.survival import UNTRIED, Survival


def test_survival_counts():
    counts = Survival(3)
    counts.add(3, [0, 1, 3, 3])
    survival, error = zip(*counts.by_position(), strict=True)
    r1 = (3 + 0.5) / 5  # as if one more had accepted as many as the position before
    r2 = (2 + r1) / 4
    r3 = (2 + r2) / 3
    assert survival == pytest.approx((r1, r1 * r2, r1 * r2 * r3))
    assert error == pytest.approx(
        (
            r1 * math.sqrt((1 - r1) / r1 / 4),
            r1 * r2 * math.sqrt((1 - r1) / r1 / 4 + (1 - r2) / r2 / 3),
            r1 * r2 * r3 * math.sqrt((1 - r1) / r1 / 4 + (1 - r2) / r2 / 3 + (1 - r3) / r3 / 2),
        )
    )
    counts.add(1, [1, 1, 1, 1])
    # Of those that accepted the first draft and tried more, two of three accepted the second.
    kept = 1 - 4 / UNTRIED
    r1 = (7 + 0.5) / 9
    r2 = (2 * kept + r1) / (3 * kept + 1)
    r3 = (2 * kept + r2) / (2 * kept + 1)
    assert [s for s, _ in counts.by_position()] == pytest.approx([r1, r1 * r2, r1 * r2 * r3])


def test_many_verifications_count_for_themselves():
    counts = Survival(2, memory=4000)
    counts.add(2, [2, 1, 0, 0] * 1000)
    assert [s for s, _ in counts.by_position()] == pytest.approx([0.5, 0.25], rel=1e-3)


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


def test_a_position_that_was_never_accepted_is_not_hopeless_for_ever():
    """Texts changed meanwhile: the drafts before it are all accepted now."""
    counts = Survival(2, memory=100)
    counts.add(2, [1] * 100)
    assert counts.by_position()[1][0] < 0.02
    for _ in range(600):
        counts.add(1, [1] * 32)
    survival, error = counts.by_position()[1]
    assert survival > 0.9
    assert error == 0.5


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
    r1 = (3 + 0.5) / 5
    r2 = (2 + r1) / 4
    assert survival == pytest.approx((r1, r1 * r2, r1 * r2 * r2, r1 * r2 * r2**2))
    known = (1 - r1) / r1 / 4 + (1 - r2) / r2 / 3
    assert error[2:] == pytest.approx((survival[2] * math.sqrt(known + 1), survival[3] * math.sqrt(known + 2)))
