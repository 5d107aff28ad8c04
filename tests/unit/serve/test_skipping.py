"""The control over a drafter that often finds nothing, whose steps then verify nothing: a made-up machine."""

import math

import numpy as np
import pytest

from jaxspec.serve.adaptive import Adaptive
from jaxspec.serve.control import Decision, Outcome
from jaxspec.serve.survival import RequestSurvival
from jaxspec.topology import PLAIN, AnyTopology, chain

ARMS = tuple(chain(length) for length in range(6))
STEPS, TOKENS = 8, 64
CHEAP, DEAR = [1.0, 1.15, 1.25, 1.35, 1.45, 1.55], [1.0, 1.6, 2.0, 2.4, 2.8, 3.2]


class Lookup:
    """One row whose texts have few matches in their first half and many in their second one."""

    def __init__(self, time_s: list[float], rate: float, shares: tuple[float, float], seed: int):
        self.time_s, self.rate, self.shares = time_s, rate, shares
        self.rng = np.random.default_rng(seed)
        self.total_s, self.tokens, self.place = 0.0, 0, 0

    def run(self, arm: AnyTopology) -> Outcome:
        took, accepted, skipped, drafts = 0.0, [], 0, arm.max_depth
        for _ in range(STEPS):
            found = drafts and self.rng.random() < self.shares[self.place >= TOKENS / 2]
            hits = int(np.cumprod(self.rng.random(drafts) < self.rate).sum()) if found else 0
            took += self.time_s[drafts if found else 0] * (1.01 if drafts else 1.0)
            if drafts and not found:
                skipped += 1
            else:
                accepted.append(hits)
            self.place += 1 + hits
            self.tokens += 1 + hits
        took *= 1 + 0.03 * self.rng.standard_normal()
        self.total_s += took
        return Outcome(1, STEPS, took, {drafts: accepted}, skipped=skipped, skipped_tokens=skipped)


def speed(machine: Lookup, control: Adaptive | AnyTopology, requests: int) -> float:
    known = RequestSurvival(1, 5, 64.0)
    for _ in range(requests):
        machine.place = 0
        known.enter(0)
        while machine.place < TOKENS:
            decision = control.choose(1, 0, known) if isinstance(control, Adaptive) else Decision(control)
            outcome = machine.run(decision.arm)
            known.add(decision.length, {0: outcome.accepted[decision.length]})
            if isinstance(control, Adaptive):
                control.record(decision, outcome)
        known.leave(0)
    return machine.tokens / machine.total_s


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("time_s", "rate", "shares"),
    [(CHEAP, 0.9, (0.05, 0.9)), (CHEAP, 0.9, (0.02, 0.1)), (CHEAP, 0.2, (0.1, 0.5)), (DEAR, 0.3, (0.1, 0.9))],
)
def test_never_slower_and_nearly_the_best(time_s: list[float], rate: float, shares: tuple[float, float], seed: int):
    found = speed(Lookup(time_s, rate, shares, seed), Adaptive(ARMS), 200)
    fixed = {arm: speed(Lookup(time_s, rate, shares, seed + 100), arm, 200) for arm in ARMS}
    assert found >= 0.98 * fixed[PLAIN]
    assert found >= 0.97 * max(fixed.values())


def test_what_a_step_with_drafts_takes_is_found_among_the_others():
    control, machine = Adaptive(ARMS), Lookup(DEAR, 0.9, (0.25, 0.25), 0)
    for arm in (PLAIN, chain(3)) * 100:
        control.record(Decision(arm), machine.run(arm))
    ratio, _ = control.times.ratios(0)[3]
    assert ratio == pytest.approx(DEAR[3], rel=0.1)
    gain = control._gains(0)[3]
    tokens = 1 + sum(0.9**k for k in range(1, 4))
    assert gain.value == pytest.approx((0.25 * tokens + 0.75) / (0.25 * ratio + 0.75), rel=0.05)


def test_where_nothing_was_found_nothing_was_learnt_or_lost():
    control, machine = Adaptive(ARMS), Lookup(CHEAP, 0.9, (0.0, 0.0), 0)
    control.record(Decision(PLAIN), machine.run(PLAIN))
    for _ in range(50):
        decision = control.choose(1, 0)
        control.record(decision, machine.run(decision.arm))
    assert control.probes.lost_s == 0.0
    assert not math.isfinite(control.times.ratios(0)[5][1]), "its time is not known"
    machine.shares = (1.0, 1.0)
    chosen = []
    for _ in range(60):
        decision = control.choose(1, 0)
        control.record(decision, machine.run(decision.arm))
        chosen.append(decision.length)
    assert min(chosen[-10:]) > 0
