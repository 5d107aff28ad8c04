"""The batch job: formats, bad lines, resuming after any crash, and files that are in the way."""

import io
import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from jaxspec.errors import ConfigError, JaxspecError, RequestError
from jaxspec.serve.job import run_job
from jaxspec.serve.request import SamplingParams
from tests.unit.serve.job_desk import ENGINE, MIXED, SAMPLING, Desk, said


def test_plain_lines(desk: Desk):
    progress = desk.run(*MIXED)
    records = desk.records()
    assert (progress.total, progress.done, progress.failed, progress.earlier) == (
        len(MIXED),
        len(MIXED),
        0,
        0,
    )
    assert [r["index"] for r in records] == list(range(len(MIXED)))
    assert [r.get("custom_id") for r in records] == [line.get("custom_id") for line in MIXED]
    assert records[0]["prompt"] == "the cat"
    assert len(records[0]["token_ids"]) == 6
    assert len(records[1]["token_ids"]) == 9
    assert [o["index"] for o in records[4]["outputs"]] == [0, 1, 2]
    assert records[0]["metrics"]["mean_acceptance_length"] == 1.0
    assert records[7]["metrics"]["num_prompt_tokens"] == 30
    assert records[6]["token_ids"] != records[8]["token_ids"], "equal lines without a seed are independent"
    for index in (1, 2):
        line = {k: v for k, v in MIXED[index].items() if k.startswith("prompt")}
        params = SamplingParams(temperature=0.0, max_tokens=9) if index == 1 else SamplingParams(seed=3, max_tokens=12)
        assert records[index]["token_ids"] == desk.llm.generate(line, params)[0].outputs[0].token_ids


def test_logprobs_of_plain_lines(desk: Desk):
    desk.run({"prompt": "the cat", "logprobs": 2})
    (record,) = desk.records()
    assert len(record["logprobs"]) == len(record["token_ids"])
    assert all(str(t) in entry for t, entry in zip(record["token_ids"], record["logprobs"], strict=True))
    assert record["cumulative_logprob"] < 0


def test_batch_lines(desk: Desk):
    chat = {
        "model": "any",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        "n": 2,
    }
    chat |= {"logprobs": True, "top_logprobs": 1, "max_completion_tokens": 5, "user": None, "stream": False}
    text = {
        "model": "any",
        "prompt": "the cat",
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": 1,
        "stop": None,
    }
    method = {"method": "POST"}
    desk.run(
        {"custom_id": "c", **method, "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "t", **method, "url": "/v1/completions", "body": text},
        {
            "custom_id": "i",
            **method,
            "url": "/v1/completions",
            "body": {"prompt": [3, 4, 5], "max_tokens": 2},
        },
    )
    talk, plain, ids = desk.records()
    assert [r["custom_id"] for r in (talk, plain, ids)] == ["c", "t", "i"]
    assert all(r["error"] is None and r["response"]["status_code"] == 200 and r["id"] for r in (talk, plain, ids))
    body = talk["response"]["body"]
    assert body["object"] == "chat.completion"
    assert [c["message"]["role"] for c in body["choices"]] == ["assistant"] * 2
    assert body["usage"]["completion_tokens"] == 10
    assert [len(entry["top_logprobs"]) for entry in body["choices"][0]["logprobs"]["content"]] == [1] * 5
    body = plain["response"]["body"]
    assert body["object"] == "text_completion"
    greedy = desk.llm.generate("the cat", SamplingParams(temperature=0.0, max_tokens=4))[0].outputs[0]
    assert body["choices"][0]["text"] == greedy.text
    assert len(body["choices"][0]["logprobs"]["token_logprobs"]) == 4
    usage = body["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]


def batch(body: Any, url: str = "/v1/completions", **more: Any) -> dict[str, Any]:
    return {"custom_id": "x", "method": "POST", "url": url, "body": body} | more


BAD: list[tuple[Any, str]] = [
    (b"{", "JSON"),
    (b"nonsense", "JSON"),
    (b'{"prompt": "\xff"}', "UTF-8"),
    (b"[" * 100_000, "JSON"),
    (b'{"prompt": "\\ud800"}', "JSON"),
    ([1, 2], "object"),
    ({}, "exactly one"),
    ({"prompt": "a", "messages": []}, "messages"),
    ({"prompt": "a", "prompt_token_ids": [1]}, "exactly one"),
    ({"prompt": 5}, "token"),
    ({"prompt": ""}, "token"),
    ({"prompt_token_ids": [10**9]}, "token ids"),
    ({"prompt": "a", "temprature": 1}, "temprature"),
    ({"prompt": "a", "temperature": -1}, "temperature"),
    ({"prompt": "a", "top_k": 10**12}, "top_k"),
    ({"prompt": "a", "stop": 5}, "stop"),
    ({"prompt": "a", "n": 10**9}, "n must"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "logprobs": 3}, "logprobs"),
    ({"prompt": "a", "custom_id": [1]}, "custom_id"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "user"}]}, "content"),
    ({"prompt_token_ids": [1] * 48}, "no room"),
    (batch({"prompt": "a"}, "/v1/embeddings"), "embeddings"),
    (batch("a"), "body"),
    (batch({"prompt": ["a", "b"]}), "several"),
    (batch({"prompt": "a", "stream": True}), "stream"),
    (batch({"prompt": "a"}, method="GET"), "POST"),
    (batch({"prompt": "a"}, custom_id=None), "custom_id"),
    (
        batch({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "/v1/chat/completions"),
        "text",
    ),
]


