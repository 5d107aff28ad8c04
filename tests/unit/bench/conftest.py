"""A tiny model and the reports that tests make up."""

from pathlib import Path

import pytest

from jaxspec.bench.record import SCHEMA, BenchReport, Figures, Spread, SweepCell
from tests.unit.serve.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("bench") / "tiny")


def spread(low: float, high: float) -> Spread:
    return Spread((low + high) / 2, low, high)


def made_up_cell(
    k: int = 2, plain: tuple[float, float] = (90, 110), speedup: tuple[float, float] = (1.4, 1.6)
) -> SweepCell:
    def figures(low: float, high: float) -> Figures:
        return Figures(spread(low, high), spread(low, high), None, None, None, None, 4, 40)

    return SweepCell(
        "ngram", k, 4, 0.0, "code", None, 10, "closed", plain=figures(*plain),
        speculative=figures(*(p * s for p, s in zip(plain, speedup, strict=True))), speedup=spread(*speedup),
    )  # fmt: skip


def made_up_report(*cells: SweepCell, synthetic: dict | None = None) -> BenchReport:
    return BenchReport(
        SCHEMA, True, synthetic, ["jaxspec", "bench"], "2026-01-01T00:00:00+00:00", 0, {"device": "cpu", "cores": 1},
        {"jax": "1"}, {"family": "f"}, {"rounds": 3}, list(cells), [],
    )  # fmt: skip
