"""Turns Python's standard library into the tokens that the demo language model trains and is measured on.

Run ``python lab/demo_corpus.py OUT`` to write tokenizer and token streams into OUT and print statistics.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import platform
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
MODEL_MAX_LENGTH = 2048
SHUFFLE_SEED = 20

# Whole modules without a near copy elsewhere in the library, all with real code and between 5 and 60 kB.
HELD_OUT = (
    "calendar.py",
    "cmd.py",
    "configparser.py",
    "csv.py",
    "fractions.py",
    "heapq.py",
    "queue.py",
    "sched.py",
    "shlex.py",
    "statistics.py",
    "textwrap.py",
)

# Each directory that stays out, with the reason.
EXCLUDED_DIRECTORIES = {
    "test": "assertions over literals, as large as the rest together, and often not installed",
    "tests": "the same, inside packages",
    "idle_test": "the same, for the editor",
    "site-packages": "third-party code, different on every machine",
    "__pycache__": "compiled files",
    "ensurepip": "the packaged installer, changed or removed by distributors",
    "turtledemo": "drawing scripts, mostly coordinates",
}

# Build-time settings of one machine, paths included: the digest would differ between installations of one version.
EXCLUDED_NAMES = re.compile(r"^_sysconfigdata_.*\.py$")

# Generated tables (character maps, help topics, stub lists) have nearly nothing but literals: noise, not code.
MAX_DATA_LINES = 0.55

_LITERAL = re.compile(
    r"""[rRbBuUfF]{0,2}'(?:[^'\\]|\\.)*'|[rRbBuUfF]{0,2}"(?:[^"\\]|\\.)*"|\b0[xX][0-9a-fA-F]+|\b\d[\d_.eEjJ]*|\b(?:None|True|False)\b"""
)
_COMMENT = re.compile(r"#.*")
_NOT_PUNCTUATION = re.compile(r"[^\s\[\](){},:+\-\\]")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '# ' + message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '# assistant:\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class SourceFile:
    """One file: its path below the library's root, with forward slashes, and its text."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """The library's files, split into those trained on and those held out.

    Attributes:
        train: training files, sorted by name, no two with the same content.
        held_out: the files of `HELD_OUT`, in that order; no training file has the same content.
        digest: sha256 over the names and bytes of the training files, in order.
        held_out_digest: the same over the held-out files.
        python_version: the version whose library was read.
        skipped: number of files left out, by reason.
    """

    train: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]
    digest: str
    held_out_digest: str
    python_version: str
    skipped: dict[str, int]

    @property
    def train_bytes(self) -> int:
        """Bytes of all training files."""
        return sum(len(file.text.encode()) for file in self.train)

    @property
    def held_out_bytes(self) -> int:
        """Bytes of all held-out files."""
        return sum(len(file.text.encode()) for file in self.held_out)


@dataclass(frozen=True)
class Prompt:
    """A piece of a held-out file that begins at a line start; encoding `text` gives exactly `token_ids`."""

    name: str
    line: int
    text: str
    token_ids: tuple[int, ...]


def measure_data_lines(text: str) -> float:
    """Returns the fraction of the non-blank lines that hold literals and punctuation only."""
    lines = [line for line in text.splitlines() if line.strip()]
    data = 0
    for line in lines:
        rest, literals = _LITERAL.subn("", line)
        data += literals > 0 and _NOT_PUNCTUATION.search(_COMMENT.sub("", rest)) is None
    return data / max(len(lines), 1)


def collect(root: Path | None = None) -> Corpus:
    """Reads the standard library and splits it.

    Args:
        root: the library's directory; by default that of the running Python.

    Raises:
        ValueError: a module of `HELD_OUT` is missing below `root`, or nothing is left to train on.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else Path(root)
    missing = [name for name in HELD_OUT if not (root / name).is_file()]
    if missing:
        raise ValueError(
            f"{root} lacks the held-out modules {missing}; pass the directory of a complete standard library"
        )
    held_out = tuple(SourceFile(name, (root / name).read_bytes().decode("utf-8")) for name in HELD_OUT)

    seen = {file.text for file in held_out}
    skipped: dict[str, int] = dict.fromkeys(
        ("directory", "machine settings", "not utf-8", "duplicate or empty", "data table"), 0
    )
    train = []
    for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        if name in HELD_OUT:
            continue
        reason, text = _examine(root, name, seen)
        if reason is None:
            seen.add(text)
            train.append(SourceFile(name, text))
        else:
            skipped[reason] += 1
    if not train:
        raise ValueError(
            f"{root} has no .py files to train on besides the held-out ones; pass a standard library's directory"
        )
    return Corpus(tuple(train), held_out, _digest(train), _digest(held_out), platform.python_version(), skipped)


