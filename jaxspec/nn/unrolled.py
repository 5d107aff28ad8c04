"""Attention of a draft head that is trained on its own output: real slots in causal order, then its own slots above."""

from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.nn.dense import einsum
from jaxspec.nn.query_blocks import BLOCK, by_blocks, queries_at_once
from jaxspec.pytree import pytree, replace
from jaxspec.shapes import Array

MASKED = -1e30
CHUNK = 128  # queries of a short text that skip the same keys


@pytree
class Unrolled:
    """Keys and values of the rounds so far, in place of a cache.

    Round 0 runs all T slots on what the target computed. Each later round drafts one token further from every slot at
    once, or from some of them, and a slot that drafts sees the real slots up to its own and what it drafted before.

    Attributes:
      segment_BT: number of the text that each slot belongs to, 0 for padding.
      slot_BX: the slots that the present round runs, ascending; None for all.
      real: keys and values [B, T, G, C] of round 0, None before it.
      own: keys and values [B, X, G, C] of the later rounds, at the present round's slots.
    """

    segment_BT: Array
    slot_BX: Array | None = None
    real: tuple[Array, Array] | None = None
    own: tuple[tuple[Array, Array], ...] = ()

    def append(self, k: Array, v: Array, dtype: jnp.dtype) -> "Unrolled":
        """Returns the memory with the present round's keys and values added, in this dtype as a cache has them."""
        k, v = k.astype(dtype), v.astype(dtype)
        if self.real is None:
            return replace(self, real=(k, v))
        return replace(self, own=(*self.own, (k, v)))

    def keep(self, place_BX: Array, slot_BX: Array) -> "Unrolled":
        """Returns the memory for a next round of fewer slots.

        Args:
          place_BX: their places among the present round's slots.
          slot_BX: the slots themselves.
        """
        own = jax.tree.map(lambda x: jnp.take_along_axis(x, place_BX[:, :, None, None], axis=1), self.own)
        return replace(self, slot_BX=slot_BX, own=own)


