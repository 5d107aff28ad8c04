"""``jaxspec plan --train``: figures by hand, what compiled updates take, what does not fit, mistakes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.cli.main import main
from jaxspec.config import shipped
from jaxspec.inspect import train_cost
from jaxspec.inspect.shipped import model_config
from jaxspec.inspect.train_cost import plan_update, update_flops, update_work
from jaxspec.models.draft_head import DraftHead
from jaxspec.perf.hardware import hardware_of
from jaxspec.train.memory import plan_memory
from jaxspec.train.settings import load_run_settings

QWEN = ("--model", "qwen3-30b-a3b", "--hardware", "h100", "--train", "eagle3")
# Bytes of arguments and temporaries of whole compiled updates: python -m lab.measure_update, see docs/planning.md.
COMPILED = {
    ("qwen3-30b-a3b", "train.rows=1", "train.remat=false"): 62807231500 + 2873466224,
    ("qwen3-30b-a3b", "train.rows=1", "data.length=8192", "train.remat=false"): 62807311372 + 8792774256,
    ("qwen3-30b-a3b", "train.rows=8", "data.length=4096", "train.remat=true"): 62807630860 + 11362589808,
    ("qwen3-30b-a3b", "train.rows=8", "train.micro_rows=4", "data.length=4096", "train.remat=true"): 62807630860
    + 6135895192,
    ("qwen3-30b-a3b", "train.rows=4", "train.remat=false"): 62807311372 + 9639393136,
    ("qwen3-30b-a3b", "train.rows=2", "data.length=4096", "train.remat=true"): 62807311372 + 4130025840,
    ("qwen3-30b-a3b", "train.micro_rows=2", "train.remat=false"): 62807417868 + 5844627096,
    ("qwen3-8b", "train.rows=2", "data.length=4096", "train.remat=false"): 21175991308 + 18475588208,
    ("deepseek-v3", "train.rows=8", "train.remat=false", "mesh.expert=8"): 114516287852 + 14746958448,
    ("deepseek-v3", "train.rows=16", "train.remat=false", "mesh.expert=16"): 73637011820 + 21989736816,
}


def refused(capsys: pytest.CaptureFixture, *flags: str) -> str:
    assert main(["plan", *flags]) == 2
    return capsys.readouterr().err


def planned(capsys: pytest.CaptureFixture, *flags: str, status: int = 0) -> dict[str, Any]:
    assert main(["plan", "--json", *flags]) == status
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("case", COMPILED, ids="-".join)
def test_memory_is_what_compiled_updates_take(case: tuple[str, ...]):
    name, *changes = case
    settings = load_run_settings("eagle3", changes)
    plan = plan_memory(update_work(settings, model_config(name)[1]), settings.train, None)
    assert plan.rows == (settings.train.micro_rows or settings.train.rows)
    assert plan.total == pytest.approx(COMPILED[case], rel=0.1)


def test_memory_of_a_trained_layer_is_what_its_compiled_update_takes():
    """GLM-4.5-Air's with 128 experts; --config mtp --layers 2, whose target is not counted."""
    settings = load_run_settings("mtp", ["train.rows=1", "train.remat=true"])
    plan = plan_memory(update_work(settings, model_config("glm-4.5-air")[1]), settings.train, None)
    assert plan.total - plan.needed["target"] == pytest.approx(28500715020 + 21536004808, rel=0.1)


