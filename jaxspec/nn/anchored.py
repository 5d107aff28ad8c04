"""Attention of many blocks of drafts to one text, each to what stands before its anchor and to itself, for training."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxspec.nn.dense import einsum
from jaxspec.nn.query_blocks import by_blocks, queries_at_once
from jaxspec.pytree import pytree, replace, static
from jaxspec.shapes import Array

MASKED = -1e30


@dataclass(frozen=True)
class BlockView:
    """What the rows of a block see.

    Attributes:
      window: W, positions that a row sees; None for all.
      causal: whether a row sees only those of its block up to itself.
      from_anchor: whether every row sees the W positions before the anchor, and not W up to its own.
    """

    window: int | None = None
    causal: bool = False
    from_anchor: bool = False

    def bounds(self, start: Array, place: Array, size: int) -> tuple[Array, Array]:
        """Returns the first and the last position that rows see.

        Args:
          start: positions of anchors.
          place: of the rows in their block, broadcast against ``start``.
          size: rows of a block.
        """
        last = start + (place if self.causal else size - 1)
        if self.window is None:
            return jnp.zeros_like(last), last
        if self.from_anchor:
            return jnp.broadcast_to(start - self.window, last.shape), last
        own = start + place
        return own - self.window + 1, jnp.minimum(last, own + self.window - 1)


@pytree
class Anchored:
    """Keys and values of whole texts, in place of a cache.

    Attributes:
      segment_BT: number of the text that each position belongs to, 0 for padding.
      anchor_BN: index in its row of each block's anchor.
      text: keys and values [B, T, G, C] of all positions; None before they are computed.
      size: rows of a block.
    """

    segment_BT: Array
    anchor_BN: Array
    text: tuple[Array, Array] | None = None
    size: int = static(default=1)

    def with_text(self, k_BTGC: Array, v_BTGC: Array) -> "Anchored":
        """Returns the memory with the keys and values of the texts."""
        return replace(self, text=(k_BTGC, v_BTGC))


def attend_anchored(
    q_BXHC: Array,
    k_BXGC: Array,
    v_BXGC: Array,
    memory: Anchored,
    view: BlockView,
    *,
    scale: float,
    dtype: jnp.dtype,
    sinks_H: Array | None = None,
) -> Array:
    """Computes attention of blocks that lie side by side, X = N * size rows, float32 [B, X, H, C].

    Factors of products are in ``dtype``; ``sinks_H`` are logits that take probability and have no value, None for none.
    """
    size, (rows, blocks) = memory.size, memory.anchor_BN.shape

    def apart(x_BX: Array) -> Array:
        return x_BX.reshape(rows, blocks, size, *x_BX.shape[2:])

    each = memory.anchor_BN, *(apart(x) for x in (q_BXHC, k_BXGC, v_BXGC))
    heads, keys = q_BXHC.shape[2], memory.segment_BT.shape[1] + size
    step = max(queries_at_once(rows * heads, keys) // size, 1)
    text = memory, jnp.full(heads, MASKED) if sinks_H is None else sinks_H.astype(jnp.float32)
    return by_blocks(partial(_attend_some, view, scale, dtype), text, each, step).reshape(q_BXHC.shape)


def _attend_some(
    view: BlockView, scale: float, dtype: jnp.dtype, text: tuple[Anchored, Array], each: tuple[Array, ...]
) -> Array:
    """Attention of some blocks, [B, N, S, H, C]."""
    memory, sinks_H = text
    assert memory.text is not None, "the texts' keys are there before blocks attend"
    anchor_BN, q_BNSHC, k_BNSGC, v_BNSGC = each
    k_BTGC, v_BTGC = memory.text
    rows, blocks, size, heads, width = q_BNSHC.shape
    kv = k_BTGC.shape[2]
    q = (q_BNSHC * scale).reshape(rows, blocks, size, kv, heads // kv, width)
    place_S = jnp.arange(size, dtype=jnp.int32)
    low_BNS, high_BNS = view.bounds(anchor_BN[..., None], place_S, size)
    at_T = jnp.arange(k_BTGC.shape[1], dtype=jnp.int32)
    own_BN = jnp.take_along_axis(memory.segment_BT, anchor_BN, axis=1)
    earlier = (at_T < anchor_BN[..., None]) & (memory.segment_BT[:, None] == own_BN[..., None])
    seen_BNST = earlier[:, :, None] & (at_T >= low_BNS[..., None])
    inside_BNS = anchor_BN[..., None] + place_S
    seen_BNSS = (inside_BNS[:, :, None] >= low_BNS[..., None]) & (inside_BNS[:, :, None] <= high_BNS[..., None])
    before = einsum("bnsgrc,btgc->bgrnst", q, k_BTGC, dtype)
    block = einsum("bnsgrc,bnzgc->bgrnsz", q, k_BNSGC, dtype)
    seen = jnp.concatenate([seen_BNST, seen_BNSS], axis=-1)[:, None, None]
    score = jnp.where(seen, jnp.concatenate([before, block], axis=-1), MASKED)
    sink = jnp.broadcast_to(sinks_H.reshape(kv, -1, 1, 1, 1), (*score.shape[:-1], 1))
    prob = jax.nn.softmax(jnp.concatenate([score, sink], axis=-1), axis=-1)[..., :-1]
    count = k_BTGC.shape[1]
    out = einsum("bgrnst,btgc->bnsgrc", prob[..., :count], v_BTGC, dtype)
    out += einsum("bgrnsz,bnzgc->bnsgrc", prob[..., count:], v_BNSGC, dtype)
    return out.reshape(q_BNSHC.shape)
