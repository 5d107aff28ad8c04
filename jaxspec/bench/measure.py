"""Times one run of requests through an engine: how fast tokens come, and how long each request waits for them."""

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from jaxspec.errors import ConfigError
from jaxspec.serve.llm import LLM, Prompt
from jaxspec.serve.request import RequestOutput, SamplingParams, SpeculationMetrics


@dataclass
class Trace:
    """One request as its caller sees it, in seconds.

    Attributes:
      issued_s: when it was sent, from the start of the run.
      first_s, last_s: when its first and its last tokens came.
      gaps_s: times between arrivals after the first. Tokens of one dispatch arrive together and count as one arrival,
        as tokens of one chunk do in ``vllm bench serve``; so they depend on ``steps_per_dispatch``.
      tokens: how many came.
    """

    issued_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_s - self.issued_s

    @property
    def latency_s(self) -> float:
        """Time to the last token."""
        return self.last_s - self.issued_s

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first arrival, None for texts of one token."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None

    def arrive(self, count: int, now_s: float) -> None:
        """Records tokens that came."""
        if self.tokens:
            self.gaps_s.append(now_s - self.last_s)
        else:
            self.first_s = now_s
        self.last_s = now_s
        self.tokens += count


@dataclass(frozen=True)
class Run:
    """Some prompts, generated once.

    Attributes:
      token_ids: generated ids of each prompt.
      drafted: for each of them whether it was an accepted draft.
      tokens, time_s: generated in all, and how long it took with the prompts read.
      decode_tokens, decode_time_s, decode_steps: the same while every row was busy and no prompt was read.
      speculation: what happened to the drafts.
      traces: when the tokens of each prompt came.
      lengths: steps of the engine by what it drafted: a chain's length, or a tree's name.
      decisions, deciding_s: dispatches, and what the host took to choose what they draft and to learn from them.
    """

    token_ids: list[list[int]]
    drafted: list[list[bool]]
    tokens: int
    time_s: float
    decode_tokens: int
    decode_time_s: float
    decode_steps: int
    speculation: SpeculationMetrics
    traces: list[Trace]
    lengths: dict[str, int]
    decisions: int = 0
    deciding_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Rate of the whole run."""
        return self.tokens / self.time_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Rate while every row decoded, None if that never was."""
        return self.decode_tokens / self.decode_time_s if self.decode_tokens else None

    @property
    def decision_s(self) -> float:
        """Seconds that one decision took."""
        return self.deciding_s / max(self.decisions, 1)

    def __add__(self, other: "Run") -> "Run":
        """Returns both, one after the other."""
        speculation = SpeculationMetrics()
        speculation.merge(self.speculation)
        speculation.merge(other.speculation)
        lengths = dict(Counter(self.lengths) + Counter(other.lengths))
        names = (f.name for f in fields(Run) if f.name not in ("speculation", "lengths"))
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Run(**sums, speculation=speculation, lengths=lengths)


