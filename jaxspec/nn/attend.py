"""Softmax attention: over cached entries block by block, or of a whole sequence to itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.window import Window
from jaxspec.nn.dense import padded_rows, whole_tiles
from jaxspec.nn.query_blocks import BLOCK, by_blocks, queries_at_once
from jaxspec.nn.steady import exp, row_sum
from jaxspec.shapes import Array
from pallas_kernels.verify_attention.reference import first_seen

SELF_CHUNK, PARTS = 64, 4  # queries of a short text, and parts of a long one, that skip the same keys
MASKED = -1e30  # finite, so that a block without a visible key leaves the running softmax as it is


@dataclass(frozen=True)
class Source:
    """Something to attend to, read in blocks.

    Attributes:
      first, last: range of block numbers.
      load: block number to keys [X, G, Z, C], values [X, G, Z, C'] and whether query t of reader X sees them,
        [X, T', Z]; the readers of a chain are its B rows with T queries each, those of a tree its B * T nodes.
    """

    first: Array | int
    last: Array | int
    load: Callable[[Array], tuple[Array, Array, Array]]


def readers(window: Window, position_BT: Array) -> Array:
    """Returns the positions of the queries by reader, [B, T] for a chain and [B * T, 1] for a tree."""
    return position_BT if window.path_BTJ is None else position_BT.reshape(-1, 1)


def positions_seen(position_XT: Array, index: Array, block: int, span: int | None = None) -> Array:
    """Returns which positions from ``index * block`` on a query sees: up to its own, from ``first_seen`` on."""
    slot_Z = index * block + jnp.arange(block, dtype=jnp.int32)
    seen = slot_Z <= position_XT[..., None]
    return seen if span is None else seen & (slot_Z >= first_seen(position_XT, span)[..., None])


def blocks_in_reach(window: Window, count: int, span: int | None = None) -> tuple[Array | int, Array]:
    """Returns the number of the first block that any row sees, and of the one after the last."""
    last = (jnp.max(window.first_B) + count + window.block - 1) // window.block
    if span is None:
        return 0, last
    return jnp.maximum(first_seen(jnp.min(window.start_B), span), 0) // window.block, last


def attend(
    q_BTHC: Array,
    sources: Sequence[Source],
    *,
    kv_heads: int,
    value_width: int,
    scale: float,
    dtype: jnp.dtype,
    sinks_H: Array | None = None,
    tree: bool = False,
) -> Array:
    """Computes attention of T provisional positions per row to what their sources show them.

    Blocks are read one after the other with a running softmax (Milakov 2018), so the cost follows the context and not
    the capacity, and a row's result does not depend on T or on other rows: blocks are aligned to position 0 and a
    block in which a row sees nothing leaves its sums unchanged. Each node of a tree is a reader of its own, whose
    ancestors stand at their depths as plain decoding would have stored them: sums over other places would round
    differently.

    Args:
      q_BTHC: queries, rotated.
      sources: attended to jointly.
      kv_heads: G; each serves H / G queries.
      value_width: C'.
      scale: of the scores.
      dtype: of the products' factors.
      sinks_H: one more logit per head that takes probability and has no value.
      tree: whether every node is a reader.

    Returns:
      float32 [B, T, H, C'].
    """
    rows, count, heads, width = q_BTHC.shape
    group = heads // kv_heads
    xs, each = (rows * count, 1) if tree else (rows, count)
    q = (q_BTHC * scale).reshape(xs, each, kv_heads, group, width).transpose(0, 2, 3, 1, 4)
    padded = padded_rows(group * each)
    q_XGQC = whole_tiles(q.reshape(xs, kv_heads, group * each, width).astype(dtype), 3, dtype)
    q_XGQC = jnp.pad(q_XGQC, ((0, 0), (0, 0), (0, padded - group * each), (0, 0)))

    def visit(source: Source, index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = carry
        k_XGZC, v_XGZC, seen_XTZ = source.load(index)
        k = whole_tiles(k_XGZC.astype(dtype), 3, dtype)
        score = jnp.einsum("xgqc,xgzc->xgqz", q_XGQC, k, preferred_element_type=jnp.float32)
        seen = jnp.tile(seen_XTZ, (1, -(-padded // each), 1))[:, None, :padded]
        new_top = jnp.maximum(top, jnp.max(jnp.where(seen, score, MASKED), axis=-1))
        prob = jnp.where(seen, exp(score - new_top[..., None]), 0.0)
        keep = exp(top - new_top)
        weight, v = whole_tiles(prob.astype(dtype), 3, dtype), whole_tiles(v_XGZC.astype(dtype), 2, dtype)
        added = jnp.einsum("xgqz,xgzc->xgqc", weight, v, preferred_element_type=jnp.float32)
        return new_top, total * keep + row_sum(prob)[..., 0], out * keep[..., None] + added

    shape = (xs, kv_heads, padded)
    carry = (*_start(shape, group, each, sinks_H), jnp.zeros((*shape, value_width)))
    for source in sources:
        carry = lax.fori_loop(source.first, source.last, lambda i, c, s=source: visit(s, i, c), carry)
    _, total, out = carry
    out = (out / jnp.maximum(total, 1e-30)[..., None])[:, :, : group * each]
    return out.reshape(xs, kv_heads, group, each, value_width).transpose(0, 3, 1, 2, 4).reshape(rows, count, heads, -1)


def _start(shape: tuple[int, int, int], group: int, each: int, sinks_H: Array | None) -> tuple[Array, Array]:
    """Returns the running maximum and sum before any block: of nothing, or of each head's sink."""
    if sinks_H is None:
        return jnp.full(shape, MASKED), jnp.zeros(shape)
    _, kv_heads, padded = shape
    sink_GQ = jnp.repeat(sinks_H.astype(jnp.float32).reshape(kv_heads, group), each, axis=1)
    sink_GQ = jnp.pad(sink_GQ, ((0, 0), (0, padded - group * each)))
    return jnp.broadcast_to(sink_GQ, shape), jnp.ones(shape)


def attend_self(
    q_BTHC: Array,
    k_BSGC: Array,
    v_BSGC: Array,
    *,
    scale: float,
    span: int | None = None,
    seen_BTS: Array | None = None,
    sinks_H: Array | None = None,
    segment_BT: Array | None = None,
) -> Array:
    """Computes attention of a whole sequence to itself (training and teacher forcing), float32 [B, T, H, C'].

    Causal queries go in chunks that skip later keys, about half the work; those of long texts in parts, whose scores
    are computed some queries at a time. Products are heads-major, which XLA:CPU runs 3 times faster than an einsum over
    the sequence.

    Args:
      q_BTHC: queries.
      k_BSGC: keys; S is T unless ``seen_BTS`` is given.
      v_BSGC: values.
      scale: of the scores.
      span: what each query sees, see ``first_seen``; None for all before it.
      seen_BTS: what each query sees, instead of the causal order; B may be 1.
      sinks_H: one more logit per head that takes probability and has no value.
      segment_BT: number of the text that each position belongs to where rows hold several; others are not seen.
    """
    count, heads = q_BTHC.shape[1:3]
    causal = seen_BTS is None
    # Of long texts queries go in fewer parts, within which scores are computed by blocks.
    outs, long = [], count > BLOCK
    step = -(-count // PARTS) if long else SELF_CHUNK
    for first in range(0, count, step):
        last = min(first + step, count)
        end = last if causal else k_BSGC.shape[1]
        at_1T = jnp.arange(first, last, dtype=jnp.int32)[None]
        seen = None if seen_BTS is None else seen_BTS[:, first:last]
        own = None if segment_BT is None else segment_BT[:, first:last]
        of_keys = None if segment_BT is None else segment_BT[:, :end]
        text, each = (k_BSGC[:, :end], v_BSGC[:, :end], of_keys, sinks_H), (q_BTHC[:, first:last], at_1T, seen, own)
        some, size = partial(_attend_some, scale, span), queries_at_once(len(q_BTHC) * heads, end)
        outs.append(by_blocks(some, text, each, size, one_again=long))
    return jnp.concatenate(outs, axis=1)


def _attend_some(
    scale: float,
    span: int | None,
    text: tuple[Array, Array, Array | None, Array | None],
    each: tuple[Array, Array, Array | None, Array | None],
) -> Array:
    """Attention of some queries, of which ``each`` has the places, what they see and the text they belong to."""
    (k_BSGC, v_BSGC, segment_BS, sinks_H), (q_BQHC, at_1Q, seen_BQS, segment_BQ) = text, each
    rows, count, heads, width = q_BQHC.shape
    kv, group, wide = k_BSGC.shape[2], heads // k_BSGC.shape[2], v_BSGC.shape[-1]
    q = (q_BQHC * scale).reshape(rows, count, kv, group, width).transpose(0, 2, 3, 1, 4)
    k_XSC = k_BSGC.swapaxes(1, 2).reshape(rows * kv, -1, width)
    v_XSC = v_BSGC.swapaxes(1, 2).reshape(rows * kv, -1, wide)
    q_XQC, exact = q.reshape(rows * kv, group * count, width), lax.Precision.HIGHEST
    score = jnp.einsum("xqc,xsc->xqs", q_XQC, k_XSC, precision=exact).reshape(rows, kv, group, count, -1)
    if seen_BQS is None:
        key_S = jnp.arange(k_XSC.shape[1], dtype=jnp.int32)
        seen_BQS = key_S <= at_1Q[:, :, None]
        if span is not None:
            seen_BQS = seen_BQS & (key_S >= first_seen(at_1Q, span)[:, :, None])
    if segment_BQ is not None and segment_BS is not None:
        seen_BQS = seen_BQS & (segment_BQ[:, :, None] == segment_BS[:, None])
    score = jnp.where(seen_BQS[:, None, None], score, MASKED)
    if sinks_H is None:
        prob = jax.nn.softmax(score, axis=-1)
    else:
        sink = jnp.broadcast_to(sinks_H.astype(jnp.float32).reshape(kv, group, 1, 1), (*score.shape[:-1], 1))
        prob = jax.nn.softmax(jnp.concatenate([score, sink], axis=-1), axis=-1)[..., :-1]
    out = jnp.einsum("xqs,xsc->xqc", prob.reshape(rows * kv, group * count, -1), v_XSC, precision=exact)
    return out.reshape(rows, kv, group, count, wide).transpose(0, 3, 1, 2, 4).reshape(rows, count, heads, wide)
