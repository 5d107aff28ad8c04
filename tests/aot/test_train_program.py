"""An update compiled for a GPU that need not be there: what it holds is what was planned, and no weight is copied."""

import pytest

from jaxspec.aot import process
from jaxspec.aot.programs import shortened
from jaxspec.inspect.shipped import model_config
from jaxspec.inspect.train_cost import update_work
from jaxspec.train.memory import plan_memory
from jaxspec.train.settings import load_run_settings

CHANGES = ["train.rows=1", "train.remat=false"]
GIB = 1 << 30


@pytest.mark.slow
@pytest.mark.served
def test_memory_as_planned_whatever_the_depth_and_no_copy_of_a_weight():
    """Qwen3-30B-A3B at full width, four layers and eight of it."""
    config, settings = model_config("qwen3-30b-a3b")[1], load_run_settings("eagle3", CHANGES)
    found = {
        layers: process.run(
            "jaxspec.aot.train_program:report_update", config=shortened(config, layers), wanted="eagle3",
            changes=CHANGES, timeout_s=600,
        )
        for layers in (4, 8)
    }  # fmt: skip
    assert found[8]["temp"] == pytest.approx(found[4]["temp"], rel=0.01), "nothing of a layer of the target is kept"
    for layers, one in found.items():
        plan = plan_memory(update_work(settings, shortened(config, layers)), settings.train, None)
        assert plan.total == pytest.approx(one["arguments"] + one["temp"], rel=0.1)
        assert plan.needed["target"] == one["weights"]
        assert plan.needed["head with optimizer"] == pytest.approx(one["state"], rel=0.001)
        assert one["temp"] < plan.needed["activations"] + 2 * GIB
        # A layer's experts and the products of its attention; the vocabulary's. The head narrows its own weights.
        weights = ("[128,2048,1536]", "[128,768,2048]", "[2048,4,10,128]", "[32,128,2048]", "151936")
        copies = [copy for copy in one["copies"] if "DraftHead" not in copy["where"]]
        assert not [copy for copy in copies if any(shape in copy["result"] for shape in weights)]
