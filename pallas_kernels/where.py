"""Where kernels read a row's cached entries: its pages, its layer's first one, and a tree's nodes on them."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import load
from pallas_kernels.select import UnsupportedKernel


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["start_B", "path_BTJ", "table_BJ", "row_B", "base"],
    meta_fields=["base_pages"],
)
@dataclass(frozen=True)
class Where:
    """Pages of rows and, where their last entries are a tree's, what each node sees of these.

    Attributes:
      start_B: int32, committed length of each row, for trees.
      path_BTJ: int32, for trees: of the nodes from ``start_B`` on those that each query sees, by depth, itself the last
        and any after it. B may be 1, for all rows alike.
      table_BJ: int32, page ids of each row, or None where every row has one page.
      row_B: int32, that page, where it is not the row's own number.
      base: int32 scalar, added to every page id times ``base_pages``.
      base_pages: multiplies ``base``.
    """

    start_B: jax.Array | None = None
    path_BTJ: jax.Array | None = None
    table_BJ: jax.Array | None = None
    row_B: jax.Array | None = None
    base: jax.Array | None = None
    base_pages: int = 1

    @property
    def paths(self) -> int:
        """Longest path of a tree, 0 for a chain."""
        return 0 if self.path_BTJ is None else self.path_BTJ.shape[2]

    def room(self, pages_PGZC: jax.Array) -> int:
        """Returns how many entries a row can have."""
        return pages_PGZC.shape[2] * (1 if self.table_BJ is None else self.table_BJ.shape[1])

    def check(self, rows: int, count: int) -> None:
        """Refuses trees that do not belong to so many rows and queries."""
        path_BTJ = self.path_BTJ
        if path_BTJ is not None and (self.start_B is None or path_BTJ.shape[:2] not in ((rows, count), (1, count))):
            raise UnsupportedKernel(
                f"trees {path_BTJ.shape} need start_B, and as rows and queries 1 or {rows} and {count}"
            )

    def operands(self, rows: int, count: int) -> dict[str, jax.Array]:
        """Returns what is there as kernels name it, ``base`` [1] and ``path`` [B * T * J]."""
        given = {"table": self.table_BJ, "row": self.row_B if self.table_BJ is None else None}
        given["base"] = None if self.base is None else jnp.reshape(self.base, (1,))
        if self.path_BTJ is not None:
            path_BTJ = jnp.broadcast_to(self.path_BTJ, (rows, count, self.paths))
            given |= {"start": self.start_B, "path": path_BTJ.reshape(-1)}
        return {name: x for name, x in given.items() if x is not None}

    def pages(self, rows: int) -> jax.Array:
        """Returns the pages of each row, [B, J]."""
        page_BJ = self.table_BJ
        if page_BJ is None:
            page_BJ = (jnp.arange(rows, dtype=jnp.int32) if self.row_B is None else self.row_B)[:, None]
        return page_BJ if self.base is None else page_BJ + self.base * self.base_pages

    def gather(self, pages_PGZC: jax.Array, place_BTS: jax.Array) -> jax.Array:
        """Returns the entries that each query finds at these places, [B, T, S, G, C]; uint16 are bits of bfloat16."""
        (_, _, page, _), page_BJ = pages_PGZC.shape, self.pages(len(place_BTS))
        at_BTS = place_BTS
        if self.path_BTJ is not None:
            assert self.start_B is not None, "a tree stands after the committed positions"
            at_BTS = at_depths(place_BTS, self.start_B, self.path_BTJ)
        page_BTS = jnp.take_along_axis(page_BJ[:, None], at_BTS // page % page_BJ.shape[1], axis=2, mode="clip")
        x_BTSGC = pages_PGZC[page_BTS, :, at_BTS % page]
        return lax.bitcast_convert_type(x_BTSGC, jnp.bfloat16) if x_BTSGC.dtype == jnp.uint16 else x_BTSGC


OWN_PAGES = Where()
"""Every row reads the one page of its own number."""


def at_depths(place_BTS: jax.Array, start_B: jax.Array, path_BTJ: jax.Array) -> jax.Array:
    """Returns where each node of a tree finds what it sees at positions: its ancestors at those of their depths."""
    deepest = path_BTJ.shape[2]
    depth_BTS = place_BTS - start_B[:, None, None]
    path_BTJ = jnp.broadcast_to(path_BTJ, (*place_BTS.shape[:2], deepest))
    step_BTS = jnp.take_along_axis(path_BTJ, jnp.clip(depth_BTS, 0, deepest - 1), axis=2)
    is_own = (depth_BTS >= 0) & (depth_BTS < deepest)
    return jnp.where(is_own, start_B[:, None, None] + step_BTS, place_BTS)


def on_path(plan: Any, ref: dict[str, Any], b: jax.Array, node: jax.Array, position_Z: jax.Array) -> jax.Array:
    """Finds where positions stand for a query: for a tree's node its ancestors in the order of the tree."""
    if not plan.paths:
        return position_Z
    start, first_step = ref["start"][b], (b * plan.count + node) * plan.paths
    depth_Z = position_Z - start
    step_Z = load(ref["path"].at[first_step + jnp.clip(depth_Z, 0, plan.paths - 1)])
    return jnp.where((depth_Z >= 0) & (depth_Z < plan.paths), start + step_Z, position_Z)


def find_page(plan: Any, ref: dict[str, Any], b: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Page of positions, and the place on it."""
    position = position if plan.ring else jnp.clip(position, 0, plan.capacity - 1)
    slot = position % plan.page
    page = ref["row"][b] if "row" in ref else b
    if "table" in ref:
        page = load(ref["table"].at[b, position // plan.page])
    if "base" in ref:
        page = page + ref["base"][0] * plan.base_pages
    last = ref["k"].shape[0] - 1
    return jnp.broadcast_to(jnp.clip(page, 0, last), slot.shape), slot


def values_of(ref: Any) -> jax.Array:
    """Cached entries; bfloat16 may be kept as its bits."""
    x = load(ref)
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
