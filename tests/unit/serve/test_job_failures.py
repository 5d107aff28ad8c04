"""Failures in a batch job: each is a record of its line, the others go on, and failed lines can run again."""

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.serve import journal as journal_module
from jaxspec.serve import records as records_module
from jaxspec.serve.job import Progress, run_job
from jaxspec.serve.journal import Journal
from tests.unit.serve.scripted_llm import ScriptedLLM

LINES = ["a", "refused", "b", "error", "c", "broken", "d", "nan", "e"]


class Bench:
    """A job over a scripted model."""

    def __init__(self, folder: Path):
        self.source, self.target, self.model = folder / "in.jsonl", folder / "out.jsonl", folder / "model"
        self.model.mkdir(exist_ok=True)
        (self.model / "config.json").write_text("{}")
        self.llm = ScriptedLLM(self.model)

    def write(self, *prompts: str | dict[str, Any]) -> None:
        lines = [{"prompt": p} if isinstance(p, str) else p for p in prompts]
        self.source.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(self, *prompts: str | dict[str, Any], **settings: Any) -> Progress:
        if prompts:
            self.write(*prompts)
        names = {"input": str(self.source), "output": str(self.target), "load": lambda *a, **k: self.llm}
        return run_job(self.model, **names | settings)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.target.read_bytes().splitlines()]

    def errors(self) -> dict[int, str]:
        return {r["index"]: r["error"]["message"] for r in self.lines() if r.get("error")}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_each_failure_is_a_record_of_its_line(bench: Bench):
    progress = bench.run(*LINES, {"prompt": "x", "n": 3}, {"prompt": "error", "n": 2})
    assert sorted(r["index"] for r in bench.lines()) == list(range(11))
    assert bench.errors() == {
        1: "prompt: refused",
        3: "the logits are not finite",
        5: "ZeroDivisionError: a bug",
        7: "the log-probability of token 7 is not a number; look at the model's weights",
        10: "the logits are not finite",
    }
    assert progress.failed == 5
    assert len(progress.errors) == 5
    assert "null" not in bench.target.read_text().replace('"stop_reason":null', "")


def test_failures_of_batch_lines(bench: Bench):
    body = {"model": "m", "prompt": "error"}
    bench.run({"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": body})
    (record,) = bench.lines()
    assert (record["custom_id"], record["response"]) == ("x", None)
    assert record["error"] == {"code": "generation_failed", "line": 1, "message": "the logits are not finite"}


def test_an_infinite_log_probability_is_a_number(bench: Bench):
    bench.run({"prompt": "-inf", "logprobs": 1})
    (record,) = bench.lines()
    assert record["logprobs"] == [{"7": {"logprob": -9999.0, "rank": 1}}]
    assert record["cumulative_logprob"] == -9999.0


def test_a_request_that_makes_steps_fail_does_not_end_the_job(bench: Bench):
    progress = bench.run("a", "b", "poison", "c", "poison", "d", "e", "f")
    assert bench.errors() == {2: "RuntimeError: INTERNAL: a step failed", 4: "RuntimeError: INTERNAL: a step failed"}
    texts = {r["index"]: r["text"] for r in bench.lines() if "text" in r}
    assert texts == {i: f"{p}!{i}.0" for i, p in enumerate("abpcpdef") if p != "p"}
    assert progress.done == 8
    assert bench.llm.most > 1


def test_steps_that_fail_whatever_runs_end_the_job(bench: Bench):
    with pytest.raises(RuntimeError, match="a step failed"):
        bench.run(*["poison"] * 20)
    assert len(bench.lines()) == 2
    bench.llm.cured = True
    assert bench.run(retry_failed=True).failed == 0
    assert sorted(r["index"] for r in bench.lines()) == list(range(20))


def test_failed_lines_run_again_in_their_places(bench: Bench):
    bench.run(*LINES)
    before = bench.target.read_bytes().splitlines()
    assert bench.run().earlier == len(LINES), "without being asked, nothing runs again"
    assert bench.target.read_bytes().splitlines() == before
    bench.llm.cured, bench.llm.submitted = True, []
    progress = bench.run(retry_failed=True)
    assert bench.llm.submitted == ["refused", "error", "broken", "nan"]
    assert (progress.earlier, progress.done, progress.failed, progress.total) == (5, 9, 1, 9)
    after = bench.target.read_bytes().splitlines()
    assert [json.loads(x)["index"] for x in after] == [json.loads(x)["index"] for x in before]
    for old, new in zip(before, after, strict=True):
        assert old == new or (json.loads(old).get("error") and json.loads(old)["index"] in (1, 3, 5, 7))
    assert bench.errors().keys() == {7}
    assert sorted(p.name for p in bench.target.parent.iterdir()) == [
        "in.jsonl", "model", "out.jsonl", "out.jsonl.job.json"
    ]  # fmt: skip
    bench.llm.submitted = []
    assert bench.run(retry_failed=True).failed == 1
    assert bench.llm.submitted == ["nan"]


