"""What loading shows: a bar on a terminal, nothing elsewhere, nothing from Python unless asked for."""

from pathlib import Path

import pytest

from jaxspec.cli.progress import shown_loading
from jaxspec.serve.demo_pair import demo_model_dir
from jaxspec.serve.llm import LLM


def test_nothing_is_shown_elsewhere(capsys: pytest.CaptureFixture[str]):
    with shown_loading() as show:
        assert show is None
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with shown_loading() as show:
        assert show is not None
        for done in (1 << 20, 2 << 20, 4 << 20):
            show(done, 4 << 20)
    out, shown = capsys.readouterr()
    assert out == ""
    assert "loading" in shown
    assert "4.2/4.2 MB" in shown


def test_python_is_told_what_it_asks_for(capsys: pytest.CaptureFixture[str]):
    seen: list[tuple[int, int]] = []
    directory: Path = demo_model_dir("target")
    LLM(directory, on_load=lambda done, total: seen.append((done, total)), quantization="int8")
    assert seen
    assert seen[-1][0] == seen[-1][1]
    whole = seen[-1][1]
    LLM(directory, on_load=lambda done, total: seen.append((done, total)), quantization=None)
    assert seen[-1][1] > 1.3 * whole
    assert capsys.readouterr() == ("", "")
