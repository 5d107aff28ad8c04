"""DeepSeek-V4's attention: one shared key that is also the value, over a window and over compressed entries."""

from dataclasses import dataclass

import flax.linen as nn
import jax.numpy as jnp
from jax import lax

from jaxspec.cache.addressing import StreamSpec, entry_block, write
from jaxspec.cache.tree_reads import read_block
from jaxspec.cache.window import pack, take_outputs, unpack
from jaxspec.nn.attend import Source, attend, attend_self, blocks_in_reach, positions_seen
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
        low_BTR, q_BTHC = self._queries(x_BTD, inputs.position_BT)
        kv_DC = declare(self, p, KV, (self.model_dim, s.head_dim))
        norm_C = declare(self, p, KV_NORM, (s.head_dim,))
        kv_BT1C = rms_norm(dense(x_BTD, kv_DC, dtype=p.compute.dtype), norm_C, self.norm_eps)[:, :, None]
        kv_BT1C = rotate(kv_BT1C, inputs.position_BT, s.rope)
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
            out = _among_themselves(q_BTHC, kv_BT1C, entry_BNC, kept_BTN, sinks_H, s)
        else:
            inputs = replace(inputs, selection=kept_BTN).of_outputs()
            out = _over_cache(take_outputs(q_BTHC, window), inputs, sinks_H, s, p.compute.dtype)
        out, position_BT = pack(out, window), pack(inputs.position_BT, window)
        return Mixed(self._project(rotate(out, position_BT, s.rope, back=True)), inputs.memory)

    def _queries(self, x_BTD: Array, position_BT: Array) -> tuple[Array, Array]:
        """The normalized vector that queries are products of, and the normalized and rotated queries."""
        s, p = self.spec, self.policy
        low_BTR = dense(x_BTD, declare(self, p, Q_A, (self.model_dim, s.query_rank)), dtype=p.compute.dtype)
        low_BTR = rms_norm(low_BTR, declare(self, p, Q_NORM, (s.query_rank,)), self.norm_eps)
        q_BTHC = dense(low_BTR, declare(self, p, Q_B, (s.query_rank, s.heads, s.head_dim)), dtype=p.compute.dtype)
        return low_BTR, rotate(rms_norm(q_BTHC, None, self.norm_eps), position_BT, s.rope)

    def _project(self, out_BTHC: Array) -> Array:
        """Each group of heads by itself, then all groups together."""
        s, p = self.spec, self.policy
        rows, count = out_BTHC.shape[:2]
        wide = s.heads // s.groups * s.head_dim
        out_a_XC = widen(declare(self, p, OUT_A, (s.groups * s.group_rank, wide)), p.compute.dtype)
        out_b_XD = declare(self, p, OUT_B, (s.groups * s.group_rank, self.model_dim))
        x_BTGC = out_BTHC.reshape(rows, count, s.groups, wide)
        w_GRC = out_a_XC.reshape(s.groups, s.group_rank, wide)
        low_BTGR = per_head_dense(x_BTGC, w_GRC, contract=2, dtype=p.compute.dtype, apart=p.compute.splits_rows)
        return dense(low_BTGR.reshape(rows, count, -1), out_b_XD, dtype=p.compute.dtype)


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


def _over_cache(q_BTHC: Array, inputs: Inputs, sinks_H: Array, spec: CompressedSpec, dtype: jnp.dtype) -> Array:
    """Computes attention over the cached window and the cached entries, those of this forward written."""
    window, cache, kept_BTN, position_BT = inputs.cache_window, inputs.memory, inputs.selection, inputs.position_BT
    assert window is not None, "asked of layers with a cache"
    (rows, count), streams = position_BT.shape, spec.streams

    def near(index: Array) -> tuple[Array, Array, Array]:
        kv = read_block(cache["kv"], streams["kv"], window, index, rows)
        return kv, kv, positions_seen(position_BT, index, window.block, spec.window)

    sources = [Source(*blocks_in_reach(window, count, spec.window), near)]
    if spec.compressor is not None:
        stream, ratio = streams["entry"], spec.compressor.ratio
        size = entry_block(stream, window.block)

        def far(index: Array) -> tuple[Array, Array, Array]:
            kv = read_block(cache["entry"], stream, window, index, rows)
            seen_BTZ = entries_seen(position_BT, index * size, size, ratio)
            if kept_BTN is not None:
                seen_BTZ &= lax.dynamic_slice_in_dim(kept_BTN, index * size, size, axis=2)
            return kv, kv, seen_BTZ

        sources.append(Source(0, blocks_of_entries(window, count, stream), far))
    return attend(
        q_BTHC, sources, kv_heads=1, value_width=spec.head_dim, scale=spec.head_dim**-0.5, dtype=dtype,
        sinks_H=sinks_H,
    )  # fmt: skip