def _examine(root: Path, name: str, seen: set[str]) -> tuple[str | None, str]:
    *directories, leaf = name.split("/")
    if not EXCLUDED_DIRECTORIES.keys().isdisjoint(directories):
        return "directory", ""
    if EXCLUDED_NAMES.match(leaf):
        return "machine settings", ""
    try:
        text = (root / name).read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return "not utf-8", ""
    if not text.strip() or text in seen:
        return "duplicate or empty", ""
    if measure_data_lines(text) > MAX_DATA_LINES:
        return "data table", ""
    return None, text


def _digest(files) -> str:
    digest = hashlib.sha256()
    for file in files:
        data = file.text.encode()
        digest.update(f"{file.name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def train_tokenizer(corpus: Corpus, out_dir: Path, vocab_size: int = 4096) -> Tokenizer:
    """Trains a byte-level BPE on the training files and writes it as a Hugging Face tokenizer directory.

    The GPT-2 pattern already makes a newline and its indentation one token (less the next word's space), and
    every reader of such files knows it.

    Args:
        corpus: the files; the held-out ones are not looked at.
        out_dir: receives tokenizer.json, tokenizer_config.json and special_tokens_map.json.
        vocab_size: number of tokens; at least 257 (every byte and the end-of-text token), at most 65536 (uint16).

    Raises:
        ValueError: `vocab_size` is outside those bounds.
    """
    if not 257 <= vocab_size <= 65536:
        raise ValueError(
            f"vocab_size is {vocab_size}; it must lie in 257..65536, all bytes and one special token to uint16"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[AddedToken(END_OF_TEXT, special=True, normalized=False)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator((file.text for file in corpus.train), trainer, length=len(corpus.train))

    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out_dir / "tokenizer.json"))
    special = {f"{role}_token": END_OF_TEXT for role in ("bos", "eos", "pad")}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MODEL_MAX_LENGTH,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        **special,
    }
    _write_json(out_dir / "tokenizer_config.json", config)
    _write_json(out_dir / "special_tokens_map.json", special)
    return tokenizer


def encode(corpus: Corpus, tokenizer_dir: Path, out_dir: Path) -> dict:
    """Writes the token streams train.npy and held_out.npy (uint16) and their description corpus.json.

    Each file is preceded by the end-of-text token; the files' order is shuffled by a fixed seed.

    Returns:
        What corpus.json holds: digests, version, counts, and for each held-out file its end-of-text token's offset.
    """
    tokenizer = load_tokenizer(tokenizer_dir)
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    record: dict = {
        "python_version": corpus.python_version,
        "digest": corpus.digest,
        "held_out_digest": corpus.held_out_digest,
        "tokenizer_digest": hashlib.sha256((Path(tokenizer_dir) / "tokenizer.json").read_bytes()).hexdigest(),
        "vocab_size": tokenizer.get_vocab_size(),
        "end_of_text_id": END_OF_TEXT_ID,
        "skipped": corpus.skipped,
    }
    for split, files, size_bytes in (
        ("train", corpus.train, corpus.train_bytes),
        ("held_out", corpus.held_out, corpus.held_out_bytes),
    ):
        tokens, offsets = _join(tokenizer, files)
        np.save(out_dir / f"{split}.npy", tokens)
        record[split] = {"files": len(files), "bytes": size_bytes, "tokens": len(tokens)}
        record[split]["bytes_per_token"] = round(size_bytes / (len(tokens) - len(files)), 4)
    record["held_out"]["token_offsets"] = offsets
    _write_json(out_dir / "corpus.json", record)
    return record


def _join(tokenizer: Tokenizer, files: tuple[SourceFile, ...]) -> tuple[np.ndarray, dict[str, int]]:
    order = np.random.default_rng(SHUFFLE_SEED).permutation(len(files))
    shuffled = [files[index] for index in order]
    pieces, offsets, total = [], {}, 0
    for file, encoding in zip(shuffled, tokenizer.encode_batch_fast([file.text for file in shuffled]), strict=True):
        offsets[file.name] = total
        pieces.append(np.array([END_OF_TEXT_ID, *encoding.ids], dtype=np.uint16))
        total += len(pieces[-1])
    return np.concatenate(pieces), offsets


def load_tokenizer(tokenizer_dir: Path) -> Tokenizer:
    """Reads tokenizer.json of a directory that `train_tokenizer` wrote."""
    return Tokenizer.from_file(str(Path(tokenizer_dir) / "tokenizer.json"))