def test_bad_lines_become_error_records_with_their_numbers(desk: Desk):
    lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line, _ in BAD]
    progress = desk.run(b"\xef\xbb\xbf" + json.dumps({"prompt": "a"}).encode(), b"", *lines, b"  ", {"prompt": "a"})
    good, *bad, last = desk.records()
    assert good["token_ids"]
    assert last["token_ids"]
    assert last["index"] == len(BAD) + 3
    assert progress.failed == len(bad) == len(BAD)
    for number, (record, (line, word)) in enumerate(zip(bad, BAD, strict=True), 3):
        assert record["error"]["line"] == number == record["index"] + 1
        assert word in record["error"]["message"], (line, record)
        if isinstance(line, dict) and "url" in line:
            assert record["response"] is None
            assert record["custom_id"] == line["custom_id"]
    assert progress.errors[0].startswith("line 3: ")
    assert len(progress.errors) == 5


def test_names_are_unique(desk: Desk):
    lines = [{"prompt": "a", "custom_id": name} for name in ("x", "y", "x", 1, "1", "y")]
    progress = desk.run(*lines)
    assert [r["index"] for r in desk.records() if "error" in r] == [2, 5]
    assert progress.failed == 2
    whole = desk.target.read_bytes().splitlines(keepends=True)
    kept = [line for line in whole if json.loads(line)["index"] < 2]
    desk.target.write_bytes(b"".join(kept))
    assert desk.run().failed == 2
    assert [r["index"] for r in desk.records() if "error" in r] == [2, 5]


def unwritable(desk: Desk) -> None:
    desk.target = desk.target.parent / "missing" / "out.jsonl"


def folder(desk: Desk) -> None:
    desk.target.mkdir()


def missing(desk: Desk) -> None:
    desk.source.unlink()


def same(desk: Desk) -> None:
    desk.target = desk.source


@pytest.mark.parametrize("spoil", [unwritable, folder, missing, same])
def test_unusable_files_are_named(desk: Desk, spoil: Callable[[Desk], None]):
    desk.write(*MIXED)
    spoil(desk)
    with pytest.raises(ConfigError, match=r"(in|out)\.jsonl: "):
        desk.run()
    assert desk.loads == 0


def test_standard_input_and_devices(desk: Desk, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    data = b"".join(json.dumps(line).encode() + b"\n" for line in MIXED)
    desk.run(*MIXED)
    wanted = said(desk.records())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    settings = {"engine": ENGINE, "sampling": SAMPLING, "load": lambda *args, **keywords: desk.llm}
    run_job(desk.model, "-", "-", **settings)
    records = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert said(sorted(records, key=lambda r: r["index"])) == wanted
    with pytest.raises(JaxspecError, match="/dev/full: cannot be written"):
        run_job(desk.model, str(desk.source), "/dev/full", **settings)
    assert run_job(desk.model, str(desk.source), os.devnull, **settings).done == len(MIXED)


def test_a_conversation_is_written_alike_in_all_forms(desk: Desk):
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "two"}]}]
    plain, begun = [{"role": "user", "content": "hello\ntwo"}], {"role": "assistant", "content": "said one"}
    settings = {"temperature": 0.0, "max_tokens": 3}
    url = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions"}
    desk.run(
        {"messages": parts, **settings},
        url | {"body": {"messages": parts, **settings}},
        {"messages": [*parts, begun], "continue_final_message": True, **settings},
        url | {"custom_id": "d", "body": {"messages": [*plain, begun], "continue_final_message": True, **settings}},
        {"messages": parts, "continue_final_message": True, "add_generation_prompt": True},
        {"messages": parts, "tools": [{"type": "function", "function": {"name": "f"}}]},
    )
    params = SamplingParams(temperature=0.0, max_tokens=3)
    outputs = [desk.llm.chat(talk, params)[0] for talk in (parts, plain)]
    outputs += [desk.llm.chat([*plain, begun], params, continue_final_message=True)[0]]
    assert [o.prompt for o in outputs] == ["user: hello\ntwo assistant:"] * 2 + ["user: hello\ntwo assistant: said one"]
    lines, batched, continued, other, both, tools = desk.records()
    assert lines["prompt"] == outputs[0].prompt
    assert lines["prompt_token_ids"] == outputs[0].prompt_token_ids
    assert lines["token_ids"] == outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert batched["response"]["body"]["choices"][0]["message"]["content"] == outputs[0].outputs[0].text
    assert continued["token_ids"] == outputs[2].outputs[0].token_ids
    assert other["response"]["body"]["choices"][0]["message"]["content"] == outputs[2].outputs[0].text
    assert "are not both possible" in both["error"]["message"]
    assert "chat template does not use them" in tools["error"]["message"]


def test_conversations_that_are_none(desk: Desk):
    assert desk.llm.chat([]) == [] == desk.llm.generate([])
    wrong: list[Any] = [[[]], "hi", {"role": "user", "content": "hi"}, 5, ["hi"], [[{"role": "user"}]]]
    for messages in wrong:
        with pytest.raises(RequestError, match="messages: "):
            desk.llm.chat(messages)
    two = [[{"role": "user", "content": text}] for text in ("hello", "one")]
    outputs = desk.llm.chat(two, SamplingParams(max_tokens=1), chat_template="{{ messages[0].content }}")
    assert [o.prompt for o in outputs] == ["hello", "one"]
