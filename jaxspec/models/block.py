"""One decoder layer: normalized attention and feed-forward, each added to the stream or to several streams."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.cache.window import take_outputs
from jaxspec.models.arch import SECOND, SUM, ArchSpec, LayerSpec, NoMixer
from jaxspec.nn.attention import Attention, AttentionSpec
from jaxspec.nn.chosen import Selection
from jaxspec.nn.compressed_attention import CompressedAttention, CompressedSpec
from jaxspec.nn.delta_net import DeltaNet, DeltaNetSpec
from jaxspec.nn.ffn import DenseFfn
from jaxspec.nn.fused_norm import Norm, PartialSum, add_and_normalize
from jaxspec.nn.hyper import HyperConnection, merge
from jaxspec.nn.inputs import Inputs, Mixed
from jaxspec.nn.kda import Kda, KdaSpec
from jaxspec.nn.latent_attention import LatentAttention, LatentSpec
from jaxspec.nn.lightning import Lightning, LightningSpec
from jaxspec.nn.mamba import Mamba, MambaSpec
from jaxspec.nn.moe import Moe, MoeSpec
from jaxspec.nn.norm import layer_norm
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
    selection: Selection | None
    routing: Routing | None


def norm_params(module: nn.Module, arch: ArchSpec, policy: Policy, name: str) -> tuple[Any, Array | None]:
    """Declares the scale of a norm, which a kernel may read, and its bias where the architecture has one."""
    scale = declare(module, policy, NORMS[name], (arch.model_dim,), by_kernel=arch.norm == "rms")
    if arch.norm == "rms":
        return scale, None
    return scale, declare(module, policy, NORM_BIASES[name], (arch.model_dim,))


def normalize(arch: ArchSpec, x: Array, params: tuple[Any, Array | None]) -> Array:
    """Normalizes the last axis in the architecture's way."""
    scale, bias = params
    if bias is None:
        return add_and_normalize(x, scale, Norm(arch.norm_eps, arch.norm_offset))[1]
    return layer_norm(x, scale, bias, arch.norm_eps)


@dataclass(frozen=True)
class Entered:
    """What a sub-layer reads.

    Attributes:
      u: the stream, normalized.
      join: adds the sub-layer's output, of the positions asked for, to the stream.
      copy_PMX: u as an experts' kernel reads it, see ``Norm``; None where no kernel has made one.
    """

    u: Array
    join: Callable[[Any], Any]
    copy_PMX: Array | None = None


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
        inputs = inputs.written_by(p.compute)
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
            left = {"unsummed": True} if self._adds_parts() else {}
            attention = mixer(self.spec.attention, arch.model_dim, arch.norm_eps, p, name="attention", **left)
            entered = self._enter("attention", x, inputs)
            mixed = attention(entered.u, inputs)
            x = entered.join(mixed.out_BTD)
        if self.spec.ffn is None:
            return LayerOutput(x, mixed.memory, mixed.selection, None), None
        inputs = inputs.of_outputs()
        entered = self._enter("ffn", x, inputs)
        if isinstance(self.spec.ffn, MoeSpec):
            moe = Moe(self.spec.ffn, arch.model_dim, p, self.layers, arch.norm_eps, name="ffn")
            stream = x if self.spec.ffn.apart else None
            out, routing = moe(entered.u, inputs, layer, stream_BTD=stream, copy_PMX=entered.copy_PMX)
            if self.spec.ffn.deferred:
                assert routing.shared_MD is not None, "what goes on meanwhile"
                late, out = out, routing.shared_MD.reshape(out.shape)
        else:
            out, routing = DenseFfn(self.spec.ffn, arch.model_dim, p, name="ffn")(entered.u), None
        x = entered.join(out)
        if self.spec.scaled:
            x = rounded(x * declare(self, p, LAYER_SCALE, (1,)).astype(jnp.float32), inputs.zero_BT1)
        return LayerOutput(x, mixed.memory, mixed.selection, routing), late

    def _adds_parts(self) -> bool:
        """Whether the norm of the feed-forward layer can add the attention's output to the stream."""
        a, ffn = self.arch, self.spec.ffn
        plain = a.norm == "rms" and a.hyper is None and not a.norm_last and self.spec.joins[0] == SUM
        plain = plain and not self.spec.scaled and self.spec.second is None
        plain = plain and ffn is not None and not (isinstance(ffn, MoeSpec) and not ffn.plain)
        return plain and isinstance(self.spec.attention, AttentionSpec | LatentSpec)

    def _norm(self, name: str) -> Norm:
        """The norm before a sub-layer, with a copy where its routed experts read one."""
        arch, ffn, dtype = self.arch, self.spec.ffn, jnp.dtype(self.policy.compute.dtype).name
        reads = name == "ffn" and isinstance(ffn, MoeSpec) and ffn.plain and not ffn.latent and dtype != "float32"
        form = self.policy.storage.format_of("ffn/gate_up_ED2F") if reads else None
        planes = 2 if form is not None and form.kind == "fp4" else 1
        return Norm(arch.norm_eps, arch.norm_offset, dtype if reads else "", planes)

    def _enter(self, name: str, x: Any, inputs: Inputs) -> Entered:
        """Normalizes the stream for a sub-layer; ``x`` may be the stream and what is still to be added to it."""
        arch, p, window, how = self.arch, self.policy, inputs.window, self.spec.joins[name == "ffn"]
        norm = norm_params(self, arch, p, f"{name}_norm")
        if isinstance(x, tuple):
            old, u, copy_PMX = add_and_normalize(x[0], norm[0], self._norm(name), x[1])
            return Entered(u, lambda out: old + out, copy_PMX)
        old, copy_PMX = take_outputs(x, window), None
        if arch.hyper is not None:
            connection = HyperConnection(arch.hyper, arch.model_dim, arch.norm_eps, p, name=f"{name}_hyper")
            u, write, comb = connection(x)
            return Entered(
                normalize(arch, u, norm),
                lambda out: merge(old, out, take_outputs(write, window), take_outputs(comb, window)),
            )
        if arch.norm_last:
            return Entered(x, lambda out: normalize(arch, old + out, norm))
        if arch.norm == "rms":
            _, u, copy_PMX = add_and_normalize(x, norm[0], self._norm(name))
        else:
            u = normalize(arch, x, norm)
        if how == SUM:
            return Entered(u, lambda out: (old, out) if isinstance(out, PartialSum) else old + out, copy_PMX)
        if how.normed:
            old = take_outputs(u, window)
        out_norm = norm_params(self, arch, p, f"{name}_out_norm") if how.out_norm else None

        def join(out: Array) -> Array:
            zero = inputs.of_outputs().zero_BT1
            out = out if out_norm is None else normalize(arch, out, out_norm)
            return rounded(how.old * old, zero) + rounded(how.scale * out, zero)

        return Entered(u, join, copy_PMX)


def init_block(key: Array, spec: LayerSpec, arch: ArchSpec, policy: Policy) -> Any:
    """Returns random parameters of one layer."""
    width = (arch.hyper.streams, arch.model_dim) if arch.hyper else (arch.model_dim,)
    token = jnp.zeros((1, 1), jnp.int32)
    return Block(spec, arch, policy).init(key, jnp.zeros((1, 1, *width)), Inputs(token, token))["params"]
