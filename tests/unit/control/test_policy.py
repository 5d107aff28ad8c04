"""The controls of what is drafted, against made-up machines whose best arm is known."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from jaxspec.serve.adaptive import Adaptive
from jaxspec.serve.control import ByBatchSize, Decision, Fixed, Outcome
from jaxspec.serve.probes import NO_GAIN, AdaptiveSpec
from jaxspec.serve.survival import SHARED, RequestSurvival, Survival

from jaxspec.perf.step_ratios import StepRatios
from jaxspec.topology import PLAIN, AnyTopology, chain, tree

LENGTHS = (0, 1, 2, 3, 4, 5)
ARMS = tuple(chain(length) for length in LENGTHS)
STEPS = 8


class Machine:
    """Makes dispatches up: step times by length with noise, acceptance by position; and both of each tree."""

    def __init__(
        self,
        time_s: list[float],
        rates: list[float],
        noise: float = 0.05,
        seed: int = 0,
        trees: Mapping[AnyTopology, tuple[float, list[float]]] | None = None,
    ):
        self.time_s, self.rates, self.noise, self.trees = time_s, rates, noise, dict(trees or {})
        self.rng = np.random.default_rng(seed)
        self.total_s = self.tokens = 0.0
        self.ran: list[AnyTopology] = []

    def law(self, arm: AnyTopology) -> tuple[float, list[float]]:
        """Time of a step and acceptance by position."""
        return self.trees[arm] if arm in self.trees else (self.time_s[arm.drafts], self.rates[: arm.drafts])

    def run(self, arm: AnyTopology, rows: int) -> Outcome:
        step_s, rates = self.law(arm)
        time_s = STEPS * step_s * (1 + self.noise * self.rng.standard_normal())
        hits = self.rng.random((STEPS * rows, len(rates))) < np.asarray(rates)
        accepted = np.cumprod(hits, axis=1).sum(axis=1) if rates else np.zeros(STEPS * rows, int)
        self.total_s += time_s
        self.tokens += float(np.sum(accepted + 1))
        self.ran.append(arm)
        return Outcome(rows, STEPS, time_s, {len(rates): accepted.tolist()})

    def speed(self, arm: AnyTopology, rows: int) -> float:
        """Tokens per second of a fixed arm, exactly."""
        step_s, rates = self.law(arm)
        return rows * (1 + sum(math.prod(rates[: k + 1]) for k in range(len(rates)))) / step_s


def play(control: Adaptive, machine: Machine, dispatches: int, rows: int = 4) -> list[int]:
    chosen = []
    for _ in range(dispatches):
        decision = control.choose(rows, 0)
        chosen.append(decision.length)
        control.record(decision, machine.run(decision.arm, rows))
    return chosen


def in_use(control: Adaptive, machine: Machine, requests: RequestSurvival, dispatches: int = 1) -> Decision:
    """What is decided for four such requests after so many dispatches, where nothing is only tried."""
    decision = Decision(PLAIN, True)
    while dispatches > 0 or decision.probe:
        decision = control.choose(4, 0, requests)
        control.record(decision, machine.run(decision.arm, 4))
        dispatches -= 1
    return decision


def running(limits: Sequence[int | None], rows: int = 4, length: int = 5, memory: float = 64.0) -> RequestSurvival:
    """Requests in the first slots, with these limits."""
    requests = RequestSurvival(rows, length, memory)
    for row, limit in enumerate(limits):
        requests.enter(row, limit)
    return requests


def mean(requests: RequestSurvival, everyone: Survival) -> list[float]:
    """Survival of each position over the running requests."""
    return [own for own, _ in requests.beside(everyone)]


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
    play(Adaptive(ARMS), machine, 1500)
    speed = machine.tokens / machine.total_s
    plain = machine.speed(PLAIN, 4)
    best = max(machine.speed(arm, 4) for arm in ARMS)
    assert speed >= 0.98 * plain
    assert speed >= 0.97 * best


def test_probes_stay_within_their_budget():
    """Over all time, and over any stretch of it: what was not lost earlier may not be lost at once."""
    machine, control, spec = Machine(DEAR, [0.3] * 5, noise=0.0), Adaptive(ARMS), AdaptiveSpec()
    lost, gone, chosen = [0.0], [0.0], []
    for _ in range(4000):
        chosen += play(control, machine, 1)
        lost.append(machine.total_s - machine.tokens / machine.speed(PLAIN, 4))
        gone.append(machine.total_s)
    assert lost[-1] > 0
    for first, last in [(0, 4000), *itertools.pairwise(range(0, 4001, 250))]:
        free = spec.most_steps + STEPS * DEAR[5] + spec.first_steps * (first == 0)
        assert lost[last] - lost[first] < free + spec.probe_share * (gone[last] - gone[first])
    tried = [i for i, k in enumerate(chosen) if k]
    assert np.diff(tried[-6:]).min() * STEPS > 2 * spec.shortest_wait, "waits have become longer"
    assert len({int(gap) for gap in np.diff(tried[-12:])}) > 3, "and differ, or texts might be met in the same places"


@pytest.mark.parametrize("seed", range(4))
def test_lengths_that_pay_alike_are_not_tried_again_and_again(seed: int):
    """A length that may be a little better would not be used for that; nor is it tried for it."""
    machine = Machine([1.0, 1.3, 1.58, 1.87, 2.2, 2.6], [0.85, 0.75, 0.68, 0.6, 0.5], noise=0.03, seed=seed)
    control = Adaptive(ARMS)
    play(control, machine, 500)
    late = play(control, machine, 1000)
    assert sum(one in (2, 3) for one in late) > 950
    assert sum(one != other for one, other in itertools.pairwise(late)) < 80


def test_longer_drafts_that_come_to_pay_are_found_while_short_ones_are_used():
    machine, control = Machine(CHEAP, [0.9, 0.0, 0.0, 0.0, 0.0], noise=0.02), Adaptive(ARMS)
    assert play(control, machine, 400)[-50:].count(1) > 45
    machine.rates = [0.9] * 5
    assert play(control, machine, 400)[-50:].count(5) > 45


def test_follows_a_workload_that_changes():
    machine, control = Machine(CHEAP, [0.0] * 5), Adaptive(ARMS)
    play(control, machine, 300)
    machine.rates = [0.9] * 5
    chosen = play(control, machine, 1200)
    assert chosen[-100:].count(5) > 80
    machine.rates = [0.0] * 5
    assert play(control, machine, 400)[-100:].count(0) > 90


def test_same_records_same_decisions():
    """Hosts of a mesh that are told the same times choose the same arms."""
    machine, twins = Machine(CHEAP, [0.7] * 5), [Adaptive(ARMS), Adaptive(ARMS)]
    for i in range(400):
        rows = 1 + i % 7
        decisions = [control.choose(rows, 0) for control in twins]
        assert decisions[0] == decisions[1]
        outcome = machine.run(decisions[0].arm, rows)
        for control in twins:
            control.record(decisions[0], outcome)


def test_requests_that_differ_change_the_length():
    """Of a few seeds most: the drafts of these requests are made up, those of the machine meanwhile are not theirs."""
    lengths: dict[int, list[int]] = {5: [], 0: []}
    for seed in range(8):
        control, machine = Adaptive(ARMS), Machine(DEAR, [0.5] * 5, seed=seed)
        play(control, machine, 300)
        for count, found in lengths.items():
            requests = running([None] * 4)
            requests.add(5, {row: [count] * 60 for row in range(4)})
            decision = in_use(control, machine, requests, 20)
            found.append(decision.length)
            if decision.length == 5:
                tokens = 1 + sum(mean(requests, control.survival))
                assert 4.5 < tokens < 6, "their own, and some of everyone's"
                assert decision.best == pytest.approx(tokens / 3.5, rel=0.1)
    assert lengths[5].count(5) >= 6
    assert lengths[0] == [0] * 8


class Routed(Machine):
    """A machine whose steps take longer the more experts a verification touches, which a head predicts."""

    def __init__(self, tells: bool):
        super().__init__([], [0.6] * 5, noise=0.02)
        self.tells, self.spread = tells, 0.5

    def run(self, arm: AnyTopology, rows: int) -> Outcome:
        experts = [4 + self.spread * k for k in range(1, arm.drafts + 1)]
        self.time_s = [0.6 + 0.1 * (4 + self.spread * k) for k in range(6)]
        outcome = super().run(arm, rows)
        return replace(outcome, touched=tuple(experts)) if self.tells else outcome


def test_predicted_experts_move_the_length_before_times_do():
    """Phases of text that stays with few experts and of text that does not, too short to be learnt from times."""
    speeds, lengths = [], []
    for tells in (False, True):
        machine, control, kept = Routed(tells), Adaptive(ARMS), {0.5: [], 3.0: []}
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
            play(Adaptive(ARMS, prior=prior), machine, 60)
        found.append(sum(m.tokens for m in machines) / sum(m.total_s for m in machines))
    assert found[1] > found[0]


def test_one_length_tells_what_all_of_them_add():
    """Drafts add half as much again as was told beforehand: seen at K = 3, it is believed of K = 1 and of K = 5."""
    told = [1.0, *(1 + (time_s - 1) / 1.5 for time_s in DEAR[1:])]
    machine = Machine(DEAR, [0.5] * 5, noise=0.01)
    control = Adaptive(ARMS, prior=replace(ratios_of(told), noise=0.1, each=0.2))
    for arm in (PLAIN, chain(3)) * 8:
        control.record(Decision(arm), machine.run(arm, 4))
    control.learn()
    ratios = control.times.ratios(4)
    assert [ratio for ratio, _ in ratios] == pytest.approx(DEAR, rel=0.04)
    assert ratios[3][1] < ratios[5][1] < 0.1, "and is less sure"


@pytest.mark.parametrize("factor", [0.6, 1.7])
@pytest.mark.parametrize("case", CASES)
def test_a_wrong_calibration_does_no_harm(case: str, factor: float):
    machine = Machine(*CASES[case], seed=2)
    wrong = [1.0, *(1 + factor * (t - 1) for t in CASES[case][0][1:])]
    play(Adaptive(ARMS, prior=ratios_of(wrong)), machine, 1500)
    speed = machine.tokens / machine.total_s
    assert speed >= 0.98 * machine.speed(PLAIN, 4)
    assert speed >= 0.97 * max(machine.speed(arm, 4) for arm in ARMS)


TREES = BUSHY, FLAT, HUGE = tree((2, 2, 1)), tree((4, 2)), tree((4, 4, 2))
WITH_TREES = {
    "a tree is best": (
        [1.0, 1.2, 1.35, 1.5, 1.7, 1.9], [0.6] * 5,
        {BUSHY: (1.5, [0.85, 0.85, 0.7]), FLAT: (1.6, [0.8, 0.7]), HUGE: (4.0, [0.9, 0.9, 0.8])},
    ),
    "trees are harmful, a chain is best": (
        CHEAP, [0.9, 0.85, 0.8, 0.8, 0.8],
        {BUSHY: (3.0, [0.92, 0.9, 0.85]), FLAT: (3.0, [0.93, 0.9]), HUGE: (9.0, [0.95, 0.95, 0.9])},
    ),
    "everything is harmful": (
        DEAR, [0.3] * 5, {BUSHY: (3.0, [0.5, 0.4, 0.3]), FLAT: (3.0, [0.6, 0.5]), HUGE: (9.0, [0.6, 0.5, 0.4])},
    ),
    "only a tree is not harmful": (
        DEAR, [0.3] * 5, {BUSHY: (1.6, [0.8, 0.7, 0.6]), FLAT: (3.0, [0.6, 0.5]), HUGE: (9.0, [0.6, 0.5, 0.4])},
    ),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", WITH_TREES)
def test_trees_are_taken_where_they_pay_and_do_no_harm(case: str, seed: int):
    time_s, rates, trees = WITH_TREES[case]
    machine = Machine(time_s, rates, seed=seed, trees=trees)
    play(Adaptive((*ARMS, *TREES)), machine, 1500)
    speed = machine.tokens / machine.total_s
    speeds = {arm: machine.speed(arm, 4) for arm in (*ARMS, *TREES)}
    best = max(speeds, key=lambda arm: speeds[arm])
    assert speed >= 0.98 * speeds[PLAIN]
    assert speed >= 0.97 * speeds[best]
    assert machine.ran[-500:].count(best) > 450
    assert all(machine.ran.count(arm) >= 2 for arm in TREES), "none was forgotten"


def test_a_tree_is_not_judged_by_what_chains_take():
    """Its time is unknown until it ran, whatever a calibration says; its acceptance begins with the chains'."""
    time_s, rates, trees = WITH_TREES["a tree is best"]
    machine, control = Machine(time_s, rates, noise=0.01), Adaptive((*ARMS, BUSHY), prior=ratios_of(time_s))
    for arm in (PLAIN, chain(5), chain(3)):
        control.record(Decision(arm), machine.run(arm, 4))
    control.learn()
    assert control._gains(4)[-1] == NO_GAIN
    for depth in range(4):
        (tokens, error), (of_chain, least) = (control._tokens(place, depth, ()) for place in (len(ARMS), 5))
        assert tokens == pytest.approx(of_chain)
        assert depth == 0 or error > least, "and is less sure"
    machine.trees = trees
    control.record(Decision(BUSHY), machine.run(BUSHY, 4))
    control.learn()
    gain = control._gains(4)[-1]
    assert gain.value == pytest.approx(machine.speed(BUSHY, 4) / machine.speed(PLAIN, 4), rel=0.2)
    assert 0.04 < gain.timing < 0.2, "one dispatch tells as much as its noise allows"
    assert control.choose(4, 0).arm in (chain(5), BUSHY)


