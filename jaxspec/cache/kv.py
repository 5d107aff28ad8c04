"""What layers cache, in pages or rings, heads before positions: write ahead, commit by length, compact a tree."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.ragged import Ragged
from jaxspec.pytree import pytree, replace, static
from jaxspec.shapes import Array

UNROLLED_ROWS = 16
LayerCache = dict[str, Array]


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
    """

    heads: int
    width: int
    reach: int | None = None
    stride: int = 1
    dtype: str | None = None

    @property
    def pooled(self) -> bool:
        """Whether it lies in pages of the shared pool."""
        return self.reach is None and self.stride == 1


@pytree
class Window:
    """Where one forward of B rows writes its T provisional positions, and what it sees.

    Bfloat16 is stored as its bits in uint16: XLA:CPU widens every bfloat16 update of a buffer to float32, the whole
    buffer at a time (5 ms instead of 6 us for 8 rows).

    Attributes:
      start_B: committed length of each row; the anchor goes to this position.
      table_BJ: page ids of each row, or None without a pool.
      row_B: batch row of each row of this forward, or None when row i is batch row i.
      live_BT: positions whose results are used, None for all; the others touch no routed expert.
      base: first page of this layer where several layers share one array, or None for page 0.
      path_BTJ: provisional nodes that each query sees, itself the last, by depth, and any behind it; B may be 1. None
        for a chain, where a query sees all before it.
      asked_B: the one of the T positions of each row whose output is computed, where a drafter observes: of the others
        only what they leave in the caches counts. None for all.
      ragged: which positions hidden states stand for where they are [1, M, ...] instead of [B, T, ...]; None where all
        are computed. Caches are written and read in rows all the same. Only of chains, in which what counts comes
        first, and where rows do not lie apart.
      offset: nodes written by earlier forwards of the same tree; this one writes behind them.
      block: positions that attention reads at a time; divides the page size.
      at_once: whether all rows are written by one scatter, as a GPU wants it, and not by an update each.
      apart: whether rows lie on several devices: each is then written and read where it lies.
    """

    start_B: Array
    table_BJ: Array | None = None
    row_B: Array | None = None
    base: Array | None = None
    live_BT: Array | None = None
    path_BTJ: Array | None = None
    asked_B: Array | None = None
    ragged: Ragged | None = None
    offset: int = static(default=0)
    block: int = static(default=128)
    at_once: bool = static(default=False)
    apart: bool = static(default=False)

    @property
    def first_B(self) -> Array:
        """Position of the first node that this forward writes."""
        return self.start_B + self.offset if self.offset else self.start_B

    @property
    def counting(self) -> Array | None:
        """Of the positions of hidden states, [B, T] or [1, M], those whose results are used, None for all."""
        return self.live_BT if self.ragged is None else self.ragged.live_M[None]

    @property
    def reading(self) -> "Window":
        """What the queries see, once all T positions are written."""
        if self.asked_B is None:
            return self
        assert self.path_BTJ is None, "of a tree every node is asked for"
        live_BT = None if self.live_BT is None else asked(self.live_BT, self)
        return replace(self, start_B=self.start_B + self.asked_B, live_BT=live_BT, asked_B=None)


@pytree
class Packed:
    """Whole texts packed into rows, for forwards without a cache: a position sees those before it in its own text.

    Attributes:
      segment_BT: number of the text that each position belongs to, 0 for padding.
    """

    segment_BT: Array

    @property
    def counting(self) -> Array:
        """Positions whose results are used."""
        return self.segment_BT > 0


def asked(x: Array, window: Window | Packed | None) -> Array:
    """Of entries [B, T, ...] those whose output is computed: [B, 1, ...] or all."""
    if not isinstance(window, Window) or window.asked_B is None:
        return x
    return jnp.take_along_axis(x, window.asked_B.reshape(-1, 1, *[1] * (x.ndim - 2)), axis=1)


def in_rows(x: Array, window: Window | Packed | None) -> Array:
    """Entries of all positions that are computed, [B, T, ...]; anything at the others."""
    return window.ragged.rows(x) if isinstance(window, Window) and window.ragged is not None else x


def in_line(x: Array, window: Window | Packed | None) -> Array:
    """Of entries [B, T, ...] those of positions that are computed, [1, M, ...] where these are ragged."""
    return window.ragged.line(x) if isinstance(window, Window) and window.ragged is not None else x


def segments_of(window: Window | Packed | None) -> Array | None:
    """Number of the text of each position where rows hold several."""
    return window.segment_BT if isinstance(window, Packed) else None


def entries(spec: StreamSpec, room: int, slack: int, block: int) -> int:
    """Entries of one row's own array: its ring, or ``room`` positions; whole blocks of ``entry_block``.

    Of several positions per entry there is one more entry: a forward writes as many as its positions may touch.
    """
    size = entry_block(spec, block)
    needed = room if spec.reach is None else min(spec.reach + slack, room)
    needed += spec.stride if spec.stride > 1 else 0
    return math.ceil(needed / (spec.stride * size)) * size


