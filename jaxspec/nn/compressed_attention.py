"""DeepSeek-V4's attention: one shared key that is also the value, over a window and over compressed entries."""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.addressing import StreamSpec, entry_block, write
from jaxspec.cache.tree_reads import read_block
from jaxspec.cache.window import pack, take_outputs, unpack
from jaxspec.nn.attend import Source, attend, attend_self, blocks_in_reach, positions_seen
from jaxspec.nn.cached_attention import attend_cached, attend_chosen
from jaxspec.nn.chosen import Chosen, mask_of
from jaxspec.nn.compressor import Compressor, CompressorSpec, blocks_of_entries, entries_seen
from jaxspec.nn.dense import dense, per_head_dense
from jaxspec.nn.entry_index import EntryIndexer, EntryIndexSpec
from jaxspec.nn.inputs import Inputs, Mixed
from jaxspec.nn.norm import rms_norm
from jaxspec.nn.param import Param, declare
from jaxspec.nn.policy import Policy
from jaxspec.nn.rope import RopeSpec, rotate
from jaxspec.pytree import replace
from jaxspec.shapes import Array
from pallas_kernels.chosen_attention.api import Recent
from pallas_kernels.quantized import widen

Q_A = Param("q_a_DR", ("embed", "rank"))
Q_NORM = Param("q_norm_R", ("rank",), "norm")
Q_B = Param("q_b_RHC", ("rank", "heads", "head_dim"))
KV = Param("kv_DC", ("embed", "head_dim"))
KV_NORM = Param("kv_norm_C", ("head_dim",), "norm")
SINKS = Param("sinks_H", ("heads",), "weight", dtype=jnp.float32)
OUT_A = Param("out_a_XC", ("group_ranks", "group_channels"), "weight")
OUT_B = Param("out_b_XD", ("group_ranks", "embed"))


@dataclass(frozen=True)
class CompressedSpec:
    """One attention layer.

    Attributes:
      heads, head_dim: H and C; one key head serves all.
      query_rank: R, width of what queries are products of.
      groups, group_rank: the output is projected by equal groups of heads to ``group_rank`` each, then together.
      window: latest positions that a query sees, itself included.
      rope: rotation of queries and keys, and back of what attention gives, for the values are rotated too.
      compressor: pools older positions, None where only the window is seen.
      index: limits the entries that a query attends to, None for none.
    """

    one_text_only = True
    chain_only = "compressed attention pools consecutive positions, which the branches of a tree are not"

    heads: int
    head_dim: int
    query_rank: int
    groups: int
    group_rank: int
    window: int
    rope: RopeSpec
    compressor: CompressorSpec | None = None
    index: EntryIndexSpec | None = None

    @property
    def streams(self) -> dict[str, StreamSpec]:
        """Returns what it caches: keys of the window, what each position adds to entries, and the entries."""
        streams = {"kv": StreamSpec(1, self.head_dim, self.window - 1)}
        if self.compressor is not None:
            streams |= {"raw": self.compressor.raw, "entry": self.compressor.entries}
        return streams | (self.index.streams if self.index else {})


