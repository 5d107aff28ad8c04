"""Counts texts that do not fit their grammar, or that speculation changes, over many schemas: none may.

Run ``python -m lab.check_grammars --model demo --draft demo --record grammars.jsonl``; the same command
goes on after an end. It exits with 1 if a text that was not cut does not fit, or differs from plain decoding's.
``--speed 48`` times so many schemas instead, beside the same prompts without grammars.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.errors import RequestError
from jaxspec.serve.demo_pair import resolve_speculation
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import RequestOutput, SamplingParams
from jaxspec.serve.structured_outputs import StructuredOutputsParams
from lab.grammar_schemas import Form, make_schema

PLAIN = "plain"
TEMPERATURES = (0.0, 1.0)
ROWS, BATCH, NEIGHBORS = 8, 24, 4  # every fourth request has no grammar


def speculations(draft: str | None) -> dict[str, Mapping[str, Any] | None]:
    """Returns what is compared, plain decoding first."""
    some: dict[str, Mapping[str, Any] | None] = {
        PLAIN: None,
        "n-gram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
        "n-gram tree": {"method": "ngram", "speculative_token_tree": [2, 2], "prompt_lookup_min": 1},
    }
    if draft is not None:
        some["head"] = {"method": "shared_expert", "model": draft, "num_speculative_tokens": 4}
        some["head tree"] = {"method": "shared_expert", "model": draft, "speculative_token_tree": [2, 2, 1]}
    return {name: resolve_speculation(config) for name, config in some.items()}


def params_of(number: int, form: Form | None, temperature: float, most: int) -> SamplingParams:
    """Returns the settings of one request; JSON has white space in every other one."""
    wanted = None
    if form is not None:
        wanted = StructuredOutputsParams(json=form.schema, disable_any_whitespace=number % 2 == 0)
    return SamplingParams(temperature=temperature, seed=number, max_tokens=most, structured_outputs=wanted)


def run(llm: LLM, numbers: list[int], most: int) -> list[dict[str, Any]]:
    """Runs schemas at all temperatures, with neighbors that have none."""
    results = []
    for temperature in TEMPERATURES:
        forms = [make_schema(number) if number % NEIGHBORS else None for number in numbers]
        sound, params = [], []
        for number, form in zip(numbers, forms, strict=True):
            setting = params_of(number, form, temperature, most)
            try:
                llm.prompts.request("x", setting)
            except RequestError as error:
                results.append({"schema": number, "temperature": temperature, "outcome": "refused", "why": str(error)})
                continue
            sound.append((number, form))
            params.append(setting)
        began = time.monotonic()
        outputs = llm.generate([f"# record {number}\nrecord = " for number, _ in sound], params, use_tqdm=False)
        time_s = (time.monotonic() - began) / max(sum(len(o.outputs[0].token_ids) for o in outputs), 1)
        for (number, form), output in zip(sound, outputs, strict=True):
            results.append(
                {
                    "schema": number,
                    "temperature": temperature,
                    "outcome": outcome_of(form, output),
                    "s_per_token": time_s,
                }
                | {"ids": output.outputs[0].token_ids, "steps": output.metrics.num_steps}
            )
    return results


def measure_speed(engines: Mapping[str, LLM], schemas: int, most: int) -> None:
    """Prints tokens per second with grammars and without, greedy, and what speculation gains; the median of 5 turns."""
    prompts = [f"# record {number}\nrecord = " for number in range(schemas)]
    kinds: dict[str, list[SamplingParams]] = {"with grammars": [], "without": []}
    for number in range(schemas):
        kinds["with grammars"].append(params_of(number, make_schema(number), 0.0, most))
        kinds["without"].append(SamplingParams(temperature=0.0, max_tokens=most))
    rates: dict[tuple[str, str], list[float]] = {}
    for turn in range(6):
        for name, llm in engines.items():
            for kind, params in kinds.items():
                began = time.monotonic()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
                if turn:  # the first compiles
                    rates.setdefault((kind, name), []).append(tokens / (time.monotonic() - began))
    for kind in kinds:
        plain = rates[kind, PLAIN]
        for name in engines:
            gains = [a / b for a, b in zip(rates[kind, name], plain, strict=True)]
            rate, gain = statistics.median(rates[kind, name]), statistics.median(gains)
            sys.stdout.write(f"{kind:14} {name:12} {rate:7.0f} tokens/s, {gain:.2f} of plain\n")


def outcome_of(form: Form | None, output: RequestOutput) -> str:
    """Returns what became of a text."""
    c = output.outputs[0]
    if c.finish_reason == "error":
        return "error"
    if form is None:
        return "free"
    if c.finish_reason == "length":
        return "cut"
    try:
        return "valid" if form.accepts(json.loads(c.text)) else "invalid"
    except ValueError:
        return "invalid"


def read_record(path: Path) -> list[dict[str, Any]]:
    """Returns the results of earlier runs, without half a line of one that was killed."""
    results = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            results.append(json.loads(line))
        except ValueError:
            break
    return results


def summarize(results: list[dict[str, Any]]) -> bool:
    """Prints outcomes by speculation; returns whether all is well."""
    plain = {(r["schema"], r["temperature"]): r.get("ids") for r in results if r["name"] == PLAIN}
    well = True
    for name in dict.fromkeys(r["name"] for r in results):
        mine = [r for r in results if r["name"] == name]
        counts = Counter(r["outcome"] for r in mine)
        compared = [r for r in mine if (r["schema"], r["temperature"]) in plain and "ids" in r]
        changed = sum(plain[r["schema"], r["temperature"]] != r["ids"] for r in compared)
        limited = [r for r in mine if r["outcome"] in ("valid", "cut")]
        length = sum(len(r["ids"]) for r in limited) / max(sum(r["steps"] for r in limited), 1)
        sys.stdout.write(f"{name:12} {dict(counts)}, other texts than plain: {changed} of {len(compared)}, ")
        sys.stdout.write(f"{length:.2f} tokens per step\n")
        well &= not changed and not counts["invalid"] and not counts["error"]
    return well


def engine(model: str, config: Mapping[str, Any] | None) -> LLM:
    """Returns an engine with this speculation."""
    return LLM(model, speculative_config=config, max_num_seqs=ROWS, max_model_len=256)


def main() -> None:
    """Runs what is left, and counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft", help="head for --model; none leaves heads out")
    parser.add_argument("--record", type=Path, default=Path("grammars.jsonl"))
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--speed", type=int, help="time so many schemas instead")
    parser.add_argument("--only", nargs="*", help="names of speculations")
    options = parser.parse_args()
    if options.speed:
        ways = speculations(options.draft).items()
        measure_speed({name: engine(options.model, config) for name, config in ways}, options.speed, options.max_tokens)
        return
    results = read_record(options.record)
    done = {(r["name"], r["schema"]) for r in results}
    with options.record.open("w") as file:
        file.writelines(json.dumps(result) + "\n" for result in results)
    for name, config in speculations(options.draft).items():
        left = [n for n in range(options.schemas) if (name, n) not in done]
        if not left or (options.only and name not in options.only):
            continue
        llm = engine(options.model, config)
        for start in range(0, len(left), BATCH):
            lines = [{"name": name, **r} for r in run(llm, left[start : start + BATCH], options.max_tokens)]
            with options.record.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
            results += lines
    sys.exit(0 if summarize(results) else 1)


if __name__ == "__main__":
    main()
