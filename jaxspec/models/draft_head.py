"""Draft heads of the EAGLE family: they join the target's features at a token with the next token, and go on."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.cache.addressing import LayerCache
from jaxspec.cache.window import Window, take_outputs
from jaxspec.models.arch import ArchSpec, LayerSpec
from jaxspec.models.block import MIXERS, NORMS, Block
from jaxspec.nn.dense import dense, lookup
from jaxspec.nn.ffn import DenseFfn
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.moe import Moe, MoeSpec
from jaxspec.nn.norm import rms_norm
from jaxspec.nn.param import Param, declare
from jaxspec.nn.policy import Policy
from jaxspec.nn.router import Routing
from jaxspec.nn.unrolled import Unrolled
from jaxspec.protocol import NO_CAPTURE, CaptureSpec, Features
from jaxspec.pytree import replace
from jaxspec.shapes import Array, Params

EMBED = Param("embed_VD", ("vocab", "embed"), "weight", part="embedding")
JOIN = Param("join_XD", ("joined", "embed"))
JOIN_BIAS = Param("join_bias_D", ("embed",), "bias")
FEATURE_NORM = Param("feature_norm_D", ("embed",), "norm")
INPUT_NORM = Param("input_norm_X", ("features",), "norm")
PART_NORM = Param("part_norm_XD", ("parts", "embed"), "norm")
FC = Param("fc_XD", ("features", "embed"))
FC_BIAS = Param("fc_bias_D", ("embed",), "bias")
MASK = Param("mask_X", ("features",), "weight")
HEAD = Param("head_DW", ("embed", "draft_vocab"), part="head")
ROUTING = Param("routing_DYE", ("embed", "target_layers", "routed_to"))

Memory = LayerCache | Unrolled | None


@dataclass(frozen=True)
class HeadSpec:
    """A head that drafts from the target's features.

    With the last hidden state and a product in front of an ordinary layer it is EAGLE-1 (Li 2024, 2401.15077), with
    taps and a first layer whose attention reads both parts EAGLE-3 (Li 2025, 2503.01840); with a mask it drafts all
    tokens in one pass, P-EAGLE (Hui 2026, 2602.01469); with shared_outputs it reads the shared experts, and with
    routing it predicts the target's experts, which are our own.

    Attributes:
      arch: its network: width, layers and norms; the vocabulary is the target's.
      target_dim: width of each vector that it reads.
      reads: taps and shared_outputs.
      last: whether it reads the target's last hidden state, before the others.
      join: ``product`` of token and feature in front of the first layer, or ``attention`` that reads both.
      join_bias: whether the product that maps features to the head's width has a bias.
      norm_before_fc: whether all that it reads is normalized together before that product.
      fc_norm: whether each vector is normalized by itself instead.
      norm_before_residual: whether the first layer adds to the normalized feature.
      norm_output: whether the next draft continues from the normalized output.
      draft_vocab: W, tokens that its own head knows; 0 where it uses the target's head.
      own_embedding: whether it has an embedding of its own.
      mask_token: token that stands for those not drafted yet, None where drafts follow one another.
      routing: expert layers of the target whose choices it predicts.
      experts: E of those layers.
    """

    arch: ArchSpec
    target_dim: int
    reads: CaptureSpec = NO_CAPTURE
    last: bool = False
    join: Literal["product", "attention"] = "attention"
    join_bias: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    draft_vocab: int = 0
    own_embedding: bool = False
    mask_token: int | None = None
    routing: tuple[int, ...] = ()
    experts: int = 0

    @property
    def parts(self) -> int:
        """Number of the target's vectors that it reads."""
        return int(self.last) + len(self.reads.taps) + len(self.reads.shared_outputs)

    @property
    def feature_dim(self) -> int:
        """Width of all that it reads."""
        return self.parts * self.target_dim

    def feature(self, features: Features) -> Array:
        """Concatenates what it reads, [B, T, X]."""
        parts = (features.last_BTD,) if self.last else ()
        return jnp.concatenate([*parts, *features.taps, *features.shared_outputs], axis=-1)


