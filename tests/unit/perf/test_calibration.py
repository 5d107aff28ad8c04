"""Calibrations on file, and predictions that agree with what was measured."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from jaxspec.errors import ConfigError
from jaxspec.perf.calibration import (
    VERSION,
    Calibration,
    MeasuredCell,
    Predictor,
    fit_points,
    load_calibration,
    record_of,
    save_calibration,
)
from jaxspec.perf.cost import Rates
from jaxspec.perf.held_out import ACCEPTANCES, judge
from jaxspec.perf.overlap import MeasuredOverlap
from jaxspec.perf.pass_time import step_time
from tests.unit.perf.models import routed_model

RATES = Rates(
    fixed_s=2e-3, row_s=1e-4, byte_s=4e-7, flop_s=2e-8, expert_byte_s=3e-6, expert_flop_s=1e-8, kv_byte_s=2e-7
)
OVERLAP = MeasuredOverlap((1, 8), (1, 8), (((1.0, 0.6), (0.9, 0.55)),) * 3)
ODD = (4, 3, 100)  # a cell that does not follow the formula


def time_s(rows: int, length: int, context: int) -> float:
    found = step_time(routed_model(), RATES, rows=rows, positions=length + 1, context=context, overlap=OVERLAP)
    return found.total_s * (1.3 if (rows, length, context) == ODD else 1.0)


def draft_s(rows: int, length: int) -> float:
    return (1e-4 + 2e-5 * length * rows) if length else 0.0


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    cells = [(b, k, 100) for b in (1, 2, 4, 8) for k in (0, 1, 3, 7)] + [(b, k, 900) for b in (1, 8) for k in (0, 3)]
    points = [MeasuredCell(b, k, c, time_s(b, k, c) + draft_s(b, k), 0.01, draft_s(b, k)) for b, k, c in cells]
    full, blind = fit_points(routed_model(), points, OVERLAP, 0.01)
    return Calibration(
        version=VERSION, model={"name": "routed", "config_digest": "0"}, machine={"cpu": "none", "cores": 1},
        versions={"jax": "0"}, date="2026-11-21 12:00", settings={"drafter": "ngram", "rounds": 9}, noise_floor=0.01,
        points=tuple(points), overlap=OVERLAP,
        fit=record_of(full), token_count_fit=record_of(blind),
    )  # fmt: skip


def test_held_out_cells_are_judged(calibration: Calibration):
    """The made-up machine reads experts: who counts them is right about cells between, who counts tokens is not."""
    cells = [(b, k, 100) for b in (1, 2, 4, 8) for k in (2, 5)] + [(b, k, 100) for b in (3, 6) for k in (0, 1, 2, 4)]
    held = [MeasuredCell(b, k, c, time_s(b, k, c) + draft_s(b, k), 0.01, draft_s(b, k)) for b, k, c in cells]
    found = judge(msgspec.structs.replace(calibration, held_out=tuple(held)), routed_model())
    assert (found.cells, found.questions) == (16, 14 * len(ACCEPTANCES))
    assert 0 < found.pays < found.questions
    assert (
        found.pays
        + sum(survived(a, p.length) * time_s(p.rows, 0, 100) < p.step_s for p in held if p.length for a in ACCEPTANCES)
        == found.questions
    ), "an answer for each"
    assert found.formula.verify_error < 0.01
    assert found.formula.right_when_clear == found.clear
    assert found.formula.verify_error < found.predicted.verify_error, "the table is drawn to its odd cell"
    assert found.token_count.verify_error > 3 * found.formula.verify_error
    assert found.token_count.right < found.formula.right
    with pytest.raises(ConfigError, match="no cells with drafts were held out"):
        judge(calibration, routed_model())


def survived(acceptance: float, length: int) -> float:
    return sum(acceptance**j for j in range(length + 1))


def test_a_file_comes_back_as_it_was(calibration: Calibration, tmp_path: Path):
    save_calibration(calibration, tmp_path / "c.json")
    assert load_calibration(tmp_path / "c.json") == calibration
    assert json.loads((tmp_path / "c.json").read_text())["points"][0]["rows"] == 1


def test_a_measured_cell_is_predicted_as_measured(calibration: Calibration):
    predict = Predictor(calibration, routed_model())
    for p in calibration.points:
        assert predict.verify_s(p.rows, p.length, p.context) == pytest.approx(p.verify_s, rel=1e-9)
        assert predict.draft_s(p.rows, p.length, p.context) == pytest.approx(p.draft_s, rel=1e-9)


def test_the_formula_interpolates(calibration: Calibration):
    predict = Predictor(calibration, routed_model())
    for cell in ((3, 2, 100), (6, 5, 300), (1, 5, 100), (8, 2, 900)):
        assert predict.verify_s(*cell) == pytest.approx(time_s(*cell), rel=0.08)
    assert predict.draft_s(6, 5, 100) == pytest.approx(draft_s(6, 5), rel=0.03)
    assert predict.draft_s(6, 0, 100) == 0


def test_a_cell_off_the_formula_draws_its_neighborhood_only(calibration: Calibration):
    predict = Predictor(calibration, routed_model())
    near = predict.verify_s(4, 4, 100) / predict.formula_s(4, 5, 100)
    far = predict.verify_s(64, 0, 4000) / predict.formula_s(64, 1, 4000)
    assert near > 1.1
    assert far == pytest.approx(1.0, abs=0.05)


def test_the_ablation_uses_neither_table_nor_experts(calibration: Calibration):
    blind = Predictor(calibration, routed_model(), token_count=True)
    assert blind.verify_s(2, 3, 100) == blind.formula_s(2, 4, 100)
    assert calibration.token_count_fit.error > calibration.fit.error
    assert "expert_byte_s" not in calibration.token_count_fit.rates


def test_without_drafts_drafting_is_not_known(calibration: Calibration):
    plain = tuple(p for p in calibration.points if p.length == 0)
    fields = {name: getattr(calibration, name) for name in calibration.__struct_fields__}
    predict = Predictor(Calibration(**{**fields, "points": plain}), routed_model())
    with pytest.raises(ConfigError, match="no points with drafts"):
        predict.draft_s(1, 2, 100)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "calibration of version 2, this program reads 1"),
        ({"extra": 1}, "unknown field `extra`"),
        ({"points": []}, "impossible points"),
        ({"noise_floor": "low"}, "Expected `float`"),
        ({"points": [{"rows": 0, "length": 0, "context": 1, "step_s": 1.0, "spread": 0.0}]}, "impossible points"),
        (
            {"points": [{"rows": 1, "length": 1, "context": 1, "step_s": 1.0, "spread": 0.0, "draft_s": 2.0}]},
            "impossible",
        ),
        ({"fit": {"rates": {"magic_s": 1.0}, "interval": {}, "error": 0.0, "held_out_error": None}}, "magic_s"),
    ],
)
def test_files_are_read_strictly(calibration: Calibration, tmp_path: Path, change: dict, words: str):
    file = tmp_path / "c.json"
    save_calibration(calibration, file)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ConfigError, match=words):
        load_calibration(file)


def test_files_that_are_none(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"not a calibration.*run jaxspec calibrate"):
        load_calibration(tmp_path / "missing.json")
    (tmp_path / "c.json").write_text("[1")
    with pytest.raises(ConfigError, match="not a calibration"):
        load_calibration(tmp_path / "c.json")


def test_overlap_of_another_layer_count_still_predicts(calibration: Calibration):
    one = replace(OVERLAP, share=OVERLAP.share[:1])
    model = routed_model()
    both = [step_time(model, RATES, rows=4, positions=4, overlap=o).total_s for o in (OVERLAP, one)]
    assert both[0] == pytest.approx(both[1])
