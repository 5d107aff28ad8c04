"""The queue of samples: callers take turns, and each caller's samples go in the order in which they came."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from jaxspec.serve.sample import Sample


class FairQueue(Sequence["Sample"]):
    """Samples that wait, in the order in which they will go: one of each caller, then the next of each.

    A caller that comes is the last of the round, and one that has had its turn is the last of the next: between two of
    its samples every other caller has one at most, however many it has asked for. What was put back goes before all.
    """

    def __init__(self) -> None:
        self._first: deque[Sample] = deque()
        self._by_caller: dict[Hashable, deque[Sample]] = {}  # in the order of their turns
        self._count = 0

    def __len__(self) -> int:
        return len(self._first) + self._count

    def __iter__(self) -> Iterator[Sample]:
        yield from self._first
        left = [iter(samples) for samples in self._by_caller.values()]
        while left:
            going = []
            for samples in left:
                if (sample := next(samples, None)) is not None:
                    yield sample
                    going.append(samples)
            left = going

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if index == 0 and len(self):
            return self._first[0] if self._first else next(iter(self._by_caller.values()))[0]
        return list(self)[index]

    def extend(self, samples: Iterable[Sample]) -> None:
        """Takes samples of one caller or of several."""
        for sample in samples:
            self._by_caller.setdefault(sample.caller, deque()).append(sample)
            self._count += 1

    def put_back(self, samples: Iterable[Sample]) -> None:
        """Takes samples that had their turn and go before all others, in this order."""
        self._first.extendleft(reversed(list(samples)))

    def popleft(self) -> Sample:
        """Takes out the next one."""
        if self._first:
            return self._first.popleft()
        caller = next(iter(self._by_caller))
        samples = self._by_caller.pop(caller)
        self._count -= 1
        sample = samples.popleft()
        if samples:
            self._by_caller[caller] = samples
        return sample

    def without(self, gone: set[int]) -> FairQueue:
        """Returns the queue without some samples, by identity; nobody loses a turn."""
        rest = FairQueue()
        rest._first = deque(sample for sample in self._first if id(sample) not in gone)
        for samples in self._by_caller.values():
            rest.extend(sample for sample in samples if id(sample) not in gone)
        return rest
