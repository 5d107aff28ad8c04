"""Rotary position embedding: frequencies, scalings and the two layouts of pairs."""

import math
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np

from jaxspec.shapes import Array


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies of a longer context are derived; unused numbers keep their defaults.

    Attributes:
      kind: ``linear``, ``llama3``, ``yarn`` or ``longrope``.
      factor: ratio of the new context to the original one.
      original: original context in tokens.
      low, high: llama3 frequency factors, or yarn's beta_slow and beta_fast.
      attention_factor: multiplier on cos and sin; None takes yarn's ``0.1 ln(factor) + 1``.
      truncate: whether yarn rounds its correction range to whole dimensions.
      divisors: longrope's, of each frequency.
      longest: longest text that longrope's are for.
      beyond: what holds instead, for every position, where texts may be longer; None where that is not known.
      far: whether they may.
    """

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factor: float
    original: int = 0
    low: float = 1.0
    high: float = 4.0
    attention_factor: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    longest: int = 0
    beyond: "RopeScaling | None" = None
    far: bool = False

    @property
    def chosen(self) -> "RopeScaling":
        """Returns what holds for the texts that there may be."""
        return self.beyond if self.far and self.beyond is not None else self


@dataclass(frozen=True)
class RopeSpec:
    """Rotation of ``dim`` channels of each head.

    Attributes:
      theta: base of the frequencies.
      dim: rotated channels, even.
      interleaved: pairs are (2i, 2i + 1) instead of (i, i + dim / 2).
      last: the rotated channels are the last ones of a head instead of the first.
      turning: how many pairs turn, the first ones, at the frequencies that they have among all; None for all.
      scaling: context extension, if any.
    """

    theta: float
    dim: int
    interleaved: bool = False
    last: bool = False
    turning: int | None = None
    scaling: RopeScaling | None = None


def frequencies(spec: RopeSpec) -> tuple[np.ndarray, float]:
    """Inverse frequencies [dim / 2] and the multiplier of cos and sin (Su 2021; Llama 3; Peng 2023; Ding 2024)."""
    inv = spec.theta ** (-np.arange(0, spec.dim, 2, dtype=np.float64) / spec.dim)
    if spec.turning is not None:
        inv[spec.turning :] = 0
    if spec.scaling is None:
        return inv, 1.0
    s = spec.scaling.chosen
    if s.kind == "linear":
        return inv / s.factor, 1.0
    if s.kind == "longrope":
        return inv / np.asarray(s.divisors), s.attention_factor or 1.0
    if s.kind == "llama3":
        wave = 2 * math.pi / inv
        blend = (s.original / wave - s.low) / max(s.high - s.low, 1e-9)  # Llama 4 has no band between
        mixed = (1 - blend) * inv / s.factor + blend * inv
        return np.where(
            wave < s.original / s.high, inv, np.where(wave > s.original / s.low, inv / s.factor, mixed)
        ), 1.0

    def corrected(rotations: float) -> float:
        return spec.dim * math.log(s.original / (2 * math.pi * rotations)) / (2 * math.log(spec.theta))

    low, high = corrected(s.high), corrected(s.low)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    ramp = np.clip((np.arange(spec.dim // 2) - low) / max(high - low, 0.001), 0, 1)
    scaled = inv / s.factor * ramp + inv * (1 - ramp)
    return scaled, s.attention_factor if s.attention_factor is not None else 0.1 * math.log(s.factor) + 1


def angles(position_BT: Array, spec: RopeSpec) -> tuple[Array, Array]:
    """Cosines and sines of absolute positions, int32, [B, T, 1, dim / 2] each."""
    inv, scale = frequencies(spec)
    angle = position_BT[..., None].astype(jnp.float32) * jnp.asarray(inv, jnp.float32)
    return jnp.cos(angle)[:, :, None] * scale, jnp.sin(angle)[:, :, None] * scale


def rotate(x_BTHC: Array, position: Array | tuple[Array, Array], spec: RopeSpec, *, back: bool = False) -> Array:
    """Rotates ``spec.dim`` channels of each head by the token's position.

    Args:
      x_BTHC: float32 queries or keys.
      position: absolute positions [B, T], int32, or their ``angles``.
      spec: the rotation.
      back: rotates by the negative position, which undoes a rotation.
    """
    cos, sin = position if isinstance(position, tuple) else angles(position, spec)
    sin = -sin if back else sin
    cut = x_BTHC.shape[-1] - spec.dim if spec.last else spec.dim
    turned, rest = (x_BTHC[..., cut:], x_BTHC[..., :cut]) if spec.last else (x_BTHC[..., :cut], x_BTHC[..., cut:])
    if spec.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turned.shape)
    else:
        a, b = jnp.split(turned, 2, axis=-1)
        out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    if not rest.shape[-1]:
        return out
    return jnp.concatenate([rest, out] if spec.last else [out, rest], axis=-1)
