"""OpenAI's request bodies to prompts and settings; what a body asks for is done or refused, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoint.text.codec import CHAT_KEYS
from jaxspec.errors import RequestError
from jaxspec.serve.openai import CHAT

TOOL_KEYS = "tool_choice", "parallel_tool_calls"
TEMPLATE = tuple(key for key in CHAT_KEYS if key != "messages")
ALIASES = {"max_completion_tokens": "max_tokens"}
# Names and bookkeeping, which no text depends on.
NOTES = {
    "model", "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "stream_options", "request_id",
}  # fmt: skip
# What may be said because it is so anyway, and why nothing else may.
SETTLED: dict[str, tuple[tuple[Any, ...], str]] = {
    "stream": ((False,), "a batch has no streams"),
    "suffix": (("",), "texts are only continued"),
    "functions": (([],), "functions are given as tools"),
    "function_call": (("auto", "none"), "functions are given as tools, and forced by tool_choice"),
    "modalities": ((["text"],), "answers are texts"),
    "verbosity": (("medium",), "ask for it in a message"),
    "prediction": ((), "what drafts is set for the engine, by speculative_config"),
    "audio": ((), "answers are texts"),
    "web_search_options": ((), "nothing is looked up"),
    "use_beam_search": ((False,), "texts are sampled"),
    "priority": ((0,), "lines are taken in their order"),
    "logit_bias": (({},), ""),
}
PASSED_ON = {"logit_bias"}


def rename_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings under the names of ``SamplingParams``, nulls left out; OpenAI's newer names win."""
    given = {name: value for name, value in values.items() if value is not None}
    return {n: v for n, v in given.items() if n not in ALIASES} | {
        ALIASES[n]: v for n, v in given.items() if n in ALIASES
    }


def read_body(url: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Splits a request body into prompt, settings, and whether the answer repeats the text that it goes on with.

    Raises:
      RequestError: it asks for something that is not supported.
    """
    values = {name: value for name, value in rename_settings(body).items() if name not in NOTES}
    _settle(values)
    _set_form(values)
    echo = values.pop("echo", False)
    if not isinstance(echo, bool):
        raise RequestError(f"body: echo must be true or false, got {echo!r:.200}")
    if url == CHAT:
        return _chat(values), values, echo
    if "tool_choice" in values:
        raise RequestError(f"body: tool_choice is for {CHAT}, whose templates write tools; leave it out")
    if echo and values.get("logprobs") is not None:
        raise RequestError("body: echo goes without logprobs; prompt_logprobs are those of the prompt")
    return _prompt(values.pop("prompt", None)), values, echo


def pop_template(values: dict[str, Any]) -> dict[str, Any]:
    """Removes from a request what says how its messages are written, and returns it."""
    options = {name: values.pop(name) for name in (*TEMPLATE, *TOOL_KEYS) if name in values}
    if (effort := values.pop("reasoning_effort", None)) is not None:
        options["chat_template_kwargs"] = {**(options.get("chat_template_kwargs") or {}), "reasoning_effort": effort}
    return {name: value for name, value in options.items() if value is not None}


def _settle(values: dict[str, Any]) -> None:
    """Removes what asks for nothing but what holds anyway; raises RequestError if it asks for something else."""
    for name, (allowed, reason) in SETTLED.items():
        if name not in values:
            continue
        if values[name] in allowed:
            del values[name]
        elif name not in PASSED_ON:
            others = f" or give {' or '.join(map(repr, allowed))}" if allowed else ""
            raise RequestError(f"body: {name} {values[name]!r:.200} is not supported: {reason}; leave it out{others}")
    if values.pop("best_of", n := values.get("n", 1)) != n:
        raise RequestError(f"body: best_of is not supported; leave it out or give n, {n!r}")
    if not values.get("tools") or values.get("parallel_tool_calls") is True:
        values.pop("parallel_tool_calls", None)
    if values.get("parallel_tool_calls") is False and values.get("tool_choice", "auto") == "auto":
        raise RequestError("body: parallel_tool_calls false goes with a tool_choice that forces calls; leave it out")
    if not values.get("tools") and values.get("tool_choice") in ("auto", "none"):
        del values["tool_choice"]


def _set_form(values: dict[str, Any]) -> None:
    """Turns ``response_format`` into ``structured_outputs``, whose other settings may be given beside it.

    Schemas are always enforced, ``strict`` or not.
    """
    wanted = values.pop("response_format", {"type": "text"})
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind == "text":
        return
    beside = values.get("structured_outputs", {})
    if not isinstance(beside, Mapping):
        raise RequestError(f"body: structured_outputs is a JSON object, got {beside!r:.200}")
    if kind == "json_object":
        values["structured_outputs"] = {**beside, "json_object": True}
    elif kind == "json_schema":
        described = wanted.get("json_schema")
        if not isinstance(described, Mapping) or not isinstance(described.get("schema"), Mapping):
            raise RequestError(
                f'body: response_format needs {{"json_schema": {{"name": ..., "schema": ...}}}}, got {wanted!r:.200}'
            )
        values["structured_outputs"] = {**beside, "json": described["schema"]}
    else:
        raise RequestError(
            "body: response_format is of type text, json_object or json_schema; structured_outputs has other forms; "
            f"got {wanted!r:.200}"
        )


def _chat(values: dict[str, Any]) -> dict[str, Any]:
    wanted, most = values.pop("logprobs", False), values.pop("top_logprobs", None)
    if not isinstance(wanted, bool):
        raise RequestError(f"body: logprobs must be true or false for {CHAT}, got {wanted!r:.200}")
    if most is not None and not wanted:
        raise RequestError("body: top_logprobs needs logprobs: true")
    if wanted:
        values["logprobs"] = most or 0
    for tool in values.get("tools") or []:
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise RequestError(f'body: tools are {{"type": "function", "function": ...}}, got {tool!r:.200}')
    return {"messages": values.pop("messages", None), **pop_template(values)}


def _prompt(value: Any) -> dict[str, Any]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return {"prompt": value}
    if isinstance(value, list) and value and not isinstance(value[0], str | list):
        return {"prompt_token_ids": value}
    raise RequestError("body: prompt must be one text or one list of token ids; give several prompts on several lines")
