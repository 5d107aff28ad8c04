"""What single dispatches teach the adaptive control: short ones, trials, plain ones, and changes of arms."""

from dataclasses import replace

import numpy as np
import pytest

from jaxspec.control.adaptive import Adaptive
from jaxspec.control.decision import Decision, Outcome
from jaxspec.perf.step_ratios import StepRatios
from jaxspec.serve.warm_up import EACH, RANDOM
from jaxspec.topology import PLAIN, AnyTopology, chain
from tests.unit.control.machine import ARMS, CHEAP, DEAR, STEPS, Machine, play


class Starting(Machine):
    """A machine whose dispatches take time to start, and are often short."""

    start_s = 4.0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.most: int | None = None

    def run(self, arm: AnyTopology, rows: int) -> Outcome:
        outcome = super().run(arm, rows)
        steps = int(self.rng.integers(1, STEPS)) if self.most is None else min(self.most, STEPS)
        kept = {tried: found[: steps * rows] for tried, found in outcome.accepted.items()}
        self.tokens -= outcome.tokens - sum(len(found) + sum(found) for found in kept.values())
        time_s = outcome.time_s * steps / STEPS + self.start_s
        self.total_s += time_s - outcome.time_s
        return replace(outcome, steps=steps, time_s=time_s, accepted=kept)


