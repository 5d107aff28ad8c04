"""``jaxspec train policy``: fits a model to a verifiable reward, with rollouts that speculate."""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated

import tyro

from jaxspec.errors import ConfigError


@dataclass(frozen=True)
class TrainPolicyArgs:
    """Arguments of ``jaxspec train policy``.

    Attributes:
      config: TOML file, or a name in configs/policy.
      set: A value that differs from the file's, such as steps=10 or objective.updates=2; may come again.
      out: Directory of the run, by default the config's.
    """

    config: Annotated[str, tyro.conf.Positional]
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    out: str | None = None


def run(args: TrainPolicyArgs) -> int:
    """Trains; returns the exit code."""
    if find_spec("optax") is None:
        raise ConfigError("train policy: optax not installed; pip install 'jaxspec[train]'")
    from jaxspec.train.policy.policy_settings import load_policy_settings
    from jaxspec.train.policy.training import train_policy

    settings = load_policy_settings(args.config, args.set, args.out)
    sys.stderr.write(f"jaxspec: policy {settings.target}, reward {settings.rollout.reward}, run in {settings.out}\n")

    def show(entry: dict[str, int | float]) -> None:
        words = [f"{entry['step']}/{settings.steps}", f"reward {entry['reward']:.3f}", f"loss {entry['loss']:.3g}"]
        words += [f"{entry['tokens_per_s']:.0f} tokens/s", f"{entry['acceptance_length']:.2f} tokens per pass"]
        words += [f"head loss {entry['head_loss']:.3f}"] if "head_loss" in entry else []
        if different := entry.get("different_logprobs"):
            words.append(f"{different:.0f} LOG-PROBABILITIES DIFFER")
        sys.stderr.write(f"jaxspec: {', '.join(words)}\n")
        sys.stderr.flush()

    train_policy(settings, show)
    sys.stderr.write(f"jaxspec: {settings.steps} steps done; the model is in {settings.out}/last\n")
    return 0
