"""``jaxspec train`` and ``jaxspec plot`` end to end on a tiny target, and every kind of head wired to its loss."""

import hashlib
import io
import json
import re
import shutil
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint.files.fingerprint import fingerprint
from jaxspec.checkpoint.heads.directory import load_head
from jaxspec.checkpoint.load.model import load_model
from jaxspec.cli.main import main
from jaxspec.errors import ConfigError
from jaxspec.nn.policy import make_policy
from jaxspec.train import evaluate
from jaxspec.train.batch import Batch
from jaxspec.train.data import load_corpus
from jaxspec.train.evaluate import best_metric
from jaxspec.train.head_run import make_run
from jaxspec.train.loop import TrainRun
from jaxspec.train.run import train
from jaxspec.train.run_log import read_metrics
from jaxspec.train.run_plot import plot_runs
from jaxspec.train.settings import RunSettings, identity, load_run_settings
from jaxspec.train.target import read_headers
from tests.unit.serve.tiny_model import write_tiny_model

EXACT = make_policy("float32")
CONFIG = """
target = "{target}"
out = "{out}"
head = {{kind = "medusa", heads = 2, draft_vocab_size = 20}}
data = {{train = ["{data}"], held_out_fraction = 0.3, length = 12}}
train = {{steps = 2, rows = 2, save_every = 1, log_every = 1}}
optimizer = {{warmup = 1}}
loss = {{rounds = 2}}
evaluation = {{prompts = 2, prompt_tokens = 6, new_tokens = 4, lengths = [2], temperatures = [0.0, 1.0]}}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target, data and a config."""
    folder = tmp_path_factory.mktemp("train")
    write_tiny_model(folder / "target")
    rng = np.random.default_rng(0)
    records = [{"token_ids": rng.integers(1, 30, 10).tolist(), "prompt_length": 4} for _ in range(10)]
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    names = {"target": folder / "target", "out": folder / "run", "data": folder / "data.jsonl"}
    (folder / "run.toml").write_text(CONFIG.format(**names))
    return folder


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    programs: Any = evaluate.DISPATCH.program
    before = programs._cache_size()
    said = io.StringIO()
    with redirect_stderr(said):
        assert main(["train", str(place / "run.toml")]) == 0
    assert programs._cache_size() == before + 1, "updates and temperatures share one program"
    words = said.getvalue()
    assert re.search(r"jaxspec: warning: acceptance is measured on \d held-out documents, which says little", words)
    assert re.search(r"jaxspec: memory: 2 rows at a time; about \d+\.\d of \d+\.\d GB \(", words)
    assert re.search(r"1/2 updates, epoch 0\.\d+, loss .* learning rate .*, 0:\d\d:\d\d elapsed\n", words)
    assert re.search(r"2/2 updates, epoch .* tokens per pass .* tokens/s, .* elapsed, 0:00:00 left\n", words)
    assert "jaxspec: 2/2 updates, measuring acceptance ...\n" in words
    return place / "run"


def test_a_run_leaves_heads_that_load(place: Path, trained: Path):
    entries = read_metrics(trained)
    assert [entry["step"] for entry in entries] == [1, 2]
    assert {"loss", "accuracy_0", "accuracy_1", "trained_tokens", "learning_rate"} <= set(entries[0])
    assert all(1 <= entries[-1][f"k2/{name}/acceptance_length"] <= 3 for name in ("t0", "t1"))
    target = load_model(place / "target", EXACT)
    for name in ("best", "last"):
        head = load_head(trained / name, target.net.arch, EXACT)
        about = json.loads((trained / name / "training.json").read_text())
        assert about["target"] == {"name": "target", "fingerprint": fingerprint(place / "target")}
        digest = hashlib.sha256((place / "data.jsonl").read_bytes()).hexdigest()
        assert about["data"]["train"] == [{"name": "data.jsonl", "sha256": digest}]
        assert about["settings"]["train"]["steps"] == 2
        assert 1 <= about["held_out"]["k2/t0/acceptance_length"] <= 3
        assert str(place) not in json.dumps(about), "where it lay on this machine is nobody's business"
        assert head.kind == "medusa"
        assert head.ids_W is not None
        assert len(head.ids_W) == 20


def test_the_same_command_has_nothing_more_to_do(place: Path, trained: Path, capsys: pytest.CaptureFixture[str]):
    before = (trained / "metrics.jsonl").read_bytes()
    assert main(["train", str(place / "run.toml")]) == 0
    said = capsys.readouterr().err
    assert "jaxspec: going on after update 2" in said
    assert "jaxspec: 2 updates done; the head is in" in said
    assert (trained / "metrics.jsonl").read_bytes() == before


