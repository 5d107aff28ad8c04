"""A policy's training: what the update computes, that nothing but it changes the engine, and that rewards rise."""

from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint.load.model import load_model
from jaxspec.checkpoint.load.places import flatten
from jaxspec.config import shipped
from jaxspec.errors import ConfigError
from jaxspec.models.transformer import teacher_forced
from jaxspec.nn.policy import make_policy
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from jaxspec.train.policy import rewards
from jaxspec.train.policy.policy_loss import PolicyObjective, policy_loss, valued
from jaxspec.train.policy.policy_settings import (
    ObjectiveSettings,
    PolicySettings,
    RolloutSettings,
    load_policy_settings,
)
from jaxspec.train.policy.rewards import parses
from jaxspec.train.policy.rollouts import Rollout, advantages, batch_of
from jaxspec.train.policy.training import PolicyTraining, read_prompts, train_policy
from jaxspec.train.settings import OptimizerSettings
from tests.oracle.conftest import LETTERS

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}


def settings(target: Path, out: Path, steps: int = 2, rate: float = 1e-2, **objective: Any) -> PolicySettings:
    rollout = RolloutSettings(
        prompts=("!#$", "%&"), per_step=2, group=4, max_tokens=12, prompt_tokens=4, rows=4, reward="vowels",
        speculative_config=NGRAM,
    )  # fmt: skip
    optimizer = OptimizerSettings(learning_rate=rate, schedule="constant", warmup=0)
    return PolicySettings(
        target=str(target), out=str(out), steps=steps, rollout=rollout, optimizer=optimizer,
        objective=ObjectiveSettings(micro_rows=4, **objective),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def vowels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward that a model of a few letters can earn: the share of the first half of the alphabet."""
    monkeypatch.setitem(
        rewards.REWARDS, "vowels", lambda prompt, text: sum(c in LETTERS[:32] for c in text) / max(len(text), 1)
    )


def test_code_that_parses():
    assert parses("def f(x):\n", "    y = 1\n    z = 2\n    return z\nunfinis(") == 1
    assert parses("def f(x):\n", "    y = 1\n    return (\n    x\n") == 0
    assert parses("def f(x):\n", "    return 1\n# one\n\n# two\n") == 0, "too little of it"
    assert parses("", "x = '\\d'\ny = '\0'\nz = 1\n") == 0
    assert parses("", "(" * 5000 + "\n1\n2\n") == 0


def test_advantages():
    given = np.array([0.0, 1.0, 1.0, 0.0])
    np.testing.assert_allclose(advantages(given, "grpo"), [-1, 1, 1, -1])
    np.testing.assert_allclose(advantages(given, "reinforce"), given - (given.sum() - given) / 3)
    assert not advantages(np.ones(3), "grpo").any()


def test_a_value_with_the_slope_of_another():
    value, slope = jax.value_and_grad(lambda x: valued(jnp.float32(0.1), x * x))(jnp.float32(3))
    assert (value, slope) == (np.float32(0.1), 6)


def test_the_loss_is_the_policy_gradient(target_dir: Path):
    """The ratio is 1 exactly where nothing has changed, and the gradient that of minus A log p."""
    model = load_model(target_dir, make_policy("float32"))
    ids = np.random.default_rng(0).integers(1, 60, (2, 9)).tolist()
    told = np.random.default_rng(1).normal(-3, 1, (2, 6)).astype(np.float32)
    made = [Rollout(ids[0][:7], 3, told[0, :4], 1.0, 0.7), Rollout(ids[1], 3, told[1], 0.0, -0.4)]
    batch = batch_of(made, 12)
    params = flatten(model.params["params"])
    objective = PolicyObjective({}, model.net)
    loss_fn = jax.jit(jax.value_and_grad(policy_loss, has_aux=True))
    (loss, metrics), grads = loss_fn(params, objective, batch, jax.random.key(0))
    assert metrics["ratio_off_1"] == 0
    assert metrics["trained_tokens"] == 10
    assert loss == pytest.approx(-(0.7 * 4 - 0.4 * 6) / 10, abs=1e-6)

    def plain(params: Any) -> jax.Array:
        total = jnp.float32(0)
        for rollout in made:
            token = jnp.asarray([rollout.ids], jnp.int32)
            place = jnp.arange(token.shape[1], dtype=jnp.int32)[None]
            logits, _ = teacher_forced(model.net, {"params": _nested(params)}, token, place)
            logp = jax.nn.log_softmax(logits[0, :-1])[jnp.arange(token.shape[1] - 1), token[0, 1:]]
            total -= rollout.advantage * jnp.sum(logp[rollout.prompt - 1 :]) / 10
        return total

    for name, wanted in jax.jit(jax.grad(plain))(params).items():
        np.testing.assert_allclose(grads[name], wanted, atol=2e-5, err_msg=name)


def _nested(params: Any) -> Any:
    tree: dict[str, Any] = {}
    for path, leaf in params.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return tree


@pytest.mark.served
def test_a_run(target_dir: Path, tmp_path: Path):
    """Two updates of each rollout; experts alone are trained, and the engine has what is saved."""
    chosen = settings(target_dir, tmp_path / "run", updates=2, train="routed experts")
    entries: list[dict[str, Any]] = []
    training = train_policy(chosen, entries.append)
    for entry in entries:
        assert entry["different_logprobs"] == 0
        assert entry["trained_tokens"] == entry["tokens"] > 0
        assert entry["ratio_off_1"] > 0, "of the second update"
        assert 0 < entry["trainer_off"] < 0.1
    before = flatten(load_model(target_dir, make_policy("bfloat16")).params["params"])
    after = flatten(load_model(tmp_path / "run" / "last", make_policy("bfloat16")).params["params"])
    changed = {
        path.rpartition("/")[2] for path in before if (np.asarray(before[path]) != np.asarray(after[path])).any()
    }
    assert changed == {"gate_up_ED2F", "down_EFD"}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    fresh = LLM(tmp_path / "run" / "last", max_model_len=16, max_num_seqs=4)
    assert (
        fresh.generate("!#$", params)[0].outputs[0].token_ids
        == training.llm.generate("!#$", params)[0].outputs[0].token_ids
    )
    with pytest.raises(ConfigError, match="a run is there already"):
        train_policy(chosen)


@pytest.mark.slow
def test_rewards_rise(target_dir: Path, tmp_path: Path):
    entries: list[dict[str, Any]] = []
    train_policy(settings(target_dir, tmp_path / "run", steps=40), entries.append)
    first, last = (np.mean([entry["reward"] for entry in part]) for part in (entries[:8], entries[-8:]))
    assert last > first + 0.15, (first, last)
    assert all(entry["ratio_off_1"] == entry["different_logprobs"] == 0 for entry in entries)


@pytest.mark.slow
def test_the_head_follows(tmp_path: Path):
    """The demo's head is trained on the policy's text while the next is generated, whose text it does not change."""
    changes = ["rollout.max_tokens=12", "rollout.group=2", "rollout.rows=4", "objective.micro_rows=4", "steps=2"]
    fresh, fixed = (
        PolicyTraining(load_policy_settings("demo", [*changes, f"head.updates={n}"], str(tmp_path))) for n in (2, 0)
    )
    held = jax.tree.leaves(cast(Any, fresh.llm.engine.programs.drafter).params)
    for number in range(2):
        figures, others = fresh.step(number), fixed.step(number)
        assert figures["reward"] == others["reward"]
        assert figures["surprise"] == others["surprise"]
        assert ("head_loss" in figures) == (number == 1)
    fresh.close()
    now = jax.tree.leaves(cast(Any, fresh.llm.engine.programs.drafter).params)
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(held, now, strict=True))


def test_settings_and_prompts(tmp_path: Path, target_dir: Path):
    assert load_policy_settings("demo").rollout.per_step == 4
    assert sorted(file.stem for file in shipped("policy").iterdir()) == ["demo"]
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": "b", "more": 1}\n')
    assert read_prompts(str(file)) == ["a", "b"]
    file.write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match=r'line 1: needs \{"prompt": text\}'):
        read_prompts(str(file))
    for change, words in (
        ("rollout.reward=nice", "reward 'nice' is not known; known are parses"),
        ("rollout.group=1", "group must be at least 2, got 1"),
        ("objective.micro_rows=5", "micro_rows must divide per_step"),
        ("objective.clip_low=1", "clip_low between 0 and 1"),
        ("rollout.prompts=[]", "prompts is empty"),
        ("recurrence=chunks", "set objective.check = false"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_prompts(load_policy_settings("demo", [change]).rollout.prompts)
    ngram = ['rollout.speculative_config={method="ngram",num_speculative_tokens=2}', f"target={target_dir}"]
    with pytest.raises(ConfigError, match='updates are for a draft head; method "ngram" has none'):
        PolicyTraining(load_policy_settings("demo", ngram))