def entry_block(spec: StreamSpec, block: int) -> int:
    """Entries that attention reads at a time, about ``block`` positions."""
    return max(block // spec.stride, 8) if spec.stride > 1 else block


def init_layer(
    streams: Mapping[str, StreamSpec],
    rows: int,
    room: int,
    slack: int,
    block: int,
    dtype: jnp.dtype,
    pool: tuple[int, int] | None = None,
    layers: int = 1,
    as_bits: bool = True,
) -> LayerCache:
    """Allocates the zeroed cache of one layer, or of several equal ones one behind the other.

    Args:
      streams: what is cached.
      rows: B.
      room: positions of a row, provisional ones included.
      slack: most positions that one forward writes.
      block: positions that attention reads at a time.
      dtype: compute dtype.
      pool: page count and page size of a shared pool; None gives every row one page of its own.
      layers: how many layers share the arrays; layer y starts at page ``y * pages``.
      as_bits: whether bfloat16 is stored as its bits, which a CPU updates faster and a GPU's products read slower.
    """
    made = {}
    for name, spec in streams.items():
        pages, size = pool if pool and spec.pooled else (rows, entries(spec, room, slack, block))
        kept = jnp.dtype(spec.dtype or dtype)
        stored = jnp.uint16 if as_bits and kept == jnp.bfloat16 else kept
        made[name] = jnp.zeros((layers * pages, spec.heads, size, spec.width), stored)
    return made


def write(pages_PGZC: Array, spec: StreamSpec, window: Window, new_BTGC: Array, first_B: Array | None = None) -> Array:
    """Writes T consecutive entries of each row, from its first provisional position on; commits nothing.

    Args:
      pages_PGZC: updated in place.
      spec: how it is addressed.
      window: rows and positions.
      new_BTGC: the entries.
      first_B: number of the first entry where it is not the first provisional position.
    """
    new_BTGC = _stored(new_BTGC, pages_PGZC.dtype)
    first_B = window.first_B if first_B is None else first_B
    rows, count = new_BTGC.shape[:2]
    table_BJ = _table(spec, window)
    one_by_one = rows <= UNROLLED_ROWS and not window.at_once and not window.apart
    if one_by_one and (table_BJ is None or table_BJ.shape[1] == 1):
        new_BGTC, page_B = new_BTGC.swapaxes(1, 2), _own_pages(spec, window, rows)
        put = _put if spec.reach is None or count == 1 else _put_around
        for row in range(rows):  # one in-place update per row; a scatter would be slower on CPU
            slot = first_B[row] if spec.reach is None else first_B[row] % pages_PGZC.shape[2]
            pages_PGZC = put(pages_PGZC, new_BGTC[row][None], page_B[row], slot)
        return pages_PGZC
    entry_BT = first_B[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    page_BT, slot_BT = _places(pages_PGZC, spec, window, entry_BT)
    if _in_place(spec, window):
        put_all = jax.vmap(
            lambda page_GZC, slot_T, new_TGC: page_GZC.at[:, slot_T].set(new_TGC.swapaxes(0, 1), mode="drop")
        )
        return put_all(pages_PGZC, slot_BT, new_BTGC)
    # Only rows that hold no request may share a page, and what is written for them counts nowhere.
    return pages_PGZC.at[page_BT, :, slot_BT].set(new_BTGC, mode="drop", unique_indices=window.at_once)


def _put(pages_PGZC: Array, new_1GTC: Array, page: Array, slot: Array) -> Array:
    return lax.dynamic_update_slice(pages_PGZC, new_1GTC, (page, jnp.int32(0), slot, jnp.int32(0)))


def _put_around(pages_PGZC: Array, new_1GTC: Array, page: Array, slot: Array) -> Array:
    """Writes across the end of a ring: what fits before the end, then the rest at the beginning."""
    count, size = new_1GTC.shape[2], pages_PGZC.shape[2]
    for first in (jnp.minimum(slot, size - count), jnp.int32(0)):
        shape = (1, pages_PGZC.shape[1], count, pages_PGZC.shape[3])
        old = lax.dynamic_slice(pages_PGZC, (page, jnp.int32(0), first, jnp.int32(0)), shape)
        place_T = (first + jnp.arange(count, dtype=jnp.int32) - slot) % size
        moved = jnp.take(new_1GTC, jnp.minimum(place_T, count - 1), axis=2)
        pages_PGZC = _put(pages_PGZC, jnp.where((place_T < count)[:, None], moved, old), page, first)
    return pages_PGZC


def _stored(x: Array, dtype: jnp.dtype) -> Array:
    return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16) if dtype == jnp.uint16 else x.astype(dtype)


def _read(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def _table(spec: StreamSpec, window: Window) -> Array | None:
    """Page ids of each row, None where every row has one page of its own."""
    return window.table_BJ if spec.pooled else None


def _in_place(spec: StreamSpec, window: Window) -> bool:
    """Whether row i is page i, and may lie on another device than row j."""
    return window.apart and window.row_B is None and _table(spec, window) is None


def _own_pages(spec: StreamSpec, window: Window, rows: int) -> Array:
    """The one page of each row."""
    table_BJ = _table(spec, window)
    if table_BJ is not None:
        page_B = table_BJ[:, 0]
    else:
        page_B = jnp.arange(rows, dtype=jnp.int32) if window.row_B is None else window.row_B
    return page_B if window.base is None else page_B + window.base


def _places(pages_PGZC: Array, spec: StreamSpec, window: Window, entry_BT: Array) -> tuple[Array, Array]:
    """Page id and slot in it of entries of each row."""
    size, table_BJ = pages_PGZC.shape[2], _table(spec, window)
    if table_BJ is not None:
        page_BT = jnp.take_along_axis(table_BJ, entry_BT // size, axis=1, mode="clip")
        return page_BT if window.base is None else page_BT + window.base, entry_BT % size
    page_BT = jnp.broadcast_to(_own_pages(spec, window, entry_BT.shape[0])[:, None], entry_BT.shape)
    return page_BT, entry_BT if spec.reach is None else entry_BT % size


def read(pages_PGZC: Array, spec: StreamSpec, window: Window, entry_BT: Array) -> Array:
    """Chosen entries of each row, [B, T, G, C]."""
    return _read(_stored_at(pages_PGZC, spec, window, entry_BT))


def _stored_at(pages_PGZC: Array, spec: StreamSpec, window: Window, entry_BT: Array) -> Array:
    page_BT, slot_BT = _places(pages_PGZC, spec, window, entry_BT)
    if _in_place(spec, window):
        return jax.vmap(lambda page_GZC, slot_T: page_GZC[:, slot_T].swapaxes(0, 1))(pages_PGZC, slot_BT)
    return pages_PGZC[page_BT, :, slot_BT]


def read_block(pages_PGZC: Array, spec: StreamSpec, window: Window, index: Array, rows: int) -> Array:
    """Entries ``index * block`` onwards of every reader, [B, G, block, C], block being ``entry_block``.

    The readers of a tree are its nodes, [B * T, G, block, C]: each finds its own ancestors at the positions of their
    depths, whatever their places in the tree.
    """
    size = entry_block(spec, window.block)
    block_BGZC = _read_rows(pages_PGZC, spec, window, index, rows, size)
    if window.path_BTJ is None:
        return _read(block_BGZC)
    _, count, deepest = window.path_BTJ.shape
    place_BTJ = jnp.broadcast_to(window.start_B[:, None, None] + window.path_BTJ, (rows, count, deepest))
    own_BXGC = _stored_at(pages_PGZC, spec, window, place_BTJ.reshape(rows, -1))
    own_BTJGC = own_BXGC.reshape(rows, count, deepest, *own_BXGC.shape[2:])
    depth_BZ = index * size + jnp.arange(size, dtype=jnp.int32) - window.start_B[:, None]
    inside = jnp.clip(depth_BZ, 0, deepest - 1)[:, None, :, None, None]
    own_BTZGC = jnp.take_along_axis(own_BTJGC, inside, axis=2)
    is_own = ((depth_BZ >= 0) & (depth_BZ < deepest))[:, None, None, :, None]
    block_BTGZC = jnp.where(is_own, own_BTZGC.swapaxes(2, 3), block_BGZC[:, None])
    return _read(block_BTGZC.reshape(-1, *block_BGZC.shape[1:]))


def _read_rows(pages_PGZC: Array, spec: StreamSpec, window: Window, index: Array, rows: int, size: int) -> Array:
    """One block of every row, as stored."""
    _, heads, page, width = pages_PGZC.shape
    first, zero, table_BJ = index * size, jnp.int32(0), _table(spec, window)
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
        if window.apart:
            block_PGZC = lax.dynamic_slice_in_dim(pages_PGZC, first, size, axis=2)
            return jnp.take(block_PGZC, page_B, axis=0, mode="clip")
    shape = (1, heads, size, width)
    if rows == 1:
        return lax.dynamic_slice(pages_PGZC, (page_B[0], zero, first, zero), shape)
    return jax.vmap(lambda p: lax.dynamic_slice(pages_PGZC, (p, zero, first, zero), shape)[0])(page_B)


def compact(cache: LayerCache, streams: Mapping[str, StreamSpec], window: Window, path_BT: Array) -> LayerCache:
    """Moves the accepted path of a tree to consecutive positions behind the committed length.

    Args:
      cache: a layer in which T provisional positions stand.
      streams: how it is addressed.
      window: the window of the forward that wrote them.
      path_BT: node index that belongs at each offset; offsets beyond the path may hold anything.
    """

    def move(pages_PGZC: Array, spec: StreamSpec) -> Array:
        if spec.stride > 1:
            raise AssertionError("compressed entries hold several positions; trees are refused before")
        return write(pages_PGZC, spec, window, read(pages_PGZC, spec, window, window.first_B[:, None] + path_BT))

    return {name: move(pages, streams[name]) for name, pages in cache.items()}
