"""Times the steps of every arm on random tokens before any is judged."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxspec.decode.state import init_sampling
from jaxspec.perf.step_ratios import StepRatios
from jaxspec.pytree import replace
from jaxspec.serve.compiled import Programs
from jaxspec.serve.engine_spec import EngineSpec
from jaxspec.serve.sample import STOP_PLACES
from jaxspec.serve.scheduler import Scheduler
from jaxspec.sharding import hosts
from jaxspec.topology import PLAIN, AnyTopology

ROWS = 8
PAIRS = (0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3, 0)  # every pair of four tokens: whatever follows has a match

LINKING, TIMED = 3, 6  # rounds: before any is timed; timed
RANDOM = 0.1  # relative error of a ratio: text that begins with random tokens touches other experts than users' does
EACH = 0.35  # least share of that error that each ratio has by itself: it is the median of some rounds
OF_MEDIAN = 1.4826 * 1.2533  # standard error of a normal median by the median absolute deviation, times sqrt(n)
Run = Callable[[AnyTopology, int], tuple[float, float]]


class DispatchTimer:
    """Times dispatches on random tokens; nothing of them stays."""

    def __init__(self, scheduler: Scheduler, programs: Programs, spec: EngineSpec, draft_length: int):
        self._scheduler, self._programs, self._spec = scheduler, programs, spec
        self._draft_length, self._random = draft_length, np.random.default_rng(0)
        self.rows = min(spec.rows, ROWS)

    def __call__(self, arm: AnyTopology, most: int) -> tuple[float, float]:
        """Returns the time of a step of an arm in seconds, and the share of its steps that verified drafts."""
        state, programs, repeats = self._scheduler.state, self._programs, arm in self._programs.skipping
        sampling = replace(
            init_sampling(1, STOP_PLACES),
            max_length_B=np.full(1, self._spec.capacity, np.int32),
            draft_limit_B=np.full(1, self._draft_length, np.int32),
            temperature_B=np.ones(1, np.float32),  # text as it may come, which touches experts as text does
            # Nothing but the prompt's tokens: only what is repeated has a match, and is verified.
            presence_B=np.full(1, -1e4 if repeats else 0.0, np.float32),
        )
        table = None if state.table_BJ is None else np.zeros(state.table_BJ.shape[1], np.int32)
        for row in range(self.rows):
            drawn_X = self._random.integers(0, programs.target.net.arch.vocab_size, len(PAIRS)).astype(np.int32)
            prompt = drawn_X[list(PAIRS)] if repeats else drawn_X
            state = programs.prefill(state, row, prompt, table)
            state = programs.admit(state, row, prompt, sampling, table)
        jax.block_until_ready(state.length_B)
        began = time.monotonic()
        state, report = programs.dispatch(state, arm, most)
        result = report.unpack()
        # Process 0's time, for all: the number of rounds, and so of programs that exchange, depends on it.
        step_s = float(hosts.broadcast_arrays(np.float32((time.monotonic() - began) / max(result.steps, 1))))
        for row in range(self.rows):
            state = programs.retire(state, row)
        self._scheduler.state = state
        return step_s, float(np.mean(result.verified_X))


class WarmUp:
    """Runs all arms in turns, round by round, and times the last rounds.

    XLA:CPU links code when it first runs, each expert's by itself, and GPUs record their graphs: three dispatches of
    an arm can take ten times as long as later ones.
    """

    def __init__(self, arms: Sequence[AnyTopology], run: Run, rows: int, steps: int):
        """Runs nothing yet.

        Args:
          arms: plain decoding, chains by length, then trees.
          run: runs a dispatch of an arm with at most so many steps; returns the time of a step in seconds, and the
            share of its steps that verified drafts.
          rows: that decode meanwhile.
          steps: of a full dispatch.
        """
        self._arms, self._run, self._rows, self._steps, self._rounds = arms, run, rows, steps, 0
        self._ratios: dict[int, list[float]] = {arm.max_depth: [] for arm in arms if arm.is_chain}
        self._over_R: list[float] = []

    @property
    def done(self) -> bool:
        """Whether every round ran."""
        return self._rounds == LINKING + TIMED

    def round(self) -> None:
        """Runs every arm once."""
        steps = self._steps
        took, (short_s, _) = {arm: self._run(arm, steps) for arm in self._arms}, self._run(PLAIN, 1)
        if self._rounds >= LINKING:
            plain_s, _ = took[PLAIN]
            for arm, (step_s, share) in took.items():
                if arm.is_chain and share:
                    self._ratios[arm.max_depth].append(1 + (step_s / plain_s - 1) / share)
            self._over_R.append((short_s - plain_s) * steps / max(steps - 1, 1))
        self._rounds += 1

    def result(self) -> tuple[StepRatios, float]:
        """Returns ratios of chains, and what a dispatch takes besides its steps in seconds; both medians.

        Ratios are of steps with drafts, without chains that never had one. Where rounds differ, as on a machine with
        other work, they are less sure.
        """
        known = {length: float(np.median(samples)) for length, samples in self._ratios.items() if samples}
        scatter = _scatter([samples for length, samples in self._ratios.items() if length and samples])
        ratios = {self._rows: (tuple(known), tuple(known.values()))}
        return StepRatios(ratios, RANDOM, max(EACH, scatter / RANDOM)), max(0.0, float(np.median(self._over_R)))


def _scatter(ratios: Sequence[Sequence[float]]) -> float:
    """Returns the relative standard error of medians over rounds (by the MAD), root mean square over lengths."""
    off = [np.median(np.abs(np.array(some) / np.median(some) - 1.0)) / len(some) ** 0.5 for some in ratios]
    return OF_MEDIAN * float(np.sqrt(np.mean(np.square(off)))) if off else 0.0
