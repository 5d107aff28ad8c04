"""Cuts the demo's prompts from held-out modules of Python's standard library, where code is about to follow.

Run ``python lab/make_demo_prompts.py``; the tokenizer of the demo's target must be there.
"""

import argparse
import ast
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from demo_corpus import SourceFile, collect, load_tokenizer
from tokenizers import Tokenizer

DEMO = Path(__file__).parent.parent / "jaxspec" / "demo_model"
LEAST, MOST = 64, 160


def natural_cuts(file: SourceFile) -> Iterator[int]:
    """Yields line counts after which code follows: after signature and docstring, and halfway down long bodies."""
    for node in ast.walk(ast.parse(file.text)):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or len(node.body) < 2:
            continue
        docstring = ast.get_docstring(node, clean=False) is not None
        start = node.body[1] if docstring else node.body[0]
        # What stands between the cut and the body (comments, decorators) would be part of neither.
        yield (node.body[0].end_lineno or 0) if docstring else start.lineno - 1
        if len(node.body) > 5:
            yield node.body[len(node.body) // 2].end_lineno or 0


def cut(tokenizer: Tokenizer, file: SourceFile, end: int, tokens: int) -> dict | None:
    """The lines before ``end`` that ``tokens`` allow; None if too few or if they start inside a string."""
    lines = file.text.splitlines(keepends=True)
    best = None
    for first in range(end - 1, -1, -1):
        # Without the last newline: the tokenizer joins it with the indentation that is to be generated.
        text = "".join(lines[first:end]).rstrip("\n")
        size = len(tokenizer.encode(text).ids)
        if size > tokens:
            break
        if size >= LEAST and lines[first].strip() and (first == 0 or not lines[first - 1].strip()):
            best = {"file": file.name, "line": first + 1, "prompt": text}
    whole = best is not None and all(best["prompt"].count(quotes) % 2 == 0 for quotes in ('"""', "'''"))
    return best if whole else None


def make_prompts(tokenizer: Tokenizer, files: tuple[SourceFile, ...], count: int, seed: int) -> list[dict]:
    """About ``count`` prompts that do not overlap, the same number from each file, in shuffled order."""
    rng = np.random.default_rng(seed)
    by_file: list[list[dict]] = []
    for file in files:
        prompts: list[dict] = []
        ends = sorted(set(natural_cuts(file)))
        for end in (ends[i] for i in rng.permutation(len(ends))):
            prompt = cut(tokenizer, file, end, int(rng.integers(LEAST + 32, MOST + 1)))
            if prompt is not None and not any(overlap(prompt, other) for other in prompts):
                prompts.append(prompt)
        by_file.append(prompts)
    rounds = [prompts[i] for i in range(count) for prompts in by_file if i < len(prompts)][:count]
    return [rounds[i] for i in rng.permutation(len(rounds))]


def overlap(a: dict, b: dict) -> bool:
    """Whether two prompts of one file share lines."""
    return a["line"] < b["line"] + b["prompt"].count("\n") + 1 and b["line"] < a["line"] + a["prompt"].count("\n") + 1


def main() -> None:
    """Writes the prompts."""
    parser = argparse.ArgumentParser(description="Cuts the demo's prompts.")
    parser.add_argument("--tokenizer", type=Path, default=DEMO / "target")
    parser.add_argument("--out", type=Path, default=DEMO / "held_out_prompts.json")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.tokenizer)
    prompts = make_prompts(tokenizer, collect().held_out, arguments.count, arguments.seed)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(prompts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sizes = sorted(len(tokenizer.encode(prompt["prompt"]).ids) for prompt in prompts)
    print(f"{len(prompts)} prompts of {sizes[0]} to {sizes[-1]} tokens in {arguments.out}")


if __name__ == "__main__":
    main()
