"""The float8 KV cache in what inspect, plan and the compiled programs say."""

from pathlib import Path

import pytest

from jaxspec.aot.programs import STATE, ProgramSettings, programs
from jaxspec.cli.main import main
from jaxspec.cli.plan_question import PlanArgs, question_of
from jaxspec.inspect.model_report import config_at, report_model
from jaxspec.perf.planner import fitting_rows
from scripts.house_report import ROOT

QWEN3 = ROOT / "configs" / "models" / "qwen3-30b-a3b.json"
LAYERS, HEADS, CHANNELS = 48, 4, 128


def test_a_token_takes_a_byte_per_channel_and_a_scale_per_head():
    cache = report_model(QWEN3, kv_cache_dtype="fp8")["cache"]["bytes_per_token"]
    values, scales = LAYERS * HEADS * CHANNELS, LAYERS * HEADS * 4
    assert cache == {"k": values, "v": values, "k_scale": scales, "v_scale": scales}


def test_more_rows_fit():
    asked = {"model": str(QWEN3), "hardware": "h100x1", "context": 8192}
    half, whole = (
        fitting_rows(question_of(PlanArgs(**asked, kv_cache_dtype=name))[0]) for name in ("fp8_e4m3", "auto")
    )
    assert half is not None
    assert whole is not None
    assert half > 1.9 * whole > 0


def test_programs_hold_its_bits():
    made = programs(ProgramSettings(config_at(QWEN3)[0], kv_cache_dtype="fp8"), ("plain",))
    caches = made["plain"].arguments[STATE].layers
    assert {str(x.dtype) for cache in caches for name, x in cache.items() if name in "kv"} == {"uint8"}


def test_latent_caches_are_refused(capsys: pytest.CaptureFixture):
    config = Path(ROOT / "configs" / "models" / "deepseek-v3.json")
    assert main(["inspect", str(config), "--kv-cache-dtype", "fp8"]) == 2
    assert "caches latent; take 'auto'" in capsys.readouterr().err
