"""Checks prompts and sampling parameters as they come, and makes them into samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from itertools import count
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxspec.checkpoint.load.model import Model
from jaxspec.checkpoint.text.codec import CHAT_KEYS, Text
from jaxspec.checkpoint.text.conversation import tools_of
from jaxspec.errors import RequestError
from jaxspec.serve.arguments import show_value
from jaxspec.serve.bans import bad_word_ids, check_ids
from jaxspec.serve.defaults import sampling_defaults
from jaxspec.serve.grammar import Grammars
from jaxspec.serve.request import SamplingParams
from jaxspec.serve.routed_experts import RoutedExperts
from jaxspec.serve.sample import STOP_PLACES, Sample, new_samples
from jaxspec.serve.text import IncrementalText
from jaxspec.serve.tool_calls import ToolCalls, form_of, tool_calls_of

if TYPE_CHECKING:
    from jaxspec.serve.engine_spec import EngineSpec

Prompt = str | Sequence[int] | Mapping[str, Any]
SOURCES, SOURCES_TEXT = ("prompt", "messages", "prompt_token_ids"), '"prompt", "messages" or "prompt_token_ids"'
TOOL_KEYS = "tool_choice", "parallel_tool_calls"
KEYS = {"prompt", "prompt_token_ids", "cache_salt", *CHAT_KEYS, *TOOL_KEYS}
NOT_HERE = {
    "multi_modal_data": "only text is read here; leave it out",
    "multi_modal_uuids": "only text is read here; leave it out",
    "mm_processor_kwargs": "only text is read here; leave it out",
    "prompt_embeds": "prompts are text or token ids; give one of these",
    "encoder_prompt": "models with an encoder are not supported; give prompt",
    "decoder_prompt": "models with an encoder are not supported; give prompt",
}


class Prompts:
    """Checks what one model and engine accept.

    Attributes:
      model, text: the model and its tokenizer, None without one.
      spec: sizes of the engine.
      eos: ids that end a text.
      seed: origin of the seeds of requests that bring none.
      depth: most drafts of a verification.
    """

    def __init__(self, model: Model, text: Text | None, spec: EngineSpec, eos: set[int], seed: int, depth: int):
        self.model, self.text, self.spec, self.eos, self.seed, self.depth = model, text, spec, eos, seed, depth
        self._numbers = count()  # atomic, for callers in several threads

    @property
    def defaults(self) -> SamplingParams:
        """The parameters that the model's ``generation_config.json`` recommends."""
        return sampling_defaults(self.model.generation)

    def requests(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[list[Sample]]:
        """Makes the samples of several requests; ``params`` are one for all, or one per prompt. Raises RequestError."""
        many = _as_list(prompts)
        return [self.request(p, s) for p, s in zip(many, self._params(params, len(many)), strict=True)]

    def request(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None = None, number: int | None = None
    ) -> list[Sample]:
        """Makes the samples of one request; raises RequestError if it is not acceptable.

        ``number`` is the origin of its randomness where it brings no seed; by default how many came before it.
        """
        if not isinstance(request_id, str | None):
            raise RequestError(f"request_id: a text is needed, got {show_value(request_id)}")
        params = self._checked(self.defaults if params is None else params)
        words = bad_word_ids(params.bad_words or (), self.text)
        text, ids = self._encode(prompt)
        calls = self._tool_calls(prompt)
        ids = ids[-self._prompt_limit(params) :]
        if len(ids) >= self.spec.capacity:
            raise RequestError(
                f"prompt: {len(ids)} tokens leave no room within {self.spec.capacity}; "
                "shorten it or raise max_model_len"
            )
        if params.min_tokens and len(ids) + params.min_tokens > self.spec.capacity:
            raise RequestError(
                f"min_tokens: {params.min_tokens} after {len(ids)} prompt tokens exceed {self.spec.capacity}"
            )
        form = form_of(params, calls, self.text)
        constraints = [None] * params.n if form is None else self._grammars.constraints(form, ids, params.n)
        arrival = next(self._numbers)
        number = arrival if number is None else number
        samples = new_samples(
            request_id or str(number), text, ids, params, partial(self._growing, ids),
            seeds=(self.seed, number), capacity=self.spec.capacity,
            draft_length=self.depth,
        )  # fmt: skip
        salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        for sample, constraint in zip(samples, constraints, strict=True):
            sample.bad_words, sample.constraint, sample.cache_salt = words, constraint, salt or ""
            sample.read_calls = None if calls is None else partial(self._read_calls, calls)
            sample.routes = RoutedExperts() if params.return_routed_experts else None
        return samples

    def _tool_calls(self, prompt: Prompt) -> ToolCalls | None:
        """Returns the calls of tools that a prompt asks for."""
        if not isinstance(prompt, Mapping) or (prompt.get("tools") is None and prompt.get("tool_choice") is None):
            return None
        source = self._tokenizer().template(prompt.get("chat_template"), with_tools=True) or ""
        tools, (choice, parallel) = tools_of(prompt.get("tools")), (prompt.get(name) for name in TOOL_KEYS)
        return tool_calls_of(tools, choice, parallel, source)

    def _read_calls(self, calls: ToolCalls, ids: list[int]) -> tuple[str, list[dict[str, str]]] | None:
        ids = ids[:-1] if ids and ids[-1] in self.eos else ids
        return calls.read(self._tokenizer().decode(ids, skip_special_tokens=False))

    @cached_property
    def _grammars(self) -> Grammars:
        if self.text is None:
            raise RequestError(f"structured_outputs: {self.model.directory} has no tokenizer; put its files there")
        if jax.process_count() > 1:
            raise RequestError("structured_outputs: grammars need one process; take replicas instead of several hosts")
        if not self.eos:
            raise RequestError(
                f"structured_outputs: {self.model.directory} names no token that ends a text; give eos_token_id in its "
                "config.json"
            )
        return Grammars(self.text, self.model.net.arch.vocab_size, self.eos)

    def readings(self, texts: Sequence[int] | Sequence[Sequence[int]]) -> list[list[Sample]]:
        """Makes samples of texts that are only read, for the log-probabilities of their tokens; raises RequestError."""
        return [[self._reading(ids)] for ids in _as_list(texts)]

    def _reading(self, token_ids: Any) -> Sample:
        ids = self.check_ids(token_ids)
        if len(ids) > self.spec.capacity:
            raise RequestError(
                f"score: {len(ids)} tokens, the capacity is {self.spec.capacity}; shorten it or raise max_model_len"
            )
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, speculative=False)
        (sample,) = new_samples(
            "score", None, ids, params, partial(self._growing, ids),
            seeds=(self.seed, 0), capacity=len(ids), draft_length=self.depth,
        )  # fmt: skip
        sample.reads_only = True
        return sample

    def _growing(self, prompt: list[int], params: SamplingParams) -> IncrementalText:
        return IncrementalText(self.text if params.detokenize else None, params, prompt)

    def _prompt_limit(self, params: SamplingParams) -> int:
        """Returns how many tokens of a prompt are kept at most, the last ones; 0 for all."""
        limit = params.truncate_prompt_tokens or 0
        return limit if limit >= 0 else max(self.spec.capacity - max(params.min_tokens, 1), 1)

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self.defaults] * count
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise _no_params(given)
        if len(given) != count:
            raise RequestError(f"sampling_params: {len(given)} for {count} prompts; give one, or one per prompt")
        return list(given)

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if all(prompt.get(name) is None for name in SOURCES):
                raise RequestError(f"prompt: needs {SOURCES_TEXT}, got {sorted(map(str, prompt))}")
            _check_keys(prompt)
            if prompt.get("prompt_token_ids") is not None:
                return prompt.get("prompt"), self.check_ids(prompt["prompt_token_ids"])
            if prompt.get("messages") is not None:
                text = self._tokenizer().write_chat(**{key: prompt[key] for key in CHAT_KEYS if key in prompt})
                return text, self.check_ids(self._tokenizer().encode(text, add_special_tokens=False))
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return prompt, self.check_ids(self._tokenizer().encode(prompt))
        return None, self.check_ids(prompt)

    def _tokenizer(self) -> Text:
        if self.text is None:
            raise RequestError(f"prompt: {self.model.directory} has no tokenizer; give prompt_token_ids")
        return self.text

    def check_ids(self, ids: Any) -> list[int]:
        """Returns token ids as a list; raises RequestError if they are not ids of the vocabulary, or there are none."""
        if not _is_list(ids) or isinstance(ids, str) or len(ids) == 0:
            raise RequestError(f"prompt: at least one token is needed, got {show_value(ids)}")
        vocab = self.model.net.arch.vocab_size
        wrong = [i for i in ids if isinstance(i, bool) or not isinstance(i, int | np.integer) or not 0 <= i < vocab]
        if wrong:
            raise RequestError(f"prompt: token ids are integers from 0 to {vocab - 1}, got {wrong[:5]}")
        return [int(i) for i in ids]

    def _checked(self, params: SamplingParams) -> SamplingParams:
        """Returns a checked copy: what the caller does to its own later changes nothing."""
        if not isinstance(params, SamplingParams):
            raise _no_params(params)
        params, vocab = params.clone(), self.model.net.arch.vocab_size
        check_ids(params, vocab)
        stops = params.stop_token_ids or []
        if any(not 0 <= i < vocab for i in stops):
            raise RequestError(f"stop_token_ids: ids are from 0 to {vocab - 1}, got {stops}")
        if len(set(stops) | self.eos) > STOP_PLACES:
            raise RequestError(
                f"stop_token_ids: at most {STOP_PLACES - len(self.eos)} besides the model's own, got {len(stops)}"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.spec.logprobs:
                raise RequestError(
                    f"{name}: at most {self.spec.logprobs}, got {getattr(params, name)}; raise LLM(max_logprobs=)"
                )
        if params.stop_strings and self.text is None:
            raise RequestError(f"stop: {self.model.directory} has no tokenizer; use stop_token_ids")
        if params.return_routed_experts and not self.spec.routes:
            raise RequestError(
                "return_routed_experts: this engine was built without LLM(enable_return_routed_experts=True)"
            )
        params.return_routed_experts = self.spec.routes and params.return_routed_experts is not False
        if params.logprobs is not None and self.spec.logprobs == 0:
            raise RequestError("logprobs: this engine was built with max_logprobs=0")
        return params


def _no_params(given: Any) -> RequestError:
    way = "; SamplingParams(**settings) makes them of a dict" if isinstance(given, Mapping) else ""
    return RequestError(f"sampling_params: SamplingParams are needed, got {type(given).__name__}{way}")


def _check_keys(prompt: Mapping[str, Any]) -> None:
    """Refuses keys of a prompt that nothing would read."""
    for name, value in prompt.items():
        if name in KEYS or (name in NOT_HERE and value is None):
            continue
        way = NOT_HERE.get(name, f"known are {sorted(KEYS)}")
        raise RequestError(f"prompt: key {name!r} is not known; {way}")
    chat = sorted(name for name in (*CHAT_KEYS, *TOOL_KEYS) if prompt.get(name) not in (None, False))
    if "messages" not in chat and chat:
        raise RequestError(f"prompt: {chat} go with messages only; give messages or leave them out")
    if chat and any(prompt.get(name) is not None for name in ("prompt", "prompt_token_ids")):
        raise RequestError("prompt: messages do not go with another prompt; give one of them")
    if not isinstance(salt := prompt.get("cache_salt"), str | None) or salt == "":
        raise RequestError(f"prompt: cache_salt is a text, not empty, or None, got {show_value(salt)}")
    if not isinstance(text := prompt.get("prompt"), str | None) and prompt.get("prompt_token_ids") is not None:
        raise RequestError(f"prompt: the text of prompt_token_ids is a text or None, got {show_value(text)}")


def _is_list(value: Any) -> bool:
    """Whether it is a sequence of prompts or ids, or a text; bytes are neither."""
    return (isinstance(value, Sequence) and not isinstance(value, bytes | bytearray)) or (
        isinstance(value, np.ndarray) and value.ndim > 0
    )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not _is_list(prompts):
        raise RequestError(
            f"prompts: a text, token ids, a mapping or a list of them is needed, got {type(prompts).__name__}"
        )
    many: list[Any] = list(prompts)
    return [many] if many and isinstance(many[0], int | np.integer) else many
