"""Attention of a block of drafts to what a target knew before it, and to the block itself (DFlash)."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.cache.addressing import StreamSpec, write
from jaxspec.cache.tree_reads import read_block
from jaxspec.nn.anchored import Anchored, BlockView, attend_anchored
from jaxspec.nn.attend import Source, attend, blocks_in_reach
from jaxspec.nn.attention import NORMS, OUT, OUT_BIAS, AttentionSpec
from jaxspec.nn.cached_attention import attend_cached
from jaxspec.nn.compressed_attention import CompressedSpec
from jaxspec.nn.dense import dense
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.norm import rms_norm
from jaxspec.nn.param import Param, declare
from jaxspec.nn.policy import Policy
from jaxspec.nn.rope import rotate
from jaxspec.pytree import replace
from jaxspec.shapes import Array

QUERY = Param("query_DHC", ("embed", "heads", "head_dim"))
QUERY_BIAS = Param("query_bias_HC", ("heads", "head_dim"), "bias")
KEY_VALUE = Param("key_value_DGXC", ("embed", "kv_heads", "group", "head_dim"))
KEY_VALUE_BIAS = Param("key_value_bias_GXC", ("kv_heads", "group", "head_dim"), "bias")


def streams_of(spec: AttentionSpec | CompressedSpec) -> dict[str, StreamSpec]:
    """Returns what a layer caches: positions before the anchor, with a window as many as it sees."""
    if isinstance(spec, CompressedSpec):
        return {"kv": StreamSpec(1, spec.head_dim, spec.window)}
    one = StreamSpec(spec.kv_heads, spec.head_dim, spec.window)
    return {"k": one, "v": one}


class BlockAttention(nn.Module):
    """Attention whose keys and values come from the target's features before the anchor, and from the block after it.

    One set of weights projects both. The features' keys depend on nothing but the features, so they are written once.

    Attributes:
      spec: sizes, norms and rotation.
      view: what a row of the block sees.
    """

    spec: AttentionSpec
    view: BlockView
    model_dim: int
    norm_eps: float
    policy: Policy

    def setup(self) -> None:
        """Declares the parameters."""
        s, p, dim = self.spec, self.policy, self.model_dim
        self.query_DHC = declare(self, p, QUERY, (dim, s.heads, s.head_dim))
        self.key_value_DGXC = declare(self, p, KEY_VALUE, (dim, s.kv_heads, 2, s.head_dim))
        self.query_bias = self.key_value_bias = self.out_bias = None
        if s.qkv_bias:
            self.query_bias = declare(self, p, QUERY_BIAS, (s.heads, s.head_dim))
            self.key_value_bias = declare(self, p, KEY_VALUE_BIAS, (s.kv_heads, 2, s.head_dim))
        self.norms_C = (
            [declare(self, p, norm, (s.head_dim,)) for norm in NORMS["head"]] if s.qk_norm == "head" else None
        )
        self.out_HCD = declare(self, p, OUT, (s.heads, s.head_dim, dim))
        if s.out_bias:
            self.out_bias = declare(self, p, OUT_BIAS, (dim,))

    def observe(self, c_BTD: Array, inputs: Inputs) -> Any:
        """Returns the memory with the keys and values of the target's features at T positions."""
        k_BTGC, v_BTGC = self._keys(c_BTD, inputs)
        if isinstance(inputs.memory, Anchored):
            return inputs.memory.with_text(k_BTGC, v_BTGC)
        return self._written(k_BTGC, v_BTGC, inputs)

    def __call__(self, x_BTD: Array, inputs: Inputs) -> tuple[Array, Any]:
        """Returns the output at all rows of the blocks, and the memory."""
        s, memory = self.spec, inputs.memory
        q_BTHC = dense(x_BTD, self.query_DHC, self.query_bias, dtype=self.policy.compute.dtype)
        q_BTHC = self._placed(q_BTHC, 0, inputs)
        k_BTGC, v_BTGC = self._keys(x_BTD, inputs)
        if isinstance(memory, Anchored):
            out = attend_anchored(
                q_BTHC, k_BTGC, v_BTGC, memory, self.view, scale=s.head_dim**-0.5, dtype=self.policy.compute.dtype
            )
        else:
            memory = self._written(k_BTGC, v_BTGC, inputs)
            out = self._attend(q_BTHC, memory, inputs)
        return dense(out, self.out_HCD, self.out_bias, dtype=self.policy.compute.dtype, axes=2), memory

    def _keys(self, x_BTD: Array, inputs: Inputs) -> tuple[Array, Array]:
        both = dense(x_BTD, self.key_value_DGXC, self.key_value_bias, dtype=self.policy.compute.dtype)
        return self._placed(both[..., 0, :], 1, inputs), both[..., 1, :]

    def _placed(self, x_BTHC: Array, norm: int, inputs: Inputs) -> Array:
        """Normalizes heads and rotates them by their positions."""
        if self.norms_C is not None:
            x_BTHC = rms_norm(x_BTHC, self.norms_C[norm], self.norm_eps)
        rope = self.spec.rope
        return x_BTHC if rope is None else rotate(x_BTHC, inputs.rotation(rope), rope)

    def _written(self, k_BTGC: Array, v_BTGC: Array, inputs: Inputs) -> Any:
        streams, window = streams_of(self.spec), inputs.cache_window
        assert window is not None, "blocks are drafted from a cache"
        new = {"k": k_BTGC, "v": v_BTGC}
        return {name: write(pages, streams[name], window, new[name]) for name, pages in inputs.memory.items()}

    def _attend(self, q_BTHC: Array, memory: Any, inputs: Inputs) -> Array:
        """Attention to the cache, in which the block stands from its anchor's position on."""
        s, view, p = self.spec, self.view, self.policy
        inputs, stream, scale = replace(inputs, memory=memory), streams_of(s)["k"], s.head_dim**-0.5
        pages = memory["k"], memory["v"]
        if view.window is not None and not (view.causal and not view.from_anchor):
            return attend_around(q_BTHC, pages, inputs, view, stream, scale=scale, dtype=p.compute.dtype)
        _, high_BT = _bounds(inputs, view)
        seen = replace(inputs, position_BT=high_BT, rotations=(), angles=())
        return attend_cached(q_BTHC, pages, seen, stream, p, scale=scale, span=view.window)


