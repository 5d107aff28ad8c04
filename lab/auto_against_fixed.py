"""Runs ``auto`` and every fixed length and tree in the same rounds of one engine: how much does choosing cost?

Run ``python lab/auto_against_fixed.py DIR --drafter ngram --rows 1 8 --out regret.jsonl``; a line of JSON per cell is
appended. Rounds go on until the 95 % intervals of both ratios are narrower than ``--precision``: where they end depends
on how far rounds are apart and not on who is faster, so that medians stay without bias.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from jaxspec.bench.grid import DrafterChoice, EnginePoint, Grid, Scenario
from jaxspec.bench.measure import Run
from jaxspec.bench.record import Spread
from jaxspec.bench.rounds import PLAIN, SPECULATIVE, Subject, held_at, run_in_turns, total
from jaxspec.bench.sweep import Sweep
from jaxspec.draft.speculative_keys import AUTO
from jaxspec.serve.compile_cache import use_compile_cache
from jaxspec.serve.demo_pair import resolve_model
from jaxspec.serve.llm import LLM
from jaxspec.topology import AnyTopology

AGAIN = "plain again"
FIXED = "fixed "  # and the name of a topology
CLEAR = 4  # rounds after which a fixed topology that lost each of them has no more turns


@dataclass(frozen=True)
class Regret:
    """What is chosen while running, against every fixed length and tree in the same rounds on the same programs.

    Attributes:
      fixed: speed-up over plain decoding of each fixed length above 0 and tree, median over the rounds that it ran in.
      best: the one of them, plain decoding (0) among them, whose rate has the greatest median; chosen from the same
        rounds, so luck favors it.
      over_best: paired ratios of the chosen ones' rate over that one's.
      over_foreseen: the same over the one that was best in all other rounds, as one would have fixed it before; None
        for a single round.
      plain_again: paired ratios of plain decoding over itself, run twice in every round: all of it is luck.
    """

    fixed: dict[str, float]
    best: str
    over_best: Spread
    over_foreseen: Spread | None = None
    plain_again: Spread | None = None

    @classmethod
    def of(cls, auto: Sequence[float], fixed: Mapping[str, Sequence[float]], again: Sequence[float] = ()) -> "Regret":
        """Computes it from rates by round.

        Args:
          auto: of what is chosen.
          fixed: by length or tree, 0 among them, fewer of those that had enough.
          again: of plain decoding's second run, where it had one.
        """
        by_round = {k: np.divide(rates, fixed["0"][: len(rates)]) for k, rates in fixed.items()}
        stayed = {k: gains for k, gains in by_round.items() if len(gains) == len(auto)}
        best, over = _best(stayed), []
        for turn in range(len(auto) if len(auto) > 1 else 0):
            foreseen = _best({k: np.delete(gains, turn) for k, gains in stayed.items()})
            over.append(auto[turn] / fixed[foreseen][turn])
        gains = {k: float(np.median(ratios)) for k, ratios in by_round.items() if k != "0"}
        over_best = Spread.of(np.divide(auto, fixed[best]).tolist())
        itself = np.divide(again, fixed["0"][: len(again)]).tolist()
        return cls(gains, best, over_best, Spread.of(over) if over else None, Spread.of(itself) if itself else None)

    @staticmethod
    def clearly_slower(fixed: Mapping[str, Sequence[float]]) -> list[str]:
        """Returns those above 0 that were slower than the best in every round, or are by a 95 % interval."""
        best = fixed[_best({k: np.divide(rates, fixed["0"]) for k, rates in fixed.items()})]
        over = {k: Spread.of(np.divide(rates, best).tolist()) for k, rates in fixed.items() if k != "0"}
        return [k for k, ratio in over.items() if (ratio.most if ratio.high is None else ratio.high) < 1.0]


def _best(gains: Mapping[str, np.ndarray]) -> str:
    """Returns the one with the greatest median."""
    return max(gains, key=lambda k: float(np.median(gains[k])))


def regret_of(rounds: Sequence[Mapping[str, Run]]) -> Regret:
    """Computes how far what was chosen is from the best fixed topology."""
    rates = _rates(rounds)
    again = rates.pop(AGAIN, ())
    return Regret.of(rates.pop(SPECULATIVE), rates, again)


def _rates(rounds: Sequence[Mapping[str, Run]]) -> dict[str, list[float]]:
    """Returns rates by round: while every row decoded, or of whole runs if that never was; 0 is plain decoding."""
    names = {PLAIN: "0"} | {name: name.removeprefix(FIXED) for name in rounds[0] if name != PLAIN}
    whole = any(run.decode_tokens_per_s is None for runs in rounds for run in runs.values())
    rate = "tokens_per_s" if whole else "decode_tokens_per_s"
    return {key: [getattr(runs[name], rate) for runs in rounds if name in runs] for name, key in names.items()}


def subjects_of(sweep: Sweep, llm: LLM, engine: EnginePoint, scenario: Scenario) -> dict[str, Subject]:
    """Returns plain decoding twice, the engine's choice, and every topology that it chooses among."""
    subjects = sweep.subjects(llm, engine, scenario)

    def run_held(arm: AnyTopology, part: slice) -> Run:
        with held_at(llm, arm):
            return subjects[SPECULATIVE](part)

    fixed = {FIXED + arm.name: partial(run_held, arm) for arm in llm.engine.control.arms if arm.drafts}
    return {**subjects, AGAIN: subjects[PLAIN], **fixed}


