"""One decoder layer: normalized attention and feed-forward, each added to the stream or to several streams."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.cache.window import Window, take_outputs
from jaxspec.models.arch import SECOND, SUM, ArchSpec, LayerSpec, NoMixer
from jaxspec.nn.attention import Attention, AttentionSpec
from jaxspec.nn.compressed_attention import CompressedAttention, CompressedSpec
from jaxspec.nn.delta_net import DeltaNet, DeltaNetSpec
from jaxspec.nn.ffn import DenseFfn
from jaxspec.nn.hyper import HyperConnection, merge
from jaxspec.nn.inputs import Inputs, Mixed
from jaxspec.nn.kda import Kda, KdaSpec
from jaxspec.nn.latent_attention import LatentAttention, LatentSpec
from jaxspec.nn.lightning import Lightning, LightningSpec
from jaxspec.nn.mamba import Mamba, MambaSpec
from jaxspec.nn.moe import Moe, MoeSpec
from jaxspec.nn.norm import layer_norm, rms_norm
from jaxspec.nn.param import ZEROS, Param, declare
from jaxspec.nn.policy import Policy
from jaxspec.nn.router import Routing
from jaxspec.nn.short_conv import ShortConv, ShortConvSpec
from jaxspec.nn.steady import rounded
from jaxspec.pytree import replace
from jaxspec.shapes import Array

NORMS = {
    name: Param(f"{name}_D", ("embed",), "norm")
    for name in (
        "attention_norm", "attention_out_norm", "ffn_norm", "ffn_out_norm", "embed_norm", "hidden_norm", "norm",
    )
}  # fmt: skip
NORM_BIASES = {name: Param(f"{name}_bias_D", ("embed",), "norm", ZEROS) for name in NORMS}
LAYER_SCALE = Param("layer_scale_X", ("layer_scale",), "norm")

MIXERS: dict[type, Any] = {
    AttentionSpec: Attention,
    LatentSpec: LatentAttention,
    CompressedSpec: CompressedAttention,
    DeltaNetSpec: DeltaNet,
    KdaSpec: Kda,
    MambaSpec: Mamba,
    LightningSpec: Lightning,
    ShortConvSpec: ShortConv,
}


class LayerOutput(NamedTuple):
    """What a layer returns.

    Attributes:
      x: the stream after it, at the positions asked for.
      memory: of the layer, the T positions written.
      selection: which positions later layers may reuse, see ``Mixed``.
      routing: expert choices, None in a dense layer.
    """

    x: Array
    memory: Any
    selection: Array | None
    routing: Routing | None


def norm_params(module: nn.Module, arch: ArchSpec, policy: Policy, name: str) -> tuple[Array, Array | None]:
    """Declares the scale of a norm, and its bias where the architecture has one."""
    scale = declare(module, policy, NORMS[name], (arch.model_dim,))
    if arch.norm == "rms":
        return scale, None
    return scale, declare(module, policy, NORM_BIASES[name], (arch.model_dim,))


def normalize(arch: ArchSpec, x: Array, params: tuple[Array, Array | None]) -> Array:
    """Normalizes the last axis in the architecture's way."""
    scale, bias = params
    if bias is None:
        return rms_norm(x, scale, arch.norm_eps, offset=arch.norm_offset)
    return layer_norm(x, scale, bias, arch.norm_eps)


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
    def __call__(self, x: Array, inputs: Inputs, layer: Array | None = None) -> LayerOutput:
        """Runs T positions.

        Args:
          x: the stream [B, T, D], or the streams [B, T, N, D].
          inputs: with the memory of this layer.
          layer: index in the stack.
        """
        p, second, memory, own = self.policy, self.spec.second, inputs.memory, inputs.memory
        if isinstance(inputs.window, Window) and p.compute.splits_rows:
            inputs = replace(inputs, window=replace(inputs.window, rows_sharded=True))
        if second is not None and memory is not None:
            own = {name: memory[name] for name in self.spec.attention.streams}
        done, late = self._half(x, replace(inputs, memory=own), layer)
        if second is None:
            return done
        if memory is not None:
            own = {name: memory[SECOND + name] for name in second.attention.streams}
        last = Block(second, self.arch, p, name="second")(done.x, replace(inputs, memory=own))
        if memory is not None:
            memory = done.memory | {SECOND + name: pages for name, pages in last.memory.items()}
        assert late is not None, "what a layer with two halves defers"
        return LayerOutput(last.x + late, memory, last.selection, done.routing)

    def _half(self, x: Array, inputs: Inputs, layer: Array | None) -> tuple[LayerOutput, Array | None]:
        """Runs attention and feed-forward; what is to be added later comes by itself."""
        arch, p, late = self.arch, self.policy, None
        if isinstance(self.spec.attention, NoMixer):
            x, mixed = take_outputs(x, inputs.window), Mixed(x, inputs.memory, inputs.selection)
        else:
            mixer = MIXERS[type(self.spec.attention)]
            attention = mixer(self.spec.attention, arch.model_dim, arch.norm_eps, p, name="attention")
            u, join = self._enter("attention", x, inputs)
            mixed = attention(u, inputs)
            x = join(mixed.out_BTD)
        if self.spec.ffn is None:
            return LayerOutput(x, mixed.memory, mixed.selection, None), None
        inputs = inputs.of_outputs()
        u, join = self._enter("ffn", x, inputs)
        if isinstance(self.spec.ffn, MoeSpec):
            moe = Moe(self.spec.ffn, arch.model_dim, p, self.layers, arch.norm_eps, name="ffn")
            out, routing = moe(u, inputs, layer, stream_BTD=x)
            if self.spec.ffn.deferred:
                assert routing.shared_MD is not None, "what goes on meanwhile"
                late, out = out, routing.shared_MD.reshape(out.shape)
        else:
            out, routing = DenseFfn(self.spec.ffn, arch.model_dim, p, name="ffn")(u), None
        x = join(out)
        if self.spec.scaled:
            x = rounded(x * declare(self, p, LAYER_SCALE, (1,)).astype(jnp.float32), inputs.zero_BT1)
        return LayerOutput(x, mixed.memory, mixed.selection, routing), late

    def _enter(self, name: str, x: Array, inputs: Inputs) -> tuple[Array, Callable[[Array], Array]]:
        """Returns what a sub-layer reads, and how its output, of the positions asked for, joins the stream."""
        arch, p, window, how = self.arch, self.policy, inputs.window, self.spec.joins[name == "ffn"]
        norm, old = norm_params(self, arch, p, f"{name}_norm"), take_outputs(x, window)
        if arch.hyper is not None:
            connection = HyperConnection(arch.hyper, arch.model_dim, arch.norm_eps, p, name=f"{name}_hyper")
            u, write, comb = connection(x)
            return normalize(arch, u, norm), lambda out: merge(
                old, out, take_outputs(write, window), take_outputs(comb, window)
            )
        if arch.norm_last:
            return x, lambda out: normalize(arch, old + out, norm)
        u = normalize(arch, x, norm)
        if how == SUM:
            return u, lambda out: old + out
        if how.normed:
            old = take_outputs(u, window)
        out_norm = norm_params(self, arch, p, f"{name}_out_norm") if how.out_norm else None

        def join(out: Array) -> Array:
            zero = inputs.of_outputs().zero_BT1
            out = out if out_norm is None else normalize(arch, out, out_norm)
            return rounded(how.old * old, zero) + rounded(how.scale * out, zero)

        return u, join


def init_block(key: Array, spec: LayerSpec, arch: ArchSpec, policy: Policy) -> Any:
    """Returns random parameters of one layer."""
    width = (arch.hyper.streams, arch.model_dim) if arch.hyper else (arch.model_dim,)
    token = jnp.zeros((1, 1), jnp.int32)
    return Block(spec, arch, policy).init(key, jnp.zeros((1, 1, *width)), Inputs(token, token))["params"]
