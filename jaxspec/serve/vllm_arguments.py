"""Arguments of vLLM's ``LLM`` that are spelt otherwise here or are not there: what each one's way is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxspec.errors import ConfigError, RequestError


@dataclass(frozen=True)
class Foreign:
    """One of them.

    Attributes:
      way: what to do instead.
      same: values that ask for what happens here anyway, and are accepted.
    """

    way: str
    same: tuple[Any, ...] = (None,)


_MESH = 'give the devices along each axis as mesh, such as mesh={"tensor": 4}'
_MEMORY = (
    "the KV cache is as large as max_num_seqs texts of max_model_len tokens, or as num_kv_pages of kv_page_size tokens"
)
_TOKENIZER = "the tokenizer is the model directory's; give prompt_token_ids to bring ids of your own"
_ONLY_TEXT = "only text is read and written here"

FOREIGN: Mapping[str, Foreign] = {
    "tensor_parallel_size": Foreign('give mesh={"tensor": N}', (None, 1)),
    "data_parallel_size": Foreign('give mesh={"data": N}', (None, 1)),
    "enable_expert_parallel": Foreign('give mesh={"expert": N}', (None, False)),
    "enable_eplb": Foreign(
        "give expert_placement, a file that jaxspec inspect --balance --output wrote", (None, False)
    ),
    "pipeline_parallel_size": Foreign(f"layers are not spread over devices; {_MESH}", (None, 1)),
    "distributed_executor_backend": Foreign(
        "several processes meet through JAX (jaxspec.sharding.hosts.initialize), and devices are given as mesh"
    ),
    "gpu_memory_utilization": Foreign(f"{_MEMORY}; set these"),
    "kv_cache_memory_bytes": Foreign(f"{_MEMORY}; set these"),
    "num_gpu_blocks_override": Foreign("give num_kv_pages, and the tokens per page as kv_page_size"),
    "block_size": Foreign("give kv_page_size, the tokens per page"),
    "swap_space": Foreign("nothing is swapped to the host; requests wait for rows and pages instead", (None, 0)),
    "cpu_offload_gb": Foreign(f"weights stay on the devices; quantization makes them smaller, and {_MESH}", (None, 0)),
    "kv_cache_dtype": Foreign("the cache has the model's dtype", (None, "auto")),
    "calculate_kv_scales": Foreign("the cache has the model's dtype", (None, False)),
    "max_num_batched_tokens": Foreign("give prefill_buckets, the chunk sizes in which prompts are read"),
    "max_num_partial_prefills": Foreign("one prompt is read at a time, in chunks of prefill_buckets", (None, 1)),
    "enable_chunked_prefill": Foreign("prompts are always read in chunks of prefill_buckets", (None, True)),
    "enable_prefix_caching": Foreign("prompts share no cache", (None, False)),
    "scheduling_policy": Foreign("requests are served in the order in which they come", (None, "fcfs")),
    "async_scheduling": Foreign("steps run one after another", (None, False)),
    "enforce_eager": Foreign(
        "every step is a program compiled beforehand, and there is no other way to run one; the compile cache makes "
        "later starts quick",
        (None, False),
    ),
    "max_seq_len_to_capture": Foreign("there are no CUDA graphs to capture; programs are compiled for max_model_len"),
    "compilation_config": Foreign("XLA compiles; kernels= chooses what computes, and compile_cache= where it is kept"),
    "attention_config": Foreign("kernels= chooses what computes"),
    "trust_remote_code": Foreign(
        "code that comes with a model is never run; models of the supported families need none", (None, False)
    ),
    "tokenizer": Foreign(_TOKENIZER),
    "tokenizer_mode": Foreign(_TOKENIZER, (None, "auto")),
    "tokenizer_revision": Foreign(_TOKENIZER),
    "skip_tokenizer_init": Foreign(
        "a directory without tokenizer files serves token ids, and SamplingParams(detokenize=False) makes no text",
        (None, False),
    ),
    "chat_template": Foreign("the template is the model directory's chat_template.jinja or tokenizer_config.json"),
    "hf_config_path": Foreign("config.json is the model directory's; edit it there"),
    "hf_overrides": Foreign("config.json is the model directory's; edit it there", (None, {})),
    "hf_token": Foreign("log in with hf auth login, or set HF_TOKEN in the environment"),
    "code_revision": Foreign("code that comes with a model is never run"),
    "load_format": Foreign("weights are read from .safetensors files", (None, "auto", "safetensors")),
    "config_format": Foreign("models are directories in Hugging Face layout", (None, "auto", "hf")),
    "model_loader_extra_config": Foreign("weights are read from .safetensors files", (None, {})),
    "ignore_patterns": Foreign("only the files that are needed are read"),
    "use_tqdm_on_load": Foreign("give on_load, which is called while the model loads", (None, False)),
    "enable_lora": Foreign("LoRA adapters are not supported; merge them into the weights first", (None, False)),
    "max_loras": Foreign("LoRA adapters are not supported; merge them into the weights first"),
    "max_lora_rank": Foreign("LoRA adapters are not supported; merge them into the weights first"),
    "structured_outputs_config": Foreign("grammars are not supported; use stop, bad_words or logit_bias", (None, {})),
    "guided_decoding_backend": Foreign("grammars are not supported; use stop, bad_words or logit_bias", (None, "auto")),
    "logits_processors": Foreign("use logit_bias, bad_words or allowed_token_ids of SamplingParams", (None, [])),
    "reasoning_parser": Foreign("reasoning stays in the text", (None, "")),
    "generation_config": Foreign(
        "generation_config.json of the model directory gives the defaults of sampling; give SamplingParams for others",
        (None, "auto"),
    ),
    "override_generation_config": Foreign("give SamplingParams with each call", (None, {})),
    "override_pooler_config": Foreign("texts are generated, not embedded"),
    "pooler_config": Foreign("texts are generated, not embedded"),
    "runner": Foreign("texts are generated, not embedded", (None, "auto", "generate")),
    "task": Foreign("texts are generated, not embedded", (None, "auto", "generate")),
    "convert": Foreign("texts are generated, not embedded", (None, "auto", "none")),
    "limit_mm_per_prompt": Foreign(_ONLY_TEXT, (None, {})),
    "mm_processor_kwargs": Foreign(_ONLY_TEXT, (None, {})),
    "allowed_local_media_path": Foreign(_ONLY_TEXT, (None, "")),
    "disable_log_stats": Foreign("nothing is logged; get_metrics has the counts", (None, True)),
    "disable_custom_all_reduce": Foreign("XLA chooses how devices exchange", (None, False)),
    "disable_sliding_window": Foreign("windows are as the model's config says", (None, False)),
    "device": Foreign("JAX chooses; set JAX_PLATFORMS in the environment", (None, "auto")),
    "served_model_name": Foreign("there is no server"),
    "enable_sleep_mode": Foreign("delete the LLM to free its memory", (None, False)),
    "enable_return_routed_experts": Foreign("jaxspec inspect --balance counts them", (None, False)),
    "spec_method": Foreign('give speculative_config={"method": ...}'),
    "spec_model": Foreign('give speculative_config={"model": ...}'),
    "spec_tokens": Foreign('give speculative_config={"num_speculative_tokens": ...}'),
    "speculative_model": Foreign('give speculative_config={"model": ...}'),
    "num_speculative_tokens": Foreign('give speculative_config={"num_speculative_tokens": ...}'),
    "worker_cls": Foreign("one process computes on all of its devices", (None, "auto")),
}


def refuse_foreign(given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuses arguments that are not ours, but for values that change nothing.

    Args:
      given: the arguments.
      known: names of ours.

    Raises:
      ConfigError: one of them is vLLM's and has another way here, or nobody knows it.
    """
    for name, value in given.items():
        if name not in FOREIGN:
            continue
        foreign = FOREIGN[name]
        if not any(type(value) is type(same) and value == same for same in foreign.same):
            raise ConfigError(f"LLM: {name}={value!r} is not known here: {foreign.way}")
    if unknown := sorted(set(given) - set(FOREIGN)):
        raise ConfigError(f"LLM: unknown arguments {unknown}; known are {sorted(known)}")


def refuse_with_request(lora_request: Any, priority: Any) -> None:
    """Refuses vLLM's arguments of ``generate`` and ``chat`` that ask for what is not there.

    Raises:
      RequestError: one is given.
    """
    if lora_request is not None:
        raise RequestError("lora_request: there are no LoRA adapters here; merge one into the weights first")
    if priority is not None and any(priority if isinstance(priority, list | tuple) else [priority]):
        raise RequestError("priority: requests are served in the order in which they come; leave it out")
