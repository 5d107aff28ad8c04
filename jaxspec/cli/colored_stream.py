"""A growing text on the screen, accepted drafts in color."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from jaxspec.cli.screen import Screen
from jaxspec.serve.request import RequestOutput, SamplingParams
from jaxspec.serve.text import IncrementalText

if TYPE_CHECKING:
    from jaxspec.serve.llm import LLM

ACCEPTED = "bold green"
ESCAPE, SHOWN_ESCAPE = "\x1b", "\u241b"  # a text must not command the terminal


class ColoredStream:
    """Prints one text while it grows.

    Attributes:
      output: of the request so far, None before its first step.
      tokens_per_s: after the first step.
    """

    def __init__(self, screen: Screen, llm: LLM):
        self._screen, self._llm = screen, llm
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
        self._screen.piece(text.replace(ESCAPE, SHOWN_ESCAPE), style)
