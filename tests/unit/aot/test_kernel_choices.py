"""What is said of a GPU that is not there is what it would choose itself."""

import json

from jaxspec.aot.kernel_choices import kernel_choices
from jaxspec.aot.programs import ProgramSettings
from scripts.house_report import ROOT


def test_what_was_measured_on_a_card_counts_for_it_alone():
    config = json.loads((ROOT / "configs" / "models" / "qwen3-30b-a3b.json").read_text())
    chosen = {}
    for gpu in ("h100", "h200"):
        choices = kernel_choices(ProgramSettings(config), ("plain", "prefill"), gpu=gpu)
        for name, entries in choices.items():
            (found,) = [entry for entry in entries if entry["op"] == "verify_attention"]
            chosen[gpu, name] = found["implementation"], found["reason"].split(":")[0]
    triton = "triton", "a GPU, and the kernel covers this case"
    assert chosen.pop(("h200", "prefill")) == ("mosaic", "measured on 2026-11-28")
    assert chosen == {("h100", "plain"): triton, ("h100", "prefill"): triton, ("h200", "plain"): triton}
