"""A feature cache: training from it is training online, a killed pass goes on, and what is wrong is refused."""

import gc
import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.checkpoint.load.model import load_model
from jaxspec.cli.main import main
from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.models.transformer import head
from jaxspec.nn.policy import make_policy
from jaxspec.protocol import CaptureSpec
from jaxspec.train import features, run, target
from jaxspec.train.batch import Batch, TeacherOutput
from jaxspec.train.data import batches
from jaxspec.train.features import FeatureRows, Teacher
from jaxspec.train.packed_rows import PackedRows
from jaxspec.train.run_log import read_metrics
from jaxspec.train.settings import load_run_settings
from jaxspec.train.sources import Document
from jaxspec.train.teacher import run_teacher
from tests.unit.serve.tiny_model import write_tiny_model

EXACT = make_policy("float32")
GOLDEN = Path(__file__).parents[2] / "golden"
READS, ROUTING, LENGTH, ROWS = CaptureSpec(taps=(0, 1), shared_outputs=(0,)), (0,), 12, 7
CONFIG = """
target = "{target}"
out = "{out}"
head = {{kind = "medusa", heads = 1, draft_vocab_size = 20}}
data = {{train = ["{data}"], length = 12}}
train = {{steps = 3, rows = 2, log_every = 1, compute_dtype = "float32", target_dtype = "float32"}}
optimizer = {{warmup = 1, learning_rate = 1e-2}}
logging = {{tensorboard = false}}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target, data and a config."""
    folder = tmp_path_factory.mktemp("features")
    write_tiny_model(folder / "target")
    rng = np.random.default_rng(0)
    records = [{"token_ids": rng.integers(1, 30, 10).tolist(), "prompt_length": 4} for _ in range(7)]
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    names = {"target": folder / "target", "out": folder / "run", "data": folder / "data.jsonl"}
    (folder / "run.toml").write_text(CONFIG.format(**names))
    return folder


def documents(count: int = ROWS, length: int = 9) -> list[Document]:
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, 90, (count, length)).astype(np.int32)
    return [Document(row, np.ones(length, bool), "here:1") for row in tokens]


@pytest.fixture(scope="module")
def teacher(place: Path) -> Teacher:
    model = load_model(place / "target", EXACT)
    return Teacher(model.net, model.params, READS, ROUTING, "float32", 2)


def filled(teacher: Teacher, place: Path, **identity: Any) -> FeatureRows:
    """Files of one forward each, of two rows."""
    return FeatureRows(PackedRows(documents(), LENGTH, 1), teacher, place, {"data": 1, **identity}, shard_bytes=1)


def files(place: Path) -> list[str]:
    return sorted(file.name for file in place.glob("features-*"))


def test_losses_from_a_cache_are_those_without(place: Path, capsys: pytest.CaptureFixture[str]):
    def settings(**change: str):
        changes = [f"features.{name}={value}" for name, value in change.items()]
        return load_run_settings(str(place / "run.toml"), changes, str(place / "offline"))

    offline = settings(cache=str(place / "float32"), dtype="float32")
    trained = run.train(offline, place / "target")
    entries = read_metrics(place / "offline")
    assert len(entries) == 3
    _, headers, corpus, _ = run._prepare(offline, place / "target", lambda facts: None)
    short = settings(cache=str(place / "bfloat16"))
    kept = run._cached(short, headers, corpus, None, trained.run.frozen, 2, lambda facts: None)
    made = [next(batches(rows, seed=0, size=2)) for rows in (corpus.rows, kept)]
    params, loss_of = trained.run.init(), jax.jit(trained.run.loss_fn)
    online, close = (
        float(loss_of(params, trained.run.frozen, jax.tree.map(lambda x: x[0], batch), jax.random.key(0))[0])
        for batch in made
    )
    assert entries[0]["loss"] == pytest.approx(online, rel=1e-6)
    assert close == pytest.approx(online, rel=1e-2)
    assert close != entries[0]["loss"]


