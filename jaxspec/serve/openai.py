"""OpenAI's request bodies to prompts and settings, and finished requests to its response bodies."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoint.text import Text
from jaxspec.errors import RequestError
from jaxspec.serve.request import CompletionOutput, Logprob, RequestOutput

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
    url: str, number: int, model: str, output: RequestOutput, most: int | None, text: Text | None
) -> dict[str, Any]:
    """A finished request as a ``text_completion`` or ``chat.completion`` object.

    Accepted and rejected drafts are counted under OpenAI's names for predicted tokens.

    Args:
      url: endpoint that was asked for.
      number: what ids are made of.
      model: name of the model.
      output: the request.
      most: how many log-probabilities per token it asked for.
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
        "choices": [_chat_choice(c, most or 0, text) if chat else _choice(c, text) for c in output.outputs],
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


def _choice(c: CompletionOutput, text: Text | None) -> dict[str, Any]:
    found = None
    if c.logprobs is not None:
        tokens = [_token(i, text) for i in c.token_ids]
        offsets = [0]
        for token in tokens:
            offsets.append(offsets[-1] + len(token))
        found = {
            "tokens": tokens,
            "token_logprobs": [entry[i].logprob for i, entry in zip(c.token_ids, c.logprobs, strict=True)],
            "top_logprobs": [{_token(i, text): p.logprob for i, p in entry.items()} for entry in c.logprobs],
            "text_offset": offsets[:-1],
        }
    return {"index": c.index, "text": c.text, "logprobs": found, "finish_reason": c.finish_reason}


def _chat_choice(c: CompletionOutput, most: int, text: Text | None) -> dict[str, Any]:
    found = None
    if c.logprobs is not None:
        content = []
        for chosen, entry in zip(c.token_ids, c.logprobs, strict=True):
            ranked = sorted(entry.items(), key=lambda item: item[1].rank)
            content.append(_chat_logprob(chosen, entry[chosen], text) | {
                "top_logprobs": [_chat_logprob(i, p, text) for i, p in ranked if p.rank <= most],
            })  # fmt: skip
        found = {"content": content, "refusal": None}
    message = {"role": "assistant", "content": c.text, "refusal": None}
    return {"index": c.index, "message": message, "logprobs": found, "finish_reason": c.finish_reason}


def _chat_logprob(token_id: int, value: Logprob, text: Text | None) -> dict[str, Any]:
    token = _token(token_id, text)
    return {"token": token, "logprob": value.logprob, "bytes": list(token.encode())}


def _token(token_id: int, text: Text | None) -> str:
    return text.decode([token_id], skip_special_tokens=False) if text else f"token_id:{token_id}"