class CompressedAttention(nn.Module):
    """Over a cache, window and entries are two sources of one softmax; both lie by position, so drafts can be undone.

    The weights of the first output projection lie as published, [groups * group_rank, heads of a group * C].
    """

    spec: CompressedSpec
    model_dim: int
    norm_eps: float
    policy: Policy

    @nn.compact
    def __call__(self, x_BTD: Array, inputs: Inputs) -> Mixed:
        """Projects, pools, selects where there is an indexer, and attends."""
        s, p, window = self.spec, self.policy, inputs.window
        own = declare_queries(self, s, self.model_dim, p)
        low_BTR, q_BTHC = queries_of(x_BTD, inputs.position_BT, own, self.norm_eps, s, p)
        kv = declare_keys(self, s, self.model_dim, p)
        kv_BT1C = keys_of(x_BTD, inputs.position_BT, kv, self.norm_eps, s, p)
        sinks_H = declare(self, p, SINKS, (s.heads,))
        x_BTD, low_BTR, q_BTHC, kv_BT1C = (unpack(x, window) for x in (x_BTD, low_BTR, q_BTHC, kv_BT1C))
        inputs, entry_BNC, kept_BTN = inputs.unpack(), None, None
        if (cache := inputs.cache_window) is not None:
            inputs = replace(
                inputs, memory=inputs.memory | {"kv": write(inputs.memory["kv"], s.streams["kv"], cache, kv_BT1C)}
            )
        if s.compressor is not None:
            compressor = Compressor(s.compressor, self.model_dim, self.norm_eps, p, name="compressor")
            entry_BNC, memory = compressor(x_BTD, inputs)
            inputs = replace(inputs, memory=memory)
        if s.index is not None:
            indexer = EntryIndexer(s.index, self.model_dim, self.norm_eps, p, name="indexer")
            kept_BTN, memory = indexer(x_BTD, low_BTR, inputs)
            inputs = replace(inputs, memory=memory)
        if cache is None:
            assert not isinstance(kept_BTN, Chosen), "kernels choose of a cache"
            out = _among_themselves(q_BTHC, kv_BT1C, entry_BNC, kept_BTN, sinks_H, s)
        else:
            inputs = replace(inputs, selection=kept_BTN).of_outputs()
            out = _over_cache(take_outputs(q_BTHC, window), inputs, sinks_H, s, p)
        out, position_BT = pack(out, window), pack(inputs.position_BT, window)
        weights = declare_outputs(self, s, self.model_dim, p)
        return Mixed(project_groups(rotate(out, position_BT, s.rope, back=True), weights, s, p), inputs.memory)


def declare_queries(module: nn.Module, spec: CompressedSpec, model_dim: int, policy: Policy) -> tuple[Any, Array, Any]:
    """Declares the parameters of queries."""
    rank = spec.query_rank
    return (
        declare(module, policy, Q_A, (model_dim, rank)),
        declare(module, policy, Q_NORM, (rank,)),
        declare(module, policy, Q_B, (rank, spec.heads, spec.head_dim)),
    )


def queries_of(
    x_BTD: Array, position_BT: Array, weights: tuple[Any, Array, Any], norm_eps: float, spec: CompressedSpec,
    policy: Policy,
) -> tuple[Array, Array]:  # fmt: skip
    """Returns the normalized vector that queries are products of, and the normalized and rotated queries."""
    q_a_DR, norm_R, q_b_RHC = weights
    low_BTR = rms_norm(dense(x_BTD, q_a_DR, dtype=policy.compute.dtype), norm_R, norm_eps)
    q_BTHC = dense(low_BTR, q_b_RHC, dtype=policy.compute.dtype)
    return low_BTR, rotate(rms_norm(q_BTHC, None, norm_eps), position_BT, spec.rope)


def keys_of(
    x_BTD: Array, position_BT: Array, weights: tuple[Any, Array], norm_eps: float, spec: CompressedSpec, policy: Policy
) -> Array:
    """Returns the one key that is also the value, normalized and rotated, [B, T, 1, C]."""
    kv_DC, norm_C = weights
    kv_BT1C = rms_norm(dense(x_BTD, kv_DC, dtype=policy.compute.dtype), norm_C, norm_eps)[:, :, None]
    return rotate(kv_BT1C, position_BT, spec.rope)


def declare_keys(module: nn.Module, spec: CompressedSpec, model_dim: int, policy: Policy) -> tuple[Any, Array]:
    """Declares the parameters of keys."""
    return declare(module, policy, KV, (model_dim, spec.head_dim)), declare(module, policy, KV_NORM, (spec.head_dim,))


def declare_outputs(module: nn.Module, spec: CompressedSpec, model_dim: int, policy: Policy) -> tuple[Any, Any]:
    """Declares the parameters of outputs."""
    ranks = spec.groups * spec.group_rank
    wide = spec.heads // spec.groups * spec.head_dim
    return declare(module, policy, OUT_A, (ranks, wide)), declare(module, policy, OUT_B, (ranks, model_dim))


