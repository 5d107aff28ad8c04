"""The operation's door: checks, the choice of an implementation, and tile sizes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import Implementation, Launch
from pallas_kernels.blocks import Key, faster, look_up
from pallas_kernels.select import INSTEAD, Choice, UnsupportedKernel, choose
from pallas_kernels.verify_attention import kernel_mosaic, reference
from pallas_kernels.verify_attention.kernel import Plan, Tiles, attend_kernel, powers_of_two
from pallas_kernels.verify_attention.kernel_mosaic import MosaicTiles
from pallas_kernels.where import Where

OP = "verify_attention"
MOSAIC = "verify_attention_mosaic"
STEPS = " steps"  # after the shape, where steps were measured and not prompts
CACHED = ("bfloat16", "float16", "float32", "uint16")
NARROWEST = 16  # of a product's sizes on a GPU
WIDEST_KEY = 640
Pages = tuple[jax.Array, jax.Array | None]
"""Keys and values; without values a key begins with its value."""
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
    prompt: bool = False,
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
      prompt: whether the positions are a prompt's, which Mosaic GPU computes for more shapes than a step's.
      implementation: what computes it; a case that the kernel cannot compute goes to the reference with a warning.

    Returns:
      float32 [B, T, H, C'].

    Raises:
      UnsupportedKernel: shapes do not belong together.
    """
    (rows, count, heads, width), pages = q_BTHC.shape, (k_pages_PGZC, v_pages_PGZC)
    wide = value_width if v_pages_PGZC is None else v_pages_PGZC.shape[3]
    wide = _checked(q_BTHC, k_pages_PGZC, v_pages_PGZC, position_BT, wide, table_BJ if ring else None)
    where = Where(start_B, path_BTJ, table_BJ, row_B, base, base_pages)
    where.check(rows, count)
    if not isinstance(implementation, Choice):
        blocked = obstacles(k_pages_PGZC, value_width=wide, block=block, wanted=implementation)
        more = mosaic_obstacles(heads, pages, value_width=wide, dtype=dtype, prompt=prompt)
        name = case_name(heads, k_pages_PGZC, wide)
        implementation = choose(OP, name, implementation, "", blocked, mosaic=blocked + more)
    plan = Plan(
        rows, count, heads, k_pages_PGZC.shape[1], width, wide, scale, dtype, where.room(k_pages_PGZC),
        k_pages_PGZC.shape[2], span, ring, where.paths, tiles_for(heads, k_pages_PGZC, wide, block),
        implementation.implementation, base_pages,
    )  # fmt: skip
    if implementation.implementation not in ("xla", *INSTEAD):
        given = {"k": k_pages_PGZC, "v": v_pages_PGZC, "sinks": sinks_H} | where.operands(rows, count)
        operands = {name: x for name, x in given.items() if x is not None}
        return in_parts(plan, (q_BTHC, position_BT), partial(_run, operands), in_one=plan.whole_reach or plan.paths > 0)
    if sinks_H is not None and sinks_H.ndim == 2:
        sinks_H = lax.dynamic_index_in_dim(sinks_H, jnp.int32(0) if base is None else base, keepdims=False)
    if implementation.implementation in INSTEAD:
        plan = kernel_mosaic.cut(plan, mosaic_tiles_for(heads, pages, wide, prompt=prompt))
        tree = None if path_BTJ is None or start_B is None else (start_B, path_BTJ)
        run = partial(kernel_mosaic.verify_attention, pages, where.pages(rows), sinks_H, tree)
        return in_parts(plan, (q_BTHC, position_BT), run, in_one=plan.whole_reach or plan.paths > 0)
    return reference.verify_attention(
        q_BTHC, k_pages_PGZC, v_pages_PGZC, position_BT, scale=scale, dtype=dtype, value_width=wide,
        sinks_H=sinks_H, span=span, ring=ring, where=where,
    )  # fmt: skip


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
    page, size, reasons = k_pages_PGZC.shape[2], _power_in(block), []
    if selected:
        reasons.append("an indexer chooses what is attended to, and the kernel reads whole blocks only")
    if page % size:
        reasons.append(f"pages of {page} positions are not whole blocks of {size}")
    if wanted != "interpret" and size < NARROWEST:
        reasons.append(f"blocks of {block} positions hold a power of two of {size} only, under {NARROWEST}")
    return reasons + entry_obstacles(k_pages_PGZC, value_width=value_width, wanted=wanted)


def entry_obstacles(k_pages_PGZC: jax.Array, *, value_width: int, wanted: str) -> list[str]:
    """Returns why the kernel cannot read entries, whatever their places; see ``obstacles``."""
    key_width, cached = k_pages_PGZC.shape[3], jnp.dtype(k_pages_PGZC.dtype).name
    reasons = [] if cached in CACHED else [f"a cache of {cached} is not read, only {', '.join(CACHED)}"]
    if wanted == "interpret":
        return reasons
    narrow = min(w for _, w in (*powers_of_two(0, value_width), *powers_of_two(value_width, key_width)))
    if narrow < NARROWEST:
        reasons.append(f"keys and values of {key_width} and {value_width} channels leave {narrow}, under {NARROWEST}")
    if key_width > WIDEST_KEY:
        reasons.append(f"keys of {key_width} channels are too wide for shared memory, the widest are of {WIDEST_KEY}")
    return reasons


