"""The in-process API: load a model, generate, chat, stream."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoint.conversation import conversations
from jaxspec.checkpoint.load import Model
from jaxspec.checkpoint.text import Text
from jaxspec.decode.state import Target
from jaxspec.draft import catalog
from jaxspec.errors import CapacityError, ConfigError, RequestError
from jaxspec.models.transformer import teacher_forced
from jaxspec.serve.adaptive import control_of
from jaxspec.serve.agreed import agreed
from jaxspec.serve.budget import budget_of
from jaxspec.serve.control import Control
from jaxspec.serve.defaults import end_ids
from jaxspec.serve.engine import Engine, EngineSpec
from jaxspec.serve.loading import load_draft, load_prior, load_target
from jaxspec.serve.metrics import Metric
from jaxspec.serve.prompts import Prompt, Prompts
from jaxspec.serve.request import RequestOutput, SamplingParams
from jaxspec.serve.rows import STOP_PLACES, Sample
from jaxspec.shapes import Params

DEFAULT_CAPACITY = 8192
BLOCK = 128


class LLM:
    """A model ready to generate, with or without speculation.

    Args:
      model: directory in Hugging Face layout, or the ``model`` of another ``LLM``, whose dtype, quantisation and
        kernels then hold here too.
      speculative_config: vLLM's keys, see ``jaxspec.draft.catalog.parse``; None decodes plainly.
      dtype: ``bfloat16`` or ``float32`` weights and products; ``auto`` takes the checkpoint's, or bfloat16.
      max_model_len: longest text in tokens, prompt included; by default the model's, at most 8192.
      max_num_seqs: rows that are decoded together.
      seed: origin of the seeds of requests that bring none.
      max_logprobs: most log-probabilities per token that a request may ask for.
      steps_per_dispatch: most verification steps before the host looks.
      prefill_buckets: prompt chunk sizes in tokens, ascending.
      kv_page_size: tokens per page of a pool that all rows share; 0 gives each row its whole capacity.
      num_kv_pages: size of that pool; by default enough for all rows at full length.
      quantization: ``auto`` keeps weights that were published quantised as they are, ``none`` widens them to
        ``dtype``; ``fp8`` and ``int8`` quantise the matrices of attention and feed-forward layers of a plain
        checkpoint. None is ``auto``.
      kernels: ``auto`` computes experts, attention and small products with Pallas kernels on a GPU and with XLA on a
        CPU; ``triton``, ``interpret`` (the kernels as plain JAX, slow) and ``xla`` ask for one of them.
      mesh: devices along ``data`` (rows), ``expert`` (routed experts) and ``tensor`` (heads, hidden units, vocabulary);
        axes left out have one. None is one device. Greedy text is that of one device but for ties within the last
        bits of float32 sums, which devices add in another order.
      expert_transport: how rows reach the devices that hold their experts, see ``Policy.transport``; ``auto`` takes
        the cheapest by ``jaxspec.serve.transport``.
      expert_placement: file that ``jaxspec inspect --balance --output`` wrote: which devices along ``expert`` hold
        which experts, heavy ones maybe several times. By default equally many, in their order.
      on_load: called while the model loads, with (bytes placed, bytes in all).

    Raises:
      ConfigError, CheckpointError: the directory or the settings are not usable.
    """

    def __init__(
        self,
        model: str | Path | Model,
        *,
        speculative_config: Mapping[str, Any] | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        seed: int = 0,
        max_logprobs: int = 20,
        steps_per_dispatch: int = 8,
        prefill_buckets: tuple[int, ...] = (32, 256),
        kv_page_size: int = 0,
        num_kv_pages: int = 0,
        quantization: str | None = "auto",
        kernels: str = "auto",
        mesh: Mapping[str, int] | None = None,
        expert_transport: str = "auto",
        expert_placement: str | Path | None = None,
        on_load: Callable[[int, int], None] | None = None,
    ):
        config = catalog.parse(speculative_config)
        _check_wholes(
            max_num_seqs=(max_num_seqs, 1), steps_per_dispatch=(steps_per_dispatch, 1), max_logprobs=(max_logprobs, 0),
            kv_page_size=(kv_page_size, 0), num_kv_pages=(num_kv_pages, 0),
            prefill_buckets=(min(prefill_buckets, default=0), 1),
        )  # fmt: skip
        if num_kv_pages and not kv_page_size:
            raise ConfigError(f"LLM: num_kv_pages={num_kv_pages} needs kv_page_size, the tokens per page")
        quantization = "auto" if quantization is None else quantization
        self.model = load_target(
            model, dtype=dtype, kernels=kernels, quantization=quantization, mesh=mesh, transport=expert_transport,
            placement=expert_placement, rows=max_num_seqs, on_load=on_load,
        )  # fmt: skip
        arch = self.model.net.arch
        self.capacity, self.text = _capacity(max_model_len, arch.max_position), Text.load(self.model.directory)
        self.eos = end_ids(self.model.config, self.model.generation)
        if len(self.eos) > STOP_PLACES:
            raise CapacityError(f"config: {len(self.eos)} end-of-text ids, at most {STOP_PLACES} are supported")
        self.seed, self.max_logprobs = seed, min(max_logprobs, arch.vocab_size)
        draft = load_draft(config, self.model, quantization)
        drafter = catalog.build(config, (self.model.net, self.model.params), BLOCK, draft)
        control = control_of(config.lengths, load_prior(config, self.model, quantization), config.from_tokens)
        block = math.gcd(BLOCK, kv_page_size) if kv_page_size else BLOCK
        self.spec = EngineSpec(
            rows=max_num_seqs,
            capacity=self.capacity,
            rule=config.rule,
            survival=config.survival,
            steps=steps_per_dispatch,
            logprobs=self.max_logprobs,
            buckets=tuple(sorted(prefill_buckets)),
            page=kv_page_size,
            pages=num_kv_pages,
        )
        target, budget = Target(self.model.params, self.model.net, block), budget_of(config.cuts, arch)
        self.engine = Engine(target, drafter, self.spec, self.eos, agreed(control), budget)
        self.prompts = Prompts(self.model, self.text, self.spec, self.eos, seed, self.engine.depth)

    def beside(self, control: Control) -> LLM:
        """Another ``LLM`` over the same weights and programs, idle, with a KV cache of its own: nothing is compiled.

        Args:
          control: chooses among the arms of this one.

        Raises:
          ConfigError: it may choose others.
        """
        known = self.engine.programs.drafters
        if missing := [arm.name for arm in control.arms if arm not in known]:
            raise ConfigError(f"beside: arms {missing} are not compiled; there are {[arm.name for arm in known]}")
        other = copy.copy(self)
        other.engine, other.prompts = self.engine.beside(control), copy.copy(self.prompts)
        return other

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What the model's ``generation_config.json`` recommends."""
        return self.prompts.defaults

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generates for all prompts, as many at a time as there are rows; results come in the prompts' order.

        Args:
          prompts: texts, lists of token ids, or ``{"prompt": ...}`` / ``{"prompt_token_ids": [...]}``.
          sampling_params: one for all, or one per prompt.

        Raises:
          RequestError: a prompt or its parameters are not acceptable; nothing has been generated then.
        """
        return self._run(self.prompts.requests(prompts, sampling_params))

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generates the assistant's answer to one conversation or to several; an empty list of them has none.

        Args:
          messages: one conversation, or a list of them.
          sampling_params: one for all, or one per conversation.
          chat_template: Jinja template in place of the published one.
          add_generation_prompt: starts the assistant's answer; by default unless the final message is continued.
          continue_final_message: goes on with the last message instead.
          tools: functions that the model may call, for templates that write them.
          chat_template_kwargs: settings that the model's template knows, such as ``enable_thinking``.

        Raises:
          RequestError: a conversation or its settings are not acceptable; nothing has been generated then.
        """
        options = {
            "chat_template": chat_template, "add_generation_prompt": add_generation_prompt, "tools": tools,
            "continue_final_message": continue_final_message, "chat_template_kwargs": chat_template_kwargs,
        }  # fmt: skip
        return self.generate([{"messages": talk, **options} for talk in conversations(messages)], sampling_params)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, steps: int = 1
    ) -> Iterator[RequestOutput]:
        """Yields the same growing output after every ``steps`` verification steps."""
        samples = self.prompts.request(prompt, sampling_params)
        self.engine.add(samples)
        output = samples[0].output
        try:
            while not output.finished:
                self.engine.step(steps)
                yield output
        finally:
            self.engine.abort(samples)

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        number: int | None = None,
    ) -> RequestOutput:
        """Queues one request and returns its output, which ``step`` lets grow.

        Args:
          prompt: as for ``generate``, or ``{"messages": [...]}``.
          sampling_params: its settings.
          request_id: name that the output carries.
          number: origin of its randomness where it brings no seed; by default how many came before it.

        Raises:
          RequestError, CapacityError: the request is not acceptable; nothing has been queued then.
        """
        samples = self.prompts.request(prompt, sampling_params, request_id, number)
        self.engine.add(samples)
        return samples[0].output

    def step(self) -> list[RequestOutput]:
        """Runs one dispatch and returns the requests that it moved forward; ended ones are ``finished``."""
        return self.engine.step()

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Teacher-forced logits of a text, float32 [T, V]; row t predicts token t + 1."""
        ids = self.prompts.check_ids(list(token_ids))
        if len(ids) > self.capacity:
            raise RequestError(f"logits: {len(ids)} tokens, the capacity is {self.capacity}; raise max_model_len")
        size = -(-len(ids) // 64) * 64
        token = np.zeros((1, size), np.int32)
        token[0, : len(ids)] = ids
        position = np.arange(size, dtype=np.int32)[None]
        return np.asarray(self._teacher(self.model.params, token, position))[0, : len(ids)]

    def update_draft(self, params: Params) -> None:
        """Takes other parameters of the draft model or head, such as a running training's; nothing is compiled.

        Requests go on in place: their text does not depend on what drafts.

        Args:
          params: of the same structure and shapes as those in use; they are cast to their dtypes.

        Raises:
          ConfigError: they do not fit, or the method of speculation has no parameters.
        """
        self.engine.programs.renew(params)

    def get_metrics(self) -> list[Metric]:
        """Engine totals since the start, vLLM's names first."""
        return self.engine.metrics.counters()

    @cached_property
    def _teacher(self):
        return jax.jit(lambda params, token, at: teacher_forced(self.model.net, params, token, at)[0])

    def _run(self, requests: list[list[Sample]]) -> list[RequestOutput]:
        try:
            for samples in requests:
                self.engine.add(samples)
            while not all(samples[0].output.finished for samples in requests):
                self.engine.step()
        finally:
            self.engine.abort([sample for samples in requests for sample in samples])
        return [samples[0].output for samples in requests]


def _capacity(wanted: int | None, most: int) -> int:
    """Longest text in tokens, of a model that was made for ``most``."""
    capacity = wanted or min(most, DEFAULT_CAPACITY)
    if not 2 <= capacity <= most:
        raise ConfigError(f"LLM: max_model_len must be from 2 to the model's {most}, got {wanted}")
    return capacity


def _check_wholes(**settings: tuple[Any, int]) -> None:
    """Refuses values that are not whole numbers of at least their least."""
    for name, (value, least) in settings.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"LLM: {name} must be an integer of at least {least}, got {value!r}")
