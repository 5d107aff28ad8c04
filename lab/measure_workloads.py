"""Times a drafter at several speculation lengths, and ``auto``, beside plain decoding, by kind of text.

Run ``python -m lab.measure_workloads smollm2-moe --drafter '{"method": "eagle3", "model": "smollm2-moe"}' --rows 1 8
--out workloads.jsonl`` on a machine that does nothing else; cells that the file holds are not measured again. All ways
take turns on one engine: with one row at every prompt, else at all prompts of a cell, three times. A gain is the rate
over plain decoding's, prompts read included, all turns together; its interval comes from drawing turns anew, so that it
tells how prompts differ with one row, and how turns differ with more.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxspec.bench.grid import EnginePoint, Scenario
from jaxspec.bench.measure import Run
from jaxspec.bench.rounds import PLAIN, SPECULATIVE, run_in_turns
from jaxspec.bench.sweep import Sweep
from jaxspec.serve.compile_cache import use_compile_cache
from jaxspec.serve.llm import LLM
from lab.auto_against_fixed import FIXED, subjects_of, sweep_of

DRAWS = 2000
TURNS = 3  # at all prompts, with more rows than one


def gain(over: Sequence[Run], plain: Sequence[Run]) -> tuple[float, float, float]:
    """Returns the ratio of two rates, tokens of all parts over their seconds, with its 95 % interval (bootstrap)."""
    figures = np.array([(a.tokens, a.time_s, b.tokens, b.time_s) for a, b in zip(over, plain, strict=True)])
    drawn = np.random.default_rng(0).integers(len(figures), size=(DRAWS, len(figures)))
    sums = figures[drawn].sum(1)
    ratios = sums[:, 0] / sums[:, 1] * sums[:, 3] / sums[:, 2]
    whole = figures.sum(0)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(whole[0] / whole[1] * whole[3] / whole[2]), float(low), float(high)


def measure(sweep: Sweep, llm: LLM, engine: EnginePoint, scenario: Scenario, lengths: Sequence[str]) -> dict[str, Any]:
    """Returns a cell: of each way its rate, gain, and tokens per pass."""
    subjects = subjects_of(sweep, llm, engine, scenario)
    ways = {
        name: run
        for name, run in subjects.items()
        if name in (PLAIN, SPECULATIVE) or name.removeprefix(FIXED) in lengths
    }
    count = sweep.grid.count(engine.rows)
    parts = [slice(n, n + 1) for n in range(count)] if engine.rows == 1 else [slice(0, count)] * TURNS
    ways[SPECULATIVE](slice(0, count))  # the choice learns
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for turn, part in enumerate(parts):
        for name, run in run_in_turns({name: partial(run, part) for name, run in ways.items()}, turn).items():
            runs[name].append(run)
    return {
        "engine": engine.name, "rows": engine.rows, "workload": scenario.workload,
        "temperature": scenario.temperature, "ways": {name: figures(some, runs[PLAIN]) for name, some in runs.items()},
        "texts": count, "different": different(runs),
    }  # fmt: skip


def figures(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """Returns what is written of one way of decoding."""
    together = sum(runs[1:], runs[0])
    metrics = together.speculation
    return {
        "gain": gain(runs, plain), "tokens_per_s": together.tokens_per_s,
        "length": metrics.mean_acceptance_length, "lengths": together.lengths,
    }  # fmt: skip


def different(runs: Mapping[str, Sequence[Run]]) -> int:
    """Returns how many texts of any way are not those of plain decoding."""
    plain = [ids for run in runs[PLAIN] for ids in run.token_ids]
    return sum(ids != own for some in runs.values() for ids, own in zip(texts_of(some), plain, strict=True))


def texts_of(runs: Sequence[Run]) -> list[list[int]]:
    """Returns the token ids of all prompts."""
    return [ids for run in runs for ids in run.token_ids]


def print_table(lines: Sequence[Mapping[str, Any]]) -> None:
    """Prints all cells: gain over plain decoding with its interval, and tokens per pass."""
    names = [name for name in lines[0]["ways"] if name != PLAIN]
    table = Table("engine", "text", "T", "tokens/s", *(name.removeprefix(FIXED) for name in names), "different")
    for line in lines:
        cells = []
        for name in names:
            way = line["ways"].get(name)
            cells.append("{:.2f} ({:.2f}-{:.2f}) {:.2f}".format(*way["gain"], way["length"]) if way else "")
        rate = f"{line['ways'][PLAIN]['tokens_per_s']:.1f}"
        different = f"{line['different']} of {line['texts'] * (len(line['ways']) - 1)}"
        table.add_row(line["engine"], line["workload"], f"{line['temperature']:g}", rate, *cells, different)
    Console(width=200).print(table)


def arguments() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-moe")
    parser.add_argument("--drafter", default="ngram", help="as for jaxspec bench --drafters")
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--workload", nargs="+", default=["chat", "code"])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--lengths", nargs="+", default=["1", "3", "5"], help="those of them that auto chooses among")
    parser.add_argument("--requests", type=int, default=None)
    parser.add_argument("--output-tokens", type=int, default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, default=Path("workloads.jsonl"))
    return parser.parse_args()


def main() -> None:
    """Measures every cell that is missing, and prints the table of all."""
    args = arguments()
    use_compile_cache()
    sweep = sweep_of(args)
    grid = sweep.grid
    lines = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    there = {(line["engine"], line["workload"], line["temperature"]) for line in lines}
    for engine in grid.engines():
        left = [s for s in grid.scenarios() if (engine.name, s.workload, s.temperature) not in there]
        llm = sweep.open(engine) if left else None
        for scenario in left:
            assert llm is not None
            lines.append(measure(sweep, llm, engine, scenario, args.lengths))
            with args.out.open("a", encoding="utf-8") as file:
                print(json.dumps(lines[-1]), file=file)
            print_table(lines[-1:])
    print_table(lines)


if __name__ == "__main__":
    main()
