"""A layer of multi-token prediction is trained, goes on where it stopped, and drafts without changing a text."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoint.files.stream import TensorFiles, TensorName
from jaxspec.checkpoint.heads.directory import load_head
from jaxspec.checkpoint.heads.prediction import MTP_WEIGHTS
from jaxspec.checkpoint.load.model import load_model, load_mtp
from jaxspec.checkpoint.names.known import known_tables
from jaxspec.cli.main import main
from jaxspec.draft.hybrid import Hybrid
from jaxspec.draft.mtp_drafter import MtpHeads
from jaxspec.errors import CheckpointError, ConfigError
from jaxspec.models.mtp import Mtp
from jaxspec.nn.policy import make_policy
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from jaxspec.shapes import Params
from jaxspec.train import target
from jaxspec.train.data import load_corpus
from jaxspec.train.head_run import make_run
from jaxspec.train.run import train, write_features
from jaxspec.train.run_log import read_metrics
from jaxspec.train.settings import RunSettings, load_run_settings
from jaxspec.train.target import read_headers
from tests.oracle.conftest import SharedPrograms
from tests.unit.serve.tiny_model import write_tiny_model

GOLDEN = Path(__file__).parents[2] / "golden"
EXACT = make_policy("float32")
CONFIG = """
target = "{target}"
out = "{out}"
head = {{kind = "mtp"}}
data = {{train = ["{data}"], held_out_fraction = 0.2, length = 12}}
train = {{steps = 12, rows = 2, save_every = 3, log_every = 1, compute_dtype = "float32", target_dtype = "float32"}}
optimizer = {{warmup = 1, learning_rate = 1e-2, schedule = "constant", clip = 1.0}}
loss = {{kind = "lk_hybrid", rounds = 3, decay = 0.6}}
evaluation = {{every = 100, prompts = 2, prompt_tokens = 6, new_tokens = 4, lengths = [2], temperatures = [0.0]}}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two targets, with and without a layer of their own, data, and a config."""
    folder = tmp_path_factory.mktemp("mtp")
    (folder / "target").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "glm4_moe" / name, folder / "target")
    write_tiny_model(folder / "bare")
    rng = np.random.default_rng(0)
    records = [{"token_ids": rng.integers(1, 30, 10).tolist(), "prompt_length": 2} for _ in range(10)]
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    names = {"target": folder / "target", "out": folder / "run", "data": folder / "data.jsonl"}
    (folder / "run.toml").write_text(CONFIG.format(**names))
    return folder


def settings_of(place: Path, *changes: str) -> RunSettings:
    return load_run_settings(str(place / "run.toml"), changes)


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    settings = settings_of(place)
    train(settings, Path(settings.target))
    return place / "run"


def own_layer(directory: Path) -> tuple[Mtp, Params]:
    return load_mtp(directory, load_model(directory, EXACT).net)


def load(place: Path, directory: Path, name: str = "target") -> Params:
    return load_head(directory, load_model(place / name, EXACT).net.arch, EXACT).params


def differences(one: Params, other: Params) -> float:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32)).max()) for a, b in pairs)


def test_the_loss_falls_from_the_target_s_own_layer(place: Path, trained: Path):
    entries = read_metrics(trained)
    losses = [entry["loss"] for entry in entries]
    assert max(losses[-3:]) < 0.7 * losses[0], losses
    assert {"accuracy_0", "accuracy_2", "simulated_length"} <= set(entries[0])
    again = settings_of(
        place, "optimizer.learning_rate=1e-30", "train.steps=1", f"out={place / 'still'}", "data.held_out_fraction=0"
    )
    train(again, Path(again.target))
    arch = load_model(place / "target", EXACT).net.arch
    still, moved = (load_head(place / name / "last", arch, EXACT).params for name in ("still", "run"))
    assert differences(still, own_layer(place / "target")[1]) == 0
    assert differences(moved, own_layer(place / "target")[1]) > 1e-3


def test_some_tokens_alone_are_learned_and_drafted(place: Path, trained: Path):
    """The losses are over the map's tokens, and acceptance is measured with it."""
    np.save(place / "map.npy", np.arange(1, 12))
    out = place / "some"
    changes = (f"loss.token_map={place / 'map.npy'}", f"out={out}", "train.steps=2", "evaluation.every=1")
    settings = settings_of(place, *changes)
    train(settings, Path(settings.target))
    first = next(entry for entry in read_metrics(out) if "loss" in entry)
    assert 0 < first["loss"] < read_metrics(trained)[0]["loss"], "fewer tokens are told apart"
    arch, weights = load_model(place / "target", EXACT).net.arch, load_file(out / "last" / MTP_WEIGHTS)
    assert load_head(out / "last", arch, EXACT).ids_W is None
    assert not any("lm_head" in name or "head.weight" in name for name in weights)
    with pytest.raises(ConfigError, match=r"loss.token_map: .*nothing\.npy cannot be read"):
        train(settings_of(place, *changes, f"loss.token_map={place / 'nothing.npy'}"), Path(settings.target))
    small = 'head={kind="draft_model", layers=1, hidden_size=8, intermediate_size=8}'
    train(settings_of(place, *changes, small, f"out={place / 'small'}"), Path(settings.target))
    assert next(entry for entry in read_metrics(place / "small") if "loss" in entry)["loss"] < np.log(20)
    assert any("acceptance_length" in name for entry in read_metrics(place / "small") for name in entry)
    eagle = 'head={kind="eagle3", taps=[1, 2]}'
    with pytest.raises(ConfigError, match="draft through the target's vocabulary product alone"):
        train(settings_of(place, *changes, eagle, f"out={place / 'other'}"), Path(settings.target))