def test_short_dispatches_do_not_make_an_arm_look_slow():
    """A single step of K = 3 beside full dispatches of plain decoding: only what it takes besides starting counts."""
    machine = Starting(CHEAP, [0.9] * 5, noise=0.0)
    seen = []
    for overhead_s in (0.0, machine.start_s):
        control = Adaptive(ARMS, overhead_s=overhead_s)
        for arm, most in ((PLAIN, STEPS), (PLAIN, STEPS), (chain(3), 1), (chain(3), 1)) * 10:
            machine.most = most
            control.record(Decision(arm), machine.run(arm, 4))
        seen.append(control.times.ratios(4)[0][3])
    full = (CHEAP[3] + machine.start_s / STEPS) / (CHEAP[0] + machine.start_s / STEPS)
    assert seen[0] > 2 * full
    assert seen[1] == pytest.approx(full, rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_slow_steps_behind_prompts_do_not_make_drafts_look_cheap(seed: int):
    """A plain step behind a prompt takes 2.5 times as long as others, the first one ever, too; K = 1 loses 8 %."""
    machine = Machine([1.0, 1.45, 1.8, 2.1, 2.4, 2.7], [0.33] * 5, noise=0.03, seed=seed)
    prior = StepRatios({1: (tuple(range(6)), tuple(machine.time_s))}, RANDOM, EACH)
    control, drafting = Adaptive(ARMS, prior=prior), 0
    for turn in range(400):
        behind = turn % 6 == 0
        decision = control.choose(1, 0, steps=1 if behind else None)
        outcome = machine.run(decision.arm, 1)
        if behind:
            accepted = {tried: counts[:1] for tried, counts in outcome.accepted.items()}
            outcome = replace(
                outcome, steps=1, time_s=outcome.time_s / STEPS + 1.5, accepted=accepted, after_prompt=True
            )
        control.record(decision, outcome)
        drafting += decision.length > 0
    assert drafting < 20


def test_plain_decoding_is_known_once_it_ran_as_long_as_a_whole_dispatch():
    control, machine = Adaptive(ARMS), Starting(CHEAP, [0.9] * 5, noise=0.0)
    control.times.full = STEPS
    for most, known in ((1, False), (STEPS - 2, False), (1, True)):
        machine.most = most
        control.record(Decision(PLAIN), machine.run(PLAIN, 4))
        assert (control.choose(4, 0).arm != PLAIN) == known


def test_nothing_is_tried_in_a_dispatch_that_will_be_short():
    control, machine = Adaptive(ARMS), Starting(CHEAP, [0.0] * 5, noise=0.0)
    machine.most = STEPS
    for _ in range(2):
        control.record(Decision(PLAIN), machine.run(PLAIN, 4))
    assert not control.choose(4, 0, steps=1).probe
    assert control.choose(4, 0).probe
    assert control.choose(4, 0, steps=STEPS).probe


def test_a_probe_loses_what_the_best_arm_would_not_have_taken():
    control, machine = Adaptive(ARMS), Machine(CHEAP, [0.5] * 5, noise=0.0)
    play(control, machine, 300)
    owed_s, decision = control.trials.debt_s, Decision(PLAIN, True, 1.0, best=1.25)
    control.record(decision, machine.run(PLAIN, 4))
    spent_s = STEPS * CHEAP[0]
    earned_s = control.spec.trial_share * spent_s
    assert control.trials.debt_s - owed_s == pytest.approx((1 - 1 / 1.25) * spent_s - earned_s, abs=0.05 * spent_s)


def test_idle_trials_that_begin_dearly_come_more_seldom():
    """Nothing pays; where a drafter must first be shown what it missed, that counts in what a trial loses, too."""
    tried = []
    for lost_s in (0.0, 8.0):
        control, machine = Adaptive(ARMS), Machine(CHEAP, [0.0] * 5, noise=0.0)
        last, probes = PLAIN, 0
        for turn in range(1500):
            decision = control.choose(4, 0)
            shown_s = lost_s if decision.arm.drafts and not last.drafts else 0.0
            control.record(decision, replace(machine.run(decision.arm, 4), catch_up_s=shown_s))
            last, probes = decision.arm, probes + (decision.probe and turn >= 300)
        tried.append(probes)
    assert 0 < tried[1] < 0.2 * tried[0], tried


def test_plain_decoding_that_ran_of_late_is_not_tried_again():
    """Requests that want none of it take turns with others: each of its dispatches tells what it takes."""
    control, machine = Adaptive(ARMS), Machine(CHEAP, [0.8] * 5)
    play(control, machine, 200)
    probes = 0
    for turn in range(60):  # where none wants drafts, the engine does not ask
        decision = control.choose(4, 0) if turn % 4 else Decision(PLAIN)
        probes += decision.probe and decision.arm == PLAIN
        control.record(decision, machine.run(decision.arm, 4))
    assert machine.ran[-60:].count(PLAIN) >= 15
    assert probes == 0


class Cold(Machine):
    """A machine whose first dispatch behind one of another arm takes longer."""

    switch_s = 3.0

    def run(self, arm: AnyTopology, rows: int) -> Outcome:
        colder = bool(self.ran) and self.ran[-1] != arm
        outcome = super().run(arm, rows)
        self.total_s += colder * self.switch_s
        return replace(outcome, time_s=outcome.time_s + colder * self.switch_s)


def test_what_a_change_of_arms_takes_is_not_an_arms_own_time():
    """An arm that is always run once between others, as probes are, would look slow."""
    machine, control = Cold(CHEAP, [0.8] * 5, noise=0.02), Adaptive(ARMS)
    play(control, machine, 300)
    for _ in range(40):
        for arm in (PLAIN, PLAIN, chain(5), chain(5), chain(5), chain(2)):
            control.record(Decision(arm), machine.run(arm, 4))
    assert sum(arm.drafts >= 4 for arm in machine.ran[200:300]) > 90, "drafts are in use"
    assert control.times.switch_s == pytest.approx(machine.switch_s, rel=0.2)
    fifth, second = (control.times.ratios(4)[0][arm] for arm in (5, 2))
    assert fifth == pytest.approx(CHEAP[5], rel=0.03)
    assert second == pytest.approx(CHEAP[2], rel=0.03), "each of its dispatches took 12.6 instead of 9.6"


def test_a_machine_that_is_slow_at_times_makes_no_arm_look_slow():
    """Plain decoding ran while it was quick; drafts are judged while it is slow, beside the arm before them."""
    machine, control = Machine(CHEAP, [0.8] * 5, noise=0.02), Adaptive(ARMS)
    for arm in (PLAIN, chain(1)) * 30:
        control.record(Decision(arm), machine.run(arm, 4))
    machine.time_s = [1.5 * time_s for time_s in CHEAP]
    for arm in [chain(1)] * 60 + [chain(3), chain(1)] * 10:
        control.record(Decision(arm), machine.run(arm, 4))
    third, first = (control.times.ratios(4)[0][arm] for arm in (3, 1))
    assert third / first == pytest.approx(CHEAP[3] / CHEAP[1], rel=0.03)
    assert first == pytest.approx(CHEAP[1], rel=0.1), "a part of half as much again"


def test_rows_that_ended_are_not_drafts_that_are_cheap():
    """With drafts texts end at different steps, and fewer rows are quicker; plain ones end together."""
    machine, control = Machine(DEAR, [0.5] * 5, noise=0.02), Adaptive(ARMS)
    for _ in range(30):
        for arm, left in [(PLAIN, 8)] * 8 + [(chain(1), left) for left in (8, 8, 8, 6, 5, 5)]:
            outcome = machine.run(arm, 8)
            quick = 1 - 0.05 * (8 - left)
            control.record(Decision(arm), replace(outcome, time_s=quick * outcome.time_s, active=float(left)))
    ratio, error = (values_A[1] for values_A in control.times.ratios(8))
    assert ratio == pytest.approx(DEAR[1], rel=0.025)
    assert error < control.times.ratios(5)[1][1], "plain decoding never ran with five rows"
    assert error < 0.04


def test_a_number_of_rows_that_never_ran_may_be_asked_for():
    """Some of eight rows ended in their first dispatch, so only fewer are known."""
    control = Adaptive(ARMS)
    control.record(Decision(PLAIN), Outcome(8, STEPS, 1.0 * STEPS, {(0, 0): [0] * 40}, active=5.0))
    assert control.times.plain_s(8) > control.times.plain_s(5)


def test_many_numbers_of_rows_tell_about_each_other():
    """A batch that is never as full as before: what is known of it grows with the powers of two alone."""
    control, rng = Adaptive(ARMS), np.random.default_rng(0)
    for _ in range(2000):
        rows, arm = int(rng.integers(1, 400)), ARMS[int(rng.integers(0, 6))]
        step_s = rows**0.3 * (1 + 0.4 * arm.drafts) * (1 + 0.03 * rng.standard_normal())
        control.record(Decision(arm), Outcome(rows, STEPS, STEPS * step_s, {}))
    ratio_A, error_A = control.times.ratios(300)
    assert ratio_A[3] == pytest.approx(1 + 0.4 * 3, rel=0.06)
    assert error_A[3] < 0.06
    assert control.times.plain_s(300) == pytest.approx(300**0.3, rel=0.15)