def choices(routing: Iterable[Routing | None]) -> tuple[Routing, ...]:
    """Returns the expert choices of the layers that have experts, without what else was computed on the way."""
    return tuple(replace(one, shared_MD=None) for one in routing if one is not None)


class JoinLayer(nn.Module):
    """The first layer, which reads the token's embedding and the feature before it."""

    layer: LayerSpec
    spec: HeadSpec
    policy: Policy

    @nn.compact
    def __call__(self, e_BTD: Array, g_BTD: Array, inputs: Inputs) -> tuple[Array, Memory, Routing | None]:
        """Returns the stream after the layer, [B, T, D], of the positions asked for, its memory, and expert choices."""
        s, p, a = self.spec, self.policy, self.spec.arch

        def norm(x: Array, param: Param) -> Array:
            return rms_norm(x, declare(self, p, param, (a.model_dim,)), a.norm_eps)

        if s.join == "product":
            join_XD = declare(self, p, JOIN, (e_BTD.shape[-1] + g_BTD.shape[-1], a.model_dim))
            bias_D = declare(self, p, JOIN_BIAS, (a.model_dim,)) if s.join_bias else None
            u = x = dense(jnp.concatenate([e_BTD, g_BTD], axis=-1), join_XD, bias_D, dtype=p.compute.dtype)
        else:
            h_BTD = norm(g_BTD, FEATURE_NORM)
            u = jnp.concatenate([norm(e_BTD, NORMS["embed_norm"]), h_BTD], axis=-1)
            x = h_BTD if s.norm_before_residual else g_BTD
        mixer = MIXERS[type(self.layer.attention)](self.layer.attention, a.model_dim, a.norm_eps, p, name="attention")
        mixed = mixer(u, inputs)
        x = take_outputs(x, inputs.window) + mixed.out_BTD
        ffn, v = self.layer.ffn, norm(x, NORMS["ffn_norm"])
        assert ffn is not None, "layers of heads have both parts"
        if isinstance(ffn, MoeSpec):
            out, routing = Moe(ffn, a.model_dim, p, name="ffn")(v, inputs.of_outputs())
            return x + out, mixed.memory, routing
        return x + DenseFfn(ffn, a.model_dim, p, name="ffn")(v), mixed.memory, None


