"""Results that were measured on a GPU are complete reports, and the schema notices what is not."""

import json
from pathlib import Path

import pytest

from tests.gpu.schema import read

RESULTS = Path(__file__).parent / "results"
SECTION = {"status": "done", "reason": None, "time_s": 1.0, "tables": {}, "checks": [], "skipped": []}
REPORT = {
    "version": 1, "date": "", "command": "", "commit": "", "tiny": False, "budget_s": 1.0, "time_s": 1.0,
    "machine": None, "sections": {"ceilings": SECTION},
}  # fmt: skip


def test_results_are_complete_reports_of_a_gpu():
    for file in RESULTS.glob("*.json"):
        report = read(file.read_text())
        assert not report.tiny, f"{file.name}: proves the script, not the card"
        assert report.machine is not None, f"{file.name}: names no card"
        assert report.machine.backend == "gpu", f"{file.name}: was not measured on a GPU"
    assert (RESULTS / "README.md").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": 2},
        {"more": 1},
        {"sections": {"ceilings": {**SECTION, "status": "running"}}},
        {"sections": {"ceilings": {**SECTION, "tables": {"matmul": [{"name": "bfloat16"}]}}}},
        {"sections": {"ceilings": {**SECTION, "tables": {"unheard of": [{}]}}}},
        {"sections": {"ceilings": {**SECTION, "checks": [{"name": "a", "passed": "yes", "detail": ""}]}}},
    ],
)
def test_what_is_no_report_is_refused(wrong: dict):
    assert read(json.dumps(REPORT)).sections["ceilings"].status == "done"
    with pytest.raises(ValueError, match=r".+"):
        read(json.dumps(REPORT | wrong))
