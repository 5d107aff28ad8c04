"""What a line of a job asks for: done, or refused with the reason, and never passed over."""

import json
import random
from typing import Any

import pytest

from jaxspec.serve.job_lines import Line, finished_record, read_line
from jaxspec.serve.openai_request import NOTES, SETTLED
from jaxspec.serve.request import CompletionOutput, Logprob, RequestOutput, SamplingParams
from jaxspec.serve.structured_outputs import StructuredOutputsParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is"}
WEATHER = {"type": "function", "function": {"name": "weather"}}


def line_of(value: dict[str, Any]) -> Line:
    return read_line(json.dumps(value).encode(), 0, SamplingParams())


def batch(url: str, **body: Any) -> Line:
    base: dict[str, Any] = {"prompt": "a"} if url == COMPLETIONS else {"messages": [USER]}
    return line_of({"custom_id": "x", "method": "POST", "url": url, "body": base | body})


SAME: list[dict[str, Any]] = [
    {"stream": False}, {"echo": False}, {"best_of": 1}, {"n": 3, "best_of": 3}, {"logit_bias": {}}, {"suffix": ""},
    {"functions": []}, {"function_call": "auto"}, {"function_call": "none"}, {"tool_choice": "auto"},
    {"tool_choice": "none"}, {"response_format": {"type": "text"}}, {"modalities": ["text"]}, {"verbosity": "medium"},
    {"parallel_tool_calls": True}, {"parallel_tool_calls": False}, {"use_beam_search": False}, {"priority": 0},
    {"stream_options": {"include_usage": True}}, {"model": "any", "user": "me", "store": True, "metadata": {"a": "b"}},
    {"service_tier": "flex", "safety_identifier": "x", "prompt_cache_key": "k"},
]  # fmt: skip


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("body", SAME)
def test_what_changes_nothing_is_accepted(url: str, body: dict[str, Any]):
    line = batch(url, **body)
    assert line.error is None
    assert line.params == SamplingParams(n=body.get("n", 1))
    assert not line.echo
    assert "tools" not in line.prompt


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("name", sorted(NOTES | SETTLED.keys() | {"echo", "best_of", "parallel_tool_calls", "tools"}))
def test_null_is_as_good_as_nothing(url: str, name: str):
    assert batch(url, **{name: None}).error is None


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prediction": {"type": "content", "content": "x"}}, "prediction .*set for the engine, by speculative_config"),
        ({"function_call": {"name": "f"}}, "function_call .*forced by tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions .*given as tools"),
        (
            {"response_format": {"type": "structural_tag"}},
            "response_format is of type text, json_object or json_schema",
        ),
        ({"response_format": {"type": "json_schema"}}, 'response_format needs {"json_schema"'),
        ({"response_format": "json_object"}, "response_format is of type text"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "exactly one of"),
        ({"structured_outputs": {"structural_tag": "x"}}, "'structural_tag' is not known; give grammar="),
        ({"guided_json": {}}, "guided_json: use structured_outputs"),
        ({"stream": True}, "stream True is not supported: a batch has no streams; leave it out or give False"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio .*answers are texts"),
        ({"verbosity": "low"}, "verbosity 'low' .*ask for it in a message"),
        ({"web_search_options": {}}, "web_search_options .*nothing is looked up"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of is not supported; leave it out or give n, 1"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"priority": 3}, "priority"),
        ({"echo": "yes"}, "echo must be true or false"),
        ({"never_heard_of": 1}, "never_heard_of"),
        ({"logit_bias": {"5": "x"}}, "logit_bias"),
    ],
)
def test_what_would_be_passed_over_is_refused(url: str, body: dict[str, Any], says: str):
    line = batch(url, **body)
    assert line.error is not None
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(line.error)


