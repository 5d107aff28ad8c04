"""Requests and their outputs, in vLLM's words."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any, Self

import numpy as np

from jaxspec.errors import RequestError
from jaxspec.perf.moesd import mean_acceptance_length
from jaxspec.serve.parameters import ALLOWED, RequestOutputKind, refusal, show_value
from jaxspec.serve.structured_outputs import StructuredOutputsParams


@dataclass
class SamplingParams:
    """How one request is sampled; names and defaults are vLLM's but for ``max_tokens`` and ``speculative``.

    Scores come from logits in the order of vLLM's sampler: ``structured_outputs``, ``allowed_token_ids``,
    ``bad_words``, ``logit_bias``, the stop ids that ``min_tokens`` bans, penalties, temperature, ``min_p``, ``top_k``,
    ``top_p``. Speculation changes none of it: drafts are verified with the scores of their own path. Numbers of NumPy
    and the like become Python's.

    Attributes:
      n: independent samples of the prompt.
      temperature: 0 is greedy.
      top_p, top_k, min_p: truncation; 1, 0 (or -1) and 0 switch it off.
      repetition_penalty, presence_penalty, frequency_penalty: 1, 0 and 0 are off.
      seed: makes sampling repeatable; None (or -1) derives one from the engine's seed and the request's number.
      stop: strings that end the text; the text is cut before them. A special token among them ends it at its id.
      stop_token_ids: ids that end the text, besides the model's own.
      include_stop_str_in_output: keeps the stop string, or the text of the token that ended the text.
      ignore_eos: goes on after the model's end-of-text ids.
      max_tokens: most generated tokens; None goes on to the model's capacity.
      min_tokens: generated tokens before which no stop id may be sampled.
      logprobs: most likely tokens to report per position, next to the sampled one; None for none.
      skip_special_tokens: leaves special tokens out of the text.
      speculative: False decodes plainly; {"num_speculative_tokens": K} caps the speculation length.
      logit_bias: by token id, added to the logits, from -100 to 100; ids may be strings, as in JSON.
      allowed_token_ids: the only ids that may be sampled; None allows all.
      bad_words: texts that may not be generated. The last token of each is banned where the generated tokens end with
        the ones before it, of the text as it is and of the text after a space.
      prompt_logprobs: most likely tokens to report per position of the prompt, next to the prompt's own; None for none.
      detokenize: False leaves the text empty, and has no stop strings.
      truncate_prompt_tokens: keeps only so many tokens of the prompt, the last ones; -1 as many as fit.
      output_kind: whether ``LLM.stream`` and ``LLM.step`` hand out all there is of the text, what is new, or the end.
      timeout_s: seconds after which it ends as ``timeout``, with the text so far, whether it waits, runs or is paused;
        looked at between two dispatches. None for no limit.
      return_routed_experts: whether the experts of each token are reported; None reports them where the ``LLM`` was
        built with ``enable_return_routed_experts``.
      spaces_between_special_tokens: true.
      structured_outputs: form that the text has, such as that of a JSON Schema; None for any.

    Raises:
      RequestError: a value is not allowed, or a name is not known.
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
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    timeout_s: float | None = None
    return_routed_experts: bool | None = None
    spaces_between_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __new__(cls, *args: Any, **values: Any) -> Self:
        """Refuses names that are not known, where ``__init__`` would raise a TypeError."""
        names = [f.name for f in fields(cls)]
        if unknown := set(values) - set(names):
            raise RequestError(refusal(unknown, set(names)))
        if len(args) > len(names) or set(names[: len(args)]) & set(values):
            raise RequestError(f"sampling: {len(args)} values without names; give each parameter once, by its name")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, (read, allowed) in ALLOWED.items():
            value = getattr(self, name)
            try:
                setattr(self, name, read(value))
            except (ValueError, TypeError, KeyError, OverflowError) as error:
                raise RequestError(f"sampling: {name} must be {allowed}, got {show_value(value)}") from error
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"sampling: min_tokens must be from 0 to max_tokens, got {self.min_tokens}")
        if self.stop_strings and not self.detokenize:
            raise RequestError("sampling: stop strings are looked for in text; use detokenize=True or stop_token_ids")
        if self.structured_outputs is not None and self.ignore_eos:
            raise RequestError("sampling: ignore_eos goes on where the form of structured_outputs ends; leave one out")

    @classmethod
    def from_optional(cls, **values: Any) -> Self:
        """Builds parameters from names that may also be None, which leaves them at their defaults."""
        return cls(**{name: value for name, value in values.items() if value is not None})

    def clone(self) -> Self:
        """Returns a copy that shares nothing, its values checked again."""
        return replace(self)

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
        """Requests of one kind are sampled alike: an estimate of how many drafts they accept is shared among them.

        Greedy, a temperature of up to 0.5, of up to 1, or more; each with penalties and without, with a grammar and
        without.
        """
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        warmth = min(math.ceil(2 * self.temperature), 3)
        return 8 * (self.structured_outputs is not None) + 2 * warmth + (penalties != (1.0, 0.0, 0.0))

    @classmethod
    def from_mapping(cls, values: dict[str, Any], defaults: SamplingParams | None = None) -> SamplingParams:
        """Builds parameters from parsed JSON; unknown names are an error that lists the known ones."""
        if "output_kind" in values:
            raise RequestError("sampling: output_kind is for LLM.stream and LLM.step, not for files; leave it out")
        base = {f.name: getattr(defaults, f.name) for f in fields(cls)} if defaults else {}
        return cls(**{**base, **values})


