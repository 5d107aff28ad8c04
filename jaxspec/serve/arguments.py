"""The settings that ``LLM`` is given, checked where they enter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.load.model import Model
from jaxspec.draft.catalog import SpeculativeConfig
from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.models.arch import ArchSpec
from jaxspec.serve.compile_cache import use_compile_cache
from jaxspec.serve.engine_spec import EngineSpec
from jaxspec.verify.rules import rule_of

DEFAULT_CAPACITY = 8192


def check_model(model: Any) -> None:
    """Refuses what names no model.

    Raises:
      ConfigError: it is neither a path nor a loaded model, or an empty name.
    """
    if not isinstance(model, str | Path | Model) or not str(model).strip():
        raise ConfigError(f"LLM: model must be a directory with config.json and .safetensors files, got {shown(model)}")


def check_kinds(
    *, mesh: Any, quantization: Any, texts: Mapping[str, Any], files: Mapping[str, Any], calls: Mapping[str, Any]
) -> None:
    """Refuses values of the wrong kind.

    Args:
      mesh: sizes by axis, or None.
      quantization: a name, or None.
      texts: names, which none may leave out, by argument.
      files: paths or None.
      calls: functions or None.

    Raises:
      ConfigError: one of them is something else.
    """
    if mesh is not None and not isinstance(mesh, Mapping):
        raise ConfigError(f'LLM: mesh must be a mapping of axes to sizes, such as {{"expert": 2}}, got {shown(mesh)}')
    if not isinstance(quantization, str | None):
        raise ConfigError(f"LLM: quantization must be a name or None, got {shown(quantization)}")
    for name, value in texts.items():
        if not isinstance(value, str):
            raise ConfigError(f'LLM: {name} must be a name such as "auto", got {shown(value)}')
    for name, value in files.items():
        if not isinstance(value, str | Path | None):
            raise ConfigError(f"LLM: {name} must be a file or None, got {shown(value)}")
    for name, value in calls.items():
        if value is not None and not isinstance(value, Callable):
            raise ConfigError(f"LLM: {name} must be a function or None, got {shown(value)}")


def whole(
    name: str, value: Any, least: int | None = None, door: str = "LLM", error: type[JaxspecError] = ConfigError
) -> int:
    """A whole number, also of NumPy.

    Raises:
      ConfigError, or the other ``error``: it is something else, or below the least.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or (least is not None and value < least):
        allowed = "an integer" if least is None else f"an integer of at least {least}"
        raise error(f"{door}: {name} must be {allowed}, got {shown(value)}")
    return int(value)


def buckets_of(value: Any) -> tuple[int, ...]:
    """Prefill chunk sizes, ascending, each once.

    Raises:
      ConfigError: they are no sequence of whole numbers, or none.
    """
    if not isinstance(value, Sequence | np.ndarray | set | frozenset) or isinstance(value, str) or not len(value):
        raise ConfigError(f"LLM: prefill_buckets must be chunk sizes such as (32, 256), got {shown(value)}")
    return tuple(sorted({whole("each of prefill_buckets", size, 1) for size in value}))


def spec_of(config: SpeculativeConfig, **given: Any) -> EngineSpec:
    """What an engine is fixed to, as far as it does not depend on the model.

    Args:
      config: of speculation.
      given: sizes, by the names of ``LLM``.

    Raises:
      ConfigError: one of them is no whole number, or too small.
    """
    if (length := given["max_model_len"]) is not None:
        whole("max_model_len", length)
    leasts = {"max_num_seqs": 1, "steps_per_dispatch": 1, "max_logprobs": 0, "kv_page_size": 0, "num_kv_pages": 0}
    rows, steps, logprobs, page, pages = (whole(name, given[name], least) for name, least in leasts.items())
    if pages and not page:
        raise ConfigError(f"LLM: num_kv_pages={pages} needs kv_page_size, the tokens per page")
    return EngineSpec(
        rows, DEFAULT_CAPACITY, rule_of(config.rule), steps, logprobs, buckets_of(given["prefill_buckets"]), page, pages
    )  # fmt: skip


def capacity_of(wanted: Any, most: int) -> int:
    """Longest text in tokens, of a model that was made for ``most``.

    Raises:
      ConfigError: it is no whole number, or too long or too short.
    """
    capacity = min(most, DEFAULT_CAPACITY) if wanted is None else whole("max_model_len", wanted)
    if not 2 <= capacity <= most:
        raise ConfigError(f"LLM: max_model_len must be from 2 to the model's {most}, got {wanted}")
    return capacity


def fitted(spec: EngineSpec, max_model_len: Any, arch: ArchSpec) -> EngineSpec:
    """What is asked for, within what the model was made for; errors are those of ``capacity_of``."""
    capacity = capacity_of(max_model_len, arch.max_position)
    return replace(spec, capacity=capacity, logprobs=min(spec.logprobs, arch.vocab_size))


def keep_compiled(compile_cache: Any) -> None:
    """Switches the cache of compiled programs on.

    Args:
      compile_cache: a directory; True for the one that the program or the environment chose, or the user's; False or
        None to leave JAX's settings alone.

    Raises:
      ConfigError: it is something else, or the directory cannot be made.
    """
    if isinstance(compile_cache, str | Path) and str(compile_cache):
        use_compile_cache(Path(compile_cache))
    elif compile_cache is True:
        use_compile_cache()
    elif compile_cache not in (False, None):
        raise ConfigError(f"LLM: compile_cache must be True, False or a directory, got {shown(compile_cache)}")


def shown(value: Any) -> str:
    """A value in an error message, which stays one short line."""
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"{type(value).__name__} {' '.join(text[:70].split())}..."
