"""The adaptive control under whatever an engine may meet: it always decides, and what it knows stays a law."""

import math
from dataclasses import replace

import numpy as np
import pytest
from jaxspec.serve.adaptive import Adaptive
from jaxspec.serve.control import Decision, Outcome
from jaxspec.serve.survival import RequestSurvival

from jaxspec.perf.step_ratios import StepRatios
from jaxspec.topology import PLAIN, chain, tree

ARMS = (*(chain(length) for length in range(5)), tree((2, 2, 1)))
FULL, DISPATCHES = 8, 600


class Engine:
    """Rows come and go at random; times span four powers of ten; drafters find something, nothing, or everything."""

    def __init__(self, seed: int, most: int, often_none: bool, predicts: bool):
        self.rng, self.most, self.often_none, self.predicts = np.random.default_rng(seed), most, often_none, predicts
        self.requests, self.free, self.held = RequestSurvival(most, 4, 64.0), [*range(most)], list[int]()
        self.rate, self.step_s = 0.5, 1e-3

    def turn(self) -> None:
        """Some requests end, others begin, and now and then everything changes."""
        rng = self.rng
        for row in [row for row in self.held if rng.random() < 0.1]:
            self.requests.leave(row)
            self.held.remove(row)
            self.free.append(row)
        while self.free and (not self.held or rng.random() < 0.4):
            row = self.free.pop(int(rng.integers(len(self.free))))
            limit = None if rng.random() < 0.7 else int(rng.integers(0, 5))
            self.requests.enter(row, limit, int(rng.choice([0, 0, 1, 4, 7])))
            self.held.append(row)
        if rng.random() < 0.03:
            self.rate, self.step_s = float(rng.choice([0.0, 0.3, 0.9, 1.0])), 10 ** rng.uniform(-5, -1)

    def run(self, decision: Decision) -> tuple[Outcome, dict[int, list[int]]]:
        """Some steps of an arm, of which rows end in the middle and few or none have drafts."""
        rng, rows, length = self.rng, len(self.held), decision.length
        steps = FULL if rng.random() < 0.8 else int(rng.integers(1, FULL + 1))
        active = rows if rng.random() < 0.5 else rng.uniform(1.0, rows)
        skipped = int(rng.integers(0, steps + 1)) if self.often_none and length else 0
        by_row = {
            row: [
                int(min(length, rng.geometric(1.0 - 0.999 * self.rate) - 1))
                for _ in range(int(rng.integers(0, steps + 1)))
            ]
            for row in self.held
        }
        time_s = steps * self.step_s * (1 + length * rng.uniform(0, 2)) * (100.0 if rng.random() < 0.02 else 1.0)
        touched = tuple(np.cumsum(rng.uniform(0, 9, length)).tolist()) if self.predicts and length else ()
        outcome = Outcome(
            rows, steps, time_s, {length: [count for counts in by_row.values() for count in counts]},
            lost_s=rng.exponential(self.step_s), touched=touched, skipped=skipped, skipped_tokens=skipped * rows,
            found=tuple(rng.integers(0, rows + 1, steps).tolist()) if self.often_none and length else (),
            active=active,
        )  # fmt: skip
        return outcome, by_row


@pytest.mark.parametrize("most", [1, 8, 300])
@pytest.mark.parametrize(("often_none", "predicts"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("seed", range(3))
def test_it_decides_whatever_comes(seed: int, most: int, often_none: bool, predicts: bool):
    engine = Engine(seed, most, often_none, predicts)
    prior = StepRatios({1: ((0, 1, 3), (1.0, 1.3, 1.9))}, 0.05) if seed else None
    control, rng = Adaptive(ARMS, prior=prior, overhead_s=1e-4 * seed), engine.rng
    for _ in range(DISPATCHES):
        engine.turn()
        rows, forced = len(engine.held), rng.random() < 0.05
        if forced:  # all of these requests want no drafts
            decision = Decision(PLAIN)
        else:
            decision = control.choose(rows, 0, engine.requests, 1 if rng.random() < 0.1 else None)
        assert decision.arm in ARMS
        assert 1 <= decision.least <= max(rows, 1) + 1
        assert decision.gain is None or 0.0 <= decision.gain < math.inf
        if rng.random() < 0.8:
            control.ahead(decision, rows, engine.requests)
        outcome, by_row = engine.run(decision)
        engine.requests.add(decision.length, by_row)
        control.record(decision, replace(outcome, touched=() if forced else outcome.touched))
        if rng.random() < 0.2:
            assert 0.0 < control.times.plain_s(int(rng.integers(1, most + 1))) < math.inf or not control.times._first
    control.learn()
    law = control.times._known
    assert np.isfinite(law.mean_N).all()
    assert np.linalg.eigvalsh(law.cov_NN).min() > -1e-6 * np.abs(law.cov_NN).max()
    assert math.isfinite(control.probes.owed_s)