def attend_unrolled(
    q_BXHC: Array,
    memory: Unrolled,
    *,
    scale: float,
    span: int | None = None,
    sinks_H: Array | None = None,
) -> Array:
    """Computes attention of one round, whose keys and values are in the memory (Li 2025, 2503.01840, section 3.2).

    Their dtype is that of both factors of products with them, and of what is kept of queries and results.

    Args:
      q_BXHC: queries of the present round's slots.
      memory: all rounds.
      scale: of the scores.
      span: most slots that a query sees, itself included.
      sinks_H: logits that take probability and have no value, None for none.

    Returns:
      float32 [B, X, H, C].
    """
    assert memory.real is not None, "a round's keys are appended before it attends"
    (k_BTGC, v_BTGC), segment_BT = memory.real, memory.segment_BT
    (rows, count, heads), length, every = q_BXHC.shape[:3], k_BTGC.shape[1], memory.slot_BX is None
    slot_BX = jnp.arange(length, dtype=jnp.int32)[None] if memory.slot_BX is None else memory.slot_BX
    slot_BX = jnp.broadcast_to(slot_BX, (rows, count))
    each = (q_BXHC * scale).astype(k_BTGC.dtype), slot_BX, jnp.take_along_axis(segment_BT, slot_BX, axis=1), memory.own
    # Of long texts, whose scores are computed by blocks, each chunk would keep arrays of its own for its gradients.
    step = CHUNK if every and count <= BLOCK else count
    lasts = [min(first + step, count) for first in range(0, count, step)]
    # What comes after a chunk of all slots is seen by none of its.
    ends = tuple(lasts) if every else (length,)
    sizes = [last - first for first, last in zip([0, *lasts], lasts, strict=False)]
    each, structure = jax.tree.flatten(each)
    each = [structure.unflatten(parts) for parts in zip(*(lax.split(x, sizes, axis=1) for x in each), strict=True)]
    outs = []
    for end, k, v, some in zip(ends, _beginnings(k_BTGC, ends), _beginnings(v_BTGC, ends), each, strict=True):
        attend, size = partial(_attend_some, span), queries_at_once(rows * heads, end)
        outs.append(by_blocks(attend, (k, v, segment_BT[:, :end], sinks_H), some, size))
    return jnp.concatenate(outs, axis=1).astype(jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _beginnings(x: Array, ends: tuple[int, ...]) -> tuple[Array, ...]:
    """Returns the first entries [B, end, ...] for each of ``ends``, the last of which is all.

    Gradients are added where they belong: of slices XLA would pad each with zeros, and add them number by number.
    """
    return tuple(x[:, :end] for end in ends)


def _added(ends: tuple[int, ...], _: None, grads: tuple[Array, ...]) -> tuple[Array]:
    total = grads[-1].astype(jnp.float32)
    for end, grad in zip(ends[:-1], grads[:-1], strict=True):
        total = lax.dynamic_update_slice_in_dim(total, total[:, :end] + grad.astype(jnp.float32), 0, axis=1)
    return (total.astype(grads[-1].dtype),)


_beginnings.defvjp(lambda x, ends: (_beginnings(x, ends), None), _added)


def _attend_some(
    span: int | None,
    text: tuple[Array, Array, Array, Array | None],
    each: tuple[Array, Array, Array, tuple[tuple[Array, Array], ...]],
) -> Array:
    """Attention of some slots, of which ``each`` has scaled queries, numbers, texts, and what they drafted before."""
    (k_BTGC, v_BTGC, segment_BT, sinks_H), (q_BXHC, slot_BX, own_BX, rounds) = text, each
    rows, count, heads, width = q_BXHC.shape
    slots, kv = k_BTGC.shape[1:3]
    group, dtype = heads // kv, q_BXHC.dtype
    distance = slot_BX[:, :, None] - jnp.arange(slots, dtype=jnp.int32)
    seen = (distance >= 0) & (own_BX[:, :, None] == segment_BT[:, None])
    if span is not None:
        seen &= distance < span - len(rounds)

    def heads_major(x: Array) -> Array:
        """[B, X, G, ..., C] to [B * G, X, ..., C]: products over it run 3 times faster on XLA:CPU."""
        return x.swapaxes(1, 2).reshape(rows * kv, x.shape[1], *x.shape[3:])

    def one_each(x: Array) -> Array:
        """A round's keys or values, of which each slot sees its own."""
        return heads_major(x)[:, :, None].astype(jnp.float32)

    q = heads_major(q_BXHC.reshape(rows, count, kv, group, width))
    dots = einsum("zqc,ztc->zqt", q.reshape(-1, count * group, width), heads_major(k_BTGC), dtype)
    dots = jnp.where(seen[:, None, :, None], dots.reshape(rows, kv, count, group, slots), MASKED)
    dots = dots.reshape(rows * kv, count, group, slots)
    wide = q.astype(jnp.float32)
    others = [jnp.sum(wide * one_each(k), axis=-1, keepdims=True) for k, _ in rounds]
    if sinks_H is not None:
        sinks_GQ = jnp.tile(sinks_H.astype(jnp.float32).reshape(kv, group), (rows, 1))
        others.append(jnp.broadcast_to(sinks_GQ[:, None, :, None], (rows * kv, count, group, 1)))
    top = lax.stop_gradient(reduce(jnp.maximum, others, jnp.max(dots, axis=-1, keepdims=True)))
    share, shares = jnp.exp(dots - top), [jnp.exp(x - top) for x in others]
    # Divided at the end: a softmax would walk over all scores twice more, and its gradient once.
    total = sum(shares, jnp.sum(share, axis=-1, keepdims=True))
    out = einsum("zqt,ztc->zqc", share.reshape(-1, count * group, slots), heads_major(v_BTGC), dtype)
    out = out.reshape(-1, count, group, out.shape[-1])
    for (_, v), own in zip(rounds, shares, strict=False):
        out += own * one_each(v)
    out = (out / total).astype(dtype)
    return out.reshape(rows, kv, count, group, -1).swapaxes(1, 2).reshape(rows, count, heads, -1)
