"""Where the entries of a cached stream lie, in pages or rings, and how they are written and read there."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.window import Window
from jaxspec.shapes import Array

UNROLLED_ROWS = 16
FLOAT8 = "float8_e4m3fn"
AS_BITS = {"uint16": jnp.dtype("bfloat16"), "uint8": jnp.dtype(FLOAT8)}
LayerCache = dict[str, Array]


@dataclass(frozen=True)
class PrefixUse:
    """Whether what a stream holds of the first positions of a text serves another text that begins alike.

    Attributes:
      refusal: why it does not; empty where it does.
      lasts: whether they can be read as long as the row's text runs, and not only right after they were written.
    """

    refusal: str = ""
    lasts: bool = True


@dataclass(frozen=True)
class StreamSpec:
    """One quantity that a layer caches, such as its keys.

    Attributes:
      heads, width: G and C.
      reach: None keeps every position, in pages of the shared pool. A number keeps a ring per row instead, addressed
        by position: what lies up to ``reach`` positions before the first provisional one stays readable.
      stride: positions per entry. Above 1 entry w stands for positions ``w * stride`` onwards, and every row has its
        own entries whether or not there is a pool.
      dtype: of the entries; None takes the compute dtype.
      fixed: entries that every row has however long its text, addressed by no position (``row_state.py``); 0
        for as many as ``CacheSize.most_drafts``. None for entries by position.
    """

    heads: int
    width: int
    reach: int | None = None
    stride: int = 1
    dtype: str | None = None
    fixed: int | None = None

    @property
    def pooled(self) -> bool:
        """Whether it lies in pages of the shared pool."""
        return self.reach is None and self.stride == 1 and self.fixed is None

    @property
    def prefix(self) -> PrefixUse:
        """Says how a prefix is taken over: what lies by position is copied, from rings before they come round."""
        if self.fixed is not None:
            return PrefixUse("a recurrent layer's state stands for a whole text, not for the positions of a block")
        return PrefixUse(lasts=self.reach is None)


@dataclass(frozen=True)
class CacheSize:
    """How much a cache holds.

    Attributes:
      rows: B.
      room: positions of a row, provisional ones included.
      slack: most positions that one forward writes.
      block: positions that attention reads at a time.
      pool: page count and page size of a shared pool; None gives every row one page of its own.
      drafts: most of those positions that may be rejected; None for all.
    """

    rows: int
    room: int
    slack: int
    block: int = 128
    pool: tuple[int, int] | None = None
    drafts: int | None = None

    @property
    def most_drafts(self) -> int:
        """Most positions of one forward that may be rejected, at least 1."""
        return max(self.slack if self.drafts is None else self.drafts, 1)


def entries(spec: StreamSpec, room: int, slack: int, block: int) -> int:
    """Returns the entries of one row's own array: its ring, or ``room`` positions; whole blocks of ``entry_block``.

    With several positions per entry there is one more entry: a forward writes as many as its positions may touch.
    """
    size = entry_block(spec, block)
    needed = room if spec.reach is None else min(spec.reach + slack, room)
    needed += spec.stride if spec.stride > 1 else 0
    return math.ceil(needed / (spec.stride * size)) * size


def entry_block(spec: StreamSpec, block: int) -> int:
    """Returns the entries that attention reads at a time, about ``block`` positions."""
    return max(block // spec.stride, 8) if spec.stride > 1 else block


def init_layer(
    streams: Mapping[str, StreamSpec], size: CacheSize, dtype: jnp.dtype, *, layers: int = 1, as_bits: bool = True
) -> LayerCache:
    """Allocates the zeroed cache of one layer, or of several equal ones one after the other.

    Args:
      streams: what is cached.
      size: how much of it.
      dtype: compute dtype.
      layers: how many layers share the arrays; layer y starts at page ``y * pages``.
      as_bits: whether bfloat16 is stored as its bits, which a CPU updates faster and a GPU's products read slower;
        float8_e4m3fn always is.
    """
    caches = {}
    for name, spec in streams.items():
        fixed = spec.fixed or size.most_drafts
        own = size.rows, fixed if spec.fixed is not None else entries(spec, size.room, size.slack, size.block)
        pages, page = size.pool if size.pool and spec.pooled else own
        kind = jnp.dtype(spec.dtype or dtype)
        # XLA:CPU widens a bfloat16 update to float32, the whole buffer at a time: 5 ms instead of 6 us for 8 rows.
        stored = jnp.uint16 if as_bits and kind == jnp.bfloat16 else jnp.uint8 if kind == jnp.dtype(FLOAT8) else kind
        caches[name] = jnp.zeros((layers * pages, spec.heads, page, spec.width), stored)
    return caches


def _table(spec: StreamSpec, window: Window) -> Array | None:
    """Returns the page ids of each row, None where every row has one page of its own."""
    return window.table_BJ if spec.pooled else None


def _row_is_page(spec: StreamSpec, window: Window) -> bool:
    """Whether row i is page i, and may lie on another device than row j."""
    return window.rows_sharded and window.row_B is None and _table(spec, window) is None


def pages_of(spec: StreamSpec, window: Window, rows: int) -> Array:
    """Returns the page ids of each row, [B, J], counted from the layer's first page."""
    table_BJ = _table(spec, window)
    if table_BJ is not None:
        return table_BJ
    return (jnp.arange(rows, dtype=jnp.int32) if window.row_B is None else window.row_B)[:, None]