def project_groups(out_BTHC: Array, weights: tuple[Any, Any], spec: CompressedSpec, policy: Policy) -> Array:
    """Projects each group of heads by itself, then all groups together."""
    s, compute, (rows, count) = spec, policy.compute, out_BTHC.shape[:2]
    out_a_XC, out_b_XD = weights
    x_BTGC = out_BTHC.reshape(rows, count, s.groups, -1)
    w_GRC = widen(out_a_XC, compute.dtype).reshape(s.groups, s.group_rank, -1)
    low_BTGR = per_head_dense(x_BTGC, w_GRC, contract=2, dtype=compute.dtype, apart=compute.splits_rows)
    return dense(low_BTGR.reshape(rows, count, -1), out_b_XD, dtype=compute.dtype)


def _among_themselves(
    q_BTHC: Array,
    kv_BT1C: Array,
    entry_BNC: Array | None,
    kept_BTN: Array | None,
    sinks_H: Array,
    spec: CompressedSpec,
) -> Array:
    """Computes attention of whole sequences to themselves and to their entries."""
    scale = spec.head_dim**-0.5
    if spec.compressor is None or entry_BNC is None:
        return attend_self(q_BTHC, kv_BT1C, kv_BT1C, scale=scale, span=spec.window, sinks_H=sinks_H)
    position_1T = jnp.arange(q_BTHC.shape[1], dtype=jnp.int32)[None]
    near = positions_seen(position_1T, jnp.int32(0), position_1T.shape[1], spec.window)
    far = entries_seen(position_1T, 0, entry_BNC.shape[1], spec.compressor.ratio)
    far = far if kept_BTN is None else far & kept_BTN
    near = jnp.broadcast_to(near, (far.shape[0], *near.shape[1:]))
    both = jnp.concatenate([kv_BT1C, entry_BNC[:, :, None]], axis=1)
    seen = jnp.concatenate([near, far], axis=2)
    return attend_self(q_BTHC, both, both, scale=scale, seen_BTS=seen, sinks_H=sinks_H)


def _over_cache(q_BTHC: Array, inputs: Inputs, sinks_H: Array, spec: CompressedSpec, policy: Policy) -> Array:
    """Computes attention over the cached window and the cached entries, those of this forward written."""
    window, cache, position_BT, scale = inputs.cache_window, inputs.memory, inputs.position_BT, spec.head_dim**-0.5
    assert window is not None, "asked of layers with a cache"
    (rows, count), streams = position_BT.shape, spec.streams
    if spec.compressor is None:
        return attend_cached(
            q_BTHC, (cache["kv"], None), inputs, streams["kv"], policy, scale=scale, span=spec.window, sinks=sinks_H
        )
    stream, ratio = streams["entry"], spec.compressor.ratio
    chosen = Chosen(None, (position_BT + 1) // ratio) if inputs.selection is None else inputs.selection
    if isinstance(chosen, Chosen):
        recent = Recent(cache["kv"], position_BT, spec.window)
        out = attend_chosen(
            q_BTHC, cache["entry"], chosen, stream, window, policy, scale=scale, value_width=spec.head_dim,
            recent=recent, sinks_H=sinks_H,
        )  # fmt: skip
        if out is not None:
            return out
    kept_BTN = mask_of(inputs.selection, cache["entry"], stream, window)

    def near(index: Array) -> tuple[Array, Array, Array]:
        kv = read_block(cache["kv"], streams["kv"], window, index, rows)
        return kv, kv, positions_seen(position_BT, index, window.block, spec.window)

    size = entry_block(stream, window.block)

    def far(index: Array) -> tuple[Array, Array, Array]:
        kv = read_block(cache["entry"], stream, window, index, rows)
        seen_BTZ = entries_seen(position_BT, index * size, size, ratio)
        if kept_BTN is not None:
            seen_BTZ &= lax.dynamic_slice_in_dim(kept_BTN, index * size, size, axis=2)
        return kv, kv, seen_BTZ

    sources = [
        Source(*blocks_in_reach(window, count, spec.window), near),
        Source(0, blocks_of_entries(window, count, stream), far),
    ]
    return attend(
        q_BTHC, sources, kv_heads=1, value_width=spec.head_dim, scale=scale, dtype=policy.compute.dtype, sinks_H=sinks_H
    )
