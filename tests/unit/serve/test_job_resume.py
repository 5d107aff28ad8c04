"""The batch job over its life: the same text however it is run, crashes, signals, full disks, foreign files."""

import errno
import fcntl
import os
import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.serve import records as records_module
from jaxspec.serve.job import Progress, fingerprint
from jaxspec.serve.llm import LLM
from tests.unit.serve.job_desk import ENGINE, MIXED, NGRAM, Desk, said
from tests.unit.serve.tiny_model import write_tiny_model


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
        patch.setattr(records_module, "os", SimpleNamespace(**names | {"write": write}))
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
