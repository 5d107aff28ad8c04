"""A made-up machine whose best arm is known."""

import math
from collections.abc import Mapping

import numpy as np

from jaxspec.control.adaptive import Adaptive
from jaxspec.control.decision import Outcome
from jaxspec.perf.step_ratios import StepRatios
from jaxspec.topology import AnyTopology, chain

LENGTHS = (0, 1, 2, 3, 4, 5)
ARMS = tuple(chain(length) for length in LENGTHS)
STEPS = 8
CHEAP, DEAR = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], [1.0, 1.6, 2.2, 2.7, 3.1, 3.5]


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
        """Returns the time of a step and the acceptance by position."""
        return self.trees[arm] if arm in self.trees else (self.time_s[arm.drafts], self.rates[: arm.drafts])

    def run(self, arm: AnyTopology, rows: int, kind: int = 0) -> Outcome:
        """Runs a full dispatch."""
        step_s, rates = self.law(arm)
        time_s = STEPS * step_s * (1 + self.noise * self.rng.standard_normal())
        hits = self.rng.random((STEPS * rows, len(rates))) < np.asarray(rates)
        accepted = np.cumprod(hits, axis=1).sum(axis=1) if rates else np.zeros(STEPS * rows, int)
        self.total_s += time_s
        self.tokens += float(np.sum(accepted + 1))
        self.ran.append(arm)
        return Outcome(rows, STEPS, time_s, {(len(rates), kind): accepted.tolist()})

    def speed(self, arm: AnyTopology, rows: int) -> float:
        """Returns the tokens per second of a fixed arm, exactly."""
        step_s, rates = self.law(arm)
        return rows * (1 + sum(math.prod(rates[: k + 1]) for k in range(len(rates)))) / step_s


def play(control: Adaptive, machine: Machine, dispatches: int, rows: int = 4) -> list[int]:
    """Lets the control choose, and returns the lengths."""
    chosen = []
    for _ in range(dispatches):
        decision = control.choose(rows, 0)
        chosen.append(decision.length)
        control.record(decision, machine.run(decision.arm, rows))
    return chosen


def ratios_of(time_s: list[float], rows: int = 4, noise: float = 0.02) -> StepRatios:
    """Returns these times as if they had been calibrated."""
    return StepRatios({rows: (LENGTHS, tuple(t / time_s[0] for t in time_s))}, noise)
