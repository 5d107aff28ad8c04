"""Two machines of eight GPUs: a model's step compiles, its experts are exchanged there and back, its sizes add up."""

import json
from typing import Any

import pytest

from jaxspec.aot.programs import shortened
from jaxspec.cli import main as cli
from jaxspec.errors import ConfigError
from jaxspec.inspect import per_device as sizes
from jaxspec.inspect.model_cost import model_cost
from jaxspec.inspect.per_device import per_device
from jaxspec.perf.cost import Mesh
from jaxspec.perf.device_memory import memory
from scripts.house_report import ROOT

ROWS, CONTEXT = 64, 8192


def config(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "configs" / "models" / f"{name}.json").read_text())


@pytest.mark.slow
@pytest.mark.served
def test_two_exchanges_per_expert_layer_of_sixteen_devices_and_bytes_by_hand():
    """DeepSeek-V3 at full width, two layers of it: one with experts, of which each device holds sixteen."""
    small = shortened(config("deepseek-v3"), 2)
    found = per_device(
        small, "h200x16", rows=ROWS, capacity=CONTEXT, transport="ragged", drafts=5, wanted=("plain", "ngram")
    )
    plain, six = found["programs"]["plain"], found["programs"]["ngram"]
    assert plain["exchanges"] == six["exchanges"] == 2
    assert plain["collectives"] == six["collectives"], "whatever is verified"
    # Counts of rows that go ahead of the exchange; and whether rows go on and the loop does, and in branches that
    # greedy rows do not take, whether some row is sampled otherwise, and truncated.
    assert plain["collectives"] == {"all-gather": 1, "all-reduce": 4}
    assert (found["mesh"]["expert"], found["compiled_layers"]) == (16, 2)
    cost = model_cost(small, name="deepseek-v3")
    by_hand = memory(cost, room_bytes=1e12, rows=ROWS, context=CONTEXT, mesh=Mesh(expert=16)).by_part
    weights = sum(size for part, size in by_hand.items() if part not in ("caches", "buffers", "multi-token prediction"))
    assert found["weights"] == pytest.approx(weights, rel=0.01)
    assert found["caches"] == pytest.approx(by_hand["caches"], rel=0.05), "blocks of 128, and room for a prefill"
    assert found["temp"] < 1e9
    assert found["fits"]
    assert found["total"] == found["weights"] + found["caches"] + found["state"] + found["temp"]


def test_fewer_layers_of_the_same_width():
    small = shortened(config("deepseek-v4-flash"), 4)
    assert small["num_hidden_layers"] == 4
    assert small["compress_ratios"] == [0, 0, 4, 128, 0], "the last one is of the layer that predicts"
    assert shortened(config("deepseek-v3"), 2)["first_k_dense_replace"] == 1
    with pytest.raises(ConfigError, match="layers: from 1 to 61, got 62"):
        shortened(config("deepseek-v3"), 62)


def test_the_table_and_its_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    big = {"arguments": 10**9, "temp": 10**8, "weights": 90 * 10**9, "caches": 10**9, "state": 2 * 10**9}
    entry = {"positions": 1, "bytes": big, "compile_s": 1.0, "collectives": {
        "ragged-all-to-all": {"per_step": 116}, "all-reduce": {"per_step": 3},
    }}  # fmt: skip

    def look(_: str, **asked: Any) -> dict[str, Any]:
        same = {name: asked[name] for name in ("transport", "rows", "capacity", "drafts")}
        return {"mesh": {"data": 1, "expert": asked["devices"]}, **same, "programs": {"plain": entry}}

    monkeypatch.setattr(sizes.process, "run", look)
    asked = ["sizes", "deepseek-v3", "--hardware", "h100x8", "h200x8", "--programs", "plain"]
    assert cli.main([*asked, "--json"]) == 1, "one of them does not fit"
    small, large = json.loads(capsys.readouterr().out)
    assert (small["fits"], large["fits"]) == (False, True)
    assert small["total"] == 92 * 10**9 + 10**8
    assert small["programs"]["plain"]["exchanges"] == 2
    assert small["programs"]["plain"]["collectives"] == {"all-reduce": 3}
    assert cli.main(asked) == 1
    table = " ".join(capsys.readouterr().out.split())
    assert "deepseek-v3 8 H100 e8 90 GB 1 GB 1 GB 100 MB 92.1 GB 73.6 GB no" in table
    assert "plain 61 2 3 all-reduce" in table


def test_an_update_in_the_table_and_its_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    asked: dict[str, Any] = {}

    def look(_: str, **given: Any) -> dict[str, Any]:
        asked.update(given)
        size = {"weights": 60 * 10**9, "state": 13 * 10**9, "temp": 20 * 10**9, "results": 420, "arguments": 10**9}
        sums = {"all-reduce": {"per_step": 7, "bytes_per_step": 10**9}}
        shape = {"mesh": {"expert": 16}, "rows": 16, "length": 2048, "rounds": 7}
        return {**shape, "collectives": sums, "compile_s": 1.0, **size}

    monkeypatch.setattr(sizes.process, "run", look)
    flags = ["sizes", "deepseek-v3", "--hardware", "h200x16", "--train", "eagle3", "--set", "train.rows=16"]
    assert cli.main([*flags, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["total"] == 93 * 10**9 + 420
    assert found["programs"]["train"]["collective_bytes"] == {"all-reduce": 10**9}
    assert asked["changes"] == ["train.rows=16", "mesh.expert=16"]
    assert cli.main(flags) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "an update, 16 rows of 2048 tokens together, 7 rounds; bytes of one device" in table
    assert "60 GB 0 B 13 GB 20 GB 93 GB 130 GB yes" in table
    assert "train 61 0 7 all-reduce" in table
    for wrong, words in (
        (["--programs", "plain"], "--train compiles an update as its config says; leave --programs out"),
        (["--mesh", "expert=8"], "mesh: it has 8 devices, h200x16 has 16"),
    ):
        assert cli.main([*flags, *wrong]) == 2
        assert words in capsys.readouterr().err
    assert cli.main([*flags[:4], "--set", "train.rows=16"]) == 2
    assert "--set changes the config of --train" in capsys.readouterr().err
