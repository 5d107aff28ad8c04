"""Two reports side by side: ratios with their spread, and what counts as worse, on made-up numbers."""

import pytest

from jaxspec.bench.regressions import compare_reports
from jaxspec.errors import ConfigError
from tests.unit.bench.conftest import made_up_cell, made_up_report


def test_ratios_by_hand():
    before, after = made_up_report(made_up_cell(plain=(90, 110))), made_up_report(made_up_cell(plain=(180, 220)))
    changes = {change.figure: change for change in compare_reports(before, after).changes}
    assert set(changes) == {"plain tokens/s", "tokens/s", "speed-up"}
    plain = changes["plain tokens/s"]
    assert (plain.before, plain.after) == (100, 200)
    assert (plain.ratio.median, plain.ratio.least, plain.ratio.most) == pytest.approx((2, 180 / 110, 220 / 90))
    assert changes["speed-up"].ratio.median == 1
    assert not any(change.worse for change in changes.values())


@pytest.mark.parametrize(
    ("now", "tolerance", "worse"),
    [
        ((1.30, 1.45), 0.0, False),  # the rounds overlap: noise
        ((1.20, 1.39), 0.0, True),  # 1.39 is below the least 1.40
        ((1.20, 1.39), 0.05, False),  # but not below 0.95 of it
        ((1.20, 1.32), 0.05, True),
        ((2.00, 3.00), 0.0, False),
    ],
    ids=str,
)
def test_worse_is_beyond_the_noise(now: tuple, tolerance: float, worse: bool):
    found = compare_reports(made_up_report(made_up_cell()), made_up_report(made_up_cell(speedup=now)), tolerance)
    assert [c.worse for c in found.changes if c.figure == "speed-up"] == [worse]


def test_other_cells_and_machines_are_told():
    before, after = made_up_report(made_up_cell(2), made_up_cell(3)), made_up_report(made_up_cell(3), made_up_cell(4))
    after.machine["device"] = "gpu"
    found = compare_reports(before, after)
    assert {c.cell for c in found.changes} == {made_up_cell(3).name}
    assert (found.only_before, found.only_after) == ([made_up_cell(2).name], [made_up_cell(4).name])
    assert found.warnings == ["machine differs; device: cpu and gpu"]


def test_what_cannot_be_compared_is_refused():
    real, decreed = made_up_report(made_up_cell()), made_up_report(made_up_cell(), synthetic={"mean_length": 2.0})
    with pytest.raises(ConfigError, match="synthetic acceptance is None in the first"):
        compare_reports(real, decreed)
    with pytest.raises(ConfigError, match="no cell in common"):
        compare_reports(real, made_up_report(made_up_cell(5)))
    with pytest.raises(ConfigError, match="tolerance"):
        compare_reports(real, real, 1.0)
