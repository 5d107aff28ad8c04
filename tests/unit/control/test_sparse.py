"""The control over a drafter that often finds nothing, whose steps then verify nothing: a made-up machine."""

import math
from dataclasses import replace

import numpy as np
import pytest

from jaxspec.control.adaptive import Adaptive
from jaxspec.control.decision import Decision, Outcome
from jaxspec.control.sparse import DraftAvailability, Share
from jaxspec.topology import PLAIN, AnyTopology, chain

ARMS = tuple(chain(length) for length in range(6))
STEPS, TOKENS = 8, 64
CHEAP, DEAR = [1.0, 1.15, 1.25, 1.35, 1.45, 1.55], [1.0, 1.6, 2.0, 2.4, 2.8, 3.2]


class Lookup:
    """Rows whose texts have few matches in their first half and many in their second one.

    Behind a right draft there is a match again, which goes on as it did; elsewhere there is one by chance. All matches
    lead to runs of right drafts whose lengths have no memory.
    """

    looking = 1.01  # time of a step that looks for drafts over that of one that does not

    def __init__(self, time_s: list[float], rate: float, shares: tuple[float, float], seed: int, rows: int = 1):
        self.time_s, self.rate, self.shares = time_s, rate, shares
        self.rng = np.random.default_rng(seed)
        self.total_s, self.tokens, self.places = 0.0, 0, [0] * rows
        self.runs: list[int | None] = [None] * rows  # right drafts ahead, where there is a match
        self.by_row: list[list[int]] = []

    def run(self, arm: AnyTopology, least: int = 1) -> Outcome:
        took, drafts, rows = 0.0, arm.max_depth, len(self.places)
        self.by_row, skipped, alone, found = [[] for _ in self.places], 0, 0, []
        for _ in range(STEPS):
            have = [drafts > 0 and run is not None for run in self.runs]
            verifies = sum(have) >= least
            skipped += drafts > 0 and not verifies
            found.append(sum(have))
            took += self.time_s[drafts if verifies else 0] * (self.looking if drafts else 1.0)
            for row, some in enumerate(have):
                hits = min(self.runs[row] or 0, drafts) if verifies else 0
                self.goes_on(row, 1 + hits)
                if (some and verifies) or not drafts:
                    self.by_row[row].append(hits)
                else:
                    alone += 1
        took *= 1 + 0.03 * self.rng.standard_normal()
        self.total_s += took
        accepted = {(drafts, 0): [count for counts in self.by_row for count in counts]}
        told = tuple(found) if drafts else ()
        return Outcome(rows, STEPS, took, accepted, skipped=skipped, skipped_tokens=alone, rows_with_drafts=told)

    def share(self, drafts: int) -> float:
        """Of steps that find a draft, where shares are the same everywhere."""
        right, some = self.rate ** (drafts + 1), self.shares[0]
        return some / (some + (1 - right) * (1 - some))

    def goes_on(self, row: int, tokens: int) -> None:
        """By so many tokens, of which all but the last are right drafts."""
        self.places[row] += tokens
        self.tokens += tokens
        ahead = (self.runs[row] or 0) - tokens
        if ahead < 0:
            some = self.rng.random() < self.shares[self.places[row] >= TOKENS / 2]
            ahead = int(self.rng.geometric(1 - self.rate)) - 1 if some else None
        self.runs[row] = ahead


def speed(machine: Lookup, control: Adaptive | AnyTopology, requests: int) -> float:
    rows = len(machine.places)
    for _ in range(requests):
        machine.places = [0] * rows
        while max(machine.places) < TOKENS:
            decision = Decision(control) if not isinstance(control, Adaptive) else control.choose(rows, 0)
            outcome = machine.run(decision.arm, decision.min_rows)
            if isinstance(control, Adaptive):
                control.record(decision, outcome)
    return machine.tokens / machine.total_s


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("time_s", "rate", "shares"),
    [(CHEAP, 0.9, (0.05, 0.9)), (CHEAP, 0.9, (0.02, 0.1)), (CHEAP, 0.2, (0.1, 0.5)), (DEAR, 0.3, (0.1, 0.9))],
)
def test_never_slower_and_nearly_the_best(time_s: list[float], rate: float, shares: tuple[float, float], seed: int):
    found = speed(Lookup(time_s, rate, shares, seed), Adaptive(ARMS), 200)
    fixed = {arm: speed(Lookup(time_s, rate, shares, seed + 100), arm, 200) for arm in ARMS}
    assert found >= 0.98 * fixed[PLAIN]
    assert found >= 0.97 * max(fixed.values())


