"""What warming up says of times, on a made-up machine whose first runs of a program are slow."""

import numpy as np
import pytest

from jaxspec.serve.warm_up import EACH, LINKING, RANDOM, TIMED, WarmUp
from jaxspec.topology import PLAIN, AnyTopology, chain, tree

STEP_S = {PLAIN: 1.0, chain(1): 1.2, chain(3): 1.5, tree((2, 2)): 4.0}
OVERHEAD_S = 2.0


class Lazy:
    """A machine that links a program in its first three runs, is slow in one round, and starts every dispatch late."""

    def __init__(self):
        self.runs: list[AnyTopology] = []

    def run(self, arm: AnyTopology, steps: int) -> tuple[float, float]:
        self.runs.append(arm)
        slow = 10.0 if self.runs.count(arm) <= 3 else 2.0 if 20 < len(self.runs) <= 25 else 1.0
        return slow * (STEP_S[arm] + OVERHEAD_S / steps), 1.0


def warm_up(arms, run, rows, steps):
    made = WarmUp(arms, run, rows, steps)
    while not made.done:
        made.round()
    return made.result()


def test_times_are_those_of_linked_programs_in_one_round():
    machine = Lazy()
    found, overhead_s = warm_up(tuple(STEP_S), machine.run, rows=4, steps=8)
    assert overhead_s == pytest.approx(OVERHEAD_S)
    full = {arm: STEP_S[arm] + OVERHEAD_S / 8 for arm in STEP_S}
    for arm in (PLAIN, chain(1), chain(3)):
        assert found.at(arm.max_depth, 4) == (pytest.approx(full[arm] / full[PLAIN]), RANDOM)
    between = (full[chain(1)] + full[chain(3)]) / 2 / full[PLAIN]
    assert found.at(2, 4) == (pytest.approx(between), pytest.approx(2 * RANDOM))
    assert found.at(4, 4) is None, "nothing is said of longer chains"
    assert all(machine.runs.count(arm) > 3 for arm in STEP_S), "trees ran, too"


def test_dispatches_of_one_step_tell_no_overhead():
    assert warm_up((PLAIN, chain(1)), Lazy().run, rows=1, steps=1)[1] == 0.0


@pytest.mark.parametrize("share", [0.25, 0.0])
def test_steps_that_were_skipped_lasted_as_long_as_plain_ones(share: float):
    def run(arm: AnyTopology, steps: int) -> tuple[float, float]:
        drafted = share if arm.drafts else 1.0
        return 1.0 + drafted * (STEP_S[arm] - 1.0), drafted

    found, _ = warm_up((PLAIN, chain(1), chain(3)), run, rows=1, steps=8)
    told = found.at(3, 1)
    if share:
        assert told == (pytest.approx(STEP_S[chain(3)]), RANDOM)
    else:
        assert told is None, "what never had a draft was never timed"


def test_a_few_rounds_are_timed():
    """Their median is that of the law."""
    rng, runs = np.random.default_rng(0), []

    def run(arm: AnyTopology, steps: int) -> tuple[float, float]:
        runs.append(arm)
        return 0.005 * STEP_S[arm] * (1 + 0.05 * rng.standard_normal()), 1.0

    found, _ = warm_up((PLAIN, chain(1), chain(3)), run, rows=1, steps=8)
    assert runs.count(chain(3)) == LINKING + TIMED
    assert (found.at(3, 1) or (0.0,))[0] == pytest.approx(STEP_S[chain(3)], rel=0.06)


def test_ratios_of_rounds_that_differ_are_less_sure():
    """Beside other work: the error that is told is that of the medians, by a law of which it is known."""

    def told(noise: float, seed: int) -> tuple[float, float]:
        rng = np.random.default_rng(seed)

        def run(arm: AnyTopology, steps: int) -> tuple[float, float]:
            return 0.001 * STEP_S[arm] * np.exp(noise * rng.standard_normal() * (arm.drafts > 0)), 1.0

        found, _ = warm_up((PLAIN, chain(1), chain(3)), run, rows=1, steps=8)
        return found.each * found.noise, np.log((found.at(3, 1) or (0.0,))[0] / STEP_S[chain(3)])

    assert told(0.0, 0)[0] == pytest.approx(EACH * RANDOM)
    errors, off = zip(*(told(0.4, seed) for seed in range(40)), strict=True)
    assert np.mean(errors) == pytest.approx(np.std(off), rel=0.25)
