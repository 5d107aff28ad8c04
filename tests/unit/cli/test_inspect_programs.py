"""``jaxspec inspect --kernels`` and ``--compiled``: choices by operation, the table of compiled programs, mistakes."""

import json
from typing import Any

import pytest

from jaxspec.aot import process
from jaxspec.cli.main import main
from jaxspec.nn.policy import kernels_for
from scripts.house_report import ROOT

pytestmark = pytest.mark.served

COMPILED: dict[str, Any] = {
    "gpu": "NVIDIA H100 80GB HBM3", "devices": 8, "mesh": {"data": 1, "expert": 8, "tensor": 1}, "rows": 4,
    "capacity": 4096, "drafts": 3, "kernels": "auto", "bucket": 256, "steps": 8,
    "programs": {"ngram": {
        "positions": 4, "launches": {"per_step": 444, "in_branches": 48, "per_turn": 0, "per_position": 111.0,
                                       "by_group": {"dense": 300, "experts": 90, "kv": 33, "head": 1, "sampling": 20}},
        "graphs": {"per_step": 17, "launches_outside": 3, "host_waits": 1},
        "kernels": {"few_rows_dense": 49}, "shared_bytes": {"few_rows_dense": 73728},
        "collectives": {"all-reduce": {"per_step": 32, "per_moe_layer": 2.0, "bytes_per_step": 1048576}},
        "bytes": {"arguments": 16121101177, "temp": 10693416, "aliased": 2282777460, "caches": 2281701376, "state": 1},
        "copies": [{"result": "f32[4,4,50304]", "bytes": 3219456, "times": 4, "optional": True, "looped": False,
                    "setup": False, "where": "head", "name": "copy.21"}],
        "spills": {}, "compile_s": 41.0,
    }},
}  # fmt: skip


TINY = str(ROOT / "tests" / "golden" / "qwen3_moe")


def test_every_operation_has_a_choice_and_a_reason(capsys: pytest.CaptureFixture):
    flags = ["--capacity", "256", "--programs", "ngram", "--json"]
    assert main(["inspect", TINY, "--kernels", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["cpu"]["computed_by"], report["cpu"]["why"]) == kernels_for("cpu")
    choices = report["kernels"]["ngram"]
    assert {choice["op"] for choice in choices} == {
        "add_norm", "few_rows_dense", "heads_to_cache", "route", "routed_experts", "verify_attention",
    }  # fmt: skip
    assert all(choice["reason"] for choice in choices)
    assert {choice["implementation"] for choice in choices} <= {"triton", "xla"}


def test_compiled_programs_are_shown_as_a_table(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    asked = {}
    monkeypatch.setattr(process, "run", lambda entry, **arguments: asked.update(arguments) or COMPILED)
    assert main(["inspect", TINY, "--compiled", "--devices", "8", "--mesh", "expert=4,tensor=2"]) == 0
    assert (asked["mesh"], asked["devices"], asked["kernels"]) == ({"expert": 4, "tensor": 2}, 8, "auto")
    shown = capsys.readouterr().out
    for words in ("8 x NVIDIA H100", "(expert 8)", "444", "32 / 2", "10.7 MB", "73.7 kB", "4 times in a branch"):
        assert words in shown
    rows = [" ".join(line.replace("│", " ").split()) for line in shown.splitlines()]
    experts = next(line for line in rows if line.startswith("routed experts, routing 90 "))
    everything = next(line for line in rows if line.startswith("all 444 "))
    assert float(experts.split()[-2]) == pytest.approx(90 * 2.4), "microseconds of launches, by the card's record"
    assert float(everything.split()[-2]) == pytest.approx(444 * 2.4, abs=1)


def test_spills_are_a_failure(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    spilling = COMPILED["programs"]["ngram"] | {"spills": {"few_rows_dense": 504}}
    monkeypatch.setattr(process, "run", lambda entry, **arguments: COMPILED | {"programs": {"ngram": spilling}})
    assert main(["inspect", TINY, "--compiled"]) == 1
    assert "few_rows_dense spills 504 B" in capsys.readouterr().out


def test_a_wrong_mesh_is_refused(capsys: pytest.CaptureFixture):
    assert main(["inspect", TINY, "--compiled", "--mesh", "expert"]) == 2
    assert "axes and sizes such as expert=4,tensor=2, got 'expert'" in capsys.readouterr().err
