"""Settings of a policy's training: the records of ``configs/policy``."""

from collections.abc import Sequence
from typing import Any, Literal

from jaxspec.config import find_config, read_toml, to_record
from jaxspec.errors import ConfigError
from jaxspec.train.policy.rewards import REWARDS
from jaxspec.train.settings import LossSettings, OptimizerSettings, Record


class RolloutSettings(Record, frozen=True):
    """What is rolled out in a step.

    Attributes:
      prompts: texts, or a file of JSON lines with a text as ``prompt`` each.
      per_step: prompts of a step.
      group: continuations of each, whose rewards are compared with one another.
      max_tokens: of a continuation.
      prompt_tokens: most tokens of a prompt, the last ones.
      reward: by name, see ``jaxspec.train.policy.rewards``.
      rows: continuations that are generated together.
      speculative_config: what drafts; none decodes plainly.
    """

    prompts: str | tuple[str, ...]
    per_step: int = 4
    group: int = 8
    max_tokens: int = 96
    prompt_tokens: int = 96
    reward: str = "parses"
    rows: int = 8
    speculative_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, least in {"per_step": 1, "group": 2, "max_tokens": 1, "prompt_tokens": 1, "rows": 1}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"rollout: {name} must be at least {least}, got {getattr(self, name)}")
        if self.reward not in REWARDS:
            raise ConfigError(f"rollout: reward {self.reward!r} is not known; known are {', '.join(REWARDS)}")


class ObjectiveSettings(Record, frozen=True):
    """What is maximized.

    Attributes:
      kind: ``grpo`` divides a group's rewards, less their mean, by their deviation; ``reinforce`` takes off the mean of
        the group's others, and divides by nothing.
      updates: of the parameters per rollout. From the second on, log-probabilities are computed anew by the engine.
      clip_low, clip_high: how far below and above 1 the ratio of probabilities counts.
      train: which parameters: ``all``, or only the ``routed experts``.
      micro_rows: continuations that a gradient is computed over at a time, a divisor of all of a step.
      check: whether the engine scores every rollout once more before the first update, which must give the same bits.
    """

    kind: Literal["grpo", "reinforce"] = "grpo"
    updates: int = 1
    clip_low: float = 0.2
    clip_high: float = 0.28
    train: Literal["all", "routed experts"] = "all"
    micro_rows: int = 8
    check: bool = True

    def __post_init__(self) -> None:
        if self.updates < 1 or self.micro_rows < 1 or not 0 < self.clip_low < 1 or self.clip_high <= 0:
            raise ConfigError(
                "objective: updates and micro_rows must be at least 1, clip_low between 0 and 1 and clip_high above 0, "
                f"got {self.updates}, {self.micro_rows}, {self.clip_low}, {self.clip_high}"
            )


class FreshHeadSettings(Record, frozen=True):
    """How the head that drafts follows the policy.

    Attributes:
      updates: per step, on the text of the rollout before, while the next one runs; 0 leaves the head as it is.
      optimizer, loss: of the head, as in ``jaxspec train``.
    """

    updates: int = 0
    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=1e-4, schedule="constant", warmup=0)
    loss: LossSettings = LossSettings(rounds=3)


class PolicySettings(Record, frozen=True):
    """A whole run.

    Attributes:
      target: model directory, or ``demo``.
      out: directory of the figures and of the trained model.
      steps: rollouts in all.
      dtype: of the engine's weights and products, and of the trainer's products; masters are float32.
      kernels: of the engine, see ``LLM``.
      recurrence: how the trainer runs recurrent layers: in ``steps``, in the engine's bits, or in ``chunks``, whose
        gradients are faster and take a small part of the memory; ``objective.check`` must be off then.
      seed: of sampling and of the order of prompts.
      rollout, objective, optimizer, head: see there.
    """

    target: str
    out: str
    steps: int
    rollout: RolloutSettings
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    kernels: str = "auto"
    recurrence: Literal["steps", "chunks"] = "steps"
    seed: int = 0
    objective: ObjectiveSettings = ObjectiveSettings()
    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=1e-5, schedule="constant", warmup=0)
    head: FreshHeadSettings = FreshHeadSettings()

    def __post_init__(self) -> None:
        rows = self.rollout.per_step * self.rollout.group
        if self.steps < 1 or self.seed < 0:
            raise ConfigError(f"steps must be at least 1 and seed at least 0, got {self.steps} and {self.seed}")
        if rows % self.objective.micro_rows:
            raise ConfigError(f"objective: micro_rows must divide per_step * group = {rows}")
        if self.recurrence == "chunks" and self.objective.check:
            raise ConfigError(
                'recurrence = "chunks" rounds otherwise than the engine; set objective.check = false, or take "steps"'
            )
        if self.head.updates and self.rollout.speculative_config is None:
            raise ConfigError("head: updates are for a head that drafts; give rollout.speculative_config, or updates 0")

    @property
    def length(self) -> int:
        """Tokens of the longest text."""
        return self.rollout.prompt_tokens + self.rollout.max_tokens


def load_policy_settings(wanted: str, changes: Sequence[str] = (), out: str | None = None) -> PolicySettings:
    """Loads a config by its name in ``configs/policy`` or its file; ``changes`` as ``objective.updates=2``.

    Raises:
      ConfigError: there is no such file, or it is wrong; unknown keys are named with the known ones.
    """
    file = find_config(wanted, "policy")
    values = read_toml(file, changes)
    return to_record(values if out is None else {**values, "out": out}, PolicySettings, str(file))
