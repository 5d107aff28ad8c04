"""Counts the requests whose text speculation changes, on held-out prompts: none may be.

Run ``python lab/check_lossless.py --model DIR [--draft DIR]``; it exits with 1 if any request differs.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import demo_corpus
from rich.console import Console
from rich.table import Table

from jaxspec.serve.llm import LLM
from jaxspec.serve.request import RequestOutput, SamplingParams, SpeculationMetrics


def configs(k: int, trees: list[list[int]], draft: Path | None) -> dict[str, dict[str, Any] | None]:
    """Every drafter and topology that is compared with plain decoding, by name."""
    methods: dict[str, dict[str, Any]] = {"n-gram": {"method": "ngram"}}
    if draft:
        methods["draft"] = {"method": "draft_model", "model": str(draft)}
    by_name: dict[str, dict[str, Any] | None] = {}
    for name, method in methods.items():
        by_name[f"{name} chain {k}"] = {**method, "num_speculative_tokens": k}
        for levels in trees:
            by_name[f"{name} tree {'x'.join(map(str, levels))}"] = {**method, "speculative_token_tree": levels}
    return by_name


def first_difference(ours: RequestOutput, plain: RequestOutput) -> int | None:
    """Index of the first generated token that differs, None if the two are the same."""
    a, b = ours.outputs[0].token_ids, plain.outputs[0].token_ids
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def compare(name: str, outputs: list[RequestOutput], plain: list[RequestOutput], time_s: float) -> dict[str, Any]:
    """One row of the result."""
    places = {n: first_difference(a, b) for n, (a, b) in enumerate(zip(outputs, plain, strict=True))}
    differing = {n: place for n, place in places.items() if place is not None}
    total = SpeculationMetrics()
    for output in outputs:
        total.merge(output.metrics)
    return {
        "name": name,
        "requests": len(outputs),
        "tokens": sum(len(o.outputs[0].token_ids) for o in outputs),
        "mismatches": len(differing),
        "first_difference": min(differing.values(), default=None),
        "differing": differing,
        "acceptance_length": round(total.mean_acceptance_length, 4),
        "time_s": round(time_s, 2),
    }


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> tuple[list[RequestOutput], float]:
    """All prompts through one engine, and the seconds it took."""
    began = time.monotonic()
    outputs = llm.generate(prompts, params)
    return outputs, time.monotonic() - began


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    table = Table("run", "requests", "tokens", "mismatches", "first at", "acceptance length", "s")
    for row in rows:
        keys = ("name", "requests", "tokens", "mismatches", "first_difference", "acceptance_length", "time_s")
        table.add_row(*("-" if row[key] is None else str(row[key]) for key in keys))
    Console().print(table)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Counts requests whose tokens differ from plain decoding.")
    parser.add_argument("--model", type=Path, required=True, help="directory of the target")
    parser.add_argument("--draft", type=Path, default=None, help="directory of a draft model")
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--k", type=int, default=4, help="speculation length of the chains")
    parser.add_argument("--tree", action="append", default=None, help="branching factors such as 2,2; may be repeated")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.7, help="of the odd requests; the even ones are greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="file that receives the JSON, besides the screen")
    return parser.parse_args()


def main() -> int:
    """Runs everything; returns the exit code."""
    args = arguments()
    trees = [[int(n) for n in levels.split(",")] for levels in args.tree or ["2,2"]]
    corpus = demo_corpus.collect()
    by_prompt = demo_corpus.held_out_prompts(corpus, args.model, args.prompts, args.prompt_tokens, args.seed)
    prompts = [list(prompt.token_ids) for prompt in by_prompt]
    params = [
        SamplingParams(temperature=args.temperature * (n % 2), seed=args.seed + n, max_tokens=args.max_tokens)
        for n in range(len(prompts))
    ]
    settings: dict[str, Any] = {
        "dtype": args.dtype,
        "max_num_seqs": args.rows,
        "max_logprobs": 0,
        "max_model_len": args.prompt_tokens + args.max_tokens,
    }
    plain, time_s = run(LLM(args.model, **settings), prompts, params)
    rows = [compare("plain", plain, plain, time_s)]
    alone, time_s = run(LLM(args.model, **{**settings, "max_num_seqs": 1}), prompts, params)
    rows.append(compare("plain, one row", alone, plain, time_s))
    for name, config in configs(args.k, trees, args.draft).items():
        outputs, time_s = run(LLM(args.model, speculative_config=config, **settings), prompts, params)
        rows.append(compare(name, outputs, plain, time_s))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    show(rows)
    text = json.dumps({"dtype": args.dtype, "rows": args.rows, "runs": rows}, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return int(any(row["mismatches"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
