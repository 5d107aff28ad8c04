"""Allowed values of each sampling parameter, and why some names of other libraries are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import Enum
from operator import index
from typing import Any

import numpy as np

from jaxspec.serve.structured_outputs import StructuredOutputsParams

Reader = Callable[[Any], Any]
LONGEST = 200


class RequestOutputKind(Enum):
    """The part of a request that ``LLM.stream`` and ``LLM.step`` hand out, as in vLLM."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def as_int(value: Any, least: int, most: float = math.inf) -> int:
    """Converts a whole number of any library."""
    if isinstance(value, bool | np.bool_):
        raise ValueError
    number = index(value)
    if not least <= number <= most:
        raise ValueError
    return number


def as_float(value: Any, least: float, most: float) -> float:
    """Converts a number of any library."""
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__float__"):
        raise ValueError
    number = float(value)
    if not least <= number <= most:
        raise ValueError
    return number


def _above_0(value: Any, most: float) -> float:
    return as_float(value, math.nextafter(0, 1), most)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ValueError
    return bool(value)


def _or_none(read: Reader) -> Reader:
    return lambda value: None if value is None else read(value)


def _strings(value: Any) -> str | list[str]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) and s for s in strings):
        raise ValueError
    return value if isinstance(value, str) else list(value)


def _words(value: Any) -> list[str]:
    words = _strings(value)
    words = [words] if isinstance(words, str) else words
    if not all(word.strip() for word in words):
        raise ValueError
    return words


def _list_of(read: Reader, least: int = 0) -> Reader:
    def read_all(value: Any) -> list[Any]:
        if not isinstance(value, list | tuple | set | frozenset | range | np.ndarray) or len(value) < least:
            raise ValueError
        return [read(v) for v in value]

    return read_all


def _ids(value: Any) -> list[int]:
    return _list_of(lambda i: as_int(i, 0), least=1)(value)


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError
    bias = {as_int(int(i) if isinstance(i, str) else i, 0): as_float(v, -100, 100) for i, v in value.items()}
    if len(bias) < len(value):
        raise ValueError
    return bias


def _speculative(value: Any) -> bool | dict[str, int]:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if not isinstance(value, Mapping) or set(value) != {"num_speculative_tokens"}:
        raise ValueError
    return {name: as_int(v, 0) for name, v in value.items()}


def _seed(value: Any) -> int | None:
    seed = as_int(value, -1)
    return None if seed == -1 else seed


def _prompt_limit(value: Any) -> int:
    count = as_int(value, -1)
    if count == 0:
        raise ValueError
    return count


def _kind(value: Any) -> RequestOutputKind:
    if isinstance(value, str):
        return RequestOutputKind[value.upper()]
    if isinstance(value, Enum):  # vLLM's own has the same names
        return RequestOutputKind[value.name]
    return RequestOutputKind(as_int(value, 0))


def _spaces(value: Any) -> bool:
    if not _flag(value):
        raise ValueError
    return True


