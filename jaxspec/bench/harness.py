"""jaxspec as a model of EleutherAI's lm-evaluation-harness (the package ``lm_eval``)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from jaxspec.errors import ConfigError
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams

# The harness's names of settings that ``SamplingParams`` calls otherwise, the first that is there counts.
MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
Scored = tuple[float, bool]
UTILS = import_module("lm_eval.utils")
TEMPLATE: Any = import_module("lm_eval.api.model").TemplateLM


class JaxspecLM(TEMPLATE):
    """A target with or without speculation, scored and sampled by the harness.

    Scores are raw log-probabilities of the target; generation is greedy unless a task says otherwise.

    Args:
      pretrained: model directory, ``demo`` or hub id.
      speculative_config: mapping or JSON, see ``LLM``.
      max_length: longest text in tokens that is scored; by default all that fits.
      max_gen_toks: tokens generated where a task does not say.
      add_bos_token: whether special tokens are put before texts; None leaves it to the tokenizer.
      batch_size: texts that run together, ``auto`` for 8; ``max_num_seqs`` of the engine.
      device, max_batch_size: the harness hands them to every model; JAX chooses devices by itself.
      **engine: further keyword arguments of ``LLM``.

    Raises:
      ConfigError, CheckpointError: as ``LLM`` does.
    """

    def __init__(
        self,
        pretrained: str = "demo",
        *,
        speculative_config: str | dict[str, Any] | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        batch_size: int | str | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
        **engine: Any,
    ):
        super().__init__()
        rows = 8 if batch_size in (None, "auto") else int(batch_size)
        self.llm = LLM(pretrained, speculative_config=_mapping(speculative_config), max_num_seqs=rows, **engine)
        if self.llm.text is None:
            raise ConfigError(f"lm_eval: {pretrained} has no tokenizer, and tasks are texts")
        self.tokenizer = self.llm.get_tokenizer()
        self.max_length = max_length or self.llm.capacity - 1
        self.max_gen_toks, self.add_bos_token = max_gen_toks, add_bos_token

    @property
    def eot_token_id(self) -> int:
        """Id that ends a text."""
        return self.tokenizer.eos_token_id if self.tokenizer.eos_token_id is not None else min(self.llm.eos)

    @property
    def prefix_token_id(self) -> int:
        """Id that stands before a text without context: begin of text, or end of text."""
        return self.tokenizer.bos_token_id if self.tokenizer.bos_token_id is not None else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """Name of the model, for the harness's caches of requests."""
        return self.llm.model.directory.resolve().name

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns the prompt that the model's chat template writes."""
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Returns the ids of a text; one that brings its begin-of-text token gets no second one."""
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(self.tokenizer.decode([self.prefix_token_id])):
            special = False
        return self.tokenizer.encode(string, **({} if special is None else {"add_special_tokens": special}))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[Scored]:
        """Scores continuations after their contexts, which are cut from the left where they are too long."""
        texts = [(context + continuation)[-(self.max_length + 1) :] for _, context, continuation in requests]
        results = []
        for (key, _, continuation), scores in zip(requests, self.llm.score(texts), strict=True):
            tail = [one for one in scores[-len(continuation) :] if one is not None]
            result = (float(sum(one.logprob for one in tail)), all(one.rank == 1 for one in tail))
            results.append(result)
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, result)
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each whole text, windows without overlap where it is too long."""
        windows, owner = [], []
        for index, request in enumerate(requests):
            pairs = UTILS.get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            for context, continuation in map(UTILS.make_disjoint_window, pairs):
                windows.append((None, list(context), list(continuation)))
                owner.append(index)
        totals = [0.0] * len(requests)
        for index, (logprob, _) in zip(owner, self._loglikelihood_tokens(windows), strict=True):
            totals[index] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generates for all requests, each until its own stop strings."""
        params = [self._sampling(request.args[1]) for request in requests]
        prompts = [
            {"prompt_token_ids": self.tok_encode(request.args[0])[-self._room(one) :]}
            for request, one in zip(requests, params, strict=True)
        ]
        texts = [output.outputs[0].text for output in self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _room(self, params: SamplingParams) -> int:
        """Returns the tokens of context that leave room for what is generated, at least one."""
        return max(self.llm.capacity - (params.max_tokens or 1), 1)

    def _sampling(self, settings: dict[str, Any]) -> SamplingParams:
        """Returns a task's generation settings."""
        rest = dict(settings)
        given = [rest.pop(name) for name in MAX_TOKENS if name in rest]
        until = rest.pop("until", None) or []
        until = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        if not rest.pop("do_sample", float(rest.get("temperature") or 0.0) > 0):
            rest["temperature"] = 0.0
        most = min(int(given[0]) if given else self.max_gen_toks, self.llm.capacity - 1)
        return SamplingParams.from_mapping({**rest, "max_tokens": most, "stop": until})


def _mapping(value: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ConfigError(f"lm_eval: speculative_config is not valid JSON ({error})") from error


def register() -> None:
    """Makes ``jaxspec`` a name that ``--model`` of the harness knows."""
    registry = import_module("lm_eval.api.registry").model_registry
    if "jaxspec" not in registry:
        registry.register("jaxspec", target=JaxspecLM)