def mosaic_obstacles(heads: int, pages: Pages, *, value_width: int, dtype: jnp.dtype, prompt: bool) -> list[str]:
    """Returns why the Mosaic kernel cannot compute a case, each a sentence; empty if it can.

    Args:
      heads: H.
      pages: of keys, and of values where these have their own, or their shapes and dtypes.
      value_width: C'.
      dtype: of the products' factors.
      prompt: whether the positions are a prompt's.
    """
    tiles = mosaic_tiles_for(heads, pages, value_width, prompt=prompt)
    return kernel_mosaic.obstacles(heads, pages[0], value_width=value_width, dtype=dtype, prompt=prompt, tiles=tiles)


def mosaic_is_faster(heads: int, k_pages_PGZC: jax.Array, value_width: int, *, prompt: bool) -> str:
    """Returns the measurement of this card by which Mosaic's kernel takes the place of Triton's, empty if none.

    Steps are measured by themselves. All of a shape take the same kernel, so that a row's bits do not depend on how
    many positions it has.
    """
    shape = shape_of(heads, k_pages_PGZC, value_width) + ("" if prompt else STEPS)
    return faster(MOSAIC, Key(shape, k_pages_PGZC.dtype.name))


def mosaic_tiles_for(heads: int, pages: Pages, value_width: int, *, prompt: bool) -> MosaicTiles:
    """Returns sizes of the Mosaic kernel: safe ones, or of prompts measured ones where there are any."""
    k_pages_PGZC, v_pages_PGZC = pages
    default = kernel_mosaic.default_tiles(
        k_pages_PGZC.shape[3], value_width, own_values=v_pages_PGZC is not None, prompt=prompt
    )
    if not prompt:
        return default
    shape = shape_of(heads, k_pages_PGZC, value_width)
    return look_up(MOSAIC, default, shape=shape, form=k_pages_PGZC.dtype.name)


def shape_of(heads: int, k_pages_PGZC: jax.Array, value_width: int) -> str:
    """Sizes that tile sizes are measured for; not the rows, on which they must not depend."""
    _, kv_heads, _, width = k_pages_PGZC.shape
    return f"H{heads} G{kv_heads} C{width} V{value_width}"


def case_name(heads: int, k_pages_PGZC: jax.Array, value_width: int) -> str:
    """The shape in words, for the choice's record."""
    shape = shape_of(heads, k_pages_PGZC, value_width)
    return f"{shape} {k_pages_PGZC.dtype.name} pages of {k_pages_PGZC.shape[2]}"


def tiles_for(heads: int, k_pages_PGZC: jax.Array, value_width: int, block: int) -> Tiles:
    """Tile sizes of a case: measured ones where there are any, else a safe default.

    A tile holds the queries of 8 positions where that is 64 rows or fewer; with very wide values, of half as many.
    """
    kv_heads = k_pages_PGZC.shape[1]
    height = min(max(1 << (8 * heads // kv_heads - 1).bit_length(), NARROWEST), 64)
    warps = 4 if value_width <= 128 else 8
    if height < 64 or value_width > 256:
        default = Tiles(min(height, 32), 32, launch=Launch(warps, 4 if value_width <= 256 else 2))
    else:
        default = Tiles(height, 64, launch=Launch(warps, 3 if value_width <= 128 else 2))
    tiles = look_up(OP, default, shape=shape_of(heads, k_pages_PGZC, value_width), form=k_pages_PGZC.dtype.name)
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


def _run(operands: dict[str, jax.Array], plan: Plan, q_BTHC: jax.Array, position_BT: jax.Array) -> jax.Array:
    flat = {"q": q_BTHC.reshape(-1, plan.key_width), "position": position_BT.reshape(-1)}
    return attend_kernel(plan, flat | operands).reshape(*q_BTHC.shape[:3], -1)


def in_parts(plan: Plan, each: tuple[jax.Array, ...], run: Callable[..., jax.Array], *, in_one: bool) -> jax.Array:
    """Computes all queries, in as many launches as their unmerged results need.

    Args:
      plan: of all.
      each: arrays [B, T, ...], which are cut.
      run: computes [B, T', H, C'] from the plan of a part and its arrays.
      in_one: whether they are not to be cut.
    """
    most = max(PIECES_BYTES // (4 * plan.splits * plan.rows * plan.heads * plan.value_width), 1)
    if in_one or plan.count <= most:
        return run(plan, *each)
    parts = -(-plan.count // most)

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, parts * most - plan.count), *[(0, 0)] * (x.ndim - 2)], mode="edge")
        return x.reshape(plan.rows, parts, most, *x.shape[2:]).swapaxes(0, 1)

    out = lax.map(lambda part: run(replace(plan, count=most), *part), tuple(cut(x) for x in each))
    return out.swapaxes(0, 1).reshape(plan.rows, -1, *out.shape[3:])[:, : plan.count]
