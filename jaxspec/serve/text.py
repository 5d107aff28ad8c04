"""Text of one sample that grows token by token."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream

from jaxspec.checkpoint.text import Text
from jaxspec.serve.request import SamplingParams


class Growing:
    """The text of one sample while it grows, cut at the first stop string."""

    def __init__(self, text: Text | None, params: SamplingParams):
        self.text = ""
        self._stops = params.stop_strings
        self._include = params.include_stop_str_in_output
        self._backend: Any = getattr(text.tokenizer, "backend_tokenizer", None) if text else None
        self._slow, self._skip, self._ids = text, params.skip_special_tokens, []
        self._stream = DecodeStream(skip_special_tokens=params.skip_special_tokens) if self._backend else None

    def add(self, token: int, may_stop: bool = True) -> str | None:
        """Appends one token; returns the stop string that it completes, if any and if it may stop here."""
        if self._slow is None:
            return None
        before = len(self.text)
        if self._stream is not None:
            self.text += self._stream.step(self._backend, token) or ""
        else:
            self._ids.append(token)
            self.text = self._slow.decode(self._ids, self._skip)
        hits = []
        for stop in self._stops if may_stop else ():
            place = self.text.find(stop, max(before - len(stop) + 1, 0))
            if place >= 0:
                hits.append((place, stop))
        if not hits:
            return None
        place, stop = min(hits)
        self.text = self.text[: place + len(stop) if self._include else place]
        return stop
