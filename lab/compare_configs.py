"""Times engines with different speculative configs in turns, whole runs over the same prompts, and compares texts.

Run ``python lab/compare_configs.py --model DIR CONFIG CONFIG ...``; it exits with 1 if any text differs.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxspec.bench.record import Spread
from jaxspec.bench.workload import WORKLOADS, Source, settings
from jaxspec.serve.compile_cache import use_compile_cache
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import RequestOutput, SamplingParams

Round = list[tuple[float, list[RequestOutput]]]


def one_round(llms: list[LLM], prompts: list[list[int]], params: list[SamplingParams], backwards: bool) -> Round:
    """Seconds and outputs of every engine, in its place; one after the other, or from the last to the first."""
    found: dict[int, tuple[float, list[RequestOutput]]] = {}
    for place in sorted(range(len(llms)), reverse=backwards):
        began = time.monotonic()
        outputs = llms[place].generate(prompts, params)
        found[place] = time.monotonic() - began, outputs
    return [found[place] for place in range(len(llms))]


def compared(config: dict[str, Any], rounds: list[Round], place: int) -> dict[str, Any]:
    """What one engine did beside the first one."""
    steps, drafts, accepted = 0, 0, 0
    for round_ in rounds:
        for output in round_[place][1]:
            steps += output.metrics.num_steps
            drafts += output.metrics.num_draft_tokens
            accepted += output.metrics.num_accepted_tokens
    texts = [[[o.outputs[0].token_ids for o in round_[i][1]] for i in (0, place)] for round_ in rounds]
    speed = Spread.of([round_[0][0] / round_[place][0] for round_ in rounds])
    return {
        "config": config,
        "speed over the first": [speed.median, speed.least, speed.most],
        "drafts per step of a row": drafts / steps,
        "accepted per step of a row": accepted / steps,
        "same text": all(first == own for first, own in texts),
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compares engines with different speculative configs in turns.")
    parser.add_argument("--model", type=Path, required=True, help="directory of the target")
    parser.add_argument(
        "configs", nargs="+", type=json.loads, help="speculative configs, JSON; the others are compared with the first"
    )
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--workload", choices=[name for name in WORKLOADS if name != "file"], default="code")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up-rounds", type=int, default=7, help="that engines may learn from; not counted")
    return parser.parse_args()


def main() -> int:
    """Runs everything; returns the exit code."""
    args = arguments()
    use_compile_cache()
    llms = [LLM(args.model, speculative_config=one, max_num_seqs=args.rows) for one in args.configs]
    model = llms[0]
    source = Source(model.text, model.model.net.arch.vocab_size)
    prompts = source.prompts(args.workload, args.requests, 0)
    params = [
        SamplingParams(
            max_tokens=args.max_tokens, ignore_eos=True, seed=n, **settings(args.workload, n, args.temperature)
        )
        for n in range(len(prompts))
    ]
    rounds = [one_round(llms, prompts, params, n % 2 == 1) for n in range(args.warm_up_rounds + args.rounds)]
    rows = [compared(config, rounds[args.warm_up_rounds :], place) for place, config in enumerate(args.configs)]
    table = Table(*rows[0])
    for row in rows:
        low = [f"{x:.3f}" for x in row["speed over the first"]]
        speed = f"{low[0]} ({low[1]} to {low[2]})"
        numbers = (f"{row[key]:.2f}" for key in ("drafts per step of a row", "accepted per step of a row"))
        table.add_row(json.dumps(row["config"]), speed, *numbers, "yes" if row["same text"] else "NO")
    Console(width=160).print(table)
    print(json.dumps(rows))
    return int(not all(row["same text"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
