"""Text of one sample that grows token by token, up to the first stop string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxspec.checkpoint.text.codec import Text
from jaxspec.errors import RequestError
from jaxspec.serve.detokenizer import Detokenizer, common_prefix, detokenizer
from jaxspec.serve.request import Logprob, SamplingParams


class IncrementalText:
    """The text of one sample while it grows, cut at the first stop string.

    At every prefix the whole text is ``decode(prompt + ids)`` without ``decode(prompt)``. Where the prompt ends within
    a character, whose text the next ids change, it is all from the first character that differs.

    Raises:
      RequestError: a stop string has a special token in it that the text leaves out.
    """

    def __init__(self, text: Text | None, params: SamplingParams, prompt: Sequence[int] = ()):
        self._text, self._params, self._prompt = text, params, prompt
        self._stops = params.stop_strings if text else []
        self._special_stops = special_stops(text, params) if text else {}
        self._longest = max(map(len, self._stops), default=0)
        self._tokens: Detokenizer | None = None
        self._before, self._checked, self._shown, self._cut = "", "", "", None
        self._waiting: list[int] = []  # tokens whose text nobody has asked for

    def add(self, token: int, *, may_stop: bool = True) -> str | None:
        """Appends one token; returns the stop string that it completes, if any and if it may stop here."""
        if self._text is None:
            return None
        if may_stop and token in self._special_stops:
            stop = self._special_stops[token]
            self._cut = self.whole + (stop if self._params.include_stop_str_in_output else "")
            return stop
        self._waiting.append(token)
        return self._find_stop(may_stop=may_stop) if self._stops else None

    def _read(self) -> Detokenizer | None:
        """Detokenizes what waits; returns None before the first token."""
        ids, self._waiting = self._waiting, []  # first: an error of theirs comes once
        if ids and self._text is not None:
            if self._tokens is None:
                self._tokens = detokenizer(self._text, skip_special_tokens=self._params.skip_special_tokens)
                self._before = self._tokens.begin(self._prompt)
            self._tokens.extend(ids)
        return self._tokens

    def _find_stop(self, *, may_stop: bool) -> str | None:
        """Finds the first stop string that ends in new text, and cuts the text at it."""
        tokens = self._read()
        assert tokens is not None
        # Half a character is no U+FFFD yet.
        seen = self._own(tokens.settled + ("" if tokens.incomplete else tokens.open))
        known = common_prefix(self._checked, seen)
        if not (tokens.incomplete and self._checked.startswith(seen)):
            self._checked = seen
        if not may_stop:
            return None
        hits = ((seen.find(stop, max(known - len(stop) + 1, 0)), stop) for stop in self._stops)
        start, stop = min((hit for hit in hits if hit[0] >= 0), default=(0, None))
        if stop is not None:
            self._cut = seen[: start + len(stop) if self._params.include_stop_str_in_output else start]
        return stop

    def _own(self, text: str) -> str:
        """Cuts off what the prompt's open text has in common with a text since the prompt's settled one."""
        return text[common_prefix(self._before, text) :]

    @property
    def whole(self) -> str:
        """All text so far, including what the next token may change: what it is if it ends here."""
        if self._cut is not None:
            return self._cut
        tokens = self._read()
        return self._own(tokens.settled + tokens.open) if tokens else ""

    @property
    def text(self) -> str:
        """Text that stays whatever follows: it only grows, and the whole text will begin with it.

        An incomplete character, a run of byte tokens and what may be the start of a stop string are not in it yet.
        """
        tokens = self._read()
        if tokens is not None and self._cut is None:
            settled = self._own(tokens.settled)
            shown = settled[: len(settled) - self._held(settled)]
            if shown.startswith(self._shown):
                self._shown = shown
        return self._shown if self._cut is None else self._cut

    def _held(self, text: str) -> int:
        """Counts the characters at the end of a text that a stop string may begin with."""
        if self._params.include_stop_str_in_output:
            return 0
        for count in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - count :]
            if any(len(stop) > count and stop.startswith(tail) for stop in self._stops):
                return count
        return 0

    def name(self, entry: Mapping[int, Logprob]) -> None:
        """Writes the text of each token into its log-probability."""
        if self._text is not None:
            for token, value in entry.items():
                value.decoded_token = self._text.token_bytes.text(token)


def special_stops(text: Text, params: SamplingParams) -> dict[int, str]:
    """Returns the stop strings that are special tokens which the text leaves out, by the ids to stop at.

    Raises:
      RequestError: such a token is only a part of a stop string, which then never shows up.
    """
    if not params.skip_special_tokens:
        return {}
    stops, specials = {}, text.token_bytes.specials
    for stop in params.stop_strings:
        if stop in specials:
            stops[specials[stop]] = stop
        elif inside := [word for word in specials if len(word) > 1 and word in stop]:
            raise RequestError(
                f"stop: {stop!r} has the special token {inside[0]!r} in it, which the text leaves out; "
                "use stop_token_ids, or skip_special_tokens=False"
            )
    return stops


def token_offsets(text: Text, *, skip_special_tokens: bool, prompt: Sequence[int], ids: Sequence[int]) -> list[int]:
    """Returns the positions in the whole generated text at which the text of each id begins.

    Within a character of several tokens that is the character's, for a token that the text leaves out where it was.
    """
    tokens = detokenizer(text, skip_special_tokens=skip_special_tokens)
    before = tokens.begin(prompt)
    starts = tokens.starts(ids)
    tokens.extend(ids)
    own = common_prefix(before, tokens.settled + tokens.open)
    return [max(start - own, 0) for start in starts]