def _own_pages(spec: StreamSpec, window: Window, rows: int) -> Array:
    """Returns the one page of each row."""
    page_B = pages_of(spec, window, rows)[:, 0]
    return page_B if window.base is None else page_B + window.base


def _locate(pages_PGZC: Array, spec: StreamSpec, window: Window, entry_BT: Array) -> tuple[Array, Array]:
    """Returns page and slot of entries of each row."""
    size = pages_PGZC.shape[2]
    table_BJ = _table(spec, window)
    if table_BJ is not None:
        page_BT = jnp.take_along_axis(table_BJ, entry_BT // size, axis=1, mode="clip")
        return page_BT if window.base is None else page_BT + window.base, entry_BT % size
    page_BT = jnp.broadcast_to(_own_pages(spec, window, entry_BT.shape[0])[:, None], entry_BT.shape)
    return page_BT, entry_BT if spec.reach is None else entry_BT % size


def write(pages_PGZC: Array, spec: StreamSpec, window: Window, new_BTGC: Array, first_B: Array | None = None) -> Array:
    """Writes T consecutive entries of each row, from its first provisional position on; commits nothing.

    Args:
      pages_PGZC: updated in place.
      spec: how it is addressed.
      window: rows and positions.
      new_BTGC: the entries.
      first_B: number of the first entry where it is not the first provisional position.
    """
    new_BTGC = _to_stored(new_BTGC, pages_PGZC.dtype)
    first_B = window.first_B if first_B is None else first_B
    rows, count = new_BTGC.shape[:2]
    table_BJ = _table(spec, window)
    one_by_one = rows <= UNROLLED_ROWS and not window.use_scatter and not window.rows_sharded
    if one_by_one and (table_BJ is None or table_BJ.shape[1] == 1):
        new_BGTC, page_B = new_BTGC.swapaxes(1, 2), _own_pages(spec, window, rows)
        put = _put if spec.reach is None or count == 1 else _put_around
        for row in range(rows):  # one in-place update per row; a scatter would be slower on CPU
            slot = first_B[row] if spec.reach is None else first_B[row] % pages_PGZC.shape[2]
            pages_PGZC = put(pages_PGZC, new_BGTC[row][None], page_B[row], slot)
        return pages_PGZC
    entry_BT = first_B[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    page_BT, slot_BT = _locate(pages_PGZC, spec, window, entry_BT)
    if _row_is_page(spec, window):
        put_all = jax.vmap(
            lambda page_GZC, slot_T, new_TGC: page_GZC.at[:, slot_T].set(new_TGC.swapaxes(0, 1), mode="drop")
        )
        return put_all(pages_PGZC, slot_BT, new_BTGC)
    # Only rows that hold no request may share a page, and what is written for them counts nowhere.
    return pages_PGZC.at[page_BT, :, slot_BT].set(new_BTGC, mode="drop", unique_indices=window.use_scatter)


def read(pages_PGZC: Array, spec: StreamSpec, window: Window, entry_BT: Array) -> Array:
    """Reads chosen entries of each row, [B, T, G, C]."""
    return from_stored(read_stored(pages_PGZC, spec, window, entry_BT))


def read_stored(pages_PGZC: Array, spec: StreamSpec, window: Window, entry_BT: Array) -> Array:
    """Reads chosen entries of each row as they are stored."""
    page_BT, slot_BT = _locate(pages_PGZC, spec, window, entry_BT)
    if _row_is_page(spec, window):
        return jax.vmap(lambda page_GZC, slot_T: page_GZC[:, slot_T].swapaxes(0, 1))(pages_PGZC, slot_BT)
    return pages_PGZC[page_BT, :, slot_BT]


def read_stored_block(
    pages_PGZC: Array, spec: StreamSpec, window: Window, first: Array, shape: tuple[int, int]
) -> Array:
    """Reads the same entries of every row, from ``first`` on, as they are stored: [B, G, Z, C] for ``shape`` (B, Z)."""
    rows, size = shape
    _, heads, page, width = pages_PGZC.shape
    zero, table_BJ = jnp.int32(0), _table(spec, window)
    if table_BJ is not None:
        page_B = jnp.take(table_BJ, first // page, axis=1)
        page_B = page_B if window.base is None else page_B + window.base
        first = first % page
    else:
        first = first if spec.reach is None else first % page
        if window.row_B is None:
            base = zero if window.base is None else window.base
            return lax.dynamic_slice(pages_PGZC, (base, zero, first, zero), (rows, heads, size, width))
        page_B = _own_pages(spec, window, rows)
        if window.rows_sharded:
            block_PGZC = lax.dynamic_slice_in_dim(pages_PGZC, first, size, axis=2)
            return jnp.take(block_PGZC, page_B, axis=0, mode="clip")
    one = (1, heads, size, width)
    if rows == 1:
        return lax.dynamic_slice(pages_PGZC, (page_B[0], zero, first, zero), one)
    return jax.vmap(lambda p: lax.dynamic_slice(pages_PGZC, (p, zero, first, zero), one)[0])(page_B)


def from_stored(x: Array) -> Array:
    """Undoes the storage of bfloat16 and float8_e4m3fn as bits."""
    kind = AS_BITS.get(jnp.dtype(x.dtype).name)
    return x if kind is None else lax.bitcast_convert_type(x, kind)


def _to_stored(x: Array, dtype: jnp.dtype) -> Array:
    kind = AS_BITS.get(jnp.dtype(dtype).name)
    return x.astype(dtype) if kind is None else lax.bitcast_convert_type(x.astype(kind), dtype)


def _put(pages_PGZC: Array, new_1GTC: Array, page: Array, slot: Array) -> Array:
    return lax.dynamic_update_slice(pages_PGZC, new_1GTC, (page, jnp.int32(0), slot, jnp.int32(0)))


def _put_around(pages_PGZC: Array, new_1GTC: Array, page: Array, slot: Array) -> Array:
    """Writes across the end of a ring: what fits before the end, then the rest at the beginning."""
    count, size = new_1GTC.shape[2], pages_PGZC.shape[2]
    for first in (jnp.minimum(slot, size - count), jnp.int32(0)):
        shape = (1, pages_PGZC.shape[1], count, pages_PGZC.shape[3])
        old = lax.dynamic_slice(pages_PGZC, (page, jnp.int32(0), first, jnp.int32(0)), shape)
        index_T = (first + jnp.arange(count, dtype=jnp.int32) - slot) % size
        moved = jnp.take(new_1GTC, jnp.minimum(index_T, count - 1), axis=2)
        pages_PGZC = _put(pages_PGZC, jnp.where((index_T < count)[:, None], moved, old), page, first)
    return pages_PGZC
