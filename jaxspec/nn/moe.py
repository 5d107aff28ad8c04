"""The mixture-of-experts layer: router, routed experts, shared expert."""

from dataclasses import dataclass, field
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.nn.dense import dense
from jaxspec.nn.experts import stacked, switched
from jaxspec.nn.ffn import gated
from jaxspec.nn.router import RouterSpec, Routing, route
from jaxspec.nn.steady import sigmoid
from jaxspec.shapes import Array

ExpertLayout = Literal["stacked", "switched"]


@dataclass(frozen=True)
class FfnSpec:
    """A dense gated feed-forward layer of ``hidden`` units."""

    hidden: int
    activation: str = "silu"


@dataclass(frozen=True)
class MoeSpec:
    """A layer of routed experts.

    Attributes:
      experts, top_k: E and A.
      hidden: F of one routed expert.
      router: how experts are chosen.
      shared_hidden: F of the shared expert, 0 for none.
      shared_gate: whether a sigmoid of the input scales the shared expert.
      activation: of all experts.
    """

    experts: int
    top_k: int
    hidden: int
    router: RouterSpec = field(default_factory=RouterSpec)
    shared_hidden: int = 0
    shared_gate: bool = False
    activation: str = "silu"


class DenseFfn(nn.Module):
    """Parameters of one gated feed-forward layer."""

    spec: FfnSpec
    model_dim: int
    param_dtype: jnp.dtype
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Array, scale: Array | None = None) -> Array:
        """The layer's output, [..., D], times ``scale`` [..., 1]."""
        init, dim, hidden = nn.initializers.normal(0.02), self.model_dim, self.spec.hidden
        gate_up = self.param("gate_up_D2F", init, (dim, 2, hidden), self.param_dtype)
        down = self.param("down_FD", init, (hidden, dim), self.param_dtype)
        return gated(x, gate_up, down, activation=self.spec.activation, dtype=self.dtype, scale=scale)


class Moe(nn.Module):
    """Parameters of one expert layer; ``layout`` says how the routed weights are stored and computed."""

    spec: MoeSpec
    model_dim: int
    param_dtype: jnp.dtype
    dtype: jnp.dtype
    layout: ExpertLayout

    @nn.compact
    def __call__(self, x_BTD: Array) -> tuple[Array, Routing]:
        """Routed plus shared output [B, T, D], and the choices."""
        s, dim = self.spec, self.model_dim
        init = nn.initializers.normal(0.02)
        router_DE = self.param("router_DE", init, (dim, s.experts), self.param_dtype)
        x_MD = x_BTD.reshape(-1, dim)
        routing = route(dense(x_MD, router_DE, dtype=self.dtype), s.top_k, s.router)
        if self.layout == "stacked":
            gate_up = self.param("gate_up_ED2F", init, (s.experts, dim, 2, s.hidden), self.param_dtype)
            down = self.param("down_EFD", init, (s.experts, s.hidden, dim), self.param_dtype)
            out_MD = stacked(x_MD, routing, gate_up, down, s.activation, self.dtype)
        else:
            experts = tuple(
                {
                    "gate_up_D2F": self.param(f"gate_up_D2F_{e}", init, (dim, 2, s.hidden), self.param_dtype),
                    "down_FD": self.param(f"down_FD_{e}", init, (s.hidden, dim), self.param_dtype),
                }
                for e in range(s.experts)
            )
            out_MD = switched(x_MD, routing, experts, s.activation)
        if s.shared_hidden:
            gate = None
            if s.shared_gate:
                gate_D1 = self.param("shared_gate_D1", init, (dim, 1), self.param_dtype)
                gate = sigmoid(dense(x_MD, gate_D1, dtype=self.dtype))
            shared = DenseFfn(FfnSpec(s.shared_hidden, s.activation), dim, self.param_dtype, self.dtype, name="shared")
            out_MD = out_MD + shared(x_MD, gate)
        return out_MD.reshape(x_BTD.shape), routing
