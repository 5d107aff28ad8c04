"""Measures what a float8 KV cache costs a real model: log-probabilities of texts that it wrote, with both caches.

Run ``python -m lab.measure_cache_dtype [--model smollm2-moe] [--prompts 8] [--tokens 128]``: per workload, how much
less likely the answers to so many prompts are, and how many of their tokens are no longer the likeliest.
"""

import argparse
import json
import statistics
from typing import Any

from jaxspec import LLM, SamplingParams
from jaxspec.bench.workload import OWN


def main() -> None:
    """Prints one line per kind of text, and one of all."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", default="smollm2-moe")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    sizes: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 4, "max_logprobs": 0, "use_tqdm_on_load": False}
    plain = LLM(args.model, **sizes)
    half = LLM(plain.model, kv_cache_dtype="fp8", **sizes)
    params = SamplingParams(temperature=0, max_tokens=args.tokens)
    all_of: list[tuple[float, bool]] = []
    for file in sorted(OWN.glob("*.jsonl")):
        prompts = [json.loads(line) for line in file.read_text().splitlines()[: args.prompts]]
        outputs = plain.generate(prompts, params, use_tqdm=False)
        texts = [o.prompt_token_ids + o.outputs[0].token_ids for o in outputs]
        starts = [len(o.prompt_token_ids) for o in outputs]
        losses: list[tuple[float, bool]] = []
        for start, ours, theirs in zip(starts, plain.score(texts), half.score(texts), strict=True):
            pairs = zip(ours[start:], theirs[start:], strict=True)
            losses += [(a.logprob - b.logprob, b.rank == 1) for a, b in pairs if a is not None and b is not None]
        print_line(file.stem, losses)
        all_of += losses
    print_line("all", all_of)


def print_line(name: str, losses: list[tuple[float, bool]]) -> None:
    """Prints the mean loss of log-probability with its standard error, and the share of tokens that stay likeliest."""
    lost = [x for x, _ in losses]
    error = statistics.stdev(lost) / len(lost) ** 0.5
    same = statistics.mean(first for _, first in losses)
    print(f"{name:14} {len(lost):6} tokens: {statistics.mean(lost):+.4f} +- {error:.4f} nats, {same:.2%} likeliest")


if __name__ == "__main__":
    main()