def test_trees_follow_a_workload_that_changes():
    time_s, rates, trees = WITH_TREES["a tree is best"]
    bad = {arm: (step_s, [0.0] * arm.max_depth) for arm, (step_s, _) in trees.items()}
    machine, control = Machine(time_s, [0.0] * 5, trees=bad), Adaptive((*ARMS, *TREES))
    play(control, machine, 300)
    machine.rates, machine.trees = rates, dict(trees)
    play(control, machine, 1500)
    assert machine.ran[-100:].count(BUSHY) > 80
    machine.rates, machine.trees = [0.0] * 5, bad
    play(control, machine, 400)
    assert machine.ran[-100:].count(PLAIN) > 90


def test_rows_that_want_few_drafts_count_for_few():
    control, machine = Adaptive(ARMS), Machine(DEAR, [0.9] * 5)
    play(control, machine, 300)
    assert in_use(control, machine, running([None] * 4), 20).length in (4, 5)
    assert in_use(control, machine, running([2] * 4), 40).length == 2
    assert in_use(control, machine, running([None, 0, 0, 0]), 20).length == 0


def test_requests_are_counted_each_for_itself():
    """What everyone shares stands in for what a request did not try, its limit cuts it, and it forgets like all."""
    requests = running([None, 2, None], rows=5, length=3, memory=20.0)
    all_of_them = Survival(3)
    all_of_them.add(3, [0] * 200 + [1, 2] * 100)
    everyone = np.array([survival for survival, _ in all_of_them.by_position()])
    assert everyone == pytest.approx([0.5, 0.25, 0.0], abs=2e-3)
    limited = np.array([1, 1, 0])
    assert mean(requests, all_of_them) == pytest.approx(everyone * (2 + limited) / 3)
    requests.add(3, {0: [3, 1], 1: [2], 2: []})
    shared = SHARED * everyone
    first = (shared + np.array([2, 1, 1])) / (SHARED + 2)
    second = (shared + limited) / (SHARED + 1) * limited
    assert mean(requests, all_of_them) == pytest.approx(np.mean([first, second, everyone], axis=0))
    requests.leave(2)
    requests.leave(0)
    for _ in range(2):
        requests.add(3, {1: [0] * 19})
        mean(requests, all_of_them)  # or both would be counted at once
    assert mean(requests, all_of_them) == pytest.approx((shared + 0.05) / (SHARED + 20) * limited)
    requests.add(1, {1: [1] * 5})
    assert mean(requests, all_of_them)[0] == pytest.approx((0.05 * 0.75 + 5 + shared[0]) / (SHARED + 20))
    before = mean(requests, all_of_them)[0]
    requests.add(0, {1: [0] * 8})
    left = (31 / 32) ** 8
    expected = ((before * (SHARED + 20) - shared[0]) * left + shared[0]) / (20 * left + SHARED)
    assert mean(requests, all_of_them)[0] == pytest.approx(expected), "plain steps make it forget"
    requests.enter(1)
    assert mean(requests, all_of_them) == pytest.approx(everyone), "a slot's next request starts anew"


@pytest.mark.parametrize(("rows", "waiting", "length"), [(1, 0, 5), (4, 0, 5), (4, 1, 2), (16, 0, 2), (16, 1, 0)])
def test_by_batch_size(rows: int, waiting: int, length: int):
    assert ByBatchSize(((1, 4, chain(5)), (5, 16, chain(2))), otherwise=PLAIN).choose(rows, waiting).length == length
    assert Fixed(chain(3)).choose(rows, waiting).length == 3
