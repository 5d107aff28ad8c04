"""Calls from any thread on one engine, done on its worker: run, stream, submit, step, abort."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from jaxspec.serve.engine import Engine
from jaxspec.serve.parameters import RequestOutputKind
from jaxspec.serve.request import UNSEEN, CompletionOutput, RequestOutput
from jaxspec.serve.sample import Sample
from jaxspec.serve.worker import Job, Worker


class Driver:
    """Shares one engine among callers: a step that one of them asks for moves the requests of all.

    Where a caller is interrupted, its requests are aborted, and the interrupt goes on to it.
    """

    def __init__(self, engine: Engine, worker: Worker):
        self.engine, self.worker = engine, worker
        self._submitted: dict[int, RequestOutput] = {}
        self._moved: dict[int, RequestOutput] = {}
        self._unseen: list[RequestOutput] = []  # of a step whose caller was interrupted

    def call(self, work: Callable[[], Any]) -> Any:
        """Runs work between two steps, and returns its result."""
        return self.worker.call(work)

    def run(self, requests: list[list[Sample]], look: Callable[[], None] | None = None) -> list[RequestOutput]:
        """Runs requests to their ends; ``look`` is called now and then while they run."""
        return self._owning([s for samples in requests for s in samples], partial(self._run, requests), look)

    def stream(self, samples: list[Sample], steps: int) -> Iterator[RequestOutput]:
        """Yields a request's output after every ``steps`` steps of it, and its last state once it has ended."""
        output, abort = samples[0].output, Job(partial(self.engine.abort, samples))
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

    def abort(self, outputs: Iterable[RequestOutput] | None = None) -> None:
        """Ends requests, by default all of them."""
        self.worker.call(partial(self._abort, None if outputs is None else list(outputs)))

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
                self._advance(None)
                yield
        except Exception:
            self.engine.abort([sample for samples in requests for sample in samples])
            raise
        return outputs

    def _step_until(self, output: RequestOutput, steps: int) -> tuple[bool, RequestOutput | None]:
        """Runs steps for a request that goes on; returns whether it has ended, and what its caller has not seen."""
        if not output.finished:
            self._advance(steps)
        return output.finished, unseen_output(output)

    def _submit(self, samples: list[Sample]) -> RequestOutput:
        self.engine.add(samples)
        output = samples[0].output
        self._submitted[id(output)] = output
        return output

    def _step(self, steps: int | None, moved: list[RequestOutput]) -> list[RequestOutput]:
        self._advance(steps)
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

    def _advance(self, steps: int | None) -> None:
        moved: list[RequestOutput] = []
        try:
            moved = self.engine.step(steps)
        except BaseException:
            moved = self.engine.take_moved()
            raise
        finally:
            self._moved |= {id(output): output for output in moved if id(output) in self._submitted}
            self.use_idle_time()

    def use_idle_time(self) -> None:
        """Lets the engine time its arms until there is something to do, if they are to be timed."""
        if self.engine.timing_due and not self.engine.busy:
            self.worker.put(Job(self.engine.time_arms))

    def _abort(self, outputs: list[RequestOutput] | None) -> None:
        gone = None if outputs is None else {id(output) for output in outputs}
        samples = [*self.engine.waiting, *filter(None, self.engine.rows)]
        self.engine.abort([sample for sample in samples if gone is None or id(sample.output) in gone])
        for key in list(self._submitted) if gone is None else gone:
            self._submitted.pop(key, None)
            self._moved.pop(key, None)
        self._unseen = [output for output in self._unseen if gone is not None and id(output) not in gone]


def unseen_output(output: RequestOutput) -> RequestOutput | None:
    """Returns the output itself, a copy with what was not handed out before, or None where there is nothing new.

    A copy has the samples that have something new; the prompt's log-probabilities come with the first.
    """
    if output.kind is RequestOutputKind.CUMULATIVE:
        return output
    if output.kind is RequestOutputKind.FINAL_ONLY:
        return output if output.finished else None
    first = all(shown == UNSEEN for shown in output.shown)
    news = [_news(completion, output.shown[completion.index]) for completion in output.outputs]
    if not any(news) and not output.finished:
        return None
    output.shown = [(len(c.text), len(c.token_ids), c.finish_reason is not None) for c in output.outputs]
    return replace(
        output, outputs=[c for c in news if c is not None], kind=RequestOutputKind.CUMULATIVE,
        prompt_logprobs=output.prompt_logprobs if first else None,
    )  # fmt: skip


def _news(completion: CompletionOutput, shown: tuple[int, int, bool]) -> CompletionOutput | None:
    """Returns what came after what was shown, see ``RequestOutput.shown``; None for nothing."""
    c, (characters, tokens, ended) = completion, shown
    if len(c.token_ids) == tokens and (c.finish_reason is not None) == ended:
        return None
    return replace(
        c, text=c.text[characters:], token_ids=c.token_ids[tokens:], drafted=c.drafted[tokens:],
        logprobs=None if c.logprobs is None else c.logprobs[tokens:],
    )  # fmt: skip
