"""The loop: resumed to the bit, accumulation as one big batch, and one clear error for what can go wrong."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.sharding.mesh import make_mesh
from jaxspec.train import checkpoints, loop
from jaxspec.train.loop import train
from jaxspec.train.optimizer import adamw, schedule_of
from jaxspec.train.run_log import MetricsLog, read_metrics
from jaxspec.train.settings import LoggingSettings, OptimizerSettings
from jaxspec.train.update import TrainState, make_update
from tests.unit.train.small_run import OPTIMIZER, STEPS, batches, init, logged, small_run

ROOT = Path(__file__).parents[3]


def same(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    train(small_run(directory))
    return directory


def state_of(directory: Path) -> Any:
    """What the newest checkpoint holds."""
    store = checkpoints.Checkpoints(directory, {"seed": 5})
    params = init()
    like = TrainState(params, adamw(OPTIMIZER, STEPS).init(params), jnp.int32(0))
    state, _ = store.restore(like)
    store.close()
    return state


def test_a_run_leaves_its_log_its_best_and_its_last(whole: Path):
    entries = logged(whole)
    assert [entry["step"] for entry in entries] == list(range(1, STEPS + 1))
    assert [entry["step"] for entry in entries if "length" in entry] == [4, 8, 12]
    assert {"loss", "grad_norm", "learning_rate", "trained_tokens", "largest"} <= set(entries[0])
    assert entries[-1]["loss"] < 0.7 * entries[1]["loss"], "both saw the same rows"
    best = max(entry["length"] for entry in entries if "length" in entry)
    assert -np.sum(np.load(whole / "best" / "w.npy") ** 2) == pytest.approx(best)
    assert np.array_equal(np.load(whole / "last" / "w.npy"), state_of(whole).params["w_XX"])
    assert int(state_of(whole).step) == STEPS


def test_a_killed_run_goes_on_to_the_bit(whole: Path, tmp_path: Path):
    command = [sys.executable, "-m", "tests.unit.train.small_run", str(tmp_path), "8"]
    codes = [subprocess.run(command, cwd=ROOT, check=False).returncode for _ in range(2)]
    assert codes == [-9, 0]
    assert same(state_of(whole), state_of(tmp_path))
    assert logged(tmp_path) == logged(whole)
    for name in ("best", "last"):
        assert (tmp_path / name / "w.npy").read_bytes() == (whole / name / "w.npy").read_bytes()


def test_figures_are_means_over_their_interval_however_often_it_was_killed(whole: Path, tmp_path: Path):
    every = logged(whole)
    train(small_run(tmp_path / "whole", log_every=5, evaluate_every=99))
    assert [entry["step"] for entry in logged(tmp_path / "whole")] == [5, 10, 12]
    for entry, part in zip(logged(tmp_path / "whole"), (every[:5], every[5:10], every[10:]), strict=True):
        weight = np.array([one["trained_tokens"] for one in part])
        assert entry["trained_tokens"] == weight.sum()
        assert entry["loss"] == pytest.approx(np.sum(weight * [one["loss"] for one in part]) / weight.sum())

    def ending(first: int) -> Any:
        for step, batch in enumerate(batches(first), first):
            if step == 8 and not first:
                raise KeyboardInterrupt
            yield batch

    cut = small_run(tmp_path / "cut", log_every=5, evaluate_every=99, batches=ending)
    with pytest.raises(KeyboardInterrupt):
        train(cut)
    train(cut)
    assert logged(tmp_path / "cut") == logged(tmp_path / "whole")


def test_what_is_watched_and_left_beside_the_parameters(tmp_path: Path):
    seen: list[dict[str, Any]] = []
    about = {"target": {"name": "mine"}}
    train(small_run(tmp_path, log_every=6, provenance=about, progress=lambda step: {"epoch": step / 4}), seen.append)
    assert seen[0] == {"step": 0, "steps": STEPS}
    assert seen[1]["step"] == 1
    assert seen[1]["compiled_s"] > 0
    assert {"step": 4, "measuring": 1} in seen
    entries = [entry for entry in seen if "loss" in entry]
    assert [entry["epoch"] for entry in entries] == [1.0, 1.5, 2.0, 3.0]
    assert all(entry["left_s"] >= 0 for entry in entries)
    assert entries[-1]["left_s"] == 0
    figures = {entry["step"]: entry["length"] for entry in entries if "length" in entry}
    for name in ("best", "last"):
        found = json.loads((tmp_path / name / "training.json").read_text())
        assert found["target"] == {"name": "mine"}
        assert found["held_out"] == {"length": figures[found["step"]]}
    assert found["step"] == STEPS
    before = (tmp_path / "last" / "training.json").read_bytes()
    train(small_run(tmp_path, log_every=6, provenance=about))
    assert (tmp_path / "last" / "training.json").read_bytes() == before, "started again when it was done"


def test_the_speed_leaves_out_the_first_update_and_knows_what_is_left(monkeypatch: pytest.MonkeyPatch):
    clock = [100.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: clock[0])
    pace = loop._Pace(steps=10, before=2, seconds_at_peak=0.5)
    clock[0] = 190.0
    assert pace.add(1000.0) == 90.0
    assert pace.take(3) == {}
    for _ in range(2):
        clock[0] += 2.0
        pace.restart_clock()
        clock[0] += 2.0
        assert pace.add(1000.0) == 2.0
    assert pace.take(5) == {"tokens_per_s": 500.0, "mfu": 0.25, "left_s": 20.0}
    assert "mfu" not in loop._Pace(steps=10, before=2).take(5)


def test_the_next_update_begins_before_the_last_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    events: list[str] = []

    def told(first: int) -> Any:
        for step, batch in enumerate(batches(first), first + 1):
            events.append(f"begun {step}")
            yield batch

    add, seen = loop._Pace.add, iter(range(1, STEPS + 1))
    monkeypatch.setattr(loop._Pace, "add", lambda *given: (events.append(f"seen {next(seen)}"), add(*given))[1])
    train(small_run(tmp_path, batches=told, log_every=5, evaluate_every=99, save_every=99))
    assert events[:2] == ["begun 1", "seen 1"], "the first tells how long compiling took"
    assert events[2:10] == ["begun 2", "begun 3", "seen 2", "begun 4", "seen 3", "begun 5", "seen 4", "seen 5"]


def test_a_finished_run_has_nothing_to_do(whole: Path):
    before, seen = (whole / "metrics.jsonl").read_bytes(), []
    params = train(small_run(whole), seen.append)
    assert seen == [{"step": STEPS, "steps": STEPS}]
    assert (whole / "metrics.jsonl").read_bytes() == before
    assert same(params, state_of(whole).params)


def test_passes_of_an_update_are_one_big_batch():
    def loss(params: Any, frozen: Any, batch: Any, key: Any) -> Any:
        tokens = jnp.sum(batch["on"])
        found = (batch["x"] @ params["w_XX"]) @ frozen
        total = jnp.sum((found - batch["y"]) ** 2 * batch["on"])
        return total / jnp.maximum(tokens, 1), {"trained_tokens": tokens}

    plain, results = small_run(Path()), []
    for passes in (1, 4):
        update = make_update(loss, plain.optimizer, 0)
        first = TrainState(plain.init(), plain.optimizer.init(plain.init()), jnp.int32(0))
        results.append(update(first, plain.frozen, next(batches(1, passes))))
    (one, metrics), (four, others) = results
    assert float(metrics["trained_tokens"]) < 4, "a pass has nothing to train on"
    np.testing.assert_allclose(metrics["loss"], others["loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], others["grad_norm"], rtol=1e-5)
    np.testing.assert_allclose(one.params["w_XX"], four.params["w_XX"], atol=1e-6)


def test_every_update_and_pass_draws_its_own_noise():
    keys = []

    def loss(params: Any, frozen: Any, batch: Any, key: Any) -> Any:
        jax.debug.callback(lambda k: keys.append(tuple(k.tolist())), jax.random.key_data(key))
        return jnp.sum(params["w_XX"] ** 2), {}

    plain = small_run(Path())
    update = make_update(loss, plain.optimizer, 0)
    state = TrainState(plain.init(), plain.optimizer.init(plain.init()), jnp.int32(0))
    for step in range(2):
        state, _ = update(state, plain.frozen, next(batches(step, 2)))
    jax.effects_barrier()
    assert len(set(keys)) == 4


def test_a_resumed_mesh_goes_on_to_the_bit(whole: Path, tmp_path: Path):
    mesh = make_mesh({"data": 2, "tensor": 2}, jax.devices()[:4])

    def ending(first: int) -> Any:
        for step, batch in enumerate(batches(first), first):
            if step == 7 and not first:
                raise KeyboardInterrupt
            yield batch

    train(small_run(tmp_path / "whole", mesh=mesh))
    with pytest.raises(KeyboardInterrupt):
        train(small_run(tmp_path / "cut", mesh=mesh, batches=ending))
    train(small_run(tmp_path / "cut", mesh=mesh, batches=ending))
    assert logged(tmp_path / "cut") == logged(tmp_path / "whole")
    for one, other in zip(logged(tmp_path / "cut"), logged(whole), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


@pytest.mark.parametrize("what", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path, what: float):
    def bad(first: int) -> Any:
        for step, batch in enumerate(batches(first), first):
            yield batch | {"y": batch["y"] + np.float32(what)} if step == 4 else batch

    with pytest.raises(JaxspecError, match=r"step 5: not finite: loss (nan|inf).*nan_batch_5\.npz; lower"):
        train(small_run(tmp_path, batches=bad))
    saved = np.load(tmp_path / "nan_batch_5.npz")
    assert set(saved) == {"x", "y", "on"}
    assert not np.isfinite(saved["y"]).any()
    assert int(state_of(tmp_path).step) == 3
    assert [entry["step"] for entry in logged(tmp_path)] == [1, 2, 3, 4]


def test_a_directory_of_another_run_is_refused(whole: Path):
    with pytest.raises(ConfigError, match=r"begun with other settings: seed was 5 and is 6; give .* another --out"):
        train(small_run(whole, identity={"seed": 6}))


def test_a_directory_in_use_is_refused(tmp_path: Path):
    store = checkpoints.Checkpoints(tmp_path, {"seed": 5})
    with pytest.raises(ConfigError, match="another process trains there"):
        train(small_run(tmp_path))
    store.close()


def test_an_unknown_figure_for_the_best_is_told(tmp_path: Path):
    with pytest.raises(JaxspecError, match="no figure 'size'; there are length"):
        train(small_run(tmp_path, best="size"))


def test_a_full_disk_is_one_error_and_keeps_what_was_saved(tmp_path: Path):
    """A limit on the size of files stands for the disk: the operating system refuses the same writes."""
    wide = {"w_XX": jnp.asarray(np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32))}
    store = checkpoints.Checkpoints(tmp_path, {})
    store.save(1, wide, {"best": 0.0})
    store._manager.wait_until_finished()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    try:
        store.save(2, wide, {"best": 0.0})
        with pytest.raises(
            JaxspecError, match=r"is full, step 2 could not be saved; the checkpoint of step 1 is whole"
        ):
            store.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    again = checkpoints.Checkpoints(tmp_path, {})
    assert again.step == 1
    state, about = again.restore(wide)
    assert same(state, wide)
    assert about == {"best": 0.0}
    again.close()


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def little(place: Path) -> Any:
        return SimpleNamespace(free=100)

    monkeypatch.setattr(checkpoints.shutil, "disk_usage", little)
    with pytest.raises(JaxspecError, match=r"needs 0 MB for 3 checkpoints of 0 MB and two heads, and 0 MB are free"):
        train(small_run(tmp_path, batches=None))
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_directory_is_replaced_when_it_is_whole(tmp_path: Path):
    place = tmp_path / "best"
    checkpoints.replace_directory(place, lambda part: (part / "a").touch())

    def fails(part: Path) -> None:
        (part / "b").touch()
        raise OSError(28, "No space left on device")

    with pytest.raises(JaxspecError, match=r"best: cannot be written .No space left"):
        checkpoints.replace_directory(place, fails)
    assert [file.name for file in place.iterdir()] == ["a"]
    checkpoints.replace_directory(place, lambda part: (part / "c").touch())
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["c"]


def test_the_log_is_cut_back_to_the_checkpoint(tmp_path: Path):
    lines = [json.dumps({"step": step, "loss": 1.0 / step}) for step in (1, 2, 3, 4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 5, "lo')
    log = MetricsLog(tmp_path, 2)
    log.write({"step": 3, "loss": 9.0})
    log.close()
    assert [(e["step"], e["loss"]) for e in read_metrics(tmp_path)] == [(1, 1.0), (2, 0.5), (3, 9.0)]


def test_what_is_not_installed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match="wandb is not installed; pip install wandb"):
        MetricsLog(tmp_path, 0, LoggingSettings(tensorboard=False, wandb="project"))
    with pytest.raises(ConfigError, match="tensorboardX is not installed"):
        MetricsLog(tmp_path, 0, LoggingSettings())


def test_wandb_gets_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[str, Any]] = []

    class Run:
        def log(self, figures: dict[str, float], step: int) -> None:
            calls.append(("log", (figures, step)))

        def finish(self) -> None:
            calls.append(("finish", None))

    def init(**asked: Any) -> Run:
        calls.append(("init", asked))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    (tmp_path / "run").mkdir()
    log = MetricsLog(tmp_path / "run", 0, LoggingSettings(tensorboard=False, wandb="heads"), settings={"seed": 3})
    log.write({"step": 7, "loss": 2.5})
    log.close()
    (first, asked), *others = calls
    assert (first, asked["project"], asked["name"], asked["config"]) == ("init", "heads", "run", {"seed": 3})
    assert others == [("log", ({"loss": 2.5}, 7)), ("finish", None)]
    MetricsLog(tmp_path / "run", 7, LoggingSettings(tensorboard=False, wandb="heads")).close()
    assert calls[3][1]["id"] == asked["id"], "it goes on in the same run"


def test_tensorboard_gets_every_figure(tmp_path: Path):
    log = MetricsLog(tmp_path, 0, LoggingSettings())
    log.write({"step": 1, "loss": 2.5})
    log.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in file.read_bytes()


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        ("constant", [0.25, 0.625, 1, 1, 1, 1]),
        ("linear", [0.25, 0.625, 1, 0.875, 0.5, 0.0]),
        ("cosine", [0.25, 0.625, 1, 0.9619, 0.5, 0.0]),
        ("wsd", [0.25, 0.625, 1, 1, 1, 0.0]),
    ],
)
def test_schedules(schedule: Any, wanted: list[float]):
    settings = OptimizerSettings(learning_rate=1.0, warmup=3, schedule=schedule, decay_fraction=4 / 11)
    rate = schedule_of(settings, 11)
    found = [float(rate(step)) for step in (0, 1.5, 3, 4, 7, 11)]
    assert found == pytest.approx(wanted, abs=1e-3)


def test_only_matrices_decay():
    rule = adamw(OptimizerSettings(learning_rate=1.0, warmup=0, schedule="constant", weight_decay=0.5, clip=0), 5)
    params = {"w_XX": jnp.ones((2, 2)), "b_X": jnp.ones(2)}
    with jax.numpy_dtype_promotion("standard"):
        changes, _ = rule.update(jax.tree.map(jnp.zeros_like, params), rule.init(params), params)
    assert jax.tree.map(lambda x: float(x.ravel()[0]), changes) == {"w_XX": -0.5, "b_X": 0.0}


def test_a_checkpoint_has_what_was_true_when_it_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is written in the background: what the loop counts meanwhile is of the next one."""
    store, asked, sums = checkpoints.Checkpoints(tmp_path, {"seed": 5}), [], {"loss": 1.0}
    monkeypatch.setattr(store._manager, "save", lambda step, args: asked.append(args))
    store.save(1, {"w": jnp.zeros(2)}, {"interval": sums})
    sums["loss"] += 1.0
    assert asked[0].about.item == {"interval": {"loss": 1.0}}
    store.close()
