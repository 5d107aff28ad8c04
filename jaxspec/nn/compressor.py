"""Runs of positions pooled into one entry each, from a ring that keeps what every position adds (DeepSeek-V4)."""

from dataclasses import dataclass

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.cache.addressing import LayerCache, StreamSpec, entry_block, read, write
from jaxspec.cache.window import Window
from jaxspec.nn.attend import MASKED
from jaxspec.nn.dense import exact_dense
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.norm import rms_norm
from jaxspec.nn.param import Param, declare
from jaxspec.nn.policy import Policy
from jaxspec.nn.rope import RopeSpec, rotate
from jaxspec.nn.steady import exp, row_dot, row_sum
from jaxspec.shapes import Array

KV_GATE = Param("kv_gate_D2X", ("embed", "kv_gate", "channels"))
PLACE = Param("place_TX", ("window", "channels"), "weight", dtype=jnp.float32)
NORM = Param("norm_C", ("head_dim",), "norm")


@dataclass(frozen=True)
class CompressorSpec:
    """How positions become entries; entry w stands for the positions of window w, ``w * ratio`` onwards.

    Attributes:
      ratio: positions per window.
      head_dim: C of an entry.
      rope: rotation of an entry, by the first position of its window.
      overlaps: whether an entry also pools the window before its own, from channels of their own.
    """

    ratio: int
    head_dim: int
    rope: RopeSpec
    overlaps: bool = False

    @property
    def windows(self) -> int:
        """Windows that one entry pools."""
        return 2 if self.overlaps else 1

    @property
    def raw(self) -> StreamSpec:
        """Stream of what each position adds, values and then gates, kept while an entry may have to be pooled of it."""
        return StreamSpec(1, 2 * self.windows * self.head_dim, self.windows * self.ratio - 1, dtype="float32")

    @property
    def entries(self) -> StreamSpec:
        """Stream of the entries."""
        return StreamSpec(1, self.head_dim, stride=self.ratio)

    def touched(self, count: int) -> int:
        """Most windows that ``count`` consecutive positions lie in."""
        return (count + self.ratio - 2) // self.ratio + 1