class _Killed(Exception):
    pass


def test_killed_and_started_again_it_ends_with_the_same_parameters(place: Path, trained: Path):
    def killing(entry: Any) -> None:
        if entry["step"] == 5 and "loss" in entry:
            raise _Killed

    settings = settings_of(place, f"out={place / 'again'}")
    with pytest.raises(_Killed):
        train(settings, Path(settings.target), killing)
    train(settings, Path(settings.target))
    files = [TensorFiles.of(place / name / "last") for name in ("run", "again")]
    assert set(files[0]) == set(files[1])
    for name in files[0]:
        np.testing.assert_array_equal(files[0][name], files[1][name])


def test_the_directory_has_published_names_and_says_what_it_is(place: Path, trained: Path):
    best = trained / "best"
    assert {file.name for file in best.iterdir()} == {"config.json", MTP_WEIGHTS, "training.json"}
    arch = load_model(place / "target", EXACT).net.arch
    names = {name for rule in known_tables()["glm4_moe"].mtp_rules(arch) for name in rule.hub}
    there = set(TensorFiles.of(best))
    assert there == {name for name in names if name in TensorFiles.of(place / "target")}
    assert "model.layers.3.eh_proj.weight" in there
    assert load_head(best, arch, EXACT).kind == "mtp"
    assert json.loads((best / "training.json").read_text())["target"]["name"] == "target"


SETTINGS = {"dtype": "float32", "max_model_len": 48, "max_num_seqs": 2, "max_logprobs": 0, "prefill_buckets": (8,)}


@pytest.mark.parametrize("method", ["mtp", "hybrid"])
def test_it_drafts_without_changing_a_text(place: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, method: str):
    monkeypatch.setattr("jaxspec.serve.engine.Programs", SharedPrograms)
    prompts, texts = [[5, 9, 3, 30, 5, 9, 3], [8]], []
    params = [SamplingParams(temperature=t, seed=3, max_tokens=14, ignore_eos=True) for t in (0.0, 0.8)]
    for config in (None, {"method": method, "model": str(trained / "best"), "num_speculative_tokens": 3}):
        llm = LLM(place / "target", speculative_config=config, **SETTINGS)
        texts.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
    assert texts[0] == texts[1]
    drafter = llm.engine.drafter
    drafter = drafter.other if isinstance(drafter, Hybrid) else drafter
    assert isinstance(drafter, MtpHeads)
    norms = [p["params"]["mtp_0"]["embed_norm_D"] for p in (drafter.params, load(place, trained / "best"))]
    assert differences(*norms) == 0


def test_inspect_recognizes_it(place: Path, trained: Path, capsys: pytest.CaptureFixture[str]):
    argv = ["inspect", str(trained / "best"), "--target"]
    assert main([*argv, str(place / "target")]) == 0
    said = capsys.readouterr().out
    assert "trained for target by jaxspec" in said
    assert "jaxspec loads it" in said
    assert main([*argv, str(place / "bare")]) == 1
    assert "family glm4_moe, the target's is qwen2_moe" in " ".join(capsys.readouterr().out.split())


