"""A policy's training in one process: roll out with speculation, update, put the weights into the engine, again.

One step, ``PolicyTraining.step``: the engine continues prompts, a program rewards the continuations, and
one update makes those likelier that were better than the others of their prompt (REINFORCE with a group's mean as
baseline: Williams 1992; GRPO: Shao 2024, 2402.03300). The engine's log-probabilities of the sampled tokens are the
policy's own, to the bit, drafts or not; the ratio of new to old probability is made of them alone.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jaxspec.checkpoint.load.model import load_model
from jaxspec.checkpoint.load.places import flatten
from jaxspec.checkpoint.load.save import save_model
from jaxspec.checkpoint.text.codec import TOKENIZER_FILES
from jaxspec.draft import methods
from jaxspec.errors import ConfigError
from jaxspec.models.transformer import Transformer
from jaxspec.nn.param import declared
from jaxspec.nn.policy import make_policy
from jaxspec.pytree import replace
from jaxspec.serve.demo_pair import resolve_model, resolve_speculation
from jaxspec.serve.llm import LLM
from jaxspec.serve.request import SamplingParams
from jaxspec.shapes import Array, Params
from jaxspec.train.checkpoints import replace_directory
from jaxspec.train.optimizer import adamw
from jaxspec.train.policy.fresh_head import FreshHead
from jaxspec.train.policy.policy_loss import PolicyBatch, PolicyObjective, policy_loss, tree_of
from jaxspec.train.policy.policy_settings import PolicySettings
from jaxspec.train.policy.rewards import REWARDS
from jaxspec.train.policy.rollouts import Rollout, batch_of, rollouts_of, scored
from jaxspec.train.run_log import FILE, Watcher
from jaxspec.train.update import TrainState, make_update

Named = Mapping[str, Array]


class PolicyTraining:
    """A policy, its engine and its trainer.

    Attributes:
      settings: of the run.
      llm: the engine.
      net: the network in the layout of training.
      state: trained parameters in float32 by path, and the optimizer's.
      fixed: parameters that are not trained, by path.
      head: what drafts, while it is trained too.
    """

    def __init__(self, settings: PolicySettings):
        """Loads the target twice: for the engine, and in float32 to be trained.

        Raises:
          ConfigError, CheckpointError: settings or files are not usable.
        """
        s, r = settings, settings.rollout
        self.settings, directory = s, resolve_model(s.target)
        self.prompts = read_prompts(r.prompts)
        config = resolve_speculation(r.speculative_config)
        head = _head_of(s, config)
        self.llm = LLM(
            directory, speculative_config=config, dtype=s.dtype, kernels=s.kernels,
            max_model_len=s.length, max_num_seqs=r.rows, seed=s.seed,
        )  # fmt: skip
        policy = make_policy(s.dtype, param=jnp.dtype("float32"), recurrence=s.recurrence)
        model = load_model(directory, policy, quantization="none")
        self.net: Transformer = model.net
        trained, self.fixed = divided(flatten(model.params["params"]), s.objective.train)
        optimizer = adamw(s.optimizer, s.steps * s.objective.updates)
        self.state = TrainState(dict(trained), optimizer.init(dict(trained)), jnp.int32(0))
        parts = r.per_step * r.group // s.objective.micro_rows
        self._update = make_update(policy_loss, optimizer, s.seed, parts=parts)
        self.head = None if head is None else FreshHead(head, self.net, s.head, s.steps, s.objective.micro_rows)
        self._last: PolicyBatch | None = None

    @property
    def params(self) -> Params:
        """All parameters of the policy, in float32 and the layout of training."""
        return tree_of(self.state.params, self.fixed)

    def step(self, number: int) -> dict[str, float]:
        """Rolls out, updates and swaps; returns figures.

        The head learns from the rollout before, with the target of this one, while the engine generates.
        """
        if self.head is not None and self._last is not None:
            self.head.follow(self._last, self.params, self.llm)
        watch = _Watch()
        outputs = self.llm.generate(self._prompts_of(number), self._sampling(number), use_tqdm=False)
        figures: dict[str, float] = {"rollout_s": watch.lap()}
        figures |= self.head.wait() if self.head is not None else {}
        figures["head_wait_s"] = watch.lap()
        rollouts = rollouts_of(outputs, REWARDS[self.settings.rollout.reward], self.settings.objective.kind)
        sampled = sum(len(rollout.logprob_T) for rollout in rollouts)
        figures |= {
            "reward": float(np.mean([rollout.reward for rollout in rollouts])),
            "tokens": sampled, "tokens_per_s": sampled / figures["rollout_s"],
            "acceptance_length": float(np.mean([output.metrics.mean_acceptance_length for output in outputs])),
        }  # fmt: skip
        batch = batch_of(rollouts, self.settings.length)
        if self.settings.objective.check:
            figures["different_logprobs"] = float((self._scores(rollouts) != batch.old_BT).sum())
            figures["check_s"] = watch.lap()
        figures |= self._learn(rollouts, batch)
        self._last = batch
        return {name: round(value, 6) for name, value in figures.items()}

    def _learn(self, rollouts: list[Rollout], batch: PolicyBatch) -> dict[str, float]:
        """Updates the parameters and puts them into the engine, as often as the settings say."""
        figures, update_s, swap_s = {}, 0.0, 0.0
        for number in range(self.settings.objective.updates):
            watch = _Watch()
            if number:
                batch = replace(batch, now_BT=self._scores(rollouts))
            objective = PolicyObjective(self.fixed, self.net, self._clip)
            self.state, metrics = self._update(self.state, objective, jax.tree.map(lambda x: x[None], batch))
            figures = {name: float(value) for name, value in jax.device_get(metrics).items()}
            update_s += watch.lap()
            self.llm.update_target(self.params)
            swap_s += watch.lap()
        return figures | {"update_s": update_s, "swap_s": swap_s}

    @property
    def _clip(self) -> tuple[float, float]:
        return self.settings.objective.clip_low, self.settings.objective.clip_high

    def _scores(self, rollouts: list[Rollout]) -> np.ndarray:
        """Returns log-probabilities of the sampled tokens by the engine, as it is now."""
        return scored(rollouts, self.llm.score([rollout.ids for rollout in rollouts]), self.settings.length)

    def _prompts_of(self, number: int) -> list[str]:
        """Returns the prompts of a step; each round goes through all of them in an order of its own."""
        count, per_step = len(self.prompts), self.settings.rollout.per_step
        places = range(number * per_step, (number + 1) * per_step)
        orders = {place // count: np.random.default_rng((self.settings.seed, place // count)) for place in places}
        shuffled = {turn: rng.permutation(count) for turn, rng in orders.items()}
        return [self.prompts[shuffled[place // count][place % count]] for place in places]

    def _sampling(self, number: int) -> list[SamplingParams]:
        """Returns how a step is sampled: from the policy's own distribution, temperature 1 and nothing cut."""
        r = self.settings.rollout
        return [
            SamplingParams(
                n=r.group, temperature=1.0, top_p=1.0, top_k=0, max_tokens=r.max_tokens, logprobs=0,
                truncate_prompt_tokens=r.prompt_tokens, seed=(self.settings.seed << 32) + number * r.per_step + place,
            )
            for place in range(r.per_step)
        ]  # fmt: skip

    def close(self) -> None:
        """Ends what runs beside it."""
        if self.head is not None:
            self.head.close()

    def save(self, directory: Path) -> None:
        """Writes the policy as a model directory, in the engine's dtype."""
        model, dtype = self.llm.model, np.dtype(self.settings.dtype)

        def write(made: Path) -> None:
            config = {**model.config, "torch_dtype": str(dtype)}
            save_model(made, jax.device_get(self.params), self.net.arch, config, dtype)
            for name in (*TOKENIZER_FILES, "special_tokens_map.json", "generation_config.json"):
                if (model.directory / name).exists():
                    (made / name).write_bytes((model.directory / name).read_bytes())

        replace_directory(directory, write)


