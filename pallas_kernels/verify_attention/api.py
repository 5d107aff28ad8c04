"""The operation's door: checks, the choice of an implementation, and tile sizes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import Implementation, Launch
from pallas_kernels.blocks import look_up
from pallas_kernels.select import Choice, UnsupportedKernel, choose
from pallas_kernels.verify_attention import reference
from pallas_kernels.verify_attention.kernel import Plan, Tiles, attend_kernel, powers_of_two

OP = "verify_attention"
CACHED = ("bfloat16", "float16", "float32", "uint16")
NARROWEST = 16  # of a product's sizes on a GPU
WIDEST_KEY = 640
PIECES_BYTES = 256 << 20  # of one launch's unmerged results; more queries are taken one part after the other


def verify_attention(
    q_BTHC: jax.Array,
    k_pages_PGZC: jax.Array,
    v_pages_PGZC: jax.Array | None,
    position_BT: jax.Array,
    *,
    scale: float,
    dtype: jnp.dtype,
    value_width: int | None = None,
    sinks_H: jax.Array | None = None,
    span: int | None = None,
    ring: bool = False,
    start_B: jax.Array | None = None,
    path_BTJ: jax.Array | None = None,
    table_BJ: jax.Array | None = None,
    row_B: jax.Array | None = None,
    base: jax.Array | None = None,
    base_pages: int = 1,
    block: int = 64,
    implementation: Implementation | Choice = "triton",
) -> jax.Array:
    """Attention of T positions per row to that row's cache, in which they stand already.

    The result of a row is bitwise the same whatever T, the other rows and the capacity: a tile of queries has one
    height, the cache is cut at multiples of one length, and what shows a query nothing leaves its sums unchanged. A
    node of a tree gets what it would get in a chain, for it finds its ancestors at the positions of their depths.

    Args:
      q_BTHC: queries, rotated, not scaled.
      k_pages_PGZC: keys; uint16 are the bits of bfloat16.
      v_pages_PGZC: values [P, G, Z, C'], or None where a value is the beginning of its key.
      position_BT: int32, the last position that each query sees.
      scale: of the scores.
      dtype: of the products' factors; sums are float32.
      value_width: C', where ``v_pages_PGZC`` is None.
      sinks_H: one more logit per head that takes probability and has no value; [L, H] if ``base`` numbers a layer.
      span: most positions that a query sees, None for all; below 0 those from the last multiple of ``-span`` on.
      ring: whether a row's one page is addressed by position modulo its size.
      start_B: int32, committed length of each row, for trees.
      path_BTJ: int32, for trees: of the nodes from ``start_B`` on those that each query sees, by depth, itself the last
        and any after it. B may be 1, for all rows alike.
      table_BJ: int32, page ids of each row, or None where every row has one page.
      row_B: int32, that page, where it is not the row's own number.
      base: int32 scalar, added to every page id times ``base_pages``.
      base_pages: multiplies ``base``.
      block: positions that may be read at a time; the kernel reads the largest power of two in it, up to its tile.
      implementation: what computes it; a case that the kernel cannot compute goes to the reference with a warning.

    Returns:
      float32 [B, T, H, C'].

    Raises:
      UnsupportedKernel: shapes do not belong together.
    """
    rows, count, heads, width = q_BTHC.shape
    wide = value_width if v_pages_PGZC is None else v_pages_PGZC.shape[3]
    wide = _checked(q_BTHC, k_pages_PGZC, v_pages_PGZC, position_BT, wide, table_BJ if ring else None)
    if path_BTJ is not None and (start_B is None or path_BTJ.shape[:2] not in ((rows, count), (1, count))):
        raise UnsupportedKernel(f"trees {path_BTJ.shape} need start_B, and as rows and queries 1 or {rows} and {count}")
    if not isinstance(implementation, Choice):
        blocked = obstacles(k_pages_PGZC, value_width=wide, block=block, wanted=implementation)
        implementation = choose(OP, case_name(heads, k_pages_PGZC, wide), implementation, "", blocked)
    if implementation.implementation == "xla":
        page_BJ = table_BJ
        if page_BJ is None:
            page_BJ = (jnp.arange(rows, dtype=jnp.int32) if row_B is None else row_B)[:, None]
        if sinks_H is not None and sinks_H.ndim == 2:
            sinks_H = lax.dynamic_index_in_dim(sinks_H, jnp.int32(0) if base is None else base, keepdims=False)
        return reference.verify_attention(
            q_BTHC, k_pages_PGZC, v_pages_PGZC, position_BT, scale=scale, dtype=dtype, value_width=wide,
            sinks_H=sinks_H, span=span, ring=ring, start_B=start_B, path_BTJ=path_BTJ,
            page_BJ=page_BJ if base is None else page_BJ + base * base_pages,
        )  # fmt: skip
    given = {"k": k_pages_PGZC, "v": v_pages_PGZC, "table": table_BJ, "sinks": sinks_H}
    given["row"] = row_B if table_BJ is None else None
    given["base"] = None if base is None else jnp.reshape(base, (1,))
    page, deepest = k_pages_PGZC.shape[2], 0 if path_BTJ is None else path_BTJ.shape[2]
    if path_BTJ is not None:
        given |= {"start": start_B, "path": jnp.broadcast_to(path_BTJ, (rows, count, deepest)).reshape(-1)}
    plan = Plan(
        rows, count, heads, k_pages_PGZC.shape[1], width, wide, scale, dtype,
        page if table_BJ is None else page * table_BJ.shape[1], page, span, ring, deepest,
        tiles_for(heads, k_pages_PGZC, wide, block), implementation.implementation, base_pages,
    )  # fmt: skip
    operands = {name: x for name, x in given.items() if x is not None}
    return _in_parts(plan, q_BTHC, position_BT, operands)


def obstacles(
    k_pages_PGZC: jax.Array, *, value_width: int, block: int, wanted: str, selected: bool = False
) -> list[str]:
    """Returns why the kernel cannot compute a case, each a sentence; empty if it can.

    Args:
      k_pages_PGZC: keys, or their shape and dtype.
      value_width: C'.
      block: positions that may be read at a time.
      wanted: implementation; ``triton`` has limits that ``interpret`` has not.
      selected: whether queries attend to chosen positions, as an indexer chooses them.
    """
    (_, _, page, key_width), cached = k_pages_PGZC.shape, jnp.dtype(k_pages_PGZC.dtype).name
    reasons, size = [], _power_in(block)
    if selected:
        reasons.append("an indexer chooses what is attended to, and the kernel reads whole blocks only")
    if cached not in CACHED:
        reasons.append(f"a cache of {cached} is not read, only {', '.join(CACHED)}")
    if page % size:
        reasons.append(f"pages of {page} positions are not whole blocks of {size}")
    if wanted == "interpret":
        return reasons
    if size < NARROWEST:
        reasons.append(f"blocks of {block} positions hold a power of two of {size} only, under {NARROWEST}")
    narrow = min(w for _, w in (*powers_of_two(0, value_width), *powers_of_two(value_width, key_width)))
    if narrow < NARROWEST:
        reasons.append(f"keys and values of {key_width} and {value_width} channels leave {narrow}, under {NARROWEST}")
    if key_width > WIDEST_KEY:
        reasons.append(f"keys of {key_width} channels are too wide for shared memory, the widest are of {WIDEST_KEY}")
    return reasons


def case_name(heads: int, k_pages_PGZC: jax.Array, value_width: int) -> str:
    """The shape in words, for the choice's record."""
    _, kv_heads, page, width = k_pages_PGZC.shape
    return f"H{heads} G{kv_heads} C{width} V{value_width} {k_pages_PGZC.dtype.name} pages of {page}"


def tiles_for(heads: int, k_pages_PGZC: jax.Array, value_width: int, block: int) -> Tiles:
    """Tile sizes of a case: measured ones where there are any, else a safe default.

    A tile holds the queries of 8 positions where that is 64 rows or fewer; with very wide values, of half as many.
    """
    _, kv_heads, _, width = k_pages_PGZC.shape
    height = min(max(1 << (8 * heads // kv_heads - 1).bit_length(), NARROWEST), 64)
    warps = 4 if value_width <= 128 else 8
    if height < 64 or value_width > 256:
        default = Tiles(min(height, 32), 32, launch=Launch(warps, 4 if value_width <= 256 else 2))
    else:
        default = Tiles(height, 64, launch=Launch(warps, 3 if value_width <= 128 else 2))
    shape = f"H{heads} G{kv_heads} C{width} V{value_width}"
    tiles = look_up(OP, default, shape=shape, form=k_pages_PGZC.dtype.name)
    return replace(tiles, block=min(tiles.block, _power_in(block)))


def _power_in(block: int) -> int:
    """The largest power of two that divides a number of positions."""
    return block & -block


def _checked(q, k_pages, v_pages, position_BT, wide: int | None, table_of_ring: jax.Array | None) -> int:
    """Width of the values, after checks of what belongs together."""
    rows, count, heads, width = q.shape
    if k_pages.shape[3] != width or heads % k_pages.shape[1]:
        raise UnsupportedKernel(f"queries {q.shape} and keys {k_pages.shape}: one width, H a multiple of G")
    if v_pages is not None and v_pages.shape[:3] != k_pages.shape[:3]:
        raise UnsupportedKernel(f"keys {k_pages.shape} and values {v_pages.shape} must have equal pages")
    if wide is None or (v_pages is None and wide > width):
        raise UnsupportedKernel(f"without pages of values, value_width must be 1 to {width}, got {wide}")
    if position_BT.shape != (rows, count):
        raise UnsupportedKernel(f"positions must be [{rows}, {count}], got {position_BT.shape}")
    if table_of_ring is not None:
        raise UnsupportedKernel("a ring is one page per row, so it takes no page table")
    return wide


def _in_parts(plan: Plan, q_BTHC: jax.Array, position_BT: jax.Array, operands: dict[str, jax.Array]) -> jax.Array:
    """All queries, in as many launches as their unmerged results need; a tree's in one."""

    def run(part: Plan, q: jax.Array, position: jax.Array) -> jax.Array:
        flat = {"q": q.reshape(-1, part.key_width), "position": position.reshape(-1)}
        return attend_kernel(part, flat | operands).reshape(*q.shape[:3], -1)

    most = max(PIECES_BYTES // (4 * plan.splits * plan.rows * plan.heads * plan.value_width), 1)
    if plan.whole_reach or plan.paths or plan.count <= most:
        return run(plan, q_BTHC, position_BT)
    parts = -(-plan.count // most)
    more = parts * most - plan.count
    q_BTHC = jnp.pad(q_BTHC, ((0, 0), (0, more), (0, 0), (0, 0)))
    position_BT = jnp.pad(position_BT, ((0, 0), (0, more)), mode="edge")
    split = (x.reshape(plan.rows, parts, most, *x.shape[2:]).swapaxes(0, 1) for x in (q_BTHC, position_BT))
    out = lax.map(lambda part: run(replace(plan, count=most), *part), tuple(split))
    return out.swapaxes(0, 1).reshape(plan.rows, -1, *out.shape[3:])[:, : plan.count]
