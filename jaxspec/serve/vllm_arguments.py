"""Arguments of vLLM's ``LLM`` that are spelled otherwise here or do not exist: what to do instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxspec.errors import ConfigError, RequestError

_MESH = 'give the devices along each axis as mesh, such as mesh={"tensor": 4}'
_MEMORY = (
    "the KV cache is as large as max_num_seqs texts of max_model_len tokens, or as num_kv_pages of kv_page_size "
    "tokens; set these"
)
# What to do instead, and the values that ask for what happens here anyway; None always does.
_WAYS: Sequence[tuple[str, Mapping[str, tuple[Any, ...]]]] = (
    ('give mesh={"tensor": N}', {"tensor_parallel_size": (1,)}),
    ('give mesh={"data": N}', {"data_parallel_size": (1,)}),
    ('give mesh={"expert": N}', {"enable_expert_parallel": (False,)}),
    ("give expert_placement, a file that jaxspec inspect --balance --output wrote", {"enable_eplb": (False,)}),
    (f"layers are not spread over devices; {_MESH}", {"pipeline_parallel_size": (1,)}),
    (
        "several processes meet through JAX (jaxspec.sharding.hosts.initialize), and devices are given as mesh",
        {"distributed_executor_backend": ()},
    ),
    (_MEMORY, {"gpu_memory_utilization": (), "kv_cache_memory_bytes": ()}),
    ("give num_kv_pages, and the tokens per page as kv_page_size", {"num_gpu_blocks_override": ()}),
    ("give kv_page_size, the tokens per page", {"block_size": ()}),
    ("nothing is swapped to the host; requests wait for rows and pages instead", {"swap_space": (0,)}),
    (f"weights stay on the devices; quantization makes them smaller, and {_MESH}", {"cpu_offload_gb": (0,)}),
    ("kv_cache_dtype='fp8' computes a scale per token and head", {"calculate_kv_scales": (False,)}),
    ("give prefill_buckets, the chunk sizes in which prompts are read", {"max_num_batched_tokens": ()}),
    ("long prompts are read one at a time, in chunks of prefill_buckets", {"max_num_partial_prefills": (1,)}),
    ("prompts are always read in chunks of prefill_buckets", {"enable_chunked_prefill": (True,)}),
    ("blocks are known by BLAKE2b of their tokens", {"prefix_caching_hash_algo": ()}),
    ("callers take turns, and requests of one go in their order", {"scheduling_policy": ("fcfs",)}),
    ("steps run one after another", {"async_scheduling": (False,)}),
    (
        "every step is a program compiled beforehand, and there is no other way to run one; the compile cache makes "
        "later starts quick",
        {"enforce_eager": (False,)},
    ),
    ("there are no CUDA graphs to capture; programs are compiled for max_model_len", {"max_seq_len_to_capture": ()}),
    ("XLA compiles; kernels= chooses what computes, and compile_cache= where it is kept", {"compilation_config": ()}),
    ("kernels= chooses what computes", {"attention_config": ()}),
    (
        "code that comes with a model is never run; models of the supported families need none",
        {"trust_remote_code": (False,), "code_revision": ()},
    ),
    (
        "the tokenizer is the model directory's; give prompt_token_ids to bring ids of your own",
        {"tokenizer": (), "tokenizer_mode": ("auto",), "tokenizer_revision": ()},
    ),
    (
        "a directory without tokenizer files serves token ids, and SamplingParams(detokenize=False) makes no text",
        {"skip_tokenizer_init": (False,)},
    ),
    ("the template is the model directory's chat_template.jinja or tokenizer_config.json", {"chat_template": ()}),
    ("config.json is the model directory's; edit it there", {"hf_config_path": (), "hf_overrides": ({},)}),
    ("log in with hf auth login, or set HF_TOKEN in the environment", {"hf_token": ()}),
    (
        "weights are read from .safetensors files",
        {"load_format": ("auto", "safetensors"), "model_loader_extra_config": ({},)},
    ),
    ("models are directories in Hugging Face layout", {"config_format": ("auto", "hf")}),
    ("only the files that are needed are read", {"ignore_patterns": ()}),
    ("give on_load, which is called while the model loads", {"use_tqdm_on_load": (False,)}),
    (
        "LoRA adapters are not supported; merge them into the weights first",
        {"enable_lora": (False,), "max_loras": (), "max_lora_rank": ()},
    ),
    (
        "llguidance checks all grammars; give SamplingParams(structured_outputs=StructuredOutputsParams(...))",
        {"structured_outputs_config": ({},), "guided_decoding_backend": ("auto", "guidance")},
    ),
    ("use logit_bias, bad_words or allowed_token_ids of SamplingParams", {"logits_processors": ([],)}),
    (
        'reasoning stays in the text; StructuredOutputsParams(after="</think>") lets a grammar begin after it',
        {"reasoning_parser": ("",)},
    ),
    (
        "generation_config.json of the model directory gives the defaults of sampling; give SamplingParams for others",
        {"generation_config": ("auto",)},
    ),
    ("give SamplingParams with each call", {"override_generation_config": ({},)}),
    (
        "texts are generated, not embedded",
        {
            "override_pooler_config": (), "pooler_config": (), "runner": ("auto", "generate"),
            "task": ("auto", "generate"), "convert": ("auto", "none"),
        },
    ),
    (
        "only text is read and written here",
        {"limit_mm_per_prompt": ({},), "mm_processor_kwargs": ({},), "allowed_local_media_path": ("",)},
    ),
    ("nothing is logged; get_metrics has the counts", {"disable_log_stats": (True,)}),
    ("XLA chooses how devices exchange", {"disable_custom_all_reduce": (False,)}),
    ("windows are as the model's config says", {"disable_sliding_window": (False,)}),
    ("JAX chooses; set JAX_PLATFORMS in the environment", {"device": ("auto",)}),
    ("there is no server", {"served_model_name": ()}),
    ("delete the LLM to free its memory", {"enable_sleep_mode": (False,)}),
    ('give speculative_config={"method": ...}', {"spec_method": ()}),
    ('give speculative_config={"model": ...}', {"spec_model": (), "speculative_model": ()}),
    ('give speculative_config={"num_speculative_tokens": ...}', {"spec_tokens": (), "num_speculative_tokens": ()}),
    ("one process computes on all of its devices", {"worker_cls": ("auto",)}),
)  # fmt: skip
FOREIGN = {name: (way, (None, *same)) for way, names in _WAYS for name, same in names.items()}


def refuse_foreign(given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuses arguments that are not ours, except values that change nothing; says what to do instead."""
    for name, value in given.items():
        if name not in FOREIGN:
            continue
        way, same = FOREIGN[name]
        if not any(type(value) is type(known) and value == known for known in same):
            raise ConfigError(f"LLM: {name}={value!r} is not known here: {way}")
    if unknown := sorted(set(given) - set(FOREIGN)):
        raise ConfigError(f"LLM: unknown arguments {unknown}; known are {sorted(known)}")


def refuse_with_request(lora_request: Any, priority: Any) -> None:
    """Refuses vLLM's arguments of ``generate`` and ``chat`` that nothing here can do; raises RequestError."""
    if lora_request is not None:
        raise RequestError("lora_request: there are no LoRA adapters here; merge one into the weights first")
    if priority is not None and any(priority if isinstance(priority, list | tuple) else [priority]):
        raise RequestError("priority: requests are served in their order, and callers in turns; leave it out")
