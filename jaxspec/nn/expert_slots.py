"""Which slot of a mesh computes a choice, where a placement has put experts into slots, some into several."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxspec.shapes import Array


@dataclass(frozen=True)
class Slots:
    """What of a placement changes programs; which expert is where is a parameter, ``slots_EX``.

    Attributes:
      redundant: slots of each layer beyond its experts.
      replicas: most slots that an expert has.
    """

    redundant: int = 0
    replicas: int = 1


def in_slots(expert_MA: Array, turn_M: Array, slots_EX: Array) -> Array:
    """Choices among slots, int32 [M, A]: of r slots of an expert the one in place ``turn % r``.

    Args:
      expert_MA: choices among experts.
      turn_M: int32, by which replicas take turns. It must not depend on who else is in the batch, or a row's last bits
        would: devices add their outputs in an order of their own.
      slots_EX: slots of each expert, then -1.
    """
    slot_MAX = slots_EX[expert_MA]
    if slots_EX.shape[1] == 1:
        return slot_MAX[..., 0]
    replicas_MA = jnp.sum(slot_MAX >= 0, axis=-1, dtype=jnp.int32)
    place_MA1 = (turn_M[:, None] % replicas_MA)[..., None]
    return jnp.take_along_axis(slot_MAX, place_MA1, axis=-1)[..., 0]
