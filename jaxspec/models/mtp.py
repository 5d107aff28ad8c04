"""Multi-token prediction: layers after a model that draft from its hidden states, as published with it."""

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.cache.addressing import LayerCache
from jaxspec.models.arch import ArchSpec
from jaxspec.models.block import Block, norm_params, normalize
from jaxspec.models.transformer import HEAD
from jaxspec.nn.dense import dense
from jaxspec.nn.hyper import HyperHead
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.param import Param, declare
from jaxspec.nn.policy import Policy
from jaxspec.protocol import NO_CAPTURE, CaptureSpec
from jaxspec.shapes import Array, Params

JOIN = Param("join_XD", ("joined", "embed"))
EMBED_PROJ = Param("embed_proj_DX", ("embed", "channels"))
HIDDEN_PROJ = Param("hidden_proj_DX", ("embed", "channels"))

Caches = tuple[LayerCache, ...]


class MtpLayer(nn.Module):
    """One layer: joins a token with the feature of the token before it, and runs a decoder block.

    DeepSeek-V3 (2024), section 2.2, and GLM-4.5 join by one product; DeepSeek-V4 adds a projection of the token to
    a projection of each residual stream. The embedding is the model's own, and most often the head.

    Attributes:
      number: place among the layers of prediction.
      arch, policy: of the model.
    """

    number: int
    arch: ArchSpec
    policy: Policy

    def setup(self) -> None:
        """Declares the parameters."""
        a, p = self.arch, self.policy
        self.embed_norm = norm_params(self, a, p, "embed_norm")
        self.hidden_norm = norm_params(self, a, p, "hidden_norm")
        self.norm = norm_params(self, a, p, "norm")
        if a.hyper is None:
            self.join_XD = declare(self, p, JOIN, (2 * a.model_dim, a.model_dim))
        else:
            self.embed_proj_DX = declare(self, p, EMBED_PROJ, (a.model_dim, a.model_dim))
            self.hidden_proj_DX = declare(self, p, HIDDEN_PROJ, (a.model_dim, a.model_dim))
            self.hyper_head = HyperHead(a.hyper, a.model_dim, a.norm_eps, p)
        if a.mtp_form.own_heads:
            self.head_DV = declare(self, p, HEAD, (a.model_dim, a.vocab_size))
        self.block = Block(a.mtp[self.number], a, p)

    def __call__(self, embedded_BTD: Array, feature: Array, inputs: Inputs) -> tuple[Array, LayerCache | None]:
        """Runs T slots; slot i joins the token of position i + 1 with the feature of position i.

        Args:
          embedded_BTD: embeddings of the tokens.
          feature: the model's hidden state after its final norm or, as ``MtpForm`` says, its stream before it
            [B, T, D], with hyper-connections its streams [B, T, N, D]; or what a layer returned.
          inputs: the tokens, the positions i, and the cache of this layer.

        Returns:
          The feature after each slot asked for, normalized or as stream like the one that came in, and the cache.
        """
        a, dtype = self.arch, self.policy.compute.dtype
        e_BTD = normalize(a, embedded_BTD, self.embed_norm)
        h = normalize(a, feature, self.hidden_norm)
        if a.hyper is None:
            x = dense(jnp.concatenate([e_BTD, h], axis=-1), self.join_XD, dtype=dtype)
        else:
            x = dense(e_BTD, self.embed_proj_DX, dtype=dtype)[:, :, None] + dense(h, self.hidden_proj_DX, dtype=dtype)
        out = self.block(x, inputs)
        return out.x if a.mtp_form.stream else normalize(a, out.x, self.norm), out.memory

    def last(self, feature: Array) -> Array:
        """Returns what the model's head reads [..., D], or logits [..., V] of a head of its own, for position i + 2."""
        a, x = self.arch, feature
        if a.mtp_form.stream:
            x = normalize(a, x if a.hyper is None else self.hyper_head(x), self.norm)
        return dense(x, self.head_DV, dtype=self.policy.compute.dtype) if a.mtp_form.own_heads else x


class Mtp(nn.Module):
    """The layers of multi-token prediction of one model; layer ``mtp_0`` drafts first.

    Attributes:
      arch: of the model, whose ``mtp`` lists the layers.
      policy: how parameters are kept.
    """

    arch: ArchSpec
    policy: Policy

    def setup(self) -> None:
        """Declares the layers."""
        self.mtp = [MtpLayer(n, self.arch, self.policy) for n in range(len(self.arch.mtp))]

    def __call__(
        self, layer: int, embedded_BTD: Array, feature: Array, inputs: Inputs
    ) -> tuple[Array, Array, LayerCache | None]:
        """Runs T slots of one layer: what ``last`` returns, the feature after each slot, and the cache."""
        module = self.mtp[layer]
        feature, cache = module(embedded_BTD, feature, inputs)
        return module.last(feature), feature, cache

    def last(self, layer: int, feature: Array) -> Array:
        """Returns what the head reads of a layer's feature, or what its own says, see ``MtpLayer.last``."""
        return self.mtp[layer].last(feature)

    @property
    def joins(self) -> CaptureSpec:
        """The boundary whose stream the first layer joins, none for the hidden state after the model's last norm."""
        return CaptureSpec(taps=(len(self.arch.layers),)) if self.arch.mtp_form.stream else NO_CAPTURE

    def everything(self) -> None:
        """Runs every layer once, which declares all parameters."""
        a, token = self.arch, jnp.zeros((1, 1), jnp.int32)
        feature = jnp.zeros((1, 1, *feature_shape(a)))
        for layer in range(len(a.mtp)):
            self(layer, jnp.zeros((1, 1, a.model_dim)), feature, Inputs(token, token))

    def initial(self, key: Array) -> Params:
        """Returns random parameters."""
        return nn.unbox(self.init(key, method="everything"))


def feature_shape(arch: ArchSpec) -> tuple[int, ...]:
    """Shape of the feature of one position."""
    return (arch.hyper.streams, arch.model_dim) if arch.hyper else (arch.model_dim,)
