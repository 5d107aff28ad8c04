"""A conversation as callers give it, in OpenAI's form, checked and arranged for a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.errors import RequestError

TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
REASONING = ("reasoning_content", "thinking", "reasoning")
UNSUPPORTED = ("function_call", "audio")
Message = dict[str, Any]


def conversations(value: Any) -> list[Any]:
    """Returns a list of conversations, of one or of a list of them.

    Raises:
      RequestError: it is neither.
    """
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise RequestError(f"messages: a list of messages, or a list of such lists, is needed, got {value!r:.200}")
    return [value] if value and isinstance(value[0], Mapping) else list(value)


def messages_of(value: Any) -> list[Message]:
    """Returns a conversation's messages, each content a text or a list of text parts, and nothing that is None.

    Arguments of tool calls become objects, and reasoning goes by the names that templates read, as in transformers.

    Raises:
      RequestError: it is not a conversation of texts.
    """
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence) or not value:
        raise RequestError(f"messages: a list of at least one message is needed, got {value!r:.200}")
    return [_message(message) for message in value]


def joined(content: str | list[Any]) -> str:
    """Returns a content's text: that of its parts, a line each."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def arranged(messages: Sequence[Message], *, parts: bool, tells_strings: bool) -> list[Message]:
    """Returns messages with the contents that a template expects."""
    if not parts:
        return [message | {"content": joined(message["content"])} for message in messages]
    if tells_strings:
        return list(messages)
    return [
        message | {"content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message["content"], str) else message
        for message in messages
    ]  # fmt: skip


def with_ending(messages: Sequence[Message], ending: str) -> list[Message]:
    """Appends an ending to the last message's text.

    Raises:
      RequestError: the last message has no text.
    """
    *before, last = messages
    content = last["content"]
    if isinstance(content, list) and content:
        *others, part = content
        return [*before, last | {"content": [*others, part | {"text": part["text"] + ending}]}]
    if not isinstance(content, str):
        raise RequestError("continue_final_message: the last message has no text to continue")
    return [*before, last | {"content": content + ending}]


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """Returns tools, None for none.

    Raises:
      RequestError: they are not mappings.
    """
    if value is None:
        return None
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence) or not all(
        isinstance(tool, Mapping) for tool in value
    ):  # fmt: skip
        raise RequestError(f'tools: a list of {{"type": "function", "function": ...}} is needed, got {value!r:.200}')
    return [dict(tool) for tool in value] or None


def _message(message: Any) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f'messages: each needs "role" and "content", got {message!r:.200}')
    if unsupported := [name for name in UNSUPPORTED if message.get(name) is not None]:
        raise RequestError(f"messages: {unsupported} are not supported; calls of tools are tool_calls")
    there = {name: value for name, value in message.items() if value is not None}
    if calls := there.get("tool_calls"):
        there["tool_calls"] = _calls(calls)
    if "content" not in there and not calls:
        raise RequestError(
            f'messages: each needs "role" and "content", which may be null with tool_calls only, got {message!r:.200}'
        )
    reasoning = next((there[name] for name in REASONING if name in there), None)
    if reasoning is not None:
        there = {"thinking": reasoning} | there | {"reasoning_content": reasoning}
    return there | {"content": _content(there.get("content", ""))}


def _content(content: Any) -> str | list[Any]:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"messages: content is a text or a list of text parts, got {content!r:.200}")
    return [{"type": "text", "text": _part(part)} for part in content]


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(TEXTS.get(kind, "")) if isinstance(part, Mapping) and isinstance(kind, str) else None
    if not isinstance(text, str):
        raise RequestError(f'messages: only parts {{"type": "text", "text": ...}} are supported, got {part!r:.200}')
    return text


def _calls(calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple) or not all(
        isinstance(call, Mapping) and isinstance(call.get("function"), Mapping) for call in calls
    ):
        raise RequestError(f'messages: tool_calls is a list of {{"function": {{"name": ...}}}}, got {calls!r:.200}')
    return [{**call, "function": _with_object(call["function"])} for call in calls]


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a called function with its arguments as an object, as most templates expect, not as JSON text."""
    arguments = function.get("arguments")
    try:
        value = json.loads(arguments) if isinstance(arguments, str) and arguments else arguments or {}
    except (ValueError, RecursionError) as error:
        raise RequestError(f"messages: arguments of a tool call are a JSON object, got {arguments!r:.200}") from error
    if not isinstance(value, Mapping):
        raise RequestError(f"messages: arguments of a tool call are a JSON object, got {arguments!r:.200}")
    return {**function, "arguments": dict(value)}
