"""DeepSeek sparse attention: a light indexer scores cached positions, and each query attends to the best of them."""

from dataclasses import dataclass

import flax.linen as nn
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.addressing import LayerCache, StreamSpec, write
from jaxspec.cache.tree_reads import read_block
from jaxspec.cache.window import Window
from jaxspec.nn.attend import blocks_in_reach, positions_seen, readers
from jaxspec.nn.chosen import Selection, choose_by_kernel
from jaxspec.nn.dense import dense
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.norm import layer_norm
from jaxspec.nn.param import ZEROS, Param, declare
from jaxspec.nn.policy import Policy
from jaxspec.nn.rope import RopeSpec, rotate
from jaxspec.nn.selection import Queries, index_queries, select_cached, select_self
from jaxspec.shapes import Array

K = Param("k_DC", ("embed", "head_dim"))
K_NORM = Param("k_norm_C", ("head_dim",), "norm")
K_NORM_BIAS = Param("k_norm_bias_C", ("head_dim",), "norm", ZEROS)

KEY_NORM_EPS = 1e-6
STREAM = "index"


@dataclass(frozen=True)
class IndexSpec:
    """The indexer of one attention layer.

    Attributes:
      heads, head_dim: H and C of the indexer's queries; it has one key head.
      top_k: positions that a query keeps.
      rope: rotation of the first channels of queries and keys.
      shares_selection: whether later layers use this one's selection.
    """

    heads: int
    head_dim: int
    top_k: int
    rope: RopeSpec
    shares_selection: bool = False

    @property
    def stream(self) -> StreamSpec:
        """The indexer's keys."""
        return StreamSpec(1, self.head_dim)


class Indexer(nn.Module):
    """Scores ``sum_h w_h relu(q_h k)`` (DeepSeek-V3.2-Exp, equation 1) and keeps the best positions of each query."""

    spec: IndexSpec
    model_dim: int
    policy: Policy

    @nn.compact
    def __call__(self, x_BTD: Array, low_BTR: Array, inputs: Inputs) -> tuple[Selection | None, LayerCache | None]:
        """Selects positions, which may include some that the query does not see.

        Args:
          x_BTD: input of the attention layer.
          low_BTR: its normalized low-rank queries.
          inputs: of the layer, in rows; without a cache it selects among the T tokens.

        Returns:
          Whether a query keeps a position: [X, T', S] by reader over a cache of S positions, or what kernels chose of
          it; [B, T, T] without one; None where no query can see more than it keeps, so that scores are not needed. And
          the cache with the new keys.
        """
        s, p, position_BT = self.spec, self.policy, inputs.position_BT
        queries = index_queries(self, p, x_BTD, low_BTR, position_BT, s.heads, s.rope, s.head_dim)
        k_BTC = dense(x_BTD, declare(self, p, K, (self.model_dim, s.head_dim)), dtype=p.compute.dtype)
        scale = declare(self, p, K_NORM, (s.head_dim,))
        shift = declare(self, p, K_NORM_BIAS, (s.head_dim,))
        k_BT1C = rotate(layer_norm(k_BTC, scale, shift, KEY_NORM_EPS)[:, :, None], position_BT, s.rope)
        if (window := inputs.cache_window) is None:
            return select_among_themselves(queries, lax.stop_gradient(k_BT1C)[:, :, 0], s.top_k, p.compute.dtype), None
        cache = inputs.memory
        cache = cache | {STREAM: write(cache[STREAM], s.stream, window, k_BT1C)}
        return select_positions(queries, position_BT, cache[STREAM], s, window, p), cache


def select_among_themselves(queries: Queries, k_BTC: Array, top_k: int, dtype: jnp.dtype) -> Array | None:
    """Selects what each token of whole sequences keeps of those up to itself, [B, T, T]; None where it is all."""
    place_S = jnp.arange(k_BTC.shape[1], dtype=jnp.int32)
    return select_self(queries, k_BTC, lambda position_T: place_S <= position_T[:, None], top_k, dtype)


def select_positions(
    queries: Queries, position_BT: Array, pages_PGZC: Array, spec: IndexSpec, window: Window, policy: Policy
) -> Selection | None:
    """Selects what each reader keeps of the cached positions; None where the cache holds no more."""
    rows, count = position_BT.shape
    room = pages_PGZC.shape[2] * (1 if window.table_BJ is None else window.table_BJ.shape[1])
    if room > spec.top_k:
        chosen = choose_by_kernel(queries, pages_PGZC, position_BT + 1, spec.stream, window, spec.top_k, policy)
        if chosen is not None:
            return chosen
    position_XT = readers(window, position_BT)
    by_reader = (
        queries[0].reshape(*position_XT.shape, *queries[0].shape[2:]),
        queries[1].reshape(*position_XT.shape, -1),
    )

    def load(index: Array) -> tuple[Array, Array]:
        k_XZC = read_block(pages_PGZC, spec.stream, window, index, rows)[:, 0]
        return k_XZC, positions_seen(position_XT, index, window.block)

    few = jnp.max(position_XT) < spec.top_k
    return select_cached(by_reader, load, blocks_in_reach(window, count), room, few, spec.top_k, policy)
