"""What goes into the engine and what comes out, in vLLM's words."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, fields
from typing import Any

from jaxspec.errors import RequestError


@dataclass
class SamplingParams:
    """How one request is sampled; defaults are vLLM's but for ``max_tokens``.

    Attributes:
      n: independent samples of the prompt.
      temperature: 0 is greedy.
      top_p, top_k, min_p: truncation; 1, 0 (or -1) and 0 switch it off.
      repetition_penalty, presence_penalty, frequency_penalty: 1, 0 and 0 are off.
      seed: makes sampling repeatable; None derives one from the engine's seed and the request's number.
      stop: strings that end the text; the text is cut before them. A special token among them ends it at its id.
      stop_token_ids: ids that end the text, besides the model's own.
      include_stop_str_in_output: keeps the stop string, or the text of the token that ended the text.
      ignore_eos: goes on behind the model's end-of-text ids.
      max_tokens: most generated tokens; None goes on to the model's capacity.
      min_tokens: generated tokens before which no stop id may be sampled.
      logprobs: most likely tokens to report per position, next to the sampled one; None for none.
      skip_special_tokens: leaves special tokens out of the text.
      speculative: False decodes plainly; {"num_speculative_tokens": K} caps the speculation length.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 128
    min_tokens: int = 0
    logprobs: int | None = None
    skip_special_tokens: bool = True
    speculative: bool | dict[str, int] | None = None

    def __post_init__(self) -> None:
        for ok, name, allowed in self._checks():
            if not ok:
                raise RequestError(f"sampling: {name} must be {allowed}, got {getattr(self, name)!r}")

    def _checks(self) -> list[tuple[bool, str, str]]:
        number = (int, float)
        k, r, strings, ids = self.top_k, self.repetition_penalty, self.stop, self.stop_token_ids
        presence, frequency, least = self.presence_penalty, self.frequency_penalty, self.min_tokens
        most = self.max_tokens
        return [
            (_is(self.n, int) and self.n >= 1, "n", "an integer of at least 1"),
            (_is(self.temperature, number) and 0 <= self.temperature < 1e4, "temperature", "a number from 0"),
            (_is(self.top_p, number) and 0 < self.top_p <= 1, "top_p", "above 0 and at most 1"),
            (_is(k, int) and -1 <= k < 2**31, "top_k", "-1 or 0 for off, or an integer of at least 1"),
            (_is(self.min_p, number) and 0 <= self.min_p <= 1, "min_p", "from 0 to 1"),
            (_is(r, number) and 0 < r < 1e4, "repetition_penalty", "above 0"),
            (_is(presence, number) and abs(presence) <= 2, "presence_penalty", "from -2 to 2"),
            (_is(frequency, number) and abs(frequency) <= 2, "frequency_penalty", "from -2 to 2"),
            (self.seed is None or (_is(self.seed, int) and self.seed >= 0), "seed", "None or an integer from 0"),
            (_is(strings, str | list | tuple | None) and all(isinstance(s, str) and s for s in self.stop_strings)
             and strings != "", "stop", "a string or strings, none of them empty"),
            (_is(ids, list | tuple | None) and all(_is(t, int) for t in ids or []),
             "stop_token_ids", "a list of token ids"),
            (most is None or (_is(most, int) and most >= 1), "max_tokens", "at least 1"),
            (_is(least, int) and 0 <= least <= (most or least), "min_tokens",
             "from 0 to max_tokens"),
            (self.logprobs is None or (_is(self.logprobs, int) and self.logprobs >= 0), "logprobs", "None or from 0"),
            (self._speculative_ok(), "speculative", 'a bool, None or {"num_speculative_tokens": K}, K from 0'),
        ]  # fmt: skip

    def _speculative_ok(self) -> bool:
        s = self.speculative
        if s is None or isinstance(s, bool):
            return True
        return (
            isinstance(s, dict)
            and set(s) == {"num_speculative_tokens"}
            and all(_is(v, int) and v >= 0 for v in s.values())
        )

    @property
    def stop_strings(self) -> list[str]:
        """``stop`` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def draft_limit(self) -> int | None:
        """Most drafts per step that this request allows, None for the engine's own length."""
        if isinstance(self.speculative, dict):
            return self.speculative["num_speculative_tokens"]
        return 0 if self.speculative is False else None

    @property
    def kind(self) -> int:
        """What is known beforehand of how many drafts a request will accept: those of one kind are sampled alike.

        Greedy, a temperature of up to 0.5, of up to 1, or more; each with penalties and without.
        """
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return 2 * min(math.ceil(2 * self.temperature), 3) + (penalties != (1.0, 0.0, 0.0))

    @classmethod
    def from_mapping(cls, values: dict[str, Any], defaults: SamplingParams | None = None) -> SamplingParams:
        """Builds parameters from parsed JSON; unknown names are an error that lists the known ones."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise RequestError(f"sampling: unknown {unknown}; known are {sorted(known)}")
        base = {f.name: getattr(defaults, f.name) for f in fields(cls)} if defaults else {}
        return cls(**{**base, **values})


def _is(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def key_words(seed: int | None, engine_seed: int, number: int, sample: int) -> tuple[int, int]:
    """The two key words of one sample of one request; they depend on nothing else."""
    origin = f"seed {seed}" if seed is not None else f"engine {engine_seed} request {number}"
    digest = hashlib.blake2b(f"{origin} sample {sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


@dataclass
class Logprob:
    """Log-probability of one token under the target's raw distribution, its rank from 1, and its text.

    The text is the token's own, as it stands after other text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class SpeculationMetrics:
    """What speculation did for one request, by vLLM's definitions.

    Attributes:
      num_drafts: verifications that had drafts.
      num_draft_tokens: drafts verified.
      num_accepted_tokens: drafts accepted, the bonus token not counted.
      num_accepted_tokens_per_pos: verifications whose accepted prefix covers each position.
      num_steps: verifications in all, those without drafts included.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_steps: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed per verification that had drafts, bonus included: 1 + accepted / drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / proposed drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_per_pos(self) -> list[float]:
        """Share of drafts (verifications) whose accepted prefix covers each position, not conditional."""
        return [count / self.num_drafts if self.num_drafts else 0.0 for count in self.num_accepted_tokens_per_pos]

    def add(self, drafted: int, committed: int) -> None:
        """Counts one verification."""
        self.num_steps += 1
        if drafted:
            accepted = max(committed - 1, 0)
            self.num_drafts += 1
            self.num_draft_tokens += drafted
            self.num_accepted_tokens += accepted
            for position in range(accepted):
                self.num_accepted_tokens_per_pos[position] += 1

    def merge(self, other: SpeculationMetrics) -> None:
        """Adds another request's counts."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.num_steps += other.num_steps
        short = len(other.num_accepted_tokens_per_pos) - len(self.num_accepted_tokens_per_pos)
        self.num_accepted_tokens_per_pos += [0] * short
        for position, count in enumerate(other.num_accepted_tokens_per_pos):
            self.num_accepted_tokens_per_pos[position] += count


@dataclass
class CompletionOutput:
    """One sample.

    Attributes:
      index: which of the n samples.
      text: generated text, without the prompt and the token that ended it. While it goes on, what can no longer
        change: it only grows.
      token_ids: generated ids, the final stop id included.
      drafted: for each token whether it was an accepted draft.
      cumulative_logprob: sum over the sampled tokens, None unless asked for.
      logprobs: per position the sampled and the most likely ids, None unless asked for.
      finish_reason: ``stop``, ``length``, ``abort`` or ``error``; None while it goes on.
      stop_reason: the stop string or id that ended it, None for the model's own end-of-text id.
      error: why it ended with ``error``.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """Everything about one request.

    Attributes:
      request_id: number or name of the request.
      prompt: text, None when ids were given.
      prompt_token_ids: ids that were run.
      outputs: one entry per sample.
      finished: whether all samples ended.
      metrics: what speculation did, all samples together.
      time_s: from arrival to first token, and to the end; None until then.
      num_cached_tokens: always None, for prompts share no cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    metrics: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    time_s: dict[str, float] = field(default_factory=dict)
    num_cached_tokens: int | None = None
