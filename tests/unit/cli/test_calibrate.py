"""``jaxspec calibrate`` on a tiny model, a few cells: what is measured, counted, fitted and written."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from jaxspec.bench.calibrate import CalibrationGrid
from jaxspec.checkpoint.files.fingerprint import digests
from jaxspec.cli.main import main
from jaxspec.control.adaptive import Adaptive
from jaxspec.errors import ConfigError
from jaxspec.inspect.model_cost import model_cost
from jaxspec.perf.calibration import Calibration, Predictor, load_calibration, save_calibration
from jaxspec.serve.llm import LLM
from jaxspec.topology import chain
from tests.unit.serve.tiny_model import write_tiny_model

CONTEXTS = (8, 12, 16, 20)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("calibrate") / "tiny")


@pytest.fixture(scope="module")
def measured(directory: Path) -> Calibration:
    """Two rows, plain and one draft, at four contexts: one engine, eight cells."""
    text, output = directory.parent / "text.txt", directory.parent / "c.json"
    text.write_text("the cat sat on a mat hello world one two three " * 8)
    flags = ["--rows", "2", "--lengths", "0", "1", "--contexts", *map(str, CONTEXTS), "--rounds", "2", "--steps", "2"]
    flags += ["--held-out-lengths", "2"]
    assert main(["calibrate", str(directory), "--text", str(text), "--output", str(output), *flags]) == 0
    return load_calibration(output)


def test_every_cell_is_measured(measured: Calibration):
    cells = [(p.rows, p.length) for p in measured.points]
    assert sorted(cells) == [(2, 0)] * 4 + [(2, 1)] * 4
    for p in measured.points:
        assert p.step_s > p.draft_s >= 0
        assert (p.draft_s > 0) == (p.length > 0)
        near = [c for c in CONTEXTS if 0 <= p.context - c <= 2 * 2 // 2]
        assert near, "cached positions when the dispatch began, and half of what it committed"
    assert measured.noise_floor > 0


def test_held_out_cells_are_measured_and_not_fitted(measured: Calibration):
    assert [(p.rows, p.length) for p in measured.held_out] == [(2, 2)]
    assert all(p.length < 2 for p in measured.points)


def test_real_routes_are_counted(measured: Calibration, directory: Path):
    config = json.loads((directory / "config.json").read_text())
    overlap = measured.overlap
    assert overlap is not None
    assert (overlap.rows, overlap.positions, len(overlap.share)) == ((2,), (1, 2), 1)
    assert np.all(np.asarray(overlap.share) <= 1.0 + 1e-9), "routers of real text repeat experts"
    touched = overlap.touched(config["num_experts"], config["num_experts_per_tok"], 2, 2)
    assert config["num_experts_per_tok"] <= touched <= config["num_experts"]


def test_the_file_says_what_it_is_of(measured: Calibration, directory: Path):
    config = json.loads((directory / "config.json").read_text())
    assert measured.model == {"name": "tiny", "family": "qwen2_moe", **digests(config, directory)}
    assert measured.machine["backend"] == "cpu"
    assert measured.settings["drafter"] == "ngram"
    assert measured.versions["jax"]
    assert set(measured.fit.rates) == set(measured.fit.interval)
    assert "expert_byte_s" in measured.fit.rates
    assert "expert_byte_s" not in measured.token_count_fit.rates


def test_it_predicts_what_was_measured(measured: Calibration, directory: Path):
    config = json.loads((directory / "config.json").read_text())
    predict = Predictor(measured, model_cost(config))
    for p in measured.points:
        assert predict.verify_s(p.rows, p.length, p.context) == pytest.approx(p.verify_s)


def test_auto_starts_from_it(measured: Calibration, directory: Path, tmp_path: Path):
    """With a calibration ``auto`` is the default, and the ratio of step times is known before a step is run."""
    # On a busy machine the warm-up may be surer than the calibration, and would correct it.
    measured = structs.replace(measured, noise_floor=0.02)
    save_calibration(measured, tmp_path / "c.json")
    asked: dict[str, Any] = {
        "max_num_seqs": 2, "max_model_len": 32, "prefill_buckets": (16,), "max_logprobs": 0,
        "speculative_config": {
            "method": "ngram", "calibration": str(tmp_path / "c.json"), "max_num_speculative_tokens": 1,
        },
    }  # fmt: skip
    llm = LLM(directory, **asked)
    control = llm.engine.control
    assert isinstance(control, Adaptive)
    assert control.arms == (chain(0), chain(1))
    ratios = [p.step_s for p in measured.points if p.length]
    plain = [p.step_s for p in measured.points if not p.length]
    expected = np.exp(np.mean(np.log(ratios)) - np.mean(np.log(plain)))
    assert control.times.prior is not None
    assert control.times.prior.at(1, 2) == pytest.approx((expected, 2**0.5 * measured.noise_floor))
    other = {**asked["speculative_config"], "method": "draft_model", "model": str(directory)}
    for wrong, words in (
        ({"dtype": "float32"}, "dtype 'bfloat16', not 'float32'"),
        ({"speculative_config": other}, "drafter 'ngram', not 'draft_model'"),
    ):
        with pytest.raises(ConfigError, match=words):
            LLM(directory, **{**asked, **wrong})


def test_the_default_grid_has_about_21_cells():
    cells = CalibrationGrid().cells()
    assert len(cells) == len(set(cells)) == 22
    assert {c for _, _, c in cells} == {128, 1024}
    assert CalibrationGrid(rows=(1,), lengths=(0, 2), contexts=(64,)).cells() == [(1, 0, 64), (1, 2, 64)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": (2, 1)}, "rows must ascend from at least 1"),
        ({"lengths": (1, 3)}, "plain decoding among them"),
        ({"lengths": (0,)}, "plain decoding among them"),
        ({"contexts": ()}, "contexts must ascend"),
        ({"rounds": 1}, "needs 2 rounds"),
    ],
)
def test_bad_grids(change: dict, words: str):
    with pytest.raises(ConfigError, match=words):
        CalibrationGrid(**change)


def test_mistakes(directory: Path, capsys: pytest.CaptureFixture):
    for flags, words in {
        ("--speculative-config", "{"): "not valid JSON",
        ("--speculative-config", "[1]"): "a JSON object is needed",
        (
            "--speculative-config",
            '{"method": "ngram", "num_speculative_tokens": 2}',
        ): "leave num_speculative_tokens out",
        ("--text", "missing.txt"): "missing.txt cannot be read",
        ("--output", "missing/c.json"): "there is no directory missing",
    }.items():
        assert main(["calibrate", str(directory), *flags]) == 2
        assert words in capsys.readouterr().err
