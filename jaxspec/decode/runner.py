"""The programs of serving for one batch: prompts in chunks, rows in and out, dispatches and their results."""

from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from jaxspec.decode.chunks import UnreadPrompt, choose_chunk, cut
from jaxspec.decode.dispatch import Report
from jaxspec.decode.state import DecodeState, Target
from jaxspec.protocol import Drafter, Sampling
from jaxspec.shapes import Array
from jaxspec.topology import AnyTopology


class Runner:
    """Calls programs with host values; states are donated to each call and returned anew.

    Attributes:
      target: verifies.
      drafters: by topology; their state is one and the same.
      buckets: prefill chunk sizes in tokens, ascending.
      programs: the functions of ``decode``, compiled or jitted: ("prefill", size), ("prefill jointly", size), "admit",
        "retire", "remember", ("dispatch", topology) and ("catch up", size).
      unbiased_V: stands for no bias where programs take an array.
    """

    unbiased_V: Array | None = None
    programs: MutableMapping[Hashable, Callable[..., Any]]

    def __init__(
        self,
        target: Target,
        drafters: Mapping[AnyTopology, Drafter],
        buckets: Sequence[int],
        programs: Mapping[Hashable, Callable[..., Any]],
    ):
        self.target, self.drafters, self.buckets, self.programs = target, drafters, tuple(buckets), dict(programs)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The chunk sizes that may be used now, ascending."""
        return self.buckets

    @property
    def joint(self) -> tuple[int, int] | None:
        """Prompts in a chunk of several, and tokens of each; None where all are read singly."""
        return None

    @property
    def drafter(self) -> Drafter:
        """The drafter of the largest topology, which observes prompts."""
        return self.drafters[max(self.drafters, key=lambda topology: topology.nodes)]

    def prefill(
        self, state: DecodeState, row: int, prompt: np.ndarray, table_J: np.ndarray | None = None
    ) -> DecodeState:
        """Reads all of a prompt but its last token."""
        unread = UnreadPrompt(row, prompt, table_J)
        while unread.left:
            state = self.read(state, [unread])
        return state

    def read(self, state: DecodeState, prompts: Sequence[UnreadPrompt]) -> DecodeState:
        """Reads one chunk of prompts with tokens left, the oldest first; see ``choose_chunk``."""
        name, chosen = self.next_chunk(prompts)
        return self.programs[name](self.target, self.drafter, state, cut(chosen, name[1]))

    def next_chunk(self, prompts: Sequence[UnreadPrompt]) -> tuple[tuple[str, int], list[UnreadPrompt]]:
        """Returns the name of the program that reads next, and the prompts that it reads."""
        size, chosen = choose_chunk(prompts, self.sizes, self.joint)
        return ("prefill" if len(chosen) == 1 else "prefill jointly", size), chosen

    def admit(
        self,
        state: DecodeState,
        row: int,
        prompt: np.ndarray,
        sampling: Sampling,
        table_J: np.ndarray | None = None,
        bias_V: np.ndarray | Array | None = None,
    ) -> DecodeState:
        """Starts a prefilled row."""
        history_S = np.zeros(state.history_BS.shape[1], np.int32)
        history_S[: len(prompt)] = prompt
        bias_V = self.unbiased_V if bias_V is None else bias_V
        args = state, np.int32(row), history_S, np.int32(len(prompt)), sampling, table_J, bias_V
        return self.programs["admit"](*args)

    def retire(self, state: DecodeState, row: int) -> DecodeState:
        """Frees a row."""
        return self.programs["retire"](state, np.int32(row))

    def remember(self, state: DecodeState, text: Sequence[int] | np.ndarray) -> DecodeState:
        """Gives the drafter a text that ended."""
        text_S = np.zeros(state.history_BS.shape[1], np.int32)
        text_S[: len(text)] = text
        return self.programs["remember"](self.drafter, state, text_S, np.int32(len(text)))

    def catch_up(self, state: DecodeState, row: int, start: int, count: int) -> DecodeState:
        """Shows the drafter ``count`` positions from ``start`` on that a row committed without it."""
        sizes = sorted(key[1] for key in self.programs if isinstance(key, tuple) and key[0] == "catch up")
        while count > 0:
            size = next((size for size in sizes if size >= count), sizes[-1])
            shown = min(size, count)
            args = self.drafter, state, np.int32(row), np.int32(start), np.int32(shown)
            state = self.programs["catch up", size](*args)
            start, count = start + shown, count - shown
        return state

    def dispatch(
        self, state: DecodeState, topology: AnyTopology, steps: int, *, eager: bool = False, min_rows: int = 1
    ) -> tuple[DecodeState, Report]:
        """Starts a dispatch, see ``jaxspec.decode.dispatch``; to unpack the report is to wait for it."""
        args = self.target, self.drafters[topology], state, np.int32(steps), np.bool_(eager), np.int32(min_rows)
        return self.programs["dispatch", topology](*args)
