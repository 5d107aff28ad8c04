"""When the adaptive control thinks: while the device works, and in its way only where nothing is known of such rows."""

from dataclasses import replace
from itertools import pairwise

import pytest

from jaxspec.serve.adaptive import Adaptive
from jaxspec.serve.control import Decision, Outcome
from jaxspec.serve.survival import RequestSurvival
from jaxspec.topology import PLAIN, chain
from tests.unit.serve.test_control import ARMS, CHEAP, DEAR, STEPS, Machine, running


def served(control: Adaptive, machine: Machine, dispatches: int, rows: int = 4) -> list[tuple[Decision, bool]]:
    """What was decided as an engine asks for it, and whether it was thought over in the device's way."""
    found = []
    for _ in range(dispatches):
        decision = control.choose(rows, 0)
        found.append((decision, not control._new))
        control.ahead(decision, rows)
        control.record(decision, machine.run(decision.arm, rows))
    return found


def settled(times: list[float], rate: float) -> tuple[Adaptive, Machine]:
    control, machine = Adaptive(ARMS), Machine(times, [rate] * 5, noise=0.0)
    served(control, machine, 200)
    return control, machine


@pytest.mark.parametrize(("times", "rate"), [(DEAR, 0.1), (CHEAP, 0.9)])
def test_few_decisions_wait_for_a_thought(times: list[float], rate: float):
    control, machine = settled(times, rate)
    found = served(control, machine, 1000)
    assert sum(decision.probe for decision, _ in found) >= 3
    assert sum(thought for _, thought in found) <= 10


def test_a_trial_is_thought_over_while_the_device_works():
    control, machine = settled(DEAR, 0.1)
    found = served(control, machine, 1000)
    behind = [after for (before, _), after in pairwise(found) if before.probe]
    assert len(behind) >= 5
    assert not any(thought or decision.length for decision, thought in behind)


def test_a_trial_that_may_pay_goes_on_once_it_was_thought_over():
    """One dispatch of the best arm later."""
    control, machine = settled(DEAR, 0.1)
    while not (decision := control.choose(4, 0)).probe:
        control.ahead(decision, 4)
        control.record(decision, machine.run(decision.arm, 4))
    length = decision.length
    control.record(decision, Outcome(4, STEPS, STEPS * DEAR[length], {length: [length] * (4 * STEPS)}))
    best = control.choose(4, 0)
    assert (best.length, best.probe) == (0, False)
    control.ahead(best, 4)
    control.record(best, machine.run(best.arm, 4))
    assert control.choose(4, 0).length == length


def test_what_is_known_is_learnt_while_a_trial_runs():
    control, machine = settled(DEAR, 0.1)
    control.record(Decision(PLAIN, gain=1.0), machine.run(PLAIN, 4))
    control.ahead(Decision(chain(1), True, 0.5, 1.0), 4)
    assert not control._new


def test_an_old_decision_for_other_rows_holds_for_a_dispatch():
    """Nothing is lost where the engine leaves time to think; where it does not, the next decision waits."""
    control, machine = settled(CHEAP, 0.9)
    served(control, machine, 100, rows=1)
    (first, thought), (second, thought_then) = served(control, machine, 2)
    assert first.length == 5
    assert not thought
    assert second.probe or second.length == 5
    assert not thought_then, "it was thought over while the first ran"
    served(control, machine, 100, rows=1)
    for late in (True, False):
        decision = control.choose(4, 0)
        assert bool(control._new) is late
        control.record(decision, machine.run(decision.arm, 4))


def test_rows_that_change_at_every_dispatch_are_thought_of_all_the_same():
    """Nothing pays, and then everything does: an old decision holds once, not for ever."""
    control, machine = Adaptive(ARMS), Machine(DEAR, [0.1] * 5)
    for _ in range(200):
        served(control, machine, 1, rows=4)
        served(control, machine, 1, rows=1)
    assert set(machine.ran[-20:]) <= {PLAIN, chain(1)}
    machine.time_s, machine.rates = CHEAP, [0.95] * 5
    for _ in range(400):
        served(control, machine, 1, rows=4)
        served(control, machine, 1, rows=1)
    assert sum(arm.max_depth >= 4 for arm in machine.ran[-100:]) > 80


def test_the_latest_decision_is_lent_to_requests_of_other_kinds_and_thought_over_meanwhile():
    control, machine = settled(CHEAP, 0.9)
    others = RequestSurvival(4, 5, 64.0)
    for row in range(4):
        others.enter(row, kind=1)
    for ahead in (True, False):
        requests = others if ahead else running([None] * 4)
        control.record(Decision(chain(5), gain=4.0), machine.run(chain(5), 4))
        decision = control.choose(4, 0, requests)
        assert control._new, "not in the device's way"
        assert (decision.length, decision.probe) == (5, False)
        if ahead:
            control.ahead(decision, 4, requests)
            assert not control._new, "but while it works"
    control.choose(4, 0, requests)
    assert not control._new, "where nobody leaves it time to think it is lent once"


def test_nothing_is_lent_to_other_numbers_of_rows():
    """Drafts that pay for some may not for others; those need a thought of their own before they draft."""
    control, machine = settled(CHEAP, 0.9)
    decision = control.choose(1, 0)
    assert (decision.arm, decision.gain) == (PLAIN, None)
    control.record(decision, machine.run(PLAIN, 1))
    assert control._new
    control.choose(1, 0)
    assert not control._new


def test_a_prompt_does_not_wait_for_a_thought_where_other_experts_are_predicted():
    """Its dispatch is of one step. The next one waits, for times are others now; those of other rows do not."""
    control, machine = settled(CHEAP, 0.9)
    served(control, machine, 20, rows=1)
    served(control, machine, 20)
    assert control._kept[0, ()].until > 0
    control.record(Decision(chain(5), gain=4.0), replace(machine.run(chain(5), 4), touched=(7.0,) * 5))
    assert control._kept[0, ()].until > 0
    for steps in (1, None):
        assert control._new
        control.choose(4, 0, None, steps)
    assert not control._new
