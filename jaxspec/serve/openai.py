"""OpenAI's request bodies to prompts and settings, and finished requests to its response bodies."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoint.text import Text
from jaxspec.errors import RequestError
from jaxspec.serve.openai_logprobs import chat_logprobs, completion_logprobs
from jaxspec.serve.request import CompletionOutput, RequestOutput, SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
URLS = (COMPLETIONS, CHAT)
TEMPLATE = ("chat_template_kwargs",)
ALIASES = {"max_completion_tokens": "max_tokens"}
IGNORED = {
    "model", "user", "store", "metadata", "service_tier", "parallel_tool_calls", "safety_identifier",
    "prompt_cache_key", "verbosity", "stream_options", "tool_choice", "function_call", "prediction",
}  # fmt: skip
OFF: dict[str, Any] = {
    "stream": False, "echo": False, "best_of": 1, "logit_bias": {}, "suffix": "", "tools": [],
    "functions": [], "response_format": {"type": "text"}, "modalities": ["text"],
}  # fmt: skip


def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names of ``SamplingParams``, nulls left out; OpenAI's newer names win."""
    given = {name: value for name, value in values.items() if value is not None}
    return {n: v for n, v in given.items() if n not in ALIASES} | {
        ALIASES[n]: v for n, v in given.items() if n in ALIASES
    }


def read_body(url: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Takes a request body apart.

    Returns:
      The prompt as ``LLM.submit`` takes it, and the settings that the body names.

    Raises:
      RequestError: it asks for something that is not supported.
    """
    values = renamed(body)
    for name, value in OFF.items():
        if values.pop(name, value) != value:
            raise RequestError(f"body: {name} is not supported; leave it out or give {value!r}")
    values = {name: value for name, value in values.items() if name not in IGNORED}
    if url == CHAT:
        wanted, most = values.pop("logprobs", False), values.pop("top_logprobs", None)
        if not isinstance(wanted, bool):
            raise RequestError(f"body: logprobs must be true or false for {CHAT}, got {wanted!r}")
        if most is not None and not wanted:
            raise RequestError("body: top_logprobs needs logprobs: true")
        if wanted:
            values["logprobs"] = most or 0
        prompt = {"messages": [_flat(m) for m in messages_of(values.pop("messages", None))]}
        return prompt | {name: values.pop(name) for name in TEMPLATE if name in values}, values
    return _prompt(values.pop("prompt", None)), values


def messages_of(value: Any) -> list[Any]:
    """A conversation, checked to be a list of something."""
    if not isinstance(value, list) or not value:
        raise RequestError(f"messages: a list of at least one message is needed, got {value!r}")
    return value


def _prompt(value: Any) -> dict[str, Any]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return {"prompt": value}
    if isinstance(value, list) and value and not isinstance(value[0], str | list):
        return {"prompt_token_ids": value}
    raise RequestError("body: prompt must be one text or one list of token ids; give several prompts on several lines")


def _flat(message: Any) -> Any:
    """A message whose content is text, not a list of parts."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = message["content"]
    if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in parts):
        raise RequestError("messages: only parts of type text are supported")
    return {**message, "content": "\n".join(p["text"] for p in parts)}


def response_body(
    url: str, number: int, model: str, output: RequestOutput, params: SamplingParams, text: Text | None
) -> dict[str, Any]:
    """A finished request as a ``text_completion`` or ``chat.completion`` object.

    Accepted and rejected drafts are counted under OpenAI's names for predicted tokens.

    Args:
      url: endpoint that was asked for.
      number: what ids are made of.
      model: name of the model.
      output: the request.
      params: what it asked for.
      text: the tokenizer.
    """
    generated = sum(len(c.token_ids) for c in output.outputs)
    m, prompt = output.metrics, len(output.prompt_token_ids)
    chat = url == CHAT
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{number}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            _chat_choice(c, params, text) if chat else _choice(c, output, params, text) for c in output.outputs
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "completion_tokens_details": {
                "accepted_prediction_tokens": m.num_accepted_tokens,
                "rejected_prediction_tokens": m.num_draft_tokens - m.num_accepted_tokens,
            },
        },
    }


def _choice(c: CompletionOutput, output: RequestOutput, params: SamplingParams, text: Text | None) -> dict[str, Any]:
    logprobs = completion_logprobs(c, output.prompt_token_ids, params.skip_special_tokens, text)
    return {"index": c.index, "text": c.text, "logprobs": logprobs, "finish_reason": c.finish_reason}


def _chat_choice(c: CompletionOutput, params: SamplingParams, text: Text | None) -> dict[str, Any]:
    message = {"role": "assistant", "content": c.text, "refusal": None}
    logprobs = chat_logprobs(c, params.logprobs or 0, text)
    return {"index": c.index, "message": message, "logprobs": logprobs, "finish_reason": c.finish_reason}