@pytest.mark.parametrize("seed", range(2))
def test_few_rows_with_drafts_do_not_make_all_of_them_verify(seed: int):
    """Eight rows, of which many have a draft only at the end of a text: better than any fixed length can be."""
    law = (DEAR, 0.85, (0.15, 0.95))
    control, machine = Adaptive(ARMS), Lookup(*law, seed, rows=8)
    found = speed(machine, control, 100)
    fixed = {arm: speed(Lookup(*law, seed + 100, rows=8), arm, 100) for arm in ARMS}
    assert found >= 1.02 * max(fixed.values())
    gain = control.gains(8)[5]
    assert 2 <= gain.verified.min_rows(8) <= 7
    assert gain.verified.steps < 0.8
    assert gain.verified.rows > 0.7


def test_from_how_many_rows_on_drafts_pay():
    """Half of the steps find drafts for two of eight rows, the others for six."""
    available = DraftAvailability(memory=1000)
    assert available.best(3, 2.0, 1.0) == Share(), "nothing is known"
    available.record(3, 8, [2, 6] * 50)
    assert available.best(3, 4.0, 1.5) == (pytest.approx(3 / 8), 0.5, pytest.approx(6 / 8))
    assert available.best(3, 4.0, 1.5).min_rows(8) == 4, "three of eight rows would bring no more than they take"
    assert available.best(3, 4.0, 0.5) == (pytest.approx(1 / 8), 1.0, pytest.approx(4 / 8))
    assert available.best(3, 8.0, 1.5).min_rows(8) == 2
    assert available.best(3, 1.0, 1.5).min_rows(8) == 1, "nothing pays: what is tried, is tried on all"
    assert available.best(0, 2.0, 1.0) == Share(), "of other numbers of rows nothing is known"
    one = DraftAvailability(memory=10)
    one.record(0, 1, [1] * 10)
    one.record(0, 1, [0] * 10)
    assert one.best(0, 2.0, 1.0).min_rows(1) == 1
    assert one.best(0, 2.0, 1.0).steps == 0.0, "what was before is forgotten"


def test_what_a_step_with_drafts_takes_is_found_among_the_others():
    control, machine = Adaptive(ARMS), Lookup(DEAR, 0.9, (0.25, 0.25), 0)
    for arm in (PLAIN, chain(3)) * 100:
        control.record(Decision(arm), machine.run(arm))
    ratio = control.times.ratios(1)[0][3]
    assert ratio == pytest.approx(DEAR[3], rel=0.1)
    gain = control.gains(1)[3]
    share, tokens = machine.share(3), 1 + sum(0.9**k for k in range(1, 4))
    assert gain.value == pytest.approx((share * tokens + 1 - share) / (share * ratio + 1 - share), rel=0.05)


def test_to_look_for_drafts_in_vain_is_left_to_plain_decoding():
    """An arm that found drafts once, and then none, takes more than plain decoding though it verifies nothing."""
    control, machine = Adaptive(ARMS), Lookup(CHEAP, 0.9, (0.9, 0.9), 0)
    machine.looking = 1.06
    chosen = []
    for turn in range(400):
        if turn == 150:
            machine.shares = (0.0, 0.0)
        decision = control.choose(1, 0)
        control.record(decision, machine.run(decision.arm, decision.min_rows))
        chosen.append(decision.length)
    assert chosen[120:150].count(0) <= 1, "plain decoding is timed now and then"
    assert control.times.ratios(1)[0][-1] == pytest.approx(1.06, abs=0.03)
    assert chosen[-150:].count(0) > 130


def test_where_nothing_was_found_nothing_was_learnt_or_lost():
    control, machine = Adaptive(ARMS), Lookup(CHEAP, 0.9, (0.0, 0.0), 0)
    control.record(Decision(PLAIN), machine.run(PLAIN))
    for _ in range(50):
        decision = control.choose(1, 0)
        control.record(decision, machine.run(decision.arm))
    assert control.trials.debt_s <= 0.0
    assert control.times.ratios(1)[1][5] > 0.5, "its time is not known"
    machine.shares = (1.0, 1.0)
    chosen = []
    for _ in range(60):
        decision = control.choose(1, 0)
        control.record(decision, machine.run(decision.arm))
        chosen.append(decision.length)
    assert min(chosen[-10:]) > 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("looking", [1.0, 1.02])
def test_looking_for_drafts_in_vain_is_not_thought_to_be_a_gain(looking: float, seed: int):
    """A step that finds none takes a plain one's time at least, however little is known of it: no arm may win by it."""
    control, machine = Adaptive(ARMS), Lookup(CHEAP, 0.9, (0.0, 0.0), seed)
    machine.looking, tried, noise_rng = looking, 0, np.random.default_rng(seed)
    for _ in range(1000):
        decision = control.choose(1, 0)
        outcome = machine.run(decision.arm, decision.min_rows)
        control.record(decision, replace(outcome, time_s=outcome.time_s * math.exp(0.1 * noise_rng.standard_normal())))
        tried += decision.arm.drafts > 0
    assert 20 <= tried <= 200, "one dispatch of 128 steps or so notices texts that have drafts"
