"""``jaxspec bench`` and ``jaxspec bench compare`` from their command lines to their files."""

import json
import os
from dataclasses import fields
from pathlib import Path

import pytest

from jaxspec.bench.record import SCHEMA, load, save
from jaxspec.cli.bench import BenchArgs, command_of, grid_of, pin_to_first_core
from jaxspec.cli.main import main
from tests.unit.bench.conftest import made_up_cell, made_up_report
from tests.unit.serve.tiny_model import write_tiny_model

FLAGS = (
    "--k 2 --concurrency 2 --temperature 0 --workload random --input-tokens 6 --output-tokens 8 --rounds 2 --seed 4 "
    "--price-per-hour 2 --requests 3"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("bench_cli") / "tiny")


def test_sweep_writes_its_files(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "out"
    command = ["bench", str(model), *FLAGS.split(), "--output", str(folder), "--engine", '{"prefill_buckets": [16]}']
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "ngram K=2, 2 rows, random 6+8, T=0" in shown.out
    assert "engine 1 of 1" in shown.err
    raw = json.loads((folder / "bench.json").read_text())
    report = load(folder / "bench.json")
    assert raw["schema"] == SCHEMA
    assert (report.complete, report.synthetic, report.seed, report.skipped) == (True, None, 4, [])
    assert report.command[:3] == ["jaxspec", "bench", str(model)]
    assert {"--k", "--seed"} <= set(report.command)
    assert report.date.endswith("+00:00")
    assert report.machine["cores"] >= 1
    assert "jax" in report.versions
    assert report.model["family"] == "qwen2_moe"
    (cell,) = report.cells
    assert (cell.drafter, cell.k, cell.plain.requests, cell.plain.tokens) == ("ngram", 2, 3, 24)
    assert cell.same_text is True
    assert cell.plain.usd_per_million_tokens == pytest.approx(2 / 3600 / cell.plain.tokens_per_s.median * 1e6)
    assert {file.suffix for file in folder.iterdir()} == {".json", ".csv", ".md", ".png"}
    assert main(command) == 2, "a report is never overwritten"
    assert "name another directory" in capsys.readouterr().err


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    save(made_up_report(made_up_cell()), before)
    save(made_up_report(made_up_cell(speedup=(1.0, 1.2))), after)
    assert main(["bench", "compare", str(before), str(before), "--check"]) == 0
    assert "0 of 3 figures are worse" in capsys.readouterr().out
    assert main(["bench", "compare", str(before), str(after)]) == 0, "only --check fails"
    out = capsys.readouterr().out
    assert "0.73x (0.62 to 0.86)" in out
    assert "WORSE" in out
    assert main(["bench", "compare", str(before), str(after), "--check"]) == 1
    assert main(["bench", "compare", str(before), str(after), "--check", "--tolerance", "0.5"]) == 0
    assert main(["bench", "compare", str(before), str(tmp_path / "no.json")]) == 2
    assert "no report of jaxspec bench" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--k two", "--k takes whole numbers and auto"),
        ("--k 17", "--k takes whole numbers from 0 to 16"),
        ("--drafters eagle9", "method 'eagle9' is not known"),
        ("--workload poems", "--workload: 'poems' is not known"),
        ("--workload file", "needs --prompts"),
        ("--workload speed-bench", "give speed-bench=PATH"),
        ("--workload chat=x", "takes no path"),
        ("--workload chat/coding", "is not known"),
        ("--workload code --prompts x.jsonl", "add it to --workload"),
        ("--synthetic 0.5 0.7", "never rise"),
        ("--synthetic 2 0.5", "from 0 to 1"),
        ("--peers sglang=x", "peer 'sglang' is not known"),
        ("--peers vllm", "--peers vllm=PYTHON"),
        ("--engine x", "not valid JSON"),
        ('--engine {"max_num_seqs":2}', "leave max_num_seqs out"),
    ],
    ids=str,
)
def test_bad_flags_are_one_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, why: str):
    usable = os.sched_getaffinity(0)
    try:
        assert main(["bench", str(model), *flags.split(), "--output", str(tmp_path / "out")]) == 2
    finally:
        os.sched_setaffinity(0, usable)
    message = capsys.readouterr().err
    assert why in message
    assert len(message.splitlines()) == 1
    assert not (tmp_path / "out").exists(), "nothing is left behind"


def test_grid_defaults(model: Path):
    named = grid_of(BenchArgs(model=model))
    assert [d.name for d in named.drafters] == ["ngram"]
    assert named.lengths == (0, 2, 4, "auto")
    assert named.workloads == ("code",)
    assert [d.name for d in grid_of(BenchArgs()).drafters] == ["draft_model", "shared_expert", "ngram"]
    assert grid_of(BenchArgs(prompts=Path("x"))).workloads == ("file",)


def test_command_is_what_was_given():
    args = BenchArgs(Path("m"), k=("0", "auto"), rounds=5)
    assert command_of(args) == ["jaxspec", "bench", "m", "--k", "0", "auto", "--rounds", "5"]


def test_pinning():
    usable = os.sched_getaffinity(0)
    try:
        assert pin_to_first_core() == min(usable)
        assert os.sched_getaffinity(0) == {min(usable)}
    finally:
        os.sched_setaffinity(0, usable)


def test_flags_are_few():
    """A benchmark that nobody can read is not run: what only its authors vary is in ``lab/``."""
    assert len(fields(BenchArgs)) <= 1 + 20, "the model and 20 flags"
