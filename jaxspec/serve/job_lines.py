"""Lines of a batch job to requests, and finished requests to records of the output."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jaxspec.checkpoint.text.codec import Text
from jaxspec.checkpoint.text.conversation import joined, messages_of
from jaxspec.errors import RequestError
from jaxspec.serve import openai
from jaxspec.serve.openai_request import pop_template, read_body, rename_settings
from jaxspec.serve.request import CompletionOutput, Logprob, RequestOutput, SamplingParams

PROMPTS = ("prompt", "messages", "prompt_token_ids")
MOST_SAMPLES = 1024
LEAST_LOGPROB = -9999.0


@dataclass
class Line:
    """One line of the input.

    Attributes:
      index: in the file, from 0.
      custom_id: the caller's name for it.
      batch: whether it has the form of OpenAI's Batch API.
      url: endpoint that a Batch line asks for.
      prompt: text, messages or token ids, as ``LLM.submit`` takes them.
      params: sampling parameters.
      echo: whether the answer repeats the text that it goes on with.
      error: why it cannot run, None if it can.
    """

    index: int
    custom_id: str | int | None = None
    batch: bool = False
    url: str = ""
    prompt: dict[str, Any] = field(default_factory=dict)
    params: SamplingParams = field(default_factory=SamplingParams)
    echo: bool = False
    error: str | None = None


def read_line(data: bytes, index: int, defaults: SamplingParams) -> Line:
    """Reads one line; whatever is wrong with it is in ``error``."""
    line = Line(index)
    try:
        _fill(line, _object(data.strip().removeprefix(b"\xef\xbb\xbf")), defaults)
    except RequestError as error:
        line.error = str(error)
    except Exception as error:
        line.error = f"cannot be read ({type(error).__name__}: {error})"  # one line never ends a job
    return line


def _object(data: bytes) -> dict[str, Any]:
    try:
        data.decode()
        value = msgspec.json.decode(data)
    except UnicodeDecodeError as error:
        raise RequestError(f"not valid UTF-8 at byte {error.start}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise RequestError(f"a JSON object is needed, got {type(value).__name__}")
    return value


def _fill(line: Line, value: dict[str, Any], defaults: SamplingParams) -> None:
    line.batch = "body" in value or "url" in value
    name = value.pop("custom_id", None)
    if isinstance(name, bool) or not isinstance(name, str | int | None) or (line.batch and not isinstance(name, str)):
        raise RequestError(f"custom_id: a string is needed, got {name!r}")
    line.custom_id = name
    if line.batch:
        line.prompt, settings, line.echo = _read_batch(line, value)
    else:
        given = [key for key in PROMPTS if value.get(key) is not None]
        if len(given) != 1:
            raise RequestError(f"exactly one of {list(PROMPTS)} is needed, got {given or sorted(value)}")
        line.prompt = {given[0]: value[given[0]]}
        if given == ["messages"]:
            line.prompt |= pop_template(value)
        settings = rename_settings({key: v for key, v in value.items() if key not in PROMPTS})
    if "messages" in line.prompt:
        messages_of(line.prompt["messages"])
    line.params = SamplingParams.from_mapping(settings, defaults)
    if line.params.n > MOST_SAMPLES:
        raise RequestError(f"sampling: n must be at most {MOST_SAMPLES}, got {line.params.n}")


def _read_batch(line: Line, value: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], bool]:
    url, body, method = value.get("url"), value.get("body"), value.get("method", "POST")
    unknown = sorted(set(value) - {"url", "body", "method"})
    if unknown:
        raise RequestError(f"unknown keys {unknown}; a Batch line has custom_id, method, url and body")
    if method != "POST":
        raise RequestError(f"method: POST is needed, got {method!r}")
    if url not in openai.URLS:
        raise RequestError(f"url: {url!r} is not supported; supported are {list(openai.URLS)}")
    if not isinstance(body, dict):
        raise RequestError(f"body: a JSON object is needed, got {type(body).__name__}")
    line.url = url
    return read_body(url, body)


def error_record(line: Line, message: str, code: str = "invalid_request") -> dict[str, Any]:
    """Returns the record of a request that could not run; ``error.line`` counts from 1."""
    error: dict[str, Any] = {"line": line.index + 1, "message": message}
    if line.batch:
        return _batch_record(line, None, {"code": code, **error})
    return _head(line) | {"error": error}


def finished_record(line: Line, output: RequestOutput, model: str, text: Text | None) -> dict[str, Any]:
    """Returns the record of a request that ended; an error's where it failed or the record cannot be written."""
    try:
        if reason := _failure(output):
            return error_record(line, reason, "generation_failed")
        return _batch_body(line, output, model, text) if line.batch else _plain(line, output)
    except Exception as error:
        return error_record(line, f"its record cannot be written ({type(error).__name__}: {error})", "record_failed")


