"""How many distinct experts a verification is predicted to touch, from a head that predicts routing."""

import jax
import jax.numpy as jnp

from jaxspec.models.arch import ArchSpec
from jaxspec.nn.moe import MoeSpec
from jaxspec.shapes import Array


def experts_of(arch: ArchSpec) -> int:
    """E, the most routed experts that a layer of the model has."""
    return max((layer.ffn.experts for layer in arch.layers if isinstance(layer.ffn, MoeSpec)), default=0)


def chosen_of(arch: ArchSpec) -> int:
    """A, the most experts that a layer of the model chooses for a token."""
    return max((layer.ffn.top_k for layer in arch.layers if isinstance(layer.ffn, MoeSpec)), default=0)


def distinct_by_depth(expert_BKYA: Array, live_BK: Array, experts: int) -> Array:
    """Distinct experts of the first 1, 2, ... K drafts of all rows, mean over the predicted layers, float32 [K].

    Args:
      expert_BKYA: predicted choices.
      live_BK: drafts that are verified.
      experts: E.
    """
    chosen_BKYE = jnp.any(jax.nn.one_hot(expert_BKYA, experts, dtype=bool), axis=3) & live_BK[..., None, None]
    upto_KYE = jnp.cumsum(jnp.any(chosen_BKYE, axis=0), axis=0) > 0
    return jnp.mean(jnp.sum(upto_KYE, axis=2, dtype=jnp.int32).astype(jnp.float32), axis=1)
