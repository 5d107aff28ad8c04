"""Pictures of runs: figures by name, means that do not lag, a color for each figure and a line style for each run."""

from pathlib import Path
from typing import Any

import pytest

from jaxspec.cli.main import main
from jaxspec.train import run_plot
from jaxspec.train.run_plot import series, smoothed, words_of


def test_figures_of_a_plot():
    entries: list[dict[str, Any]] = [{"step": 1, "loss": 4.0}, {"step": 2, "loss": 2.0, "k3/acceptance_length": 1.5}]
    assert series(entries, lambda name: name == "loss") == {"loss": ([1, 2], [4.0, 2.0])}
    assert series(entries, lambda name: "/" in name) == {"k3/acceptance_length": ([2], [1.5])}
    assert words_of("accuracy_0") == "draft 1"
    assert words_of("k3/acceptance_length") == "k3"


def test_means_do_not_lag():
    falling = [100.0 - step for step in range(100)]
    assert smoothed(falling) == pytest.approx(falling)
    assert smoothed([3.0, 3.0, 3.0]) == [3.0] * 3
    assert smoothed([5.0, 1.0] * 50)[40] == pytest.approx(3.0, abs=0.3)


def test_a_figure_has_a_color_and_a_run_a_line_style():
    matplotlib = pytest.importorskip("matplotlib.figure")
    entries = {run: [{"step": step, "accuracy_0": 0.5, "accuracy_1": 0.4} for step in range(3)] for run in ("a", "b")}
    axes = matplotlib.Figure().subplots()
    run_plot._draw(axes, entries, lambda name: name != "step", smooth=False)
    looks = [(line.get_label(), line.get_color(), line.get_linestyle()) for line in axes.get_lines()]
    assert looks == [
        ("accuracy_0", "C0", "-"), ("accuracy_1", "C1", "-"), ("accuracy_0", "C0", "--"), ("accuracy_1", "C1", "--"),
    ]  # fmt: skip


def test_what_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["plot", str(tmp_path / "nowhere")]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'nowhere'}" in said
    assert "name the directory of a run" in said
    assert "plot.png" not in said


def test_two_runs_in_one_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step":1,"loss":2.0}\n{"step":2,"loss":1.5}\n')
    file = tmp_path / "two.svg"
    assert main(["plot", str(tmp_path / "mine"), str(tmp_path / "other"), "-o", str(file)]) == 0
    drawn = file.read_text()
    for label in ("loss", "mine", "other", "training loss"):
        assert f"<!-- {label} -->" in drawn
    assert "<!-- nothing logged: held-out acceptance length -->" in drawn