def test_forms_of_a_body():
    schema, beside = {"type": "integer"}, {"after": "</think>", "disable_any_whitespace": True}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    for url in (COMPLETIONS, CHAT):
        params = batch(url, response_format=wanted, structured_outputs=beside).params
        assert params.structured_outputs == StructuredOutputsParams(json=schema, **beside)
        params = batch(url, response_format={"type": "json_object"}).params
        assert params.structured_outputs == StructuredOutputsParams(json_object=True)
        assert batch(url, structured_outputs={"choice": ["a"]}).params.structured_outputs is not None
        assert batch(url, structured_outputs={"choice": ["a"]}, ignore_eos=True).error is not None
    named = {"type": "function", "function": {"name": "weather"}}
    for line in (
        batch(CHAT, tools=[WEATHER], tool_choice=named, parallel_tool_calls=False),
        line_of({"messages": [USER], "tools": [WEATHER], "tool_choice": named, "parallel_tool_calls": False}),
    ):
        assert line.prompt == {
            "messages": [USER], "tools": [WEATHER], "tool_choice": named, "parallel_tool_calls": False
        }  # fmt: skip
    assert "tool_choice is for /v1/chat" in (batch(COMPLETIONS, tool_choice="required").error or "")


VALUES: list[Any] = [
    None, True, False, 0, -1, 5, 1e300, "", "x", "5", [], [1], ["a"], [[1]], {}, {"a": 1}, [{}], [None], [[]], "\u2028",
    [{"role": "user", "content": "a"}], [{"role": "user", "content": [{"type": "text", "text": "a"}]}], 2**70, -0.5,
]  # fmt: skip
NAMES = [
    *NOTES, *SETTLED, "echo", "best_of", "parallel_tool_calls", "tools", "tool_choice", "response_format", "n",
    "reasoning_effort", "chat_template",
    "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "messages", "prompt", "max_tokens",
    "max_completion_tokens", "temperature", "top_p", "top_k", "stop", "stop_token_ids", "seed", "logprobs",
    "speculative", "top_logprobs", "min_tokens", "repetition_penalty", "prompt_token_ids", "custom_id",
    "url", "body", "method",
]  # fmt: skip


def test_whatever_stands_in_a_line_it_is_read_or_refused():
    rng, refused = random.Random(5), 0
    for _ in range(4000):
        body = {name: rng.choice(VALUES) for name in rng.sample(NAMES, rng.randint(0, 4))}
        url = rng.choice([COMPLETIONS, CHAT])
        base = {"prompt": "a"} if url == COMPLETIONS else {"messages": [USER]}
        whole = {"custom_id": "x", "method": "POST", "url": url, "body": base | body}
        line = line_of(rng.choice([body, base | body, whole, whole | body]))
        refused += line.error is not None
        assert line.error is None or line.error
        assert "\n" not in (line.error or "")
    assert 2000 < refused < 4000


def test_settings_of_the_template():
    options = {
        "add_generation_prompt": False, "continue_final_message": True, "tools": [WEATHER], "chat_template": "x",
        "chat_template_kwargs": {"enable_thinking": True},
    }  # fmt: skip
    for line in (batch(CHAT, **options), line_of({"messages": [USER]} | options)):
        assert line.error is None
        assert line.prompt == {"messages": [USER], **options}
    for line in (batch(CHAT, reasoning_effort="low"), line_of({"messages": [USER], "reasoning_effort": "low"})):
        assert line.prompt["chat_template_kwargs"] == {"reasoning_effort": "low"}
    assert batch(CHAT, tools=None, chat_template=None).prompt == {"messages": [USER]}
    assert "tools" in (batch(COMPLETIONS, tools=[WEATHER]).error or "")
    assert "tools" in (line_of({"prompt": "a", "tools": [WEATHER]}).error or "")
    assert "body: tools are" in (batch(CHAT, tools=[{"type": "web_search"}]).error or "")
    assert "parallel_tool_calls false" in (batch(CHAT, tools=[WEATHER], parallel_tool_calls=False).error or "")


@pytest.mark.parametrize("content", [None, 5, [{"type": "image_url", "image_url": {"url": "x"}}]])
def test_contents_are_checked_alike_in_both_forms(content: Any):
    message = {"role": "user", "content": content}
    both = [batch(CHAT, messages=[message]).error, line_of({"messages": [message]}).error]
    assert both[0] == both[1]
    assert both[0] is not None
    assert both[0].startswith("messages: ")