class Compressor(nn.Module):
    """Pools values by a softmax of gates over the window, each channel by itself, all of it in float32.

    Every forward pools the entries of all windows that it touches once more. Those of unfinished windows are not
    visible, and by the time that they are, a later forward has pooled them from what was accepted: a rejected draft
    leaves no trace.
    """

    spec: CompressorSpec
    model_dim: int
    norm_eps: float
    policy: Policy

    @nn.compact
    def __call__(self, x_BTD: Array, inputs: Inputs, prefix: str = "") -> tuple[Array | None, LayerCache | None]:
        """Pools what T positions complete.

        Args:
          x_BTD: input of the attention layer.
          inputs: of the layer, in rows; without a cache, positions are 0 onwards and it pools the T tokens alone.
          prefix: of the names of this compressor's streams.

        Returns:
          Without a cache the complete entries [B, N, C]; with one, the cache with the new entries.
        """
        s, p, position_BT, cache = self.spec, self.policy, inputs.position_BT, inputs.memory
        kv_gate_D2X = declare(self, p, KV_GATE, (self.model_dim, 2, s.windows * s.head_dim))
        place_TX = declare(self, p, PLACE, (s.ratio, s.windows * s.head_dim))
        norm_C = declare(self, p, NORM, (s.head_dim,))
        both_BT2X = exact_dense(x_BTD, kv_gate_D2X, dtype=p.compute.dtype)
        gate_BTX = both_BT2X[..., 1, :] + place_TX[position_BT % s.ratio]
        raw_BT1X = jnp.concatenate([both_BT2X[..., 0, :], gate_BTX], axis=-1)[:, :, None]
        rows, count = position_BT.shape
        earlier = (s.windows - 1) * s.ratio  # positions of the window before, which an entry may pool too
        if (window := inputs.cache_window) is None:
            whole = count // s.ratio * s.ratio
            raw_BPX = jnp.pad(raw_BT1X[:, :whole, 0], ((0, 0), (earlier, 0), (0, 0)))
            return self._pooled(raw_BPX, jnp.zeros(rows, jnp.int32), norm_C), None
        raw, entries = f"{prefix}raw", f"{prefix}entry"
        pages_PGZX = write(cache[raw], s.raw, window, raw_BT1X)
        touched, first_B = s.touched(count), window.first_B // s.ratio

        def pool() -> Array:
            place_P = jnp.arange(-earlier, touched * s.ratio, dtype=jnp.int32)
            raw_BPX = read(pages_PGZX, s.raw, window, first_B[:, None] * s.ratio + place_P)[:, :, 0]
            return self._pooled(raw_BPX, first_B, norm_C)

        if count < s.ratio:  # mostly no window is completed
            ends = jnp.any((window.first_B + count) // s.ratio > first_B)
            new_BNC = lax.cond(ends, pool, lambda: jnp.zeros((rows, touched, s.head_dim)))
        else:
            new_BNC = pool()
        new = {raw: pages_PGZX, entries: write(cache[entries], s.entries, window, new_BNC[:, :, None], first_B)}
        return None, cache | new

    def _pooled(self, raw_BPX: Array, first_B: Array, norm_C: Array) -> Array:
        """Entries ``first_B`` onwards, [B, N, C], of positions that begin with the first window that they pool."""
        s = self.spec
        rows, places, _ = raw_BPX.shape
        raw = raw_BPX.reshape(rows, places // s.ratio, s.ratio, 2, s.windows, s.head_dim)
        value, gate = raw[..., 0, :, :], raw[..., 1, :, :]
        number_BN = first_B[:, None] + jnp.arange(places // s.ratio - s.windows + 1, dtype=jnp.int32)
        if s.overlaps:
            value, gate = (jnp.concatenate([x[:, :-1, :, 0], x[:, 1:, :, 1]], axis=2) for x in (value, gate))
            is_there = (number_BN > 0)[..., None] | jnp.asarray(np.arange(2 * s.ratio) >= s.ratio)
        else:
            value, gate = value[..., 0, :], gate[..., 0, :]
            is_there = jnp.ones((1, 1, s.ratio), bool)
        entry_BNC = _softmax_sum(gate, value, is_there[..., None])
        entry_BNC = rms_norm(entry_BNC, norm_C, self.norm_eps)
        return rotate(entry_BNC[:, :, None], number_BN * s.ratio, s.rope)[:, :, 0]


def _softmax_sum(gate_BNZC: Array, value_BNZC: Array, is_there_BNZ1: Array) -> Array:
    """Values weighted by a softmax over the window, each channel by itself, [B, N, C]."""
    gate = jnp.where(is_there_BNZ1, gate_BNZC, MASKED)
    top = lax.stop_gradient(jnp.max(gate, axis=2, keepdims=True))
    part = jnp.where(is_there_BNZ1, exp(gate - top), 0.0)
    part_BNCZ = part.swapaxes(2, 3)
    return (row_dot(part_BNCZ, value_BNZC.swapaxes(2, 3)) / row_sum(part_BNCZ))[..., 0]


def entries_seen(position_XT: Array, first: Array | int, count: int, ratio: int) -> Array:
    """Returns which entries from ``first`` on a query sees, [X, T, count]: those whose windows end by then."""
    number_Z = first + jnp.arange(count, dtype=jnp.int32)
    return number_Z < ((position_XT + 1) // ratio)[..., None]


def blocks_of_entries(window: Window, count: int, stream: StreamSpec) -> Array:
    """Returns the number of the block after the last entry that any row sees."""
    size = entry_block(stream, window.block)
    return ((jnp.max(window.first_B) + count) // stream.stride + size - 1) // size
