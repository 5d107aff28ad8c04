"""Turns texts into streams of tokens, and streams into rows."""

import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from lab.upcycle.documents import Document, number

END = 0
HELD_OUT_ROWS = 96
LONGEST = 4096
"""Most tokens of one held-out document."""

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


def load_tokenizer(texts: Path) -> Tokenizer:
    """Loads the carried tokenizer."""
    return Tokenizer.from_str(lzma.decompress((texts / "tokenizer.xz").read_bytes()).decode())


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Returns the tokens of texts."""
    batch = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.asarray(encoding.ids, np.uint16) for encoding in batch]


def stream(tokenizer: Tokenizer, documents: Sequence[Document], most: int) -> np.ndarray:
    """Joins documents in the order of their names' numbers, each with an end, up to about ``most`` tokens."""
    ordered = sorted(documents, key=lambda document: number(document.name))
    pieces, total = [np.zeros(0, np.uint16)], 0
    for first in range(0, len(ordered), 2048):
        for ids in encode(tokenizer, [document.text for document in ordered[first : first + 2048]]):
            pieces += [ids, np.array([END], np.uint16)]
            total += len(ids) + 1
        if total >= most:
            break
    return np.concatenate(pieces)


def held_out(tokenizer: Tokenizer, documents: Sequence[Document], length: int) -> np.ndarray:
    """Returns rows [N, length + 1] of the beginnings of documents, in turn of the packages that they are from."""
    turns: dict[str, int] = {}
    order = []
    for document in sorted(documents, key=lambda document: number(document.name)):
        package = document.name.split("/")[0]
        turns[package] = turns.get(package, -1) + 1
        order.append((turns[package], package, document))
    few = [document for *_, document in sorted(order, key=lambda item: item[:2])][: 16 * HELD_OUT_ROWS]
    ids = [tokens[:LONGEST] for tokens in encode(tokenizer, [document.text for document in few])]
    return rows(np.concatenate([np.append(tokens, np.uint16(END)) for tokens in ids]), length)[:HELD_OUT_ROWS]


def rows(tokens: np.ndarray, length: int) -> np.ndarray:
    """Cuts a stream into rows of ``length + 1`` that overlap by one token; the rows are a view."""
    return np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]


def shuffled(tokens: np.ndarray, length: int, count: int, seed: int) -> Iterator[np.ndarray]:
    """Yields ``count`` rows at a time without end, every pass in another order and from another place."""
    rng = np.random.default_rng(seed)
    waiting: list[np.ndarray] = []
    while True:
        while len(waiting) < count:
            again = rows(tokens[rng.integers(length) :], length)
            waiting += [again[index] for index in rng.permutation(len(again))]
        yield np.stack(waiting[:count])
        del waiting[:count]


def asked(question: str) -> str:
    """Writes a chat up to where the model answers."""
    return f"{SYSTEM}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def said(talk: Sequence[str]) -> str:
    """Writes a whole chat, the user speaking first."""
    turns = [f"<|im_start|>{('user', 'assistant')[i % 2]}\n{line}<|im_end|>\n" for i, line in enumerate(talk)]
    return SYSTEM + "".join(turns)
