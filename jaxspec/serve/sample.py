"""A sample: one of a request's n texts on its way through the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.protocol import Sampling
from jaxspec.serve.bans import Words, bias_of, table_of
from jaxspec.serve.request import (
    UNSEEN,
    CompletionOutput,
    Logprob,
    RequestOutput,
    SamplingParams,
    SpeculationMetrics,
    key_words,
)

if TYPE_CHECKING:
    from jaxspec.serve.constraint import Constraint
    from jaxspec.serve.prefix_cache import TextBlocks
    from jaxspec.serve.routed_experts import RoutedExperts
    from jaxspec.serve.text import IncrementalText

STOP_PLACES = 16
MIN_TEMPERATURE = 0.01  # as in vLLM


@dataclass
class Sample:
    """One of a request's n samples on its way through the engine.

    Attributes:
      output: the request that it belongs to.
      completion: what the caller sees of it.
      params: its settings.
      growing: its text.
      key: words of its random key.
      max_length: total length at which it ends.
      pages: page ids that it holds.
      observed: positions that the drafter has observed.
      failures: steps that failed while it ran, since its text last grew, and how long it was.
      bad_words: token sequences that it may not generate.
      constraint: its grammar, None without one.
      read_calls: finds the text before calls of tools and the calls in generated ids, None where it has no tools.
      cache_salt: texts share prefixes with those of the same salt only.
      blocks: of its text in the prefix cache, None where it has no part in it.
      unobserved: whether it ran in steps that the drafter did not observe.
      caller: whose turn in the queue it takes.
      begun: whether it has had a row.
      routes: the experts that the target chose for its tokens, None where they are not wanted.
      reads_only: whether it ends once its prompt is read, whose log-probabilities alone are wanted.
    """

    output: RequestOutput
    completion: CompletionOutput
    params: SamplingParams
    growing: IncrementalText
    key: tuple[int, int]
    max_length: int
    arrived: float = field(default_factory=time.monotonic)
    pages: list[int] = field(default_factory=list)
    observed: int = 0
    failures: tuple[int, int] = (0, 0)
    bad_words: Words = ()
    constraint: Constraint | None = None
    read_calls: Callable[[list[int]], tuple[str, list[dict[str, str]]] | None] | None = None
    cache_salt: str = ""
    blocks: TextBlocks | None = None
    unobserved: bool = False
    reads_only: bool = False
    caller: Hashable = None
    begun: bool = False
    routes: RoutedExperts | None = None

    @property
    def length(self) -> int:
        """Positions in the target's cache: all tokens but the last."""
        return len(self.output.prompt_token_ids) + len(self.completion.token_ids) - 1

    @property
    def tokens(self) -> np.ndarray:
        """Prompt and text so far."""
        return np.asarray(self.output.prompt_token_ids + self.completion.token_ids, np.int32)

    @property
    def prompt(self) -> np.ndarray:
        """Prompt ids."""
        return np.asarray(self.output.prompt_token_ids, np.int32)

    def tried(self, length: int) -> int:
        """Returns how many of a verification's drafts it may accept."""
        limit = self.params.draft_limit
        return length if limit is None else min(limit, length)

    def sampling(self, stop_ids: list[int], stop_places: int, draft_length: int) -> Sampling:
        """Returns its settings as arrays of one row."""
        p, prompt_length = self.params, len(self.output.prompt_token_ids)
        stops = stop_ids + [-1] * (stop_places - len(stop_ids))

        def one(x: Any, dtype: type = np.int32) -> Any:
            return np.asarray([x], dtype)

        # Colder than this the scores would overflow.
        temperature = max(p.temperature, MIN_TEMPERATURE) if p.temperature else 0.0
        return Sampling(
            temperature_B=one(temperature, np.float32),
            top_p_B=one(p.top_p, np.float32),
            min_p_B=one(p.min_p, np.float32),
            top_k_B=one(max(p.top_k, 0)),
            repetition_B=one(p.repetition_penalty, np.float32),
            presence_B=one(p.presence_penalty, np.float32),
            frequency_B=one(p.frequency_penalty, np.float32),
            key_BX=one(self.key, np.uint32),
            stop_BX=one(stops),
            min_length_B=one(prompt_length + p.min_tokens if p.min_tokens else 0),
            max_length_B=one(self.max_length),
            draft_limit_B=one(self.tried(draft_length)),
            logprobs_B=one(-1 if p.logprobs is None else p.logprobs),
            prompt_length_B=one(prompt_length),
            biased_B=one(self.biased, bool),
            bad_words_BWL=one(table_of(self.bad_words)),
        )

    @property
    def biased(self) -> bool:
        """Whether something is added to its logits."""
        p = self.params
        return bool(p.logit_bias) or p.allowed_token_ids is not None or any(len(ids) == 1 for ids in self.bad_words)

    def bias(self, vocab: int) -> np.ndarray | None:
        """Returns what is added to its logits, None for nothing."""
        return bias_of(self.params, self.bad_words, vocab) if self.biased else None

    def take(self, tokens: list[int], drafted: int, logprobs: list[dict[int, Logprob]] | None, eos: set[int]) -> bool:
        """Takes over the tokens of one verification, one by one; returns whether the text ended at one of them.

        What a reader sees of the text follows with ``show``.
        """
        c = self.completion
        if "first_token" not in self.output.time_s:
            self.output.time_s["first_token"] = time.monotonic() - self.arrived
            for entry in filter(None, self.output.prompt_logprobs or ()):
                self.growing.name(entry)
        used = 0
        for index, token in enumerate(tokens):
            used += 1
            c.token_ids.append(token)
            c.drafted.append(index < len(tokens) - 1)
            if logprobs is not None and c.logprobs is not None:
                c.logprobs.append(logprobs[index])
                c.cumulative_logprob = (c.cumulative_logprob or 0.0) + logprobs[index][token].logprob
                self.growing.name(logprobs[index])
            is_eos = not self.params.ignore_eos and token in eos
            ends, stop = is_eos or token in (self.params.stop_token_ids or []), None
            if not ends or self.params.include_stop_str_in_output:
                stop = self.growing.add(token, may_stop=len(c.token_ids) > self.params.min_tokens)
            if stop is not None:
                c.finish_reason, c.stop_reason = "stop", stop
            elif ends:
                c.finish_reason, c.stop_reason = "stop", None if is_eos else token
            elif len(self.output.prompt_token_ids) + len(c.token_ids) >= self.max_length:
                c.finish_reason = "length"
            if c.finish_reason:
                break
        self.output.metrics.add(drafted, used)
        return c.finish_reason is not None

    def show(self) -> None:
        """Writes the text of what was taken."""
        self.completion.text = self.growing.whole if self.completion.finish_reason else self.growing.text
        self._take_calls()

    def _take_calls(self) -> None:
        """Reads the calls of tools in a text that has ended."""
        c = self.completion
        if self.read_calls is None or c.finish_reason is None or (read := self.read_calls(c.token_ids)) is None:
            return
        c.content = read[0] or None
        c.tool_calls = [
            {"id": f"call_{self.output.request_id}_{c.index}_{i}", "type": "function", "function": call}
            for i, call in enumerate(read[1])
        ]

    def fail(self, message: str) -> None:
        """Ends it with an error."""
        c = self.completion
        c.finish_reason, c.error, c.text = "error", message, self.growing.whole

    def stalls(self) -> int:
        """Counts a step that failed; returns how many did before another token came, 0 for a text that has ended."""
        length = len(self.completion.token_ids)
        failed, before = self.failures
        self.failures = (failed + 1 if before == length else 1, length)
        return 0 if self.completion.finish_reason else self.failures[0]

    def is_late(self, now: float) -> bool:
        """Whether its time is over."""
        return self.params.timeout_s is not None and now - self.arrived >= self.params.timeout_s

    def abort(self, reason: str = "abort") -> None:
        """Ends it where it is, if it has not ended."""
        if self.completion.finish_reason is None:
            self.completion.finish_reason, self.completion.text = reason, self.growing.whole
        self.settle()

    def settle(self) -> bool:
        """Marks its request as finished where no other sample of it goes on; returns whether that is news."""
        if self.routes is not None and self.completion.finish_reason:
            self.completion.routed_experts = self.routes.whole(self.length)
        if self.output.finished or not all(c.finish_reason for c in self.output.outputs):
            return False
        self.output.time_s["total"] = time.monotonic() - self.arrived
        self.output.finished = True
        return True


def new_metrics(draft_length: int) -> SpeculationMetrics:
    """Returns zero counts for each draft position."""
    return SpeculationMetrics(num_accepted_tokens_per_pos=[0] * draft_length)


def new_samples(
    request_id: str,
    prompt: str | None,
    ids: list[int],
    params: SamplingParams,
    grow,
    *,
    seeds: tuple[int, int],
    capacity: int,
    draft_length: int,
) -> list[Sample]:
    """Makes one request's n samples, which share one output; ``seeds``: the engine's, and the request's number."""
    outputs = [CompletionOutput(i, logprobs=[] if params.logprobs is not None else None) for i in range(params.n)]
    output = RequestOutput(
        request_id, prompt, ids, outputs, metrics=new_metrics(draft_length), kind=params.output_kind,
        shown=[UNSEEN] * params.n,
    )  # fmt: skip
    longest = min(len(ids) + params.max_tokens if params.max_tokens else capacity, capacity)
    return [Sample(output, c, params, grow(params), key_words(params.seed, *seeds, c.index), longest) for c in outputs]
