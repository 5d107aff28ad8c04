"""``jaxspec inspect --balance``: what is counted, what placements make of it, what is written and refused."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.checkpoint.load.model import load_model
from jaxspec.cli.main import main
from jaxspec.inspect.balance import balance, placement_for
from jaxspec.inspect.measured_load import MeasuredLoad, compared
from jaxspec.inspect.text_routes import routed_experts
from jaxspec.models.transformer import teacher_forced
from jaxspec.nn.policy import policy_for
from jaxspec.perf.expert_counts import ExpertLoad, Verifications, counted, read_load
from jaxspec.perf.expert_placement import load_placement
from tests.unit.serve.tiny_model import write_tiny_model

PROMPTS, TOKENS, DRAFTS = ([5, 6, 7, 5, 6, 7, 5], [9, 11, 9, 11, 9], [30, 31]), 6, 2
SPECULATION = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("balance")
    write_tiny_model(folder / "tiny")
    config = json.loads((folder / "tiny" / "config.json").read_text())
    (folder / "tiny" / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    lines = [json.dumps({"prompt_token_ids": ids}) for ids in PROMPTS]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


def inspect(folder: Path, *flags: Any) -> int:
    return main(["inspect", str(folder / "tiny"), "--balance", *map(str, flags)])


@pytest.fixture(scope="module")
def recorded(folder: Path) -> ExpertLoad:
    flags = ["--prompts", folder / "prompts.jsonl", "--tokens", TOKENS, "--rows", 2, "--dtype", "float32"]
    flags += ["--speculative-config", json.dumps(SPECULATION), "--record", folder / "load.json"]
    assert inspect(folder, *flags, "--devices", 2, "--output", folder / "placement.json") == 0
    return read_load(folder / "load.json")


def test_committed_positions_are_those_of_plain_decoding(folder: Path, recorded: ExpertLoad):
    """Greedy text by teacher forcing chooses what verifications chose for what became text, in every layer."""
    model = load_model(folder / "tiny", policy_for("float32", "cpu"))
    forced = jax.jit(lambda params, token, at: teacher_forced(model.net, params, token, at)[0])
    place_1T, texts = np.arange(16, dtype=np.int32)[None], []
    for prompt in PROMPTS:
        ids = list(prompt)
        while len(ids) < len(prompt) + TOKENS:
            token_1T = np.zeros((1, 16), np.int32)
            token_1T[0, : len(ids)] = ids
            ids.append(int(np.argmax(forced(model.params, token_1T, place_1T)[0, len(ids) - 1])))
        texts.append(ids)
    routes, experts = routed_experts(model, texts), len(recorded.counts["prompt"][0])
    for kind, first, last in (("prompt", 0, 0), ("committed", -1, -1)):
        cut = [(0, len(p)) if kind == "prompt" else (len(p) + first, len(p) + TOKENS + last) for p in PROMPTS]
        wanted = np.concatenate([np.moveaxis(r, 0, 1)[a:b] for r, (a, b) in zip(routes, cut, strict=True)])
        assert recorded.counts[kind] == counted(wanted, [experts]), kind
        assert recorded.positions[kind] == len(wanted)
    assert 0 < recorded.positions["rejected"] <= DRAFTS * recorded.positions["committed"]


def test_the_placement_is_that_of_the_record(folder: Path, recorded: ExpertLoad, capsys: pytest.CaptureFixture):
    assert load_placement(folder / "placement.json") == placement_for(recorded, 2, 0)
    assert inspect(folder, "--load", folder / "load.json", "--json", "--redundant", 1, "--devices", 5) == 0
    (found,) = json.loads(capsys.readouterr().out)["devices"]
    placements = found["placements"]
    assert [p["slots"] for p in placements.values()] == [15, 15, 15], "12 experts on five devices"
    means = [p["mean"] for p in placements.values()]
    assert means[0] >= means[1] >= means[2] >= 1


def test_what_does_not_fit_is_refused(folder: Path, recorded: ExpertLoad, capsys: pytest.CaptureFixture):
    load = folder / "load.json"
    assert inspect(folder, "--load", load, "--output", folder / "p.json") == 2
    assert "one number of --devices" in capsys.readouterr().err
    other = folder / "other.json"
    other.write_text(load.read_text().replace(recorded.model["config_digest"], "0" * 64))
    assert inspect(folder, "--load", other) == 2
    assert "counts of another model" in capsys.readouterr().err
    other.write_text('{"version": 7}')
    assert inspect(folder, "--load", other) == 2
    assert "version 7, this program reads 1" in capsys.readouterr().err


def test_predictions_are_compared_at_the_same_drafts():
    rng = np.random.default_rng(0)
    expert_VTYA = rng.integers(0, 8, (20, 4, 3, 2)).astype(np.uint16)
    live_VT = np.arange(4)[None] <= rng.integers(0, 4, 20)[:, None]
    seen = Verifications(expert_VTYA, live_VT, np.zeros((20, 4), int), np.arange(20))
    right = compared(seen, expert_VTYA[:, 1:, [0, 2]], (0, 2), [8, 8])
    assert right.by_head == right.by_target
    assert np.sum(right.by_head) == 2 * 2 * live_VT[:, 1:].sum()
    counts = counted(expert_VTYA[live_VT], [8, 8, 8])
    none = ((0,) * 8,) * 3
    kinds: Any = {"prompt": none, "committed": counts, "rejected": none}
    load = ExpertLoad(1, {}, "", (1, 2, 3), {"prompt": 0, "committed": int(live_VT.sum()), "rejected": 0}, kinds)
    found = balance(load, MeasuredLoad(load, seen, right, 1.0), (2, 4), 0, 4)
    for entry in found["predicted"]["devices"]:
        assert entry["contiguous_predicted"] == entry["contiguous"]
        assert entry["balanced_by_prediction"] == entry["balanced"] <= entry["contiguous"]
    assert found["predicted"]["layers"] == [1, 3]
    for entry in found["devices"]:
        assert {*entry["placements"]["balanced"]["batches"]} == {"plain_rows", "rows", "experts", "read"}
