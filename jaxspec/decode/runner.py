"""The programs of serving for one batch: prompts in chunks, rows in and out, dispatches and their results."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.decode.dispatch import Report
from jaxspec.decode.prefill import Chunk
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
      programs: the functions of ``decode``, compiled or jitted: ("prefill", size), "admit", "retire",
        ("dispatch", topology) and ("catch up", size).
      unbiased_V: stands for no bias where programs take an array.
    """

    unbiased_V: Array | None = None

    def __init__(
        self,
        target: Target,
        drafters: Mapping[AnyTopology, Drafter],
        buckets: Sequence[int],
        programs: Mapping[Hashable, Callable[..., Any]],
    ):
        self.target, self.drafters, self.buckets, self.programs = target, drafters, tuple(buckets), dict(programs)

    @property
    def drafter(self) -> Drafter:
        """The drafter of the largest topology, which observes prompts."""
        return self.drafters[max(self.drafters, key=lambda topology: topology.nodes)]

    def prefill(
        self, state: DecodeState, row: int, prompt: np.ndarray, table_J: np.ndarray | None = None
    ) -> DecodeState:
        """Reads all of a prompt but its last token, in as few chunks as the buckets allow."""
        for size, chunk in chunks(prompt, self.buckets, row, table_J):
            state = self.programs["prefill", size](self.target, self.drafter, state, chunk)
        return state

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


def chunks(
    prompt: np.ndarray, buckets: tuple[int, ...], row: int, table_J: np.ndarray | None = None
) -> Iterator[tuple[int, Chunk]]:
    """Yields bucket and chunk of all of a prompt but its last token."""
    start, left = 0, len(prompt) - 1
    while left > 0:
        size = next((b for b in buckets if b >= left), buckets[-1])
        token_X, count = np.zeros(size + 1, np.int32), min(size, left)
        token_X[: count + 1] = prompt[start : start + count + 1]
        parts: Any = np.int32(row), token_X, np.int32(start), np.int32(count), table_J
        yield size, Chunk(*parts)
        start, left = start + count, left - count
