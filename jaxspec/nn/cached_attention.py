"""Attention of new positions to a layer's memory: to its cache, by kernel or by XLA, or to each other."""

from typing import Any

from jax import lax

from jaxspec.cache.addressing import StreamSpec, pages_of
from jaxspec.cache.float8 import dequantize
from jaxspec.cache.tree_reads import read_block
from jaxspec.cache.window import Window, segments_of
from jaxspec.native import attention_call as native
from jaxspec.nn.attend import Source, attend, attend_self, blocks_in_reach, positions_seen, readers
from jaxspec.nn.chosen import Chosen, mask_of, where_read
from jaxspec.nn.fused_attention import attend_by_kernel
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.matrix import Matrix, own_of
from jaxspec.nn.policy import Policy
from jaxspec.nn.unrolled import Unrolled, attend_unrolled
from jaxspec.shapes import Array
from pallas_kernels.chosen_attention import api as chosen_entries
from pallas_kernels.chosen_attention.api import Recent
from pallas_kernels.select import choose
from pallas_kernels.verify_attention.api import OP, case_name, entry_obstacles

Pages = tuple[Array, Array | None]
"""Keys and values [P, G, Z, C]; without values a key begins with its value."""


def attend_new(
    q_BTHC: Array,
    k_BTGC: Array,
    v_BTGC: Array,
    inputs: Inputs,
    *,
    scale: float,
    dtype: Any,
    span: int | None = None,
    sinks_H: Array | None = None,
) -> tuple[Array, Unrolled | None]:
    """Computes attention without a cache: of whole sequences to themselves, or of one round of a head in training.

    ``dtype`` is that of a head's keys and values; whole sequences are computed in float32.

    Returns:
      float32 [B, T, H, C'], and the memory of the rounds so far.
    """
    if isinstance(inputs.memory, Unrolled):
        memory = inputs.memory.append(k_BTGC, v_BTGC, dtype)
        return attend_unrolled(q_BTHC, memory, scale=scale, span=span, sinks_H=sinks_H), memory
    segment_BT, selection = segments_of(inputs.window), inputs.selection
    assert not isinstance(selection, Chosen), "kernels choose of a cache"
    out = attend_self(
        q_BTHC, k_BTGC, v_BTGC, scale=scale, span=span, seen_BTS=selection, sinks_H=sinks_H,
        segment_BT=segment_BT,
    )  # fmt: skip
    return out, None


def attend_cached(
    q_BTHC: Array,
    pages: Pages,
    inputs: Inputs,
    stream: StreamSpec,
    policy: Policy,
    *,
    scale: float,
    span: int | None = None,
    value_width: int | None = None,
    sinks: Array | Matrix | None = None,
    scales: tuple[Array, Array] | None = None,
) -> Array:
    """Computes attention of T provisional positions per row to the cache, float32 [B, T, H, C'].

    Args:
      q_BTHC: queries, rotated.
      pages: of the cache, the T positions written.
      inputs: of the queries; a selection limits what each sees.
      stream: how pages are addressed.
      policy: what computes, and in which dtype.
      scale: of the scores.
      span: what a query sees, see ``first_seen``; None for all before it.
      value_width: C' where there are no pages of values.
      sinks: one more logit per head that takes probability and has no value.
      scales: pages [P, G, Z, 1] of the scales of keys and values in float8_e4m3fn, which no kernel reads.
    """
    k_pages, v_pages = pages
    window, dtype = inputs.cache_window, policy.compute.dtype
    assert window is not None, "asked of layers with a cache"
    wide = (value_width or k_pages.shape[3]) if v_pages is None else v_pages.shape[3]
    sinks_H: Any = own_of(sinks)
    kernels, ring = policy.compute.kernels, stream.reach is not None
    if isinstance(inputs.selection, Chosen):
        out = attend_chosen(
            q_BTHC, k_pages, inputs.selection, stream, window, policy, scale=scale, value_width=wide, sinks_H=sinks_H
        )
        if out is not None:
            return out
    if kernels == "native":
        case = case_name(q_BTHC.shape[2], k_pages, wide)
        blocked = native.obstacles(k_pages, dtype=dtype, block=window.block)
        if choose(OP, case, kernels, "cpu", blocked).implementation == "native":
            kept = mask_of(inputs.selection, k_pages, stream, window)
            pages_BJ = pages_of(stream, window, q_BTHC.shape[0])
            where = native.Where(pages_BJ, window.block, window.base, span, ring, kept, window.start_B, window.path_BTJ)
            return native.attention(
                q_BTHC, k_pages, v_pages, inputs.position_BT, where, scale=scale, value_width=wide, sinks_H=sinks_H
            )
    elif kernels != "xla":
        out = attend_by_kernel(
            q_BTHC, pages, inputs, stream, policy, scale=scale, span=span, value_width=wide, sinks=sinks
        )
        if out is not None:
            return out
    source = source_of(pages, stream, inputs, wide, span, scales)
    return attend(
        q_BTHC, [source], kv_heads=stream.heads, value_width=wide, scale=scale, dtype=dtype, sinks_H=sinks_H,
        tree=window.path_BTJ is not None,
    )  # fmt: skip