def test_it_can_be_copied_beside_the_shards_of_its_target(place: Path, trained: Path, tmp_path: Path):
    """The index says which file counts, so it is what has to name the new one."""
    whole = tmp_path / "whole"
    shutil.copytree(place / "target", whole)
    (whole / "model.safetensors").rename(whole / "model-00001-of-00001.safetensors")
    shutil.copy(trained / "best" / MTP_WEIGHTS, whole)
    index = dict.fromkeys(TensorFiles.of(place / "target"), "model-00001-of-00001.safetensors")
    index |= dict.fromkeys(TensorFiles.of(trained / "best"), MTP_WEIGHTS)
    (whole / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    net, params = own_layer(whole)
    assert differences(params, load_head(trained / "best", net.arch, EXACT).params) == 0


def test_it_is_exported_in_bfloat16_under_the_same_names(place: Path, trained: Path, tmp_path: Path, capsys: Any):
    best = trained / "best"
    assert main(["export", str(best), str(tmp_path / "out")]) == 0
    one, other = TensorFiles.of(best), TensorFiles.of(tmp_path / "out")
    assert set(one) == set(other)
    assert {str(other.dtype(TensorName(name))) for name in other} == {"bfloat16", "float32"}
    bias = "model.layers.3.mlp.gate.e_score_correction_bias"
    np.testing.assert_array_equal(one[bias], other[bias])
    assert differences(load(place, tmp_path / "out"), load(place, best)) < 0.02
    assert main(["export", str(best), str(tmp_path / "no"), "--format", "eagle3"]) == 2
    assert "the eagle3 format has no layers of multi-token prediction" in capsys.readouterr().err


@pytest.mark.slow
def test_a_target_without_a_layer_gets_a_new_one(place: Path, tmp_path: Path):
    short = [f"target={place / 'bare'}", "data.held_out_fraction=0", "train.rows=1"]
    settings = settings_of(place, *short, f"out={tmp_path / 'new'}", "train.steps=2")
    train(settings, Path(settings.target))
    last = tmp_path / "new" / "last"
    assert "model.layers.1.mlp.experts.0.down_proj.weight" in TensorFiles.of(last)
    head, still = f'head={{kind="mtp", start="{last}"}}', "optimizer.learning_rate=1e-30"
    further = settings_of(place, *short, f"out={tmp_path / 'more'}", "train.steps=1", head, still)
    train(further, Path(further.target))
    assert differences(*(load(place, tmp_path / name / "last", "bare") for name in ("new", "more"))) == 0


@pytest.mark.slow
def test_a_start_at_random_is_another_layer(place: Path):
    made = []
    for random in ("true", "false"):
        settings = settings_of(place, f'head={{kind="mtp", from_target={random}}}', "data.held_out_fraction=0")
        corpus = load_corpus(settings.data, None, 96)
        made.append(make_run(settings, read_headers(settings, Path(settings.target)).load(), corpus).init())
    assert differences(made[0], own_layer(place / "target")[1]) == 0
    assert differences(*made) > 1e-3


def test_without_the_tensors_it_says_how_to_start(place: Path, tmp_path: Path):
    lacking = tmp_path / "lacking"
    shutil.copytree(place / "target", lacking)
    whole = load_file(lacking / "model.safetensors")
    save_file({n: x for n, x in whole.items() if "layers.3." not in n}, lacking / "model.safetensors")
    settings = settings_of(place, f"target={lacking}", f"out={tmp_path / 'out'}")
    with pytest.raises(CheckpointError, match=r"tensors are missing.*from_target = false starts the layer at random"):
        train(settings, Path(settings.target))


def test_from_cached_features_the_targets_layers_are_not_loaded(place: Path, tmp_path: Path, monkeypatch):
    read, filled = [], target.fill
    monkeypatch.setattr(target, "fill", lambda plan, *rest: read.append(sorted(plan.leaves)) or filled(plan, *rest))
    change = ["data.held_out_fraction=0", "train.steps=2", "features.dtype=float32"]
    losses = {}
    for name, more in (("online", []), ("cached", [f"features.cache={tmp_path / 'features'}"])):
        settings = settings_of(place, *change, f"out={tmp_path / name}", *more)
        if more:
            write_features(settings, Path(settings.target))
        train(settings, Path(settings.target))
        losses[name] = [entry["loss"] for entry in read_metrics(tmp_path / name)]
    assert losses["online"] == losses["cached"]
    whole, also_whole, outside = read
    assert whole == also_whole
    assert outside == ["embed_VD", "head_DV", "norm_D"]
