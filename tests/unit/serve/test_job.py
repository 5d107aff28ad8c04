"""The batch job: formats, bad lines, resuming after any crash, and files that are in the way."""

import errno
import fcntl
import io
import json
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.serve import journal as journal_module
from jaxspec.serve.job import Progress, fingerprint, run_job
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from tests.unit.serve.tiny_model import write_tiny_model

ENGINE = {"max_model_len": 48, "prefill_buckets": (16,), "max_logprobs": 2, "steps_per_dispatch": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}
SAMPLING = {"max_tokens": 6}
MIXED: list[dict[str, Any]] = [
    {"prompt": "the cat"},
    {"prompt": "hello world", "custom_id": "greedy", "temperature": 0.0, "max_completion_tokens": 9},
    {"prompt_token_ids": [5, 6, 7, 5, 6], "seed": 3, "max_tokens": 12},
    {"messages": [{"role": "user", "content": "hello"}], "n": 2},
    {"prompt": "one two", "n": 3, "temperature": 0.7, "top_p": 0.9},
    {"prompt": "a mat", "custom_id": "short", "max_tokens": 1},
    {"prompt": "a"},
    {"prompt_token_ids": [9] * 30},
    {"prompt": "a"},
]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("job") / "tiny")


@pytest.fixture(scope="session")
def llm(model: Path) -> LLM:
    return LLM(model, max_num_seqs=3, **ENGINE)


@pytest.fixture(scope="session")
def speculative(model: Path) -> LLM:
    return LLM(model, max_num_seqs=2, speculative_config=NGRAM, **ENGINE)


class Desk:
    """One job in a directory of its own."""

    def __init__(self, folder: Path, model: Path, llm: LLM):
        self.source, self.target = folder / "in.jsonl", folder / "out.jsonl"
        self.model, self.llm, self.loads = model, llm, 0

    def write(self, *lines: dict | bytes) -> None:
        self.source.write_bytes(
            b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines)
        )

    def run(self, *lines: dict | bytes, llm: LLM | None = None, **settings: Any) -> Progress:
        if lines:
            self.write(*lines)

        def load(*args: Any, **keywords: Any) -> LLM:
            self.loads += 1
            return llm or self.llm

        settings = {"engine": ENGINE, "sampling": SAMPLING, "load": load} | settings
        return run_job(self.model, str(self.source), str(self.target), **settings)

    def records(self) -> list[dict[str, Any]]:
        return sorted((json.loads(line) for line in self.target.read_bytes().splitlines()), key=lambda r: r["index"])


@pytest.fixture
def desk(tmp_path: Path, model: Path, llm: LLM) -> Desk:
    return Desk(tmp_path, model, llm)


def said(records: list[dict[str, Any]]) -> list[tuple]:
    """What must not depend on how a job was run."""
    return [
        (
            r["index"],
            r.get("custom_id"),
            [(o["text"], o["token_ids"], o["finish_reason"]) for o in r.get("outputs", [r])],
        )
        for r in records
    ]


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


def test_text_depends_neither_on_rows_nor_on_speculation(desk: Desk, speculative: LLM, tmp_path: Path):
    desk.run(*MIXED)
    before = said(desk.records())
    desk.target = tmp_path / "other.jsonl"
    desk.run(llm=speculative, engine=ENGINE | {"speculative_config": NGRAM, "max_num_seqs": 2})
    assert said(desk.records()) == before
    assert any(r["metrics"]["num_draft_tokens"] for r in desk.records())


def test_a_job_that_died_at_any_byte_goes_on(desk: Desk, speculative: LLM):
    desk.run(*MIXED, b"nonsense")
    whole, wanted = desk.target.read_bytes(), desk.records()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in [0, 1, *random.sample(range(len(whole)), 12), ends[2], ends[2] - 1, len(whole) - 1]:
        desk.target.write_bytes(whole[:cut])
        progress = desk.run(llm=random.choice([speculative, desk.llm]))
        assert progress.earlier == sum(end <= cut for end in ends)
        assert progress.failed == 1
        assert desk.target.read_bytes().startswith(whole[: max([0, *(end for end in ends if end <= cut)])])
        records = desk.records()
        assert [r["index"] for r in records] == [r["index"] for r in wanted]
        assert said(records[:-1]) == said(wanted[:-1])


def test_a_finished_job_does_nothing(desk: Desk):
    desk.run(*MIXED, b"nonsense")
    before, loads = desk.target.read_bytes(), desk.loads
    progress = desk.run()
    assert (progress.earlier, progress.done, progress.failed) == (len(MIXED) + 1, len(MIXED) + 1, 1)
    assert (desk.target.read_bytes(), desk.loads) == (before, loads)


