"""OpenAI's response bodies of finished requests."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.checkpoint.text.codec import Text
from jaxspec.serve.request import CompletionOutput, Logprob, RequestOutput, SamplingParams
from jaxspec.serve.text import token_offsets

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
URLS = (COMPLETIONS, CHAT)


def response_body(
    url: str, number: int, model: str, output: RequestOutput, params: SamplingParams, text: Text | None
) -> dict[str, Any]:
    """Returns a finished request as a ``text_completion`` or ``chat.completion`` object; ids are made of ``number``.

    Accepted and rejected drafts are counted under OpenAI's names for predicted tokens.
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
    logprobs = completion_logprobs(
        c, output.prompt_token_ids, skip_special_tokens=params.skip_special_tokens, text=text
    )
    return {"index": c.index, "text": c.text, "logprobs": logprobs, "finish_reason": c.finish_reason}


def _chat_choice(c: CompletionOutput, params: SamplingParams, text: Text | None) -> dict[str, Any]:
    message, reason = {"role": "assistant", "content": c.text, "refusal": None}, c.finish_reason
    if c.tool_calls is not None:
        message |= {"content": c.content, "tool_calls": c.tool_calls}
        reason = "tool_calls" if reason == "stop" else reason
    logprobs = chat_logprobs(c, params.logprobs or 0, text)
    return {"index": c.index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def completion_logprobs(
    c: CompletionOutput, prompt: Sequence[int], *, skip_special_tokens: bool, text: Text | None
) -> dict[str, Any] | None:
    """Returns log-probabilities as in a ``text_completion``.

    A token goes by its text after other text, spaces included; by ``bytes:`` and its bytes in hexadecimal where it is
    part of a character; by ``token_id:`` and its number where another token of its position has that text already (the
    generated one comes first, then the likelier ones), or where the tokenizer does not know it. So every id keeps an
    entry of its own in ``top_logprobs``. Special tokens that the text leaves out have no width in ``text_offset``.
    """
    if c.logprobs is None:
        return None
    if text is None:
        offsets = [0] * len(c.token_ids)
    else:
        offsets = [
            min(at, len(c.text))
            for at in token_offsets(text, skip_special_tokens=skip_special_tokens, prompt=prompt, ids=c.token_ids)
        ]
    return {
        "tokens": [_name(i, text) for i in c.token_ids],
        "token_logprobs": [entry[i].logprob for i, entry in zip(c.token_ids, c.logprobs, strict=True)],
        "top_logprobs": [_by_name(i, entry, text) for i, entry in zip(c.token_ids, c.logprobs, strict=True)],
        "text_offset": offsets,
    }


def _by_name(chosen: int, entry: Mapping[int, Logprob], text: Text | None) -> dict[str, float]:
    """Returns the log-probabilities of one position, the likeliest first, under names that differ."""
    ranked = sorted(entry, key=lambda i: entry[i].rank)
    names: dict[str, int] = {}
    for i in [chosen, *ranked]:
        names.setdefault(_name(i, text), i)
    owner = {i: name for name, i in names.items()}
    return {owner.get(i, f"token_id:{i}"): entry[i].logprob for i in ranked}


def _name(token_id: int, text: Text | None, prefix: str = "bytes:") -> str:
    data = text.token_bytes.of(token_id) if text else None
    if data is None:
        return f"token_id:{token_id}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(c: CompletionOutput, most: int, text: Text | None) -> dict[str, Any] | None:
    """Returns log-probabilities as in a ``chat.completion``, with the ``most`` likeliest tokens of each position.

    ``bytes`` are the token's own, those of a character's tokens join to the character; null for unknown ids.
    """
    if c.logprobs is None:
        return None
    content = []
    for chosen, entry in zip(c.token_ids, c.logprobs, strict=True):
        ranked = sorted(entry.items(), key=lambda item: item[1].rank)
        top = [_chat_logprob(i, p, text) for i, p in ranked if p.rank <= most]
        content.append(_chat_logprob(chosen, entry[chosen], text) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_logprob(token_id: int, value: Logprob, text: Text | None) -> dict[str, Any]:
    data = text.token_bytes.of(token_id) if text else None
    token = _name(token_id, text, prefix="")
    return {"token": token, "logprob": value.logprob, "bytes": None if data is None else list(data)}
