"""DeepSeek sparse attention: a light indexer scores cached positions, and each query attends to the best of them."""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.kv import LayerCache, StreamSpec, Window, read_block, write
from jaxspec.nn.attend import HIDDEN, blocks_in_reach, positions_seen, readers
from jaxspec.nn.dense import batched_dense, dense, exact_dense
from jaxspec.nn.norm import layer_norm
from jaxspec.nn.policy import Policy, weight
from jaxspec.nn.rope import RopeSpec, rotate
from jaxspec.nn.steady import row_sum
from jaxspec.shapes import Array

KEY_NORM_EPS = 1e-6
STREAM = "index"
SELF_QUERIES = 64


@dataclass(frozen=True)
class IndexSpec:
    """The indexer of one attention layer.

    Attributes:
      heads, head_dim: H and C of the indexer's queries; it has one key head.
      top_k: positions that a query keeps.
      rope: rotation of the first channels of queries and keys.
      lends: whether later layers use this one's selection.
    """

    heads: int
    head_dim: int
    top_k: int
    rope: RopeSpec
    lends: bool = False

    @property
    def stream(self) -> StreamSpec:
        """The indexer's keys."""
        return StreamSpec(1, self.head_dim)


class Indexer(nn.Module):
    """Scores ``sum_h w_h relu(q_h k)`` (DeepSeek-V3.2-Exp, equation 1) and keeps the best positions of each query."""

    spec: IndexSpec
    model_dim: int
    rank: int
    policy: Policy

    @nn.compact
    def __call__(
        self, x_BTD: Array, low_BTR: Array, position_BT: Array, cache: LayerCache | None, window: Window | None
    ) -> tuple[Array | None, LayerCache | None]:
        """Selects positions, which may include such as the query does not see.

        Args:
          x_BTD: input of the attention layer.
          low_BTR: its normalised low-rank queries.
          position_BT: absolute positions.
          cache: of the layer; None selects among the T tokens.
          window: where the cache is written and what is seen.

        Returns:
          Whether a query keeps a position: [X, T', S] by reader over a cache of S positions, [B, T, T] without one,
          None where no query can see more than it keeps, so that scores are not needed. And the cache with the new
          keys.
        """
        s, p = self.spec, self.policy
        q_BTHC = dense(low_BTR, weight(self, p, "q_RHC", (self.rank, s.heads, s.head_dim)), dtype=p.compute)
        q_BTHC = rotate(q_BTHC, position_BT, s.rope)
        k_BTC = dense(x_BTD, weight(self, p, "k_DC", (self.model_dim, s.head_dim)), dtype=p.compute)
        scale = weight(self, p, "k_norm_C", (s.head_dim,), nn.initializers.ones)
        shift = weight(self, p, "k_norm_bias_C", (s.head_dim,), nn.initializers.zeros)
        k_BT1C = rotate(layer_norm(k_BTC, scale, shift, KEY_NORM_EPS)[:, :, None], position_BT, s.rope)
        weight_DH = weight(self, p, "weight_DH", (self.model_dim, s.heads))
        weight_BTH = exact_dense(x_BTD, weight_DH, dtype=p.compute) * (s.heads * s.head_dim) ** -0.5
        # Which positions are best has no derivative.
        queries = lax.stop_gradient((q_BTHC, weight_BTH))
        if cache is None or window is None:
            return select_self(*queries, lax.stop_gradient(k_BT1C)[:, :, 0], s.top_k, p.compute), cache
        cache = cache | {STREAM: write(cache[STREAM], s.stream, window, k_BT1C)}
        return select_cached(*queries, position_BT, cache[STREAM], s, window, p.compute), cache


