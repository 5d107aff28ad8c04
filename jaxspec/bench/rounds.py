"""Rounds of a sweep's cell: every way of decoding has its turn, until it is clear that it is not the fastest."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import add
from typing import Any

from jaxspec.bench.measure import Run
from jaxspec.bench.peers.contest import PeerRun
from jaxspec.bench.record import Regret
from jaxspec.bench.turns import Going, in_turns

PLAIN, SPECULATIVE = "plain", "speculative"
AGAIN = "plain again"
FIXED = "fixed "  # and an arm: runs of an engine that chooses, held at it
CLEAR = 4  # rounds after which a fixed arm that lost each of them has no more turns

Subject = Callable[[slice], Going[Run | PeerRun]]


def run_rounds(
    subjects: Mapping[str, Subject], parts: Sequence[slice], count: int, learns: int = 0, tokens: float = math.inf
) -> list[dict[str, Run | PeerRun]]:
    """So many rounds, behind one that warms up, and ``learns`` more of speculation alone, which may learn from them.

    Subjects take turns at every part, and within it by so many tokens.

    A fixed arm that was slower than the best one (or than plain decoding, if that is best) in each of ``CLEAR`` rounds
    or more ends there, and long sweeps spend their time on those that may be best. An arm that is as fast as all others
    may end, too, for one of them was lucky; nothing is lost with it.
    """
    wanted, found = dict(subjects), []
    _round(wanted, parts, 0, tokens)
    for _ in range(learns):
        _round({SPECULATIVE: wanted[SPECULATIVE]}, parts, 0, tokens)
    for turn in range(1, count + 1):
        found.append(_round(wanted, parts, turn, tokens))
        for name in _clearly_slower(found):
            del wanted[name]
    return found


def regret(rounds: Sequence[Mapping[str, Run | PeerRun]]) -> Regret | None:
    """How far what was chosen was behind the best fixed arm, None where those did not run."""
    rates = _rates(rounds)
    again = rates.pop(AGAIN, ())
    return Regret.of(rates.pop(SPECULATIVE), rates, again) if len(rates) > 2 else None


def _clearly_slower(rounds: Sequence[Mapping[str, Run | PeerRun]]) -> list[str]:
    """Fixed arms of the last round that lost every one so far."""
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
