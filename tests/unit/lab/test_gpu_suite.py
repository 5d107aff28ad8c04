"""The GPU suite runs to its end on tiny shapes, and says what it had no time for."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from lab import gpu_suite
from lab.gpu import decoding
from lab.gpu.decoding import WAVES
from lab.gpu.report import Section
from scripts.house_report import ROOT
from tests.gpu.schema import Report, read

ALL = ["ceilings", "decoding qwen3-30b-a3b", "experts", "attention", "correctness", "mosaic"]


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
    assert all(row["launches_per_step"] > 0 for row in report.sections[ALL[1]].tables["cells"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["suite.json"]


def test_without_time_everything_is_skipped_with_the_reason(tmp_path: Path):
    done, report = run(tmp_path / "suite.json", "--budget", "0", "--sections", "b,e", "--models", "mixtral-8x7b")
    assert done.returncode == 0, done.stderr
    assert {name: s.status for name, s in report.sections.items()} == dict.fromkeys(
        ["ceilings", "decoding mixtral-8x7b"], "skipped"
    )
    assert all("no time" in (s.reason or "") for s in report.sections.values())
    assert report.machine is None


def test_what_says_most_runs_first():
    names = gpu_suite.names(gpu_suite.arguments(["--models", "gpt-oss-20b,mixtral-8x7b"]))
    first, other = "decoding gpt-oss-20b", "decoding mixtral-8x7b"
    assert names == ["ceilings", first, "experts", "attention", other, "correctness", "mosaic"]
    assert gpu_suite.names(gpu_suite.arguments(["--sections", "a,c"])) == ["experts", "correctness"]
    rows, drafts = WAVES[0]
    assert (rows, drafts) == ((1, 8), (0, 3)), "a number is there once four programs are"


def test_what_does_not_fit_the_card_is_skipped_before_it_is_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoding, "free_bytes", lambda: 79e9)
    monkeypatch.setattr(decoding, "copy_bytes_per_s", lambda *, tiny: 3e12)
    monkeypatch.setattr(decoding, "random_target", lambda *_, **__: pytest.fail("weights are made"))
    section = Section("decoding", tiny=False, budget_s=100.0, save=lambda record: None)
    decoding.decoding(section, "mixtral-8x7b")
    assert [entry["reason"] for entry in section.skipped] == ["weights of 93 GB do not fit into 79 GB"]


@pytest.mark.parametrize("option", [("--sections", "z"), ("--models", "gpt-2")])
def test_unknown_names_are_refused(option: tuple[str, str], tmp_path: Path):
    command = [sys.executable, str(ROOT / "lab" / "gpu_suite.py"), "--out", str(tmp_path / "no.json"), *option]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert option[1] in done.stderr


class Worker:
    """A process whose first section may take 0.3 s and whose second one a minute, and that ends after a second."""

    returncode, killed, looks = 0, False, 0

    def __init__(self, part: Path):
        self.part, self.began = part, time.time()

    def poll(self) -> int | None:
        until = self.began + (0.3 if not self.looks else 60)
        self.part.write_text(json.dumps({"machine": {}, "until": until, "sections": {}}))
        self.looks += 1
        return 0 if self.looks > 5 else None

    def kill(self) -> None:
        self.killed = True


def test_a_later_section_has_time_of_its_own(tmp_path: Path):
    part = tmp_path / "suite.part"
    worker, report = Worker(part), {"machine": None, "sections": {}}
    assert gpu_suite.follow(cast(Any, worker), report, part, tmp_path / "suite.json", time.time() + 100) is None
    assert not worker.killed
