"""The kernels: scores of a few keys, and each query's best of all scores, by the bits of the least that is kept."""

from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.backend import Launch, launch, load, program_id, store, whole
from pallas_kernels.steady import total
from pallas_kernels.verify_attention.kernel import FILLING, Plan, channels, dot
from pallas_kernels.where import find_page, on_path, values_of

LOWEST, MOST = np.int32(-(2**31)), np.int32(2**31 - 1)
SEARCHED = 8192  # scores that a program looks at at a time, so that two counts of them fit into one number
FIELD = 10  # bits of each of three counters in one number


@dataclass(frozen=True)
class ChoicePlan(Plan):
    """Everything static about one call; tiles have as many rows as there are heads.

    Attributes:
      top_k: places that a query keeps.
    """

    top_k: int = 0

    @property
    def chunks(self) -> int:
        """Blocks of keys that a row's capacity is cut into."""
        return -(-self.capacity // self.tiles.block)

    @property
    def programs(self) -> int:
        """Programs that share a query's blocks: no more than fill the card, for most are empty in a short row."""
        return min(self.chunks, -(-FILLING // (self.rows * self.count)))

    @property
    def searched(self) -> int:
        """Scores that a program looks at at a time."""
        return min(SEARCHED, 1 << (self.chunks * self.tiles.block - 1).bit_length())


def choose_kernel(plan: ChoicePlan, operands: dict[str, jax.Array]) -> jax.Array:
    """Runs the kernels.

    Args:
      plan: what is static.
      operands: ``q`` [B * T * H, C], ``weight`` [B * T * H], ``seen`` [B * T], ``k`` [P, 1, Z, C]; where they apply
        also ``table`` [B, J], ``row`` [B], ``base`` [1], ``start`` [B] and ``path`` [B * T * J].

    Returns:
      int32 [B * T * top_k].
    """
    names, arrays, queries = tuple(operands), tuple(operands.values()), plan.rows * plan.count
    scored = jax.ShapeDtypeStruct((queries, plan.chunks * plan.tiles.block), jnp.float32)
    chosen = jax.ShapeDtypeStruct((queries * plan.top_k,), jnp.int32)
    score_XS = launch(
        partial(_score, plan, names),
        *arrays,
        name="index_scores",
        grid=(queries, plan.programs),
        in_specs=[whole(x.shape) for x in arrays],
        out_specs=whole(scored.shape),
        out_shape=scored,
        how=plan.tiles.launch,
        implementation=plan.implementation,
    )
    return launch(
        partial(_choose, plan),
        operands["seen"],
        score_XS,
        name="choose_places",
        grid=(queries,),
        in_specs=[whole((queries,)), whole(scored.shape)],
        out_specs=whole(chosen.shape),
        out_shape=chosen,
        how=Launch(num_warps=16, num_stages=1),
        implementation=plan.implementation,
    )


def _score(plan: ChoicePlan, names: tuple[str, ...], *refs: Any) -> None:
    """One program: some blocks of one query's keys, ``sum_h w_h relu(q_h k)``; none where all are kept anyway."""
    ref, out, size = dict(zip(names, refs, strict=False)), refs[len(names)], plan.tiles.block
    query, program = program_id(0), program_id(1)
    b, node, seen = query // plan.count, query % plan.count, ref["seen"][query]
    head_H = jnp.arange(plan.tiles.rows, dtype=jnp.int32)
    real_H, flat_H = head_H < plan.heads, query * plan.heads + jnp.minimum(head_H, plan.heads - 1)
    weight_H = load(ref["weight"].at[flat_H], mask=real_H, other=0.0)
    q_parts = [
        load(ref["q"].at[flat_H[:, None], channels(c, w)], mask=real_H[:, None], other=0).astype(plan.dtype)
        for c, w in plan.key_parts
    ]

    def score(turn: jax.Array, carry: jax.Array) -> jax.Array:
        first = (program + turn * plan.programs) * size
        place_Z = first + jnp.arange(size, dtype=jnp.int32)
        page_Z1, slot_Z1 = find_page(plan, ref, b, on_path(plan, ref, b, node, place_Z)[:, None])
        k_parts = [values_of(ref["k"].at[page_Z1, 0, slot_Z1, channels(c, w)]) for c, w in plan.key_parts]
        product_HZ = reduce(add, (dot(q, k.astype(plan.dtype).T) for q, k in zip(q_parts, k_parts, strict=True)))
        score_Z = total(jnp.maximum(product_HZ, 0.0) * weight_H[:, None], 0, plan.implementation)
        # A zero of negative weights would lose against one of others.
        store(out.at[query, place_Z], jnp.where(score_Z == 0, 0.0, score_Z))
        return carry

    blocks = jnp.where(seen > plan.top_k, (seen + size - 1) // size, 0)
    turns = (blocks - program + plan.programs - 1) // plan.programs
    lax.fori_loop(0, jnp.maximum(turns, 0), score, jnp.int32(0))


def _choose(plan: ChoicePlan, seen_ref: Any, score_ref: Any, place_ref: Any) -> None:
    """One program: one query's best scores in the order of their places; of equal ones those of lower places."""
    query, size, top_k = program_id(0), plan.searched, plan.top_k
    seen, after_all = seen_ref[query], plan.rows * plan.count * plan.top_k
    blocks = jnp.where(seen > top_k, (seen + size - 1) // size, 0)

    def ordered(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Places, and integers in the order of their scores."""
        place_N = index * size + jnp.arange(size, dtype=jnp.int32)
        is_there_N = place_N < seen
        bits_N = lax.bitcast_convert_type(load(score_ref.at[query, place_N], mask=is_there_N, other=0.0), jnp.int32)
        return place_N, jnp.where(is_there_N, jnp.where(bits_N < 0, bits_N ^ MOST, bits_N), LOWEST)

    def counts(tried: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Counts the scores that reach each threshold."""

        def count(index: jax.Array, count_N: jax.Array) -> jax.Array:
            _, order_N = ordered(index)
            return reduce(add, ((order_N >= t).astype(jnp.int32) << FIELD * n for n, t in enumerate(tried)), count_N)

        count_N = lax.fori_loop(0, blocks, count, jnp.zeros(size, jnp.int32))
        return tuple(jnp.sum((count_N >> FIELD * n) & ((1 << FIELD) - 1)) for n in range(len(tried)))

    def digit(turn: jax.Array, threshold: jax.Array) -> jax.Array:
        shift = 30 - 2 * turn
        reached = counts(tuple(threshold + (jnp.int32(n) << shift) for n in (1, 2, 3)))
        return threshold + (sum((c >= top_k).astype(jnp.int32) for c in reached) << shift)

    rounds = jnp.where(seen > top_k, jnp.int32(16), jnp.int32(0))
    threshold = lax.fori_loop(0, rounds, digit, jnp.int32(LOWEST))
    ties = top_k - counts((threshold + 1,))[0]  # that are kept

    def place(index: jax.Array, before: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        (above, equal), (place_N, order_N) = before, ordered(index)
        is_equal_N = order_N == threshold
        both_N = (order_N > threshold).astype(jnp.int32) + (is_equal_N.astype(jnp.int32) << 16)
        upto_N = jnp.cumsum(both_N)
        equal_N = equal + (upto_N >> 16)
        kept_N = (order_N > threshold) | (is_equal_N & (equal_N <= ties))
        rank_N = above + (upto_N & 0xFFFF) + jnp.minimum(equal_N, ties) - 1
        # After the last where masked: an interpreted store reads and writes those, too.
        store(place_ref.at[jnp.where(kept_N, query * top_k + rank_N, after_all)], place_N, mask=kept_N)
        sums = jnp.sum(both_N)
        return above + (sums & 0xFFFF), equal + (sums >> 16)

    lax.fori_loop(0, blocks, place, (jnp.int32(0), jnp.int32(0)))
    wide = min(size, 1 << (top_k - 1).bit_length())

    def keep_all(index: jax.Array, carry: jax.Array) -> jax.Array:
        rank_N = index * wide + jnp.arange(wide, dtype=jnp.int32)
        fits_N = rank_N < top_k
        at_N = jnp.where(fits_N, query * top_k + rank_N, after_all)
        store(place_ref.at[at_N], jnp.where(rank_N < seen, rank_N, 0), mask=fits_N)
        return carry

    fills = jnp.where(seen > top_k, jnp.int32(0), jnp.int32(-(-top_k // wide)))
    lax.fori_loop(0, fills, keep_all, jnp.int32(0))
