"""Dispatches that are taken for one."""

from dataclasses import replace

import pytest

from jaxspec.serve.control import Decision, Outcome
from jaxspec.serve.together import MOST_APART, together
from jaxspec.topology import PLAIN, chain

ONE = Outcome(4, 8, 1.0, {2: [1, 2]}, lost_s=0.5, skipped=1, skipped_tokens=3, found=(4, 2), active=4.0)
TWO = Decision(chain(2), gain=1.2)


def test_alike_ones_that_follow_each_other_are_one_with_all_they_did():
    ran = [(TWO, ONE), (TWO, replace(ONE, time_s=1.2, accepted={2: [0], 1: [1]})), (TWO, replace(ONE, active=3.9))]
    (decision, found), *others = together(ran, full=8, before=chain(2))
    assert not others
    assert decision == TWO
    assert (found.rows, found.steps, found.time_s) == (4, 24, pytest.approx(1.0 + MOST_APART + 1.0))
    assert found.accepted == {2: [1, 2, 0, 1, 2], 1: [1]}
    assert (found.lost_s, found.skipped, found.skipped_tokens, found.found) == (1.5, 3, 9, (4, 2) * 3)
    assert found.tokens == sum(outcome.tokens for _, outcome in ran)
    assert found.active == pytest.approx((4.0 + 4.0 + 3.9) / 3)


@pytest.mark.parametrize(
    "other",
    [
        (replace(TWO, probe=True), ONE), (Decision(PLAIN, gain=1.0), ONE), (replace(TWO, gain=None), ONE),
        (TWO, replace(ONE, rows=3)), (TWO, replace(ONE, steps=7)), (TWO, replace(ONE, active=2.0)),
        (TWO, replace(ONE, touched=(3.0, 4.0))), (TWO, replace(ONE, read=True)),
    ],
)  # fmt: skip
def test_others_stay_by_themselves_and_in_order(other: tuple[Decision, Outcome]):
    found = list(together([(TWO, ONE), other, (TWO, ONE)], full=8, before=chain(2)))
    assert found == [(TWO, ONE), other, (TWO, ONE)]


def test_the_first_one_of_an_arm_stays_by_itself():
    """It takes what a change of arms takes."""
    ran = [(TWO, ONE)] * 3
    assert [outcome.steps for _, outcome in together(ran, full=8, before=PLAIN)] == [8, 16]
    assert [outcome.steps for _, outcome in together(ran, full=8, before=None)] == [8, 16]
    assert [outcome.steps for _, outcome in together(ran, full=8, before=chain(2))] == [24]