def test_by_hand(capsys: pytest.CaptureFixture):
    """Qwen3-30B-A3B computes with 3.35 billion parameters per token, of which 0.31 are the vocabulary's."""
    found = planned(capsys, *QWEN, "--set", "train.rows=4", "--set", "train.steps=100")
    tokens, flops = 4 * 2048, found["flops"]
    dense = 48 * (2048 * 40 * 128 + 4096 * 2048 + 2048 * 128) + 48 * 8 * 3 * 2048 * 768
    scores = 48 * 4 * 32 * 128 * 1024
    assert flops["target"] == pytest.approx(tokens * (2 * dense + scores), rel=0.01)
    assert flops["target's vocabulary"] == pytest.approx(tokens * 2 * 2048 * 151936)
    layer = 4096 * 40 * 128 + 4096 * 2048 + 3 * 2048 * 6144
    each = 7 * 3 * (2 * layer + 4 * 32 * 128 * 1024)
    assert flops["head"] == pytest.approx(tokens * (each + 2 * 2 * 3 * 2048 * 2048), rel=0.01)
    assert flops["head's vocabulary"] == pytest.approx(tokens * 7 * 3 * 2 * 2048 * 32000)
    assert found["mfu"] == pytest.approx(sum(flops.values()) / 989.4e12 / found["time_s"])
    assert found["tokens_per_s"] == pytest.approx(tokens / found["time_s"])
    assert found["hours"] == pytest.approx(found["time_s"] * 100 / 3600)
    assert found["time_range_s"][0] < found["time_s"] < found["time_range_s"][1]
    assert found["time_s"] > sum(flops.values()) / (0.75 * 989.4e12)
    assert found["total_bytes"] == sum(found["memory"].values()) <= found["room_bytes"]
    assert found["memory"]["target"] == pytest.approx(61.06e9, rel=0.001)


def test_a_map_of_tokens_counts_alone(capsys: pytest.CaptureFixture, tmp_path: Path):
    """GLM-4.5-Air's layer over 32,768 of its 151,552 tokens: products by hand, memory as it compiles (as above)."""
    np.save(tmp_path / "map.npy", np.arange(32768))
    flags = ("--model", "glm-4.5-air", "--hardware", "h200x4", "--mesh", "expert=4", "--train", "mtp")
    whole = planned(capsys, *flags)
    some = planned(capsys, *flags, "--set", f"loss.token_map={tmp_path / 'map.npy'}")
    places = 8 * 2048
    assert some["flops"]["target's vocabulary"] == pytest.approx(places * 2 * 4096 * 32768)
    assert some["flops"]["head's vocabulary"] == pytest.approx(places * 3 * 2 * 2 * 4096 * 32768)
    assert some["flops"]["head"] == whole["flops"]["head"]
    assert some["time_s"] < whole["time_s"]
    settings = load_run_settings("mtp", ["train.rows=1", "train.remat=true", f"loss.token_map={tmp_path / 'map.npy'}"])
    plan = plan_memory(update_work(settings, model_config("glm-4.5-air")[1]), settings.train, None)
    assert plan.total - plan.needed["target"] == pytest.approx(28500715020 + 21536006856, rel=0.1)


def test_the_words(capsys: pytest.CaptureFixture):
    assert main(["plan", *QWEN]) == 0
    words = " ".join(capsys.readouterr().out.split())
    for said in (
        "an update has 8 rows of 2048 tokens", "target 61.1 GB", "of 73.6 GB that may be used of 80 GB: fits",
        "tokens/s, MFU", "20000 updates:", "assumed: products reach 60% (40% to 75%) of 989.4 TFLOP/s",
    ):  # fmt: skip
        assert said in words
    asked = ("--set", "data.length=8192", "--set", "train.micro_rows=8", "--set", "train.remat=false")
    assert main(["plan", *QWEN, *asked]) == 1
    assert "does not fit; take fewer train.micro_rows, train.remat=true" in " ".join(capsys.readouterr().out.split())


def test_devices_share_the_experts_and_the_rows(capsys: pytest.CaptureFixture):
    flags = ("--model", "deepseek-v3", "--train", "eagle3", "--mesh", "expert=16", "--set", "train.rows=16")
    found = planned(capsys, *flags, "--hardware", "h200x16")
    assert found["memory"]["target"] < 685e9 / 10
    assert found["micro_rows"] == 16
    assert found["time_by_cause_s"]["sums of the vocabulary's gradient"] > 0