def poisson_arrivals(count: int, rate_per_s: float, seed: int) -> list[float]:
    """Draws when requests of a Poisson process come, in seconds from the start; the first comes at once.

    Raises:
      ConfigError: the rate is not a positive number.
    """
    if not 0 < rate_per_s < float("inf"):
        raise ConfigError(f"arrivals: a rate above 0 requests per second is needed, got {rate_per_s}")
    gaps = np.random.default_rng((seed, count)).exponential(1 / rate_per_s, count - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


def run_requests(
    llm: LLM,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    arrivals_s: Sequence[float] | None = None,
) -> Run:
    """Generates for all prompts and times it.

    Args:
      llm: idle.
      prompts: texts or token ids.
      params: of all, or of each.
      arrivals_s: when each request is sent, ascending; waiting times count from there, also while the engine was too
        busy to look (so that a slow engine cannot hide its queue). None is a closed loop: as many requests are out
        as the engine has rows, and whenever one ends, the next is sent in that moment.
    """
    every = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    due = deque(zip([0.0] * len(prompts) if arrivals_s is None else arrivals_s, prompts, every, strict=True))
    observer = _Observer(llm.spec.rows if arrivals_s is None else None)
    engine, began = llm.engine, time.perf_counter()
    now, steps, decided = 0.0, _steps(llm), _decided(llm)
    try:
        while due or engine.busy:
            while due and due[0][0] <= now:
                at, prompt, one = due.popleft()
                observer.follow(llm.submit(prompt, one), at)
            if not engine.busy:
                time.sleep(due[0][0] - now)
                now = time.perf_counter() - began
                continue
            full = all(engine.rows) and not engine.reads
            # A dispatch that reads prompts is kept short and out of the decoding figures.
            moved = llm.step(1 if engine.reads else None)
            before, now = now, time.perf_counter() - began
            observer.look(moved, now, now - before if full else None)
    finally:
        llm.abort()  # does nothing unless the run failed
    lengths = {k: n - steps.get(k, 0) for k, n in _steps(llm).items() if n > steps.get(k, 0)}
    count, time_s = (after - before for after, before in zip(_decided(llm), decided, strict=True))
    return replace(observer.run(now, lengths), decisions=count, deciding_s=time_s)


def _steps(llm: LLM) -> dict[str, int]:
    """Returns the steps since the engine started, by topology."""
    arms = llm.engine.metrics.arms
    return {arm.name: arms[arm].steps for arm in sorted(arms, key=lambda arm: (arm.nodes, arm.name))}


def _decided(llm: LLM) -> Sequence[Any]:
    """Returns the dispatches since the engine started, and the seconds that deciding about them took."""
    return llm.engine.metrics.dispatches, llm.engine.metrics.deciding_time_s


class _Observer:
    """Follows the outputs of a run; ``rows`` is how many requests of a closed loop are out, None without one."""

    def __init__(self, rows: int | None):
        self._rows, self._tokens = rows, 0
        self._outputs: list[RequestOutput] = []
        self._traces: list[Trace] = []
        self._indices: dict[int, int] = {}
        self._steps: list[int] = []
        self._ends: list[float] = []
        self._decoded = [0, 0.0, 0]

    def follow(self, output: RequestOutput, issued_s: float) -> None:
        self._indices[id(output)] = len(self._outputs)
        self._outputs.append(output)
        self._traces.append(Trace(issued_s))
        self._steps.append(0)

    def look(self, moved: Sequence[RequestOutput], now_s: float, decoding_s: float | None) -> None:
        """Records what a dispatch brought, as decoding if every row was busy with that."""
        tokens = steps = 0
        for output in moved:
            index = self._indices[id(output)]
            trace, count = self._traces[index], len(output.outputs[0].token_ids)
            if count > trace.tokens:
                tokens += count - trace.tokens
                trace.arrive(count - trace.tokens, now_s)
            steps += output.metrics.num_steps - self._steps[index]
            self._steps[index] = output.metrics.num_steps
            if output.finished:
                self._ends.append(now_s)
        self._tokens += tokens
        if decoding_s is not None:
            self._decoded = [self._decoded[0] + tokens, self._decoded[1] + decoding_s, self._decoded[2] + steps]

    def run(self, time_s: float, lengths: dict[str, int]) -> Run:
        """Returns what was seen, once all is done."""
        if self._rows is not None:
            # All were queued at once, so that the engine never waited for us; a request counts as sent when the
            # one whose row it took ended.
            for trace, end in zip(self._traces[self._rows :], self._ends, strict=False):
                trace.issued_s = end
        speculation = SpeculationMetrics()
        for output in self._outputs:
            speculation.merge(output.metrics)
        completions = [output.outputs[0] for output in self._outputs]
        return Run(
            token_ids=[list(c.token_ids) for c in completions],
            drafted=[list(c.drafted) for c in completions],
            tokens=self._tokens,
            time_s=time_s,
            decode_tokens=int(self._decoded[0]),
            decode_time_s=self._decoded[1],
            decode_steps=int(self._decoded[2]),
            speculation=speculation,
            traces=self._traces,
            lengths=lengths,
        )
