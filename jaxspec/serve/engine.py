"""The engine: takes requests into rows as places become free, dispatches steps, hands out finished text."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import jax
import numpy as np

from jaxspec.cache.pages import PageAllocator
from jaxspec.decode.state import Target, init_state
from jaxspec.decode.step import Report, StepPlan
from jaxspec.protocol import Drafter
from jaxspec.serve.compiled import Programs
from jaxspec.serve.metrics import EngineMetrics
from jaxspec.serve.request import Logprob, RequestOutput
from jaxspec.serve.rows import Sample

STOP_PLACES = 16


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is fixed to.

    Attributes:
      rows: batch slots.
      capacity: longest text in tokens, prompt included.
      rule: verification rule.
      steps: most steps before the host looks.
      logprobs: most log-probabilities per token that a request may ask for.
      buckets: prefill chunk sizes, ascending.
      page, pages: page size and count of a shared pool; 0 gives each row one page of its own.
    """

    rows: int
    capacity: int
    rule: str = "match"
    steps: int = 8
    logprobs: int = 20
    buckets: tuple[int, ...] = (32, 256)
    page: int = 0
    pages: int = 0


class Engine:
    """Continuous batching over compiled steps."""

    def __init__(self, target: Target, drafter: Drafter, spec: EngineSpec, eos: set[int]):
        self.spec, self.eos, self.drafter = spec, eos, drafter
        self.slack = max(drafter.topology.nodes, drafter.slack, spec.buckets[-1])
        self.pool = PageAllocator(spec.pages, spec.page) if spec.pages else None
        plan = StepPlan(spec.rule, spec.steps, spec.logprobs)
        self.state = init_state(
            target, drafter, spec.rows, spec.capacity,
            slack=self.slack, stop_ids=STOP_PLACES, pages=spec.pages, page=spec.page,
        )  # fmt: skip
        self.programs = Programs(target, drafter, self.state, plan, spec.buckets)
        self.metrics = EngineMetrics(drafter.topology.max_depth)
        self.waiting: deque[Sample] = deque()
        self.rows: list[Sample | None] = [None] * spec.rows

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting) or any(self.rows)

    def add(self, samples: list[Sample]) -> None:
        """Queues the samples of one request.

        Raises:
          CapacityError: the page pool could never hold one of them; nothing is queued then.
        """
        if self.pool is not None:
            for sample in samples:
                self.pool.check(sample.max_length + self.slack)
        self.waiting.extend(samples)

    def abort(self, samples: list[Sample] | None = None) -> None:
        """Forgets these samples (None: all), whether they wait or run; the others go on."""
        if samples is None:
            samples = [*self.waiting, *filter(None, self.rows)]
        gone = {id(sample) for sample in samples}
        self.waiting = deque(sample for sample in self.waiting if id(sample) not in gone)
        for row, sample in enumerate(self.rows):
            if sample is not None and id(sample) in gone:
                self._free(row, sample)

    def step(self, steps: int | None = None) -> list[RequestOutput]:
        """Admits what fits, runs one dispatch, and returns the requests that it moved forward."""
        self._admit()
        running = [sample for sample in self.rows if sample is not None]
        if not running:
            return []
        depth = self.drafter.topology.max_depth
        speculative = depth > 0 and any(sample.params.draft_limit != 0 for sample in running)
        began = time.monotonic()
        self.state, report = self.programs.dispatch(
            self.state, steps or self.spec.steps, bool(self.waiting), speculative
        )
        packed = np.asarray(jax.device_get(report.packed_BX))
        self.metrics.decode_time_s += time.monotonic() - began
        moved: dict[int, RequestOutput] = {}
        for row, sample in enumerate(self.rows):
            if sample is not None:
                moved[id(sample.output)] = sample.output
                if self._take(row, sample, packed[row], report, depth + 1 if speculative else 1):
                    self._finish(row, sample)
        return list(moved.values())

    def _admit(self) -> None:
        for row, held in enumerate(self.rows):
            if held is not None or not self.waiting:
                continue
            sample = self.waiting[0]
            table = None
            if self.pool is not None:
                pages = self.pool.allocate(sample.max_length + self.slack)
                if pages is None:
                    return  # the oldest request goes first; the others wait behind it
                sample.pages = pages
                table = np.zeros(self.state.table_BJ.shape[1], np.int32)  # pyright: ignore[reportOptionalMemberAccess]
                table[: len(pages)] = pages
            self.waiting.popleft()
            began = time.monotonic()
            stop_ids = sorted(
                ({*()} if sample.params.ignore_eos else self.eos) | set(sample.params.stop_token_ids or [])
            )
            sampling = sample.sampling(stop_ids, STOP_PLACES, self.drafter.topology.max_depth)
            state = self.programs.prefill(self.state, row, sample.prompt, table)
            self.state = self.programs.admit(state, row, sample.prompt, sampling, table)
            self.rows[row] = sample
            self.metrics.prompt_tokens += len(sample.output.prompt_token_ids)
            self.metrics.prefill_time_s += time.monotonic() - began

    def _take(self, row: int, sample: Sample, packed: np.ndarray, report: Report, depth: int) -> bool:
        """Hands the tokens of a dispatch to a sample, step by step; returns whether it ended."""
        width = depth + 2
        for index in range(int(packed[-1])):
            entry = packed[index * width : (index + 1) * width]
            count, drafted = int(entry[depth]), int(entry[depth + 1])
            if count == 0:
                break
            logprobs = None
            if sample.params.logprobs is not None:
                logprobs = _logprobs(report, row, index * depth, entry[:count], sample.params.logprobs)
            before = sample.output.metrics.num_accepted_tokens
            ended = sample.take(entry[:count], drafted, logprobs, self.eos)
            self.metrics.add(drafted, sample.output.metrics.num_accepted_tokens - before, sample.completion)
            if ended:
                return True
        return False

    def _finish(self, row: int, sample: Sample) -> None:
        self._free(row, sample)
        if all(c.finish_reason for c in sample.output.outputs):
            sample.output.finished = True
            sample.output.time_s["total"] = time.monotonic() - sample.arrived
            self.metrics.requests += 1

    def _free(self, row: int, sample: Sample) -> None:
        self.rows[row] = None
        self.state = self.programs.retire(self.state, row)
        if self.pool is not None:
            self.pool.release(sample.pages)


def _logprobs(report: Report, row: int, first: int, tokens: np.ndarray, most: int) -> list[dict[int, Logprob]]:
    """Log-probabilities of one verification's tokens: the sampled one and the ``most`` best."""
    # Sliced on the host: a slice on the device would compile a program for each length.
    values = np.asarray(report.logprob_BXL)[row, first : first + len(tokens)]
    ids = np.asarray(report.top_BXL)[row, first : first + len(tokens)]
    found = []
    for token, value, top in zip(tokens.tolist(), values, ids, strict=True):
        entry = {
            int(i): Logprob(float(v), r + 1)
            for r, (i, v) in enumerate(zip(top[1:], value[1:], strict=True))
            if r < most
        }
        entry.setdefault(token, Logprob(float(value[0]), int(top[0])))
        found.append(entry)
    return found