def test_sampling_settings_go_by_their_own_names():
    body = {"seed": 3, "include_stop_str_in_output": True, "skip_special_tokens": False, "stop": ["x"], "min_tokens": 1}
    assert batch(CHAT, **body, max_completion_tokens=9, max_tokens=4).params == SamplingParams(**body, max_tokens=9)
    assert batch(COMPLETIONS, **body).params == SamplingParams(**body)


def output_of(prompt: str | None = "once", **sample: Any) -> RequestOutput:
    values = {"text": " upon", "token_ids": [3], "drafted": [False], "finish_reason": "stop"} | sample
    return RequestOutput("0", prompt, [1, 2], [CompletionOutput(0, **values)], finished=True)


def choice(line: Line, output: RequestOutput) -> dict[str, Any]:
    return finished_record(line, output, "m", None)["response"]["body"]["choices"][0]


def test_echo():
    assert choice(batch(COMPLETIONS, prompt="once", echo=True), output_of())["text"] == "once upon"
    assert choice(batch(COMPLETIONS, prompt="once"), output_of())["text"] == " upon"
    message = choice(batch(CHAT, messages=[USER, ANSWER], echo=True, continue_final_message=True), output_of("[x]"))
    assert message["message"]["content"] == "The answer is upon"
    assert choice(batch(CHAT, echo=True), output_of("[x]"))["message"]["content"] == " upon"
    assert "echo goes without logprobs" in (batch(COMPLETIONS, echo=True, logprobs=1).error or "")


def test_calls_of_tools_in_a_record():
    call = {"id": "call_0_0_0", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    output = output_of("[x]", tool_calls=[call])
    answer = choice(batch(CHAT, tools=[WEATHER]), output)
    assert answer["message"] == {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}
    assert answer["finish_reason"] == "tool_calls"
    assert finished_record(line_of({"messages": [USER], "tools": [WEATHER]}), output, "m", None)["tool_calls"] == [call]
    echoed = choice(batch(CHAT, messages=[USER, ANSWER], echo=True, tools=[WEATHER]), output)
    assert echoed["message"]["content"] == "The answer is"
    assert "tool_calls" not in choice(batch(CHAT, tools=[WEATHER]), output_of("[x]"))["message"]


def test_a_chats_record_has_what_the_template_wrote_and_its_ids():
    record = finished_record(line_of({"messages": [USER]}), output_of("[user]hi"), "m", None)
    assert (record["prompt"], record["prompt_token_ids"]) == ("[user]hi", [1, 2])
    record = finished_record(line_of({"prompt": "once"}), output_of(), "m", None)
    assert record["prompt"] == "once"
    assert "prompt_token_ids" not in record


def test_log_probabilities_of_the_prompt():
    output = output_of()
    output.prompt_logprobs = [None, of_second := {2: Logprob(float("-inf"), 9)}]
    wanted = [None, {"2": {"logprob": -9999.0, "rank": 9}}]
    assert finished_record(line_of({"prompt": "once"}), output, "m", None)["prompt_logprobs"] == wanted
    assert choice(batch(COMPLETIONS), output)["prompt_logprobs"] == wanted
    body = finished_record(batch(CHAT), output, "m", None)["response"]["body"]
    assert body["prompt_logprobs"] == wanted
    of_second[2].logprob = float("nan")
    assert "token 2 is not a number" in finished_record(batch(CHAT), output, "m", None)["error"]["message"]


def test_a_record_that_cannot_be_written_is_an_error():
    broken = output_of(token_ids=[3], logprobs=[{4: Logprob(-1.0, 1)}])
    record = finished_record(batch(COMPLETIONS, logprobs=1), broken, "m", None)
    assert record["response"] is None
    assert record["error"]["code"] == "record_failed"
    assert "its record cannot be written (KeyError" in record["error"]["message"]
