"""The mixture-of-experts layer: router, routed experts, shared expert."""

from dataclasses import dataclass, field

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.nn.dense import dense, exact_dense
from jaxspec.nn.expert_slots import in_slots
from jaxspec.nn.experts import by_kernel, by_xla, switched
from jaxspec.nn.ffn import SILU, Activation, DenseFfn, FfnSpec
from jaxspec.nn.policy import Policy, Weight, matrix, weight
from jaxspec.nn.router import RouterSpec, Routing, route
from jaxspec.nn.steady import sigmoid
from jaxspec.pytree import replace
from jaxspec.shapes import Array

ZEROS = nn.initializers.zeros
ROUTED = ("gate_up_ED2F", "down_EFD", "gate_up_bias_E2F", "down_bias_ED")


@dataclass(frozen=True)
class MoeSpec:
    """A layer of routed experts.

    Attributes:
      experts, top_k: E and A.
      hidden: F of one routed expert.
      router: how experts are chosen.
      vocab_size: tokens of the table of a ``hash`` router, 0 for other routers.
      shared_hidden: F of the shared expert, 0 for none.
      shared_gate: whether a sigmoid of the input scales the shared expert.
      activation: of all experts.
      bias: whether the routed experts' products have biases.
    """

    experts: int
    top_k: int
    hidden: int
    router: RouterSpec = field(default_factory=RouterSpec)
    vocab_size: int = 0
    shared_hidden: int = 0
    shared_gate: bool = False
    activation: Activation = SILU
    bias: bool = False

    def shapes(self, model_dim: int, redundant: int = 0) -> dict[str, tuple[int, ...]]:
        """Shapes of the routed parameters, all experts stacked, and slots beyond them."""
        e, f = self.experts + redundant, self.hidden
        shapes = {"gate_up_ED2F": (e, model_dim, 2, f), "down_EFD": (e, f, model_dim)}
        return shapes | ({"gate_up_bias_E2F": (e, 2, f), "down_bias_ED": (e, model_dim)} if self.bias else {})


class Moe(nn.Module):
    """Parameters of one expert layer; the policy says how the routed weights are stored and computed.

    Attributes:
      layers: length of the stack of equal layers that the routed parameters are a part of, 0 for none.
    """

    spec: MoeSpec
    model_dim: int
    policy: Policy
    layers: int = 0

    @nn.compact
    def __call__(
        self,
        x_BTD: Array,
        token_BT: Array,
        position_BT: Array,
        layer: Array | None = None,
        live_BT: Array | None = None,
    ) -> tuple[Array, Routing]:
        """Routed plus shared output [B, T, D], and the choices.

        Args:
          x_BTD: the normalised stream.
          token_BT: for routers that read token ids.
          position_BT: absolute positions, by which replicas of an expert take turns.
          layer: place in the stack.
          live_BT: positions whose results are used, None for all; the others touch no expert.
        """
        s, p, dim = self.spec, self.policy, self.model_dim
        x_MD = x_BTD.reshape(-1, dim)
        live_M = None if live_BT is None else live_BT.reshape(-1)
        routing = self._route(x_MD, token_BT.reshape(-1))
        if p.layout.experts == "stacked":
            lead = (self.layers,) if self.layers else ()
            placed = self._placed(routing, token_BT, position_BT)
            experts = {
                name: weight(self, p, name, (*lead, *shape), ZEROS if "bias" in name else None)
                for name, shape in s.shapes(dim, p.layout.slots.redundant if p.layout.slots else 0).items()
            }
            out_MD = by_kernel(x_MD, placed, experts, s.activation, p, layer, live_M)
            if out_MD is None:
                out_MD = by_xla(x_MD, placed, experts, s.activation, p, layer, live_M)
        else:
            own = tuple(map(self._one, range(s.experts)))
            out_MD = switched(x_MD, routing, own, s.activation, p.compute.dtype, live_M)
        if s.shared_hidden:
            gate = None
            if s.shared_gate:
                gate = sigmoid(dense(x_MD, matrix(self, p, "shared_gate_D1", (dim, 1)), dtype=p.compute.dtype))
            shared_MD = DenseFfn(FfnSpec(s.shared_hidden, s.activation), dim, p, name="shared")(x_MD, gate)
            out_MD = out_MD + shared_MD
        else:
            shared_MD = x_MD
        return out_MD.reshape(x_BTD.shape), replace(routing, common_MD=shared_MD)

    def _route(self, x_MD: Array, token_M: Array) -> Routing:
        s, p, r = self.spec, self.policy, self.spec.router
        router_DE = matrix(self, p, "router_DE", (self.model_dim, s.experts))
        logit_bias = weight(self, p, "router_bias_E", (s.experts,), ZEROS) if r.logit_bias else None
        product = exact_dense if r.exact else dense
        logits_ME = product(x_MD, router_DE, logit_bias, dtype=p.compute.dtype)
        bias_E = weight(self, p, "choice_bias_E", (s.experts,), ZEROS, jnp.float32) if r.choice_bias else None
        if r.kind != "hash":
            return route(logits_ME, s.top_k, r, bias_E)
        table_VA = weight(self, p, "table_VA", (s.vocab_size, s.top_k), _any_experts(s.experts), jnp.int32)
        return route(logits_ME, s.top_k, r, bias_E, table_VA[token_M])

    def _placed(self, routing: Routing, token_BT: Array, position_BT: Array) -> Routing:
        """The choices as slots, where there are such."""
        s, p = self.spec, self.policy
        if p.layout.slots is None:
            return routing
        slots_EX = weight(self, p, "slots_EX", (s.experts, p.layout.slots.replicas), ZEROS, jnp.int32)
        turn_M = (token_BT + position_BT).reshape(-1)
        return replace(routing, expert_MA=in_slots(routing.expert_MA, turn_M, slots_EX))

    def _one(self, e: int) -> dict[str, Weight]:
        """Parameters of expert e, in arrays of their own."""
        made = {}
        for name, shape in self.spec.shapes(self.model_dim).items():
            own = own_name(name)
            made[own] = weight(self, self.policy, f"{own}_{e}", shape[1:], ZEROS if "bias" in name else None)
        return made


def own_name(name: str) -> str:
    """Name of one expert's parameter, from that of all experts: ``down_EFD`` to ``down_FD``."""
    base, _, axes = name.rpartition("_")
    return f"{base}_{axes.removeprefix('E')}"


def _any_experts(experts: int):
    def init(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        ids = jax.vmap(lambda k: jax.random.permutation(k, experts)[: shape[1]])(jax.random.split(key, shape[0]))
        return ids.astype(dtype)

    return init