def measure(
    subjects: Mapping[str, Subject], parts: Sequence[slice], *, learns: int, rounds: range, precision: float
) -> list[dict[str, Run]]:
    """Returns the measured rounds.

    Args:
      subjects: see ``subjects_of``.
      parts: of the prompts; the subjects take turns at every part.
      learns: rounds of the engine's choice alone, after one of everything that warms up.
      rounds: the fewest to measure, and one more than the most.
      precision: of the 95 % intervals, at which they end before.
    """
    going, measured = dict(subjects), list[dict[str, Run]]()

    def one(names: Sequence[str], turn: int) -> dict[str, Run]:
        return total([
            run_in_turns({name: partial(subjects[name], part) for name in names}, turn + number)
            for number, part in enumerate(parts)
        ])  # fmt: skip

    one(list(going), 0)
    for _ in range(learns):
        one([SPECULATIVE], 0)
    while len(measured) < rounds.start or (len(measured) < rounds.stop - 1 and _width(measured) > precision):
        measured.append(one(list(going), len(measured) + 1))
        if len(measured) >= CLEAR:
            all_along = {k: v for k, v in _rates(measured).items() if len(v) == len(measured)}
            fixed = {k: v for k, v in all_along.items() if k not in (SPECULATIVE, AGAIN)}
            for key in Regret.clearly_slower(fixed):
                del going[FIXED + key]
    return measured


def _width(rounds: Sequence[Mapping[str, Run]]) -> float:
    """Returns the wider interval of the choice over plain decoding and over the best fixed topology."""
    rates = _rates(rounds)
    over_plain = Spread.of(np.divide(rates[SPECULATIVE], rates["0"]).tolist())
    spreads = over_plain, regret_of(rounds).over_best
    return max(math.inf if s.low is None or s.high is None else s.high - s.low for s in spreads)


def line_of(engine: EnginePoint, scenario: Scenario, rounds: Sequence[Mapping[str, Run]]) -> dict[str, Any]:
    """Returns what is written of a cell."""
    regret, rates, last = regret_of(rounds), _rates(rounds), rounds[-1][SPECULATIVE]
    spreads = {name: getattr(regret, name) for name in ("over_best", "over_foreseen", "plain_again")}
    over_plain = Spread.of(np.divide(rates[SPECULATIVE], rates["0"]).tolist())
    return {
        "engine": engine.name, **asdict(scenario), "rounds": len(rounds), "over_plain": structs.asdict(over_plain),
        "fixed": regret.fixed, "best": regret.best,
        **{name: spread and structs.asdict(spread) for name, spread in spreads.items()},
        "lengths": last.lengths, "decision_s": float(np.median([runs[SPECULATIVE].decision_s for runs in rounds])),
        "same_text": all(run.token_ids == last.token_ids for runs in rounds for run in runs.values()),
    }  # fmt: skip


def sweep_of(args: argparse.Namespace) -> Sweep:
    """Returns what a command line asks for: one drafter, which chooses its length."""
    grid = Grid(
        (DrafterChoice.parse(args.drafter),), (AUTO,), tuple(args.rows), tuple(args.temperature), tuple(args.workload),
        output_tokens=(args.output_tokens,), requests=args.requests,
    )  # fmt: skip
    return Sweep(resolve_model(args.model), grid, {"dtype": args.dtype})


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line and measures every cell."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--drafter", default="ngram", help="as for jaxspec bench --drafters")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--workload", nargs="+", default=["held-out"])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--requests", type=int, default=None)
    parser.add_argument("--output-tokens", type=int, default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--learns", type=int, default=12, help="rounds before the measured ones, for auto alone")
    parser.add_argument("--rounds", type=int, nargs=2, default=[6, 24], help="fewest and most that are measured")
    parser.add_argument("--precision", type=float, default=0.02)
    parser.add_argument("--out", type=Path, default=Path("regret.jsonl"))
    args = parser.parse_args(argv)
    use_compile_cache()
    sweep = sweep_of(args)
    grid = sweep.grid
    with args.out.open("a", encoding="utf-8") as file:
        for engine in grid.engines():
            llm = sweep.open(engine)
            for scenario in grid.scenarios():
                subjects = subjects_of(sweep, llm, engine, scenario)
                rounds = measure(
                    subjects, sweep.parts(engine, scenario), learns=args.learns,
                    rounds=range(args.rounds[0], args.rounds[1] + 1), precision=args.precision,
                )  # fmt: skip
                line = json.dumps(line_of(engine, scenario, rounds))
                print(line, file=file, flush=True)
                print(line)


if __name__ == "__main__":
    main()