HEADS = {
    "eagle3": 'kind="eagle3", draft_vocab_size=20',
    "peagle": 'kind="peagle", draft_vocab_size=20',
    "dspark": 'kind="dspark", own_head=false, block={size=3, markov_rank=2}',
}


@pytest.mark.parametrize("kind", HEADS)
def test_what_predicts_no_trained_token_is_left_out_and_changes_nothing(
    place: Path, kind: str, capsys: pytest.CaptureFixture[str]
):
    """Heads that read taps need last hidden states for the logits of trained tokens alone."""
    changes = [f"head={{{HEADS[kind]}}}", f"features.cache={place / kind}", "features.dtype=float32", "train.steps=1"]
    settings = load_run_settings(str(place / "run.toml"), changes, str(place / f"run-{kind}"))
    trained = run.train(settings, place / "target")
    _, headers, corpus, _ = run._prepare(settings, place / "target", lambda facts: None)
    kept = run._cached(settings, headers, corpus, None, trained.run.frozen, 2, lambda facts: None)
    for number, row in enumerate(corpus.rows[n] for n in range(len(kept))):
        there_T = np.any(kept[number]["cached"].features.last_BTD != 0, axis=-1)
        np.testing.assert_array_equal(there_T, [*row["loss_BT"][1:], False])
    params, loss_of = trained.run.init(), jax.jit(trained.run.loss_fn)
    made = [next(batches(rows, seed=0, size=2)) for rows in (corpus.rows, kept)]
    (online, said), (cached, again) = (
        loss_of(params, trained.run.frozen, jax.tree.map(lambda x: x[0], batch), jax.random.key(0)) for batch in made
    )
    assert float(cached) == pytest.approx(float(online), rel=1e-6)
    assert jax.tree.map(float, again) == pytest.approx(jax.tree.map(float, said), rel=1e-6)


def test_where_a_part_of_the_vocabulary_is_learned_the_rest_of_its_product_is_let_go(place: Path, monkeypatch):
    loaded, fill = [], target.fill
    monkeypatch.setattr(target, "fill", lambda *given: loaded.append(fill(*given)) or loaded[-1])
    changes = [f"head={{{HEADS['eagle3']}}}", "loss.draft_only=true", f"features.cache={place / 'part'}"]
    runs = {}
    for name in ("whole", "outside"):  # the first one fills the cache, with the target's layers
        settings = load_run_settings(str(place / "run.toml"), changes, str(place / f"part-{name}"))
        runs[name] = run.train(settings, place / "target")
    losses = [[entry["loss"] for entry in read_metrics(place / f"part-{name}")] for name in runs]
    assert losses[0] == losses[1]
    whole, outside = loaded
    assert runs["whole"].run.frozen.target_params is whole
    assert {"embed_VD", "norm_D"} == set(runs["outside"].run.frozen.target_params["params"])
    product = weakref.ref(outside["params"]["head_DV"])
    loaded.clear()
    del outside
    gc.collect()
    assert product() is None


def test_features_only_writes_what_training_reads(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    cache = ["--set", f"features.cache={place / 'before'}", "--set", "features.dtype=float32"]
    assert main(["train", str(place / "run.toml"), "--out", str(place / "none"), "--features-only", *cache]) == 0
    said = capsys.readouterr().err
    assert "feature cache 7 rows x 12 tokens x 128 bytes = 10.8 kB in" in said
    assert "jaxspec: the features are in" in said
    assert not (place / "none").exists()
    assert files(place / "before") == ["features-000000.safetensors"]
    monkeypatch.setattr(features, "save_file", None)
    run.write_features(load_run_settings(str(place / "run.toml"), cache[1::2]), place / "target")
    assert main(["train", str(place / "run.toml"), "--features-only"]) == 2
    assert "features: cache names no directory to write to; give --set features.cache=DIR" in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "room"), [("float32", 1e-5), ("bfloat16", 2e-2), ("float8_e4m3fn", 5e-2)])
