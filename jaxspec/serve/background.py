"""Programs that compile on threads of their own, the urgent ones first, while others run already."""

from __future__ import annotations

import _thread
import atexit
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxspec.errors import JaxspecError

THREADS = 2  # XLA compiles outside the interpreter lock
EXIT_S = 60.0  # longest wait at the interpreter's exit for compilations that run
LOOK_S = 0.01

Compile = Callable[[], Any]


@dataclass
class _Shared:
    """All that the threads know of a table, which may go away meanwhile.

    Attributes:
      jobs: not begun yet.
      done: whether each compiled one is usable, and the program or the error.
      compiling: one entry per thread that may still compile.
      running: one entry per thread at all.
      closing: filled when nothing more is to begin.
      after: to be called once nothing is left to compile.
    """

    jobs: deque[tuple[Hashable, Compile]]
    done: dict[Hashable, tuple[bool, Any]] = field(default_factory=dict)
    compiling: list[bool] = field(default_factory=list)
    running: list[bool] = field(default_factory=list)
    closing: list[bool] = field(default_factory=list)
    after: deque[Callable[[], None]] = field(default_factory=deque)


class CompiledPrograms(MutableMapping[Hashable, Any]):
    """A table of programs whose entries wait for their compilation, and raise what ended it.

    Waiting is a loop that sleeps: no lock can stay held by a caller that is interrupted. The threads know only the
    jobs. They end with them, when nobody holds the table any more, and before the interpreter ends.
    """

    def __init__(self, jobs: Mapping[Hashable, Compile], threads: int = THREADS):
        """Starts to compile, in this order, at most ``threads`` at a time."""
        self._threads = threads
        self._names, self._process = [], os.getpid()
        self._shared = _Shared(deque())
        self.close = partial(self._shared.closing.append, True)
        weakref.finalize(self, self.close).atexit = False
        self._at_exit = partial(_close, self._shared, self._process)
        self.compile(jobs)

    def compile(self, jobs: Mapping[Hashable, Compile]) -> None:
        """Starts to compile more, after what is not compiled yet."""
        if not jobs:
            return
        shared = self._shared
        self._names += list(jobs)
        shared.jobs.extend(jobs.items())
        atexit.register(self._at_exit)
        for _ in range(min(self._threads, len(jobs))):  # those that run may be about to end
            shared.compiling.append(True)
            shared.running.append(True)
            _thread.start_new_thread(_work, (shared, self._at_exit))

    def ready(self, name: Hashable) -> bool:
        """Whether a program, or the reason why there is none, is there."""
        return name in self._shared.done

    def wait(self, names: Iterable[Hashable], show: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Waits for programs; raises the first error among them.

        Args:
          names: of the programs.
          show: called with (programs compiled, programs in all), first with none.
        """
        left = [name for name in names if name in self._names]
        total = len(left)
        show(0, total)
        while left:
            for name in [name for name in left if self.ready(name)]:
                self[name]
                left.remove(name)
                show(total - len(left), total)
            time.sleep(LOOK_S if left else 0)

    def then(self, work: Callable[[], None]) -> None:
        """Has work done once nothing is left to compile, by a thread that compiled or at once."""
        self._shared.after.append(work)
        if not self._shared.compiling:
            _finish(self._shared)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to compile."""
        return all(map(self.ready, self._names))

    def __getitem__(self, name: Hashable) -> Any:
        if name not in self._shared.done and name not in self._names:
            raise KeyError(name)
        while name not in self._shared.done:
            if self._shared.closing and not self._shared.running:
                raise JaxspecError(f"{name} was not compiled before the engine was given up")
            time.sleep(LOOK_S)
        usable, program = self._shared.done[name]
        if not usable:
            raise program
        return program

    def __setitem__(self, name: Hashable, program: Any) -> None:
        self._names += [] if name in self._names else [name]
        self._shared.done[name] = True, program

    def __delitem__(self, name: Hashable) -> None:
        self._names.remove(name)
        del self._shared.done[name]

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _work(shared: _Shared, at_exit: Callable[[], None]) -> None:
    """Compiles until nothing is left."""
    while shared.jobs and not shared.closing:
        try:
            name, job = shared.jobs.popleft()
        except IndexError:  # the other thread was quicker
            break
        try:
            program = True, job()
        except BaseException as error:
            program = False, error
        shared.done.setdefault(name, program)
        del job, program
    shared.compiling.pop()
    if not shared.compiling:
        _finish(shared)
    shared.running.pop()
    if not shared.running:
        atexit.unregister(at_exit)


def _finish(shared: _Shared) -> None:
    """Calls what waits for the end, each once."""
    while shared.after and not shared.closing:
        try:
            work = shared.after.popleft()
        except IndexError:
            return
        work()


def _close(shared: _Shared, process: int) -> None:
    """Ends the threads before the interpreter takes away what compiling needs; a fork has none."""
    shared.closing.append(True)
    until = time.monotonic() + EXIT_S
    while os.getpid() == process and shared.running and time.monotonic() < until:
        time.sleep(LOOK_S)
