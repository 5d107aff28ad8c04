"""What loading and compiling show: a bar on a terminal, lines elsewhere, nothing from Python unless asked for."""

import sys
import time
from pathlib import Path

import pytest

from jaxspec.checkpoint.load.model import load_model
from jaxspec.cli.interrupts import INTERRUPTS
from jaxspec.cli.stages import Stages, in_words, shown_stages
from jaxspec.nn.policy import Policy
from jaxspec.serve.background import CompiledPrograms
from jaxspec.serve.demo_pair import demo_model_dir
from jaxspec.serve.llm import LLM
from tests.unit.serve.tiny_model import write_tiny_model


def test_every_stage_begins_and_ends_with_a_line(capsys: pytest.CaptureFixture[str]):
    around = INTERRUPTS.doing
    with Stages() as stages:
        stages("loading", 0, 0)
        stages("loading", 20_000_000, 50_500_000)
        assert INTERRUPTS.doing == "loading 20.0 of 50.5 MB"
        stages("loading", 50_500_000, 50_500_000)
        assert INTERRUPTS.doing == around
        for done in range(4):
            stages("compiling", done, 3)
        stages("timing speculation lengths", 0, 0)
    out, said = capsys.readouterr()
    assert out == ""
    lines = [line.rpartition(" in ")[0] or line for line in said.splitlines()]
    assert lines == [
        "jaxspec: loading", "jaxspec: loading: 50.5 MB",
        "jaxspec: compiling 0 of 3 programs", "jaxspec: compiling: 3 programs",
        "jaxspec: timing speculation lengths", "jaxspec: timing speculation lengths",
    ]  # fmt: skip


def test_a_stage_that_reports_nothing_is_not_silent(capsys: pytest.CaptureFixture[str]):
    said, until = "", time.monotonic() + 10
    with Stages(every_s=0.001) as stages:
        stages("compiling", 2, 9)
        while said.count("compiling 2 of 9 programs, 0 s") < 2 and time.monotonic() < until:
            said += capsys.readouterr().err
    assert said.count("compiling 2 of 9 programs, 0 s") >= 2


def test_what_failed_is_not_said_to_have_ended(capsys: pytest.CaptureFixture[str]):
    def interrupted() -> None:
        with Stages() as stages:
            stages("compiling", 2, 9)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert capsys.readouterr().err == "jaxspec: compiling 2 of 9 programs\n"
    assert INTERRUPTS.doing == "compiling 2 of 9 programs"


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with Stages() as stages:
        for done in range(3):
            stages("compiling", done, 3)
    out, shown = capsys.readouterr()
    assert out == ""
    assert "2 of 3 programs" in shown
    assert "\x1b[?25h" in shown  # the cursor is there again


def test_nothing_is_shown_where_another_process_talks(capsys: pytest.CaptureFixture[str]):
    with shown_stages(quiet=True) as show:
        assert show is None
    assert capsys.readouterr() == ("", "")


def test_amounts():
    assert in_words("downloading", 1_500_000_000, 61_000_000_000) == "downloading 1.5 of 61.0 GB"
    assert in_words("compiling", 9, 9) == "compiling 9 programs"
    assert in_words("timing speculation lengths", 0, 1) == "timing speculation lengths"


def test_an_exception_does_not_wait_for_what_has_not_begun():
    ran: list[str] = []

    def fail() -> None:
        raise ValueError("does not compile")

    jobs = {"bad": fail, **{f"job {number}": lambda number=number: ran.append(str(number)) for number in range(50)}}

    def interrupt(done: int, total: int) -> None:
        assert total == 51
        raise KeyboardInterrupt

    table = CompiledPrograms(jobs)
    with pytest.raises(KeyboardInterrupt):
        table.wait(jobs, interrupt)
    table.close()
    with pytest.raises(ValueError, match="does not compile"):
        CompiledPrograms({"bad": fail}).wait(["bad"])


def test_python_is_told_what_it_asks_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    seen: list[tuple[int, int]] = []
    stages: list[tuple[str, int, int]] = []
    LLM(
        write_tiny_model(tmp_path / "model"), max_model_len=32, prefill_buckets=(16,), max_num_seqs=1, max_logprobs=0,
        on_load=lambda *counts: seen.append(counts), on_progress=lambda *state: stages.append(state),
    )  # fmt: skip
    assert seen[-1][0] == seen[-1][1] > 0
    assert [state[1:] for state in stages if state[0] == "loading"] == seen
    assert [state[1:] for state in stages if state[0] == "compiling"] == [(done, 4) for done in range(5)]
    assert capsys.readouterr() == ("", "")


def test_loaded_bytes_are_those_of_memory():
    totals = []
    for quantization in ("int8", "auto"):
        seen: list[tuple[int, int]] = []
        load_model(
            demo_model_dir("draft"),
            Policy(),
            quantization=quantization,
            show=lambda *counts, to=seen: to.append(counts),
        )
        assert seen[-1][0] == seen[-1][1]
        totals.append(seen[-1][1])
    assert totals[1] > 1.2 * totals[0]
