"""The memory of an update: the estimate against XLA's own, and a choice that changes no result."""

import json
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint.load.places import abstract_params
from jaxspec.config import shipped
from jaxspec.errors import ConfigError
from jaxspec.models.block_head import BlockHead
from jaxspec.models.catalog import arch_of
from jaxspec.models.draft_head import DraftHead
from jaxspec.models.mtp import Mtp
from jaxspec.models.transformer import Transformer
from jaxspec.nn.policy import make_policy
from jaxspec.train import fit, memory
from jaxspec.train.batch import Batch
from jaxspec.train.block_settings import BlockSettings
from jaxspec.train.head_loss import head_loss
from jaxspec.train.head_nets import net_of
from jaxspec.train.head_start import init_params
from jaxspec.train.memory import MemoryPlan, UpdateWork, held_bytes, plan_memory
from jaxspec.train.objective import HeadObjective
from jaxspec.train.optimizer import adamw
from jaxspec.train.settings import HeadSettings, LossSettings, OptimizerSettings, TrainSettings, load_run_settings
from jaxspec.train.teacher import run_teacher
from jaxspec.train.update import TrainState, make_update
from tests.unit.train.test_unroll import CONFIG, EXACT, HEADS, initial, target
from tests.unit.train.test_vocab_loss import packed

GIB = 1 << 30
HALF = jnp.dtype("bfloat16")
EAGLE3 = HeadSettings(kind="eagle3", draft_vocab_size=32000)
TINY = CONFIG | {"vocab_size": 256, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64}


def published(name: str) -> dict[str, Any]:
    return json.loads((shipped("models") / f"{name}.json").read_text())


def small_moe() -> dict[str, Any]:
    """The config of a model of 25 million parameters, for which a laptop trains heads."""
    sizes = {"hidden_size": 384, "moe_intermediate_size": 96, "intermediate_size": 512, "num_experts": 16}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 8, "num_experts_per_tok": 2}
    rest = {"model_type": "qwen2_moe", "vocab_size": 4096, "shared_expert_intermediate_size": 512}
    return sizes | heads | rest | {"max_position_embeddings": 2048, "tie_word_embeddings": False}


def work_of(config: dict[str, Any], head: HeadSettings = EAGLE3, length: int = 2048, rounds: int = 7) -> UpdateWork:
    arch = arch_of(config)
    net = net_of(head, arch, config, make_policy(HALF, param=jnp.dtype("float32")))
    assert isinstance(net, DraftHead | BlockHead | Mtp)
    params = jax.eval_shape(lambda: init_params(net, jax.random.key(0)))
    frozen = held_bytes(abstract_params(Transformer(arch, make_policy(HALF))), None)
    parts, width = (0, arch.vocab_size) if isinstance(net, Mtp) else (net.spec.parts, net.spec.draft_vocab)
    sizes = 2 + 2 * parts, frozen, held_bytes(params, None)
    return UpdateWork(arch, net, LossSettings(rounds=rounds), length, width, *sizes)


def allotted(work: UpdateWork, rows: int, parts: int = 1) -> int:
    """What XLA allots for one update, nothing of which is run."""
    frozen = Transformer(work.arch, make_policy(HALF))
    net: Any = work.net
    whole: Any = jax.ShapeDtypeStruct((1, rows, work.length), jnp.int32)
    params = jax.eval_shape(lambda: init_params(net, jax.random.key(0)))
    ids: Any = jax.ShapeDtypeStruct((work.width,), jnp.int32) if work.width < work.arch.vocab_size else None
    objective = HeadObjective(jax.eval_shape(frozen.initial, jax.random.key(0)), ids, frozen, net, work.loss)
    optimizer = adamw(OptimizerSettings(), 10)

    def loss_fn(params: Any, frozen: Any, batch: Any, key: Any) -> Any:
        return head_loss(
            frozen, params, run_teacher(frozen.target, frozen.target_params, batch, frozen.reads), batch, key
        )

    state: Any = (params, jax.eval_shape(optimizer.init, params), jax.ShapeDtypeStruct((), jnp.int32))
    truth: Any = jax.ShapeDtypeStruct(whole.shape, bool)
    batch = Batch(whole, whole, whole, truth)
    update: Any = make_update(loss_fn, optimizer, 0, parts=parts)
    found = update.lower(TrainState(*state), objective, batch).compile().memory_analysis()
    return found.temp_size_in_bytes + found.argument_size_in_bytes


