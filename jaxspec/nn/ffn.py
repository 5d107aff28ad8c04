"""Feed-forward layers: gated, and the plain one of two products."""

from dataclasses import dataclass

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.nn.activations import ACTIVATIONS
from jaxspec.nn.dense import dense
from jaxspec.nn.policy import Policy, Weight, matrix, weight
from jaxspec.nn.steady import exp
from jaxspec.shapes import Array


@dataclass(frozen=True)
class Activation:
    """What happens between the products of a feed-forward layer.

    Attributes:
      kind: a key of ``ACTIVATIONS``, or ``swigluoai``, gpt-oss's own, which no config can ask for.
      limit: bound of the gate from above and of the up projection from both sides, None for none.
    """

    kind: str = "silu"
    limit: float | None = None

    def __call__(self, gate: Array, up: Array) -> Array:
        """Hidden units of a gated layer."""
        if self.limit is not None:
            gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        if self.kind == "swigluoai":
            return (up + 1) * (gate / (1 + exp(-1.702 * gate)))
        return ACTIVATIONS[self.kind](gate) * up


SILU = Activation()


@dataclass(frozen=True)
class FfnSpec:
    """A dense feed-forward layer.

    Attributes:
      hidden: F.
      activation: between its products.
      gated: whether a gate multiplies the hidden units; without one there are two products.
      bias: whether the products have biases.
    """

    hidden: int
    activation: Activation = SILU
    gated: bool = True
    bias: bool = False


def gated(
    x: Array,
    gate_up_D2F: Weight,
    down_FD: Weight,
    gate_up_bias_2F: Array | None = None,
    down_bias_D: Array | None = None,
    *,
    activation: Activation,
    dtype: jnp.dtype | None = None,
    scale: Array | None = None,
) -> Array:
    """``down(act(gate(x)) * up(x))`` (Shazeer 2020), gate and up in one product.

    Args:
      x: [..., D].
      gate_up_D2F: gate weights, then up weights.
      down_FD: projection back to the model width.
      gate_up_bias_2F: bias of the first product.
      down_bias_D: bias of the second.
      activation: of the hidden units.
      dtype: compute dtype of the products; the weights' own by default.
      scale: [..., 1], multiplies the result; applied to the hidden units, so that no product meets the sum behind it.
    """
    both = dense(x, gate_up_D2F, gate_up_bias_2F, dtype=dtype)
    hidden = activation(both[..., 0, :], both[..., 1, :])
    return dense(hidden if scale is None else hidden * scale, down_FD, down_bias_D, dtype=dtype)


class DenseFfn(nn.Module):
    """Parameters of one dense feed-forward layer."""

    spec: FfnSpec
    model_dim: int
    policy: Policy

    @nn.compact
    def __call__(self, x: Array, scale: Array | None = None) -> Array:
        """The layer's output, [..., D], times ``scale`` [..., 1]."""
        s, p, dim, zeros = self.spec, self.policy, self.model_dim, nn.initializers.zeros
        down = matrix(self, p, "down_FD", (s.hidden, dim))
        down_bias = weight(self, p, "down_bias_D", (dim,), zeros) if s.bias else None
        if s.gated:
            gate_up = matrix(self, p, "gate_up_D2F", (dim, 2, s.hidden))
            bias = weight(self, p, "gate_up_bias_2F", (2, s.hidden), zeros) if s.bias else None
            return gated(x, gate_up, down, bias, down_bias, activation=s.activation, dtype=p.compute.dtype, scale=scale)
        up_bias = weight(self, p, "up_bias_F", (s.hidden,), zeros) if s.bias else None
        hidden = dense(x, matrix(self, p, "up_DF", (dim, s.hidden)), up_bias, dtype=p.compute.dtype)
        return dense(ACTIVATIONS[s.activation.kind](hidden), down, down_bias, dtype=p.compute.dtype)
