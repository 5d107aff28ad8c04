"""Multi-head latent attention: all heads' keys and values are products of one small cached vector per position."""

from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.addressing import LayerCache, StreamSpec, write
from jaxspec.cache.tree_reads import read_block
from jaxspec.cache.window import AnyWindow, Window, pack, segments_of, take_outputs, unpack
from jaxspec.nn.attend import Source, attend, attend_self, blocks_in_reach, positions_seen, readers
from jaxspec.nn.attention_kernel import attend_by_kernel
from jaxspec.nn.dense import dense, per_head_dense
from jaxspec.nn.norm import rms_norm
from jaxspec.nn.policy import Policy, Weight, matrix, weight
from jaxspec.nn.quantized import widen
from jaxspec.nn.rope import RopeSpec, rotate
from jaxspec.nn.sparse_index import STREAM, Indexer, IndexSpec
from jaxspec.nn.unrolled import Unrolled, attend_unrolled
from jaxspec.shapes import Array

ZEROS, ONES = nn.initializers.zeros, nn.initializers.ones
RANK_NORM_EPS = 1e-6  # fixed in the reference, whatever the model's own


@dataclass(frozen=True)
class LatentSpec:
    """One layer of multi-head latent attention (DeepSeek-V2, section 2.1).

    Attributes:
      heads: H.
      plain_dim: channels of a query or key head that are not rotated.
      value_dim: channels of a value head.
      rank: R, width of the vector that keys and values are products of.
      rope: rotation of the further channels of each query head, and of one key that all heads share.
      scale: of the scores.
      query_rank: width of what queries are products of, None where they come straight from the input.
      bias: whether the projections from and to the stream have biases, except that of queries without a rank.
      index: indexer that limits what a query attends to, None for none.
      borrows: whether the selection of an earlier layer's indexer does.
    """

    heads: int
    plain_dim: int
    value_dim: int
    rank: int
    rope: RopeSpec
    scale: float
    query_rank: int | None = None
    bias: bool = False
    index: IndexSpec | None = None
    borrows: bool = False

    @property
    def streams(self) -> dict[str, StreamSpec]:
        """What it caches: the vector with the shared rotated key behind it, and the indexer's keys."""
        latent = {"latent": StreamSpec(1, self.rank + self.rope.dim)}
        return latent | ({STREAM: self.index.stream} if self.index else {})


class LatentAttention(nn.Module):
    """Over a cache the products with key and value weights are moved to queries and results, so that it is read as is.

    The weights of keys and values lie as published, [H, key and value channels, R].
    """

    spec: LatentSpec
    model_dim: int
    norm_eps: float
    policy: Policy

    @nn.compact
    def __call__(
        self,
        x_BTD: Array,
        position_BT: Array,
        cache: LayerCache | Unrolled | None,
        window: AnyWindow,
        shared: Array | None = None,
    ) -> tuple[Array, LayerCache | Unrolled | None, Array | None]:
        """Attention output [B, T, D] of the positions asked for, the cache with all, and what later layers borrow."""
        s, p = self.spec, self.policy
        q_BTHC, low_BTR = self._queries(x_BTD, position_BT)
        c_BTR, turned_BT1C = self._latent(x_BTD, position_BT)
        q_BTHC, c_BTR, turned_BT1C, position_BT = (unpack(x, window) for x in (q_BTHC, c_BTR, turned_BT1C, position_BT))
        kv_HXR = weight(self, p, "kv_b_HXR", (s.heads, s.plain_dim + s.value_dim, s.rank))
        seen = shared if s.borrows else None
        if s.index is not None:
            assert low_BTR is not None, "an indexer reads the low-rank queries"
            assert not isinstance(cache, Unrolled), "draft heads have no indexers"
            indexer = Indexer(s.index, self.model_dim, low_BTR.shape[-1], p, name="indexer")
            x_BTD, low_BTR = unpack(x_BTD, window), unpack(low_BTR, window)
            seen, cache = indexer(x_BTD, low_BTR, position_BT, cache, window if isinstance(window, Window) else None)
        if isinstance(cache, Unrolled):
            cache = cache.append(*_written_out(c_BTR, turned_BT1C, kv_HXR, s, p.compute.dtype))
            out = attend_unrolled(q_BTHC, cache, scale=s.scale)
        elif cache is None or not isinstance(window, Window):
            k_BTHC, v_BTHC = _written_out(c_BTR, turned_BT1C, kv_HXR, s, p.compute.dtype)
            out = attend_self(q_BTHC, k_BTHC, v_BTHC, scale=s.scale, seen_BTS=seen, segment_BT=segments_of(window))
        else:
            new_BT1C = jnp.concatenate([c_BTR[:, :, None], turned_BT1C], axis=-1)
            cache = cache | {"latent": write(cache["latent"], s.streams["latent"], window, new_BT1C)}
            q_BTHC, position_BT = take_outputs(q_BTHC, window), take_outputs(position_BT, window)
            seen = None if seen is None else take_outputs(seen, window)
            out = _over_cache(q_BTHC, position_BT, cache["latent"], kv_HXR, seen, s, window.after_write, p)
        w_o = matrix(self, p, "out_HCD", (s.heads, s.value_dim, self.model_dim))
        lends = s.borrows or (s.index is not None and s.index.lends)
        out = dense(pack(out, window), w_o, self._bias("out_bias_D", self.model_dim), dtype=p.compute.dtype, axes=2)
        return out, cache, seen if lends else None

    def _queries(self, x_BTD: Array, position_BT: Array) -> tuple[Array, Array | None]:
        """Queries, rotated at the end, and the normalised vector that they are products of."""
        s, p = self.spec, self.policy
        each, low = (s.heads, s.plain_dim + s.rope.dim), None
        if s.query_rank is None:
            q = dense(x_BTD, matrix(self, p, "q_DHC", (x_BTD.shape[-1], *each)), dtype=p.compute.dtype)
        else:
            w_a = matrix(self, p, "q_a_DR", (x_BTD.shape[-1], s.query_rank))
            low = dense(x_BTD, w_a, self._bias("q_a_bias_R", s.query_rank), dtype=p.compute.dtype)
            low = rms_norm(low, weight(self, p, "q_norm_R", (s.query_rank,), ONES), RANK_NORM_EPS)
            q = dense(low, matrix(self, p, "q_b_RHC", (s.query_rank, *each)), dtype=p.compute.dtype)
        turned = rotate(q[..., s.plain_dim :], position_BT, s.rope)
        return jnp.concatenate([q[..., : s.plain_dim], turned], axis=-1), low

    def _latent(self, x_BTD: Array, position_BT: Array) -> tuple[Array, Array]:
        """The normalised vector of each position, and its rotated key."""
        s, p = self.spec, self.policy
        width = s.rank + s.rope.dim
        w_a, bias = matrix(self, p, "kv_a_DX", (x_BTD.shape[-1], width)), self._bias("kv_a_bias_X", width)
        both = dense(x_BTD, w_a, bias, dtype=p.compute.dtype)
        c = rms_norm(both[..., : s.rank], weight(self, p, "kv_norm_R", (s.rank,), ONES), RANK_NORM_EPS)
        return c, rotate(both[:, :, None, s.rank :], position_BT, s.rope)

    def _bias(self, name: str, width: int) -> Array | None:
        return weight(self, self.policy, name, (width,), ZEROS) if self.spec.bias else None


