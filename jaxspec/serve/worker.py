"""One thread that does all work on an engine, so that no interrupt of a caller ever meets a half-done step."""

from __future__ import annotations

import _thread
import atexit
import os
import weakref
from collections.abc import Callable, Iterator
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


class Worker:
    """Runs what callers post, one piece at a time and in the order of posting.

    Signals reach Python's main thread only, and there the wait for a reply: what runs here runs to its end. The queues
    are ``SimpleQueue``, whose calls are atomic; locks and conditions of ``threading`` are not, and an interrupt inside
    one would leave it held for good. The thread starts with the first work and knows only the queue: it ends when
    nobody holds the worker any more, and before the interpreter ends.
    """

    def __init__(self):
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._idents: list[int] = []  # of the thread, once it runs
        self._elected = [True]  # taken by the one thread that serves, should several be started
        self._ended: SimpleQueue[bool] = SimpleQueue()
        self._closing: list[bool] = []
        self._process = os.getpid()
        self.put_now = self._jobs.put  # in one call into C, without a look at the process
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def post(self, work: Callable[[], Any]) -> Job:
        """Queues work and does not wait; an interrupt cannot keep it from being queued once the queue is called."""
        job = Job(work)
        self.put(job)
        return job

    def put(self, job: Job) -> None:
        """Queues a job.

        Raises:
          JaxspecError: this process is a fork of the one that the worker lives in, or the interpreter ends.
        """
        if os.getpid() != self._process:
            raise JaxspecError(
                "LLM: this process was forked from the one that made the LLM, and JAX does not outlive a fork; make "
                'the LLM in the child, or start children with multiprocessing.get_context("spawn")'
            )
        if self._closing:
            raise JaxspecError("LLM: the interpreter ends; nothing can be generated any more")
        if self._elected:
            closing = partial(_close, self._process, self._jobs, self._ended, self._closing)
            atexit.register(closing)
            _thread.start_new_thread(
                _serve, (self._jobs, self._idents, self._elected, self._ended, self._closing, closing)
            )
        self._jobs.put(job)

    def call(self, work: Callable[[], Any], look: Callable[[], None] | None = None, every_s: float = 0.1) -> Any:
        """Runs work on the thread and returns its result, or raises what it raised.

        Args:
          work: see ``Job``. On the worker's own thread it runs at once.
          look: called again and again while the caller waits.
          every_s: time between its calls in seconds.
        """
        if _thread.get_ident() in self._idents:
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


def _serve(
    jobs: SimpleQueue[Job | None],
    idents: list[int],
    elected: list[bool],
    ended: SimpleQueue[bool],
    closing: list[bool],
    at_exit: Callable[[], None],
) -> None:
    """Runs jobs until None comes; holds nothing while it waits."""
    try:
        elected.pop()
    except IndexError:
        return
    idents.append(_thread.get_ident())
    while (job := jobs.get()) is not None and not closing:
        while (left := job.advance()) and jobs.empty() and not closing:
            pass
        if left:
            jobs.put(job)
        del job
    idents.clear()
    atexit.unregister(at_exit)
    ended.put(True)


def _close(process: int, jobs: SimpleQueue[Job | None], ended: SimpleQueue[bool], closing: list[bool]) -> None:
    """Ends the thread before the interpreter takes away what its programs need; a fork has none."""
    if os.getpid() != process:
        return
    closing.append(True)
    jobs.put(None)
    try:
        ended.get(timeout=EXIT_S)
    except Empty:
        return
    ended.put(True)
