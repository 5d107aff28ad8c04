"""Characters and bytes that each token id adds to a text."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a token that stands for one byte
PER_TOKEN = {"Replace", "Metaspace", "WordPiece", "Strip"}
BY_PLACE = {"Metaspace", "WordPiece"}  # decoders that treat the first token differently


def _letters() -> dict[int, str]:
    """Returns GPT-2's printable character for each byte, which byte-level vocabularies are written in."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


LETTER_OF = _letters()
BYTE_OF = {letter: byte for byte, letter in LETTER_OF.items()}


class TokenBytes:
    """The vocabulary of a tokenizer as pieces of text.

    Attributes:
      layout: how pieces become text: ``bytes``, joined and decoded as UTF-8 (byte-level BPE, tiktoken); ``pieces``,
        joined one by one, with runs of byte tokens decoded together (SentencePiece, Unigram, WordPiece, words);
        ``unknown`` where the tokenizer's decoder has another rule, and only it can tell.
      byte_fallback: whether ``<0xNN>`` tokens are bytes.
      strip: a character and how many of it are dropped at the start of a whole text.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self.layout, self.byte_fallback, self.strip, self._by_place = "unknown", False, ("", 0), False
        if self._backend is not None and _decodes_plainly(tokenizer):
            self._read(_chain(self._backend.decoder))
        self._pieces: dict[int, bytes | str | int | None] = {}

    def _read(self, chain: list[dict[str, Any]] | None) -> None:
        """Takes the decoder's stages over, if each is one whose pieces are known not to depend on one another."""
        if chain is None:
            return
        kinds = [stage["type"] for stage in chain]
        if kinds[:1] == ["ByteLevel"] and set(kinds[1:]) <= {"Fuse"}:
            self.layout = "bytes"
            return
        alone = 0
        while alone < len(kinds) and kinds[alone] in PER_TOKEN:
            alone += 1
        by_place = not kinds or bool(BY_PLACE & set(kinds))
        rest, fallback = kinds[alone:], kinds[alone : alone + 1] == ["ByteFallback"]
        rest = rest[fallback:]
        strips = [stage for stage in chain[alone:] if stage["type"] == "Strip"]
        ends_well = rest in ([], ["Fuse"]) or (rest == ["Fuse", "Strip"] and strips[0]["stop"] == 0 and not by_place)
        if ends_well and self._context is not None:
            self.layout, self.byte_fallback, self._by_place = "pieces", fallback, by_place
            self.strip = (strips[0]["content"], strips[0]["start"]) if strips else ("", 0)

    @cached_property
    def _context(self) -> tuple[int, str] | None:
        """An ordinary word and its text: the piece of a token is what it adds after that word."""
        for i in range(len(self._tokenizer)):
            token = self._tokenizer.convert_ids_to_tokens(i)
            if not isinstance(token, str) or token in self.specials or BYTE.fullmatch(token):
                continue
            text = self._decode([i])
            if text.isascii() and text.isalnum():
                return i, text
        return None

    def _decode(self, ids: list[int]) -> str:
        if self.layout == "unknown":
            return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return self._backend.decode(ids, skip_special_tokens=False)

    @cached_property
    def specials(self) -> dict[str, int]:
        """Special tokens by their content, which a text without special tokens leaves out."""
        if self._backend is not None:
            added = self._backend.get_added_tokens_decoder()
            return {token.content: i for i, token in added.items() if token.special}
        names, ids = (getattr(self._tokenizer, f"all_special_{what}", []) for what in ("tokens", "ids"))
        return dict(zip(map(str, names), ids, strict=False))

    def piece(self, token_id: int, *, skip_special_tokens: bool = False) -> bytes | str | int | None:
        """Returns what an id adds to a text that has begun; not for the layout ``unknown``.

        Returns:
          Bytes in the layout ``bytes``; else a text, or a number for one byte of a run; None where the id is unknown
          or left out.
        """
        if token_id not in self._pieces:
            self._pieces[token_id] = self._make(token_id)
        piece = self._pieces[token_id]
        return None if skip_special_tokens and piece is not None and self.is_special(token_id) else piece

    def _make(self, token_id: int) -> bytes | str | int | None:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return None
        if self.layout == "bytes":
            return bytes(BYTE_OF[c] for c in token) if all(c in BYTE_OF for c in token) else token.encode()
        if self.byte_fallback and (match := BYTE.fullmatch(token)):
            return int(match[1], 16)
        assert self._context is not None
        word, text = self._context
        return self._decode([word, token_id])[len(text) :]

    def first(self, token_id: int) -> str:
        """Returns the text of a known token that is no byte, at the start of a text that has not been stripped yet."""
        if self._by_place:
            return self._decode([token_id])
        piece = self.piece(token_id)
        assert isinstance(piece, str)
        return piece

    def is_special(self, token_id: int) -> bool:
        """Whether a text without special tokens leaves an id out."""
        return token_id in self._special_ids

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        # By content, as the tokenizers library: the model's own vocabulary may have the word, too.
        same = (self._backend.token_to_id(word) for word in self.specials) if self._backend is not None else ()
        return frozenset(self.specials.values()) | {i for i in same if i is not None}

    def of(self, token_id: int) -> bytes | None:
        """Returns the bytes that a token stands for after other text, None for an unknown id."""
        if self.layout == "unknown":
            return self._guess(token_id)
        piece = self.piece(token_id)
        if isinstance(piece, int):
            return bytes([piece])
        return piece.encode() if isinstance(piece, str) else piece

    def _guess(self, token_id: int) -> bytes | None:
        """Returns bytes as the tokenizer decodes them, or by its vocabulary's spelling if it needs more tokens."""
        try:
            token = self._tokenizer.convert_ids_to_tokens(token_id)
            decoded = self._decode([self._context[0], token_id]) if self._context else ""
        except Exception:  # of whatever kind such a tokenizer raises for ids that it does not know
            return None
        if isinstance(token, bytes) or token is None:
            return token
        if match := BYTE.fullmatch(token):
            return bytes([int(match[1], 16)])
        before = self._context[1] if self._context else ""
        if len(decoded) > len(before) and decoded.startswith(before) and "\ufffd" not in decoded:
            return decoded[len(before) :].encode()
        if "\ufffd" in decoded and all(c in BYTE_OF for c in token):
            return bytes(BYTE_OF[c] for c in token)
        return token.replace("▁", " ").encode()

    def text(self, token_id: int) -> str | None:
        """Returns the text of one token after other text, with its spaces; U+FFFD if it is part of a character."""
        data = self.of(token_id)
        return None if data is None else data.decode(errors="replace")


def _decodes_plainly(tokenizer: Any) -> bool:
    """Whether a tokenizer's decode is its backend's, not a class's own."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    return all(getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name) for name in ("decode", "_decode"))


def _chain(decoder: Any) -> list[dict[str, Any]] | None:
    """Stages of a decoder, nested sequences laid flat; None where it does not say."""
    if decoder is None:
        return []
    try:
        return _flat(json.loads(decoder.__getstate__()))
    except Exception:  # a decoder written in Python has no state to show
        return None


def _flat(stage: dict[str, Any]) -> list[dict[str, Any]]:
    if stage["type"] != "Sequence":
        return [stage]
    return [inner for part in stage["decoders"] for inner in _flat(part)]
