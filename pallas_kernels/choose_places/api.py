"""The operation's door: checks, the choice of an implementation, and tile sizes."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Implementation, Launch
from pallas_kernels.blocks import look_up
from pallas_kernels.choose_places import reference
from pallas_kernels.choose_places.kernel import ChoicePlan, choose_kernel
from pallas_kernels.select import Choice, UnsupportedKernel, choose
from pallas_kernels.verify_attention.api import CACHED, NARROWEST
from pallas_kernels.verify_attention.kernel import Tiles, powers_of_two
from pallas_kernels.where import OWN_PAGES, Where

OP = "choose_places"
WIDEST_KEY, MOST_HEADS = 256, 128


def choose_places(
    q_BTHC: jax.Array,
    weight_BTH: jax.Array,
    k_pages_PGZC: jax.Array,
    seen_BT: jax.Array,
    *,
    top_k: int,
    dtype: jnp.dtype,
    where: Where = OWN_PAGES,
    implementation: Implementation | Choice = "triton",
) -> tuple[jax.Array, jax.Array]:
    """Scores a row's cached keys and finds the best for each query: ``sum_h w_h relu(q_h k)`` (DeepSeek-V3.2-Exp, 1).

    Of equal scores those of lower places are kept. A query's choice is the same whatever T, the other rows and the
    capacity; where it sees no more than ``top_k`` keys nothing is scored. A node of a tree gets what it would get in a
    chain: places are positions, its ancestors' those of their depths.

    Args:
      q_BTHC: the indexer's queries, rotated.
      weight_BTH: of its heads, float32.
      k_pages_PGZC: its keys, of one head; uint16 are the bits of bfloat16.
      seen_BT: int32, how many of the row's keys each query sees, from the first on.
      top_k: places that a query keeps.
      dtype: of the products' factors; sums are float32.
      where: pages, and a tree's nodes on them.
      implementation: what computes it; a case that the kernel cannot compute goes to the reference with a warning.

    Returns:
      int32 places [B, T, top_k] in ascending order, 0 after the last, and how many there are, [B, T].

    Raises:
      UnsupportedKernel: shapes do not belong together.
    """
    _check(q_BTHC, weight_BTH, k_pages_PGZC, seen_BT, top_k)
    (rows, count, heads, width), room = q_BTHC.shape, where.room(k_pages_PGZC)
    where.check(rows, count)
    if not isinstance(implementation, Choice):
        blocked = obstacles(heads, k_pages_PGZC, wanted=implementation)
        implementation = choose(OP, case_name(heads, k_pages_PGZC, top_k), implementation, "", blocked)
    seen_BT = jnp.minimum(seen_BT, room)
    count_BT = jnp.minimum(seen_BT, top_k)
    if implementation.implementation == "xla":
        places = reference.choose_places(
            q_BTHC, weight_BTH, k_pages_PGZC, seen_BT, top_k=top_k, dtype=dtype, where=where
        )
        return places, count_BT
    plan = ChoicePlan(
        rows, count, heads, 1, width, 0, 1.0, dtype, room, k_pages_PGZC.shape[2], None, False, where.paths,
        tiles_for(heads, k_pages_PGZC), implementation.implementation, where.base_pages, top_k,
    )  # fmt: skip
    given = {"q": q_BTHC.reshape(-1, width), "weight": weight_BTH.reshape(-1), "seen": seen_BT.reshape(-1)}
    places = choose_kernel(plan, given | {"k": k_pages_PGZC} | where.operands(rows, count))
    return places.reshape(rows, count, top_k), count_BT


def obstacles(heads: int, k_pages_PGZC: jax.Array, *, wanted: str) -> list[str]:
    """Returns why the kernel cannot compute a case, each a sentence; empty if it can.

    Args:
      heads: of the indexer's queries.
      k_pages_PGZC: keys, or their shape and dtype.
      wanted: implementation; ``triton`` has limits that ``interpret`` has not.
    """
    width, cached = k_pages_PGZC.shape[3], jnp.dtype(k_pages_PGZC.dtype).name
    reasons = []
    if cached not in CACHED:
        reasons.append(f"a cache of {cached} is not read, only {', '.join(CACHED)}")
    if wanted == "interpret":
        return reasons
    if heads > MOST_HEADS or width > WIDEST_KEY:
        reasons.append(f"{heads} heads of {width} channels, more than {MOST_HEADS} of {WIDEST_KEY} in one tile")
    narrow = min(w for _, w in powers_of_two(0, width))
    if narrow < NARROWEST:
        reasons.append(f"keys of {width} channels leave {narrow}, under {NARROWEST}")
    return reasons


def case_name(heads: int, k_pages_PGZC: jax.Array, top_k: int) -> str:
    """The shape in words, for the choice's record."""
    return f"H{heads} C{k_pages_PGZC.shape[3]} best {top_k} {k_pages_PGZC.dtype.name}"


def tiles_for(heads: int, k_pages_PGZC: jax.Array) -> Tiles:
    """Tile sizes of a case: measured ones where there are any, else a safe default; as many rows as heads."""
    height = max(1 << (heads - 1).bit_length(), NARROWEST)
    default = Tiles(height, 64, launch=Launch(4, 2))
    shape = f"H{heads} C{k_pages_PGZC.shape[3]}"
    return replace(look_up(OP, default, shape=shape, form=k_pages_PGZC.dtype.name), rows=height)


def _check(q: jax.Array, weight: jax.Array, k_pages: jax.Array, seen_BT: jax.Array, top_k: int) -> None:
    if k_pages.ndim != 4 or k_pages.shape[1] != 1 or k_pages.shape[3] != q.shape[3]:
        raise UnsupportedKernel(f"queries {q.shape} and keys {k_pages.shape}: one width, and keys of one head")
    if weight.shape != q.shape[:3] or seen_BT.shape != q.shape[:2]:
        raise UnsupportedKernel(
            f"weights must be {q.shape[:3]} and counts {q.shape[:2]}, got {weight.shape}, {seen_BT.shape}"
        )
    if top_k < 1:
        raise UnsupportedKernel(f"a query keeps at least 1 place, got {top_k}")
