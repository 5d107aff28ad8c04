"""The operation's door: checks, the choice of an implementation, and tile sizes."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Implementation, Launch
from pallas_kernels.blocks import look_up
from pallas_kernels.chosen_attention import reference
from pallas_kernels.chosen_attention.kernel import ChosenPlan, attend_kernel
from pallas_kernels.select import Choice, UnsupportedKernel, choose
from pallas_kernels.verify_attention.api import NARROWEST, entry_obstacles, in_parts
from pallas_kernels.verify_attention.kernel import Tiles
from pallas_kernels.where import OWN_PAGES, Where

OP = "chosen_attention"


@partial(jax.tree_util.register_dataclass, data_fields=["pages_PGZC", "position_BT"], meta_fields=["span"])
@dataclass(frozen=True)
class Recent:
    """A row's latest positions, each key its own value, which queries see beside the entries.

    Attributes:
      pages_PGZC: a ring for each row, addressed by position modulo its size; on the pages that entries lie on.
      position_BT: int32, the last position that each query sees.
      span: most positions that it sees.
    """

    pages_PGZC: jax.Array
    position_BT: jax.Array
    span: int


def chosen_attention(
    q_BTHC: jax.Array,
    pages_PGZC: jax.Array,
    count_BT: jax.Array,
    place_BTK: jax.Array | None,
    *,
    scale: float,
    dtype: jnp.dtype,
    value_width: int,
    recent: Recent | None = None,
    sinks_H: jax.Array | None = None,
    where: Where = OWN_PAGES,
    implementation: Implementation | Choice = "triton",
) -> jax.Array:
    """Attention of T positions per row to chosen entries of that row's cache, each of which begins with its value.

    Entries are gathered by their places and cut by their rank among a query's own, so a query's result is bitwise the
    same whatever T, the other rows and the capacity, and a node's that of its path as a chain.

    Args:
      q_BTHC: queries, rotated, not scaled.
      pages_PGZC: entries, of one head; uint16 are the bits of bfloat16.
      count_BT: int32, how many each query attends to.
      place_BTK: int32, their places in ascending order, anything after the last; None for the first ones.
      scale: of the scores.
      dtype: of the products' factors; sums are float32.
      value_width: C', of an entry's beginning that is its value.
      recent: positions that are seen beside the entries, before them in the order of the sums.
      sinks_H: one more logit per head that takes probability and has no value.
      where: pages, and a tree's nodes on them.
      implementation: what computes it; a case that the kernel cannot compute goes to the reference with a warning.

    Returns:
      float32 [B, T, H, C'].

    Raises:
      UnsupportedKernel: shapes do not belong together.
    """
    _check(q_BTHC, pages_PGZC, count_BT, place_BTK, value_width)
    (rows, count, heads, width), room = q_BTHC.shape, where.room(pages_PGZC)
    if recent is not None and where.table_BJ is not None:
        raise UnsupportedKernel("a ring is one page per row, so beside it entries take no page table")
    where.check(rows, count)
    if not isinstance(implementation, Choice):
        blocked = entry_obstacles(pages_PGZC, value_width=value_width, wanted=implementation)
        implementation = choose(OP, case_name(heads, pages_PGZC, value_width), implementation, "", blocked)
    if implementation.implementation == "xla":
        return reference.chosen_attention(
            q_BTHC, pages_PGZC, count_BT, place_BTK, scale=scale, dtype=dtype, value_width=value_width, recent=recent,
            sinks_H=sinks_H, where=where,
        )  # fmt: skip
    most = room if place_BTK is None else place_BTK.shape[2]
    shared = {"k": pages_PGZC, "sinks": sinks_H} | where.operands(rows, count)
    each = {"q": q_BTHC, "count": jnp.minimum(count_BT, most), "place": place_BTK}
    if recent is not None:
        shared["recent"], each["position"] = recent.pages_PGZC, recent.position_BT
    if where.paths:
        each["path"] = shared.pop("path").reshape(rows, count, -1)
    plan = ChosenPlan(
        rows, count, heads, 1, width, value_width, scale, dtype, room, pages_PGZC.shape[2],
        None if recent is None else recent.span, False, where.paths, tiles_for(heads, pages_PGZC, value_width),
        implementation.implementation, where.base_pages, most, 0 if recent is None else recent.pages_PGZC.shape[2],
    )  # fmt: skip
    shared, each = ({name: x for name, x in given.items() if x is not None} for given in (shared, each))

    def run(part: ChosenPlan, q_BTHC: jax.Array, *own: jax.Array) -> jax.Array:
        flat = {name: x.reshape(-1) for name, x in zip(tuple(each)[1:], own, strict=True)}
        operands = {"q": q_BTHC.reshape(-1, width)} | flat | shared
        return attend_kernel(part, operands).reshape(*q_BTHC.shape[:3], -1)

    return in_parts(plan, tuple(each.values()), run, in_one=False)


def case_name(heads: int, pages_PGZC: jax.Array, value_width: int) -> str:
    """The shape in words, for the choice's record."""
    return f"H{heads} C{pages_PGZC.shape[3]} V{value_width} {pages_PGZC.dtype.name}"


def tiles_for(heads: int, pages_PGZC: jax.Array, value_width: int) -> Tiles:
    """Tile sizes of a case: measured ones where there are any, else a safe default."""
    height = min(max(1 << (heads - 1).bit_length(), NARROWEST), 32)
    default = Tiles(height, 32, launch=Launch(8, 2) if value_width > 256 else Launch(4, 3))
    shape = f"H{heads} C{pages_PGZC.shape[3]} V{value_width}"
    return look_up(OP, default, shape=shape, form=pages_PGZC.dtype.name)


def _check(q: jax.Array, pages: jax.Array, count_BT: jax.Array, place: jax.Array | None, value_width: int) -> None:
    if pages.ndim != 4 or pages.shape[1] != 1 or pages.shape[3] != q.shape[3] or not 0 < value_width <= q.shape[3]:
        raise UnsupportedKernel(
            f"queries {q.shape}, entries {pages.shape} and values of {value_width}: one width, and entries of one head"
        )
    if count_BT.shape != q.shape[:2] or (place is not None and place.shape[:2] != q.shape[:2]):
        places = None if place is None else place.shape
        raise UnsupportedKernel(f"counts and places must begin with {q.shape[:2]}, got {count_BT.shape}, {places}")
