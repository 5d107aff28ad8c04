"""Makes what the demo pair learns from: simple Python out of what is installed, and a tokenizer for it."""

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from lab.pair.simple_python import common_names, functions, identifiers, simplify
from lab.upcycle.documents import Document, number, packages, read

END = "<|endoftext|>"
NAMES = 224
MODEL_MAX_LENGTH = 2048
HELD_OUT = (
    "calendar", "cmd", "configparser", "csv", "fractions", "heapq", "queue", "sched", "shlex", "statistics", "textwrap",
)  # fmt: skip
"""Modules of the standard library that nothing is trained on."""
TESTS = ("test", "conftest", "lib2to3", "_vendor", "pygments/lexers/_")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '# ' + message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '# assistant:\\n' }}{% endif %}"
)


def documents() -> dict[str, list[Document]]:
    """Returns the files of permissive packages and of the standard library, those of ``HELD_OUT`` apart."""
    sets: dict[str, list[Document]] = {"held_out": [], "train": []}
    held = {f"python/{name}.py" for name in HELD_OUT}
    for files in packages().values():
        for name, path in files:
            if not any(part in name for part in TESTS) and (text := read(path)):
                sets["held_out" if name in held else "train"].append(Document(name, text))
    return {kind: sorted(files, key=lambda document: number(document.name)) for kind, files in sets.items()}


def simple(files: Iterable[Document], names: list[str], seen: set[str]) -> list[Document]:
    """Returns every file's simple functions, two empty lines between them, without those seen before."""
    texts = []
    for file in files:
        new = []
        for function in functions(file.text):
            text = simplify(function, names)
            if text and text not in seen:
                seen.add(text)
                new.append(text)
        if new:
            texts.append(Document(file.name, "\n\n".join(new)))
    return texts


def train_tokenizer(texts: list[Document], out: Path, vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE and writes it as a Hugging Face tokenizer directory."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[AddedToken(END, special=True, normalized=False)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator((document.text for document in texts), trainer)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    special = {f"{role}_token": END for role in ("bos", "eos", "pad")}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MODEL_MAX_LENGTH,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        **special,
    }
    write_json(out / "tokenizer_config.json", config)
    write_json(out / "special_tokens_map.json", special)
    return tokenizer


def write_json(path: Path, value: Any) -> None:
    """Writes JSON for people."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def prepare(data: Path, vocab_size: int) -> None:
    """Writes tokenizer, token streams (each file begins with the end of text), texts and ``corpus.json``, once."""
    if (data / "corpus.json").exists():
        return
    data.mkdir(parents=True, exist_ok=True)
    files = documents()
    counts: Counter[str] = Counter()
    for file in files["train"]:
        if file.name.startswith("python/"):
            counts.update(name for function in functions(file.text) for name in identifiers(function))
    names, seen = common_names(counts, NAMES), set[str]()
    sets = {kind: simple(some, names, seen) for kind, some in files.items()}
    tokenizer = train_tokenizer(sets["train"], data, vocab_size)
    about: dict[str, Any] = {"python_version": platform.python_version(), "names": names}
    for kind, texts in sets.items():
        pieces = [np.array([0, *tokenizer.encode(document.text).ids], np.uint16) for document in texts]
        whole = "\0".join(document.text for document in texts).encode()
        np.save(data / f"{kind}.npy", np.concatenate(pieces))
        write_json(data / f"{kind}.json", {document.name: document.text for document in texts})
        about[kind] = {
            "sha256": hashlib.sha256(whole).hexdigest(),
            "files": len(texts),
            "bytes": len(whole),
            "tokens": sum(map(len, pieces)),
        }
    read_from = Counter(document.name.split("/")[0] for document in sets["train"])
    write_json(data / "corpus.json", about | {"files_of": dict(sorted(read_from.items()))})


def batch(tokens: np.ndarray, step: int, count: int, length: int, seed: int) -> np.ndarray:
    """Returns rows [count, length + 1] of one update, a pure function of its arguments.

    An epoch is a shuffle of windows that start ``length`` apart, from a random phase.
    """
    windows = (len(tokens) - length) // length
    picks = [divmod(step * count + row, windows) for row in range(count)]
    plans = {epoch: np.random.default_rng((seed, epoch)) for epoch, _ in picks}
    starts = {e: (int(rng.integers(length)), rng.permutation(windows)) for e, rng in plans.items()}
    at = [starts[epoch][0] + int(starts[epoch][1][index]) * length for epoch, index in picks]
    return np.stack([tokens[first : first + length + 1] for first in at]).astype(np.int32)
