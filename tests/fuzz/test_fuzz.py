"""360 broken directories and job files: each ends in a named error or a right result, within 20 s, and touches nothing.

``pytest tests/fuzz -s`` prints what became of them by kind.
"""

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoint.heads.directory import save_head
from scripts.house_report import ROOT
from tests.fuzz.mutations import CASES, COUNTS, make_case
from tests.oracle.grammar_model import write_grammar_model
from tests.unit.checkpoint.head_cases import head, spec
from tests.unit.serve.job_desk import MIXED
from tests.unit.serve.tiny_model import write_tiny_model

START_S, CASE_S = 300, 20
BATCH = {
    "custom_id": "b", "method": "POST", "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
}  # fmt: skip
OBJECT = {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"],
    "additionalProperties": False,
}  # fmt: skip
FORMS: list[dict[str, Any]] = [
    {"prompt": "the cat", "structured_outputs": {"json": OBJECT, "disable_any_whitespace": True}},
    {"prompt": "one", "structured_outputs": {"regex": "[a-c]{2,4}"}},
    {"prompt": "two", "structured_outputs": {"choice": ["yes", "no"]}, "n": 2},
    {"prompt": "a mat", "structured_outputs": {"grammar": 'start: "x" /[0-9]/', "after": "a"}},
    {"prompt": "hello", "structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
    {"prompt": "no form"},
]


class Worker:
    """A process that looks at cases; it is started anew after it hung or died."""

    def __init__(self, bases: dict[str, Path], root: Path):
        self.command = [sys.executable, "-m", "tests.fuzz.worker", str(bases["config"]), str(bases["letters"])]
        python = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "PYTHONDONTWRITEBYTECODE": "1"}
        self.env = os.environ | python | {"FUZZ_ROOT": str(root)}
        self.process: subprocess.Popen[str] | None = None

    def ask(self, kind: str, directory: Path) -> dict[str, Any]:
        if self.process is None:
            self._start()
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"kind": kind, "directory": str(directory)}) + "\n")
        self.process.stdin.flush()
        answer = self._answer(CASE_S)
        if answer is None:
            died = self.process.poll()
            self.stop()
            return {"verdict": "hang" if died is None else "death", "detail": f"status {died}"}
        return answer

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            self.reader.join()  # which closes the other pipe
            self.process = None

    def _start(self) -> None:
        self.process = subprocess.Popen(
            self.command, cwd=ROOT, env=self.env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self.reader = threading.Thread(target=self._read, args=(self.process, self.lines), daemon=True)
        self.reader.start()
        assert self._answer(START_S) == {"ready": True}, "the worker did not start"

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.put(line)
        lines.put("")

    def _answer(self, most_s: float) -> dict[str, Any] | None:
        try:
            line = self.lines.get(timeout=most_s)
        except queue.Empty:
            return None
        return json.loads(line) if line else None


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sound directory for every kind of case."""
    root = tmp_path_factory.mktemp("bases")
    tiny, shards = write_tiny_model(root / "tiny"), root / "shards"
    shutil.copytree(tiny, shards)
    tensors = load_file(shards / "model.safetensors")
    names = sorted(tensors)
    (shards / "model.safetensors").unlink()
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        save_file({name: tensors[name] for name in part}, shards / f"shard-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"shard-{number}.safetensors")
    (shards / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    save_head(head(spec()), root / "head")
    (root / "job").mkdir()
    lines = [*MIXED[:5], BATCH]
    (root / "job" / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_grammar_model(root / "letters")
    (root / "forms").mkdir()
    (root / "forms" / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in FORMS))
    same = dict.fromkeys(("config", "weights", "tokenizer", "generation"), tiny)
    return same | {"index": shards} | {name: root / name for name in ("head", "job", "forms", "letters")}


@pytest.mark.parametrize("cases", [CASES[1::3], pytest.param(CASES, marks=pytest.mark.slow)], ids=["a third", "all"])
def test_broken_files_end_in_a_named_error(bases: dict[str, Path], tmp_path: Path, cases: list[str]):
    shutil.copy(bases["weights"] / "model.safetensors", tmp_path / "outside.safetensors")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    worker, counts, bad = Worker(bases, tmp_path), Counter(), []
    try:
        for name in cases:
            kind, directory = name.split("-")[0], tmp_path / name
            make_case(name, bases, directory)
            answer = worker.ask(kind, directory)
            counts[kind, answer["verdict"]] += 1
            if answer["verdict"] not in ("fine", "refused"):
                bad.append(f"{name}: {answer['verdict']}: {answer['detail'][-1500:]}")
            shutil.rmtree(directory)
    finally:
        worker.stop()
    sys.stdout.write(f"{ {' '.join(key): count for key, count in sorted(counts.items())} }\n")
    assert not bad, f"{len(bad)} of {len(cases)}:\n" + "\n".join(bad)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    # A fuzz that breaks nothing, or lets nothing through, tests nothing.
    assert all(counts[kind, "refused"] for kind in ("config", "weights", "index", "tokenizer", "generation", "head"))
    assert all(counts[kind, "fine"] for kind in COUNTS)