def _failure(output: RequestOutput) -> str | None:
    """Returns why a request has no answer, None if it has one.

    Log-probabilities of tokens that cannot be sampled become vLLM's number for them: JSON has no infinity.
    """
    for c in output.outputs:
        if c.finish_reason == "error":
            return c.error or "the request failed"
        for entry in [*(c.logprobs or []), *(output.prompt_logprobs or [])]:
            for token, value in (entry or {}).items():
                if math.isnan(value.logprob):
                    return f"the log-probability of token {token} is not a number; look at the model's weights"
                value.logprob = max(value.logprob, LEAST_LOGPROB)
        if c.cumulative_logprob is not None:
            c.cumulative_logprob = max(c.cumulative_logprob, LEAST_LOGPROB * len(c.token_ids))
    return None


def _batch_body(line: Line, output: RequestOutput, model: str, text: Text | None) -> dict[str, Any]:
    body = openai.response_body(line.url, line.index, model, output, line.params, text)
    chat, of_prompt = line.url == openai.CHAT, _prompt_logprobs(output)
    echoed = _echoed(line, output, text) if line.echo else ""
    for choice in body["choices"]:
        holder, key = (choice["message"], "content") if chat else (choice, "text")
        holder[key] = echoed + (holder[key] or "") if echoed else holder[key]
        if of_prompt is not None and not chat:
            choice["prompt_logprobs"] = of_prompt
    if of_prompt is not None and chat:
        body["prompt_logprobs"] = of_prompt
    return _batch_record(line, {"status_code": 200, "request_id": f"req_{line.index}", "body": body}, None)


def _echoed(line: Line, output: RequestOutput, text: Text | None) -> str:
    """Returns the text that an answer goes on with: the prompt, or the assistant's last message."""
    if "messages" in line.prompt:
        last = messages_of(line.prompt["messages"])[-1]
        return joined(last["content"]) if last["role"] == "assistant" else ""
    if output.prompt is not None:
        return output.prompt
    return text.decode(output.prompt_token_ids) if text else ""


def _prompt_logprobs(output: RequestOutput) -> list[Any] | None:
    given = output.prompt_logprobs
    return None if given is None else [entry and _entry(entry) for entry in given]


def _plain(line: Line, output: RequestOutput) -> dict[str, Any]:
    m = output.metrics
    record = _head(line)
    if output.prompt is not None:
        record["prompt"] = output.prompt
    if output.prompt is None or "messages" in line.prompt:
        record["prompt_token_ids"] = output.prompt_token_ids
    if (of_prompt := _prompt_logprobs(output)) is not None:
        record["prompt_logprobs"] = of_prompt
    if line.params.n == 1:
        record |= _sample(output.outputs[0])
    else:
        record["outputs"] = [{"index": c.index} | _sample(c) for c in output.outputs]
    record["metrics"] = {
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_generated_tokens": sum(len(c.token_ids) for c in output.outputs),
        "num_steps": m.num_steps,
        "num_draft_tokens": m.num_draft_tokens,
        "num_accepted_tokens": m.num_accepted_tokens,
        "mean_acceptance_length": m.mean_acceptance_length,
        "drafted_acceptance_length": m.drafted_acceptance_length,
    }
    return record


def _head(line: Line) -> dict[str, Any]:
    return {"index": line.index} | ({} if line.custom_id is None else {"custom_id": line.custom_id})


def _batch_record(line: Line, response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    record = {"id": f"batch_req_{line.index}", "index": line.index, "custom_id": line.custom_id}
    return record | {"response": response, "error": error}


def _sample(c: CompletionOutput) -> dict[str, Any]:
    sample: dict[str, Any] = {"text": c.text, "token_ids": c.token_ids, "finish_reason": c.finish_reason}
    sample["stop_reason"] = c.stop_reason
    if c.tool_calls is not None:
        sample["tool_calls"] = c.tool_calls
    if c.logprobs is not None:
        sample["cumulative_logprob"] = c.cumulative_logprob
        sample["logprobs"] = [_entry(entry) for entry in c.logprobs]
    return sample


def _entry(entry: Mapping[int, Logprob]) -> dict[str, Any]:
    return {str(i): {"logprob": p.logprob, "rank": p.rank} for i, p in entry.items()}
