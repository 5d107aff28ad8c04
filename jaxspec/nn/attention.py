"""Grouped-query attention: projections, query and key norms, rotation, windows and sinks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import flax.linen as nn

from jaxspec.cache.addressing import LayerCache, StreamSpec, write
from jaxspec.cache.tree_reads import read_block
from jaxspec.cache.window import AnyWindow, Window, pack, segments_of, take_outputs, unpack
from jaxspec.nn.attend import Source, attend, attend_self, blocks_in_reach, positions_seen, readers
from jaxspec.nn.attention_kernel import attend_by_kernel
from jaxspec.nn.dense import dense
from jaxspec.nn.norm import rms_norm
from jaxspec.nn.policy import Policy, matrix, weight
from jaxspec.nn.rope import RopeSpec, rotate
from jaxspec.nn.unrolled import Unrolled, attend_unrolled
from jaxspec.shapes import Array

ZEROS, ONES = nn.initializers.zeros, nn.initializers.ones
Memory = LayerCache | Unrolled


@dataclass(frozen=True)
class AttentionSpec:
    """One attention layer.

    Attributes:
      heads, kv_heads, head_dim: H, G and C.
      rope: rotation of queries and keys, None where positions are learned.
      qkv_bias, out_bias: whether the projections have biases.
      qk_norm: ``head`` normalises each query and key head before rotation, ``full`` the whole projection.
      window: keys that a query sees, itself included; None for all.
      sinks: whether each head has a logit that takes probability and has no value.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    window: int | None = None
    sinks: bool = False

    @property
    def streams(self) -> dict[str, StreamSpec]:
        """What it caches."""
        one = StreamSpec(self.kv_heads, self.head_dim, None if self.window is None else self.window - 1)
        return {"k": one, "v": one}


class Attention(nn.Module):
    """Projections around ``attend``; query, key and value weights of one kv head lie together, [X, G, R + 2, C].

    The input may be wider than the output (EAGLE-3 joins two vectors there).
    """

    spec: AttentionSpec
    model_dim: int
    norm_eps: float
    policy: Policy

    @nn.compact
    def __call__(
        self,
        x_BTX: Array,
        position_BT: Array,
        cache: Memory | None,
        window: AnyWindow,
        shared: Array | None = None,
    ) -> tuple[Array, Memory | None, Array | None]:
        """Attention output [B, T, D] of the positions asked for, the memory with all, and ``shared`` as it came."""
        s, p = self.spec, self.policy
        q_BTHC, k_BTGC, v_BTGC = (unpack(x, window) for x in self._project(x_BTX, position_BT))
        position_BT = unpack(position_BT, window)
        sinks_H = weight(self, p, "sinks_H", (s.heads,)) if s.sinks else None
        scale = s.head_dim**-0.5
        if isinstance(cache, Unrolled):
            cache = cache.append(k_BTGC, v_BTGC)
            out = attend_unrolled(q_BTHC, cache, scale=scale, span=s.window)
        elif cache is None or not isinstance(window, Window):
            out = attend_self(
                q_BTHC, k_BTGC, v_BTGC, scale=scale, span=s.window, sinks_H=sinks_H, segment_BT=segments_of(window)
            )
        else:
            streams = s.streams
            new = {"k": k_BTGC, "v": v_BTGC}
            cache = {name: write(cache[name], streams[name], window, new[name]) for name in new}
            pages = cache["k"], cache["v"]
            q_BTHC, position_BT, window = (
                take_outputs(q_BTHC, window),
                take_outputs(position_BT, window),
                window.after_write,
            )
            out = attend_by_kernel(
                q_BTHC, pages, position_BT, streams["k"], window, p, scale=scale, span=s.window, sinks_H=sinks_H
            )
            if out is None:
                out = attend(
                    q_BTHC, [source_of(cache, streams, window, position_BT, s.window)], kv_heads=s.kv_heads,
                    value_width=s.head_dim, scale=scale, dtype=p.compute.dtype, sinks_H=sinks_H,
                    tree=window.path_BTJ is not None,
                )  # fmt: skip
        w_o = matrix(self, p, "out_HCD", (s.heads, s.head_dim, self.model_dim))
        b_o = weight(self, p, "out_bias_D", (self.model_dim,), ZEROS) if s.out_bias else None
        return dense(pack(out, window), w_o, b_o, dtype=p.compute.dtype, axes=2), cache, shared

    def _project(self, x_BTX: Array, position_BT: Array) -> tuple[Array, Array, Array]:
        s, p = self.spec, self.policy
        group = s.heads // s.kv_heads
        shape = (x_BTX.shape[-1], s.kv_heads, group + 2, s.head_dim)
        qkv_DGQC = matrix(self, p, "qkv_DGQC", shape)
        bias = weight(self, p, "qkv_bias_GQC", shape[1:], ZEROS) if s.qkv_bias else None
        qkv = dense(x_BTX, qkv_DGQC, bias, dtype=p.compute.dtype)
        q = qkv[..., :group, :].reshape(*x_BTX.shape[:2], s.heads, s.head_dim)
        k, v = qkv[..., group, :], qkv[..., group + 1, :]
        if s.qk_norm != "none":
            whole = s.qk_norm == "full"
            names = ("q_norm_HC", "k_norm_GC") if whole else ("q_norm_C", "k_norm_C")
            q, k = (self._normed(x, name, whole) for x, name in zip((q, k), names, strict=True))
        if s.rope is not None:
            q, k = rotate(q, position_BT, s.rope), rotate(k, position_BT, s.rope)
        return q, k, v

    def _normed(self, x_BTHC: Array, name: str, whole: bool) -> Array:
        shape = x_BTHC.shape[2:] if whole else x_BTHC.shape[3:]
        scale = weight(self, self.policy, name, shape, ONES).reshape(-1)
        flat = x_BTHC.reshape(*x_BTHC.shape[:2], -1) if whole else x_BTHC
        return rms_norm(flat, scale, self.norm_eps).reshape(x_BTHC.shape)


def source_of(
    cache: LayerCache, streams: Mapping[str, StreamSpec], window: Window, position_BT: Array, span: int | None
) -> Source:
    """Cached keys and values as something to attend to, of which a query sees up to ``span`` positions."""
    rows, count = position_BT.shape
    position_XT = readers(window, position_BT)

    def load(index: Array) -> tuple[Array, Array, Array]:
        k, v = (read_block(cache[name], streams[name], window, index, rows) for name in ("k", "v"))
        return k, v, positions_seen(position_XT, index, window.block, span)

    return Source(*blocks_in_reach(window, count, span), load)
