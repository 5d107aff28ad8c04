"""The mixture-of-experts layer: router, routed experts, shared expert."""

from dataclasses import dataclass, field

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.nn.dense import dense, exact_dense
from jaxspec.nn.expert_shards import ROUTED
from jaxspec.nn.experts import run_experts, run_weighed
from jaxspec.nn.ffn import SILU, Activation, DenseFfn, FfnSpec
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.norm import rms_norm
from jaxspec.nn.param import ZEROS, Param, declare
from jaxspec.nn.policy import Policy
from jaxspec.nn.router import RouterSpec, Routing, route
from jaxspec.nn.steady import rounded, row_sum, sigmoid
from jaxspec.pytree import replace
from jaxspec.shapes import Array

ROUTER = Param("router_DE", ("embed", "routed_to"), part="router")
ROUTER_BIAS = Param("router_bias_E", ("routed_to",), "bias", part="router")
CHOICE_BIAS = Param("choice_bias_E", ("routed_to",), "bias", dtype=jnp.float32, part="router")
TABLE = Param("table_VA", ("token_id", "choices"), "table", dtype=jnp.int32, part="router")
SLOTS = Param("slots_EX", ("routed_to", "replicas"), "table", ZEROS, jnp.int32, part="router")
EXPERT_SCALE = Param("expert_scale_E", ("routed_to",), "norm", dtype=jnp.float32, part="router")
APART = {
    "router_scale": Param("router_scale_D", ("embed",), "norm", part="router"),
    "routed_norm": Param("routed_norm_D", ("embed",), "norm"),
    "routed_out_norm": Param("routed_out_norm_D", ("embed",), "norm"),
    "shared_out_norm": Param("shared_out_norm_D", ("embed",), "norm"),
}
LATENT_IN = Param("latent_in_DR", ("embed", "rank"), part="shared experts")
LATENT_OUT = Param("latent_out_RD", ("rank", "embed"), part="shared experts")
SHARED_GATE = Param("shared_gate_D1", ("embed", "gate"), part="shared experts")


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
      latent: width that the input of the routed experts is brought to, and their sum back from; 0 for none.
      apart: whether router and routed experts read the stream itself, each through a norm of its own, whether what
        routed and shared experts return is normalized before it is added, and whether each expert's weight is
        multiplied by a learned number.
      identities: further experts, numbered after the others, which return what they read.
      deferred: whether the layer returns what its routed experts give by itself, to be added later.
      weighs_input: whether a choice's weight multiplies what its expert reads instead of what it returns.
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
    latent: int = 0
    weighs_input: bool = False
    apart: bool = False
    identities: int = 0
    deferred: bool = False

    @property
    def choices(self) -> int:
        """Returns how many experts the router chooses from."""
        return self.experts + self.identities

    def shapes(self, model_dim: int, redundant: int = 0) -> dict[str, tuple[int, ...]]:
        """Shapes of the routed parameters, all experts stacked, and slots beyond them."""
        e, f, parts, dim = self.experts + redundant, self.hidden, 1 + self.activation.gated, self.latent or model_dim
        shapes = {"gate_up_ED2F": (e, dim, parts, f), "down_EFD": (e, f, dim)}
        return shapes | ({"gate_up_bias_E2F": (e, parts, f), "down_bias_ED": (e, dim)} if self.bias else {})


