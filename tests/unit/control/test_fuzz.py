"""The adaptive control under whatever an engine may meet: it always decides, and what it knows stays a law."""

import math
from dataclasses import replace

import numpy as np
import pytest

from jaxspec.control.adaptive import Adaptive
from jaxspec.control.decision import Decision, Outcome, Request
from jaxspec.perf.step_ratios import StepRatios
from jaxspec.topology import PLAIN, chain, tree

ARMS = (*(chain(length) for length in range(5)), tree((2, 2, 1)))
FULL, DISPATCHES = 8, 600


class Engine:
    """Rows come and go at random; times span four powers of ten; drafters find something, nothing, or everything."""

    def __init__(self, seed: int, most: int, often_none: bool, predicts: bool):
        self.rng, self.most, self.often_none, self.predicts = np.random.default_rng(seed), most, often_none, predicts
        self.requests: list[Request] = []
        self.rate, self.step_s = 0.5, 1e-3

    def turn(self) -> None:
        """Some requests end, others begin, and now and then everything changes."""
        rng = self.rng
        self.requests = [request for request in self.requests if rng.random() >= 0.1]
        while len(self.requests) < self.most and (not self.requests or rng.random() < 0.4):
            limit = None if rng.random() < 0.7 else int(rng.integers(0, 5))
            self.requests.append(Request(int(rng.choice([0, 0, 1, 4, 7])), limit))
        if rng.random() < 0.03:
            self.rate, self.step_s = float(rng.choice([0.0, 0.3, 0.9, 1.0])), 10 ** rng.uniform(-5, -1)

    def run(self, decision: Decision) -> Outcome:
        """Some steps of an arm, of which rows end in the middle and few or none have drafts."""
        rng, rows, length = self.rng, len(self.requests), decision.length
        steps = FULL if rng.random() < 0.8 else int(rng.integers(1, FULL + 1))
        active = rows if rng.random() < 0.5 else rng.uniform(1.0, rows)
        skipped = int(rng.integers(0, steps + 1)) if self.often_none and length else 0
        accepted: dict[tuple[int, int], list[int]] = {}
        for request in self.requests:
            tried = length if request.limit is None else min(length, request.limit)
            counts = np.minimum(tried, rng.geometric(1.0 - 0.999 * self.rate, int(rng.integers(0, steps + 1))) - 1)
            accepted.setdefault((tried, request.kind), []).extend(counts.tolist())
        time_s = steps * self.step_s * (1 + length * rng.uniform(0, 2)) * (100.0 if rng.random() < 0.02 else 1.0)
        touched = tuple(np.cumsum(rng.uniform(0, 9, length)).tolist()) if self.predicts and length else ()
        return Outcome(
            rows, steps, time_s, accepted,
            catch_up_s=rng.exponential(self.step_s), touched=touched, skipped=skipped, skipped_tokens=skipped * rows,
            rows_with_drafts=tuple(rng.integers(0, rows + 1, steps).tolist()) if self.often_none and length else (),
            active=active,
        )  # fmt: skip


@pytest.mark.parametrize("most", [1, 8, 300])
@pytest.mark.parametrize(("often_none", "predicts"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("seed", range(3))
def test_it_decides_whatever_comes(seed: int, most: int, often_none: bool, predicts: bool):
    engine = Engine(seed, most, often_none, predicts)
    prior = StepRatios({1: ((0, 1, 3), (1.0, 1.3, 1.9))}, 0.05) if seed else None
    control, rng = Adaptive(ARMS, prior=prior, overhead_s=1e-4 * seed), engine.rng
    for _ in range(DISPATCHES):
        engine.turn()
        rows, forced = len(engine.requests), rng.random() < 0.05
        if forced:  # all of these requests want no drafts
            decision = Decision(PLAIN)
        else:
            decision = control.choose(rows, 0, engine.requests, 1 if rng.random() < 0.1 else None)
        assert decision.arm in ARMS
        assert 1 <= decision.min_rows <= max(rows, 1) + 1
        assert decision.gain is None or 0.0 <= decision.gain < math.inf
        outcome = engine.run(decision)
        control.record(decision, replace(outcome, touched=() if forced else outcome.touched))
        if rng.random() < 0.2:
            assert 0.0 < control.times.plain_s(int(rng.integers(1, most + 1))) < math.inf
    ratio_A, error_A = control.times.ratios(most)
    assert np.isfinite(ratio_A).all()
    assert np.isfinite(error_A).all()
    assert math.isfinite(control.trials.debt_s)
