"""One thread that does all work on an engine, so no interrupt of a caller ever meets a half-done step."""

from __future__ import annotations

import _thread
import atexit
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from jaxspec.errors import JaxspecError

T = TypeVar("T")
EXIT_S = 60.0  # longest wait at the interpreter's exit for a dispatch or a compilation that runs


class Job:
    """Work that somebody posted.

    Attributes:
      work: does it; an iterator that it returns is advanced in turns with the work of others, to its end.
      reply: takes ``(True, result)`` or ``(False, exception)`` once.
    """

    def __init__(self, work: Callable[[], Any]):
        self.work: Callable[[], Any] | None = work
        self.reply: SimpleQueue[tuple[bool, Any]] = SimpleQueue()
        self._steps: Iterator[Any] | None = None

    def advance(self) -> bool:
        """Does the work, or one part more of it; returns whether something is left."""
        try:
            if self._steps is None:
                assert self.work is not None
                result, self.work = self.work(), None
                if not isinstance(result, Iterator):
                    self.reply.put((True, result))
                    return False
                self._steps = result
            next(self._steps)
            return True
        except StopIteration as end:
            self.reply.put((True, end.value))
        except BaseException as error:
            self.reply.put((False, error))
        self.work = self._steps = None
        return False


@dataclass
class _Shared:
    """All that the thread knows of its worker, which may go away meanwhile.

    Attributes:
      jobs: to do; None ends the thread.
      idents: of the thread, while it runs.
      elected: taken by the one thread that serves, should several be started.
      ended: filled when the thread has ended.
      closing: filled when the interpreter ends.
      process: that the thread lives in.
    """

    jobs: SimpleQueue[Job | None] = field(default_factory=SimpleQueue)
    idents: list[int] = field(default_factory=list)
    elected: list[bool] = field(default_factory=lambda: [True])
    ended: SimpleQueue[bool] = field(default_factory=SimpleQueue)
    closing: list[bool] = field(default_factory=list)
    process: int = field(default_factory=os.getpid)


class Worker:
    """Runs what callers post, one piece at a time and in the order of posting.

    Signals reach Python's main thread only, and there the wait for a reply: what runs here runs to its end. The queues
    are ``SimpleQueue``, whose calls are atomic; locks and conditions of ``threading`` are not, and an interrupt inside
    one would leave it held for good. The thread starts with the first work and knows only the queue: it ends when
    nobody holds the worker any more, and before the interpreter ends.
    """

    def __init__(self):
        self._shared = _Shared()
        self.put_now = self._shared.jobs.put  # in one call into C, without a look at the process
        weakref.finalize(self, self._shared.jobs.put, None).atexit = False

    def post(self, work: Callable[[], Any]) -> Job:
        """Queues work and does not wait; an interrupt cannot keep it from being queued once the queue is called."""
        job = Job(work)
        self.put(job)
        return job

    def put(self, job: Job) -> None:
        """Queues a job; raises JaxspecError in a fork of the process, or when the interpreter ends."""
        shared = self._shared
        if os.getpid() != shared.process:
            raise JaxspecError(
                "LLM: this process was forked from the one that made the LLM, and JAX does not outlive a fork; make "
                'the LLM in the child, or start children with multiprocessing.get_context("spawn")'
            )
        if shared.closing:
            raise JaxspecError("LLM: the interpreter ends; nothing can be generated any more")
        if shared.elected:
            at_exit = partial(_close, shared)
            atexit.register(at_exit)
            _thread.start_new_thread(_serve, (shared, at_exit))
        shared.jobs.put(job)

    def call(self, work: Callable[[], Any], look: Callable[[], None] | None = None, every_s: float = 0.1) -> Any:
        """Runs work on the thread and returns its result, or raises what it raised; on the worker's own thread at once.

        ``look`` is called every ``every_s`` seconds while the caller waits.
        """
        if _thread.get_ident() in self._shared.idents:
            job = Job(work)
            while job.advance():
                pass
        else:
            job = self.post(work)
        return self.wait(job, look, every_s)

    def wait(self, job: Job, look: Callable[[], None] | None = None, every_s: float = 0.1) -> Any:
        """Waits for a job; returns its result, or raises what it raised."""
        while True:
            try:
                done, value = job.reply.get(timeout=None if look is None else every_s)
                break
            except Empty:
                assert look is not None
                look()
        if done:
            return value
        try:
            raise value
        finally:
            del value  # the exception's traceback holds this frame


def _serve(shared: _Shared, at_exit: Callable[[], None]) -> None:
    """Runs jobs until None comes; holds nothing while it waits."""
    try:
        shared.elected.pop()
    except IndexError:
        return
    shared.idents.append(_thread.get_ident())
    while (job := shared.jobs.get()) is not None and not shared.closing:
        while (left := job.advance()) and shared.jobs.empty() and not shared.closing:
            pass
        if left:
            shared.jobs.put(job)
        del job
    job = None  # what it holds, weights among it, must be gone before the interpreter is
    shared.idents.clear()
    atexit.unregister(at_exit)
    shared.ended.put(True)


def _close(shared: _Shared) -> None:
    """Ends the thread before the interpreter takes away what its programs need; a fork has none."""
    if os.getpid() != shared.process:
        return
    shared.closing.append(True)
    shared.jobs.put(None)
    try:
        shared.ended.get(timeout=EXIT_S)
    except Empty:
        return
    shared.ended.put(True)
