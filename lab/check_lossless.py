"""Counts the requests whose text speculation changes, over the workloads that come with jaxspec: none may be.

Run ``python lab/check_lossless.py --record lossless.jsonl`` as often as you like: each run goes on where the last one
stopped (``--minutes`` stops it by itself), and prints what the record says. Texts go on to their full length.
It exits with 1 if any request differs.
"""

import argparse
import hashlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxspec.bench.prompt_source import PromptSource
from jaxspec.bench.workload import OWN
from jaxspec.perf.moesd import mean_acceptance_length
from jaxspec.serve.demo_pair import resolve_speculation
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams

PLAIN = "plain"
PIECE = 128
TEMPERATURE = 0.8
Run = tuple[str, int]  # a way of decoding, and rows
Runs = dict[Run, dict[int, dict[str, Any]]]


def drafters(chosen: list[str], k: int, tree: list[int]) -> dict[str, dict[str, Any] | None]:
    """Returns every way of decoding by name: plainly, and a chain and perhaps a tree of each drafter, given as JSON."""
    ways: dict[str, dict[str, Any] | None] = {PLAIN: None}
    for text in chosen:
        config = dict(resolve_speculation(json.loads(text)) or {})
        name = config["method"]
        if "model" in config:
            weights = b"".join(file.read_bytes() for file in sorted(Path(config["model"]).glob("*.safetensors")))
            name += f" {hashlib.sha256(weights).hexdigest()[:8]}"
        ways[f"{name} chain {k}"] = {**config, "num_speculative_tokens": k}
        if tree:
            ways[f"{name} tree {'x'.join(map(str, tree))}"] = {**config, "speculative_token_tree": tree}
    return ways


def requests(source: PromptSource, count: int) -> list[list[int]]:
    """Returns prompts of all workloads in turns; those after the last one are the same, a quarter shorter each time."""
    pools = [source.pool(file.stem) for file in sorted(OWN.glob("*.jsonl"))]
    together = [pool[i] for i in range(max(map(len, pools))) for pool in pools if i < len(pool)]
    prompts = []
    for number in range(count):
        turn, place = divmod(number, len(together))
        ids = together[place]
        prompts.append(ids[: max(1, len(ids) - len(ids) * turn // 4)])
    return prompts


def params_of(number: int, tokens: int) -> SamplingParams:
    """Returns the settings of a request: every other one is sampled."""
    return SamplingParams(temperature=TEMPERATURE * (number % 2), seed=number, max_tokens=tokens, ignore_eos=True)


def read(record: Path) -> Runs:
    """Returns what a record holds, by way of decoding and rows, then by request."""
    runs: Runs = defaultdict(dict)
    if record.exists():
        for line in record.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            runs[entry["way"], entry["rows"]][entry["request"]] = entry
    return runs


def missing(runs: Runs, wanted: list[Run], count: int) -> Iterator[tuple[Run, list[int]]]:
    """Yields pieces of work that a record has not, so that every way has come as far as the others."""
    for begin in range(0, count, PIECE):
        for run in wanted:
            if left := [n for n in range(begin, min(begin + PIECE, count)) if n not in runs[run]]:
                yield run, left


def summarize(runs: Runs) -> int:
    """Prints how each run compares with plain decoding of eight rows; returns how many requests differ."""
    table = Table("way", "rows", "requests", "sampled", "tokens", "different", "tokens per pass")
    reference, different = runs[PLAIN, 8], 0
    for (way, rows), entries in sorted(runs.items()):
        compared = {n: entry for n, entry in entries.items() if n in reference}
        other = [n for n, entry in compared.items() if entry["token_ids"] != reference[n]["token_ids"]]
        different += len(other)
        tokens = sum(len(entry["token_ids"]) for entry in compared.values())
        length = mean_acceptance_length(
            accepted=sum(entry["accepted"] for entry in compared.values()),
            passes=sum(entry["passes"] for entry in compared.values()),
        )
        cells = (way, rows, len(compared), sum(n % 2 for n in compared), tokens, len(other), f"{length:.2f}")
        table.add_row(*map(str, cells))
        if other:
            print(f"{way}, {rows} rows differs in requests {other}")
    Console(width=120).print(table)
    return different


def arguments() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description="Counts requests whose tokens differ from plain decoding.")
    parser.add_argument("--record", type=Path, required=True, help="JSONL that the texts are added to")
    parser.add_argument("--model", default="smollm2-moe")
    parser.add_argument("--drafter", action="append", help="JSON with vLLM's keys; may be repeated; by default ngram")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--k", type=int, default=4, help="speculation length of the chains")
    parser.add_argument("--tree", default="2,2", help="branching factors; an empty one for chains alone")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begins nothing new after them")
    return parser.parse_args()


def main() -> int:
    """Runs what the record has not, and prints it; returns the exit code."""
    args, began = arguments(), time.monotonic()
    ways = drafters(args.drafter or ['{"method": "ngram"}'], args.k, [int(n) for n in args.tree.split(",") if n])
    wanted, runs, model = [(way, rows) for way in ways for rows in args.rows], read(args.record), None
    for (way, rows), numbers in missing(runs, wanted, args.requests):
        if time.monotonic() - began > 60 * args.minutes:
            break
        llm = LLM(
            model or args.model, speculative_config=ways[way], dtype="bfloat16", max_num_seqs=rows,
            max_model_len=640, max_logprobs=0, prefill_buckets=(128,),
        )  # fmt: skip
        model, prompts = llm.model, requests(PromptSource(llm.text, llm.model.net.arch.vocab_size), args.requests)
        outputs = llm.generate(
            [{"prompt_token_ids": prompts[n]} for n in numbers], [params_of(n, args.tokens) for n in numbers]
        )
        with args.record.open("a", encoding="utf-8") as file:
            for n, output in zip(numbers, outputs, strict=True):
                m = output.metrics
                entry = {"way": way, "rows": rows, "request": n, "token_ids": list(output.outputs[0].token_ids)}
                entry |= {"accepted": m.num_accepted_tokens, "passes": m.num_steps}
                runs[way, rows][n] = entry
                file.write(json.dumps(entry) + "\n")
        del llm
    return int(summarize(runs) > 0)


if __name__ == "__main__":
    sys.exit(main())
