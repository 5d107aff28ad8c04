"""``jaxspec plan``: every shipped config, meshes, drafters, acceptance, prices, rules, pictures, mistakes."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec.checkpoint.files.fingerprint import digests
from jaxspec.checkpoint.heads.directory import save_head
from jaxspec.checkpoint.heads.layers import layers_of
from jaxspec.cli.main import main
from jaxspec.cli.plan_question import PlanArgs, question_of
from jaxspec.config import shipped
from jaxspec.inspect import plan_plot
from jaxspec.inspect.head_cost import head_cost
from jaxspec.inspect.model_cost import model_cost
from jaxspec.models.catalog import arch_of
from jaxspec.models.draft_head import DraftHead, HeadSpec
from jaxspec.models.trained_head import Head
from jaxspec.nn.policy import make_policy
from jaxspec.perf.calibration import VERSION, Calibration, FitRecord, MeasuredCell, save_calibration
from jaxspec.perf.overlap import MeasuredOverlap
from jaxspec.perf.planner import plan as make_plan
from jaxspec.protocol import CaptureSpec
from scripts.house_report import ROOT

CONFIGS = sorted(file.stem for file in (ROOT / "configs" / "models").glob("*.json"))
QUICK = ("deepseek-v3", "deepseek-v4-flash", "gpt-oss-120b", "llama-3.1-8b", "mixtral-8x7b", "qwen3-next-80b-a3b")
DENSE = ("llama-3", "gemma-4-31b", "opt", "qwen2.5", "qwen3-8b")


def plan(capsys: pytest.CaptureFixture, *flags: str) -> dict[str, Any]:
    assert main(["plan", "--json", *flags]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture, *flags: str) -> str:
    assert main(["plan", *flags]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in CONFIGS])
def test_every_shipped_config(name: str, capsys: pytest.CaptureFixture):
    found = plan(
        capsys, "--model", name, "--hardware", "h200x8", "--batch", "1", "64", "--no-trees", "--lengths", "1", "4"
    )
    small, large = found["batches"]
    assert 0 < small["plain_tok_per_s"] < large["plain_tok_per_s"]
    for p in (small, large):
        assert 0 < p["best"]["low"] <= p["best"]["speedup"] <= p["best"]["high"]
        assert p["best"]["tok_per_s"] == pytest.approx(p["plain_tok_per_s"] * p["best"]["speedup"])
        assert p["memory"]["total_bytes"] == pytest.approx(sum(p["memory"]["by_part"].values()))
        assert 0 < p["target_efficiency"] <= 1
    if name.startswith(DENSE):
        assert small["touched"] == [0, 0]
        assert found["mesh"]["expert"] == 1
    else:
        assert small["touched"][0] < large["touched"][0]
        assert found["mesh"]["expert"] > 1
    # No step is faster than its bytes at the memory's full speed.
    assert small["plain_s"] > found["weights_per_token_gb"] / 4800 / 8


def test_by_hand(capsys: pytest.CaptureFixture):
    """Qwen3-30B-A3B on one H200 at batch 1: 6.08 GB of weights, half of them routed experts."""
    flags = ("--model", "qwen3-30b-a3b", "--hardware", "h200", "--batch", "1", "--lengths", "3", "--no-trees")
    asked = ("--acceptance", "0.7", "--drafter", "ngram", "--context", "0", "--price-per-hour", "3.6")
    found = plan(capsys, *flags, *asked)
    (p,) = found["batches"]
    assert found["weights_per_token_gb"] == pytest.approx(6.08, abs=0.01)
    dense, experts, logits = 2.46e9 / 0.6, 3.624e9 / 0.75, 8 * 4 * 151936 / 0.6
    by_hand = (dense + experts + logits) / 4.8e12 + 48 * 13 * 2.4e-6 + 60e-6
    assert p["plain_s"] == pytest.approx(by_hand, rel=0.01)
    assert p["best"]["acceptance_length"] == pytest.approx(2.533)
    assert p["best"]["low"] < p["best"]["speedup"] < p["best"]["high"]
    assert p["price_per_million"]["plain"] == pytest.approx(3.6 / 3600 * 1e6 / p["plain_tok_per_s"])
    assert p["touched"] == pytest.approx([8, 29.1 * 0.82], rel=0.01)
    assert found["assumed_acceptance"] == {}


def test_memory_and_what_fits(capsys: pytest.CaptureFixture):
    """DeepSeek-V3 weighs 685 GB: not for one H200, and an eighth of its experts for each of eight."""
    one = plan(capsys, "--model", "deepseek-v3", "--hardware", "h200", "--batch", "1")
    assert not one["batches"][0]["fits"]
    assert one["rows_that_fit"] == 0
    eight = plan(capsys, "--model", "deepseek-v3", "--hardware", "h200x8", "--batch", "1", "--context", "8192")
    (p,) = eight["batches"]
    assert p["fits"]
    parts, whole = p["memory"]["by_part"], one["batches"][0]["memory"]["by_part"]
    assert parts["routed experts"] == pytest.approx(whole["routed experts"] / 8)
    assert parts["attention"] == whole["attention"]
    assert parts["caches"] == 8192 * 61 * (512 + 64) * 2
    assert eight["rows_that_fit"] > 8


def test_meshes(capsys: pytest.CaptureFixture):
    flags = ("--model", "gpt-oss-120b", "--hardware", "h100x8", "--batch", "64", "--drafter", "eagle")
    assert plan(capsys, *flags)["mesh"] == {"data": 1, "expert": 8, "tensor": 1}
    both = plan(capsys, *flags, "--mesh", "expert=4, tensor=2")
    assert both["mesh"] == {"data": 1, "expert": 4, "tensor": 2}
    assert "has 4 devices, --hardware h100x8 has 8" in refused(capsys, *flags, "--mesh", "expert=4")
    assert "axes data, expert and tensor; got 'rows=8'" in refused(capsys, *flags, "--mesh", "rows=8")
    assert "does not divide 128 experts" in refused(
        capsys, "--model", "gpt-oss-120b", "--hardware", "h100x3", "--mesh", "expert=3"
    )


def test_drafters(capsys: pytest.CaptureFixture):
    flags = ("--model", "llama-3.1-8b", "--hardware", "l40s", "--batch", "1")
    draft = plan(capsys, *flags, "--drafter", "llama-3.2-1b")["batches"][0]
    assert draft["best"]["kind"] == "draft_model"
    assert draft["memory"]["by_part"]["drafter"] > 2.4e9, "1.24 billion weights of two bytes"
    assert "no layers of multi-token prediction" in refused(capsys, *flags, "--drafter", "mtp")
    assert "vocabulary of 151936, llama-3.1-8b of 128256" in refused(capsys, *flags, "--drafter", "qwen3-8b")
    assert "config of a draft model instead" in refused(capsys, *flags, "--drafter", "draft_model")
    own = plan(capsys, "--model", "glm-4.7-flash", "--hardware", "h200", "--batch", "1", "--drafter", "mtp")
    assert own["batches"][0]["best"]["kind"] == "mtp"


def test_a_head_with_experts_reads_those_that_it_touches(tmp_path: Path, capsys: pytest.CaptureFixture):
    config = json.loads((shipped("models") / "qwen3-30b-a3b.json").read_text())
    target, kinds = arch_of(config), {}
    for kind, more in (("dense", {}), ("routed", {"num_experts": 8, "num_experts_per_tok": 2})):
        wide = {"moe_intermediate_size": 16, "intermediate_size": 32, "num_hidden_layers": 1} | more
        layers = {**{k: v for k, v in config.items() if "expert" not in k}, **wide}
        spec = HeadSpec(layers_of(layers), target.model_dim, CaptureSpec(taps=(2, 24)))
        net = DraftHead(spec, make_policy("bfloat16"))
        shapes = jax.eval_shape(net.initial, jax.random.key(0))
        params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        save_head(Head(net, params, None), tmp_path / kind)
        kinds[kind] = head_cost(tmp_path / kind, config, model_cost(config)).model
    dense, routed = kinds["dense"], kinds["routed"]
    router = 2 * 2048 * 8
    assert routed.memory_bytes["routed experts"] == 8 * 3 * 2048 * 16 * 2
    assert routed.weight_bytes(1, 1) - dense.weight_bytes(1, 1) == pytest.approx(router), "as much as the dense one"
    found = plan(capsys, "--model", "qwen3-30b-a3b", "--hardware", "h100", "--drafter", str(tmp_path / "routed"))
    assert found["batches"][0]["best"]["kind"] == "eagle"
    held = sum(routed.memory_bytes.values()) + 1024 * routed.token_bytes
    assert found["batches"][0]["memory"]["by_part"]["drafter"] == held, "and all are held"


def test_acceptance_per_position(capsys: pytest.CaptureFixture):
    flags = ("--model", "qwen3-8b", "--hardware", "h100", "--batch", "1", "--no-trees", "--lengths", "3")
    found = plan(capsys, *flags, "--acceptance", "0.912,0.776,0.616")
    assert found["batches"][0]["best"]["acceptance_length"] == pytest.approx(3.304)
    assert "cannot rise" in refused(capsys, *flags, "--acceptance", "0.5,0.7")
    assert "like 0.7 or 0.9,0.72,0.48" in refused(capsys, *flags, "--acceptance", "high")
    assert "probabilities from 0 to 1" in refused(capsys, *flags, "--acceptance", "1.7")


def test_a_known_overlap_narrows_the_range(capsys: pytest.CaptureFixture):
    flags = ("--model", "deepseek-v3", "--hardware", "h200x8", "--batch", "4", "--drafter", "mtp")
    flags = (*flags, "--acceptance", "0.8", "--no-trees", "--lengths", "3")
    wide, known = plan(capsys, *flags)["batches"][0], plan(capsys, *flags, "--overlap", "1.0")["batches"][0]
    assert known["best"]["high"] - known["best"]["low"] < wide["best"]["high"] - wide["best"]["low"]
    assert known["best"]["speedup"] < wide["best"]["speedup"], "more experts are touched than with the usual overlap"
    assert known["touched"][1] == pytest.approx(256 * (1 - (248 / 256) ** 16), rel=1e-6)
    assert "four positions touch from 0.25 to 1" in refused(capsys, *flags, "--overlap", "2")


def test_tables_and_rules_for_people(capsys: pytest.CaptureFixture):
    flags = ("--model", "mixtral-8x7b", "--hardware", "h200", "--batch", "1", "4096")
    assert main(["plan", *flags, "--price-per-hour", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("mixtral-8x7b on 1 x NVIDIA H200 SXM 141GB")
    assert "! 4096" in shown, "caches do not fit"
    assert "acceptance of eagle is assumed: gpt-oss-120b" in shown
    assert "…" not in shown, "nothing is cut off"
    assert main(["plan", *flags, "--rules"]) == 0
    rules = capsys.readouterr().out
    assert "The best number of drafts is 4 to 6." in rules
    assert "(1 - .75^6) / .25 = 3.29 tokens" in rules
    assert rules.count("does not hold: ") >= 3


def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture):
    flags = ("--model", "olmoe-1b-7b", "--hardware", "a100", "--batch", "1", "8", "64", "--no-trees")
    plan(capsys, *flags, "--plot", str(tmp_path / "p.svg"))
    drawn = (tmp_path / "p.svg").read_text()
    assert drawn.startswith("<?xml") or "<svg" in drawn
    assert "a picture ends in .png, .svg, .pdf" in refused(capsys, *flags, "--plot", str(tmp_path / "p.txt"))
    assert "make it first" in refused(capsys, *flags, "--plot", str(tmp_path / "none" / "p.png"))


def test_a_length_has_one_color_in_all_panels():
    matplotlib = pytest.importorskip("matplotlib.figure")
    question, _ = question_of(PlanArgs(model="qwen3-30b-a3b", hardware="h200"))
    plans = make_plan(question, (1, 4, 16))
    colors: dict[str, set[str]] = {}
    for panel in (partial(plan_plot._speed, plans=plans), *(
        partial(draw, question=question, plans=plans) for draw in (plan_plot._efficiency, plan_plot._experts)
    )):  # fmt: skip
        axes = matplotlib.Figure().subplots()
        panel(axes)
        for line in axes.get_lines():
            colors.setdefault(str(line.get_label()), set()).add(line.get_color())
    assert {"plain decoding", "K = 1", "K = 7", "best chain or tree"} <= colors.keys()
    assert all(len(few) == 1 for few in colors.values()), colors
    assert len(set.union(*colors.values())) == len(colors)


def test_mistakes(capsys: pytest.CaptureFixture):
    assert "nor one of deepseek-v3," in refused(capsys, "--model", "gpt-5", "--hardware", "h200")
    assert "known are a100, a100-40gb" in refused(capsys, "--model", "qwen3-8b", "--hardware", "tpu")
    assert "either --hardware" in refused(capsys, "--model", "qwen3-8b")
    flags = ("--model", "qwen3-8b", "--hardware", "h200")
    assert "reads up to 40960 tokens" in refused(capsys, *flags, "--context", "50000")
    assert "--price-per-hour must be positive" in refused(capsys, *flags, "--price-per-hour", "0")
    assert "lengths from 1 to 16" in refused(capsys, *flags, "--lengths", "0", "3")
    assert "at least one row" in refused(capsys, *flags, "--batch", "0")


@pytest.fixture
def calibrated(tmp_path: Path) -> Path:
    """A machine on which a step takes 1 ms, and 1 ms more for each position."""
    config = json.loads((ROOT / "configs" / "models" / "olmoe-1b-7b.json").read_text())
    fit = FitRecord({"fixed_s": 1e-3, "position_s": 1e-3}, {}, 0.01, 0.01)
    points = tuple(MeasuredCell(1, k, 100, 1e-3 * (2 + k) + 5e-4 * (k > 0), 0.01, 5e-4 * (k > 0)) for k in (0, 1, 3))
    file = tmp_path / "c.json"
    save_calibration(
        Calibration(
            version=VERSION, model={"name": "olmoe", **digests(config)}, machine={"cpu": "mine", "device": "cpu"},
            versions={}, date="2026-11-21", settings={"drafter": "ngram"}, noise_floor=0.01, points=points,
            overlap=MeasuredOverlap((1,), (1, 4), (((1.0, 0.5),),)), fit=fit, token_count_fit=fit,
        ),
        file,
    )  # fmt: skip
    return file


def test_a_calibration_replaces_the_data_sheet(calibrated: Path, capsys: pytest.CaptureFixture):
    flags = ("--calibration", str(calibrated), "--batch", "1", "--lengths", "1", "3", "--no-trees", "--context", "100")
    found = plan(capsys, "--model", "olmoe-1b-7b", *flags, "--drafter", "ngram", "--acceptance", "0.7")
    (p,) = found["batches"]
    assert found["machine"] == "mine, cpu (calibrated 2026-11-21)"
    assert found["rows_that_fit"] is None
    assert p["plain_s"] == pytest.approx(2e-3)
    one, three = p["chains"]
    assert one["cost"] == pytest.approx((3 + 0.5) / 2)
    assert three["speedup"] == pytest.approx(2.533 / ((5 + 0.5) / 2))
    assert three["low"] == pytest.approx(2.533 / ((5 * 1.02 + 0.5) / 2)), "twice the held-out error"
    assert p["touched"][0] == 8
    assert "measured with another model (olmoe)" in refused(capsys, "--model", "qwen3-8b", *flags)
    assert "leave --mesh, --overlap out" in refused(capsys, "--model", "olmoe-1b-7b", *flags, "--mesh", "expert=2")
    assert "either --hardware" in refused(capsys, "--model", "olmoe-1b-7b", "--hardware", "h200", *flags)


def test_more_and_more_devices(capsys: pytest.CaptureFixture):
    """DeepSeek-V3 fits from 8 H200 on; a step takes 2 exchanges in each of its 58 routed layers, whatever K."""
    asked = ("--model", "deepseek-v3", "--hardware", "h200", "--devices", "16", "4", "8", "--batch", "4")
    found = plan(capsys, *asked, "--lengths", "3", "--no-trees", "--drafter", "mtp")
    four, eight, sixteen = found["devices"]
    assert [four["fits"], eight["fits"], sixteen["fits"]] == [False, True, True]
    assert [x["exchanges"] for x in found["devices"]] == [2 * 58] * 3
    assert all(x["verify_bytes"] == pytest.approx(4 * x["plain_bytes"]) for x in found["devices"])
    assert (four["efficiency"], eight["efficiency"], eight["far_share"]) == (None, 1, 0)
    assert sixteen["far_share"] == pytest.approx(8 / 15), "8 of the 15 others stand in the other node"
    assert [x["batch"]["rows"] for x in found["devices"]] == [16, 32, 64]
    whole = plan(capsys, *asked[:2], "--hardware", "h200x8", "--batch", "32", "--lengths", "3", "--no-trees")
    assert eight["batch"]["best"]["tok_per_s"] == pytest.approx(whole["batches"][0]["best"]["tok_per_s"])
    assert main(["plan", *asked]) == 0
    assert "e16" in capsys.readouterr().out
    assert "give --hardware without a count" in refused(capsys, *asked[:2], "--hardware", "h200x8", "--devices", "8")
    assert "goes without" in refused(capsys, *asked, "--mesh", "expert=8")
    assert "one --batch, rows per device" in refused(capsys, *asked, "--batch", "1", "2")


def test_servers_whose_network_is_unknown(capsys: pytest.CaptureFixture):
    assert "says network_gb_per_s" in refused(capsys, "--model", "mixtral-8x7b", "--hardware", "l40sx16")
