"""What one forward writes and sees: provisional positions of a batch, or whole texts without a cache."""

from __future__ import annotations

import jax.numpy as jnp

from jaxspec.cache.packed_tokens import PackedTokens
from jaxspec.pytree import pytree, replace, static
from jaxspec.shapes import Array


@pytree
class Window:
    """Where one forward of B rows writes its T provisional positions, and what it sees.

    Attributes:
      start_B: committed length of each row; the anchor goes to this position.
      table_BJ: page ids of each row, or None without a pool.
      row_B: batch row of each row of this forward, or None when row i is batch row i.
      live_BT: positions whose results are used, None for all; the others touch no routed expert.
      layer: this layer's number among several that share one array of pages, or None where it has its own.
      layer_pages: pages of each of them.
      path_BTJ: provisional nodes that each query sees, by depth, itself the last, then anything; B may be 1. None for
        a chain, where a query sees all before it.
      output_index_B: the one of the T positions of each row whose output is computed, where a drafter observes; the
        others only leave something in the caches. None for all.
      packing: which positions are computed where hidden states are packed, [1, M, ...] instead of [B, T, ...]; None
        where all are. Caches are written and read in rows all the same. Only for chains, whose live positions come
        first, and where rows are not sharded.
      offset: nodes written by earlier forwards of the same tree; this one writes after them.
      written: int32 scalar, drafts of the same chain written by earlier forwards, right before ``start_B``; None for 0.
      committed: whether all live positions are text already, as those of prompts are. Otherwise only the first one is,
        the anchor, and later ones may be rejected.
      block: positions that attention reads at a time; divides the page size.
      use_scatter: whether all rows are written by one scatter, as a GPU wants it, and not by an update each.
      rows_sharded: whether rows lie on several devices: each is then written and read where it lies.
    """

    start_B: Array
    table_BJ: Array | None = None
    row_B: Array | None = None
    layer: Array | None = None
    live_BT: Array | None = None
    path_BTJ: Array | None = None
    output_index_B: Array | None = None
    packing: PackedTokens | None = None
    written: Array | None = None
    layer_pages: int = static(default=1)
    offset: int = static(default=0)
    block: int = static(default=128)
    use_scatter: bool = static(default=False)
    rows_sharded: bool = static(default=False)
    committed: bool = static(default=False)

    @property
    def base(self) -> Array | None:
        """First page of this layer where several share one array, or None for page 0; kernels compute it themselves."""
        return None if self.layer is None else self.layer * jnp.int32(self.layer_pages)

    @property
    def first_B(self) -> Array:
        """Position of the first node that this forward writes."""
        return self.start_B + self.offset if self.offset else self.start_B

    @property
    def valid(self) -> Array | None:
        """Positions of hidden states whose results are used, [B, T] or packed [1, M]; None for all."""
        return self.live_BT if self.packing is None else self.packing.live_M[None]

    @property
    def after_write(self) -> Window:
        """The window as the queries see it once all T positions are written: that of the output positions."""
        if self.output_index_B is None:
            return self
        assert self.path_BTJ is None, "every node of a tree has an output"
        live_BT = None if self.live_BT is None else take_outputs(self.live_BT, self)
        return replace(self, start_B=self.start_B + self.output_index_B, live_BT=live_BT, output_index_B=None)


@pytree
class Segments:
    """Whole texts side by side in rows, for forwards without a cache: a position sees those before it in its own text.

    Attributes:
      segment_BT: number of the text that each position belongs to, 0 for padding.
    """

    segment_BT: Array

    @property
    def valid(self) -> Array:
        """Positions whose results are used."""
        return self.segment_BT > 0


AnyWindow = Window | Segments | None


def segments_of(window: AnyWindow) -> Array | None:
    """Returns the number of the text of each position where rows hold several."""
    return window.segment_BT if isinstance(window, Segments) else None


def take_outputs(x: Array, window: AnyWindow) -> Array:
    """Takes the entries [B, T, ...] of the positions whose output is computed: [B, 1, ...] or all."""
    if not isinstance(window, Window) or window.output_index_B is None:
        return x
    return jnp.take_along_axis(x, window.output_index_B.reshape(-1, 1, *[1] * (x.ndim - 2)), axis=1)


def pack(x: Array, window: AnyWindow) -> Array:
    """Packs entries [B, T, ...] into [1, M, ...] where hidden states are packed."""
    return window.packing.pack(x) if isinstance(window, Window) and window.packing is not None else x


def unpack(x: Array, window: AnyWindow) -> Array:
    """Unpacks entries into rows, [B, T, ...]; those of positions that were not computed may be anything."""
    return window.packing.unpack(x) if isinstance(window, Window) and window.packing is not None else x
