"""Selects for each query the best that an indexer scores: of whole sequences in chunks, of a cache by blocks."""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxspec.nn.attend import MASKED
from jaxspec.nn.dense import batched_dense, dense, exact_dense
from jaxspec.nn.param import Param, declare
from jaxspec.nn.policy import Policy
from jaxspec.nn.rope import RopeSpec, rotate
from jaxspec.nn.steady import row_sum
from jaxspec.nn.threshold import find_threshold
from jaxspec.shapes import Array
from jaxspec.sharding.placement import row_axes

Q = Param("q_RHC", ("rank", "heads", "head_dim"))
WEIGHT = Param("weight_DH", ("embed", "heads"))
SELF_QUERIES = 64
Queries = tuple[Array, Array]
"""Rotated queries [X, T, H, C] and the weights of their heads [X, T, H]."""


def index_queries(
    module: nn.Module, policy: Policy, x_BTD: Array, low_BTR: Array, position_BT: Array, heads: int, rope: RopeSpec,
    head_dim: int,
) -> Queries:  # fmt: skip
    """Projects an indexer's queries and their heads' weights; no gradient, for which keys are best has none."""
    dtype = policy.compute.dtype
    q_BTHC = dense(low_BTR, declare(module, policy, Q, (low_BTR.shape[-1], heads, head_dim)), dtype=dtype)
    weight_DH = declare(module, policy, WEIGHT, (x_BTD.shape[-1], heads))
    weight_BTH = exact_dense(x_BTD, weight_DH, dtype=dtype) * (heads * head_dim) ** -0.5
    return lax.stop_gradient((rotate(q_BTHC, position_BT, rope), weight_BTH))


def select_self(
    queries: Queries, k_BNC: Array, seen: Callable[[Array], Array], top_k: int, dtype: jnp.dtype
) -> Array | None:
    """Selects what each token of whole sequences keeps of N keys, [B, T, N]; None where it is all.

    Args:
      queries: of all tokens.
      k_BNC: keys, rotated.
      seen: positions [T] to whether they see each key, [T, N].
      top_k: keys that each keeps.
      dtype: of the products' factors.
    """
    rows, count = queries[0].shape[:2]
    if k_BNC.shape[1] <= top_k:
        return None
    chunks = -(-count // SELF_QUERIES)

    def cut(x_BT: Array) -> Array:
        x_BT = jnp.pad(x_BT, [(0, 0), (0, chunks * SELF_QUERIES - count)] + [(0, 0)] * (x_BT.ndim - 2))
        return x_BT.reshape(rows, chunks, SELF_QUERIES, *x_BT.shape[2:]).swapaxes(0, 1)

    def one(chunk: tuple[Array, Array, Array]) -> Array:
        q_BTHC, weight_BTH, position_T = chunk
        seen_TN = seen(position_T)
        score_BTN = scores((q_BTHC, weight_BTH), k_BNC, dtype)
        return best(jnp.where(seen_TN, score_BTN, MASKED), top_k) & seen_TN

    position_XT = jnp.arange(chunks * SELF_QUERIES, dtype=jnp.int32).reshape(chunks, SELF_QUERIES)
    kept_XBTN = lax.map(one, (*map(cut, queries), position_XT))
    return kept_XBTN.swapaxes(0, 1).reshape(rows, chunks * SELF_QUERIES, -1)[:, :count]


def select_cached(
    queries: Queries,
    load: Callable[[Array], tuple[Array, Array]],
    blocks: tuple[Array | int, Array],
    room: int,
    few: Array,
    top_k: int,
    policy: Policy,
) -> Array | None:
    """Selects what each reader keeps of N cached keys, [X, T, N]; None where the cache cannot hold more than that.

    Scores are computed block by block up to the end of the context, and not at all while all of it is kept.

    Args:
      queries: by reader.
      load: block number to keys [X, Z, C] and whether each query sees them, [X, T, Z].
      blocks: numbers of the first block that any reader sees and of the one after the last.
      room: N.
      few: whether no query sees more than it keeps.
      top_k: keys that each keeps.
      policy: knows the dtype of the products' factors, and how readers are split.
    """
    if room <= top_k:
        return None
    shape = (*queries[0].shape[:2], room)

    def add(index: Array, score_XTN: Array) -> Array:
        k_XZC, seen_XTZ = load(index)
        score_XTZ = jnp.where(seen_XTZ, scores(queries, k_XZC, policy.compute.dtype), MASKED)
        return lax.dynamic_update_slice_in_dim(score_XTN, score_XTZ, index * k_XZC.shape[1], axis=2)

    def among_all() -> Array:
        score_XTN = lax.fori_loop(*blocks, add, jnp.full(shape, MASKED))
        return _per_shard(partial(best, top_k=top_k), policy, score_XTN)

    return lax.cond(few, lambda: jnp.ones(shape, bool), among_all)


def scores(queries: Queries, k_XZC: Array, dtype: jnp.dtype) -> Array:
    """``sum_h w_h relu(q_h k)`` (DeepSeek-V3.2-Exp, equation 1), float32 [X, T, Z]."""
    q_XTHC, weight_XTH = queries
    readers_X, count, heads, width = q_XTHC.shape
    product = batched_dense(q_XTHC.reshape(readers_X, count * heads, width), k_XZC, contract=2, dtype=dtype)
    score_XTHZ = jax.nn.relu(product.reshape(readers_X, count, heads, -1)) * weight_XTH[..., None]
    score_XTZ = row_sum(score_XTHZ.swapaxes(2, 3))[..., 0]
    return jnp.where(score_XTZ == 0, 0.0, score_XTZ)  # -0.0, of negative weights, would lose against 0.0


def best(score_XTN: Array, top_k: int) -> Array:
    """Whether an entry is among the ``top_k`` best of the last axis; of equal ones those of lower places are."""
    *each, room = score_XTN.shape
    if room <= top_k:
        return jnp.ones(score_XTN.shape, bool)
    every_XTN, least_XT = jnp.ones(score_XTN.shape, jnp.int32), jnp.full(each, top_k, jnp.int32)
    threshold_XT1 = find_threshold(score_XTN, every_XTN, least_XT)[..., None]
    is_above, is_equal = score_XTN > threshold_XT1, score_XTN == threshold_XT1
    ties_XT1 = top_k - jnp.sum(is_above, axis=-1, keepdims=True, dtype=jnp.int32)

    def lower_places() -> Array:
        return is_above | (is_equal & (jnp.cumsum(is_equal, axis=-1, dtype=jnp.int32) <= ties_XT1))

    too_many = jnp.any(jnp.sum(is_equal, axis=-1, keepdims=True, dtype=jnp.int32) > ties_XT1)
    return lax.cond(too_many, lower_places, lambda: is_above | is_equal)


def _per_shard(compute: Callable[[Array], Array], policy: Policy, x_X: Array) -> Array:
    """Applies a row-wise function shard by shard, where XLA would all-gather the rows.

    Args:
      compute: keeps the first axis.
      policy: knows how a mesh splits rows.
      x_X: rows, or the nodes of each row; those that the mesh does not divide, such as a prompt's, are left to XLA.
    """
    mesh, rows = policy.compute.mesh, x_X.shape[0]
    if mesh is None or not policy.compute.splits_rows or rows % mesh.shape.get("data", 1):
        return compute(x_X)
    spec = P(row_axes(mesh, rows, spread=policy.compute.transport != "sum"))
    return jax.shard_map(compute, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x_X)
