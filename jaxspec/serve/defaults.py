"""Defaults that a published model states: the ids that end its texts, and how to sample."""

from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoint.load.model import Model
from jaxspec.errors import CapacityError, ConfigError, RequestError
from jaxspec.serve.request import SamplingParams
from jaxspec.serve.sample import STOP_PLACES

SAMPLING = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
SAMPLING["max_new_tokens"] = "max_tokens"
MOST_TOKENS = 2**31 - 1


def end_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> set[int]:
    """Returns the ids that end a text: of ``generation_config.json``, ``config.json`` and its text model, together."""
    end_ids: set[int] = set()
    inside = [value for name, value in config.items() if name == "text_config" and isinstance(value, Mapping)]
    sizes = [part["vocab_size"] for part in (*inside, config) if isinstance(part.get("vocab_size"), int)]
    vocab = sizes[0] if sizes else MOST_TOKENS
    for source in (generation, config, *inside):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise ConfigError(f"config: eos_token_id must be an id, a list of ids or null, got {value!r}")
        if any(i >= vocab for i in ids):
            raise ConfigError(f"config: eos_token_id must be below the vocabulary's size of {vocab}, got {value!r}")
        end_ids |= set(ids)
    return end_ids


def end_ids_of(model: Model) -> set[int]:
    """Returns ``end_ids`` of a model; raises CapacityError if there are more than a row can hold."""
    ids = end_ids(model.config, model.generation)
    if len(ids) > STOP_PLACES:
        raise CapacityError(f"config: {len(ids)} end-of-text ids, at most {STOP_PLACES} are supported")
    return ids


def sampling_defaults(generation: Mapping[str, Any]) -> SamplingParams:
    """Returns the settings that ``generation_config.json`` recommends; ``do_sample: false`` is temperature 0.

    Missing or null names keep their defaults, as in vLLM. A ``top_k`` of 0 or -1 is off.
    """
    values = {ours: generation[name] for name, ours in SAMPLING.items() if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        values["temperature"] = 0.0
    try:
        return SamplingParams(**values)
    except RequestError as error:
        raise ConfigError(f"generation_config.json: {error}; mend the file or give sampling parameters") from error
