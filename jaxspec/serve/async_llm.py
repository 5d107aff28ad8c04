"""Generation for event loops: ``async for output in llm.generate(...)``, in this process and without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jaxspec.checkpoint.load.model import Model
from jaxspec.errors import ConfigError, RequestError
from jaxspec.serve.arguments import as_int
from jaxspec.serve.llm import LLM
from jaxspec.serve.prompts import Prompt
from jaxspec.serve.request import Logprob, RequestOutput, SamplingParams
from jaxspec.serve.running_engine import PauseMode, Weights
from jaxspec.serve.subscribers import Subscriber, promised
from jaxspec.serve.vllm_arguments import refuse_with_request
from jaxspec.serve.worker import Job
from jaxspec.shapes import Params
from jaxspec.sharding import hosts


class AsyncLLM:
    """An ``LLM`` whose requests are followed from event loops, of one thread or several.

    The one thread that works on the engine runs dispatches as long as a request is followed. The ``LLM`` itself may be
    used at the same time; all share the batch. A request's news lie in its one growing output until they are read, so a
    slow reader neither holds others up nor keeps more than its text. Rows go to callers in turns: one request, or one
    ``client``, or one call of the ``LLM``, whichever asks for most.

    Attributes:
      llm: the model, for everything that is not here.

    Args:
      model: an ``LLM``, or what it is made of.
      max_queued_requests: requests from here that may wait for a row at a time; None for any number.
      when_full: ``wait`` lets ``generate`` wait until there is room, ``error`` raises QueueFullError.
      settings: of the ``LLM``, where it is made here.

    Raises:
      ConfigError: settings are not usable, or there are several processes, which must all make the same calls.
    """

    def __init__(
        self,
        model: LLM | str | Path | Model,
        *,
        max_queued_requests: int | None = None,
        when_full: Literal["wait", "error"] = "wait",
        **settings: Any,
    ):
        if max_queued_requests is not None:
            max_queued_requests = as_int("max_queued_requests", max_queued_requests, 1, "AsyncLLM")
        if when_full not in ("wait", "error"):
            raise ConfigError(f"AsyncLLM: when_full must be 'wait' or 'error', got {when_full!r}")
        if hosts.is_multiprocess():
            raise ConfigError("AsyncLLM: several processes must make the same calls in the same order; use LLM there")
        if isinstance(model, LLM) and settings:
            raise ConfigError(f"AsyncLLM: an LLM brings its settings; leave out {sorted(settings)}")
        self.llm = model if isinstance(model, LLM) else LLM(model, **settings)
        self._limit = max_queued_requests, when_full == "error"
        self._live: dict[str, Subscriber] = {}

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        client: Hashable = None,
        lora_request: None = None,
        priority: None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yields what is there of a request whenever it is asked and there is something new, and at last its end.

        Each output is a copy that stays as it is. To leave the loop, to cancel the task or to close the generator ends
        the request. With ``output_kind`` DELTA each output has what is new, with FINAL_ONLY there is only the last.

        Args:
          prompt: as for ``LLM.generate``, or ``{"messages": [...]}``.
          sampling_params: its settings; ``timeout_s`` counts from here.
          request_id: name that ``abort`` knows it by; by default its number.
          client: requests of one client take their turns one after the other; by default each is its own.
          lora_request: vLLM's; there are no adapters here.
          priority: vLLM's; callers take turns.

        Raises:
          RequestError, CapacityError: the request is not acceptable, or another one of this name goes on.
          QueueFullError: as many wait as may, and ``when_full`` is ``error``.
        """
        refuse_with_request(lora_request=lora_request, priority=priority)
        samples = self.llm.prompts.request(prompt, sampling_params, request_id)
        name, driver = samples[0].output.request_id, self.llm.driver
        if name in self._live:
            raise RequestError(f"request_id: {name!r} goes on already; give another name")
        one = self._live[name] = Subscriber(driver, samples, self._limit)
        try:
            driver.worker.post(partial(driver.subscribers.enter, one, client))
            await one.entered
            ended = False
            while not ended:
                asked = one.loop.create_future()
                driver.worker.post(partial(driver.subscribers.ask, one, asked))
                output = await asked
                ended = output.finished
                yield output
        finally:
            del self._live[name]
            driver.worker.put_now(one.abort)  # nothing but where it was given up

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests as ``abort``, whoever made them; ``generate`` yields what they have. Others are not minded."""
        names: list[Any] = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._call(partial(self.llm.driver.abort_now, names))

    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Lets nothing run until ``resume_generation``, see ``LLM.pause_generation`` for the arguments."""
        await self._call(self.llm.pausing(mode))
        if clear_cache:
            await self._call(self.llm.engine.reset_prefix_cache)

    async def resume_generation(self) -> None:
        """Lets run what was paused, and what came meanwhile."""
        await self._call(self.llm.driver.resume_now)

    async def is_paused(self) -> bool:
        """Whether generation is paused."""
        return self.llm.is_paused()

    async def update_target(self, weights: Weights) -> None:
        """Replaces the target's weights, see ``LLM.update_target``; the loop goes on meanwhile."""
        await asyncio.to_thread(self.llm.update_target, weights)

    async def update_draft(self, params: Params) -> None:
        """Replaces the parameters of the draft model or head, see ``LLM.update_draft``."""
        await asyncio.to_thread(self.llm.update_draft, params)

    async def score(self, token_ids: Sequence[int] | Sequence[Sequence[int]]) -> list[list[Logprob | None]]:
        """Computes log-probability and rank of each token of texts, see ``LLM.score``."""
        return await asyncio.to_thread(self.llm.score, token_ids)

    def shutdown(self) -> None:
        """Ends all requests from here; the ``LLM`` stays."""
        for one in list(self._live.values()):
            self.llm.driver.abort([one.output])

    async def _call(self, work: Callable[[], Any]) -> Any:
        """Has work done on the engine's thread; the loop goes on meanwhile."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self.llm.driver.worker.put(Job(partial(promised, work, loop, future)))
        return await future