def test_batches_carry_what_the_target_computes(teacher: Teacher, tmp_path: Path, dtype: str, room: float):
    kept = filled(Teacher(teacher.net, teacher.params, READS, ROUTING, dtype, 2), tmp_path)
    assert len(files(tmp_path)) == 4, "the last of one row"
    plain, cached = (next(batches(rows, seed=3, size=3, accumulation=2)) for rows in (kept.rows, kept))
    assert cached.cached is not None
    assert cached.cached.features.last_BTD.shape == (2, 3, LENGTH, 32)
    first = [jax.tree.map(lambda x: x[0], batch) for batch in (plain, cached)]
    run_jit = jax.jit(run_teacher, static_argnums=(0, 3, 4))
    asked = [run_jit(teacher.net, teacher.params, b, READS, ROUTING) for b in first]
    live = first[0].segment_BT > 0
    for output in asked:
        assert output.expert_YBTA[0].dtype == jnp.int32
    pairs = [(a.features.last_BTD, *a.features.taps, *a.features.shared_outputs) for a in asked]
    for place, (online, offline) in enumerate(zip(*pairs, strict=True)):
        assert online.dtype == offline.dtype == jnp.float32
        if dtype == "float8_e4m3fn":
            step = np.max(np.abs(online[live]), axis=-1, keepdims=True) / 27 * (place > 0) + 1e-2
            assert np.all(np.abs(online[live] - offline[live]) <= step)
        scale = float(jnp.max(jnp.abs(online)))
        np.testing.assert_allclose(online[live], offline[live], atol=room * scale)
    np.testing.assert_array_equal(asked[0].expert_YBTA[0][live], asked[1].expert_YBTA[0][live])


