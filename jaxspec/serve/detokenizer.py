"""Detokenizes ids one by one: text that can no longer change, and text that still may."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

from jaxspec.checkpoint.text.codec import Text
from jaxspec.checkpoint.text.token_bytes import TokenBytes
from jaxspec.errors import RequestError

# Of texts whose layout is unknown: tokens after which one is taken to stay, and of a prompt to which it may refer.
LAG, REACH = 8, 256


class Detokenizer(ABC):
    """The text of a growing list of ids; at every prefix ``settled + open`` is what the tokenizer's decode gives.

    Attributes:
      settled: text that stays whatever follows, since ``begin``.
      open: text that the next ids may change.
      incomplete: whether ``open`` ends within a character that the next ids may complete.
    """

    def __init__(self) -> None:
        self.settled, self.open, self.incomplete = "", "", False

    def begin(self, prompt: Sequence[int]) -> str:
        """Reads a prompt, forgets its settled text, and returns its open one, which stays open."""
        self.extend(prompt)
        self.settled = ""
        return self.open

    @abstractmethod
    def extend(self, ids: Sequence[int]) -> None:
        """Appends ids."""

    @abstractmethod
    def starts(self, ids: Sequence[int]) -> list[int]:
        """Returns where in ``settled + open`` the text of each of these ids will begin; right after ``begin``."""


class ByteText(Detokenizer):
    """Tokens that are bytes: only an incomplete character at the end is open."""

    def __init__(self, vocabulary: TokenBytes, *, skip: bool):
        super().__init__()
        self._vocabulary, self._skip = vocabulary, skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def extend(self, ids: Sequence[int]) -> None:
        self.settled += self._utf8.decode(b"".join(map(self._bytes, ids)))
        pending = self._utf8.getstate()[0]
        self.open, self.incomplete = pending.decode(errors="replace"), bool(pending)

    def starts(self, ids: Sequence[int]) -> list[int]:
        data, firsts = bytearray(self._utf8.getstate()[0]), []
        for i in ids:
            firsts.append(len(data))
            data += self._bytes(i)
        places = _character_of_bytes(bytes(data))
        return [places[first] for first in firsts]

    def _bytes(self, token_id: int) -> bytes:
        piece = self._vocabulary.piece(token_id, skip_special_tokens=self._skip)
        return piece if isinstance(piece, bytes) else b""


class PieceText(Detokenizer):
    """Tokens that are texts or single bytes: a run of bytes is open, for one that does not fit spoils all of it."""

    def __init__(self, vocabulary: TokenBytes, *, skip: bool):
        super().__init__()
        self._vocabulary, self._skip = vocabulary, skip
        self._run, self._begun = bytearray(), False
        self._drop, self._left = vocabulary.strip

    def extend(self, ids: Sequence[int]) -> None:
        parts = []
        for i in ids:
            piece = self._vocabulary.piece(i, skip_special_tokens=self._skip)
            if isinstance(piece, int):
                self._run.append(piece)
            elif isinstance(piece, str):
                if self._run:
                    parts.append(_run_text(self._run))
                    self._run.clear()
                parts.append(piece if self._begun else self._vocabulary.first(i))
            self._begun |= piece is not None
        more, self._left = self._stripped("".join(parts))
        self.settled += more
        self.open, _ = self._stripped(_run_text(self._run))
        self.incomplete = _is_incomplete(self._run)

    def _stripped(self, text: str) -> tuple[str, int]:
        """Drops what is dropped at the start of the whole; returns the rest, and how much more may be dropped."""
        left = self._left
        while left and text.startswith(self._drop):
            text, left = text[len(self._drop) :], left - 1
        return text, 0 if text else left

    def starts(self, ids: Sequence[int]) -> list[int]:
        places, text, run, in_run = [0] * len(ids), "", bytearray(self._run), []
        begun = self._begun

        def close() -> None:
            nonlocal text
            at = [*_character_of_bytes(bytes(run))] if _is_valid(run) else [*range(len(run) + 1)]
            for index, byte in in_run:
                places[index] = len(text) + at[byte]
            text += _run_text(run)
            run.clear()
            in_run.clear()

        for index, i in enumerate(ids):
            piece = self._vocabulary.piece(i, skip_special_tokens=self._skip)
            if isinstance(piece, str):
                close()
            in_run.append((index, len(run)))
            if isinstance(piece, int):
                run.append(piece)
            elif isinstance(piece, str):
                close()
                text += piece if begun else self._vocabulary.first(i)
            begun |= piece is not None
        close()
        dropped = len(text) - len(self._stripped(text)[0])
        return [max(start - dropped, 0) for start in places]


class DecodedText(Detokenizer):
    """Tokens of an unknown layout: all is decoded each time, and what stayed for ``LAG`` tokens is settled.

    The cost grows with the square of the length, and nothing proves that more than that may not change.
    """

    def __init__(self, text: Text, *, skip: bool):
        super().__init__()
        self._text, self._skip = text, skip
        self._ids: list[int] = []
        self._past: deque[str] = deque(maxlen=LAG + 1)

    def begin(self, prompt: Sequence[int]) -> str:
        """Reads a prompt; all of its text stays open."""
        self._ids += prompt[-REACH:]
        self.open = self._decode(self._ids)
        self._past.extend([self.open] * LAG)
        return self.open

    def extend(self, ids: Sequence[int]) -> None:
        whole = self.settled + self.open
        for i in ids:
            self._ids.append(i)
            whole = self._decode(self._ids)
            self._past.append(whole)
        end = len(whole[: min((common_prefix(past, whole) for past in self._past), default=0)].rstrip("\ufffd"))
        self.settled, self.open = whole[:end], whole[end:]

    def starts(self, ids: Sequence[int]) -> list[int]:
        whole = self._decode([*self._ids, *ids])
        return [common_prefix(self._decode([*self._ids, *ids[:n]]), whole) for n in range(len(ids))]

    def _decode(self, ids: Sequence[int]) -> str:
        try:
            return self._text.decode(ids, skip_special_tokens=self._skip)
        except Exception as error:
            raise RequestError(
                f"text: the tokenizer cannot decode what was generated ({error}); without a tokenizer ids are served"
            ) from error


def common_prefix(a: str, b: str) -> int:
    """Counts the characters that two texts begin with in common."""
    if b.startswith(a):
        return len(a)
    same, most = 0, min(len(a), len(b))
    while same < most:  # halving, for comparing slices is much faster than a loop over characters
        middle = (same + most + 1) // 2
        same, most = (middle, most) if a[same:middle] == b[same:middle] else (same, middle - 1)
    return same


def _is_valid(run: bytearray) -> bool:
    try:
        run.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_incomplete(run: bytearray) -> bool:
    """Whether a run of bytes is right up to a character that is not complete yet."""
    try:
        run.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


def _run_text(run: bytearray) -> str:
    """Returns the text of a run of byte tokens: all of it, or one U+FFFD for each if any does not fit."""
    return run.decode() if _is_valid(run) else "\ufffd" * len(run)


def _character_of_bytes(data: bytes) -> list[int]:
    """Returns the character that each byte belongs to, with U+FFFD for what is not UTF-8; and the end."""
    utf8, count, places = codecs.getincrementaldecoder("utf-8")("replace"), 0, []
    for byte in data:
        before = utf8.getstate()[0]
        more, after = utf8.decode(bytes([byte])), utf8.getstate()[0]
        continues = before and (not more or (len(more) == 1 and not after))
        places.append(count + bool(before and not continues))
        count += len(more)
    return [*places, count + bool(utf8.getstate()[0])]


def detokenizer(text: Text, *, skip_special_tokens: bool) -> Detokenizer:
    """Returns the detokenizer of a tokenizer's layout."""
    kinds: dict[str, Any] = {"bytes": ByteText, "pieces": PieceText}
    vocabulary = text.token_bytes
    if vocabulary.layout in kinds:
        return kinds[vocabulary.layout](vocabulary, skip=skip_special_tokens)
    return DecodedText(text, skip=skip_special_tokens)