_BELOW_1E4 = math.nextafter(1e4, 0)
_FLAG = _flag, "true or false"
_COUNT = _or_none(lambda v: as_int(v, 0)), "None or an integer from 0"
_PENALTY = (lambda v: as_float(v, -2, 2)), "a number from -2 to 2"
ALLOWED: dict[str, tuple[Reader, str]] = {
    "n": (lambda v: as_int(v, 1), "an integer of at least 1"),
    "temperature": (lambda v: as_float(v, 0, _BELOW_1E4), "a number from 0 to below 10000"),
    "top_p": (lambda v: _above_0(v, 1), "a number above 0 and at most 1"),
    "top_k": (lambda v: as_int(v, -1, 2**31 - 1), "-1 or 0 for off, or an integer of at least 1"),
    "min_p": (lambda v: as_float(v, 0, 1), "a number from 0 to 1"),
    "repetition_penalty": (lambda v: _above_0(v, _BELOW_1E4), "a number above 0 and below 10000"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "seed": (_or_none(_seed), "None or -1 for any, or an integer from 0"),
    "stop": (_or_none(_strings), "a string or strings, none of them empty"),
    "stop_token_ids": (_or_none(_list_of(lambda v: as_int(v, -(2**31)))), "a list of token ids"),
    "include_stop_str_in_output": _FLAG,
    "ignore_eos": _FLAG,
    "max_tokens": (_or_none(lambda v: as_int(v, 1)), "None or an integer of at least 1"),
    "min_tokens": (lambda v: as_int(v, 0), "from 0 to max_tokens"),
    "logprobs": _COUNT,
    "skip_special_tokens": _FLAG,
    "speculative": (_or_none(_speculative), 'a bool, None or {"num_speculative_tokens": K}, K from 0'),
    "logit_bias": (_or_none(_bias), "a mapping of token ids to numbers from -100 to 100"),
    "allowed_token_ids": (_or_none(_ids), "None or a list of at least one token id"),
    "bad_words": (_or_none(_words), "a list of strings, none of them empty"),
    "prompt_logprobs": _COUNT,
    "detokenize": _FLAG,
    "timeout_s": (_or_none(lambda v: _above_0(v, math.inf)), "None or a number of seconds above 0"),
    "return_routed_experts": (_or_none(_flag), "None, true or false"),
    "truncate_prompt_tokens": (
        _or_none(_prompt_limit), "None, -1 for what fits, or an integer of at least 1",
    ),
    "output_kind": (_kind, "CUMULATIVE, DELTA or FINAL_ONLY of RequestOutputKind"),
    "spaces_between_special_tokens": (_spaces, "true; the tokenizer decides about its spaces"),
    "structured_outputs": (StructuredOutputsParams.of, "None or StructuredOutputsParams"),
}  # fmt: skip

_GUIDED = "use structured_outputs=StructuredOutputsParams(json=, regex=, choice= or grammar=)"
_BEAM = "beam search is not supported; draw n samples and choose"
_HOOK = "code between logits and sampling is not run, for it would run on the host at each step; see logit_bias, "
_HOOK += "allowed_token_ids and bad_words"
REFUSED = {
    "guided_decoding": _GUIDED,
    "guided_json": _GUIDED,
    "guided_regex": _GUIDED,
    "guided_choice": _GUIDED,
    "guided_grammar": _GUIDED,
    "json_schema": _GUIDED,
    "regex": _GUIDED,
    "ebnf": _GUIDED,
    "structural_tag": _GUIDED,
    "best_of": "draw n samples with logprobs=0 and keep those of the highest cumulative_logprob",
    "use_beam_search": _BEAM,
    "beam_width": _BEAM,
    "length_penalty": _BEAM,
    "early_stopping": _BEAM,
    "logits_processors": _HOOK,
    "custom_logit_processor": _HOOK,
    "custom_params": _HOOK,
    "extra_args": "there are no plugins that would read them",
    "thinking_token_budget": "thoughts are not told apart from answers; limit both with max_tokens",
    "repetition_detection": "use repetition_penalty or frequency_penalty",
    "flat_logprobs": "log-probabilities are dictionaries by token id",
    "logprob_token_ids": "ask for logprobs=k, or score the tokens with LLM.score",
    "stream_interval": "use LLM.stream(prompt, params, steps=...)",
    "skip_reading_prefix_cache": "no prefixes are cached",
    "skip_clone": "parameters are always copied",
    "stop_regex": "use stop, which takes plain strings, or stop_token_ids",
    "no_stop_trim": "use include_stop_str_in_output=True",
    "max_new_tokens": "use max_tokens",
    "min_new_tokens": "use min_tokens",
    "max_completion_tokens": "use max_tokens",
    "do_sample": "use temperature=0 for greedy decoding",
    "num_return_sequences": "use n, for samples",
    "sampling_seed": "use seed=...",
}


def show_value(value: Any) -> str:
    """Formats a value for a message, its middle left out where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"an {type(value).__name__} that is too long to show"
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"


def refusal(names: set[str], known: set[str]) -> str:
    """Returns the message about parameter names that are not known."""
    reasons = "".join(f"; {name}: {REFUSED[name]}" for name in sorted(names & set(REFUSED)))
    return f"sampling: unknown {sorted(names)}; known are {sorted(known)}{reasons}"