def test_an_empty_input_is_finished(desk: Desk):
    assert desk.run(b"", b" ").total == 0
    assert desk.loads == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sampling": {"max_tokens": 7}}, ["sampling.max_tokens was 6 and is 7"]),
        ({"engine": ENGINE | {"seed": 5}}, ["engine.seed was 0 and is 5"]),
        (
            {"engine": ENGINE | {"dtype": "float32", "max_model_len": 40}},
            ["engine.dtype", "engine.max_model_len"],
        ),
        (
            {"engine": ENGINE | {"speculative_config": NGRAM | {"rejection_sample_method": "standard"}}},
            ["rule"],
        ),
    ],
)
def test_other_settings_are_refused(desk: Desk, settings: dict, words: list[str]):
    desk.run(*MIXED)
    before = desk.target.read_bytes()
    with pytest.raises(ConfigError) as caught:
        desk.run(**settings)
    assert all(word in str(caught.value) for word in [*words, "remove", "choose another output"])
    assert desk.target.read_bytes() == before


def test_another_input_or_model_is_refused(desk: Desk, tmp_path: Path):
    desk.run(*MIXED)
    with pytest.raises(ConfigError, match=r"input\.sha256 was"):
        desk.run({"prompt": "b"})
    desk.write(*MIXED)
    desk.model = write_tiny_model(tmp_path / "other")
    assert desk.run().done == len(MIXED), "a copy of the model is the same model"
    with (desk.model / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")
    with pytest.raises(ConfigError, match="model was"):
        desk.run()
    assert fingerprint(desk.model) != fingerprint(tmp_path)


def test_foreign_and_damaged_outputs_are_left_alone(desk: Desk):
    desk.target.write_text("my thesis\n")
    with pytest.raises(ConfigError, match="not the output of a job"):
        desk.run(*MIXED)
    assert desk.target.read_text() == "my thesis\n"
    desk.target.unlink()
    desk.run()
    whole = desk.target.read_bytes()
    desk.target.write_bytes(whole + b"\0\0\0\n")
    with pytest.raises(ConfigError, match=f"line {len(MIXED) + 1} is not a record"):
        desk.run()
    desk.target.write_bytes(whole + whole.splitlines(keepends=True)[0])
    with pytest.raises(ConfigError, match="repeats index"):
        desk.run()
    desk.target.write_bytes(whole)
    sidecar = Path(f"{desk.target}.job.json")
    sidecar.write_text("{")
    with pytest.raises(ConfigError, match="not readable"):
        desk.run()


def test_two_jobs_cannot_write_one_file(desk: Desk):
    desk.run(*MIXED)
    before = desk.target.read_bytes()
    with desk.target.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another job"):
            desk.run()
    assert desk.target.read_bytes() == before
    assert desk.run().done == len(MIXED)


def test_a_full_disk_leaves_whole_lines(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    written = []

    def write(fd: int, data: memoryview) -> int:
        if len(written) < 2:
            written.append(os.write(fd, data))
            return written[-1]
        if len(written) == 2:
            written.append(os.write(fd, data[: len(data) // 2]))
            return written[-1]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    names = {name: getattr(os, name) for name in dir(os) if not name.startswith("_")}
    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "os", SimpleNamespace(**names | {"write": write}))
        with pytest.raises(JaxspecError, match=r"No space left on device.*2 complete records; make room"):
            desk.run(*MIXED)
    assert desk.target.read_bytes().endswith(b"}\n")
    assert len(desk.records()) == 2
    assert not desk.llm.engine.busy
    assert desk.run().earlier == 2
    assert len(desk.records()) == len(MIXED)


def test_a_write_that_the_system_cuts_short_is_undone(desk: Desk):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(JaxspecError, match="cannot be written"):
            desk.run(*MIXED)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert 0 < desk.target.stat().st_size < 1000
    assert desk.target.read_bytes().endswith(b"}\n")
    desk.run()
    assert len(desk.records()) == len(MIXED)


@pytest.fixture
def heard() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, which a job respects; here it shall hear it."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_whole_records(desk: Desk, number: int):
    before = signal.getsignal(number)
    sent: list[int] = []

    def watch(p: Progress) -> None:
        if p.done >= 3 and not sent:
            sent.append(p.done)
            os.kill(os.getpid(), number)

    many = [{"prompt": "the cat", "max_tokens": 2 + i % 7} for i in range(30)]
    progress = desk.run(*many, watch=watch)
    assert progress.stopped_by == number
    assert 3 <= progress.done < 30
    assert len(desk.records()) == progress.done
    assert signal.getsignal(number) is before
    assert not desk.llm.engine.busy
    assert desk.run().stopped_by == 0
    assert len(desk.records()) == 30


def test_little_is_in_flight(desk: Desk):
    most = 0

    def watch(p: Progress) -> None:
        nonlocal most
        engine = desk.llm.engine
        most = max(most, len(engine.waiting) + sum(row is not None for row in engine.rows))

    desk.run(*[{"prompt": "a", "max_tokens": 2}] * 40, watch=watch)
    assert 0 < most <= 6


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
