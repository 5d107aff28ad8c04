"""Finished requests to OpenAI's response bodies."""

from __future__ import annotations

import time
from typing import Any

from jaxspec.checkpoint.text.codec import Text
from jaxspec.serve.openai_logprobs import chat_logprobs, completion_logprobs
from jaxspec.serve.request import CompletionOutput, RequestOutput, SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
URLS = (COMPLETIONS, CHAT)


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