def select_self(q_BTHC: Array, weight_BTH: Array, k_BTC: Array, top_k: int, dtype: jnp.dtype) -> Array | None:
    """What each token of whole sequences keeps of those before it and itself, [B, T, T]; None where it is all.

    Args:
      q_BTHC: queries, rotated.
      weight_BTH: weights of the heads.
      k_BTC: keys, rotated.
      top_k: tokens that each keeps.
      dtype: of the products' factors.
    """
    rows, count = k_BTC.shape[:2]
    if count <= top_k:
        return None
    chunks = -(-count // SELF_QUERIES)

    def cut(x_BT: Array) -> Array:
        x_BT = jnp.pad(x_BT, ((0, 0), (0, chunks * SELF_QUERIES - count)) + ((0, 0),) * (x_BT.ndim - 2))
        return x_BT.reshape(rows, chunks, SELF_QUERIES, *x_BT.shape[2:]).swapaxes(0, 1)

    def one(chunk: tuple[Array, Array, Array]) -> Array:
        q_BTHC, weight_BTH, position_T = chunk
        seen_TS = jnp.arange(count, dtype=jnp.int32) <= position_T[:, None]
        score_BTS = scores(q_BTHC, weight_BTH, k_BTC, dtype)
        return best(jnp.where(seen_TS, score_BTS, HIDDEN), top_k) & seen_TS

    position_NT = jnp.arange(chunks * SELF_QUERIES, dtype=jnp.int32).reshape(chunks, SELF_QUERIES)
    kept_NBTS = lax.map(one, (cut(q_BTHC), cut(weight_BTH), position_NT))
    return kept_NBTS.swapaxes(0, 1).reshape(rows, -1, count)[:, :count]


def select_cached(
    q_BTHC: Array,
    weight_BTH: Array,
    position_BT: Array,
    pages_PGZC: Array,
    spec: IndexSpec,
    window: Window,
    dtype: jnp.dtype,
) -> Array | None:
    """What each reader keeps of the cached positions, [X, T', S]; None where the cache cannot hold more than that.

    Scores are computed block by block as far as the context goes, and not at all while it is short enough to be
    kept whole.

    Args:
      q_BTHC: queries, rotated.
      weight_BTH: weights of the heads.
      position_BT: absolute positions of the queries.
      pages_PGZC: cached keys, those of this forward written.
      spec: of the indexer.
      window: of the forward.
      dtype: of the products' factors.
    """
    rows, count = position_BT.shape
    block, room = window.block, _room(pages_PGZC, window)
    if room <= spec.top_k:
        return None
    position_XT = readers(window, position_BT)
    q_XTHC = q_BTHC.reshape(*position_XT.shape, *q_BTHC.shape[2:])
    weight_XTH = weight_BTH.reshape(*position_XT.shape, -1)
    first, last = blocks_in_reach(window, count)

    def add(index: Array, score_XTS: Array) -> Array:
        k_XZC = read_block(pages_PGZC, spec.stream, window, index, rows)[:, 0]
        seen_XTZ = positions_seen(position_XT, index, block)
        score_XTZ = jnp.where(seen_XTZ, scores(q_XTHC, weight_XTH, k_XZC, dtype), HIDDEN)
        return lax.dynamic_update_slice_in_dim(score_XTS, score_XTZ, index * block, axis=2)

    def among_all() -> Array:
        return best(lax.fori_loop(first, last, add, jnp.full((*position_XT.shape, room), HIDDEN)), spec.top_k)

    def every() -> Array:
        return jnp.ones((*position_XT.shape, room), bool)

    return lax.cond(jnp.max(position_XT) < spec.top_k, every, among_all)


def _room(pages_PGZC: Array, window: Window) -> int:
    """S, positions that one row may have in the cache."""
    return pages_PGZC.shape[2] * (1 if window.table_BJ is None else window.table_BJ.shape[1])


def scores(q_XTHC: Array, weight_XTH: Array, k_XZC: Array, dtype: jnp.dtype) -> Array:
    """Weighted sum over the heads of what is positive of the products, float32 [X, T, Z]."""
    readers_X, count, heads, width = q_XTHC.shape
    product = batched_dense(q_XTHC.reshape(readers_X, count * heads, width), k_XZC, contract=2, dtype=dtype)
    score_XTHZ = jax.nn.relu(product.reshape(readers_X, count, heads, -1)) * weight_XTH[..., None]
    score_XTZ = row_sum(score_XTHZ.swapaxes(2, 3))[..., 0]
    return jnp.where(score_XTZ == 0, 0.0, score_XTZ)  # -0.0, of negative weights, would lose against 0.0


def best(score_XTS: Array, top_k: int) -> Array:
    """Whether an entry is among the ``top_k`` best of the last axis; of equal ones those of lower places are."""
    _, place_XTK = lax.top_k(score_XTS, top_k)
    nowhere = jnp.zeros(score_XTS.shape, bool)
    return jnp.put_along_axis(nowhere, place_XTK, True, axis=-1, inplace=False)
