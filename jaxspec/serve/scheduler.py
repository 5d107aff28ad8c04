"""Which samples wait, which run in which row, and which pages they hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from jaxspec.cache.pages import PageAllocator
from jaxspec.serve.rows import Sample


class Scheduler:
    """First come, first served.

    Attributes:
      waiting: samples without a row, the oldest first.
      rows: sample in each row.
      pool: pages that all rows share, None where each row has its own.
      slack: positions beyond a text that may be written.
    """

    def __init__(self, rows: int, pool: PageAllocator | None, slack: int):
        self.waiting: deque[Sample] = deque()
        self.rows: list[Sample | None] = [None] * rows
        self.pool, self.slack = pool, slack

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting) or any(self.rows)

    @property
    def running(self) -> list[tuple[int, Sample]]:
        """Rows that run, with their samples."""
        return [(row, sample) for row, sample in enumerate(self.rows) if sample is not None]

    def add(self, samples: list[Sample]) -> None:
        """Queues the samples of one request.

        Raises:
          CapacityError: the page pool could never hold one of them; nothing is queued then.
        """
        if self.pool is not None:
            for sample in samples:
                self.pool.check(sample.max_length + self.slack)
        self.waiting.extend(samples)

    def place(self) -> Iterator[tuple[int, Sample]]:
        """Gives free rows and pages to the oldest samples that wait, one at a time."""
        for row, held in enumerate(self.rows):
            if held is not None or not self.waiting:
                continue
            sample = self.waiting[0]
            if self.pool is not None:
                pages = self.pool.allocate(sample.max_length + self.slack)
                if pages is None:
                    return  # the oldest request goes first; the others wait after it
                sample.pages = pages
            self.rows[row] = self.waiting.popleft()
            yield row, sample

    def table(self, sample: Sample, width: int) -> np.ndarray | None:
        """A sample's page table of so many places, None where rows have pages of their own."""
        if self.pool is None:
            return None
        table_J = np.zeros(width, np.int32)
        table_J[: len(sample.pages)] = sample.pages
        return table_J

    def withdraw(self, samples: list[Sample]) -> list[int]:
        """Takes samples out of the queue; returns the rows of those that run, which are still to be freed."""
        gone = {id(sample) for sample in samples}
        self.waiting = deque(sample for sample in self.waiting if id(sample) not in gone)
        return [row for row, sample in self.running if id(sample) in gone]

    def requeue(self) -> None:
        """Takes all rows and pages back; what ran and has not ended waits again, before all others."""
        running = [sample for _, sample in self.running]
        for row, _ in self.running:
            self.free(row)
        unended = [sample for sample in running if sample.completion.finish_reason is None]
        self.waiting.extendleft(sorted(unended, key=lambda sample: sample.arrived, reverse=True))

    def free(self, row: int) -> None:
        """Takes a row and its pages back."""
        sample, self.rows[row] = self.rows[row], None
        if self.pool is not None and sample is not None:
            self.pool.release(sample.pages)
            sample.pages = []
