"""Rounds of a sweep's cell: every way of decoding has its turn, until it is clear that it is not the fastest."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any

import numpy as np

from jaxspec.bench.measure import Run
from jaxspec.bench.peers.contest import PeerRun
from jaxspec.bench.record import Regret, Spread
from jaxspec.bench.turns import Going, in_turns

PLAIN, SPECULATIVE = "plain", "speculative"
AGAIN = "plain again"
FIXED = "fixed "  # and an arm: runs of an engine that chooses, held at it
CLEAR = 4  # rounds after which a fixed arm that lost each of them has no more turns

Subject = Callable[[slice], Going[Run | PeerRun]]


@dataclass(frozen=True)
class Rounds:
    """How many rounds a cell takes.

    Attributes:
      least: that are measured in any case.
      learns: of speculation alone before them, which may learn from them.
      precision: width of the widest 95 % interval of speculation's rate over plain decoding's, and over the best fixed
        arm's, at which they end behind the least; 0 for the least alone. Where they end depends on how far rounds are
        apart and not on who is faster, so medians stay without bias.
      most: that are measured with a precision.
    """

    least: int
    learns: int = 0
    precision: float = 0.0
    most: int = 0

    def enough(self, rounds: Sequence[Mapping[str, Run | PeerRun]]) -> bool:
        """Whether these are."""
        if len(rounds) < self.least:
            return False
        rates = _rates(rounds)
        chosen = rates[SPECULATIVE]
        if not self.precision or not chosen or len(rounds) >= self.most:
            return True
        found = regret(rounds)
        over = [Spread.of(np.divide(chosen, rates["0"]).tolist()), *([found.over_best] if found else [])]
        return all(one.width <= self.precision for one in over)


def run_rounds(
    subjects: Mapping[str, Subject], parts: Sequence[slice], rounds: Rounds, tokens: float = math.inf
) -> list[dict[str, Run | PeerRun]]:
    """As many rounds as it takes, behind one that warms up.

    Subjects take turns at every part, and within it by so many tokens.

    A fixed arm that was slower than the best one (or than plain decoding, if that is best) in each of ``CLEAR`` rounds
    or more, or is so by a 95 % interval, ends there, and long sweeps spend their time on those that may be best. An arm
    that is as fast as all others may end, too, for one of them was lucky; nothing is lost with it.
    """
    wanted = dict(subjects)
    found: list[dict[str, Run | PeerRun]] = []
    _round(wanted, parts, 0, tokens)
    for _ in range(rounds.learns):
        _round({SPECULATIVE: wanted[SPECULATIVE]}, parts, 0, tokens)
    while not rounds.enough(found):
        found.append(_round(wanted, parts, len(found) + 1, tokens))
        for name in _clearly_slower(found):
            del wanted[name]
    return found


def regret(rounds: Sequence[Mapping[str, Run | PeerRun]]) -> Regret | None:
    """How far what was chosen was behind the best fixed arm, None where those did not run."""
    rates = _rates(rounds)
    again = rates.pop(AGAIN, ())
    return Regret.of(rates.pop(SPECULATIVE), rates, again) if len(rates) > 2 else None


def _clearly_slower(rounds: Sequence[Mapping[str, Run | PeerRun]]) -> list[str]:
    """Fixed arms of the last round that are not the fastest."""
    rates = {key: found for key, found in _rates(rounds).items() if len(found) == len(rounds)}
    for name in (SPECULATIVE, AGAIN):
        rates.pop(name, None)
    return [FIXED + key for key in Regret.clearly_slower(rates)] if len(rounds) >= CLEAR else []


def _rates(rounds: Sequence[Mapping[str, Run | PeerRun]]) -> dict[str, list[float]]:
    """Our rates by round: while every row decoded, or of whole runs if that never was; 0 is plain decoding."""
    keys = {PLAIN: "0", SPECULATIVE: SPECULATIVE} | ({AGAIN: AGAIN} if AGAIN in rounds[0] else {})
    keys |= {name: name.removeprefix(FIXED) for name in sorted(rounds[0]) if name.startswith(FIXED)}
    whole = any(r[name].decode_tokens_per_s is None for r in rounds for name in keys if name in r)
    rate = "tokens_per_s" if whole else "decode_tokens_per_s"
    return {key: [getattr(r[name], rate) for r in rounds if name in r] for name, key in keys.items()}


def _round(
    subjects: Mapping[str, Subject], parts: Sequence[slice], turn: int, tokens: float
) -> dict[str, Run | PeerRun]:
    """Every subject's run of all prompts."""
    found = [
        in_turns({name: partial(run, part) for name, run in subjects.items()}, turn + number, tokens)
        for number, part in enumerate(parts)
    ]
    return {name: _sum([part[name] for part in found]) for name in subjects}


def _sum(runs: Sequence[Any]) -> Any:
    """Runs one after the other as one."""
    return reduce(add, runs)
