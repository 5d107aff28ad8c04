"""Training data: documents within the limit, held-out ones, and batches in an order of their own."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grain
import numpy as np

from jaxspec.checkpoint.text.codec import Text
from jaxspec.errors import ConfigError
from jaxspec.train.batch import Batch
from jaxspec.train.packed_rows import PackedRows, RowSource
from jaxspec.train.settings import DataSettings
from jaxspec.train.sources import Document, DocumentReader

NAMED = 8
PASSES = 1 << 32  # over the data; without an end grain cannot count batches of one row


@dataclass(frozen=True)
class Corpus:
    """Everything that was read: rows to train on, held-out documents, and counts of what became of all documents."""

    rows: PackedRows
    held_out: tuple[Document, ...]
    counts: dict[str, int]

    def token_counts(self, vocab_size: int) -> np.ndarray:
        """Counts how often each token is trained on, int64 [V]."""
        return token_counts(self.rows.documents, vocab_size)

    def digest(self) -> str:
        """Returns a digest of what is trained on, in its order."""
        digest = hashlib.sha256(f"{self.rows.length} {self.rows.rows}".encode())
        for document in (*self.rows.documents, *self.held_out):
            digest.update(document.token_T.tobytes() + document.loss_T.tobytes())
        return digest.hexdigest()[:32]


def token_counts(documents: Sequence[Document], vocab_size: int) -> np.ndarray:
    """Counts how often each token of documents is trained on, int64 [V]."""
    count_V = np.zeros(vocab_size, np.int64)
    for document in documents:
        count_V += np.bincount(document.token_T[document.loss_T], minlength=vocab_size)
    return count_V


def load_corpus(
    settings: DataSettings, text: Text | None, vocab_size: int, *, alone: bool = False, target: str | None = None
) -> Corpus:
    """Reads, cuts, splits and packs documents.

    Args:
      settings: files and limits.
      text: the target's tokenizer, None if it has none.
      vocab_size: V of the target.
      alone: whether every document gets a row of its own, see ``ArchSpec.one_text_only``.
      target: fingerprint of the target, whose token ids files must hold; None is not compared.

    Raises:
      ConfigError: a file or line is not usable, a conversation is too long, or nothing is left to train on.
    """
    counts: Counter[str] = Counter()
    train = _documents(settings, settings.train, DocumentReader(text, vocab_size, settings.template, target), counts)
    reader = DocumentReader(text, vocab_size, settings.template, target)
    held_out = _documents(settings, settings.held_out, reader, Counter())
    if settings.held_out_fraction and not settings.held_out:
        train, held_out = split(train, settings.held_out_fraction)
    if not train:
        raise ConfigError(
            f"data: nothing to train on in {', '.join(settings.train)}; "
            f"{_listed(counts) or 'the files are empty'}; no token of an answer is left"
        )
    rows = PackedRows(train, settings.length, settings.window, alone=alone)
    sizes = {
        "rows": len(rows),
        "documents": len(train),
        "held_out": len(held_out),
        "tokens": sum(len(d.token_T) for d in train),
        "trained_tokens": sum(int(d.loss_T.sum()) for d in train),
    }
    return Corpus(rows, tuple(held_out), sizes | counts)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _documents(
    settings: DataSettings, files: Sequence[str], reader: DocumentReader, counts: Counter[str]
) -> list[Document]:
    """Returns the documents of files, none longer than the limit and each with something to train on."""
    usable, long = [], []
    for document in (d for file in files for d in reader.read(Path(file))):
        if len(document.token_T) > settings.length and not document.plain:
            long.append(document)
            if settings.too_long != "cut":
                continue
        pieces = _pieces(document, settings.length)
        fit = [piece for piece in pieces[: None if document.plain else 1] if piece.loss_T.any()]
        counts["documents without a token to train on"] += not fit
        usable += fit
    if long and settings.too_long == "error":
        named = ", ".join(f"{d.source} ({len(d.token_T)} tokens)" for d in long[:NAMED])
        more = f" and {len(long) - NAMED} more" if len(long) > NAMED else ""
        raise ConfigError(
            f"data: {len(long)} conversations are longer than data.length = {settings.length}: {named}{more}; raise "
            'it, or choose data.too_long = "cut" or "drop"'
        )
    if long:
        counts[f"conversations {'cut' if settings.too_long == 'cut' else 'dropped'} as too long"] += len(long)
    counts.update(reader.skipped)
    for name in [name for name, count in counts.items() if not count]:
        del counts[name]
    return usable


def _pieces(document: Document, length: int) -> list[Document]:
    """Cuts a document into pieces of at most ``length`` tokens."""
    return [
        Document(
            document.token_T[first : first + length], document.loss_T[first : first + length],
            document.source, document.plain,
        )
        for first in range(0, len(document.token_T), length)
    ]  # fmt: skip


def split(documents: Sequence[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """Splits off a share of the documents, at least one: those with the smallest hashes.

    The choice follows the contents, not the order, and equal documents stay together.
    """
    if not documents:
        return [], []
    marks = [hashlib.blake2b(d.token_T.tobytes(), digest_size=8).digest() for d in documents]
    last = sorted(marks)[max(round(fraction * len(documents)), 1) - 1]
    pairs = list(zip(documents, marks, strict=True))
    return [d for d, mark in pairs if mark > last], [d for d, mark in pairs if mark <= last]


def batches(
    rows: RowSource,
    *,
    seed: int,
    size: int,
    accumulation: int = 1,
    first: int = 0,
    part: int = 0,
    parts: int = 1,
    workers: int = 2,
) -> Iterator[Batch]:
    """Yields endless batches of one update each, arrays [A, B / parts, T], shuffled anew in every pass over the rows.

    The order depends on the seed alone: update u takes rows u * A * B and following of one global order, wherever the
    run was resumed and however many threads read. Each process takes the part of every update that its devices hold.

    Args:
      rows: what is trained on.
      seed: of the order.
      size: B, rows over all processes.
      accumulation: A, passes of one update.
      first: update to start with.
      part: of an update that this process takes.
      parts: how many there are.
      workers: threads that prefetch rows.

    Raises:
      ConfigError: the rows cannot be shared evenly.
    """
    if size % parts:
        raise ConfigError(f"train: {size} rows cannot be split evenly over {parts} hosts")
    local = size // parts
    order = grain.MapDataset.source(cast(Any, rows)).seed(seed).shuffle().repeat(PASSES).batch(local)[part::parts]
    update = order.batch(accumulation)[first:]
    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * workers)
    row_AB: Any = np.tile(np.arange(part * local, (part + 1) * local, dtype=np.int32), (accumulation, 1))
    return (Batch(**rows, row_B=row_AB) for rows in update.to_iter_dataset(options))


def prompts(documents: Sequence[Document], *, count: int, length: int) -> list[np.ndarray]:
    """Returns the beginnings of at most ``count`` held-out documents, to be continued, int32.

    A conversation gives what precedes its first answer, plain text its first ``length`` tokens; documents that leave
    nothing to continue, or whose prompt is longer than ``length``, are passed over. Raises ConfigError if none is left.
    """
    lengths = [document.prompt_length or min(length, len(document.token_T) // 2) for document in documents]
    beginnings = [d.token_T[:given] for d, given in zip(documents, lengths, strict=True) if 0 < given <= length]
    if not beginnings:
        raise ConfigError(
            f"evaluation: none of {len(documents)} held-out documents has a prompt of 1 to {length} tokens; name "
            "data.held_out, set data.held_out_fraction, or raise evaluation.prompt_tokens"
        )
    return beginnings[:count]
