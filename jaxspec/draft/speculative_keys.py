"""The keys of a ``speculative_config``: their types, what they mean, and in words what each must be."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jaxspec.errors import ConfigError

AUTO, MAX_LENGTH, MAX_SUFFIX = "auto", 16, 16
TREES = "speculative_token_trees"
CHAIN_KEYS = ("num_speculative_tokens", "max_num_speculative_tokens", "num_speculative_tokens_per_batch_size")
DYNAMIC_KEYS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
SCHEDULE_KEYS = (*CHAIN_KEYS, "disable_by_batch_size", "speculative_token_tree", TREES, *DYNAMIC_KEYS, "calibration")

PositiveInt = Annotated[int, Meta(ge=1)]
Length = Annotated[int, Meta(ge=1, le=MAX_LENGTH)]
SuffixLength = Annotated[int, Meta(ge=1, le=MAX_SUFFIX)]

LENGTH, POSITIVE = f"an integer from 1 to {MAX_LENGTH}", "an integer from 1"
MUST_BE = {
    "num_speculative_tokens": f'"{AUTO}" or {LENGTH}',
    "max_num_speculative_tokens": LENGTH,
    "disable_by_batch_size": POSITIVE,
    "speculative_token_tree": "a list of branching factors",
    "speculative_num_steps": LENGTH,
    "speculative_eagle_topk": POSITIVE,
    "speculative_num_draft_tokens": POSITIVE,
    "calibration": "the name of a file",
    "quantization": '"none", "fp8" or "int8"',
    "prompt_lookup_max": f"an integer from 1 to {MAX_SUFFIX}",
    "prompt_lookup_min": f"an integer from 1 to {MAX_SUFFIX}",
    "prompt_lookup_corpus": "the name of a text file, or a list of such names",
    "suffix_decoding_cache_tokens": POSITIVE,
    "suffix_decoding_max_spec_factor": "a number above 0",
    "exit_layer": POSITIVE,
    "speculative_token_map": "the name of a file of token ids",
    "verify_budget": '"auto" or "off"',
    "draft_confidence_threshold": "a number from 0 to below 1",
    "expected_acceptance_length": "a number from 1",
}


class SpeculativeKeys(msgspec.Struct, frozen=True, kw_only=True):
    """A ``speculative_config`` as it is given; ``docs/speculative-config.md`` says what the keys mean.

    A draft's confidence is the largest probability of the distribution that it will be drawn from. It is not that of
    the token that was drawn, which transformers' ``assistant_confidence_threshold`` looks at: that would change the
    distribution of sampled text.
    """

    method: Any = None
    model: Any = None
    revision: str | None = None
    quantization: Literal["none", "fp8", "int8"] | None = None
    rejection_sample_method: Any = "match"
    prompt_lookup_max: SuffixLength | None = None
    prompt_lookup_min: SuffixLength | None = None
    prompt_lookup_corpus: str | tuple[str, ...] | None = None
    suffix_decoding_cache_tokens: PositiveInt | None = None
    suffix_decoding_max_spec_factor: Annotated[float, Meta(gt=0)] | None = None
    exit_layer: PositiveInt | None = None
    speculative_token_map: str | None = None
    num_speculative_tokens: Length | Literal["auto"] | None = None
    max_num_speculative_tokens: Length | None = None
    num_speculative_tokens_per_batch_size: Any = None
    disable_by_batch_size: PositiveInt | None = None
    speculative_token_tree: tuple[int, ...] | None = None
    speculative_token_trees: Any = None
    speculative_num_steps: Length | None = None
    speculative_eagle_topk: PositiveInt | None = None
    speculative_num_draft_tokens: PositiveInt | None = None
    calibration: str | None = None
    verify_budget: Literal["auto", "off"] = "off"
    draft_confidence_threshold: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    expected_acceptance_length: Annotated[float, Meta(ge=1)] | None = None

    def given(self, *keys: str) -> list[str]:
        """Returns those of the keys that have a value."""
        return [key for key in keys if getattr(self, key) is not None]


KEYS = SpeculativeKeys.__struct_fields__


def read_keys(config: Mapping[str, Any]) -> SpeculativeKeys:
    """Checks keys and types.

    Raises:
      ConfigError: keys are unknown, or a value is of the wrong kind.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"speculative_config: a mapping is needed, got {type(config).__name__}")
    if unknown := sorted(set(config) - set(KEYS)):
        raise ConfigError(f"speculative_config: unknown keys {unknown}; known are {sorted(KEYS)}")
    try:
        return msgspec.convert(dict(config), SpeculativeKeys)
    except msgspec.ValidationError as error:
        (key,) = re.findall(r"`\$\.(\w+)", str(error))
        hint = "; leave speculative_config out for plain decoding" if key in CHAIN_KEYS else ""
        must_be = MUST_BE.get(key, "text")
        raise ConfigError(f"speculative_config: {key} must be {must_be}, got {config[key]!r}{hint}") from None
