"""One decoder layer: normalised attention and feed-forward, each added to the stream or to several streams."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.cache.window import AnyWindow, Window, take_outputs
from jaxspec.models.arch import ArchSpec, LayerSpec
from jaxspec.nn.attention import Attention, AttentionSpec, Memory
from jaxspec.nn.compressed_attention import CompressedAttention, CompressedSpec
from jaxspec.nn.ffn import DenseFfn
from jaxspec.nn.hyper import HyperConnection, merge
from jaxspec.nn.latent_attention import LatentAttention, LatentSpec
from jaxspec.nn.moe import Moe, MoeSpec
from jaxspec.nn.norm import layer_norm, rms_norm
from jaxspec.nn.policy import Policy, weight
from jaxspec.nn.router import Routing
from jaxspec.pytree import replace
from jaxspec.shapes import Array

MIXERS: dict[type, Any] = {
    AttentionSpec: Attention,
    LatentSpec: LatentAttention,
    CompressedSpec: CompressedAttention,
}


def norm_params(module: nn.Module, arch: ArchSpec, policy: Policy, name: str) -> tuple[Array, Array | None]:
    """Declares the scale of a norm, and its bias where the architecture has one."""
    scale = weight(module, policy, f"{name}_D", (arch.model_dim,), nn.initializers.ones)
    if arch.norm == "rms":
        return scale, None
    return scale, weight(module, policy, f"{name}_bias_D", (arch.model_dim,), nn.initializers.zeros)


def normalise(arch: ArchSpec, x: Array, params: tuple[Array, Array | None]) -> Array:
    """Normalises the last axis in the architecture's way."""
    scale, bias = params
    return rms_norm(x, scale, arch.norm_eps) if bias is None else layer_norm(x, scale, bias, arch.norm_eps)


class Block(nn.Module):
    """One layer.

    Attributes:
      spec: its mechanisms.
      arch: norms, widths and streams.
      policy: how parameters are kept.
      layers: length of the stack of equal layers that its routed experts are a part of, 0 for none.
    """

    spec: LayerSpec
    arch: ArchSpec
    policy: Policy
    layers: int = 0

    @nn.compact
    def __call__(
        self,
        x: Array,
        token_BT: Array,
        position_BT: Array,
        cache: Memory | None,
        window: AnyWindow,
        shared: Array | None = None,
        layer: Array | None = None,
    ) -> tuple[Array, Memory | None, Array | None, Routing | None]:
        """Runs T positions.

        Args:
          x: the stream [B, T, D], or the streams [B, T, N, D].
          token_BT: token ids, for routers that read them.
          position_BT: absolute positions.
          cache: of this layer; None attends within the T tokens alone.
          window: where the cache is written and what is seen.
          shared: what an earlier layer selected for this one to see too.
          layer: place in the stack.

        Returns:
          The stream behind the layer at the positions asked for, its cache, what later layers may share, and the expert
          choices.
        """
        arch, p = self.arch, self.policy
        routing, mixer = None, MIXERS[type(self.spec.attention)]
        if isinstance(window, Window) and p.compute.splits_rows:
            window = replace(window, rows_sharded=True)

        def attend(u: Array) -> Array:
            nonlocal cache, shared
            attention = mixer(self.spec.attention, arch.model_dim, arch.norm_eps, p, name="attention")
            out, cache, shared = attention(u, position_BT, cache, window, shared)
            return out

        def feed(u: Array) -> Array:
            nonlocal routing
            if isinstance(self.spec.ffn, MoeSpec):
                moe = Moe(self.spec.ffn, arch.model_dim, p, self.layers, name="ffn")
                out, routing = moe(u, token_BT, position_BT, layer, None if window is None else window.valid)
                return out
            return DenseFfn(self.spec.ffn, arch.model_dim, p, name="ffn")(u)

        x = self._around("attention", attend, x, window)
        token_BT, position_BT = take_outputs(token_BT, window), take_outputs(position_BT, window)
        window = window.after_write if isinstance(window, Window) else window
        x = self._around("ffn", feed, x, window)
        return x, cache, shared, routing

    def _around(self, name: str, sublayer: Any, x: Array, window: AnyWindow) -> Array:
        """Adds the output of a sub-layer, which has only the positions asked for."""
        arch, p = self.arch, self.policy
        norm = norm_params(self, arch, p, f"{name}_norm")
        if arch.hyper is not None:
            connection = HyperConnection(arch.hyper, arch.model_dim, arch.norm_eps, p, name=f"{name}_hyper")
            u, write, comb = connection(x)
            out = sublayer(normalise(arch, u, norm))
            return merge(take_outputs(x, window), out, take_outputs(write, window), take_outputs(comb, window))
        if arch.norm_last:
            return normalise(arch, take_outputs(x, window) + sublayer(x), norm)
        return take_outputs(x, window) + sublayer(normalise(arch, x, norm))


def init_block(key: Array, spec: LayerSpec, arch: ArchSpec, policy: Policy) -> Any:
    """Random parameters of one layer."""
    width = (arch.hyper.streams, arch.model_dim) if arch.hyper else (arch.model_dim,)
    token = jnp.zeros((1, 1), jnp.int32)
    return Block(spec, arch, policy).init(key, jnp.zeros((1, 1, *width)), token, token, None, None)["params"]
