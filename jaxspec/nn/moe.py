"""The mixture-of-experts layer: router, routed experts, shared expert."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.nn.dense import dense, exact_dense
from jaxspec.nn.expert_shards import ROUTED
from jaxspec.nn.experts import run_experts, run_weighed, sorted_height
from jaxspec.nn.ffn import SILU, Activation, DenseFfn, FfnSpec
from jaxspec.nn.fused_routing import SortedRows, route_by_kernel
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.matrix import own_of
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
      shared_activation: of the shared expert, None where it is that of all.
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
    shared_activation: Activation | None = None
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

    @property
    def plain(self) -> bool:
        """Whether one normalized row is all that router and routed experts read, and their sum all that they return."""
        return not (self.apart or self.identities or self.deferred or self.weighs_input)

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
        self, x_BTD: Array, inputs: Inputs, layer: Array | None = None, *, stream_BTD: Array | None = None,
        copy_PMX: Array | None = None,
    ) -> tuple[Array, Routing]:  # fmt: skip
        """Routes, and returns routed plus shared output [B, T, D], or routed alone where deferred, and the choices.

        Args:
          x_BTD: the normalized stream.
          inputs: token ids for routers that read them, positions, by which replicas of an expert take turns, and which
            positions count; the others touch no expert.
          layer: index in the stack.
          stream_BTD: the stream itself, for experts that read it.
          copy_PMX: x as the experts' kernel reads it, where a kernel has left it so.
        """
        s, dim = self.spec, self.model_dim
        x_MD = x_BTD.reshape(-1, dim)
        routed_MD = read_MD = x_MD
        if s.apart:
            assert stream_BTD is not None, "whoever calls such a layer has the stream"
            stream_MD = stream_BTD.reshape(-1, dim)
            read_MD = self._normed(stream_MD, "routed_norm")
            routed_MD = self._normed(stream_MD, "router_scale") * dim**-0.5
        params = self._params()
        routing, sorted_rows = self._route(routed_MD, params, inputs, layer)
        out_MD = self._routed(read_MD, routing, params, inputs, layer, sorted_rows, copy_PMX)
        shared_MD = self._shared(x_MD) if s.shared_hidden else None
        if s.apart:
            zero_M1 = inputs.zero_BT1.reshape(-1, 1)
            out_MD = rounded(self._normed(out_MD, "routed_out_norm"), zero_M1)
            shared_MD = None if shared_MD is None else rounded(self._normed(shared_MD, "shared_out_norm"), zero_M1)
        out_MD = out_MD if shared_MD is None or s.deferred else out_MD + shared_MD
        return out_MD.reshape(x_BTD.shape), replace(routing, shared_MD=x_MD if shared_MD is None else shared_MD)

    def _normed(self, x_MD: Array, name: str) -> Array:
        return rms_norm(x_MD, declare(self, self.policy, APART[name], (self.model_dim,)), self.norm_eps)

    def _params(self) -> dict[str, Any]:
        """Parameters that choose, under ``router``; those of the routed experts, under ``experts``; and ``slots``."""
        s, p, r, slots = self.spec, self.policy, self.spec.router, self.policy.layout.slots
        router = {"router": declare(self, p, ROUTER, (self.model_dim, s.choices))}
        if r.logit_bias:
            router["logit"] = declare(self, p, ROUTER_BIAS, (s.choices,), by_kernel=True)
        if r.choice_bias:
            router["choice"] = declare(self, p, CHOICE_BIAS, (s.choices,), by_kernel=True)
        if r.kind == "hash":
            table = replace(TABLE, init=_any_experts(s.experts))
            router["table"] = declare(self, p, table, (s.vocab_size, s.top_k))
        if s.apart:
            router["scale"] = declare(self, p, EXPERT_SCALE, (s.experts,))
        slots_EX = None if slots is None else declare(self, p, SLOTS, (s.experts, slots.replicas))
        lead = (self.layers,) if self.layers else ()
        experts = {
            name: declare(self, p, ROUTED[name], (*lead, *shape))
            for name, shape in s.shapes(self.model_dim, slots.redundant if slots else 0).items()
        }
        return {"router": router, "slots": slots_EX, "experts": experts}

    def _routed(
        self, x_MD: Array, routing: Routing, params: dict[str, Any], inputs: Inputs, layer: Array | None,
        sorted_rows: SortedRows | None, copy_PMX: Array | None,
    ) -> Array:  # fmt: skip
        """Computes what the routed experts return, weighed and summed."""
        s, p, dim = self.spec, self.policy, self.model_dim
        live_BT = None if inputs.window is None else inputs.window.valid
        live = None if live_BT is None else live_BT.reshape(-1)
        if s.identities:
            own_MA = routing.expert_MA < s.experts
            live = own_MA if live is None else own_MA & live[:, None]
        placed, experts = self._placed(routing, params["slots"], inputs), params["experts"]
        if s.latent:
            inner = dense(x_MD, declare(self, p, LATENT_IN, (dim, s.latent)), dtype=p.compute.dtype)
        else:
            inner = x_MD if copy_PMX is None else copy_PMX[0] if len(copy_PMX) == 1 else copy_PMX
        run = run_weighed if s.weighs_input else partial(run_experts, sorted_rows=sorted_rows)
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
        activation = s.shared_activation or s.activation
        shared = FfnSpec(s.shared_hidden, activation, activation.gated)
        return DenseFfn(shared, dim, p, name="shared")(x_MD, gate)

    def _route(
        self, x_MD: Array, params: dict[str, Any], inputs: Inputs, layer: Array | None
    ) -> tuple[Routing, SortedRows | None]:
        """The choices, and where a kernel makes them its rows sorted for that of the experts."""
        s, p, r, router = self.spec, self.policy, self.spec.router, params["router"]
        if s.plain:
            height = None
            if params["slots"] is None:
                height = sorted_height(len(x_MD), s.top_k, params["experts"], p, stacked=layer is not None)
            routed = route_by_kernel(x_MD, router, r, s.top_k, p.compute.dtype, live_M=inputs.counted, height=height)
            if routed is not None:
                return routed
        product = exact_dense if r.exact else dense
        logits_ME = product(x_MD, router["router"], own_of(router.get("logit")), dtype=p.compute.dtype)
        chosen_MA = router["table"][inputs.token_BT.reshape(-1)] if r.kind == "hash" else None
        routing = route(logits_ME, s.top_k, r, own_of(router.get("choice")), chosen_MA)
        if s.apart:
            routing = replace(routing, weight_MA=routing.weight_MA * router["scale"][routing.expert_MA])
        return routing, None

    def _placed(self, routing: Routing, slots_EX: Array | None, inputs: Inputs) -> Routing:
        """The choices as slots, where there are such."""
        if slots_EX is None:
            return routing
        turn_M = (inputs.token_BT + inputs.position_BT).reshape(-1)
        last = self.spec.experts - 1
        expert_MA = jnp.minimum(routing.expert_MA, last) if self.spec.identities else routing.expert_MA
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
