"""The one transformer: it reads an ArchSpec and runs any family, for training, prefill, drafting and verification."""

from typing import Any, cast

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.cache.addressing import LayerCache
from jaxspec.cache.window import AnyWindow, Segments, Window
from jaxspec.models.arch import ArchSpec, Segment, segments
from jaxspec.models.block import Block, norm_params, normalise
from jaxspec.models.depth import Loop, init_stack, stack_name
from jaxspec.nn.dense import dense
from jaxspec.nn.hyper import HyperHead
from jaxspec.nn.lookup import lookup
from jaxspec.nn.policy import Policy, matrix, weight
from jaxspec.nn.router import Routing
from jaxspec.protocol import NO_CAPTURE, CaptureSpec, Features
from jaxspec.pytree import pytree, replace
from jaxspec.shapes import Array, Params

Caches = tuple[LayerCache, ...]
POSITION_OFFSET = 2


@pytree
class Hidden:
    """What a forward returns.

    Attributes:
      last_BTD: stream after the final norm, float32.
      stream: the stream before it, or the streams [B, T, N, D].
      layers: caches with the T provisional positions written, None without a cache.
      taps: the stream entering each tapped layer, float32.
      shared_outputs: what the shared experts of each asked layer return [B, T, D], see ``Routing.common_MD``.
      routing: choices of every expert layer over the M = B * T rows, in layer order; empty unless asked for.
    """

    last_BTD: Array
    stream: Array
    layers: Caches | None
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
        self.embed_VD = weight(self, p, "embed_VD", (a.vocab_size, width))
        if p.layout.own_head or not a.tied:
            self.head_DV = matrix(self, p, "head_DV", (width, a.vocab_size))
        if a.learned_positions:
            self.position_SD = weight(self, p, "position_SD", (a.learned_positions + POSITION_OFFSET, a.model_dim))
        if a.embed_dim:
            self.project_in_XD = matrix(self, p, "project_in_XD", (width, a.model_dim))
            self.project_out_DX = matrix(self, p, "project_out_DX", (a.model_dim, width))
        if a.final_norm:
            self.norm = norm_params(self, a, p, "norm")
        if a.hyper is not None:
            self.hyper_head = HyperHead(a.hyper, a.model_dim, a.norm_eps, p)
        if p.layout.depth == "unrolled":
            self.layers = [Block(layer, a, p) for layer in a.layers]
        else:
            self.stacks = [
                self._stack(segment, place) for segment in segments(a.layers) for place in range(len(segment.pattern))
            ]

    def _stack(self, segment: Segment, place: int) -> Any:
        name = stack_name(segment, place)
        # Flax would trace the initialiser in every forward, to compare shapes that the loader has compared.
        if self.has_variable("params", name):
            return self.get_variable("params", name)
        return self.param(name, init_stack, segment, place, self.arch, self.policy)

    def __call__(
        self,
        token_BT: Array,
        position_BT: Array,
        memory: Caches | None = None,
        window: AnyWindow = None,
        taps: tuple[int, ...] = (),
        routes: bool = False,
        shared_outputs: tuple[int, ...] = (),
    ) -> Hidden:
        """Runs T positions of each row.

        Args:
          token_BT: int32 token ids.
          position_BT: int32 absolute positions (a tree node's is start + depth).
          memory: caches as ``init_caches`` lays them out; None attends causally within the T tokens alone.
          window: where the caches are written and what is seen; without caches, the texts that a row holds.
          taps: layer boundaries b whose stream is kept; b is the input of layer b, len(layers) the last output.
          routes: whether the expert choices of every layer are kept.
          shared_outputs: expert layers of which is kept what their shared experts return, or what their router reads.
        """
        x = self._embed(token_BT, position_BT)
        walk = self._unrolled if self.policy.layout.depth == "unrolled" else self._stacked
        x, written, kept, routing = walk(x, (token_BT, position_BT), memory, window, taps, shared_outputs, routes)
        kept["tap", len(self.arch.layers)] = x
        last = self.hyper_head(x) if self.arch.hyper else x
        last = normalise(self.arch, last, self.norm) if self.arch.final_norm else last
        common = tuple(kept["common", y].reshape(*token_BT.shape, -1) for y in shared_outputs)
        streams = tuple(kept["tap", b] for b in taps)
        return Hidden(last, x, tuple(written) if memory else None, streams, common, tuple(routing))

    def embed(self, token_BT: Array) -> Array:
        """Embeddings of tokens, float32 [B, T, D]."""
        x = lookup(self.embed_VD, token_BT)
        return dense(x, self.project_in_XD, dtype=self.policy.compute.dtype) if self.arch.embed_dim else x

    def _embed(self, token_BT: Array, position_BT: Array) -> Array:
        a, x = self.arch, self.embed(token_BT)
        if a.learned_positions:
            place_BT = jnp.minimum(position_BT, a.learned_positions - 1) + POSITION_OFFSET
            x = x + lookup(self.position_SD, place_BT)
        return jnp.repeat(x[:, :, None], a.hyper.streams, axis=2) if a.hyper else x

    def _unrolled(self, x, tokens, memory, window, taps, shared_outputs, routes):
        written, kept, routing, shared = [], {}, [], None
        for index, block in enumerate(self.layers):
            kept["tap", index] = x
            token_BT, position_BT = tokens
            memory_y = memory[index] if memory else None
            x, cache, shared, routed = block(x, token_BT, position_BT, memory_y, window, shared)
            written.append(cache)
            if routed is not None:
                kept["common", index] = routed.common_MD
                routing += [replace(routed, common_MD=None)] if routes else []
        return x, written, kept, routing

    def _stacked(self, x, tokens, memory, window, taps, shared_outputs, routes):
        if self.is_initializing():  # the stacks' parameters are there already
            return x, [], {(kind, b): x for kind in ("tap", "common") for b in (*taps, *shared_outputs)}, []
        written, kept, routing, shared, place = [], {}, [], None, 0
        for segment in segments(self.arch.layers):
            size = len(segment.pattern)
            stacks = self.stacks[place : place + size]
            caches = tuple(memory[place : place + size]) if memory else (None,) * size
            own_taps, own_shared = (
                tuple(b for b in some if segment.first <= b < segment.stop) for some in (taps, shared_outputs)
            )
            body = Loop(segment, self.arch, self.policy, stacks, tokens, window, own_taps, own_shared, routes)
            x, caches, shared, found, routed = body.run(x, caches, shared)
            kept |= found
            written += caches
            routing += routed
            place += size
        return x, written, kept, routing

    def initial(self, key: Array) -> Params:
        """Random parameters."""
        token = jnp.zeros((1, 2), jnp.int32)
        return cast(Params, self.init(key, token, token, method="logits_of"))

    def logits(self, last: Array) -> Array:
        """Head over [..., D] final hidden states, float32 [..., V]."""
        if self.arch.embed_dim:
            last = dense(last, self.project_out_DX, dtype=self.policy.compute.dtype)
        head_DV = self.head_DV if self.policy.layout.own_head or not self.arch.tied else self.embed_VD.T
        return dense(last, head_DV, dtype=self.policy.compute.dtype)

    def logits_of(self, token_BT: Array, position_BT: Array, segment_BT: Array | None = None) -> tuple[Array, Hidden]:
        """Teacher-forced logits of whole sequences, float32 [B, T, V], and the hidden states with expert choices."""
        packed = None if segment_BT is None else Segments(segment_BT)
        hidden = self(token_BT, position_BT, window=packed, routes=True)
        return self.logits(hidden.last_BTD), hidden


