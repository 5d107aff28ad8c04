"""The GPU suite runs to its end on tiny shapes, and says what it had no time for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.house_report import ROOT
from tests.gpu.schema import Report, read

ALL = ["ceilings", "correctness", "experts", "decoding qwen3-30b-a3b", "attention"]


def run(out: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], Report]:
    command = [sys.executable, str(ROOT / "lab" / "gpu_suite.py"), "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "XLA_FLAGS": ""})
    return done, read(out.read_text())


@pytest.mark.slow
def test_every_section_runs_and_every_check_passes(tmp_path: Path):
    done, report = run(tmp_path / "suite.json", "--tiny", "--budget", "1200")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(report.sections) == ALL
    assert {name: s.status for name, s in report.sections.items()} == dict.fromkeys(ALL, "done")
    assert report.machine is not None
    assert report.machine.versions["jax"]
    checks = {name: s.checks for name, s in report.sections.items()}
    assert min(len(found) for found in checks.values()) >= 1
    assert [c.name for found in checks.values() for c in found if not c.passed] == []
    assert [s.skipped for s in report.sections.values() if s.skipped] == []
    assert {table for s in report.sections.values() for table in s.tables} >= {"bandwidth", "matmul", "calls", "cells"}
    assert all(row["launches_per_step"] > 0 for row in report.sections[ALL[3]].tables["cells"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["suite.json"]


def test_without_time_everything_is_skipped_with_the_reason(tmp_path: Path):
    done, report = run(tmp_path / "suite.json", "--budget", "0", "--sections", "b,e", "--models", "mixtral-8x7b")
    assert done.returncode == 0, done.stderr
    assert {name: s.status for name, s in report.sections.items()} == dict.fromkeys(
        ["ceilings", "decoding mixtral-8x7b"], "skipped"
    )
    assert all("no time" in (s.reason or "") for s in report.sections.values())
    assert report.machine is None


@pytest.mark.parametrize("option", [("--sections", "z"), ("--models", "gpt-2")])
def test_unknown_names_are_refused(option: tuple[str, str], tmp_path: Path):
    command = [sys.executable, str(ROOT / "lab" / "gpu_suite.py"), "--out", str(tmp_path / "no.json"), *option]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert option[1] in done.stderr
