"""Which samples wait, which run in which row of the device's state, and which pages they hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np

from jaxspec.cache.pages import PageAllocator
from jaxspec.decode.chunks import UnreadPrompt
from jaxspec.decode.state import DecodeState
from jaxspec.serve.compiled import Programs
from jaxspec.serve.engine_spec import EngineSpec
from jaxspec.serve.fair_queue import FairQueue
from jaxspec.serve.metrics import EngineMetrics
from jaxspec.serve.prefix_cache import PrefixCache
from jaxspec.serve.reading import Reading
from jaxspec.serve.request import RequestOutput
from jaxspec.serve.sample import STOP_PLACES, Sample

ATTEMPTS = 3  # steps that may fail in a row before a request ends


class Scheduler:
    """Admits samples to rows, callers in turns, and retires them.

    Attributes:
      waiting: samples without a row, the next to go first.
      rows: sample in each row.
      reading: samples that have a row, but whose prompts are not read to the end, the oldest first.
      pool: pages that all rows share, None where each row has its own.
      slack: positions beyond a text that may be written.
      moved: requests that moved and were not returned yet, by identity.
      allocate: makes an empty state.
      prefix: what was read before, None where it is read again.
    """

    def __init__(
        self,
        programs: Programs,
        spec: EngineSpec,
        eos: set[int],
        metrics: EngineMetrics,
        *,
        allocate: Callable[[], DecodeState],
        slack: int,
        draft_length: int,
        prefix: PrefixCache | None = None,
    ):
        """Starts with nothing that waits or runs, and no state yet.

        Args:
          programs: compiled for such states.
          spec: of the engine.
          eos: ids that end a text.
          metrics: of the engine, which count prompts and requests.
          allocate: makes an empty state.
          slack: positions beyond a text that may be written.
          draft_length: deepest draft of any topology.
          prefix: what was read before, None where it is read again.
        """
        self.waiting = FairQueue()
        self.rows: list[Sample | None] = [None] * spec.rows
        self.reading: list[Reading] = []
        self.pool, self.slack = PageAllocator(spec.pages, spec.page) if spec.pages else None, slack
        self.moved: dict[int, RequestOutput] = {}
        self.allocate, self._state, self.prefix = allocate, None, prefix
        self._programs, self._spec, self._eos, self._metrics = programs, spec, eos, metrics
        self._draft_length = draft_length

    @property
    def state(self) -> DecodeState:
        """State of all rows on the device; a lost one is allocated anew."""
        if self._state is None:
            self._state = self.allocate()
        return self._state

    @state.setter
    def state(self, state: DecodeState) -> None:
        self._state = state

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting) or any(self.rows)

    @property
    def decoding(self) -> list[Sample | None]:
        """Sample in each row, None also for those whose prompt is still read."""
        unread = {reading.prompt.row for reading in self.reading}
        return [None if row in unread else sample for row, sample in enumerate(self.rows)]

    @property
    def running(self) -> list[tuple[int, Sample]]:
        """Rows that decode, with their samples."""
        return [(row, sample) for row, sample in enumerate(self.decoding) if sample is not None]

    @property
    def held(self) -> list[tuple[int, Sample]]:
        """Rows that decode or read, with their samples."""
        return [(row, sample) for row, sample in enumerate(self.rows) if sample is not None]

    def check(self, samples: list[Sample]) -> None:
        """Raises CapacityError if the page pool could never hold one of them."""
        if self.pool is not None:
            for sample in samples:
                self.pool.check(sample.max_length + self.slack)

    def admit(self, *, to_rows: bool = True) -> bool:
        """Gives free rows to samples that wait, and reads a chunk of prompts; returns whether any was read.

        One chunk, so that rows that decode go on after it; where none does, until the first can.

        Args:
          to_rows: false to read on only for samples that have a row.
        """
        began, waiting = time.monotonic(), len(self.waiting)
        self._state = self.state  # before samples take rows: none is to blame if there is no memory for it
        for row, sample in self._take_rows() if to_rows else ():
            self._start(row, sample)
        if not self.reading:
            return len(self.waiting) < waiting
        self._read_chunk()
        while self.reading and not self.running:
            self._read_chunk()
        jax.block_until_ready(self.state.length_B)  # or the next dispatch would seem to take its time
        self._metrics.prefill_time_s += time.monotonic() - began
        return True

    def _read_chunk(self) -> None:
        """Reads one chunk of the oldest prompt, maybe with others, and starts the rows of those that end with it."""
        first = self.reading[0]
        if first.prompt.left and first.scored:
            self.state = first.read_scored(self._programs, self.state)
        elif first.prompt.left:
            unread = self._unread()
            if not self.running or self._programs.can_read(unread):  # texts that have begun wait for no compilation
                self.state = self._programs.read(self.state, unread)
                self._save_prefixes()
        for reading in [reading for reading in self.reading if not reading.prompt.left]:
            self.reading.remove(reading)
            self.state = reading.finish(self._programs, self.state)
            if reading.sample.completion.finish_reason is not None:
                self._leave(reading.prompt.row, reading.sample)

    def _unread(self) -> list[UnreadPrompt]:
        """Returns the prompts that may be read next, the oldest first.

        What was read before is copied first. A prompt that goes on as an older one does waits for it.
        """
        unread, coming = [], set()
        for reading in self.reading:
            prompt, blocks = reading.prompt, reading.sample.blocks
            if not prompt.left or reading.scored:
                continue
            if self.prefix is not None and blocks is not None:
                self.state = self.prefix.load(self.state, reading.sample, prompt, blocks, self._metrics)
                if self.prefix.waits(prompt, blocks, coming):
                    continue
            unread.append(prompt)
        return unread

    def _save_prefixes(self) -> None:
        for reading in self.reading:
            if self.prefix is not None and reading.sample.blocks is not None:
                self.prefix.save(self.state, reading.prompt, reading.sample.blocks, reading.prompt.start)

    def _take_rows(self) -> Iterator[tuple[int, Sample]]:
        """Gives free rows and pages to samples that wait, one at a time and callers in turns."""
        for row, held in enumerate(self.rows):
            if held is not None or not self.waiting:
                continue
            sample = self.waiting[0]
            if self.pool is not None:
                pages = self.pool.allocate(sample.max_length + self.slack)
                if pages is None:
                    return  # it goes first; the others wait after it
                sample.pages = pages
            self.rows[row] = self.waiting.popleft()
            sample.begun = True
            yield row, sample

    def _start(self, row: int, sample: Sample) -> None:
        """Prepares to read a sample's prompt, and its text where it goes on after a failure, into its row."""
        table_J, params = self._table(sample), sample.params
        stop_ids = sorted(({*()} if params.ignore_eos else self._eos) | set(params.stop_token_ids or []))
        try:
            sampling = sample.sampling(stop_ids, STOP_PLACES, self._draft_length)
            bias_V = sample.bias(self.state.bias_BV.shape[1])
        except Exception as error:  # of this request alone
            sample.fail(f"this request could not be started ({type(error).__name__}: {error})")
            self._leave(row, sample)
            return
        self._metrics.prompt_tokens += 0 if sample.completion.token_ids else len(sample.prompt)
        prompt = UnreadPrompt(row, sample.tokens, table_J)
        if sample.routes is not None:
            prompt.route = sample.routes.add
        reading = Reading(sample, prompt, sampling, bias_V, self._spec.logprobs)
        # Log-probabilities of a prompt, and the experts of its tokens, come of reading it.
        reads_all = reading.scored or sample.routes is not None
        sample.blocks = None if self.prefix is None or reads_all else self.prefix.begin(sample, self._metrics)
        self.reading.append(reading)

    def _leave(self, row: int, sample: Sample) -> None:
        """Ends a sample that never decodes."""
        self.moved[id(sample.output)] = sample.output
        self.retire(row, sample)

    def _table(self, sample: Sample) -> np.ndarray | None:
        """Returns a sample's page table, None where rows have pages of their own."""
        if self.state.table_BJ is None:
            return None
        table_J = np.zeros(self.state.table_BJ.shape[1], np.int32)
        table_J[: len(sample.pages)] = sample.pages
        return table_J

    def catch_up(self) -> None:
        """Shows the drafter what rows committed in plain steps."""
        drafter = self._programs.drafter
        if not self._programs.turns:
            return
        room = drafter.replay_room(self._spec.capacity)
        late = [(row, s) for row, s in self.running if s.params.draft_limit != 0 and s.observed != s.length]
        for row, sample in late:
            first = max(sample.observed, sample.length - room)
            self.state = self._programs.catch_up(self.state, row, first, sample.length - first)
            sample.observed = sample.length
        if late:  # or the dispatch would seem to take its time
            jax.block_until_ready(self.state)

    def retire(self, row: int, sample: Sample) -> None:
        """Ends a sample's row, and its request if it was the last sample of it."""
        self._settle(sample)
        if self.prefix is not None and self.decoding[row] is sample:
            self.prefix.save_text(self.state, row, sample, self._table(sample))
        self._free(row)
        if self._programs.drafter.remembers and sample.completion.token_ids:
            self.state = self._programs.remember(self.state, sample.tokens)
        self.state = self._programs.retire(self.state, row)

    def abort(self, samples: Iterable[Sample]) -> None:
        """Takes samples, which have ended, out of the queue and their rows."""
        gone = {id(sample) for sample in samples}
        self.waiting = self.waiting.without(gone)
        for row, sample in self.held:
            if id(sample) in gone:
                self.retire(row, sample)

    def read_again(self) -> None:
        """Takes all rows from their samples, whose prompts and texts so far are then read again, before all others."""
        running = self.held
        for row, _ in running:
            self._free(row)
            self.state = self._programs.retire(self.state, row)
        self.waiting.put_back(sorted((sample for _, sample in running), key=lambda sample: sample.arrived))

    def recover(self, error: BaseException) -> None:
        """Drops the state; what ran waits again, before all others, and is read again with its text so far."""
        running = [sample for _, sample in self.held]
        for sample in running:
            if sample.stalls() >= ATTEMPTS:
                sample.fail(f"{ATTEMPTS} steps failed before another token came ({type(error).__name__}: {error})")
                self.moved[id(sample.output)] = sample.output
            if sample.completion.finish_reason is not None:
                self._settle(sample)
        self._state = None  # first of all its memory
        if self.prefix is not None:
            self.prefix.drop()
        for row, _ in self.held:
            self._free(row)
        unended = [sample for sample in running if sample.completion.finish_reason is None]
        self.waiting.put_back(sorted(unended, key=lambda sample: sample.arrived))

    def _settle(self, sample: Sample) -> None:
        if sample.settle() and all(c.error is None for c in sample.output.outputs):
            self._metrics.requests += 1

    def _free(self, row: int) -> None:
        """Takes a row and its pages back."""
        sample, self.rows[row] = self.rows[row], None
        self.reading = [reading for reading in self.reading if reading.prompt.row != row]
        if self.pool is not None and sample is not None:
            self.pool.release(sample.pages)
            sample.pages = []
