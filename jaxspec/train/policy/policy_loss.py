"""The clipped policy gradient: the engine's log-probabilities as values, the trainer's forward for gradients."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.checkpoint.load.places import unflatten
from jaxspec.models.transformer import Transformer, teacher_forced
from jaxspec.pytree import pytree, static
from jaxspec.shapes import Array, Params


@pytree
class PolicyBatch:
    """Continuations in rows of T tokens, one in each.

    Attributes:
      token_BT: int32 ids, prompt first.
      segment_BT: 1 where there is text, 0 for padding.
      position_BT: 0, 1, 2, ...
      loss_BT: whether the token was sampled.
      old_BT: log-probability of each sampled token by the engine that sampled it.
      now_BT: the same by the engine with the parameters of this update.
      advantage_B: of each continuation.
    """

    token_BT: Array
    segment_BT: Array
    position_BT: Array
    loss_BT: Array
    old_BT: Array
    now_BT: Array
    advantage_B: Array


@pytree
class PolicyObjective:
    """What does not change while a policy is trained.

    Attributes:
      fixed: parameters that are not trained, by path.
      net: the network in the layout of training.
      clip: how far below and above 1 the ratio counts.
    """

    fixed: Mapping[str, Array]
    net: Transformer = static()
    clip: tuple[float, float] = static(default=(0.2, 0.28))


def tree_of(params: Params, fixed: Mapping[str, Array]) -> Params:
    """Returns the parameters that are trained and those that are not as the network's tree."""
    leaves: Any = params
    return {"params": unflatten({**fixed, **leaves})}


@jax.custom_jvp
def valued(value: Array, slope: Array) -> Array:
    """Returns ``value``, to the bit, with the derivatives of ``slope``."""
    return value


@valued.defjvp
def _valued_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return primals[0], tangents[1]


def policy_loss(
    params: Params, frozen: PolicyObjective, batch: PolicyBatch, key: Array
) -> tuple[Array, dict[str, Array]]:
    """Computes minus the mean over sampled tokens of min(r A, clip(r) A), r the ratio of new to old probability.

    r is made of the engine's log-probabilities alone, so before the first change it is 1 exactly. Gradients flow
    through the trainer's own forward, which computes the same function and rounds otherwise; how far off it is, is
    among the metrics.
    """
    tree = tree_of(params, frozen.fixed)
    logits_BTV, _ = teacher_forced(frozen.net, tree, batch.token_BT, batch.position_BT, batch.segment_BT)
    logp_BTV = jax.nn.log_softmax(logits_BTV[:, :-1], axis=-1)
    own_BT = jnp.take_along_axis(logp_BTV, batch.token_BT[:, 1:, None], axis=-1)[..., 0]
    sampled_BT, now_BT = batch.loss_BT[:, 1:], batch.now_BT[:, 1:]
    ratio_BT = jnp.exp(valued(now_BT, own_BT) - batch.old_BT[:, 1:])
    low, high = frozen.clip
    advantage_B1 = batch.advantage_B[:, None]
    gain_BT = jnp.minimum(ratio_BT * advantage_B1, jnp.clip(ratio_BT, 1 - low, 1 + high) * advantage_B1)
    count = jnp.sum(sampled_BT, dtype=jnp.float32)
    most = jnp.maximum(count, 1)

    def mean(x_BT: Array) -> Array:
        return jnp.sum(jnp.where(sampled_BT, x_BT, 0)) / most

    off_BT = jnp.abs(own_BT - now_BT)
    return -mean(gain_BT), {
        "trained_tokens": count,
        "surprise": -mean(now_BT),
        "ratio_off_1": mean(jnp.abs(ratio_BT - 1)),
        "clipped": mean(((ratio_BT < 1 - low) | (ratio_BT > 1 + high)).astype(jnp.float32)),
        "trainer_off": mean(off_BT),
    }
