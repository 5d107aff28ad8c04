"""The fleet under Ray Data, over a stand-in of Ray that hands batches to two replicas in turns, the last ones first."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tyro

from jaxspec.serve.job import run_job
from jaxspec.serve.llm import LLM
from scripts import ray_generate
from tests.unit.serve.job_desk import MIXED, NGRAM
from tests.unit.serve.tiny_model import write_tiny_model

FLAGS = [
    "--max-model-len", "48", "--prefill-buckets", "16", "--steps-per-dispatch", "2", "--max-num-seqs", "3",
    "--max-tokens", "6", "--speculative-config", json.dumps(NGRAM), "--batch-size", "2",
]  # fmt: skip
BAD: list[dict[str, Any]] = [{"prompt": "a", "temperature": "hot"}, {"prompt": "a", "custom_id": "short"}]
LINES = [*MIXED, *BAD, {"prompt_token_ids": [9] * 60}]


class Dataset:
    """Rows, and two makers of replicas that take batches of them in turns."""

    def __init__(self, rows: list[dict[str, Any]]):
        self.rows = rows

    def map_batches(
        self, make: Callable[..., Any], *, fn_constructor_kwargs: Mapping[str, Any], batch_size: int, compute: int,
        num_cpus: float, num_gpus: float,
    ) -> "Dataset":  # fmt: skip
        assert (compute, num_cpus, num_gpus) == (2, 1.0, 0.0)
        fleet = [make(**fn_constructor_kwargs) for _ in range(compute)]
        found = []
        for number, first in enumerate(range(0, len(self.rows), batch_size)):
            batch = np.array([row["line"] for row in self.rows[first : first + batch_size]], object)
            answers = fleet[number % compute]({"line": batch})
            found = [{"record": record} for record in answers["record"]] + found
        return Dataset(found)

    def iter_rows(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("ray") / "tiny")


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, **tyro.cli(ray_generate.Args, args=["--input", "-", "--output", "-", *FLAGS]).engine.keywords())


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> list[str]:
    """What became of Ray; replicas share one engine."""
    calls: list[str] = []
    ray = SimpleNamespace(init=lambda **_: calls.append("init"), shutdown=lambda: calls.append("shutdown"))
    data = SimpleNamespace(from_items=Dataset, ActorPoolStrategy=lambda size: size)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.data", data)
    monkeypatch.setattr(ray_generate, "LLM", lambda *_, **__: llm)
    monkeypatch.setattr(ray_generate, "use_compile_cache", lambda: None)
    return calls


def fleet(monkeypatch: pytest.MonkeyPatch, model: Path, source: Path, target: Path) -> int:
    files = ["--model", str(model), "--input", str(source), "--output", str(target)]
    monkeypatch.setattr(sys, "argv", ["ray_generate.py", *files, *FLAGS])
    return ray_generate.main()


def records(file: Path) -> list[dict[str, Any]]:
    return sorted((json.loads(line) for line in file.read_bytes().splitlines()), key=lambda record: record["index"])


def test_a_fleet_writes_a_jobs_records(
    tmp_path: Path, model: Path, llm: LLM, started: list[str], monkeypatch: pytest.MonkeyPatch
):
    source, one, many = (tmp_path / name for name in ("in.jsonl", "one.jsonl", "many.jsonl"))
    source.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    args = tyro.cli(ray_generate.Args, args=["--input", "-", "--output", "-", *FLAGS])
    settings = {"engine": args.engine.keywords(), "sampling": args.sampling.given(), "load": lambda *_, **__: llm}
    run_job(model, str(source), str(one), **settings)
    assert fleet(monkeypatch, model, source, many) == 1, "three requests are bad"
    assert records(many) == records(one)
    assert [r["index"] for r in records(many) if "error" in r] == [9, 10, 11]
    kept = many.read_bytes().splitlines(keepends=True)
    assert json.loads(kept[0])["index"] > json.loads(kept[-1])["index"], "records come as replicas finish"

    many.write_bytes(b"".join(kept[:5]) + kept[5][:9])
    assert fleet(monkeypatch, model, source, many) == 1
    assert records(many) == records(one)
    assert many.read_bytes().startswith(b"".join(kept[:5]))
    assert run_job(model, str(source), str(many), **settings).earlier == len(LINES), "the output is a job's, too"
    assert fleet(monkeypatch, model, source, many) == 1
    assert started == ["init", "shutdown"] * 2, "Ray is not started where nothing is left to do"