def test_a_killed_pass_goes_on_behind_the_whole_files(teacher: Teacher, tmp_path: Path, monkeypatch):
    save, seen = features.save_file, []

    def killed(arrays: Any, part: Path) -> None:
        part.write_bytes(b"half of a file")
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(part)
        save(arrays, part)

    monkeypatch.setattr(features, "save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        filled(teacher, tmp_path)
    assert files(tmp_path) == ["features-000000.safetensors", "features-000001.safetensors", "features-000002.part"]
    before = [(tmp_path / name).stat().st_mtime_ns for name in files(tmp_path)[:2]]
    monkeypatch.setattr(features, "save_file", save)
    again = filled(teacher, tmp_path)
    assert files(tmp_path) == [f"features-{n:06}.safetensors" for n in range(4)]
    assert [(tmp_path / name).stat().st_mtime_ns for name in files(tmp_path)[:2]] == before
    whole = filled(teacher, tmp_path / "whole")
    for n in range(ROWS):
        for one, other in zip(jax.tree.leaves(again[n]), jax.tree.leaves(whole[n]), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_cache_of_something_else_is_refused(teacher: Teacher, tmp_path: Path):
    filled(teacher, tmp_path)
    with pytest.raises(ConfigError, match=r"something else: data was 1 and is 2; choose another features\.cache"):
        filled(teacher, tmp_path, data=2)
    other = Teacher(teacher.net, teacher.params, CaptureSpec(taps=(1,)), ROUTING, "bfloat16", 2)
    with pytest.raises(ConfigError, match=r"commons was \[0\] and is \[\]; dtype was 'float32' .*; taps was \[0, 1\]"):
        filled(other, tmp_path)
    file = tmp_path / files(tmp_path)[1]
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=r"features-000001.*: damaged .*; remove it and run"):
        filled(teacher, tmp_path)
    (tmp_path / "features.json").write_text("{")
    with pytest.raises(ConfigError, match=r"features\.json: not readable"):
        filled(teacher, tmp_path)


def test_what_does_not_fit_is_told_before_anything_is_written(teacher: Teacher, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(features.shutil, "disk_usage", lambda place: SimpleNamespace(free=30_000))
    size = ROWS * LENGTH * (4 * 4 * 32 + 2 * 4)
    assert size > 30_000
    with pytest.raises(JaxspecError, match=r"7 rows x 12 tokens x 520 bytes = 43\.7 kB, 43\.7 kB of it to write"):
        filled(teacher, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["lock"]
    # Half as many bytes fit, in the same directory.
    short = filled(Teacher(teacher.net, teacher.params, READS, ROUTING, "bfloat16", 2), tmp_path)
    assert len(short) == ROWS


def test_a_full_disk_keeps_what_is_whole(teacher: Teacher, tmp_path: Path, monkeypatch):
    def full(arrays: Any, part: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(features, "save_file", full)
    with pytest.raises(JaxspecError, match=r"cannot be written \(No space left on device\); .*run the same command"):
        filled(teacher, tmp_path)


def test_a_file_that_vanished_is_told(teacher: Teacher, tmp_path: Path):
    kept = filled(teacher, tmp_path)
    (tmp_path / files(tmp_path)[0]).unlink()
    with pytest.raises(JaxspecError, match=r"features-000000.*: cannot be read .*; run the same command again"):
        kept[1]
    assert kept[2]["cached"].features.last_BTD.shape == (LENGTH, 32)


def test_several_processes_only_read(teacher: Teacher, tmp_path: Path, monkeypatch):
    whole = filled(teacher, tmp_path / "whole")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert len(filled(teacher, tmp_path / "whole")) == len(whole)
    with pytest.raises(ConfigError, match="one process writes the feature cache; run jaxspec train --features-only"):
        filled(teacher, tmp_path / "other")


def test_a_target_of_one_text_per_row_gets_it(tmp_path: Path):
    """Its sparse index would choose positions of the text before; in rows of their own the reference's are found."""
    model = load_model(GOLDEN / "deepseek_v32", EXACT)
    says = {name: np.array(x) for name, x in load_file(GOLDEN / "deepseek_v32" / "reference.safetensors").items()}
    lines = [
        {"token_ids": ids[:count], "prompt_length": 2}
        for ids, count in zip(says["input_ids"].tolist(), (24, 20), strict=True)
    ]
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = load_run_settings(
        "demo", [f'data.train=["{tmp_path / "ids.jsonl"}"]', "data.length=44", "data.held_out_fraction=0.0"]
    )
    _, _, corpus, _ = run._prepare(settings, GOLDEN / "deepseek_v32", lambda facts: None)
    assert corpus.rows.rows == [[0], [1]]
    taught = jax.jit(run_teacher, static_argnums=(0, 3, 4))

    def teacher_output_of(*rows: Any) -> TeacherOutput:
        arrays: dict[str, Any] = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        return taught(model.net, model.params, Batch(**arrays), CaptureSpec(taps=(1, 2), shared_outputs=(1,)), (1,))

    def logits_of(output: TeacherOutput) -> Any:
        return jax.jit(head, static_argnums=0)(model.net, model.params, output.features.last_BTD)

    found = teacher_output_of(*corpus.rows)
    logits_BTV = logits_of(found)
    for row, count in enumerate((24, 20)):
        np.testing.assert_allclose(logits_BTV[row, :count], says["logits"][row, :count], rtol=1e-4, atol=1e-4)
        for b, tap in zip((1, 2), found.features.taps, strict=True):
            np.testing.assert_allclose(tap[row, :count], says[f"hidden.{b}"][row, :count], rtol=1e-3, atol=1e-3)
    both = PackedRows(corpus.rows.documents, 44, 1)[0]
    assert both["segment_BT"].tolist() == [1] * 24 + [2] * 20
    together = logits_of(teacher_output_of(both, both))[0]
    np.testing.assert_allclose(together[:24], says["logits"][0], rtol=1e-4, atol=1e-4)
    assert np.abs(together[24:] - says["logits"][1, :20]).max() > 0.01
