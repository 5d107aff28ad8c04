"""Which rows a program computes: rows sorted by group, each group cut into blocks of equal height."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import Implementation, Launch, launch, load, store, whole

CHUNK = 64
MOST_MEMBERS = 16384  # pairs of a row and a group that a program looks at at a time; twice as many spill registers
IN_ONE_PROGRAM = 8192


@partial(jax.tree_util.register_dataclass, data_fields=["group_N", "first_N", "count_N"], meta_fields=[])
@dataclass(frozen=True)
class Blocks:
    """Blocks of rows; those of one group are neighbors, so that its weights are read once and then found in cache.

    Attributes:
      group_N: group of each block.
      first_N: its first row, in sorted order.
      count_N: its rows, 0 for a block that is not in use.
    """

    group_N: jax.Array
    first_N: jax.Array
    count_N: jax.Array


def most_blocks(rows: int, groups: int, height: int) -> int:
    """Blocks that any grouping of so many rows needs at most."""
    return max(1, min(rows, groups) + max(0, rows - min(rows, groups)) // height)


def cut(size_E: jax.Array, rows: int, height: int) -> Blocks:
    """Blocks of rows that lie sorted by group already.

    Args:
      size_E: int32 rows per group, in order; their sum is at most ``rows``.
      rows: all of them.
      height: rows per block.
    """
    groups = size_E.shape[0]
    most = most_blocks(rows, groups, height)
    end_E, last_E = jnp.cumsum(size_E), jnp.cumsum((size_E + height - 1) // height)
    n = jnp.arange(most, dtype=jnp.int32)
    group_N = jnp.minimum(jnp.sum(n[:, None] >= last_E[None], axis=1, dtype=jnp.int32), groups - 1)
    before_N = (n - last_E[group_N] + (size_E[group_N] + height - 1) // height) * height
    count_N = jnp.where(n < last_E[-1], jnp.clip(size_E[group_N] - before_N, 0, height), 0)
    return Blocks(group_N, end_E[group_N] - size_E[group_N] + before_N, count_N)


def sort(group_R: jax.Array, groups: int, height: int, implementation: Implementation) -> tuple[jax.Array, Blocks]:
    """Sorts rows by group, keeping their order within a group, and cuts them into blocks.

    Args:
      group_R: int32; rows of a group that is not in [0, groups) are left out.
      groups: E.
      height: rows per block.
      implementation: one program of the kernel where that is quick, plain JAX for many rows.

    Returns:
      The row at each place of the sorted order (undefined after the last), and the blocks.
    """
    rows = group_R.shape[0]
    if rows > IN_ONE_PROGRAM or implementation == "xla":
        known = (group_R >= 0) & (group_R < groups)
        key_R = jnp.where(known, group_R, groups)
        size_E = jnp.zeros(groups, jnp.int32).at[key_R].add(1, mode="drop")
        return jnp.argsort(key_R, stable=True).astype(jnp.int32), cut(size_E, rows, height)
    most = most_blocks(rows, groups, height)
    shapes = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (rows, most, most, most)]
    order_R, group_N, first_N, count_N = launch(
        partial(_sort, groups=groups, height=height),
        group_R,
        name="sort_rows",
        grid=(1,),
        in_specs=[whole((rows,))],
        out_specs=[whole(s.shape) for s in shapes],
        out_shape=shapes,
        how=Launch(num_warps=8, num_stages=1),
        implementation=implementation,
    )
    return order_R, Blocks(group_N, first_N, count_N)


def _sort(group_ref, order_ref, block_group_ref, first_ref, count_ref, *, groups: int, height: int):
    rows = order_ref.shape[0]
    wide = _power(groups)
    chunk = min(CHUNK, _power(rows), max(16, MOST_MEMBERS // wide))
    group_X = jnp.arange(wide, dtype=jnp.int32)

    def members(i):
        row = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        group = load(group_ref.at[row], mask=row < rows, other=-1)
        return row, group, (group[:, None] == group_X[None]).astype(jnp.int32)

    steps = -(-rows // chunk)
    none_X = jnp.zeros(wide, jnp.int32)
    size_X = _loop(steps, lambda i, sum_X: sum_X + jnp.sum(members(i)[2], axis=0), none_X)
    size_X = jnp.where(group_X < groups, size_X, 0)
    start_X = jnp.cumsum(size_X) - size_X

    def place(i, next_X):
        row, group, member_CX = members(i)
        place_CX = next_X[None] + jnp.cumsum(member_CX, axis=0) - 1
        known = (row < rows) & (group >= 0) & (group < groups)
        # Behind the last row where masked: an interpreted store reads and writes those, too.
        own_C = jnp.where(known, jnp.sum(member_CX * place_CX, axis=1), rows)
        store(order_ref.at[own_C], row, mask=known)
        return next_X + jnp.sum(member_CX, axis=0)

    _loop(steps, place, start_X)

    describe(size_X, start_X, (block_group_ref, first_ref, count_ref), groups=groups, height=height)


def describe(size_X: jax.Array, start_X: jax.Array, refs: Sequence[Any], *, groups: int, height: int) -> None:
    """Stores group, first row and count of every block, from each group's rows and the first of them."""
    blocks_X = (size_X + (height - 1)) // height
    last_X = jnp.cumsum(blocks_X)
    group_X = jnp.arange(size_X.shape[0], dtype=jnp.int32)
    most = refs[0].shape[0]
    chunk = min(CHUNK, _power(most))

    def one(i, carry):
        n = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        group = jnp.sum((n[:, None] >= last_X[None]).astype(jnp.int32), axis=1)
        own_CX = (group[:, None] == group_X[None]).astype(jnp.int32)
        before = (n - jnp.sum(own_CX * (last_X - blocks_X)[None], axis=1)) * height
        left = jnp.sum(own_CX * size_X[None], axis=1) - before
        fits = n < most
        store(refs[0].at[n], jnp.minimum(group, groups - 1), mask=fits)
        store(refs[1].at[n], jnp.sum(own_CX * start_X[None], axis=1) + before, mask=fits)
        store(refs[2].at[n], jnp.where(group < groups, jnp.clip(left, 0, height), 0), mask=fits)
        return carry

    _loop(-(-most // chunk), one, jnp.int32(0))


def _loop(steps: int, body, start):
    return body(0, start) if steps == 1 else lax.fori_loop(0, steps, body, start)


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())
