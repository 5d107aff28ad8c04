"""What the tests of batch jobs share: settings, mixed prompts, and a job in a directory of its own."""

import json
from pathlib import Path
from typing import Any

from jaxspec.serve.job import Progress, run_job
from jaxspec.serve.llm import LLM

ENGINE = {"max_model_len": 48, "prefill_buckets": (16,), "max_logprobs": 2, "steps_per_dispatch": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
SAMPLING = {"max_tokens": 6}
MIXED: list[dict[str, Any]] = [
    {"prompt": "the cat"},
    {"prompt": "hello world", "custom_id": "greedy", "temperature": 0.0, "max_completion_tokens": 9},
    {"prompt_token_ids": [5, 6, 7, 5, 6], "seed": 3, "max_tokens": 12},
    {"messages": [{"role": "user", "content": "hello"}], "n": 2},
    {"prompt": "one two", "n": 3, "temperature": 0.7, "top_p": 0.9},
    {"prompt": "a mat", "custom_id": "short", "max_tokens": 1},
    {"prompt": "a"},
    {"prompt_token_ids": [9] * 30},
    {"prompt": "a"},
]


class Desk:
    """One job in a directory of its own."""

    def __init__(self, folder: Path, model: Path, llm: LLM):
        self.source, self.target = folder / "in.jsonl", folder / "out.jsonl"
        self.model, self.llm, self.loads = model, llm, 0

    def write(self, *lines: dict | bytes) -> None:
        self.source.write_bytes(
            b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines)
        )

    def run(self, *lines: dict | bytes, llm: LLM | None = None, **settings: Any) -> Progress:
        if lines:
            self.write(*lines)

        def load(*args: Any, **keywords: Any) -> LLM:
            self.loads += 1
            return llm or self.llm

        settings = {"engine": ENGINE, "sampling": SAMPLING, "load": load} | settings
        return run_job(self.model, str(self.source), str(self.target), **settings)

    def records(self) -> list[dict[str, Any]]:
        return sorted((json.loads(line) for line in self.target.read_bytes().splitlines()), key=lambda r: r["index"])


def said(records: list[dict[str, Any]]) -> list[tuple]:
    """What must not depend on how a job was run."""
    return [
        (
            r["index"],
            r.get("custom_id"),
            [(o["text"], o["token_ids"], o["finish_reason"]) for o in r.get("outputs", [r])],
        )
        for r in records
    ]
