"""Calls from any thread on one engine, done on its worker: run, stream, submit, step, abort, pause, follow."""

from __future__ import annotations

import time
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from itertools import count
from typing import Any

from jaxspec.serve.engine import Engine
from jaxspec.serve.output_news import unseen_output
from jaxspec.serve.request import RequestOutput
from jaxspec.serve.sample import Sample
from jaxspec.serve.subscribers import Subscribers
from jaxspec.serve.worker import Job, Worker

PAUSE_S = 0.002  # between two looks at whether it goes on


class Driver:
    """Shares one engine among callers: a step that one of them asks for moves the requests of all.

    Where a caller is interrupted, its requests are aborted, and the interrupt goes on to it.

    Attributes:
      paused: whether nothing runs until it is resumed.
      subscribers: requests that are followed from an event loop.
    """

    def __init__(self, engine: Engine, worker: Worker):
        self.engine, self.worker, self.paused = engine, worker, False
        self.subscribers = Subscribers(self)
        self._callers = count()  # atomic; a thread that submits is a caller, too, by its number
        self._submitted: dict[int, RequestOutput] = {}
        self._moved: dict[int, RequestOutput] = {}
        self._unseen: list[RequestOutput] = []  # of a step whose caller was interrupted

    def call(self, work: Callable[[], Any]) -> Any:
        """Runs work between two steps, and returns its result."""
        return self.worker.call(work)

    def run(self, requests: list[list[Sample]], look: Callable[[], None] | None = None) -> list[RequestOutput]:
        """Runs requests to their ends; ``look`` is called now and then while they run."""
        every = [s for samples in requests for s in samples]
        self._sign(every, next(self._callers))
        return self._owning(every, partial(self._run, requests), look)

    def stream(self, samples: list[Sample], steps: int) -> Iterator[RequestOutput]:
        """Yields a request's output after every ``steps`` steps of it, and its last state once it has ended."""
        output, abort = samples[0].output, Job(partial(self.engine.abort, samples))
        self._sign(samples, next(self._callers))
        try:
            self.worker.call(partial(self.engine.add, samples))
            ended = False
            while not ended:
                ended, news = self.worker.call(partial(self._step_until, output, steps))
                if news is not None:
                    yield news
        finally:
            self.worker.put_now(abort)  # nothing but where it was given up

    def submit(self, samples: list[Sample]) -> RequestOutput:
        """Queues a request that ``step`` returns whenever it moved."""
        self._sign(samples, ("thread", get_ident()))
        return self._owning(samples, partial(self._submit, samples))

    def step(self, steps: int | None = None) -> list[RequestOutput]:
        """Runs a dispatch; returns submitted requests that moved since the last time, whoever ran the steps."""
        moved: list[RequestOutput] = []
        put_back = Job(partial(self._put_back, moved))
        try:
            return self.worker.call(partial(self._step, steps, moved))
        except BaseException:
            self.worker.put_now(put_back)
            raise

    def abort(self, which: Iterable[RequestOutput | str] | None = None) -> None:
        """Ends requests, given by their outputs or ids, by default all of them."""
        self.worker.call(partial(self.abort_now, None if which is None else list(which)))

    def pause_now(self, mode: str) -> Iterator[None]:
        """Lets nothing run any more, once what is there was aborted (``abort``) or has ended (``wait``), or at once."""
        self.engine.closed = True
        self.paused = self.paused and mode != "wait"
        if mode == "abort":
            self.abort_now(None)
        while mode == "wait" and self.engine.busy and self.engine.closed:
            self.advance(None)
            yield
        self.paused = self.engine.closed  # or it was resumed meanwhile

    def resume_now(self) -> None:
        """Lets run what was paused, and what came meanwhile."""
        self.paused = False
        self.engine.open()

    def _sign(self, samples: list[Sample], caller: Hashable) -> None:
        """Says whose samples they are."""
        for sample in samples:
            sample.caller = caller

    def _owning(self, samples: list[Sample], work: Callable[[], Any], look: Callable[[], None] | None = None) -> Any:
        """Runs work for requests that are aborted if it is interrupted."""
        abort = Job(partial(self.engine.abort, samples))
        try:
            return self.worker.call(work, look)
        except BaseException:
            # The first thing that a handler does, in one call into C: a second interrupt comes too late.
            self.worker.put_now(abort)
            raise

    def _run(self, requests: list[list[Sample]]) -> Iterator[None]:
        """Runs requests, and lets other work have its turn after each step."""
        outputs = [samples[0].output for samples in requests]
        left = deque(outputs)
        try:
            for samples in requests:
                self.engine.add(samples)
            while left:
                if left[0].finished:
                    left.popleft()
                    continue
                self.advance(None)
                yield
        except Exception:
            self.engine.abort([sample for samples in requests for sample in samples])
            raise
        return outputs

    def _step_until(self, output: RequestOutput, steps: int) -> Iterator[None]:
        """Runs steps for a request that goes on; returns whether it has ended, and what its caller has not seen."""
        while self.paused and not output.finished:
            self.advance(None)
            yield
        if not output.finished:
            self.advance(steps)
        return output.finished, unseen_output(output)

    def _submit(self, samples: list[Sample]) -> RequestOutput:
        self.engine.add(samples)
        output = samples[0].output
        self._submitted[id(output)] = output
        return output

    def _step(self, steps: int | None, moved: list[RequestOutput]) -> list[RequestOutput]:
        self.advance(steps)
        went, self._moved = self._moved, {}
        for key, output in went.items():
            if output.finished:
                self._submitted.pop(key, None)
        news = [*self._unseen, *filter(None, map(unseen_output, went.values()))]
        self._unseen = []
        moved += {id(output): output for output in news}.values()
        return moved

    def _put_back(self, moved: list[RequestOutput]) -> None:
        """Hands out outputs once more whose caller was interrupted before it saw them."""
        self._unseen = moved + self._unseen

    def advance(self, steps: int | None) -> None:
        """Runs one dispatch, and hands on what moved; while all is paused it waits a moment."""
        moved: list[RequestOutput] = []
        try:
            moved = self._wait_a_moment() if self.paused else self.engine.step(steps)
        except BaseException:
            moved = self.engine.take_moved()
            raise
        finally:
            self._moved |= {id(output): output for output in moved if id(output) in self._submitted}
            self.subscribers.look(moved)
            self.use_idle_time()

    def _wait_a_moment(self) -> list[RequestOutput]:
        """Waits, and ends what is late meanwhile."""
        time.sleep(PAUSE_S)
        self.engine.end_late()
        return self.engine.take_moved()

    def use_idle_time(self) -> None:
        """Lets the engine time its arms until there is something to do, if they are to be timed."""
        if self.engine.timing_due and not self.engine.busy:
            self.worker.put(Job(self.engine.time_arms))

    def abort_now(self, which: list[RequestOutput | str] | None) -> None:
        """Ends requests wherever they are; whoever follows one gets its last state."""
        named = None if which is None else {x if isinstance(x, str) else id(x) for x in which}

        def meant(output: RequestOutput) -> bool:
            return named is None or id(output) in named or output.request_id in named

        samples = [sample for sample in (*self.engine.samples, *self.subscribers.samples) if meant(sample.output)]
        self.engine.abort(samples)
        for key in [key for key, output in self._submitted.items() if meant(output)]:
            del self._submitted[key]
            self._moved.pop(key, None)
        self._unseen = [output for output in self._unseen if not meant(output)]
        self.subscribers.look([sample.output for sample in samples])