def train_policy(settings: PolicySettings, watch: Watcher = lambda entry: None) -> PolicyTraining:
    """Trains a policy from the beginning; figures go to ``metrics.jsonl``, the policy to ``last``.

    Args:
      settings: everything about it.
      watch: receives every entry.

    Raises:
      ConfigError, CheckpointError, JaxspecError: settings or files are not usable, or a rollout failed.
    """
    out = Path(settings.out)
    if (out / FILE).exists():
        raise ConfigError(f"{out}: a run is there already; give another directory, for a policy's run is not resumed")
    training = PolicyTraining(settings)
    out.mkdir(parents=True, exist_ok=True)
    try:
        with (out / FILE).open("w", encoding="utf-8") as log:
            for number in range(settings.steps):
                entry = {"step": number + 1, **training.step(number)}
                log.write(json.dumps(entry) + "\n")
                log.flush()
                watch(entry)
    finally:
        training.close()
    training.save(out / "last")
    return training


def _head_of(settings: PolicySettings, config: Mapping[str, Any] | None) -> Path | None:
    """Returns the directory of the head that is trained, too; None where none is."""
    if not settings.head.updates:
        return None
    parsed = methods.parse(config)
    if parsed.method not in methods.HEADS or parsed.model is None:
        raise ConfigError(f'head: updates are for a draft head; method "{parsed.method}" has none, set updates to 0')
    return resolve_model(parsed.model, parsed.revision)


def divided(leaves: Named, train: str) -> tuple[Named, Named]:
    """Returns the parameters that are trained and the others; whole numbers never are."""

    def wanted(path: str, leaf: Array) -> bool:
        part = declared(path).part
        return jnp.issubdtype(leaf.dtype, jnp.floating) and (train == "all" or part == train)

    trained = {path: leaf for path, leaf in leaves.items() if wanted(path, leaf)}
    if not trained:
        raise ConfigError(f"objective: the target has no {train}; train all")
    return trained, {path: leaf for path, leaf in leaves.items() if path not in trained}


def read_prompts(wanted: str | Sequence[str]) -> list[str]:
    """Reads prompts from JSON lines, or returns those that are given.

    Raises:
      ConfigError: there is no such file, a line has no text as ``prompt``, or there is none.
    """
    if not isinstance(wanted, str):
        if not wanted:
            raise ConfigError("rollout: prompts is empty; give texts, or a file of JSON lines")
        return list(wanted)
    prompts = []
    try:
        lines = Path(wanted).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"rollout: prompts: {wanted} cannot be read ({error})") from None
    for number, line in enumerate(filter(str.strip, lines), start=1):
        try:
            prompts.append(msgspec.json.decode(line, type=_Line).prompt)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f'rollout: prompts: {wanted}, line {number}: needs {{"prompt": text}} ({error})'
            ) from None
    if not prompts:
        raise ConfigError(f"rollout: prompts: {wanted} has none")
    return prompts


class _Line(msgspec.Struct):
    prompt: str


class _Watch:
    """Measures consecutive intervals."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def lap(self) -> float:
        """Returns the seconds since the last lap."""
        began, self._began = self._began, time.monotonic()
        return self._began - began