@pytest.mark.served
@pytest.mark.parametrize(
    ("kind", "experts"),
    [("eagle3", 0), ("dspark", 0), ("mtp", 0), ("eagle3", 32), pytest.param("dspark", 16, marks=pytest.mark.slow)],
)
def test_the_estimate_is_not_below_what_xla_allots(kind: Any, experts: int):
    block = BlockSettings(size=6, markov_rank=8, confidence="markov") if kind == "dspark" else BlockSettings()
    chosen, width = experts // 4 or None, None if kind == "mtp" else 128
    small = HeadSettings(
        kind=kind, draft_vocab_size=width, block=block, num_experts=experts, num_experts_per_tok=chosen
    )
    work = work_of(TINY, small, length=128, rounds=2)
    found = plan_memory(work, TrainSettings(steps=1, rows=4, micro_rows=4), None).total
    real = allotted(work, 4)
    assert real <= 1.05 * found <= 3 * real, f"{found / 1e6:.1f} MB, XLA allots {real / 1e6:.1f}"


@pytest.mark.served
@pytest.mark.slow
def test_the_estimate_for_a_whole_model_is_not_below_what_xla_allots():
    work = work_of(small_moe(), length=1024, rounds=3)
    found = plan_memory(work, TrainSettings(steps=1, rows=2, micro_rows=2), None).total
    real = allotted(work, 2)
    assert real <= 1.05 * found <= 2 * real, f"{found / 1e9:.2f} GB, XLA allots {real / 1e9:.2f}"


def test_defaults_of_the_shipped_config_fit_where_they_are_meant_to():
    settings = load_run_settings("eagle3").train
    laptop = plan_memory(work_of(small_moe()), settings, 7 * 10**9)
    assert laptop.rows * laptop.parts == settings.rows == 8
    assert not laptop.remat
    assert laptop.total < 7e9
    big = work_of(published("qwen3-30b-a3b"))
    assert big.target_bytes / 1e9 == pytest.approx(61, abs=0.2)
    room = int(memory.DEVICE_SHARE * 0.95 * 78 * GIB)  # of what JAX takes of the device, see jaxspec train
    h100 = plan_memory(big, settings, room)
    assert h100.total <= room
    assert h100.needed["activations"] < 16e9
    with pytest.raises(ConfigError, match=r"about 13\d\d\.\d GB \(target 13.*the target and the head alone do not fit"):
        plan_memory(work_of(published("deepseek-v3")), settings, room)


