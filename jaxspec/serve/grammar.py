"""Grammars over a model's vocabulary: checked as requests come, and started for each sample."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from threading import Lock
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from

from jaxspec.checkpoint.text.codec import Text
from jaxspec.errors import RequestError
from jaxspec.serve.constraint import Constraint
from jaxspec.serve.structured_outputs import StructuredOutputsParams

REMEMBERED = 256


class Grammars:
    """Makes constraints of what requests ask for."""

    def __init__(self, text: Text, vocab: int, eos: set[int]):
        """Reads nothing yet: the vocabulary takes a second with the first grammar."""
        self._text, self._vocab, self._eos = text, vocab, sorted(eos)
        self._started: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def constraints(
        self, params: StructuredOutputsParams, prompt: Sequence[int], samples: int
    ) -> list[Constraint]:  # fmt: skip
        """Returns a constraint for each sample of a request.

        Raises:
          RequestError: the grammar is not one, or has something in it that cannot be enforced.
        """
        grammar, after = self._start(source_of(params)), (params.after or "").encode()
        if after and self._ends_with(prompt, after):
            after = b""
        return [
            Constraint(grammar, self._eos, after=after, bytes_of=self._words.tokens.__getitem__) for _ in range(samples)
        ]

    def _start(self, source: str) -> LLMatcher:
        """Returns a grammar at its beginning, to be copied."""
        with self._lock:
            grammar = self._started.pop(source, None)
            if grammar is None:
                grammar = LLMatcher(self._tokenizer, source, log_level=0)
                if grammar.is_error():
                    raise _refused(grammar.get_error())
            self._started[source] = grammar
            if len(self._started) > REMEMBERED:
                self._started.popitem(last=False)
        return grammar

    def _ends_with(self, prompt: Sequence[int], marker: bytes) -> bool:
        """Whether a prompt ends with a text, white space aside."""
        backwards = accumulate((self._words.tokens[i] for i in reversed(prompt)), lambda text, piece: piece + text)
        text = next((text for text in backwards if len(text.rstrip()) >= len(marker)), b"")
        return text.rstrip().endswith(marker.rstrip())

    @cached_property
    def _words(self) -> Words:
        return Words(self._text, self._vocab, self._eos)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(self._words), eos_token=self._eos)


class Words:
    """A vocabulary as llguidance reads it: the bytes that each token adds to a text, and how text is tokenized.

    Attributes:
      tokens: bytes by id, none for ids that no token has.
      special_token_ids: those that no text of a grammar contains.
      eos_token_id, bos_token_id: names that llguidance asks for.
    """

    def __init__(self, text: Text, vocab: int, eos: Sequence[int]):
        pieces, self._text = text.token_bytes, text
        self.tokens = [pieces.of(i) or b"" for i in range(vocab)]
        self.special_token_ids = sorted({*eos, *(i for i in range(vocab) if pieces.is_special(i))})
        self.eos_token_id, self.bos_token_id = eos[0], None
        specials = frozenset(self.special_token_ids)
        self._specials, self._longest = specials, max(map(len, self.tokens))
        self._id_of = {piece: i for i, piece in reversed(list(enumerate(self.tokens))) if piece and i not in specials}

    def __call__(self, text: bytes) -> list[int]:
        """Returns the ids of a text: the tokenizer's, where they spell it and none is special, or the longest ones."""
        try:
            ids = self._text.tokenizer.backend_tokenizer.encode(text.decode(), add_special_tokens=False).ids
        except Exception:  # a part of a character, or a tokenizer without a backend
            ids = []
        if b"".join(self.tokens[i] for i in ids) == text and self._specials.isdisjoint(ids):
            return ids
        ids = []
        while text:
            ends = range(min(self._longest, len(text)), 0, -1)
            end = next((end for end in ends if text[:end] in self._id_of), 0)
            if not end:  # no token spells this
                return []
            ids.append(self._id_of[text[:end]])
            text = text[end:]
        return ids


def source_of(params: StructuredOutputsParams) -> str:
    """Returns a grammar in llguidance's words.

    Raises:
      RequestError: it is none.
    """
    try:
        if params.json is not None or params.json_object:
            return grammar_from("json_schema", json.dumps(_with_spaces(params)))
        if params.regex is not None:
            return grammar_from("regex", params.regex)
        if params.choice is not None:
            return grammar_from("choice", json.dumps(list(params.choice)))
        if params.grammar is not None:
            return grammar_from("grammar", params.grammar)
    except ValueError as error:
        raise _refused(str(error)) from error
    raise _refused("a form is needed besides after, such as json, where no call of a tool is forced")


def _with_spaces(params: StructuredOutputsParams) -> dict[str, Any]:
    """Returns a schema that says where white space may be, too.

    llguidance takes this beside a schema as well, but loses an interrupt that comes while it reads a mapping.
    """
    schema = params.schema
    own = schema.get("x-guidance")
    spaces: dict[str, Any] = {"whitespace_flexible": not params.disable_any_whitespace}
    if params.whitespace_pattern is not None:
        spaces["whitespace_pattern"] = params.whitespace_pattern
    return {**schema, "x-guidance": (own if isinstance(own, dict) else {}) | spaces}


def _refused(message: str) -> RequestError:
    return RequestError(f"structured_outputs: {' '.join(message.split())}")
