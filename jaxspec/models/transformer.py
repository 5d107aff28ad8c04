"""The one transformer: it reads an ArchSpec and runs any family, for training, prefill, drafting and verification."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.cache.addressing import LayerCache
from jaxspec.cache.window import Segments
from jaxspec.models.apply import apply
from jaxspec.models.arch import ArchSpec, Segment, expert_dtype, segments
from jaxspec.models.block import Block, norm_params, normalize
from jaxspec.models.depth import ForwardState, Loop, init_stack, run_block, stack_name
from jaxspec.nn.dense import dense, lookup
from jaxspec.nn.hyper import HyperHead
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.param import Param, declare
from jaxspec.nn.policy import Policy
from jaxspec.nn.router import Routing
from jaxspec.nn.steady import tanh
from jaxspec.protocol import Features
from jaxspec.pytree import pytree, replace
from jaxspec.shapes import Array, Params

EMBED = Param("embed_VD", ("vocab", "embed"), "weight", part="embedding")
HEAD = Param("head_DV", ("embed", "vocab"), part="head")
HEAD_BIAS = Param("head_bias_V", ("vocab",), "bias", part="head")
POSITION = Param("position_SD", ("position", "embed"), "weight", part="embedding")
PROJECT_IN = Param("project_in_XD", ("embed_in", "embed"), part="embedding")
PROJECT_OUT = Param("project_out_DX", ("embed", "embed_in"), part="head")

Caches = tuple[LayerCache, ...]
POSITION_OFFSET = 2


@pytree
class Hidden:
    """What a forward returns.

    Attributes:
      last_BTD: stream after the final norm, float32.
      stream: the stream before it, or the streams [B, T, N, D].
      caches: with the T provisional positions written, none without a cache.
      taps: the stream entering each tapped layer, float32.
      shared_outputs: what the shared experts of each asked layer return [B, T, D], see ``Routing.shared_MD``.
      routing: choices of every expert layer over the M = B * T rows, in layer order; empty unless asked for.
    """

    last_BTD: Array
    stream: Array
    caches: Caches
    taps: tuple[Array, ...]
    shared_outputs: tuple[Array, ...]
    routing: tuple[Routing, ...]


class Transformer(nn.Module):
    """Embedding, layers, final norm; ``logits`` applies the head to chosen positions."""

    arch: ArchSpec
    policy: Policy

    def setup(self) -> None:
        """Declares the parameters."""
        a, p = self.arch, self.policy
        width = a.embed_dim or a.model_dim
        self.embed_VD = declare(self, p, EMBED, (a.vocab_size, width))
        if p.layout.own_head or not a.tied:
            self.head_DV = declare(self, p, HEAD, (width, a.vocab_size))
        if a.head_bias:
            self.head_bias_V = declare(self, p, HEAD_BIAS, (a.vocab_size,))
        if a.learned_positions:
            self.position_SD = declare(self, p, POSITION, (a.learned_positions + POSITION_OFFSET, a.model_dim))
        if a.embed_dim:
            self.project_in_XD = declare(self, p, PROJECT_IN, (width, a.model_dim))
            self.project_out_DX = declare(self, p, PROJECT_OUT, (a.model_dim, width))
        if a.final_norm:
            self.norm = norm_params(self, a, p, "norm")
        if a.hyper is not None:
            self.hyper_head = HyperHead(a.hyper, a.model_dim, a.norm_eps, p)
        if p.layout.depth == "unrolled":
            self.layers = [Block(layer, a, p) for layer in a.layers]
        else:
            self.stacks = [
                self._stack(segment, position)
                for segment in segments(a.layers)
                for position in range(len(segment.pattern))
            ]

    def _stack(self, segment: Segment, position: int) -> Any:
        name = stack_name(segment, position)
        # Flax would trace the initializer in every forward, to compare shapes that the loader has compared.
        if self.has_variable("params", name):
            return self.get_variable("params", name)
        return self.param(name, init_stack, segment, position, self.arch, self.policy)

    def __call__(self, inputs: Inputs) -> Hidden:
        """Runs T positions of each row."""
        a, reads = self.arch, inputs.reads
        x = self._embed(inputs.token_BT, inputs.position_BT)
        done = (self._unrolled if self.policy.layout.depth == "unrolled" else self._stacked)(x, inputs)
        last = self.hyper_head(done.x) if a.hyper else done.x
        last = normalize(a, last, self.norm) if a.final_norm else last
        taps = done.taps | {len(a.layers): done.x}
        return Hidden(
            last,
            done.x,
            () if inputs.memory is None else done.caches,
            tuple(taps[b] for b in reads.taps),
            tuple(done.shared_MD[y].reshape(*inputs.token_BT.shape, -1) for y in reads.shared_outputs),
            done.routing,
        )

    def embed(self, token_BT: Array) -> Array:
        """Embeddings of tokens, float32 [B, T, D]."""
        x = lookup(self.embed_VD, token_BT)
        x = x if self.arch.embed_scale == 1 else x * self.arch.embed_scale
        return dense(x, self.project_in_XD, dtype=self.policy.compute.dtype) if self.arch.embed_dim else x

    def _embed(self, token_BT: Array, position_BT: Array) -> Array:
        a, x = self.arch, self.embed(token_BT)
        if a.learned_positions:
            place_BT = jnp.minimum(position_BT, a.learned_positions - 1) + POSITION_OFFSET
            x = x + lookup(self.position_SD, place_BT)
        return jnp.repeat(x[:, :, None], a.hyper.streams, axis=2) if a.hyper else x

    def _unrolled(self, x: Array, inputs: Inputs) -> ForwardState:
        done = ForwardState(x)
        for layer, block in enumerate(self.layers):
            done = done.then(run_block(block, layer, done, inputs))
        return done

    def _stacked(self, x: Array, inputs: Inputs) -> ForwardState:
        if self.is_initializing():  # the stacks' parameters are there already
            return ForwardState(x, taps=dict.fromkeys(inputs.reads.taps, x))
        done, first = ForwardState(x), 0
        for segment in segments(self.arch.layers):
            places = slice(first, first + len(segment.pattern))
            memory = None if inputs.memory is None else inputs.memory[places]
            loop = Loop(segment, self.arch, self.policy, self.stacks[places], replace(inputs, memory=memory))
            done, first = done.then(loop.run(done)), places.stop
        return done

    def initial(self, key: Array) -> Params:
        """Returns random parameters."""
        token = jnp.zeros((1, 2), jnp.int32)
        return nn.unbox(self.init(key, token, token, method="logits_of"))

    def logits(self, last: Array) -> Array:
        """Head over [..., D] final hidden states, float32 [..., V]."""
        head_DV = self.head_DV if self.policy.layout.own_head or not self.arch.tied else self.embed_VD.T
        bias_V = self.head_bias_V if self.arch.head_bias else None
        return vocabulary_logits(self, last, head_DV, bias_V, self.project_out_DX if self.arch.embed_dim else None)

    def logits_of(self, token_BT: Array, position_BT: Array, segment_BT: Array | None = None) -> tuple[Array, Hidden]:
        """Teacher-forced logits of whole sequences, float32 [B, T, V], and the hidden states with expert choices."""
        packed = None if segment_BT is None else Segments(segment_BT)
        hidden = self(Inputs(token_BT, position_BT, packed, routes=True))
        return self.logits(hidden.last_BTD), hidden


def vocabulary_logits(net: Transformer, last: Array, head_DV: Any, bias_V: Array | None, out_DX: Any) -> Array:
    """Logits of final hidden states from the weights of a network's vocabulary product, float32 [..., V].

    Args:
      net: the network.
      last: [..., D].
      head_DV: weights of all tokens, or of some.
      bias_V: their bias, None without one.
      out_DX: what leads to the width of the embedding, None where it is the model's.
    """
    arch, dtype = net.arch, net.policy.compute.dtype
    last = last if out_DX is None else dense(last, out_DX, dtype=dtype)
    logits = dense(last, head_DV, bias_V, dtype=dtype)
    logits = logits if arch.logit_scale == 1 else logits * arch.logit_scale
    return arch.logit_cap * tanh(logits / arch.logit_cap) if arch.logit_cap else logits


def forward(net: Transformer, params: Params, inputs: Inputs) -> Hidden:
    """Runs T positions of each row; the caches come back with those positions written."""
    return apply(net, params, inputs)


def features_of(hidden: Hidden) -> Features:
    """Returns what drafters may read of a forward; a tap of several streams is their mean, as DeepSeek-V4 has it."""
    taps = tuple(jnp.mean(tap, axis=2) if tap.ndim > hidden.last_BTD.ndim else tap for tap in hidden.taps)
    return Features(hidden.last_BTD, hidden.stream, taps, hidden.shared_outputs)


def chosen_experts(net: Transformer, hidden: Hidden, token_BT: Array) -> Array:
    """Returns the expert choices of a forward over these tokens [B, T, Y, A]; layers must choose equally many."""
    each = [routing.expert_MA.reshape(*token_BT.shape, -1) for routing in hidden.routing]
    return jnp.stack(each, axis=2).astype(expert_dtype(net.arch))


def embed(net: Transformer, params: Params, token_BT: Array) -> Array:
    """Embeddings of tokens, float32 [B, T, D]; a vocabulary product may be missing in the parameters."""
    bare = net.clone(arch=replace(net.arch, tied=True), policy=net.policy.update(own_head=False))
    return apply(bare, params, token_BT, method="embed")


def head(net: Transformer, params: Params, last: Array) -> Array:
    """Logits of final hidden states, float32 [..., V]."""
    return apply(net, params, last, method="logits")


def teacher_forced(
    net: Transformer, params: Params, token_BT: Array, position_BT: Array, segment_BT: Array | None = None
) -> tuple[Array, Hidden]:
    """Computes logits of whole sequences without a cache, float32 [B, T, V], and the hidden states.

    ``segment_BT`` numbers the text that each position belongs to where rows hold several.
    """
    return apply(net, params, token_BT, position_BT, segment_BT, method="logits_of")
