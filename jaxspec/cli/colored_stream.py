"""A growing text on the screen, accepted drafts in color."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from jaxspec.cli.screen import Screen
from jaxspec.serve.request import RequestOutput, SamplingParams
from jaxspec.serve.text import IncrementalText

if TYPE_CHECKING:
    from jaxspec.serve.llm import LLM

ACCEPTED = "bold green"
ESCAPE, SHOWN_ESCAPE = "\x1b", "\u241b"  # a text must not command the terminal
WORD = re.compile(r"\n|[^\S\n]*\S+|[^\S\n]+")
WIDEST, ROOM = 100, 8  # room for the rest of a word that comes later


class ColoredStream:
    """Prints one text while it grows; on a terminal words go to the next line whole.

    Attributes:
      output: of the request so far, None before its first step.
      tokens_per_s: after the first step.

    Args:
      screen: to print on.
      llm: says the text.
      column: of the cursor.
    """

    def __init__(self, screen: Screen, llm: LLM, column: int = 0):
        self._screen, self._llm = screen, llm
        self._wrap = WordWrap(min(screen.console.width, WIDEST), column) if screen.live else None
        self.output: RequestOutput | None = None
        self.tokens_per_s = 0.0

    @property
    def token_ids(self) -> list[int]:
        """The ids so far."""
        return list(self.output.outputs[0].token_ids) if self.output else []

    def run(self, prompt: Any, params: SamplingParams) -> None:
        """Prints the text to its end; an interrupt leaves in ``output`` what there was."""
        growing, seen, started, first = None, 0, 0.0, 0
        for output in self._llm.stream(prompt, params):
            self.output, completion, now = output, output.outputs[0], time.perf_counter()
            tokens = completion.token_ids
            growing = growing or IncrementalText(self._llm.text, params, output.prompt_token_ids)
            if not started:
                started, first = now, len(tokens)
            for token, drafted in zip(tokens[seen:], completion.drafted[seen:], strict=True):
                before = len(growing.text)
                growing.add(token)
                self._show(growing.text[before:], ACCEPTED if drafted else "")
            seen = len(tokens)
            self.tokens_per_s = (seen - first) / max(now - started, 1e-9)
        if growing is not None:
            self._show(growing.whole[len(growing.text) :], "")

    def _show(self, text: str, style: str) -> None:
        text = text.replace(ESCAPE, SHOWN_ESCAPE)
        self._screen.piece(text if self._wrap is None else self._wrap.fit(text), style)


class WordWrap:
    """Breaks a growing text between words, at the edge of a terminal.

    Args:
      width: of the terminal.
      column: of the cursor.
    """

    def __init__(self, width: int, column: int = 0):
        self._width, self._at = width, column

    def fit(self, text: str) -> str:
        """Returns a piece of text with the line breaks that it needs, and remembers where it ends."""
        parts = []
        for part in WORD.findall(text):
            if self._at + cell_len(part) > self._width - ROOM and self._at and part[0].isspace() and part != "\n":
                part = "\n" + part.lstrip()
                self._at = 0
            self._at = 0 if part == "\n" else self._at + cell_len(part.lstrip("\n"))
            parts.append(part)
        return "".join(parts)
