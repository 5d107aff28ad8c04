"""A whole sweep over a tiny model: its cells, files and pictures, the experts it counted, and what it refuses."""

import csv
import io
import itertools
import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from jaxspec.bench import pictures
from jaxspec.bench import sweep as sweep_module
from jaxspec.bench.grid import DrafterChoice, EnginePoint, Grid, default_grid
from jaxspec.bench.measure import Run, Trace
from jaxspec.bench.record import Skipped, SweepCell, load, save
from jaxspec.bench.rounds import PLAIN, SPECULATIVE
from jaxspec.bench.sweep import Sweep, SweepCallbacks
from jaxspec.bench.synthetic import Synthetic
from jaxspec.bench.tables import csv_text, heading, markdown_text
from jaxspec.bench.touched_experts import touched_experts
from jaxspec.errors import ConfigError
from jaxspec.inspect.text_routes import routed_experts
from jaxspec.perf.moesd import expected_experts
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SpeculationMetrics
from tests.unit.bench.conftest import made_up_cell, made_up_report

NGRAM = DrafterChoice.parse('{"method": "ngram", "prompt_lookup_min": 1}')
SMALL = {"input_tokens": (6,), "output_tokens": (8,), "workloads": ("random",), "rounds": 2}
ENGINE = {"prefill_buckets": (16,), "steps_per_dispatch": 2}


def swept(model: Path, grid: Grid) -> tuple[Sweep, list[SweepCell], list[Skipped]]:
    cells: list[SweepCell] = []
    skipped: list[Skipped] = []
    sweep = Sweep(model, grid, ENGINE, callbacks=SweepCallbacks(cell=cells.append, skipped=skipped.append))
    sweep.run()
    return sweep, cells, skipped


@pytest.fixture(scope="module")
def found(model: Path) -> tuple[Sweep, list[SweepCell], list[Skipped]]:
    rates = (math.inf, 50.0)
    return swept(
        model,
        Grid((NGRAM,), (0, 2), (2,), (0.0, 1.0), rates=rates, price_per_hour=3.6, seed=1, **SMALL),
    )


def test_every_cell_is_there(found: tuple):
    _, cells, skipped = found
    assert skipped == []
    wanted = {
        (drafter, k, t, arrival)
        for drafter, k in (("none", 0), (NGRAM.name, 2))
        for t in (0.0, 1.0)
        for arrival in ("closed", "poisson 50/s")
    }
    assert {(c.drafter, c.k, c.temperature, c.arrival) for c in cells} == wanted
    assert len({c.key for c in cells}) == len(cells) == 8
    assert all((c.concurrency, c.input_tokens, c.output_tokens) == (2, 6, 8) for c in cells)


def test_cells_hold_together(found: tuple):
    for cell in found[1]:
        assert cell.same_text is True, "the rule match promises the text of plain decoding, sampled or not"
        assert (cell.plain.requests, cell.plain.tokens) == (4, 32)
        assert cell.plain.usd_per_million_tokens == pytest.approx(1000 / cell.plain.tokens_per_s.median)
        waits = cell.plain.ttft_s, cell.plain.itl_s, cell.plain.tpot_s, cell.plain.latency_s
        assert all(w is not None and 0 < w.p50 <= w.p95 <= w.p99 for w in waits)
        if cell.k == 0:
            assert cell.speculative is cell.speedup is cell.acceptance is cell.experts is None
            continue
        assert cell.speculative is not None
        assert cell.total_speedup.least <= cell.total_speedup.median <= cell.total_speedup.most
        a = cell.acceptance
        assert len(a.per_pos) == 2
        assert a.drafted_length == pytest.approx(1 + sum(a.per_pos))
        assert a.num_steps * a.length == pytest.approx(32)
        e = cell.experts
        assert e.experts_per_token <= e.plain <= e.speculative <= e.experts
        assert e.plain <= e.plain_independent + e.experts_per_token
        assert e.texts == 4