def forward(
    net: Transformer,
    params: Params,
    token_BT: Array,
    position_BT: Array,
    memory: Caches,
    window: Window,
    reads: CaptureSpec = NO_CAPTURE,
    routes: bool = False,
) -> tuple[Hidden, Caches]:
    """Runs T positions over a cache; returns the hidden states and the caches with those positions written."""
    hidden: Any = net.apply(
        cast(Any, params),
        token_BT,
        position_BT,
        memory,
        window,
        reads.taps,
        routes=routes,
        shared_outputs=reads.shared_outputs,
    )
    return hidden, hidden.layers


def features_of(hidden: Hidden) -> Features:
    """What drafters may read of a forward."""
    return Features(hidden.last_BTD, hidden.stream, hidden.taps, hidden.shared_outputs)


def embed(net: Transformer, params: Params, token_BT: Array) -> Array:
    """Embeddings of tokens, float32 [B, T, D]."""
    return cast(Array, net.apply(cast(Any, params), token_BT, method="embed"))


def head(net: Transformer, params: Params, last: Array) -> Array:
    """Logits of final hidden states, float32 [..., V]."""
    return cast(Array, net.apply(cast(Any, params), last, method="logits"))


def teacher_forced(
    net: Transformer, params: Params, token_BT: Array, position_BT: Array, segment_BT: Array | None = None
) -> tuple[Array, Hidden]:
    """Logits of whole sequences without a cache, float32 [B, T, V], and the hidden states.

    Args:
      net: the network.
      params: its parameters.
      token_BT: ids.
      position_BT: place of each in its text.
      segment_BT: number of the text that each belongs to where rows hold several.
    """
    return cast(Any, net.apply(cast(Any, params), token_BT, position_BT, segment_BT, method="logits_of"))
