"""Whole steps and prefills of published models compile for H100s and H200s, and do nothing but their work."""

import json
from typing import Any

import pytest

from jaxspec.aot import process
from jaxspec.aot.head_programs import KINDS
from jaxspec.errors import ConfigError
from scripts.house_report import ROOT

pytestmark = pytest.mark.served

MIB = 1 << 20
MOST_SHARED_BYTES = 232448
ROWS, CAPACITY = 4, 4096
# What happens once per step and reads or writes the logits of all positions is no copy of weights or caches.
LOGITS = "f32[4,4,"


def compiled(name: str, program: str, **setting: Any) -> dict[str, Any]:
    config = json.loads((ROOT / "configs" / "models" / f"{name}.json").read_text())
    setting = {"rows": ROWS, "capacity": CAPACITY, "wanted": [program], **setting}
    found = process.run("jaxspec.aot.program_report:report_programs", config=config, **setting)
    return found["programs"][program]


def weight_or_cache_copies(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What is written again in every layer, or is as big as a layer's weights or cache."""
    often = [entry for entry in found["copies"] if entry["times"] > 1 and not entry["optional"]]
    big = [entry for entry in found["copies"] if entry["bytes"] > 16 * MIB and not entry["result"].startswith(LOGITS)]
    return often + big


# Layers, and launches per layer: norm, product, heads to cache, attention and its pieces, product, norm, router, route,
# gate and up, down, sum of the choices, and the loop's counter. A layer of a short window has no pieces, and two turn
# together, so that gpt-oss has 12.
STEPS = {"qwen3-30b-a3b": (48, 13), "gpt-oss-20b": (24, 12), "gpt-oss-120b": (36, 12), "mixtral-8x7b": (32, 13)}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_a_step_reads_its_weights_where_they_lie(name: str):
    layers, each = STEPS[name]
    found = compiled(name, "ngram", gpu="h100" if name != "gpt-oss-120b" else "h200")
    sizes, graphs = found["bytes"], found["graphs"]
    assert weight_or_cache_copies(found) == []
    assert sizes["temp"] < 96 * MIB
    assert sizes["aliased"] >= sizes["caches"], "the caches are written in place"
    for kernel in ("heads_to_cache", "verify_attention", "route", "experts_gate_up", "experts_down"):
        assert found["kernels"][kernel] == layers
    assert found["kernels"]["add_norm"] == 2 * layers + 1, "before attention and experts, and before the head"
    assert "sort_rows" not in found["kernels"], "the router leaves rows sorted"
    assert found["kernels"]["few_rows_dense"] == 3 * layers + 1, "into attention, out of it, router; and the head"
    assert found["launches"]["per_step"] <= each * layers + 40
    assert found["launches"]["per_turn"] == 0, "no loop over the cache outside of kernels"
    assert graphs["launches_outside"] <= 4 + 3, "three around the question whether some row has a draft"
    assert graphs["per_step"] <= layers + 5
    assert graphs["host_waits"] == 1 + 3, "for the loop over steps; before and after the drafts, and once for none"
    assert found["collectives"] == {}
    assert {kernel: size for kernel, size in found["spills"].items() if kernel in found["shared_bytes"]} == {}
    assert max(found["shared_bytes"].values()) <= MOST_SHARED_BYTES


def test_plain_decoding_has_every_kernel():
    """XLA lost them, and crashed, beside a call that returns an array without entries: the drafts of a plain step."""
    found = compiled("gpt-oss-20b", "plain")
    for kernel in ("heads_to_cache", "verify_attention", "route", "experts_gate_up", "experts_down"):
        assert found["kernels"][kernel] == 24
    assert found["launches"]["per_step"] <= 12 * 24 + 30
    assert found["launches"]["by_group"]["experts"] == 3 * 24, "route, gate and up, down"
    assert found["graphs"]["host_waits"] == 1, "once per step, for the loop over steps: truncation has none"
    assert "sort" not in found["kernels"]


@pytest.mark.slow
def test_latent_attention_on_one_device_copies_no_weight():
    """GLM-4.7-Flash: 16 of a layer's 20 launches are kernels, six of them products of few rows."""
    found = compiled("glm-4.7-flash", "plain", gpu="h200")
    for kernel, each in {"latents_to_cache": 1, "heads_dense": 2, "verify_attention": 1, "few_rows_dense": 6}.items():
        assert found["kernels"][kernel] == each * 47
    assert found["launches"]["per_step"] <= 20 * 47 + 30
    assert found["graphs"]["host_waits"] == 1
    assert found["spills"] == {}
    assert weight_or_cache_copies(found) == []


# Attention kernels: two layers of the target; three rounds of a layer, five layers over a block, four layers that
# observe and draft on masks at once, or two layers of a draft model that draft three times and observe.
HEADS = {
    "eagle": 5, "eagle3": 5, "shared_expert": 5, "medusa": 2, "peagle": 10, "dflash": 7, "dflash2": 7, "dspark": 7,
    "draft_model": 10,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
def test_a_step_with_a_head_of_true_size_copies_no_weight_and_waits_once(kind: str):
    assert set(HEADS) == set(KINDS)
    found = compiled("qwen3-30b-a3b", kind, layers=2)
    assert weight_or_cache_copies(found) == []
    assert found["graphs"]["host_waits"] == 1
    assert found["launches"]["per_turn"] == 0
    assert found["bytes"]["temp"] < 64 * MIB
    assert found["kernels"]["verify_attention"] == HEADS[kind]
    assert found["kernels"].get("loop_dynamic_update_slice_fusion", 0) <= 16, "all rows' keys are written at once"
    assert {kernel: size for kernel, size in found["spills"].items() if kernel in found["shared_bytes"]} == {}


@pytest.mark.slow
def test_recurrent_layers_run_in_one_kernel_each_and_wait_for_nobody():
    found = compiled("qwen3-next-80b-a3b", "ngram", gpu="h200", rows=1)
    assert found["kernels"]["recurrent_steps"] == 36
    assert found["graphs"]["host_waits"] == 1 + 3, "none in a layer, however many drafts run once more"
    assert found["launches"]["per_turn"] == 0
    assert found["launches"]["per_step"] <= 1800
    assert {kernel: size for kernel, size in found["spills"].items() if kernel in found["shared_bytes"]} == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layers", "indexed", "gathered"), [("deepseek-v3.2", 3, 3, 3), ("deepseek-v4-flash", 6, 2, 4)]
)
def test_nobody_waits_for_an_indexer(name: str, layers: int, indexed: int, gathered: int):
    """Of DeepSeek-V4-Flash two layers have an indexer, two see all entries, and two a window alone."""
    found = compiled(name, "plain", gpu="h200", layers=layers, capacity=8192)
    for kernel in ("index_scores", "choose_places"):
        assert found["kernels"][kernel] == indexed
    for kernel in ("chosen_attention", "chosen_attention_pieces"):
        assert found["kernels"][kernel] == gathered
    assert found["launches"]["per_turn"] == 0, "no loop over the cache outside of kernels"
    assert found["graphs"]["host_waits"] == 1, "for the loop over steps"
    ours = ("index_scores", "choose_places", "chosen_attention")
    assert {kernel: size for kernel, size in found["spills"].items() if kernel.startswith(ours)} == {}
    assert max(found["shared_bytes"].values()) <= MOST_SHARED_BYTES


@pytest.mark.slow
def test_a_prefill_writes_its_cache_in_place():
    found = compiled("qwen3-30b-a3b", "prefill", bucket=256)
    assert found["bytes"]["aliased"] >= found["bytes"]["caches"]
    assert found["bytes"]["temp"] < 256 * MIB
    assert weight_or_cache_copies(found) == []
    assert found["graphs"]["host_waits"] == 0


@pytest.mark.slow
# Around Mosaic's attention, which an H200 takes by itself, XLA lays out what goes in and what comes out.
@pytest.mark.parametrize(("kernels", "launches"), [("triton", 1660), ("auto", 1910)])
def test_eight_devices_compute_their_own_experts(kernels: str, launches: int):
    found = compiled("deepseek-v3", "mtp", gpu="h200", devices=8, kernels=kernels)
    sizes, graphs = found["bytes"], found["graphs"]
    assert sizes["arguments"] < 112e9, "of the 141e9 of one device"
    assert sizes["aliased"] >= sizes["caches"]
    assert sizes["temp"] < 96 * MIB
    runs = 58 + 3  # of expert layers: the model's, and of the layer that drafts two cells and one observation
    assert {name: kind["per_step"] for name, kind in found["collectives"].items()} == {"all-reduce": runs}
    for kernel in ("route", "experts_gate_up", "experts_down", "sort_rows"):
        assert found["kernels"][kernel] == runs
    for kernel, each in (("latents_to_cache", 1), ("heads_dense", 2), ("verify_attention", 1)):
        assert found["kernels"][kernel] == each * (61 + 3)
    assert found["launches"]["per_step"] <= launches
    assert graphs["host_waits"] == 1
    assert {kernel: size for kernel, size in found["spills"].items() if kernel in found["shared_bytes"]} == {}
    assert weight_or_cache_copies(found) == []


@pytest.mark.slow
def test_ragged_exchange_goes_there_and_back_once_per_layer():
    """Two layers of Qwen3-30B-A3B over eight H100s, each with a row of its own; one position, and six."""
    config = json.loads((ROOT / "configs" / "models" / "qwen3-30b-a3b.json").read_text()) | {"num_hidden_layers": 2}
    found = process.run(
        "jaxspec.aot.program_report:report_programs", config=config, rows=8, capacity=1024, transport="ragged",
        devices=8, drafts=5, kernels="xla", wanted=["plain", "ngram"],
    )["programs"]  # fmt: skip
    one, six = (found[name]["collectives"] for name in ("plain", "ngram"))
    assert one["ragged-all-to-all"]["per_moe_layer"] == six["ragged-all-to-all"]["per_moe_layer"] == 2
    assert {name: kind["per_step"] for name, kind in one.items()} == {n: kind["per_step"] for n, kind in six.items()}
    assert "all-to-all" not in one
    sent = [kind["ragged-all-to-all"]["bytes_per_step"] for kind in (one, six)]
    assert sent[1] == pytest.approx(6 * sent[0], rel=0.01)
    own = found["ngram"]["bytes"]
    assert own["aliased"] >= own["caches"], "the caches are written in place"


def test_what_cannot_be_compiled_is_said_in_one_line():
    config = json.loads((ROOT / "configs" / "models" / "qwen3-8b.json").read_text())
    for wrong, words in (({"gpu": "v100"}, "described; .*h100, h200"), ({"wanted": ["mtp"]}, "mtp are not known")):
        with pytest.raises(ConfigError, match=words):
            process.run("jaxspec.aot.program_report:report_programs", config=config, **wrong)
