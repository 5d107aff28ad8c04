"""Runs every arm before any is judged, and says how long their steps take beside plain ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxspec.perf.step_ratios import StepRatios
from jaxspec.topology import PLAIN, AnyTopology

LINKING, TIMED, MOST_TIMED = 4, 5, 16  # rounds
ENOUGH_S = 4.0  # of timed rounds, more than the fewest
RANDOM = 0.1  # relative error of a ratio: text that begins with random tokens touches other experts than users' does
EACH = 0.35  # of it, what a ratio may be off by itself at least: it is the median of some rounds
OF_MEDIAN = 1.4826 * 1.2533  # standard error of a normal median by the median absolute deviation, times sqrt(n)
Run = Callable[[AnyTopology, int], tuple[float, float]]


def warm_up(arms: Sequence[AnyTopology], run: Run, rows: int, steps: int) -> tuple[StepRatios, float]:
    """Runs all arms in turns, in rounds of which the last ones are timed; as many as a few seconds allow.

    XLA:CPU links code when it first runs, each expert's by itself, and GPUs record their graphs: three dispatches of
    an arm can take ten times as long as later ones.

    Args:
      arms: plain decoding, chains by length, then trees.
      run: runs a dispatch of an arm with at most so many steps, and returns how long each of them took in seconds, and
        the share of them that had drafts or could not do without.
      rows: that decode meanwhile.
      steps: of a full dispatch.

    Returns:
      Ratios of chains in steps with drafts, without those that never had one, and what a dispatch takes besides its
      steps in seconds; both medians. Where rounds differ, as on a machine with other work, ratios are less sure.
    """
    ratios: dict[int, list[float]] = {arm.max_depth: [] for arm in arms if arm.is_chain}
    over_R: list[float] = []
    turn, spent_s = -LINKING, 0.0
    while turn < TIMED or (turn < MOST_TIMED and spent_s < ENOUGH_S):
        took, (short_s, _) = {arm: run(arm, steps) for arm in arms}, run(PLAIN, 1)
        if turn >= 0:
            plain_s, _ = took[PLAIN]
            for arm, (step_s, share) in took.items():
                if arm.is_chain and share:
                    ratios[arm.max_depth].append(1 + (step_s / plain_s - 1) / share)
            over_R.append((short_s - plain_s) * steps / max(steps - 1, 1))
            spent_s += sum(step_s for step_s, _ in took.values()) * steps + short_s
        turn += 1
    known = {length: float(np.median(found)) for length, found in ratios.items() if found}
    each = max(EACH, _scatter([found for length, found in ratios.items() if length and found]) / RANDOM)
    return StepRatios({rows: (tuple(known), tuple(known.values()))}, RANDOM, each), max(0.0, float(np.median(over_R)))


def _scatter(ratios: Sequence[Sequence[float]]) -> float:
    """Relative standard error of medians over rounds, root mean square over lengths; a few odd rounds do not count."""
    off = [np.median(np.abs(np.array(found) / np.median(found) - 1.0)) / len(found) ** 0.5 for found in ratios]
    return OF_MEDIAN * float(np.sqrt(np.mean(np.square(off)))) if off else 0.0