def batch(tokens: np.ndarray, *, step: int, batch_size: int, length: int, seed: int) -> np.ndarray:
    """Returns the training batch of one step, a pure function of its arguments.

    An epoch is a shuffle of windows that start `length` apart, from a random phase; each window's last token is
    only predicted, and is the next window's first. A batch may span two epochs.

    Args:
        tokens: the stream, [stream length], in memory or memory-mapped.
        step: optimizer step, from 0.
        batch_size: rows.
        length: positions predicted per row.
        seed: of the epochs' phases and shuffles.

    Returns:
        int32 [batch_size, length + 1]: inputs are [:, :-1], labels [:, 1:].

    Raises:
        ValueError: the stream is shorter than one window at every phase, or `step` is negative.
    """
    windows = (len(tokens) - length) // length
    if windows < 1 or step < 0:
        raise ValueError(
            f"got {len(tokens)} tokens at step {step}; need at least {2 * length} tokens and a step from 0 on"
        )
    rows = np.empty((batch_size, length + 1), dtype=np.int32)
    for row in range(batch_size):
        epoch, index = divmod(step * batch_size + row, windows)
        phase, order = _plan_epoch(seed, epoch, windows, length)
        start = phase + int(order[index]) * length
        rows[row] = tokens[start : start + length + 1]
    return rows


@functools.lru_cache(maxsize=4)
def _plan_epoch(seed: int, epoch: int, windows: int, length: int) -> tuple[int, np.ndarray]:
    rng = np.random.default_rng((seed, epoch))
    return int(rng.integers(length)), rng.permutation(windows)


def held_out_prompts(corpus: Corpus, tokenizer_dir: Path, count: int, prompt_tokens: int, seed: int) -> list[Prompt]:
    """Cuts prompts from the held-out files, spread evenly over the files and over the positions within each.

    Args:
        corpus: the files.
        tokenizer_dir: what `train_tokenizer` wrote.
        count: number of prompts, all with different starts.
        prompt_tokens: tokens per prompt, exactly; no end-of-text token is among them.
        seed: of the choice within each stretch of lines, and of the prompts' order.

    Returns:
        The prompts in shuffled order, so that any first few of them are spread over the files too.

    Raises:
        ValueError: the held-out files have too few lines for that many prompts of that length.
    """
    tokenizer = load_tokenizer(tokenizer_dir)
    rng = np.random.default_rng(seed)
    prompts: list[Prompt] = []
    for index, file in enumerate(corpus.held_out):
        wanted = (index + 1) * count // len(corpus.held_out) - index * count // len(corpus.held_out)
        cut = _cut_prompts(tokenizer, file, wanted, prompt_tokens, rng)
        if len(cut) < wanted:
            raise ValueError(
                f"{file.name} gives {len(cut)} of {wanted} prompts of {prompt_tokens} tokens; ask for less"
            )
        prompts += cut
    return [prompts[index] for index in rng.permutation(len(prompts))]


def _cut_prompts(tokenizer: Tokenizer, file: SourceFile, wanted: int, prompt_tokens: int, rng) -> list[Prompt]:
    if wanted == 0:
        return []
    lines = file.text.split("\n")
    starts = np.cumsum([0] + [len(line) + 1 for line in lines[:-1]])
    candidates = [
        (number, int(start)) for number, (line, start) in enumerate(zip(lines, starts, strict=True), 1) if line.strip()
    ]
    cuts = {number: _cut(tokenizer, file.text[start:], prompt_tokens) for number, start in candidates}
    eligible = {number: cut for number, cut in cuts.items() if cut is not None}
    wanted = min(wanted, len(eligible))
    chosen = [int(rng.choice(stretch)) for stretch in np.array_split(list(eligible), wanted)] if wanted else []
    return [Prompt(file.name, number, *eligible[number]) for number in chosen]


def _cut(tokenizer: Tokenizer, text: str, prompt_tokens: int) -> tuple[str, tuple[int, ...]] | None:
    # 16 characters per token are far more than any text needs; without a limit each cut encodes the whole rest.
    ids = tokenizer.encode(text[: 16 * prompt_tokens]).ids[:prompt_tokens]
    prompt = tokenizer.decode(ids, skip_special_tokens=False)
    # A cut inside a word may encode differently than the whole did; such a prompt would be two different ones.
    whole = len(ids) == prompt_tokens and tokenizer.encode(prompt).ids == ids
    return (prompt, tuple(ids)) if whole else None


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Collects, trains, encodes, and prints what came out."""
    parser = argparse.ArgumentParser(description="The demo corpus and its tokenizer.")
    parser.add_argument("out", type=Path, help="directory that receives the tokenizer and the token streams")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--root", type=Path, default=None, help="a standard library other than the running Python's")
    arguments = parser.parse_args()
    corpus = collect(arguments.root)
    train_tokenizer(corpus, arguments.out, arguments.vocab_size)
    print(json.dumps(encode(corpus, arguments.out, arguments.out), indent=2))


if __name__ == "__main__":
    main()