def test_mistakes(capsys: pytest.CaptureFixture):
    assert "the mesh has 1 devices, --hardware h100x8 has 8" in refused(
        capsys, "--model", "qwen3-30b-a3b", "--hardware", "h100x8", "--train", "eagle3"
    )
    two = ("--model", "qwen3-30b-a3b", "--train", "eagle3", "--hardware", "h100x3")
    assert "8 rows cannot be split evenly over data = 3" in refused(capsys, *two, "--mesh", "data=3")
    assert "expert=3 does not divide 128 experts" in refused(capsys, *two, "--mesh", "expert=3")
    assert "hardware 'h99' is not known; known are" in refused(capsys, *QWEN, "--hardware", "h99")
    assert "micro_rows must divide rows = 8, got 3" in refused(capsys, *QWEN, "--set", "train.micro_rows=3")
    assert "--train takes --hardware, --mesh, --set and --json; got no --hardware" in refused(
        capsys, "--model", "qwen3-30b-a3b", "--train", "eagle3"
    )
    assert "got --batch, --kv-cache-dtype" in refused(capsys, *QWEN, "--batch", "4", "--kv-cache-dtype", "fp8")
    assert "got --drafter, --rules" in refused(capsys, *QWEN, "--drafter", "mtp", "--rules")
    assert "--set changes the config of --train" in refused(capsys, *QWEN[:4], "--set", "train.rows=3")
    assert "the target and the head alone do not fit" in refused(
        capsys, "--model", "llama-3.3-70b", "--hardware", "h100", "--train", "eagle3"
    )


def test_experts_of_a_head_count_as_often_as_they_are_chosen(capsys: pytest.CaptureFixture):
    """Its memory is that of all, its products are those of what a token goes through."""
    routed = ("--set", "head.num_experts=64", "--set", "head.num_experts_per_tok=4")
    larger = [word.replace("h100", "h200") for word in QWEN]
    dense, sparse = planned(capsys, *larger), planned(capsys, *larger, *routed)
    router = 7 * 3 * 2 * 64 * 2048 * 8 * 2048  # seven rounds of eight rows, forward and both gradients
    assert sparse["flops"]["head"] - dense["flops"]["head"] == pytest.approx(router, rel=0.01)
    name = "head with optimizer"
    more = 15 * (3 * 2048 * 8 * 768) * 4 * 3  # sixteen times the hidden units, float32 with two moments
    assert sparse["memory"][name] - dense["memory"][name] == pytest.approx(more, rel=0.01)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "peagle", "medusa", "dflash", "dspark"])
def test_every_kind_of_head_has_a_plan(kind: str):
    settings = load_run_settings(kind)
    name, config = model_config("qwen3-8b")
    hardware = hardware_of("NVIDIA H200", shipped("hardware"))
    assert hardware is not None, name
    plan = plan_update(settings, config, hardware)
    assert all(value > 0 for value in plan.flops.values())
    assert 0 < plan.mfu < 0.6, "not above what products are assumed to reach"


def test_a_feature_cache_saves_the_target():
    config = model_config("qwen3-30b-a3b")[1]
    found = [load_run_settings("eagle3", changes) for changes in ((), ("features.cache='x'",))]
    work = update_work(found[0], config)
    assert isinstance(work.net, DraftHead)
    model = train_cost.model_cost(config)
    run, cached = (update_flops(work, model, settings) for settings in found)
    assert cached == run | {"target": 0.0}


@pytest.mark.parametrize(
    ("kind", "name"),
    [("NVIDIA H100 80GB HBM3", "H100 SXM5"), ("NVIDIA H100 PCIe", "PCIe"), ("NVIDIA A100-SXM4-40GB", "40GB"),
     ("NVIDIA H200", "H200"), ("NVIDIA GeForce RTX 4090", None), ("cpu", None)],
)  # fmt: skip
def test_cards_are_known_by_what_drivers_call_them(kind: str, name: str | None):
    found = hardware_of(kind, shipped("hardware"))
    assert found is None if name is None else found is not None and name in found.name


def test_a_cpu_has_no_peak():
    assert train_cost.seconds_at_peak(load_run_settings("eagle3"), model_config("qwen3-8b")[1]) == 0
