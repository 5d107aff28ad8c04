"""Finished requests to OpenAI's response bodies."""

from __future__ import annotations

import time
from typing import Any

from jaxspec.checkpoint.text import Text
from jaxspec.serve.request import CompletionOutput, Logprob, RequestOutput

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
URLS = (COMPLETIONS, CHAT)


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
