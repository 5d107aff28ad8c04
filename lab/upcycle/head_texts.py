"""Writes the texts that the mixture's draft head learns from, as tokens: what the mixture wrote.

Run ``python -m lab.upcycle.head_texts OUT OWN [OWN ...]``, the others being what ``lab.upcycle.train`` and
``lab.upcycle.write_own`` left; one text of so many is held out to choose the best head by.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from jaxspec.serve.upcycled_model import upcycled_model_dir
from lab.upcycle.documents import number
from lab.upcycle.tokens import SYSTEM

HELD_OUT = 40


def own(file: Path, kind: str) -> Iterator[tuple[list[int], int]]:
    """Yields texts of the mixture, and the length of the prompt of each."""
    with np.load(file) as arrays:
        if kind not in arrays:
            return
        ids, lengths, prompts = (arrays[kind + part] for part in ("", "_lengths", "_prompts"))
    ends = np.cumsum(lengths.astype(np.int64))
    for begin, end, prompt in zip(ends - lengths, ends, prompts, strict=True):
        yield ids[begin:end].tolist(), int(prompt)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("own", type=Path, nargs="+")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(upcycled_model_dir() / "tokenizer.json"))
    # Prompts teach, too, but for what all chats begin with.
    system = len(tokenizer.encode(SYSTEM, add_special_tokens=False).ids)
    texts: dict[str, list[tuple[list[int], int]]] = {"train": [], "held_out": []}
    for file, (kind, known) in product(args.own, (("chats", system), ("code", 0))):
        for index, (ids, _) in enumerate(own(file, kind)):
            texts["train" if index % HELD_OUT else "held_out"].append((ids, known))
    for name, some in texts.items():
        some.sort(key=lambda item: number(str(item[0])))
        lines = [json.dumps({"token_ids": ids, "prompt_length": prompt}) + "\n" for ids, prompt in some]
        (args.out / f"{name}.jsonl").write_text("".join(lines))
        print(name, len(some), "documents", sum(len(ids) for ids, _ in some), "tokens")


if __name__ == "__main__":
    main()
