"""Checks of the settings that ``LLM`` is given, where they enter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoint.load.model import Model
from jaxspec.draft.methods import SpeculativeConfig
from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.models.transformer import Transformer
from jaxspec.serve.engine_spec import BUCKETS, JOINT, EngineSpec
from jaxspec.verify.rules import rule_of

DEFAULT_CAPACITY = 8192
ONE_TEXT = -1  # tokens of prefixes: as many as the longest text has
# XLA:CPU adds float32 products of 64 rows and more in another order than of fewer: chunks of fewer give the scores of
# a text the bits that decoding reports, and the text of a prompt the bits of any cut.
EXACT_IN_FEW, FEW = ("xla", np.dtype("float32")), 64


def check_model(model: Any) -> None:
    """Refuses what is neither a path nor a loaded model; raises ConfigError."""
    if not isinstance(model, str | Path | Model) or not str(model).strip():
        raise ConfigError(
            f"LLM: model must be a directory with config.json and .safetensors files, got {show_value(model)}"
        )


def check_kinds(
    *, mesh: Any, quantization: Any, texts: Mapping[str, Any], files: Mapping[str, Any], calls: Mapping[str, Any]
) -> None:
    """Refuses values of the wrong kind: ``texts`` are names, ``files`` paths and ``calls`` functions, by argument."""
    if mesh is not None and not isinstance(mesh, Mapping):
        raise ConfigError(
            f'LLM: mesh must be a mapping of axes to sizes, such as {{"expert": 2}}, got {show_value(mesh)}'
        )
    if not isinstance(quantization, str | None):
        raise ConfigError(f"LLM: quantization must be a name or None, got {show_value(quantization)}")
    for name, value in texts.items():
        if not isinstance(value, str):
            raise ConfigError(f'LLM: {name} must be a name such as "auto", got {show_value(value)}')
    for name, value in files.items():
        if not isinstance(value, str | Path | None):
            raise ConfigError(f"LLM: {name} must be a file or None, got {show_value(value)}")
    for name, value in calls.items():
        if value is not None and not isinstance(value, Callable):
            raise ConfigError(f"LLM: {name} must be a function or None, got {show_value(value)}")


def as_int(
    name: str, value: Any, least: int | None = None, door: str = "LLM", error: type[JaxspecError] = ConfigError
) -> int:
    """Converts a whole number, also of NumPy; raises ``error`` if it is something else, or below the least."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or (least is not None and value < least):
        allowed = "an integer" if least is None else f"an integer of at least {least}"
        raise error(f"{door}: {name} must be {allowed}, got {show_value(value)}")
    return int(value)


def as_flag(name: str, given: Mapping[str, Any]) -> bool:
    """Returns a switch among arguments; raises ConfigError if it is neither true nor false."""
    if not isinstance(value := given[name], bool):
        raise ConfigError(f"LLM: {name} must be true or false, got {show_value(value)}")
    return value


def parse_buckets(value: Any) -> tuple[int, ...]:
    """Returns prefill chunk sizes, ascending, each once; raises ConfigError if they are none."""
    if not isinstance(value, Sequence | np.ndarray | set | frozenset) or isinstance(value, str) or not len(value):
        raise ConfigError(f"LLM: prefill_buckets must be chunk sizes such as (32, 64, 256), got {show_value(value)}")
    return tuple(sorted({as_int("each of prefill_buckets", size, 1) for size in value}))


def parse_sizes(config: SpeculativeConfig, **given: Any) -> EngineSpec:
    """Returns an engine's sizes that do not depend on the model; raises ConfigError if one is no whole number."""
    if (length := given["max_model_len"]) is not None:
        as_int("max_model_len", length)
    leasts = {"max_num_seqs": 1, "steps_per_dispatch": 1, "max_logprobs": 0, "kv_page_size": 0, "num_kv_pages": 0}
    rows, steps, logprobs, page, pages = (as_int(name, given[name], least) for name, least in leasts.items())
    default = given["prefill_buckets"] is None
    if pages and not page:
        raise ConfigError(f"LLM: num_kv_pages={pages} needs kv_page_size, the tokens per page")
    wanted, kept = _parse_prefix_caching(*given["prefix_caching"])
    return EngineSpec(
        rows, DEFAULT_CAPACITY, rule_of(config.rule), steps, logprobs,
        BUCKETS if default else parse_buckets(given["prefill_buckets"]), page, pages,
        joint=min(rows, JOINT) if default else 0, prefix_tokens=kept, prefix_required=wanted,
        routes=as_flag("enable_return_routed_experts", given),
    )  # fmt: skip


def _parse_prefix_caching(enable: Any, tokens: Any) -> tuple[bool, int]:
    """Returns whether prefixes must be kept, and how many tokens of them; raises ConfigError."""
    if not isinstance(enable, bool | None):
        raise ConfigError(f"LLM: enable_prefix_caching must be True, False or None, got {show_value(enable)}")
    if enable is False and tokens is not None:
        raise ConfigError(
            f"LLM: prefix_cache_tokens={show_value(tokens)} does not go with enable_prefix_caching=False; leave one out"
        )
    kept = ONE_TEXT if tokens is None else as_int("prefix_cache_tokens", tokens, 1)
    return bool(enable), 0 if enable is False else kept


def parse_capacity(wanted: Any, most: int) -> int:
    """Returns the longest text in tokens, of a model made for ``most``; raises ConfigError if it does not fit."""
    capacity = min(most, DEFAULT_CAPACITY) if wanted is None else as_int("max_model_len", wanted)
    if not 2 <= capacity <= most:
        raise ConfigError(f"LLM: max_model_len must be from 2 to the model's {most}, got {wanted}")
    return capacity


def fit_to_model(spec: EngineSpec, max_model_len: Any, net: Transformer) -> EngineSpec:
    """Limits the sizes to what the model was made for; errors are those of ``parse_capacity``."""
    arch, compute = net.arch, net.policy.compute
    if spec.buckets == BUCKETS and jax.default_backend() == "cpu" and (compute.kernels, compute.dtype) == EXACT_IN_FEW:
        spec = replace(spec, buckets=tuple(size for size in BUCKETS if size < FEW))
    capacity = parse_capacity(max_model_len, arch.max_position)
    if spec.routes and not arch.is_moe:
        raise ConfigError("LLM: enable_return_routed_experts, but the model has no routed experts; leave it out")
    # Sizes above one that the longest prompt fits into would never be used.
    used = tuple(size for i, size in enumerate(spec.buckets) if not i or spec.buckets[i - 1] < capacity - 1)
    kept = capacity if spec.prefix_tokens == ONE_TEXT else spec.prefix_tokens
    return replace(
        spec, prefix_tokens=kept, capacity=capacity, logprobs=min(spec.logprobs, arch.vocab_size), buckets=used
    )


def show_value(value: Any) -> str:
    """Formats a value for an error message, as one short line."""
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"{type(value).__name__} {' '.join(text[:70].split())}..."
