"""Continuations that the engine sampled: their rewards, advantages and log-probabilities, as rows for an update."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxspec.errors import JaxspecError
from jaxspec.serve.request import CompletionOutput, Logprob, RequestOutput
from jaxspec.train.policy.policy_loss import PolicyBatch
from jaxspec.train.policy.rewards import Reward


@dataclass(frozen=True)
class Rollout:
    """One continuation.

    Attributes:
      ids: prompt and continuation.
      prompt: how many of them are the prompt.
      logprob_T: of each sampled token, float32, as the engine reported it.
      reward: of the whole.
      advantage: over the others of its group.
    """

    ids: list[int]
    prompt: int
    logprob_T: np.ndarray
    reward: float
    advantage: float


def rollouts_of(outputs: Sequence[RequestOutput], reward: Reward, kind: Literal["grpo", "reinforce"]) -> list[Rollout]:
    """Rewards every continuation and compares those of one prompt.

    Raises:
      JaxspecError: a request ended with an error.
    """
    made = []
    for output in outputs:
        if error := next((c.error for c in output.outputs if c.error), None):
            raise JaxspecError(f"rollout: {error}")
        rewards = np.array([reward(output.prompt or "", c.text) for c in output.outputs])
        for c, own, advantage in zip(output.outputs, rewards, advantages(rewards, kind), strict=True):
            ids = output.prompt_token_ids + c.token_ids
            made.append(Rollout(ids, len(output.prompt_token_ids), _reported(c), float(own), float(advantage)))
    return made


def _reported(c: CompletionOutput) -> np.ndarray:
    entries = zip(c.token_ids, c.logprobs or (), strict=True)
    return np.array([entry[token].logprob for token, entry in entries], np.float32)


def advantages(rewards: np.ndarray, kind: Literal["grpo", "reinforce"]) -> np.ndarray:
    """Returns how much better each of a group is: than their mean in deviations, or than the mean of the others."""
    if kind == "grpo":
        deviation = rewards.std()
        return (rewards - rewards.mean()) / deviation if deviation > 0 else np.zeros_like(rewards)
    return (rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1)


def batch_of(rollouts: Sequence[Rollout], length: int) -> PolicyBatch:
    """Returns rollouts as the rows of one update, whose log-probabilities are those reported."""
    token_BT, segment_BT = (np.zeros((len(rollouts), length), np.int32) for _ in range(2))
    loss_BT, old_BT = np.zeros(token_BT.shape, bool), np.zeros(token_BT.shape, np.float32)
    for row, rollout in enumerate(rollouts):
        whole, sampled = slice(len(rollout.ids)), slice(rollout.prompt, len(rollout.ids))
        token_BT[row, whole], segment_BT[row, whole] = rollout.ids, 1
        loss_BT[row, sampled], old_BT[row, sampled] = True, rollout.logprob_T
    position_BT = np.broadcast_to(np.arange(length, dtype=np.int32), token_BT.shape)
    advantage_B = np.array([rollout.advantage for rollout in rollouts], np.float32)
    arrays: Any = token_BT, segment_BT, position_BT, loss_BT, old_BT, old_BT, advantage_B
    return PolicyBatch(*arrays)


def scored(rollouts: Sequence[Rollout], scores: Sequence[Sequence[Logprob | None]], length: int) -> np.ndarray:
    """Returns what the engine scores of the sampled tokens, laid out as in ``batch_of``."""
    now_BT = np.zeros((len(rollouts), length), np.float32)
    for row, (rollout, entries) in enumerate(zip(rollouts, scores, strict=True)):
        own = [entry.logprob for entry in entries[rollout.prompt :] if entry is not None]
        now_BT[row, rollout.prompt : len(rollout.ids)] = own
    return now_BT
