"""The controls of the speculation length, against made-up machines whose best length is known."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from jaxspec.perf.step_ratios import StepRatios
from jaxspec.serve.control import Adaptive, AdaptiveSpec, ByBatchSize, Fixed, Outcome
from jaxspec.serve.survival import Survival

LENGTHS = (0, 1, 2, 3, 4, 5)
STEPS = 8


class Machine:
    """Makes dispatches up: step times by length with noise, acceptance by position."""

    def __init__(self, time_s: list[float], rates: list[float], noise: float = 0.05, seed: int = 0):
        self.time_s, self.rates, self.noise = time_s, rates, noise
        self.rng = np.random.default_rng(seed)
        self.total_s = self.tokens = 0.0

    def run(self, length: int, rows: int) -> Outcome:
        time_s = STEPS * self.time_s[length] * (1 + self.noise * self.rng.standard_normal())
        hits = self.rng.random((STEPS * rows, length)) < np.asarray(self.rates[:length])
        accepted = np.cumprod(hits, axis=1).sum(axis=1) if length else np.zeros(STEPS * rows, int)
        self.total_s += time_s
        self.tokens += float(np.sum(accepted + 1))
        return Outcome(rows, STEPS, time_s, {length: accepted.tolist()})

    def speed(self, length: int, rows: int) -> float:
        """Tokens per second of a fixed length, exactly."""
        return rows * (1 + sum(math.prod(self.rates[: k + 1]) for k in range(length))) / self.time_s[length]


def play(control: Adaptive, machine: Machine, dispatches: int, rows: int = 4) -> list[int]:
    chosen = []
    for _ in range(dispatches):
        decision = control.choose(rows, 0)
        chosen.append(decision.length)
        control.record(decision, machine.run(decision.length, rows))
    return chosen


CHEAP, DEAR = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], [1.0, 1.6, 2.2, 2.7, 3.1, 3.5]
CASES = {
    "cheap and accepted": (CHEAP, [0.9, 0.85, 0.8, 0.8, 0.8]),
    "short pays": ([1.0, 1.15, 1.5, 2.0, 2.5, 3.0], [0.8, 0.4, 0.2, 0.1, 0.1]),
    "nothing accepted": (CHEAP, [0.0] * 5),
    "dear": (DEAR, [0.6, 0.5, 0.5, 0.5, 0.5]),
    "on the edge": ([1.0, 1.5, 1.9, 2.3, 2.6, 2.9], [0.5, 0.5, 0.5, 0.5, 0.5]),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES)
def test_never_slower_and_nearly_the_best(case: str, seed: int):
    machine = Machine(*CASES[case], seed=seed)
    play(Adaptive(LENGTHS), machine, 1500)
    speed = machine.tokens / machine.total_s
    plain = machine.speed(0, 4)
    best = max(machine.speed(k, 4) for k in LENGTHS)
    assert speed >= 0.98 * plain
    assert speed >= 0.97 * best


def test_probes_stay_within_their_budget():
    machine, control = Machine(DEAR, [0.3] * 5), Adaptive(LENGTHS)
    chosen = play(control, machine, 4000)
    spec = AdaptiveSpec()
    lost_s = machine.total_s - machine.tokens / machine.speed(0, 4)
    assert 0 < lost_s < spec.first_steps + spec.probe_share * machine.total_s + STEPS * DEAR[5]
    gaps = np.diff([i for i, k in enumerate(chosen) if k])[2:]
    assert all(later >= earlier for earlier, later in itertools.pairwise(gaps)), "each wait is longer than the last"
    assert gaps[-1] >= 4 * gaps[0]


def test_follows_a_workload_that_changes():
    machine, control = Machine(CHEAP, [0.0] * 5), Adaptive(LENGTHS)
    play(control, machine, 300)
    machine.rates = [0.9] * 5
    chosen = play(control, machine, 1200)
    assert chosen[-100:].count(5) > 80
    machine.rates = [0.0] * 5
    assert play(control, machine, 400)[-100:].count(0) > 90


def test_same_records_same_decisions():
    """Hosts of a mesh that are told the same times choose the same arms."""
    machine, twins = Machine(CHEAP, [0.7] * 5), [Adaptive(LENGTHS), Adaptive(LENGTHS)]
    for i in range(400):
        rows = 1 + i % 7
        decisions = [control.choose(rows, 0) for control in twins]
        assert decisions[0] == decisions[1]
        outcome = machine.run(decisions[0].length, rows)
        for control in twins:
            control.record(decisions[0], outcome)


def test_requests_that_differ_change_the_length():
    control, machine = Adaptive(LENGTHS), Machine(CHEAP, [0.5] * 5)
    play(control, machine, 300)
    good, bad = Survival(5), Survival(5)
    good.add(5, [5] * 60)
    bad.add(5, [0] * 60)
    decisions = [control.choose(4, 0, [request] * 4) for request in (good, bad)]
    assert [d.length for d in decisions] == [5, 0]
    assert decisions[0].gain == pytest.approx(6 / 1.5, rel=0.1)


class Routed(Machine):
    """A machine whose steps take longer the more experts a verification touches, which a head predicts."""

    def __init__(self, tells: bool):
        super().__init__([], [0.6] * 5, noise=0.02)
        self.tells, self.spread = tells, 0.5

    def run(self, length: int, rows: int) -> Outcome:
        experts = [4 + self.spread * k for k in range(1, length + 1)]
        self.time_s = [0.6 + 0.1 * (4 + self.spread * k) for k in range(6)]
        outcome = super().run(length, rows)
        return replace(outcome, touched=tuple(experts)) if self.tells else outcome


def test_predicted_experts_move_the_length_before_times_do():
    """Phases of text that stays with few experts and of text that does not, too short to be learnt from times."""
    speeds, lengths = [], []
    for tells in (False, True):
        machine, control, kept = Routed(tells), Adaptive(LENGTHS), {0.5: [], 3.0: []}
        for phase in range(120):
            machine.spread = (0.5, 3.0)[phase % 2]
            kept[machine.spread] += play(control, machine, 10)[2:]
        speeds.append(machine.tokens / machine.total_s)
        lengths.append({spread: np.mean(chosen[-400:]) for spread, chosen in kept.items()})
    assert abs(lengths[0][0.5] - lengths[0][3.0]) < 0.5, "times alone cannot tell the phases apart"
    assert lengths[1][0.5] > lengths[1][3.0] + 1.5
    assert speeds[1] > 1.02 * speeds[0]


def ratios_of(time_s: list[float], rows: int = 4) -> StepRatios:
    return StepRatios({rows: (LENGTHS, tuple(t / time_s[0] for t in time_s))}, 0.02)


def test_a_calibration_saves_the_search():
    """The length that pays is found sooner: more tokens per second in the first dispatches."""
    found = []
    for prior in (None, ratios_of(CASES["short pays"][0])):
        machines = [Machine(*CASES["short pays"], seed=seed) for seed in range(8)]
        for machine in machines:
            play(Adaptive(LENGTHS, prior=prior), machine, 60)
        found.append(sum(m.tokens for m in machines) / sum(m.total_s for m in machines))
    assert found[1] > found[0]


@pytest.mark.parametrize("factor", [0.6, 1.7])
@pytest.mark.parametrize("case", CASES)
def test_a_wrong_calibration_does_no_harm(case: str, factor: float):
    machine = Machine(*CASES[case], seed=2)
    wrong = [1.0, *(1 + factor * (t - 1) for t in CASES[case][0][1:])]
    play(Adaptive(LENGTHS, prior=ratios_of(wrong)), machine, 1500)
    speed = machine.tokens / machine.total_s
    assert speed >= 0.98 * machine.speed(0, 4)
    assert speed >= 0.97 * max(machine.speed(k, 4) for k in LENGTHS)


def test_survival_counts():
    counts = Survival(3)
    counts.add(3, [0, 1, 3, 3])
    tokens, error = counts.acceptance_length(3)
    assert tokens == pytest.approx(1 + 3 / 4 + 2 / 4 + 2 / 4)
    assert 0 < error < 1
    counts.add(1, [1, 1, 1, 1])
    assert counts.acceptance_length(1)[0] == pytest.approx(1 + 7 / 8)
    assert counts.acceptance_length(2)[0] == pytest.approx(1 + 7 / 8 + 2 / 4)


def test_survival_forgets():
    counts = Survival(1, memory=100)
    counts.add(1, [1] * 1000)
    for _ in range(30):
        counts.add(1, [0] * 10)
    assert counts.acceptance_length(1)[0] == pytest.approx(1 + 0.9**30, abs=0.1)


def test_untried_positions_follow_the_last_rate_and_are_unsure():
    counts = Survival(4)
    counts.add(2, [2, 2, 1, 0])
    tokens, error = counts.acceptance_length(4)
    s1, s2 = 3 / 4, 2 / 4
    rate = s2 / s1
    assert tokens == pytest.approx(1 + s1 + s2 + s2 * rate + s2 * rate**2)
    assert error > counts.acceptance_length(2)[1] + s2 * rate


@pytest.mark.parametrize(("rows", "waiting", "length"), [(1, 0, 5), (4, 0, 5), (4, 1, 2), (16, 0, 2), (16, 1, 0)])
def test_by_batch_size(rows: int, waiting: int, length: int):
    assert ByBatchSize(((1, 4, 5), (5, 16, 2)), otherwise=0).choose(rows, waiting).length == length
    assert Fixed(3).choose(rows, waiting).length == 3