def attend_chosen(
    q_BTHC: Array,
    pages_PGZC: Array,
    chosen: Chosen,
    stream: StreamSpec,
    window: Window,
    policy: Policy,
    *,
    scale: float,
    value_width: int,
    recent: Recent | None = None,
    sinks_H: Array | None = None,
) -> Array | None:
    """Computes attention to chosen entries, float32 [B, T, H, C']; None where no kernel does.

    Args:
      q_BTHC: queries, rotated.
      pages_PGZC: entries, each of which begins with its value.
      chosen: which of them each query attends to.
      stream: how pages are addressed.
      window: rows and positions.
      policy: what computes, and in which dtype.
      scale: of the scores.
      value_width: C'.
      recent: positions that are seen beside the entries.
      sinks_H: one more logit per head that takes probability and has no value.
    """
    kernels = policy.compute.whole_kernels
    if kernels in ("xla", "native"):
        return None
    blocked = entry_obstacles(pages_PGZC, value_width=value_width, wanted=kernels)
    case = chosen_entries.case_name(q_BTHC.shape[2], pages_PGZC, value_width)
    choice = choose(chosen_entries.OP, case, kernels, "cuda", blocked)
    if choice.implementation == "xla":
        return None
    return chosen_entries.chosen_attention(
        q_BTHC, pages_PGZC, chosen.count_BT, chosen.place_BTK, scale=scale, dtype=policy.compute.dtype,
        value_width=value_width, recent=recent, sinks_H=sinks_H, where=where_read(stream, window),
        implementation=choice,
    )  # fmt: skip


def source_of(
    pages: Pages,
    stream: StreamSpec,
    inputs: Inputs,
    value_width: int,
    span: int | None = None,
    scales: tuple[Array, Array] | None = None,
) -> Source:
    """Returns what a cache shows to queries, see ``attend_cached``."""
    (k_pages, v_pages), window = pages, inputs.cache_window
    assert window is not None, "asked of layers with a cache"
    selection = mask_of(inputs.selection, k_pages, stream, window)
    rows, count = inputs.position_BT.shape
    position_XT = readers(window, inputs.position_BT)

    def load(index: Array) -> tuple[Array, Array, Array]:
        k = read_block(k_pages, stream, window, index, rows)
        v = k[..., :value_width] if v_pages is None else read_block(v_pages, stream, window, index, rows)
        if scales is not None:
            k, v = (
                dequantize(x, read_block(y, stream, window, index, rows)) for x, y in zip((k, v), scales, strict=True)
            )
        seen_XTZ = positions_seen(position_XT, index, window.block, span)
        if selection is not None:
            seen_XTZ &= lax.dynamic_slice_in_dim(selection, index * window.block, window.block, axis=2)
        return k, v, seen_XTZ

    return Source(*blocks_in_reach(window, count, span), load)
