"""Feed-forward layers: gated, and the plain one of two products."""

from dataclasses import dataclass

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.nn.activations import ACTIVATIONS
from jaxspec.nn.dense import dense
from jaxspec.nn.param import Param, declare
from jaxspec.nn.policy import Policy, Weight
from jaxspec.nn.steady import exp
from jaxspec.shapes import Array

GATE_UP = Param("gate_up_D2F", ("embed", "gate_up", "mlp"))
GATE_UP_BIAS = Param("gate_up_bias_2F", ("gate_up", "mlp"), "bias")
UP = Param("up_DF", ("embed", "mlp"))
UP_BIAS = Param("up_bias_F", ("mlp",), "bias")
DOWN = Param("down_FD", ("mlp", "embed"))
DOWN_BIAS = Param("down_bias_D", ("embed",), "bias")


@dataclass(frozen=True)
class Activation:
    """What happens between the products of a feed-forward layer.

    Attributes:
      kind: a key of ``ACTIVATIONS``, or ``swigluoai``, gpt-oss's own, which no config can ask for.
      limit: bound of the gate from above and of the up projection from both sides, None for none.
      gated: whether the function of the gate multiplies the up projection; without, it is all.
      late: whether the bound is of what the function gives instead of what it takes.
    """

    kind: str = "silu"
    limit: float | None = None
    gated: bool = True
    late: bool = False

    def __call__(self, gate: Array, up: Array) -> Array:
        """Hidden units; without a gate that is the up projection."""
        if not self.gated:
            return ACTIVATIONS[self.kind](gate)
        if self.limit is not None:
            up = jnp.clip(up, -self.limit, self.limit)
            if self.late:
                return jnp.minimum(ACTIVATIONS[self.kind](gate), self.limit) * up
            gate = jnp.minimum(gate, self.limit)
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


def run_gated(
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
    """Computes ``down(act(gate(x)) * up(x))`` (Shazeer 2020), gate and up in one product.

    Args:
      x: [..., D].
      gate_up_D2F: gate weights, then up weights.
      down_FD: projection back to the model width.
      gate_up_bias_2F: bias of the first product.
      down_bias_D: bias of the second.
      activation: of the hidden units.
      dtype: compute dtype of the products; the weights' own by default.
      scale: [..., 1], multiplies the result; applied to the hidden units, so no product meets a later sum.
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
        s, p, dim = self.spec, self.policy, self.model_dim
        down = declare(self, p, DOWN, (s.hidden, dim))
        down_bias = declare(self, p, DOWN_BIAS, (dim,)) if s.bias else None
        if s.gated:
            gate_up = declare(self, p, GATE_UP, (dim, 2, s.hidden))
            bias = declare(self, p, GATE_UP_BIAS, (2, s.hidden)) if s.bias else None
            return run_gated(
                x, gate_up, down, bias, down_bias, activation=s.activation, dtype=p.compute.dtype, scale=scale
            )
        up_bias = declare(self, p, UP_BIAS, (s.hidden,)) if s.bias else None
        hidden = dense(x, declare(self, p, UP, (dim, s.hidden)), up_bias, dtype=p.compute.dtype)
        return dense(ACTIVATIONS[s.activation.kind](hidden), down, down_bias, dtype=p.compute.dtype)