def _bounds(inputs: Inputs, view: BlockView) -> tuple[Array, Array]:
    """Returns the first and the last position that each row sees, [B, T]."""
    window, shape = inputs.cache_window, inputs.position_BT.shape
    assert window is not None, "blocks are drafted from a cache"
    low, high = view.bounds(window.start_B[:, None], jnp.arange(shape[1], dtype=jnp.int32)[None], shape[1])
    return jnp.broadcast_to(low, shape), jnp.broadcast_to(high, shape)


def attend_around(
    q_BTHC: Array, pages: tuple[Array, Array], inputs: Inputs, view: BlockView, stream: StreamSpec, *, scale: float,
    dtype: jnp.dtype, sinks_H: Array | None = None,
) -> Array:  # fmt: skip
    """Computes attention of a block to a window of a cache and to itself, float32 [B, T, H, C].

    Args:
      q_BTHC: queries of the block.
      pages: of keys and of values, with the block written.
      inputs: with the cache.
      view: what its rows see, with a window.
      stream: of keys and values.
      scale: of the scores.
      dtype: of the products.
      sinks_H: logits that take probability and have no value.
    """
    window, (rows, size) = inputs.cache_window, inputs.position_BT.shape
    low_BT, high_BT = _bounds(inputs, view)
    assert window is not None, "asked for the bounds already"
    assert view.window is not None, "asked of layers with a window"

    def load(index: Array) -> tuple[Array, Array, Array]:
        k, v = (read_block(x, stream, window, index, rows) for x in pages)
        at_Z = index * window.block + jnp.arange(window.block, dtype=jnp.int32)
        return k, v, (at_Z >= low_BT[..., None]) & (at_Z <= high_BT[..., None])

    source = Source(*blocks_in_reach(window, size, view.window + 1), load)
    return attend(
        q_BTHC, [source], kv_heads=stream.heads, value_width=stream.width, scale=scale, dtype=dtype, sinks_H=sinks_H
    )