def test_retrying_a_finished_job_loads_nothing_when_nothing_failed(bench: Bench):
    bench.run("a", "b")
    before = bench.target.stat()
    progress = bench.run(retry_failed=True, load=lambda *a, **k: pytest.fail("loaded"))
    assert progress.earlier == progress.done == 2
    assert (bench.target.stat().st_ino, bench.target.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_retrying_an_unfinished_job_runs_the_rest_too(bench: Bench):
    bench.run(*LINES)
    whole = bench.target.read_bytes().splitlines(keepends=True)
    bench.target.write_bytes(b"".join(whole[:4]) + whole[4][:5])
    bench.llm.cured, bench.llm.submitted = True, []
    progress = bench.run(retry_failed=True)
    assert sorted(r["index"] for r in bench.lines()) == list(range(len(LINES)))
    assert [json.loads(x)["index"] for x in whole[:4]] == [r["index"] for r in bench.lines()[:4]]
    assert bench.errors().keys() == {7}
    assert progress.earlier == sum(b'"error"' not in line for line in whole[:4])


class Killed(BaseException):
    """What a kill is for code that cannot catch it."""


class Mortal:
    """``os`` for a process that is killed at one of its calls that change something, and does nothing any more then."""

    CHANGES = ("write", "replace", "unlink", "ftruncate", "fsync", "fchmod", "open", "pread")

    def __init__(self, calls: int):
        self.left = calls

    def __getattr__(self, name: str) -> Any:
        value = getattr(os, name)

        def call(*args: Any, **keywords: Any) -> Any:
            self.left -= 1
            if self.left == 0 and name == "write":
                value(args[0], args[1][: len(args[1]) // 2])
            if self.left <= 0:
                raise Killed
            return value(*args, **keywords)

        return call if name in self.CHANGES else value


def test_a_retry_that_is_killed_at_any_moment_loses_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):  # fmt: skip
    """Killed at each of its system calls, then opened with and without the wish to retry."""
    (tmp_path / "start").mkdir()
    start = Bench(tmp_path / "start")
    start.run(*LINES[:6])
    indexes = [r["index"] for r in start.lines()]
    moments, killed = 0, True
    while killed:
        shutil.copytree(tmp_path / "start", folder := tmp_path / f"again{moments}")
        bench = Bench(folder)
        bench.llm.cured = True
        with monkeypatch.context() as patch:
            patch.setattr(journal_module, "os", mortal := Mortal(moments + 1))
            patch.setattr(records_module, "os", mortal)
            try:
                bench.run(retry_failed=True)
                killed = False
            except Killed:
                pass
        assert [r["index"] for r in bench.lines()] == indexes, "the output is whole at any moment"
        if moments % 2:
            assert bench.run().done == len(indexes)
            assert [r["index"] for r in bench.lines()] == indexes
        bench.run(retry_failed=True)
        assert [r["index"] for r in bench.lines()] == indexes
        assert bench.errors() == {}
        assert sorted(p.name for p in folder.iterdir()) == ["in.jsonl", "model", "out.jsonl", "out.jsonl.job.json"]
        moments += 1
    assert moments > 20


def interrupted(bench: Bench) -> None:
    """A retry of which one record is written and not yet in its place."""
    journal = Journal(
        str(bench.target), json.loads((bench.target.parent / "out.jsonl.job.json").read_text()), retry_failed=True
    )
    journal.append({"index": 1, "text": "new"})
    os.close(journal._main.fd)
    assert journal._again is not None
    os.write(journal._again.fd, b'{"index": 3, "te')
    os.close(journal._again.fd)


def test_what_a_killed_retry_had_is_put_in_place_by_the_next_start(bench: Bench):
    bench.run(*LINES)
    interrupted(bench)
    assert bench.errors().keys() == {1, 3, 5, 7}
    bench.run()
    assert bench.errors().keys() == {3, 5, 7}
    assert [r["text"] for r in bench.lines() if r["index"] == 1] == ["new"]
    assert not Path(f"{bench.target}.retry").exists()


def test_a_full_disk_while_retried_records_are_put_in_place(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    bench.run(*LINES)
    before = bench.target.read_bytes()
    bench.llm.cured = True
    written = Path(f"{bench.target}.retry.part")

    def write(fd: int, data: Any) -> int:
        if os.readlink(f"/proc/self/fd/{fd}") == str(written):
            raise OSError(28, "No space left on device")
        return os.write(fd, data)

    names = {name: getattr(os, name) for name in dir(os) if not name.startswith("_")}
    with monkeypatch.context() as patch:
        patch.setattr(records_module, "os", SimpleNamespace(**names | {"write": write}))
        with pytest.raises(JaxspecError, match=r"No space left on device.*out\.jsonl\.retry; make room"):
            bench.run(retry_failed=True)
    assert bench.target.read_bytes() == before
    assert not written.exists()
    bench.llm.submitted = []
    assert bench.run().failed == 1
    assert bench.llm.submitted == [], "their records were kept"


def test_a_stopped_retry_keeps_what_it_had(bench: Bench):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        bench.run(*LINES)
        bench.llm.cured = True

        def watch(p: Progress) -> None:
            if p.done == 7:
                os.kill(os.getpid(), signal.SIGINT)

        assert bench.run(retry_failed=True, watch=watch).stopped_by == signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(r["index"] for r in bench.lines()) == list(range(len(LINES)))
    assert len(bench.errors()) == 3, "one is mended, one failed again, two have not run"


def test_a_retry_of_a_link_or_with_other_rights(bench: Bench, tmp_path: Path):
    bench.run(*LINES)
    bench.target.chmod(0o640)
    real = tmp_path / "real.jsonl"
    bench.target.rename(real)
    bench.target.symlink_to(real)
    bench.llm.cured = True
    bench.run(retry_failed=True)
    assert bench.target.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert bench.errors().keys() == {7}


def test_a_retry_locks_out_other_jobs(bench: Bench):
    bench.run(*LINES)
    bench.llm.cured = True

    def watch(p: Progress) -> None:
        with pytest.raises(ConfigError, match="another job is writing it"):
            bench.run(watch=lambda p: None)

    bench.run(retry_failed=True, watch=watch)
    identity = json.loads((bench.target.parent / "out.jsonl.job.json").read_text())
    stale = os.open(bench.target, os.O_RDWR)
    bench.target.write_bytes(bench.target.read_bytes())
    os.close(stale)
    old, place = journal_module.Records.open(str(bench.target)), Path(f"{bench.target}.other")
    shutil.copyfile(bench.target, place)
    place.replace(bench.target)
    journal = Journal.__new__(Journal)
    journal.path = str(bench.target)
    with pytest.raises(ConfigError, match="another job is writing it"):
        journal._lock(old.fd)
    old.close()
    Journal(str(bench.target), identity).close()


def test_nothing_but_a_jobs_files_is_removed(bench: Bench):
    bench.write("a")
    kept = Path(f"{bench.target}.job.json")
    kept.write_text('{"my": "notes"}')
    with pytest.raises(ConfigError, match=r"out\.jsonl\.job\.json: is there and not of a job"):
        bench.run()
    assert kept.read_text() == '{"my": "notes"}'
    kept.unlink()
    bench.target.unlink()
    again = Path(f"{bench.target}.retry")
    again.write_text("my thesis\n")
    with pytest.raises(ConfigError, match=r"out\.jsonl\.retry: line 1 is not a record"):
        bench.run()
    assert again.read_text() == "my thesis\n"
    again.write_text('{"index": 0, "text": "of a job whose output was removed"}\n')
    bench.target.unlink()
    bench.run()
    assert not again.exists()
    assert bench.lines()[0]["text"] == "a!0.0"


SIDES = ["", ".job.json", ".retry", ".retry.part"]


def plainly(source: Path, name: Path) -> Path:
    source.rename(name)
    return name


def linked(source: Path, name: Path) -> Path:
    name.symlink_to(source)
    return source


def hard_linked(source: Path, name: Path) -> Path:
    name.hardlink_to(source)
    return source


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("way", [plainly, linked, hard_linked])
def test_no_file_of_the_job_may_be_its_input(bench: Bench, side: str, way: Callable[[Path, Path], Path]):
    bench.write("a", "b")
    before = bench.source.read_bytes()
    bench.source = way(bench.source, Path(f"{bench.target}{side}"))
    with pytest.raises(ConfigError, match=r"out\.jsonl[a-z.]*: is the input, and the job writes it, too"):
        bench.run(retry_failed=True)
    assert bench.source.read_bytes() == before


@pytest.mark.parametrize("side", SIDES)
def test_no_file_of_the_job_may_be_standard_input(bench: Bench, side: str, monkeypatch: pytest.MonkeyPatch):
    bench.write("a", "b")
    before = bench.source.read_bytes()
    bench.source = plainly(bench.source, Path(f"{bench.target}{side}"))
    with bench.source.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        with pytest.raises(ConfigError, match="is the input, and the job writes it, too"):
            bench.run(input="-")
    assert bench.source.read_bytes() == before


def test_standard_output_may_not_be_the_input(bench: Bench):
    bench.write("a", "b")
    kept = os.dup(1)
    try:
        with bench.source.open("ab") as file:
            os.dup2(file.fileno(), 1)
            with pytest.raises(ConfigError, match="-: is the input, and the job writes it, too"):
                bench.run(output="-")
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    assert len(bench.source.read_bytes().splitlines()) == 2


def test_many_retries_of_random_failures(bench: Bench):
    rng = random.Random(3)
    prompts = [rng.choice(["a", "refused", "error", "broken"]) for _ in range(40)]
    bench.run(*prompts)
    order = [r["index"] for r in bench.lines()]
    failed = bench.errors().keys()
    assert failed == {i for i, p in enumerate(prompts) if p != "a"}
    for _ in range(3):
        bench.run(retry_failed=True)
        assert [r["index"] for r in bench.lines()] == order
        assert bench.errors().keys() == failed
    bench.llm.cured = True
    bench.run(retry_failed=True)
    assert [r["index"] for r in bench.lines()] == order
    assert bench.errors() == {}
