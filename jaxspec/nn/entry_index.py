"""Compressed entries scored by an indexer with a compressor of its own; each query attends to the best of them."""

from dataclasses import dataclass

import flax.linen as nn
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.addressing import LayerCache, StreamSpec, entry_block
from jaxspec.cache.tree_reads import read_block
from jaxspec.cache.window import Window
from jaxspec.nn.chosen import Selection, choose_by_kernel
from jaxspec.nn.compressor import Compressor, CompressorSpec, blocks_of_entries, entries_seen
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.policy import Policy
from jaxspec.nn.selection import Queries, index_queries, select_cached, select_self
from jaxspec.shapes import Array

PREFIX = "index_"


@dataclass(frozen=True)
class EntryIndexSpec:
    """The indexer of one attention layer.

    Attributes:
      heads: H of its queries.
      top_k: entries that a query keeps.
      compressor: pools its keys, as many as the layer has entries; queries rotate as they do.
    """

    heads: int
    top_k: int
    compressor: CompressorSpec

    @property
    def streams(self) -> dict[str, StreamSpec]:
        """Returns what it caches, by name."""
        return {f"{PREFIX}raw": self.compressor.raw, f"{PREFIX}entry": self.compressor.entries}


class EntryIndexer(nn.Module):
    """Scores entries as ``sum_h w_h relu(q_h k)`` (DeepSeek-V3.2-Exp, equation 1)."""

    spec: EntryIndexSpec
    model_dim: int
    norm_eps: float
    policy: Policy

    @nn.compact
    def __call__(self, x_BTD: Array, low_BTR: Array, inputs: Inputs) -> tuple[Selection | None, LayerCache | None]:
        """Selects entries, which may include some that the query does not see.

        Args:
          x_BTD: input of the attention layer.
          low_BTR: its normalized low-rank queries.
          inputs: of the layer, in rows; without a cache, positions are 0 onwards and it selects among their entries.

        Returns:
          Whether a query keeps an entry, [B, T, N], or what kernels chose of a cache; None where there are never more
          than it keeps, so that scores are not needed. And the cache with the new keys.
        """
        s, p, keys, position_BT = self.spec, self.policy, self.spec.compressor, inputs.position_BT
        queries = index_queries(self, p, x_BTD, low_BTR, position_BT, s.heads, keys.rope, keys.head_dim)
        compressor = Compressor(keys, self.model_dim, self.norm_eps, p, name="compressor")
        k_BNC, cache = compressor(x_BTD, inputs, PREFIX)
        if (window := inputs.cache_window) is None or cache is None:
            assert k_BNC is not None, "without a cache there are entries"
            return select_entries_self(queries, lax.stop_gradient(k_BNC), s, p.compute.dtype), None
        return select_entries(queries, position_BT, cache[f"{PREFIX}entry"], s, window, p), cache


def select_entries_self(queries: Queries, k_BNC: Array, spec: EntryIndexSpec, dtype: jnp.dtype) -> Array | None:
    """Selects the entries that each token of whole sequences keeps, [B, T, N]; None where it is all."""
    count, ratio = k_BNC.shape[1], spec.compressor.ratio
    return select_self(queries, k_BNC, lambda position_T: entries_seen(position_T, 0, count, ratio), spec.top_k, dtype)


def select_entries(
    queries: Queries, position_BT: Array, pages_PGZC: Array, spec: EntryIndexSpec, window: Window, policy: Policy
) -> Selection | None:
    """Selects the cached entries that each query keeps; None where the cache cannot hold more than that."""
    rows, count = position_BT.shape
    stream, ratio = spec.compressor.entries, spec.compressor.ratio
    if pages_PGZC.shape[2] > spec.top_k:
        seen_BT = (position_BT + 1) // ratio
        chosen = choose_by_kernel(queries, pages_PGZC, seen_BT, stream, window, spec.top_k, policy)
        if chosen is not None:
            return chosen
    size = entry_block(stream, window.block)

    def load(index: Array) -> tuple[Array, Array]:
        k_BZC = read_block(pages_PGZC, stream, window, index, rows)[:, 0]
        return k_BZC, entries_seen(position_BT, index * size, size, ratio)

    few, blocks = jnp.max((position_BT + 1) // ratio) <= spec.top_k, (0, blocks_of_entries(window, count, stream))
    return select_cached(queries, load, blocks, pages_PGZC.shape[2], few, spec.top_k, policy)