def test_a_dry_run_says_what_it_would_take(place: Path, capsys: pytest.CaptureFixture[str]):
    changes = ("train.steps=0", "train.epochs=3", f"out={place / 'dry'}")
    argv = [word for change in changes for word in ("--set", change)]
    assert main(["train", str(place / "run.toml"), *argv, "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert re.search(r"rows \d+, .*epochs 3", said), said
    assert "jaxspec: memory: 2 rows at a time" in said
    assert [file.name for file in (place / "dry").iterdir()] == ["memory.json"], "so that the run need not count again"


def test_a_finished_run_is_extended_by_epochs_or_updates(
    place: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    longer = tmp_path / "longer"
    shutil.copytree(trained, longer)
    rows = int(re.search(r"rows (\d+)", _said(place, capsys, "--dry-run"))[1])
    argv = ["--out", str(longer), "--set", "train.steps=0", "--set", f"train.epochs={8 / rows}"]
    said = _said(place, capsys, *argv)
    assert "jaxspec: going on after update 2" in said
    assert "jaxspec: 4 updates done" in said
    assert [entry["step"] for entry in read_metrics(longer)] == [1, 2, 3, 4]
    assert main(["train", str(place / "run.toml"), "--out", str(longer)]) == 2, "and is not cut"
    assert "settings.train.steps was 4 and is 2" in capsys.readouterr().err


def _said(place: Path, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["train", str(place / "run.toml"), *argv]) == 0
    return capsys.readouterr().err


def test_other_settings_are_refused_in_the_same_directory(
    place: Path, trained: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", str(place / "run.toml"), "--set", "optimizer.clip=9", "--set", "loss.decay=0.5"]) == 2
    said = capsys.readouterr().err
    assert "settings.loss.decay was 0.8 and is 0.5; settings.optimizer.clip was 0.5 and is 9" in said


def test_other_data_is_refused_in_the_same_directory(place: Path, trained: Path, capsys: pytest.CaptureFixture[str]):
    data, before = place / "data.jsonl", (place / "data.jsonl").read_text()
    data.write_text(before + '{"token_ids": [1, 2, 3, 4], "prompt_length": 1}\n')
    try:
        assert main(["train", str(place / "run.toml")]) == 2
    finally:
        data.write_text(before)
    assert "begun with other settings: data was" in capsys.readouterr().err


def settings_of(place: Path, *changes: str) -> RunSettings:
    return load_run_settings(str(place / "run.toml"), changes)


def built(settings: RunSettings) -> TrainRun:
    corpus = load_corpus(settings.data, None, 99)
    return make_run(settings, read_headers(settings, Path(settings.target)).load(), corpus)


def numbered(found: TrainRun) -> Any:
    """Parameters of the right shapes, no two alike, without the time that it takes to compile random ones."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(found.init)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes)


HEADS: list[tuple[str, set[str]]] = [
    ('{kind="eagle", own_head=false}', {"accuracy_1", "feature_loss"}),
    ('{kind="peagle", layers=2, intermediate_size=8}', {"accuracy_1"}),
    ('{kind="eagle3", taps=[0, 1], intermediate_size=8}', {"accuracy_1", "simulated_length"}),
    ('{kind="shared_expert", taps=[], commons=[0], routing=[0]}', {"accuracy_1", "routing_loss", "routing_recall_0"}),
    (
        '{kind="dspark", own_head=false, block={size=3, markov_rank=2, confidence="markov"}}',
        {"accuracy_2", "simulated_length"},
    ),
    ('{kind="dflash2", block={size=3, conv_taps=2, conv_group=4, selector_rank=2, selector_top_k=4}}', {"accuracy_1"}),
    ('{kind="draft_model", layers=1, hidden_size=8, intermediate_size=8}', {"accuracy_0"}),
]


@pytest.mark.parametrize(("head", "figures"), HEADS, ids=[head.split('"')[1] for head, _ in HEADS])
def test_every_kind_has_its_loss_and_its_directory(place: Path, tmp_path: Path, head: str, figures: set[str]):
    more = [f"loss.{name}=0.1" for name in ("feature", "routing") if f"{name}_loss" in figures]
    found = built(settings_of(place, f"head={head}", *more))
    params = numbered(found)
    whole = jnp.ones((2, 12), jnp.int32)
    batch = Batch(whole, whole, whole, whole.astype(bool))
    loss, metrics = jax.eval_shape(found.loss_fn, params, found.frozen, batch, jax.random.key(0))
    assert loss.shape == ()
    assert figures | {"trained_tokens"} <= set(metrics)
    found.save(params, tmp_path)
    assert {"config.json"} < {file.name for file in tmp_path.iterdir()}
    if "draft_model" in head:
        loaded = load_model(tmp_path, EXACT).params
    else:
        loaded = load_head(tmp_path, found.frozen.target.arch, EXACT).params
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(loaded), strict=True):
        assert np.array_equal(one, other)


def test_a_mesh_trains_as_one_device(place: Path, tmp_path: Path):
    head = 'head={kind="shared_expert", taps=[], commons=[0], routing=[0], intermediate_size=8, draft_vocab_size=20}'
    losses = {}
    # Four of the eight rows at a time, one on each device along data and expert.
    several = ["mesh.data=2", "mesh.expert=2", "mesh.tensor=2", "train.micro_rows=4"]
    for name, mesh in (("one", []), ("mesh", several)):
        rest = ["loss.routing=0.1", "data.held_out_fraction=0.0", "train.rows=8"]
        changes = [head, f'out="{tmp_path / name}"', *rest, *mesh]
        settings = settings_of(place, *changes)
        train(settings, Path(settings.target))
        losses[name] = [(entry["loss"], entry["grad_norm"]) for entry in read_metrics(tmp_path / name)]
    assert np.allclose(losses["mesh"], losses["one"], rtol=1e-5)


def test_a_head_is_trained_further(place: Path, trained: Path):
    further = built(settings_of(place, f'head={{kind="medusa", start="{trained / "best"}"}}'))
    known = load_head(trained / "best", further.frozen.target.arch, EXACT)
    same = jax.tree.map(np.array_equal, known.params, further.init())
    assert all(jax.tree.leaves(same))
    assert further.frozen.ids_W is not None
    assert np.array_equal(further.frozen.ids_W, known.ids_W if known.ids_W is not None else [])
    own = identity(settings_of(place, f'head={{kind="medusa", start="{trained / "best"}"}}'))
    assert own["head"]["start"] == fingerprint(trained / "best"), "a head put in its place would be another run"


@pytest.mark.parametrize(
    ("head", "says"),
    [
        ('{{kind="eagle3", start="{best}"}}', r'holds kind "medusa", not "eagle3"; set head.kind to it'),
        ('{{kind="medusa", heads=3, start="{best}"}}', "says everything about the head; leave out heads"),
        ('{{kind="medusa", start="{best}/nothing"}}', "no such directory"),
    ],
)
def test_what_a_head_cannot_start_from(place: Path, trained: Path, head: str, says: str):
    with pytest.raises(ConfigError, match=says):
        built(settings_of(place, f"head={head.format(best=trained / 'best')}"))


def test_heads_bound_the_lengths(place: Path):
    with pytest.raises(ConfigError, match=r"lengths \[2\], but 1 Medusa heads"):
        built(settings_of(place, 'head={kind="medusa", heads=1}'))
    with pytest.raises(ConfigError, match=r"lengths \[2\], but a block has 1 drafts"):
        built(settings_of(place, 'head={kind="dflash", own_head=false, block={size=2}}'))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("feature", 'for heads of kind "eagle"'), ("routing", "predicts no routing"),
        ("block.confidence", "the head has no confidence"), ("block.selector", "the head has no selector"),
    ],
)  # fmt: skip
def test_losses_need_what_they_compare(place: Path, change: str, says: str):
    with pytest.raises(ConfigError, match=says):
        built(settings_of(place, f"loss.{change}=0.5"))


def test_the_best_is_kept_by_the_first_length_and_temperature_unless_named(place: Path):
    assert best_metric(settings_of(place).evaluation) == "k2/t0/acceptance_length"
    named = settings_of(place, "evaluation.metric=k5/t1/accepted_at_1")
    assert best_metric(named.evaluation) == "k5/t1/accepted_at_1"


def test_plots(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    assert main(["plot", str(trained)]) == 0
    assert (trained / "plot.png").read_bytes()[:4] == b"\x89PNG"
    other = tmp_path / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text('{"step":1,"loss":2.0}\n{"step":2,"loss":1.5}\n')
    assert main(["plot", str(trained), str(other), "--output", str(tmp_path / "two.svg")]) == 0
    assert "<!-- other -->" in (tmp_path / "two.svg").read_text()
    assert main(["plot", str(tmp_path)]) == 2
    assert "name the directory of a run" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"must end in \.png"):
        plot_runs([trained], tmp_path / "a.txt")
