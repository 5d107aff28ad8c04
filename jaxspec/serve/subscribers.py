"""Requests that are followed from event loops: each gets its news when it asks, and one dispatch after another runs."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from jaxspec.errors import QueueFullError
from jaxspec.serve.engine import late
from jaxspec.serve.output_news import still_of, unseen_output
from jaxspec.serve.request import RequestOutput
from jaxspec.serve.sample import Sample
from jaxspec.serve.worker import Job

if TYPE_CHECKING:
    from jaxspec.serve.driver import Driver

ATTEMPTS = 3  # dispatches in a row that may fail


class Subscriber:
    """One request, and the loop that follows it.

    Attributes:
      samples: of the request.
      loop: that it is followed from.
      limit: requests that may wait for a row at a time, None for any number, and whether more are an error.
      moved: whether there is something new.
      asked: takes the news; None while nobody asks.
      error: that ended it.
      abort: ends it; made beforehand, so that to give it up is one call.
    """

    def __init__(self, driver: Driver, samples: list[Sample], limit: tuple[int | None, bool]):
        self.samples, self.limit, self.loop = samples, limit, asyncio.get_running_loop()
        self.moved, self.asked, self.error = False, None, None
        self.give_up = partial(driver.subscribers.give_up, self)
        self.abort = Job(self.give_up)
        self.entered = self.loop.create_future()

    asked: asyncio.Future[RequestOutput] | None
    error: BaseException | None

    @property
    def output(self) -> RequestOutput:
        """Returns what grows."""
        return self.samples[0].output

    @property
    def waits(self) -> bool:
        """Whether no sample of it has had a row."""
        return not self.output.finished and not any(sample.begun for sample in self.samples)

    def tell(self) -> None:
        """Gives what is new to whoever asks for it."""
        asked = self.asked
        if asked is None or not (self.moved or self.output.finished or self.error):
            return
        news = None if self.error is not None else unseen_output(self.output)
        if news is None and self.error is None:
            return
        self.asked, self.moved = None, False
        if not answer(self.loop, asked, None if news is None else still_of(news), self.error):
            self.give_up()


class Subscribers:
    """All requests that are followed; everything here is done on the worker's thread.

    A request's news lie in its one growing output until they are asked for: a slow reader holds nobody up, and keeps
    no more than its text.
    """

    def __init__(self, driver: Driver):
        self._driver_of, self._runs, self._callers = weakref.ref(driver), False, count()
        self._parked: dict[int, Subscriber] = {}  # in their order
        self._by_output: dict[int, Subscriber] = {}

    @property
    def _driver(self) -> Driver:
        """Whose subscribers these are: it holds them, and must go away with its last holder."""
        driver = self._driver_of()
        assert driver is not None, "who follows a request holds the LLM"
        return driver

    @property
    def samples(self) -> list[Sample]:
        """Samples that are not queued yet."""
        return [sample for one in self._parked.values() for sample in one.samples]

    def enter(self, one: Subscriber, caller: Any) -> None:
        """Takes a request up, when there is room for it."""
        for sample in one.samples:
            sample.caller = ("followed", next(self._callers) if caller is None else caller)
        most, strict = one.limit
        if most is not None and strict and self._waiting() + len(self._parked) >= most:
            words = f"generate: {most} requests wait already (max_queued_requests); try again later, or raise it"
            answer(one.loop, one.entered, None, QueueFullError(words))
            return
        self._parked[id(one)] = one
        self._by_output[id(one.output)] = one
        self._let_in()
        if not self._runs:
            self._runs = True
            self._driver.worker.put(Job(self._run))

    def ask(self, one: Subscriber, asked: asyncio.Future[RequestOutput]) -> None:
        """Promises the next news of a request."""
        one.asked = asked
        one.tell()

    def give_up(self, one: Subscriber) -> None:
        """Ends a request that nobody follows any more."""
        self._by_output.pop(id(one.output), None)
        self._parked.pop(id(one), None)
        self._driver.engine.abort(one.samples)
        self._let_in()

    def look(self, moved: list[RequestOutput]) -> None:
        """Tells the followers of what moved, and lets in who had to wait."""
        for output in moved:
            one = self._by_output.get(id(output))
            if one is not None:
                one.moved = True
                self._tell(one)
        self._let_in()

    def _tell(self, one: Subscriber) -> None:
        one.tell()
        if one.output.finished or one.error is not None:
            self._by_output.pop(id(one.output), None)

    def _waiting(self) -> int:
        return sum(one.waits for one in self._by_output.values() if id(one) not in self._parked)

    def _let_in(self) -> None:
        """Queues parked requests, the oldest first, while there is room."""
        while self._parked:
            one = next(iter(self._parked.values()))
            if not one.output.finished and one.limit[0] is not None and self._waiting() >= one.limit[0]:
                return
            del self._parked[id(one)]
            try:
                if not one.output.finished:
                    self._driver.engine.add(one.samples)
            except Exception as error:
                self._by_output.pop(id(one.output), None)
                answer(one.loop, one.entered, None, error)
                continue
            answer(one.loop, one.entered, None, None)

    def _run(self) -> Iterator[None]:
        """Runs dispatches as long as somebody follows a request."""
        failed = 0
        while self._by_output:
            try:
                self._driver.advance(None)
                failed = 0
            except Exception as error:
                failed += 1
                if failed >= ATTEMPTS:
                    self._fail(error)
            self._end_late()
            yield
        self._runs = False

    def _end_late(self) -> None:
        """Ends parked requests whose time is over."""
        engine = self._driver.engine
        if gone := late(self.samples):
            engine.abort(gone, "timeout")
            self.look([sample.output for sample in gone])

    def _fail(self, error: BaseException) -> None:
        """Ends all requests with an error that is none of theirs."""
        for one in list(self._by_output.values()):
            self._driver.engine.abort(one.samples)
            one.error = error
            self._tell(one)
        self._by_output.clear()


def answer(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], result: Any, error: BaseException | None
) -> bool:
    """Settles a future of another thread's loop; returns whether the loop is there, and not closed."""

    def settle() -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:
        return False
    return True


def promised(work: Callable[[], Any], loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any]) -> Iterator[None]:
    """Does work on the worker's thread, in turns with that of others if it is an iterator, and settles a future."""
    result, failed = None, None
    try:
        result = work()
        if isinstance(result, Iterator):
            result = yield from result
    except BaseException as error:
        failed = error
    answer(loop, future, result, failed)