class Moe(nn.Module):
    """Parameters of one expert layer; the policy says how the routed weights are stored and computed.

    Attributes:
      layers: length of the stack of equal layers that the routed parameters are a part of, 0 for none.
      norm_eps: of the norms inside.
    """

    spec: MoeSpec
    model_dim: int
    policy: Policy
    layers: int = 0
    norm_eps: float = 1e-6

    @nn.compact
    def __call__(
        self, x_BTD: Array, inputs: Inputs, layer: Array | None = None, *, stream_BTD: Array | None = None
    ) -> tuple[Array, Routing]:
        """Routes, and returns routed plus shared output [B, T, D], or routed alone where deferred, and the choices.

        Args:
          x_BTD: the normalized stream.
          inputs: token ids for routers that read them, positions, by which replicas of an expert take turns, and which
            positions count; the others touch no expert.
          layer: index in the stack.
          stream_BTD: the stream itself, for experts that read it.
        """
        s, dim = self.spec, self.model_dim
        x_MD, read_MD, token_M = x_BTD.reshape(-1, dim), x_BTD.reshape(-1, dim), inputs.token_BT.reshape(-1)
        if s.apart:
            assert stream_BTD is not None, "whoever calls such a layer has the stream"
            stream_MD = stream_BTD.reshape(-1, dim)
            read_MD = self._normed(stream_MD, "routed_norm")
            routing = self._route(self._normed(stream_MD, "router_scale") * dim**-0.5, token_M)
        else:
            routing = self._route(x_MD, token_M)
        out_MD = self._routed(read_MD, routing, inputs, layer)
        shared_MD = self._shared(x_MD) if s.shared_hidden else None
        if s.apart:
            zero_M1 = inputs.zero_BT1.reshape(-1, 1)
            out_MD = rounded(self._normed(out_MD, "routed_out_norm"), zero_M1)
            shared_MD = None if shared_MD is None else rounded(self._normed(shared_MD, "shared_out_norm"), zero_M1)
        out_MD = out_MD if shared_MD is None or s.deferred else out_MD + shared_MD
        return out_MD.reshape(x_BTD.shape), replace(routing, shared_MD=x_MD if shared_MD is None else shared_MD)

    def _normed(self, x_MD: Array, name: str) -> Array:
        return rms_norm(x_MD, declare(self, self.policy, APART[name], (self.model_dim,)), self.norm_eps)

    def _routed(self, x_MD: Array, routing: Routing, inputs: Inputs, layer: Array | None) -> Array:
        """Computes what the routed experts return, weighed and summed."""
        s, p, dim = self.spec, self.policy, self.model_dim
        live_BT = None if inputs.window is None else inputs.window.valid
        live = None if live_BT is None else live_BT.reshape(-1)
        if s.identities:
            own_MA = routing.expert_MA < s.experts
            live = own_MA if live is None else own_MA & live[:, None]
        lead = (self.layers,) if self.layers else ()
        placed = self._placed(routing, inputs)
        experts = {
            name: declare(self, p, ROUTED[name], (*lead, *shape))
            for name, shape in s.shapes(dim, p.layout.slots.redundant if p.layout.slots else 0).items()
        }
        inner = dense(x_MD, declare(self, p, LATENT_IN, (dim, s.latent)), dtype=p.compute.dtype) if s.latent else x_MD
        run = run_weighed if s.weighs_input else run_experts
        out_MD = run(inner, placed, experts, s.activation, p, layer, live)
        if s.latent:
            out_MD = dense(out_MD, declare(self, p, LATENT_OUT, (s.latent, dim)), dtype=p.compute.dtype)
        if s.identities:
            weight_M1 = row_sum(jnp.where(routing.expert_MA < s.experts, 0.0, routing.weight_MA))
            out_MD = out_MD + rounded(weight_M1 * x_MD, inputs.zero_BT1.reshape(-1, 1))
        return out_MD

    def _shared(self, x_MD: Array) -> Array:
        """Computes what the shared expert returns."""
        s, p, dim, gate = self.spec, self.policy, self.model_dim, None
        if s.shared_gate:
            gate = sigmoid(dense(x_MD, declare(self, p, SHARED_GATE, (dim, 1)), dtype=p.compute.dtype))
        shared = FfnSpec(s.shared_hidden, s.activation, s.activation.gated)
        return DenseFfn(shared, dim, p, name="shared")(x_MD, gate)

    def _route(self, x_MD: Array, token_M: Array) -> Routing:
        s, p, r = self.spec, self.policy, self.spec.router
        router_DE = declare(self, p, ROUTER, (self.model_dim, s.choices))
        logit_bias = declare(self, p, ROUTER_BIAS, (s.choices,)) if r.logit_bias else None
        product = exact_dense if r.exact else dense
        logits_ME = product(x_MD, router_DE, logit_bias, dtype=p.compute.dtype)
        bias_E = declare(self, p, CHOICE_BIAS, (s.choices,)) if r.choice_bias else None
        if r.kind != "hash":
            routing = route(logits_ME, s.top_k, r, bias_E)
            if not s.apart:
                return routing
            scale_E = declare(self, p, EXPERT_SCALE, (s.experts,))
            return replace(routing, weight_MA=routing.weight_MA * scale_E[routing.expert_MA])
        table_VA = declare(self, p, replace(TABLE, init=_any_experts(s.experts)), (s.vocab_size, s.top_k))
        return route(logits_ME, s.top_k, r, bias_E, table_VA[token_M])

    def _placed(self, routing: Routing, inputs: Inputs) -> Routing:
        """The choices as slots, where there are such."""
        s, p = self.spec, self.policy
        if p.layout.slots is None:
            return routing
        slots_EX = declare(self, p, SLOTS, (s.experts, p.layout.slots.replicas))
        turn_M = (inputs.token_BT + inputs.position_BT).reshape(-1)
        expert_MA = jnp.minimum(routing.expert_MA, s.experts - 1) if s.identities else routing.expert_MA
        return replace(routing, expert_MA=slots_for(expert_MA, turn_M, slots_EX))


def _any_experts(experts: int):
    def init(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        ids = jax.vmap(lambda k: jax.random.permutation(k, experts)[: shape[1]])(jax.random.split(key, shape[0]))
        return ids.astype(dtype)

    return init


def slots_for(expert_MA: Array, turn_M: Array, slots_EX: Array) -> Array:
    """Returns choices among slots, int32 [M, A]: of the r slots of an expert the one with index ``turn % r``.

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
    index_MA1 = (turn_M[:, None] % replicas_MA)[..., None]
    return jnp.take_along_axis(slot_MAX, index_MA1, axis=-1)[..., 0]
