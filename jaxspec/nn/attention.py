"""Grouped-query attention over the cache, or over the sequence itself in training."""

from dataclasses import dataclass
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.cache.kv import LayerKV, Window, read_block, write
from jaxspec.nn.dense import dense
from jaxspec.nn.norm import rms_norm
from jaxspec.nn.rope import RopeSpec, rotate
from jaxspec.nn.steady import exp, row_sum
from jaxspec.shapes import Array

SELF_CHUNK = 64
HIDDEN = -1e30  # finite, so that a block without a visible key leaves the running softmax as it is


@dataclass(frozen=True)
class AttentionSpec:
    """One attention layer.

    Attributes:
      heads, kv_heads, head_dim: H, G and C.
      rope: rotation of queries and keys.
      qkv_bias, out_bias: whether the projections have biases.
      qk_norm: ``head`` normalises each query and key head before rotation.
      window: keys that a query sees, itself included; None for all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head"] = "none"
    window: int | None = None


class Attention(nn.Module):
    """Projections around ``attend``; query, key and value weights of one kv head lie together, [D, G, R + 2, C]."""

    spec: AttentionSpec
    model_dim: int
    norm_eps: float
    param_dtype: jnp.dtype
    dtype: jnp.dtype

    @nn.compact
    def __call__(
        self, x_BTD: Array, position_BT: Array, memory: LayerKV | None, window: Window | None
    ) -> tuple[Array, LayerKV | None]:
        """Attention output [B, T, D] and the cache with the new positions."""
        s = self.spec
        group = s.heads // s.kv_heads
        init = nn.initializers.normal(0.02)
        shape = (self.model_dim, s.kv_heads, group + 2, s.head_dim)
        qkv_DGQC = self.param("qkv_DGQC", init, shape, self.param_dtype)
        bias = self.param("qkv_bias_GQC", nn.initializers.zeros, shape[1:], self.param_dtype) if s.qkv_bias else None
        qkv = dense(x_BTD, qkv_DGQC, bias, dtype=self.dtype)
        q, k, v = qkv[..., :group, :], qkv[..., group, :], qkv[..., group + 1, :]
        if s.qk_norm == "head":
            scale = (s.head_dim,)
            q = rms_norm(q, self.param("q_norm_C", nn.initializers.ones, scale, self.param_dtype), self.norm_eps)
            k = rms_norm(k, self.param("k_norm_C", nn.initializers.ones, scale, self.param_dtype), self.norm_eps)
        rows, count = position_BT.shape
        q_BTHC = rotate(q.reshape(rows, count, s.heads, s.head_dim), position_BT, s.rope)
        k_BTGC = rotate(k, position_BT, s.rope)
        if memory is None or window is None:
            out, memory = attend_self(q_BTHC, k_BTGC, v, s), None
        else:
            memory = write(memory, window, k_BTGC, v)
            out = attend(q_BTHC, memory, window, position_BT, s)
        w_o = self.param("out_HCD", init, (s.heads, s.head_dim, self.model_dim), self.param_dtype)
        b_o = (
            self.param("out_bias_D", nn.initializers.zeros, (self.model_dim,), self.param_dtype) if s.out_bias else None
        )
        return dense(out.reshape(rows, count, -1), w_o.reshape(-1, self.model_dim), b_o, dtype=self.dtype), memory


def attend_self(q_BTHC: Array, k_BTGC: Array, v_BTGC: Array, spec: AttentionSpec) -> Array:
    """Causal attention of a whole sequence to itself (training and teacher forcing), float32 [B, T, H, C].

    Queries go in chunks that skip the keys behind them: half the work, and heads-major products that XLA:CPU runs
    3 times faster than an einsum over the sequence.
    """
    rows, count, heads, width = q_BTHC.shape
    kv, group = spec.kv_heads, heads // spec.kv_heads
    q = (q_BTHC * width**-0.5).reshape(rows, count, kv, group, width).transpose(0, 2, 3, 1, 4)
    k_XTC = k_BTGC.swapaxes(1, 2).reshape(rows * kv, count, width)
    v_XTC = v_BTGC.swapaxes(1, 2).reshape(rows * kv, count, width)
    outs = []
    for first in range(0, count, SELF_CHUNK):
        chunk = q[:, :, :, first : first + SELF_CHUNK]
        size = chunk.shape[3]
        end = first + size
        q_XQC = chunk.reshape(rows * kv, group * size, width)
        score = jnp.einsum("xqc,xsc->xqs", q_XQC, k_XTC[:, :end], precision=lax.Precision.HIGHEST)
        distance = np.arange(first, end)[:, None] - np.arange(end)[None]
        seen = jnp.asarray((distance >= 0) & (distance < (spec.window or count)))
        score = jnp.where(seen, score.reshape(rows * kv, group, size, end), HIDDEN)
        prob = jax.nn.softmax(score, axis=-1).reshape(rows * kv, group * size, end)
        out = jnp.einsum("xqs,xsc->xqc", prob, v_XTC[:, :end], precision=lax.Precision.HIGHEST)
        outs.append(out.reshape(rows, kv, group, size, width))
    return jnp.concatenate(outs, axis=3).transpose(0, 3, 1, 2, 4).reshape(rows, count, heads, width)


def attend(q_BTHC: Array, memory: LayerKV, window: Window, position_BT: Array, spec: AttentionSpec) -> Array:
    """Attention of T provisional positions per row to the committed ones and to their own ancestors.

    The cache is read in blocks of ``window.block`` positions up to the longest row, with a running softmax (Milakov
    2018), so the cost follows the context and not the capacity, and a row's result does not depend on T or on other
    rows: blocks are aligned to position 0 and a block in which a row sees nothing leaves its sums unchanged. Each node
    of a tree reads its ancestors at their depths, as plain decoding would have stored them: sums over other places
    would round differently.

    Returns:
      float32 [B, T, H, C].
    """
    rows, count, heads, width = q_BTHC.shape
    kv, group = spec.kv_heads, heads // spec.kv_heads
    readers, each = (rows, count) if window.ancestors is None else (rows * count, 1)
    q = (q_BTHC * width**-0.5).reshape(readers, each, kv, group, width).transpose(0, 2, 3, 1, 4)
    q_XGQC = q.reshape(readers, kv, group * each, width).astype(memory.dtype)
    padded = max(group * each, 2)  # one-row products round differently
    q_XGQC = jnp.pad(q_XGQC, ((0, 0), (0, 0), (0, padded - group * each), (0, 0)))
    position_XQ = jnp.tile(position_BT.reshape(readers, each), (1, -(-padded // each)))[:, :padded]
    blocks = (jnp.max(window.first_B) + count + window.block - 1) // window.block

    def visit(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = carry
        k_XGZC = read_block(memory.k_PGZC, window, index, rows)
        v_XGZC = read_block(memory.v_PGZC, window, index, rows)
        score = jnp.einsum("xgqc,xgzc->xgqz", q_XGQC, k_XGZC, preferred_element_type=jnp.float32)
        slot_Z = index * window.block + jnp.arange(window.block, dtype=jnp.int32)
        seen = slot_Z <= position_XQ[..., None]
        if spec.window is not None:
            seen &= slot_Z > position_XQ[..., None] - spec.window
        seen = seen[:, None]
        new_top = jnp.maximum(top, jnp.max(jnp.where(seen, score, HIDDEN), axis=-1))
        prob = jnp.where(seen, exp(score - new_top[..., None]), 0.0)
        keep = exp(top - new_top)
        added = jnp.einsum("xgqz,xgzc->xgqc", prob.astype(memory.dtype), v_XGZC, preferred_element_type=jnp.float32)
        return new_top, total * keep + row_sum(prob)[..., 0], out * keep[..., None] + added

    shape = (readers, kv, padded)
    start = (jnp.full(shape, HIDDEN), jnp.zeros(shape), jnp.zeros((*shape, width)))
    _, total, out = lax.fori_loop(0, blocks, visit, start)
    out = (out / jnp.maximum(total, 1e-30)[..., None])[:, :, : group * each]
    return out.reshape(readers, kv, group, each, width).transpose(0, 3, 1, 2, 4).reshape(q_BTHC.shape)