def test_prompts_are_read_as_by_default_and_texts_have_room(model: Path, monkeypatch: pytest.MonkeyPatch):
    """Chunks as long as the longest prompt of a sweep made every short one as slow to read."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(sweep_module, "LLM", lambda model, **settings: given.update(settings) or mock.MagicMock())
    grid = Grid((NGRAM,), (2,), (2,), (0.0,), input_tokens=(6, 65), output_tokens=(20,), workloads=("random",))
    Sweep(model, grid).open(grid.engines()[0])
    assert given["max_model_len"] == 85
    assert "prefill_buckets" not in given


def test_requests_of_one_workload_may_differ(model: Path):
    """Each has the settings of its turn, the same whichever way decodes it."""
    grid = Grid((NGRAM,), (2,), (2,), (0.7,), output_tokens=(8,), workloads=("mixed",))
    sweep, (scenario,) = Sweep(model, grid), grid.scenarios()
    for mode, speculates in ((PLAIN, False), (SPECULATIVE, None)):
        params = sweep.params(scenario, 4, mode)
        assert [one.temperature for one in params] == [0.0, 0.7, 0.0, 0.7]
        assert [one.frequency_penalty for one in params] == [0.0, 2.0, 0.0, 2.0]
        assert {one.speculative for one in params} == {speculates}
        assert len({one.seed for one in params}) == 4


def test_experts_by_hand(found: tuple):
    """Two rows, of which one ends early: windows, batches and means against a count in plain Python."""
    llm: LLM = found[0].open(EnginePoint(1, None, 0))
    assert llm.model is found[0].model, "weights are loaded once"
    prompts, ids = [[5, 6, 7], [9, 8]], [[1, 2, 3, 4], [1]]
    drafted = [[False, True, True, False], [False]]
    run = Run(ids, drafted, 5, 1.0, 0, 0.0, 0, SpeculationMetrics(), [Trace(), Trace()], {})
    counted = touched_experts(llm.model, prompts, run, rows=2, drafts=2)
    routes = routed_experts(llm.model, [p + i for p, i in zip(prompts, ids, strict=True)])
    assert routes[0].shape == (1, 7, llm.model.net.arch.layers[0].ffn.top_k)
    # Row 0 steps at positions 2 and 3, row 1 at 1 alone.
    wide = [{*routes[0][0, 2:5].flat, *routes[1][0, 1:4].flat}, {*routes[0][0, 3:6].flat}]
    narrow = [{*routes[0][0, 2].flat, *routes[1][0, 1].flat}, {*routes[0][0, 3].flat}]
    assert counted is not None
    assert counted.speculative == np.mean([len(x) for x in wide])
    assert counted.plain == np.mean([len(x) for x in narrow])
    sizes = {"num_experts": counted.experts, "top_k": counted.experts_per_token}
    assert counted.speculative_independent == np.mean([expected_experts(**sizes, tokens=t) for t in (6, 3)])


@pytest.mark.parametrize(("rows", "sizes"), [pytest.param(1, [1, 1, 1], marks=pytest.mark.slow), (2, [3])])
def test_ways_of_decoding_take_turns_within_a_round(model: Path, rows: int, sizes: list[int]):
    grid = Grid((NGRAM,), (2,), (rows,), requests=3, **SMALL)
    sweep, engine, ran = Sweep(model, grid, ENGINE), EnginePoint(rows, NGRAM, 2), []
    llm = sweep.open(engine)
    submit = llm.submit

    def watched(prompt, params):
        ran.append((prompt, params.speculative is None))
        return submit(prompt, params)

    llm.submit = watched
    cell = sweep.measure(llm, engine, grid.scenarios()[0])
    rounds = grid.rounds + 1
    turns = [(drafts, len(list(group))) for drafts, group in itertools.groupby(ran, key=lambda one: one[1])]
    if len(sizes) > 1:
        assert len(turns) > 2 * rounds, "they change within a round"
    assert [prompt for prompt, drafts in ran if drafts] == rounds * sweep.prompts(engine, grid.scenarios()[0])
    assert sum(count for _, count in turns) == 2 * 3 * rounds
    assert cell.plain.requests == cell.speculative.requests == 3
    assert cell.same_text is True


def test_synthetic_acceptance_is_marked_everywhere(model: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    decreed = Synthetic(length=3.0)
    _, cells, _ = swept(model, Grid((NGRAM,), (2,), (2,), synthetic=decreed, **SMALL))
    a = cells[0].acceptance
    # Every usable draft is accepted; a text's last step may be cut short.
    assert a.num_accepted_tokens >= a.num_draft_tokens - 2 * cells[0].plain.requests
    assert a.num_draft_tokens > 0
    assert cells[0].same_text is None
    report = made_up_report(*cells, synthetic=decreed.described())
    assert heading(report).startswith("SYNTHETIC ACCEPTANCE (mean_length 3.0)")
    assert "SYNTHETIC ACCEPTANCE" in markdown_text(report)
    assert "no model's" in markdown_text(report)
    assert {row["synthetic"] for row in csv.DictReader(io.StringIO(csv_text(report)))} == {"True"}
    files = pictures.draw(report, tmp_path)
    assert files[0].read_bytes().startswith(b"\x89PNG")
    save(report, tmp_path / "bench.json")
    assert load(tmp_path / "bench.json").synthetic == {"mean_length": 3.0}


def test_what_cannot_be_measured_is_told(model: Path):
    mtp = DrafterChoice.parse("mtp")
    _, cells, skipped = swept(model, Grid((mtp,), (0, 1), (1,), **SMALL))
    assert [cell.k for cell in cells] == [0], "the rest goes on"
    assert [s.what for s in skipped] == ["mtp K=1, 1 rows"]
    assert skipped[0].reason


def test_report_round_trip_and_tables(tmp_path: Path):
    report = made_up_report(made_up_cell(2), made_up_cell(4))
    save(report, tmp_path / "bench.json")
    assert load(tmp_path / "bench.json") == report
    assert [file.name for file in tmp_path.iterdir()] == ["bench.json"]
    rows = list(csv.DictReader(io.StringIO(csv_text(report))))
    assert [(row["k"], row["mode"]) for row in rows] == [(k, m) for k in "24" for m in ("plain", "speculative")]
    assert float(rows[1]["speedup"]) == pytest.approx(1.5)
    text = markdown_text(report)
    assert "| ngram K=2, 4 rows, code natural+10, T=0 | 100 |" in text
    assert "1.50x (1.40 to 1.60)" in text
    assert "SYNTHETIC" not in text


def test_older_files_with_more_fields_are_read(tmp_path: Path):
    file, report = tmp_path / "bench.json", made_up_report(made_up_cell(2))
    save(report, file)
    file.write_text(file.read_text().replace('"drafter":', '"regret": null, "drafter":'))
    assert load(file) == report


@pytest.mark.parametrize(
    ("text", "why"),
    [("[]", "no report|schema"), ('{"schema": "other/1"}', "schema"), ('{"schema": "jaxspec.bench/2"}', "no report")],
    ids=str,
)
def test_other_files_are_no_reports(tmp_path: Path, text: str, why: str):
    file = tmp_path / "bench.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        load(file)
    with pytest.raises(ConfigError, match="no report"):
        load(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"lengths": (17,)}, "--k takes"),
        ({"lengths": ("x",)}, "--k takes"),
        ({"rows": (0,)}, "--concurrency"),
        ({"temperatures": (-1.0,)}, "--temperature"),
        ({"rates": (0.0,)}, "--request-rate"),
        ({"workloads": ("poems",)}, "--workload"),
        ({"output_tokens": (1,)}, "--output-tokens"),
        ({"rounds": 0}, "--rounds"),
        ({"requests": 0}, "--requests"),
        ({"price_per_hour": 0.0}, "--price-per-hour"),
        ({"drafters": ()}, "needs a drafter"),
    ],
    ids=str,
)
def test_bad_grids_are_refused(change: dict, why: str):
    with pytest.raises(ConfigError, match=why):
        Grid(**{"drafters": (NGRAM,), "lengths": (2,), "rows": (1,), **change})


def test_drafters_are_parsed():
    assert DrafterChoice.parse("ngram").config == {"method": "ngram"}
    assert DrafterChoice.parse("draft_model=some/dir").config == {"method": "draft_model", "model": "some/dir"}
    assert NGRAM.name == "ngram prompt_lookup_min=1"
    for wrong in ("eagle9", "draft_model", "{", '{"method": "ngram", "num_speculative_tokens": 2}'):
        with pytest.raises(ConfigError):
            DrafterChoice.parse(wrong)


def test_default_grids():
    lengths, rows = default_grid("gpu")
    assert list(lengths) == [*range(9), "auto"]
    assert list(rows) == [1, 2, 5, 8, 16, 25, 32, 50, 64, 100, 128, 200]
    small = default_grid("cpu")
    assert set(small[0]) < set(lengths)
    assert set(small[1]) < set(rows)
