"""DeepSeek-V4's chat format, which its checkpoints publish as a document and a script instead of a Jinja template.

Written after the README in ``encoding/`` of deepseek-ai/DeepSeek-V4-Flash. Its tools, developer messages, reminders,
tasks and longest reasoning effort go with long fixed prompts and are not covered.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from jaxspec.checkpoint.text.conversation import REASONING
from jaxspec.errors import RequestError

START, END = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
USER, ASSISTANT = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"
THINK, ANSWER = "<think>", "</think>"
ROLES = ("system", "user", "assistant")
OPTIONS = ("thinking", "enable_thinking")
OTHERWISE = "encode the rest with the script in the checkpoint's encoding/ folder and give prompt_token_ids"


def encode(
    messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], *, answered: bool = False, ended: bool = True
) -> str:
    """Returns the text of a conversation, ready for the assistant's answer or after it.

    System messages stand unmarked; user messages in a row make one turn, a blank line between them; an assistant's
    turn ends with the end of the sentence. Reasoning of earlier answers is left out, as released. What the assistant
    starts with says whether it thinks: an open mark for the answer to come, a closing one for every other.

    Args:
      messages: ``role`` and ``content`` each; ``reasoning_content`` may be there.
      options: ``thinking`` (or ``enable_thinking``) switches thinking on, by default off.
      answered: whether the last message is the assistant's answer; its reasoning is written where it thinks.
      ended: whether that answer ends, or goes on.

    Raises:
      RequestError: an option, role or key is not covered, or nobody waits for an answer.
    """
    thinking = _thinking(options)
    for message in messages:
        _check(message)
    if answered:
        *before, last = messages
        if last["role"] != "assistant":
            raise RequestError("messages: without a generation prompt DeepSeek-V4's last message is the assistant's")
        reasoning = f"{last.get('reasoning_content') or ''}{ANSWER}" if thinking else ""
        return f"{encode(before, options)}{reasoning}{last['content']}{END if ended else ''}"
    turns = [(role, [message["content"] for message in run]) for role, run in groupby(messages, lambda m: m["role"])]
    _check_order([role for role, _ in turns])
    parts = [START]
    for number, (role, contents) in enumerate(turns):
        if role == "system":
            parts += contents
        elif role == "assistant":
            parts += [part for content in contents for part in (content, END)]
        else:
            last = number == len(turns) - 1
            parts += [USER, "\n\n".join(contents)]
            if last or turns[number + 1][0] == "assistant":
                parts += [ASSISTANT, THINK if thinking and last else ANSWER]
    return "".join(parts)


def _thinking(options: Mapping[str, Any]) -> bool:
    unknown = sorted(set(options) - set(OPTIONS))
    values = set(options.values())
    if unknown or not values <= {True, False} or len(values) > 1:
        raise RequestError(
            f"chat_template_kwargs: DeepSeek-V4 takes thinking (or enable_thinking) true or false, got {dict(options)}"
        )
    return True in values


def _check(message: Mapping[str, Any]) -> None:
    if message["role"] not in ROLES:
        raise RequestError(
            f"messages: of DeepSeek-V4's roles {list(ROLES)} are covered, got {message['role']!r}; {OTHERWISE}"
        )
    if not isinstance(message["content"], str):
        raise RequestError(f"messages: DeepSeek-V4 takes texts, got {message['content']!r}")
    known = {"role", "content", *REASONING}
    extra = sorted(key for key, value in message.items() if key not in known and value)
    if extra:
        raise RequestError(f"messages: DeepSeek-V4's {extra} are not covered; {OTHERWISE}")


def _check_order(roles: list[str]) -> None:
    pairs = set(zip(["start", *roles], roles, strict=False))
    if {("start", "assistant"), ("system", "assistant")} & pairs:
        raise RequestError("messages: DeepSeek-V4's assistant answers a user; put a user message before it")
    if not roles or roles[-1] != "user":
        raise RequestError("messages: the last must be the user's for DeepSeek-V4 to answer")