class DraftHead(nn.Module):
    """Parameters of a head.

    Attributes:
      spec: what it is.
      policy: how parameters are kept.
    """

    spec: HeadSpec
    policy: Policy

    def setup(self) -> None:
        """Declares the parameters."""
        s, p, a = self.spec, self.policy, self.spec.arch
        dim, wide = a.model_dim, s.feature_dim
        if s.own_embedding:
            self.embed_VD = declare(self, p, EMBED, (a.vocab_size, dim))
        if s.norm_before_fc:
            self.input_norm_X = declare(self, p, INPUT_NORM, (wide,))
        if s.fc_norm:
            self.part_norm_XD = declare(self, p, PART_NORM, (s.parts, s.target_dim))
        if self._maps:
            self.fc_XD = declare(self, p, FC, (wide, dim))
            self.fc_bias_D = declare(self, p, FC_BIAS, (dim,)) if s.join_bias else None
        if s.mask_token is not None:
            self.mask_X = declare(self, p, MASK, (wide,))
        self.first = JoinLayer(a.layers[0], s, p)
        self.layers = [Block(layer, a, p) for layer in a.layers[1:]]
        if s.join == "attention":
            self.norm_D = declare(self, p, NORMS["norm"], (dim,))
        if s.draft_vocab:
            self.head_DW = declare(self, p, HEAD, (dim, s.draft_vocab))
        if s.routing:
            self.routing_DYE = declare(self, p, ROUTING, (dim, len(s.routing), s.experts))

    @property
    def _maps(self) -> bool:
        """Whether a product maps what it reads to its own width."""
        return self.spec.join == "attention" and self.spec.feature_dim != self.spec.arch.model_dim

    def join(self, feature_BTX: Array) -> Array:
        """Maps features to what the first draft continues from, [B, T, D]."""
        s = self.spec
        if s.norm_before_fc:
            feature_BTX = rms_norm(feature_BTX, self.input_norm_X, s.arch.norm_eps)
        if s.fc_norm:
            parts = feature_BTX.reshape(*feature_BTX.shape[:-1], s.parts, s.target_dim)
            each = [rms_norm(parts[..., n, :], self.part_norm_XD[n], s.arch.norm_eps) for n in range(s.parts)]
            feature_BTX = jnp.concatenate(each, axis=-1)
        if not self._maps:
            return feature_BTX
        return dense(feature_BTX, self.fc_XD, self.fc_bias_D, dtype=self.policy.compute.dtype)

    def mask(self) -> Array:
        """Returns what stands for the features of tokens that are not drafted yet, [1, 1, D]."""
        return self.join(self.mask_X.astype(jnp.float32)[None, None])

    def embed(self, token_BT: Array) -> Array:
        """Its own embeddings, float32 [B, T, D]."""
        return lookup(self.embed_VD, token_BT)

    def __call__(self, embedded_BTD: Array, g_BTD: Array, inputs: Inputs) -> tuple[Array, Array, tuple[Memory, ...]]:
        """Runs T slots; slot i joins the token of position i + 1 with what is known after position i.

        Args:
          embedded_BTD: embeddings of the tokens.
          g_BTD: from ``join``, or what an earlier slot returned to continue from.
          inputs: the tokens, the positions i, and the memory of each layer.

        Returns:
          What the head reads and what the next draft continues from, of the positions asked for, and the memory.
        """
        return self.routed(embedded_BTD, g_BTD, inputs)[:3]

    def routed(
        self, embedded_BTD: Array, g_BTD: Array, inputs: Inputs
    ) -> tuple[Array, Array, tuple[Memory, ...], tuple[Routing, ...]]:
        """As a call, which also returns the choices of its own experts, of each layer that has some."""
        s, window, memory = self.spec, inputs.window, inputs.memory or (None,) * len(self.spec.arch.layers)
        # What the last layer reads is needed of all positions.
        inner = replace(window, output_index_B=None) if isinstance(window, Window) else window
        each = [replace(inputs, window=inner, memory=m) for m in memory]
        each[-1] = replace(each[-1], window=window)
        x, first, routing = self.first(embedded_BTD, g_BTD, each[0])
        written, chosen = [first], [routing]
        for layer, inputs_y in zip(self.layers, each[1:], strict=True):
            out = layer(x, inputs_y)
            x = out.x
            written.append(out.memory)
            chosen.append(out.routing)
        last = x if s.join == "product" else rms_norm(x, self.norm_D, s.arch.norm_eps)
        return last, last if s.norm_output else x, tuple(written), choices(chosen)

    def logits(self, last: Array) -> Array:
        """Its own head over what it reads, float32 [..., W]."""
        return dense(last, self.head_DW, dtype=self.policy.compute.dtype)

    def routes(self, last: Array) -> Array:
        """Logits of each expert being chosen for the drafted token, float32 [..., Y, E]."""
        return dense(last, self.routing_DYE, dtype=self.policy.compute.dtype)

    def everything(self) -> None:
        """Runs all parts once, which declares all parameters."""
        s, token = self.spec, jnp.zeros((1, 1), jnp.int32)
        g = self.join(jnp.zeros((1, 1, s.feature_dim)))
        last, _, _ = self(jnp.zeros((1, 1, s.arch.model_dim)), g, Inputs(token, token))
        if s.draft_vocab:
            self.logits(last)
        if s.routing:
            self.routes(last)

    def initial(self, key: Array) -> Params:
        """Returns random parameters."""
        return nn.unbox(self.init(key, method="everything"))
