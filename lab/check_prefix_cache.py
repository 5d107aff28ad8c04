"""Compares an engine with the prefix cache to one without: text, log-probabilities, accepted drafts; then the time.

    python -m lab.check_prefix_cache same --requests 10000 --out same.jsonl
    python -m lab.check_prefix_cache first-token --model smollm2-moe

``same`` appends a line per batch, goes on after the lines that are there, and exits with 1 if any request differs.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.serve.demo_pair import demo_model_dir
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import RequestOutput, SamplingParams

BATCH, SYSTEMS, ROWS, CAPACITY = 100, 12, 8, 512
KEPT = 3072  # tokens of prefixes: less than all batches' together, so that blocks are evicted
Request = tuple[list[int], SamplingParams]


def load(model: str, method: str, length: int, **settings: Any) -> LLM:
    """Loads a model with what drafts; all that is measured runs compiled programs."""
    ways: dict[str, dict[str, Any] | None] = {
        "none": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": length},
        "head": {
            "method": "shared_expert", "model": str(demo_model_dir("head")), "num_speculative_tokens": length
        },
        "draft": {"method": "draft_model", "model": str(demo_model_dir("draft")), "num_speculative_tokens": length},
    }  # fmt: skip
    llm = LLM(model, speculative_config=ways[method], **settings)
    llm.finish_compiling()
    return llm


def first_turns(batch: int, vocab: int) -> list[Request]:
    """Returns half a batch: system prompts that all batches share, and questions of its own."""
    rng, common = np.random.default_rng([1, batch]), np.random.default_rng(0)
    systems = [common.integers(3, vocab, 20 + 20 * i).tolist() for i in range(SYSTEMS)]
    return [
        (systems[rng.integers(SYSTEMS)] + rng.integers(3, vocab, rng.integers(1, 60)).tolist(), _params(rng, number))
        for number in range(BATCH // 2)
    ]


def _params(rng: np.random.Generator, number: int) -> SamplingParams:
    some: dict[str, Any] = {"temperature": 0.0 if number % 2 else 0.8, "seed": int(rng.integers(1 << 30))}
    more: list[dict[str, Any]] = [
        {}, {"n": 2}, {"logprobs": 2}, {"repetition_penalty": 1.2}, {"prompt_logprobs": 0}, {"speculative": False},
        {"top_p": 0.8, "ignore_eos": True},
    ]  # fmt: skip
    return SamplingParams(max_tokens=int(rng.integers(1, 25)), **some, **more[number % len(more)])


def second_turns(outputs: list[RequestOutput], requests: list[Request], vocab: int) -> list[Request]:
    """Returns the other half: each conversation goes on."""
    rng = np.random.default_rng([2, outputs[0].prompt_token_ids[-1]])
    return [
        (output.prompt_token_ids + output.outputs[0].token_ids + rng.integers(3, vocab, 12).tolist(), params)
        for output, (_, params) in zip(outputs, requests, strict=True)
    ]


def seen(output: RequestOutput) -> tuple[Any, ...]:
    """Returns what must be the same: tokens, their log-probabilities, those of the prompt, accepted drafts."""
    counts = asdict(output.metrics) if output.metrics is not None else None
    return [(c.token_ids, c.finish_reason, c.logprobs) for c in output.outputs], output.prompt_logprobs, counts


def batches(cached: LLM, plain: LLM, first: int) -> Iterator[dict[str, Any]]:
    """Yields a line per batch."""
    vocab, batch = plain.model.net.arch.vocab_size, first
    while True:
        requests, differing, tokens, hits = first_turns(batch, vocab), 0, 0, 0
        for turn in range(2):
            prompts, params = [p for p, _ in requests], [s for _, s in requests]
            ours, others = (llm.generate(prompts, params, use_tqdm=False) for llm in (cached, plain))
            differing += sum(seen(a) != seen(b) for a, b in zip(ours, others, strict=True))
            tokens += sum(len(p) for p in prompts)
            hits += sum(output.num_cached_tokens or 0 for output in ours)
            requests = second_turns(others, requests, vocab) if turn == 0 else requests
        prefix = cached.engine.prefix
        yield {
            "batch": batch, "requests": BATCH, "differing": differing, "prompt_tokens": tokens, "cached_tokens": hits,
            "blocks": None if prefix is None else len(prefix.ids),
            "rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        }  # fmt: skip
        batch += 1


def run_same(args: argparse.Namespace) -> int:
    """Runs batches until there are enough lines; returns the exit code."""
    out: Path = args.out
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    settings: dict[str, Any] = {"max_num_seqs": ROWS, "max_model_len": CAPACITY, "max_logprobs": 2}
    cached = load(args.model, args.method, args.length, **settings, prefix_cache_tokens=KEPT)
    plain = load(args.model, args.method, args.length, **settings, enable_prefix_caching=False)
    began = time.monotonic()
    with out.open("a") as file:
        for line in batches(cached, plain, len(lines)):
            file.write(json.dumps(line) + "\n")
            file.flush()
            lines.append(line)
            enough = len(lines) * BATCH >= args.requests
            if enough or time.monotonic() - began > args.most_s:
                break
    count, differing = (sum(line[name] for line in lines) for name in ("requests", "differing"))
    print(f"{args.method}: {count} requests, {differing} differ; peak memory {lines[-1]['rss_mb']} MB")
    return int(differing > 0)


def run_first_token(args: argparse.Namespace) -> int:
    """Prints medians of the time to the first token, and how much of the common prompt was not read again.

    Without the cache is: each request with a salt of its own, which shares nothing. The store has room for two of
    these beside what is shared, or they would push it out.
    """
    rng = np.random.default_rng(0)
    llm = load(
        args.model, args.method, args.length, max_num_seqs=args.rows, max_model_len=args.system + 64, max_logprobs=0,
        enable_prefix_caching=True, prefix_cache_tokens=3 * (args.system + 64),
    )  # fmt: skip
    vocab, times = llm.model.net.arch.vocab_size, {"without": [], "with": []}
    system = rng.integers(3, vocab, args.system).tolist()
    before = _counts(llm)
    for number in range(args.rounds + 1):
        prompt = system + rng.integers(3, vocab, args.question).tolist()
        for name, salt in (("without", f"{number}"), ("with", None)):
            times[name].append(_first_token(llm, {"prompt_token_ids": prompt, "cache_salt": salt}))
    medians = {name: [statistics.median(kind) for kind in zip(*some[1:], strict=True)] for name, some in times.items()}
    for name, (wall, cpu) in medians.items():
        print(f"{name}: {wall * 1e3:.1f} ms wall, {cpu * 1e3:.1f} ms CPU")
    wall, cpu = (a / b for a, b in zip(medians["without"], medians["with"], strict=True))
    hits = _counts(llm) - before
    print(f"{wall:.1f} times less wall, {cpu:.1f} times less CPU")
    print(f"{hits:.0f} tokens copied of {args.rounds * args.system} that requests after the first share")
    return 0


def _counts(llm: LLM) -> float:
    return next(metric.value for metric in llm.get_metrics() if metric.name == "vllm:prefix_cache_hits_total")


def _first_token(llm: LLM, prompt: Any) -> tuple[float, float]:
    began, cpu = time.monotonic(), time.process_time()
    llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    return time.monotonic() - began, time.process_time() - cpu


def main() -> int:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(description="Compares an engine with the prefix cache to one without.")
    parser.add_argument("what", choices=["same", "first-token"])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--method", choices=["none", "ngram", "head", "draft"], default=None)
    parser.add_argument("--length", type=int, default=3, help="speculation length")
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--most-s", type=float, default=1e9, help="seconds after which no further batch begins")
    parser.add_argument("--out", type=Path, default=Path("same.jsonl"))
    parser.add_argument("--system", type=int, default=544, help="tokens of the common prompt")
    parser.add_argument("--question", type=int, default=20)
    parser.add_argument("--rows", type=int, default=1, help="of the engine that is timed")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    args.method = args.method or ("head" if args.model == "demo" else "none")
    return run_same(args) if args.what == "same" else run_first_token(args)


if __name__ == "__main__":
    sys.exit(main())