def key_words(seed: int | None, engine_seed: int, number: int, sample: int) -> tuple[int, int]:
    """Returns the two key words of one sample of one request; they depend on nothing else."""
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
    """Counts of speculation for one request, under vLLM's names.

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
        """Tokens committed per target pass, bonus included; passes without drafts count, too."""
        return mean_acceptance_length(accepted=self.num_accepted_tokens, passes=self.num_steps)

    @property
    def drafted_acceptance_length(self) -> float:
        """Tokens committed per pass that had drafts, bonus included; vLLM's mean acceptance length."""
        return mean_acceptance_length(accepted=self.num_accepted_tokens, passes=self.num_drafts)

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
        pairs = zip_longest(self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos, fillvalue=0)
        self.num_accepted_tokens_per_pos = [sum(pair) for pair in pairs]


@dataclass
class CompletionOutput:
    """One sample.

    Attributes:
      index: which of the n samples.
      text: generated text, without the prompt and the token that ended it. While it goes on it only grows: the part
        that can no longer change.
      token_ids: generated ids, the final stop id included.
      drafted: for each token whether it was an accepted draft.
      cumulative_logprob: sum over the sampled tokens, None unless asked for.
      logprobs: per position the sampled and the most likely ids, None unless asked for.
      finish_reason: ``stop``, ``length``, ``abort``, ``timeout`` (see ``timeout_s``) or ``error``; None while it goes
        on.
      stop_reason: the stop string or id that ended it, None for the model's own end-of-text id.
      error: why it could not go on, None unless ``finish_reason`` is ``error``.
      tool_calls: the calls of tools that the text consists of or ends with, in OpenAI's form; None without any.
      content: the text before them; None where there is none.
      routed_experts: once it has ended, the experts that each token of prompt and text was sent to, [tokens - 1, expert
        layers, experts per token] in the router's order, uint8 or, of more than 256 experts, uint16. The last token was
        never read, so it has none. None unless asked for.
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
    tool_calls: list[dict[str, Any]] | None = None
    content: str | None = None
    routed_experts: np.ndarray | None = field(default=None, repr=False, compare=False)

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


UNSEEN = (0, 0, False)


@dataclass
class RequestOutput:
    """Everything about one request.

    Attributes:
      request_id: number or name of the request.
      prompt: text, None when ids were given.
      prompt_token_ids: ids that were run.
      outputs: one entry per sample.
      finished: whether all samples ended.
      metrics: of speculation, all samples together.
      time_s: from arrival to first token, and to the end; None until then.
      num_cached_tokens: tokens of the prompt that were copied from the prefix cache instead of read, by the first
        sample; None without one, or where all had to be read for their log-probabilities.
      prompt_logprobs: per position of the prompt its own and the most likely ids, of the first None; None unless asked
        for.
      kind: which part of it is handed out.
      shown: characters and tokens of each sample that were handed out as news, and whether its end was.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    metrics: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    time_s: dict[str, float] = field(default_factory=dict)
    num_cached_tokens: int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    kind: RequestOutputKind = field(default=RequestOutputKind.CUMULATIVE, repr=False, compare=False)
    shown: list[tuple[int, int, bool]] = field(default_factory=list, repr=False, compare=False)
