"""The one transformer: it reads an ArchSpec and runs any family, for training, prefill, drafting and verification."""

from dataclasses import dataclass
from typing import Any, cast

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.cache.kv import LayerKV, Window
from jaxspec.models.arch import ArchSpec, LayerSpec
from jaxspec.nn.attention import Attention
from jaxspec.nn.dense import dense
from jaxspec.nn.moe import DenseFfn, ExpertLayout, Moe, MoeSpec
from jaxspec.nn.norm import rms_norm
from jaxspec.nn.router import Routing
from jaxspec.pytree import pytree
from jaxspec.shapes import Array, Params

BFLOAT16 = jnp.dtype("bfloat16")


@dataclass(frozen=True)
class Policy:
    """How parameters are stored and computed with.

    Attributes:
      param: dtype of the stored weights.
      compute: dtype of both factors of every product; sums and the residual stream are float32 always.
      experts: layout of the routed experts: ``switched`` (one array per expert, for CPU) or ``stacked``.
      own_head: whether a tied head is kept as an array of its own; on CPU a transposed one is 4 times slower.
    """

    param: jnp.dtype = BFLOAT16
    compute: jnp.dtype = BFLOAT16
    experts: ExpertLayout = "stacked"
    own_head: bool = False


@pytree
class Hidden:
    """What a forward returns.

    Attributes:
      last_BTD: stream after the final norm, float32.
      layers: caches with the T provisional positions written, None without a cache.
      taps: the stream entering each tapped layer, float32 [B, T, D].
      routing: choices of every expert layer over the M = B * T rows, in layer order.
    """

    last_BTD: Array
    layers: tuple[LayerKV, ...] | None
    taps: tuple[Array, ...]
    routing: tuple[Routing, ...]


class Block(nn.Module):
    """One decoder layer with its two residual connections."""

    spec: LayerSpec
    model_dim: int
    norm_eps: float
    policy: Policy

    @nn.compact
    def __call__(
        self, x_BTD: Array, position_BT: Array, memory: LayerKV | None, window: Window | None
    ) -> tuple[Array, LayerKV | None, Routing | None]:
        """The stream after this layer, its cache with the new positions, and the expert choices."""
        p, dim = self.policy, self.model_dim
        ones = nn.initializers.ones
        normed = rms_norm(x_BTD, self.param("attention_norm_D", ones, (dim,), p.param), self.norm_eps)
        attention = Attention(self.spec.attention, dim, self.norm_eps, p.param, p.compute, name="attention")
        mixed, memory = attention(normed, position_BT, memory, window)
        x_BTD = x_BTD + mixed
        normed = rms_norm(x_BTD, self.param("ffn_norm_D", ones, (dim,), p.param), self.norm_eps)
        if isinstance(self.spec.ffn, MoeSpec):
            out, routing = Moe(self.spec.ffn, dim, p.param, p.compute, p.experts, name="ffn")(normed)
            return x_BTD + out, memory, routing
        return x_BTD + DenseFfn(self.spec.ffn, dim, p.param, p.compute, name="ffn")(normed), memory, None


class Transformer(nn.Module):
    """Embedding, layers, final norm; ``logits`` applies the head to chosen positions."""

    arch: ArchSpec
    policy: Policy

    def setup(self) -> None:
        """Declares the parameters."""
        a, p = self.arch, self.policy
        init = nn.initializers.normal(0.02)
        self.embed_VD = self.param("embed_VD", init, (a.vocab_size, a.model_dim), p.param)
        self.norm_D = self.param("norm_D", nn.initializers.ones, (a.model_dim,), p.param)
        if p.own_head or not a.tied:
            self.head_DV = self.param("head_DV", init, (a.model_dim, a.vocab_size), p.param)
        self.layers = [Block(layer, a.model_dim, a.norm_eps, p) for layer in a.layers]

    def __call__(
        self,
        token_BT: Array,
        position_BT: Array,
        memory: tuple[LayerKV, ...] | None = None,
        window: Window | None = None,
        taps: tuple[int, ...] = (),
    ) -> Hidden:
        """Runs T positions of each row.

        Args:
          token_BT: int32 token ids.
          position_BT: int32 absolute positions (a tree node's is start + depth).
          memory: per-layer caches; None attends causally within the T tokens alone.
          window: where the caches are written and what is seen.
          taps: layer boundaries b whose stream is kept; b is the input of layer b, len(layers) the last output.
        """
        x_BTD = self.embed_VD[token_BT].astype(jnp.float32)
        written, kept, routed = [], {}, []
        for index, layer in enumerate(self.layers):
            kept[index] = x_BTD
            x_BTD, layer_memory, routing = layer(x_BTD, position_BT, memory[index] if memory else None, window)
            written.append(layer_memory)
            if routing is not None:
                routed.append(routing)
        kept[len(self.layers)] = x_BTD
        last = rms_norm(x_BTD, self.norm_D, self.arch.norm_eps)
        return Hidden(last, tuple(written) if memory else None, tuple(kept[b] for b in taps), tuple(routed))

    def logits(self, last: Array) -> Array:
        """Head over [..., D] final hidden states, float32 [..., V]."""
        head_DV = self.head_DV if self.policy.own_head or not self.arch.tied else self.embed_VD.T
        return dense(last, head_DV, dtype=self.policy.compute)

    def logits_of(self, token_BT: Array, position_BT: Array) -> tuple[Array, Hidden]:
        """Teacher-forced logits of whole sequences, float32 [B, T, V], and the hidden states."""
        hidden = self(token_BT, position_BT)
        return self.logits(hidden.last_BTD), hidden


def forward(
    net: Transformer,
    params: Params,
    token_BT: Array,
    position_BT: Array,
    memory: tuple[LayerKV, ...],
    window: Window,
    taps: tuple[int, ...] = (),
) -> tuple[Hidden, tuple[LayerKV, ...]]:
    """Runs T positions over a cache; returns the hidden states and the caches with those positions written."""
    hidden: Any = net.apply(cast(Any, params), token_BT, position_BT, memory, window, taps)
    return hidden, hidden.layers


def head(net: Transformer, params: Params, last: Array) -> Array:
    """Logits of final hidden states, float32 [..., V]."""
    return cast(Array, net.apply(cast(Any, params), last, method="logits"))


def teacher_forced(net: Transformer, params: Params, token_BT: Array, position_BT: Array) -> tuple[Array, Hidden]:
    """Logits of whole sequences without a cache, float32 [B, T, V], and the hidden states."""
    return cast(Any, net.apply(cast(Any, params), token_BT, position_BT, method="logits_of"))