def _written_out(
    c_BTR: Array, turned_BT1C: Array, kv_HXR: Weight, spec: LatentSpec, dtype: jnp.dtype
) -> tuple[Array, Array]:
    """Every head's keys and values, for sequences that attend to themselves."""
    kv_BTHX = dense(c_BTR, widen(kv_HXR, dtype).transpose(2, 0, 1), dtype=dtype)
    turned = jnp.broadcast_to(turned_BT1C, (*kv_BTHX.shape[:3], spec.rope.dim))
    return jnp.concatenate([kv_BTHX[..., : spec.plain_dim], turned], axis=-1), kv_BTHX[..., spec.plain_dim :]


def _over_cache(
    q_BTHC: Array,
    position_BT: Array,
    pages_PGZC: Array,
    kv_HXR: Weight,
    seen_XTS: Array | None,
    spec: LatentSpec,
    window: Window,
    policy: Policy,
) -> Array:
    """Attention over the cached vectors themselves (DeepSeek-V2, appendix C); a key begins with the value."""
    (rows, count), dtype = position_BT.shape, policy.compute.dtype
    position_XT, stream, block = readers(window, position_BT), spec.streams["latent"], window.block
    kv_HXR, cut = widen(kv_HXR, dtype), spec.plain_dim
    product = partial(per_head_dense, dtype=dtype, apart=policy.compute.splits_rows)
    plain_BTHR = product(q_BTHC[..., :cut], kv_HXR[:, :cut], contract=1)
    q = jnp.concatenate([plain_BTHR, q_BTHC[..., cut:]], axis=-1)

    def load(index: Array) -> tuple[Array, Array, Array]:
        k_X1ZC = read_block(pages_PGZC, stream, window, index, rows)
        seen_XTZ = positions_seen(position_XT, index, block)
        if seen_XTS is not None:
            seen_XTZ &= lax.dynamic_slice_in_dim(seen_XTS, index * block, block, axis=2)
        return k_X1ZC, k_X1ZC[..., : spec.rank], seen_XTZ

    out_BTHR = attend_by_kernel(
        q, (pages_PGZC, None), position_BT, stream, window, policy, scale=spec.scale, value_width=spec.rank,
        selected=seen_XTS is not None,
    )  # fmt: skip
    if out_BTHR is None:
        sources = [Source(*blocks_in_reach(window, count), load)]
        out_BTHR = attend(
            q, sources, kv_heads=1, value_width=spec.rank, scale=spec.scale, dtype=dtype,
            tree=window.path_BTJ is not None,
        )  # fmt: skip
    return product(out_BTHR, kv_HXR[:, cut:], contract=2)
