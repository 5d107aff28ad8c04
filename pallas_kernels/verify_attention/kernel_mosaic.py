"""Attention by Mosaic GPU: what it computes, and how queries, positions and pages are laid out for its programs."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from pallas_kernels import mosaic
from pallas_kernels.backend import Launch
from pallas_kernels.mosaic import DEPTH, WARPGROUPS
from pallas_kernels.select import UnsupportedKernel
from pallas_kernels.verify_attention.kernel import Plan, Tiles
from pallas_kernels.verify_attention.kernel_mosaic_tile import ROWS, attend, groups
from pallas_kernels.verify_attention.reference import first_seen
from pallas_kernels.where import at_depths

BFLOAT16, FLOAT32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
Pages = tuple[jax.Array, jax.Array | None]
Tree = tuple[jax.Array, jax.Array]
"""Committed length of each row [B], and the nodes that each node sees, by depth [B or 1, T, J]."""
WIDEST_VALUE = 512
SHARED_BYTES = 225 << 10  # of Hopper's 227 KB; the rest is for barriers


@dataclass(frozen=True)
class MosaicTiles:
    """How the cache is cut.

    Attributes:
      block: cached positions of one product, a multiple of 64; a row's rounding depends on it.
      split: cached positions whose softmax is one piece, a multiple of ``block``; a row's rounding depends on it.
      stages: blocks that are copied ahead.
    """

    block: int = 64
    split: int = 2048
    stages: int = 4


def default_tiles(key_width: int, value_width: int, *, own_values: bool, prompt: bool) -> MosaicTiles:
    """Returns tiles with as many blocks ahead as there is shared memory for, at most four; a step in shorter pieces."""
    height, block = groups(value_width) * ROWS, MosaicTiles().block
    room = SHARED_BYTES - 2 * height * key_width
    stages = max(min(room // (2 * block * (key_width + value_width * own_values)), 4), 1)
    return MosaicTiles(split=2048 if prompt else 512, stages=stages)


def obstacles(
    heads: int, k_pages_PGZC: jax.Array, *, value_width: int, dtype: jnp.dtype, prompt: bool, tiles: MosaicTiles
) -> list[str]:
    """Returns why this kernel cannot compute a case, each a sentence; empty if it can."""
    (_, kv_heads, page, key_width), cached = k_pages_PGZC.shape, jnp.dtype(k_pages_PGZC.dtype)
    reasons, height = mosaic.obstacles(), groups(value_width) * ROWS
    if not prompt and heads // kv_heads % height:
        reasons.append(
            f"a step with {heads // kv_heads} heads to one of keys: TMA does not gather, so a tree's nodes need tiles "
            f"of their own, of {height} heads, and all steps must round alike"
        )
    if jnp.dtype(dtype) != BFLOAT16 or cached != BFLOAT16:
        reasons.append(f"products of {jnp.dtype(dtype)}, a cache of {cached}: the Mosaic kernel reads bfloat16 alone")
    if page % tiles.block:
        reasons.append(f"pages of {page} positions are not whole blocks of {tiles.block}")
    step = DEPTH * WARPGROUPS // groups(value_width)
    if key_width % DEPTH or value_width % step or value_width > WIDEST_VALUE:
        reasons.append(
            f"keys of {key_width} and values of {value_width} channels: the Mosaic kernel takes multiples of {DEPTH} "
            f"and {step}, and values of at most {WIDEST_VALUE}"
        )
    return reasons


def cut(plan: Plan, tiles: MosaicTiles) -> Plan:
    """Returns the plan of a call, with tiles of Triton's, in tiles of this kernel.

    Raises:
      UnsupportedKernel: sizes that its products do not have.
    """
    if tiles.block % ROWS or tiles.split % tiles.block:
        raise UnsupportedKernel(
            f"verify_attention by Mosaic: block must be a multiple of {ROWS}, and split one of block, got {tiles}"
        )
    height = groups(plan.value_width) * ROWS
    return replace(plan, tiles=Tiles(height, tiles.block, tiles.split, Launch(num_stages=tiles.stages)))


def verify_attention(
    pages: Pages,
    page_BJ: jax.Array,
    sinks_H: jax.Array | None,
    tree: Tree | None,
    plan: Plan,
    q_BTHC: jax.Array,
    position_BT: jax.Array,
) -> jax.Array:
    """As ``api.verify_attention``, with the pages of each row in ``page_BJ``."""
    (rows, count, heads, width), (k_pages_PGZC, v_pages_PGZC) = q_BTHC.shape, pages
    last_NXR = tiled(plan, jnp.broadcast_to(position_BT[..., None, None], (rows, count, heads, 1)))[..., 0]
    end_N = jnp.max(last_NXR, axis=(1, 2)) + 1
    operands = {
        "q": tiled(plan, (q_BTHC * plan.scale).astype(BFLOAT16)).reshape(-1, width),
        "k": k_pages_PGZC.reshape(-1, width),
        "page": jnp.clip(page_BJ, 0, len(k_pages_PGZC) - 1),
        "last": last_NXR,
    }
    first_N = jnp.zeros_like(end_N)
    if plan.span is not None:
        operands["first"] = jnp.maximum(first_seen(last_NXR, plan.span), 0)
        first_N = jnp.min(operands["first"], axis=(1, 2))
    end_N = jnp.maximum(end_N if plan.ring else jnp.minimum(end_N, plan.capacity), 1)
    operands["reach"] = jnp.stack([jnp.minimum(first_N, end_N - 1), end_N], axis=1)  # a block at least is read
    if v_pages_PGZC is not None:
        operands["v"] = v_pages_PGZC.reshape(-1, plan.value_width)
    if sinks_H is not None:
        sink_BTH1 = jnp.broadcast_to(sinks_H.astype(FLOAT32)[:, None], (rows, count, heads, 1))
        operands["sinks"] = tiled(plan, sink_BTH1)[..., 0]
    if tree is not None:
        operands |= own_blocks(plan, pages, page_BJ, *tree)
    return untiled(plan, attend(plan, operands))


def own_blocks(
    plan: Plan, pages: Pages, page_BJ: jax.Array, start_B: jax.Array, path_BTJ: jax.Array
) -> dict[str, jax.Array]:
    """Gathers, for each node of a tree, the blocks that hold other nodes, as the node sees them.

    Returns:
      ``k_own`` and, where values have pages of their own, ``v_own`` [B * T * G * blocks * positions, ...]; ``tail``
      [N, 2], from which block on those of a tile are read, and where they begin.
    """
    (rows, count, group), size = (plan.rows, plan.count, plan.group), plan.tiles.block
    length = -(-(size - 1 + plan.paths) // size) * size
    first_B = start_B // size
    place_BS = first_B[:, None] * size + jnp.arange(length, dtype=jnp.int32)
    at_BTS = at_depths(jnp.broadcast_to(place_BS[:, None], (rows, count, length)), start_B, path_BTJ)
    page_BTS = jnp.take_along_axis(page_BJ[:, None], at_BTS // plan.page % page_BJ.shape[1], axis=2, mode="clip")
    made: dict[str, jax.Array] = {}
    for name, x_PGZC in zip(("k_own", "v_own"), pages, strict=True):
        if x_PGZC is not None:
            x_BTSGC = x_PGZC[page_BTS, :, at_BTS % plan.page]
            made[name] = x_BTSGC.swapaxes(2, 3).reshape(-1, x_PGZC.shape[3])
    head_N, tile_N = jnp.divmod(jnp.arange(plan.tiles_of_queries, dtype=jnp.int32), count * group // plan.tiles.rows)
    b_N, g_N = jnp.divmod(head_N, plan.kv_heads)
    node_N = tile_N * plan.tiles.rows // group
    begin_N = ((b_N * count + node_N) * plan.kv_heads + g_N) * length
    return made | {"tail": jnp.stack([first_B[b_N], begin_N], axis=1)}


def tiled(plan: Plan, x_BTHX: jax.Array) -> jax.Array:
    """Lays out what there is of each query: those of one kv head together, the last one repeated to fill a tile.

    Returns:
      [N, 1 or 2, 64, X], by row, kv head, and in it position after position.
    """
    size, last = plan.count * plan.group, x_BTHX.shape[3]
    x_BTGRX = x_BTHX.reshape(plan.rows, plan.count, plan.kv_heads, plan.group, last)
    x_BGMX = x_BTGRX.swapaxes(1, 2).reshape(plan.rows, plan.kv_heads, size, last)
    x_BGMX = jnp.pad(x_BGMX, ((0, 0), (0, 0), (0, -size % plan.tiles.rows), (0, 0)), mode="edge")
    return x_BGMX.reshape(plan.tiles_of_queries, -1, ROWS, last)


def untiled(plan: Plan, x_NXRC: jax.Array) -> jax.Array:
    """Puts results of tiles where their queries were, [B, T, H, C']."""
    size, wide = plan.count * plan.group, plan.value_width
    x_BGMC = x_NXRC.reshape(plan.rows, plan.kv_heads, -1, wide)[:, :, :size]
    x_BGTRC = x_BGMC.reshape(plan.rows, plan.kv_heads, plan.count, plan.group, wide)
    return x_BGTRC.swapaxes(1, 2).reshape(plan.rows, plan.count, plan.heads, wide)
