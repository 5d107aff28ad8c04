"""Cuts the prompts of the package out of modules that nothing was trained on, where code is about to follow."""

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from lab.pair.corpus import write_json

LEAST, MOST = 48, 128


def cuts(tokenizer: Tokenizer, name: str, text: str) -> list[dict]:
    """Returns what precedes the bodies of a module's functions: the signature, and functions before it."""
    prompts, lines = [], text.split("\n")
    starts = [number for number, line in enumerate(lines) if line.startswith("def ")]
    last = 0
    for index, end in enumerate(starts):
        # Without the last newline: the tokenizer joins it with the indentation that is to be generated.
        texts = {first: "\n".join(lines[first : end + 1]) for first in starts[: index + 1] if first >= last}
        sizes = {first: len(tokenizer.encode(part).ids) for first, part in texts.items()}
        first = next((first for first, size in sizes.items() if LEAST <= size <= MOST), None)
        if first is not None:
            prompts.append({"file": name, "line": first + 1, "prompt": texts[first]})
            last = end + 1
    return prompts


def write(data: Path, out: Path, count: int = 32, seed: int = 1) -> None:
    """Writes ``count`` excerpts that do not overlap, as many from each module as there are, in shuffled order."""
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    rng, modules = np.random.default_rng(seed), json.loads((data / "held_out.json").read_text())
    by_module = []
    for name, text in sorted(modules.items()):
        prompts = cuts(tokenizer, name.removeprefix("python/"), text)
        by_module.append([prompts[i] for i in rng.permutation(len(prompts))])
    rounds = [prompts[i] for i in range(count) for prompts in by_module if i < len(prompts)][:count]
    write_json(out, [rounds[i] for i in rng.permutation(len(rounds))])