def test_rows_are_split_before_anything_is_computed_twice():
    work = work_of(small_moe())
    sizes = {
        n: plan_memory(work, TrainSettings(steps=1, rows=8, micro_rows=n, remat=False), None) for n in (8, 4, 2, 1)
    }
    totals = [sizes[n].total for n in (8, 4, 2, 1)]
    assert totals == sorted(totals, reverse=True)
    settings = TrainSettings(steps=1, rows=8)
    for rows, plan in sizes.items():
        found = plan_memory(work, settings, plan.total)
        assert (found.rows, found.parts, found.remat) == (rows, 8 // rows, False)
    assert plan_memory(work, settings, sizes[1].total - 1).remat
    assert plan_memory(work, settings, None).rows == 8
    with pytest.raises(ConfigError) as told:
        plan_memory(work, settings, work.target_bytes + 6 * work.head_bytes)
    assert "1 row of 2048 tokens and 7 rounds at a time take about 0.8 GB (target 0.1," in str(told.value)
    assert "lower data.length, loss.rounds, head.draft_vocab_size, or set train.memory_gb" in str(told.value)


def test_what_the_user_chooses_stays():
    work, little = work_of(small_moe()), 10**8
    asked = TrainSettings(steps=1, rows=8, micro_rows=4, remat=False)
    assert plan_memory(work, asked, little).rows == 4
    assert plan_memory(work, TrainSettings(steps=1, rows=8), None, enough=4096).rows == 2
    assert plan_memory(work, TrainSettings(steps=1, rows=8), None, enough=100).rows == 1
    assert plan_memory(work, asked, little, enough=100).rows == 4
    assert plan_memory(changed(work, devices=2), TrainSettings(steps=1, rows=8), None).rows == 8
    with pytest.raises(ConfigError, match="4 rows of 2048 tokens"):
        plan_memory(work, TrainSettings(steps=1, rows=8, micro_rows=4), little)
    with pytest.raises(ConfigError, match="micro_rows must divide rows = 8, got 3"):
        TrainSettings(steps=1, rows=8, micro_rows=3)


def test_free_memory_is_read_from_the_host_and_its_group(tmp_path: Path):
    (tmp_path / "meminfo").write_text("MemTotal:       24 kB\nMemAvailable:   2048 kB\n")
    assert memory._available(tmp_path / "meminfo") == 2 << 20
    assert memory._available(tmp_path / "nothing") is None
    assert memory._left_in_group(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._left_in_group(tmp_path) is None
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert memory._left_in_group(tmp_path) == 3000


def test_a_run_that_goes_on_computes_as_it_began(tmp_path: Path):
    file, settings = tmp_path / "memory.json", TrainSettings(steps=1, rows=8)
    file.write_text('{"micro_rows": 2, "remat": true}')
    assert fit._as_begun(settings, file) == settings, "nothing was saved yet that it must agree with"
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    begun = fit._as_begun(settings, file)
    assert (begun.micro_rows, begun.remat) == (2, True)
    asked = TrainSettings(steps=1, rows=8, memory_gb=3.0)
    assert fit._as_begun(asked, file) == asked
    file.write_text("{")
    assert fit._as_begun(settings, file) == settings


@pytest.mark.parametrize("name", [pytest.param("eagle", marks=pytest.mark.slow), "p-eagle"])
def test_rows_in_parts_are_the_same_update(name: str):
    """Noise and dropped slots are drawn by row, so that they do not depend on what is computed together."""
    net = DraftHead(HEADS[name], EXACT)
    base, frozen = target()
    params, optimizer = initial(net), adamw(OptimizerSettings(learning_rate=0.1, warmup=0, schedule="constant"), 5)
    loss_settings = LossSettings(rounds=2, noise=0.3, feature=0.1 if name == "eagle" else 0.0)
    objective = HeadObjective(frozen, None, base, net, loss_settings)
    whole = jax.tree.map(lambda x: x[None], packed(rows=4))
    batch = Batch(whole.token_BT, whole.segment_BT, whole.position_BT, whole.loss_BT, row_B=jnp.arange(4)[None])

    def loss_fn(params: Any, frozen: Any, batch: Any, key: Any) -> Any:
        return head_loss(frozen, params, run_teacher(base, frozen.target_params, batch, net.spec.reads), batch, key)

    results = []
    for parts in (1, 4):
        state = TrainState(jax.tree.map(jnp.copy, params), optimizer.init(params), jnp.int32(0))
        results.append(make_update(loss_fn, optimizer, 3, parts=parts)(state, objective, batch))
    (whole, one), (split, other) = results
    for figure in ("loss", "grad_norm", "trained_tokens", "tokens"):
        np.testing.assert_allclose(other[figure], one[figure], rtol=2e-5)
    for a, b in zip(jax.tree.leaves(whole.optimizer), jax.tree.leaves(split.optimizer), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_the_plan_is_one_line():
    plan = MemoryPlan(4, 2, True, {"target": 61 * 10**9, "head": 0, "activations": 10**9}, 80 * 10**9)
    assert plan.words() == (
        "4 rows at a time, 2 times, rounds computed again for their gradients; about 62.0 of 80.0 GB (target 61.0, "
        "activations 1.0)"
    )
    assert MemoryPlan(1, 1, False, {"target": 10**9}).words() == "1 row at a time; about 1.0 GB (target 1.0)"
