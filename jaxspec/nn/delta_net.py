"""Gated delta nets (Yang 2024, 2412.06464) as Qwen3-Next has them, and Kimi's with a decay per channel (2510.26692)."""

from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.cache.window import pack, take_outputs, unpack
from jaxspec.nn.dense import dense
from jaxspec.nn.inputs import Inputs, Mixed
from jaxspec.nn.norm import rms_norm
from jaxspec.nn.param import Param, declare
from jaxspec.nn.policy import Policy
from jaxspec.nn.recurrence import OUT, Recurrence, RecurrentMixer, RecurrentSpec, run_recurrence
from jaxspec.nn.recurrent_steps import Steps
from jaxspec.nn.steady import exp, row_dot, sigmoid, silu, softplus
from jaxspec.shapes import Array

UNIT_EPS = 1e-6  # fixed in the references

# Queries, keys, values and gates of all value heads of a key head lie together, or those of all heads.
GROUPED = Param("qkvz_DGX", ("embed", "key_heads", "channels")), Param("ba_DGX", ("embed", "key_heads", "channels"))
FLAT = Param("qkv_DX", ("embed", "channels")), Param("z_DX", ("embed", "channels"))
FLAT_GATES = Param("ba_D2H", ("embed", "gates", "value_heads"))
CONV = Param("conv_X1K", ("channels", "one", "taps"), "weight")
DECAY = Param("decay_H", ("value_heads",), "weight", dtype=jnp.float32)
DECAY_BIAS = Param("decay_bias_H", ("value_heads",), "bias", dtype=jnp.float32)
NORM = Param("out_norm_C", ("head_dim",), "norm")


@dataclass(frozen=True)
class DeltaNetSpec(RecurrentMixer):
    """One layer.

    Attributes:
      key_heads, value_heads: G and H; a key head serves H / G value heads that follow each other.
      key_dim, value_dim: N and C.
      taps: positions that the convolution of queries, keys and values spans.
      grouped: whether the projections' outputs lie by key head.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    grouped: bool = False

    @property
    def recurrence(self) -> RecurrentSpec:
        """Returns the sizes of its state: queries, keys and values are convolved, two gates per head are not."""
        channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        return RecurrentSpec(self.value_heads, self.key_dim, self.value_dim, channels, self.taps, 2 * self.value_heads)


class DeltaNet(nn.Module):
    """Queries and keys of unit length; what is read is normalized per head, then gated by SiLU."""

    spec: DeltaNetSpec
    model_dim: int
    norm_eps: float
    policy: Policy

    @nn.compact
    def __call__(self, x_BTD: Array, inputs: Inputs) -> Mixed:
        """Projects, convolves and runs the recurrence."""
        s, p, window = self.spec, self.policy, inputs.window
        raw_BTX, z_BTHC = self._project(x_BTD)
        rate_H = -exp(declare(self, p, DECAY, (s.value_heads,)))
        bias_H = declare(self, p, DECAY_BIAS, (s.value_heads,))
        conv_X1K = declare(self, p, CONV, (s.recurrence.channels, 1, s.taps))
        layer = Recurrence(s.recurrence, partial(self._steps, rate_H, bias_H), conv_X1K, compute=p.compute)
        out, memory = run_recurrence(unpack(raw_BTX, window), layer, inputs.unpack())
        out = pack(take_outputs(out, window), window)
        out = rms_norm(out, declare(self, p, NORM, (s.value_dim,)), self.norm_eps) * silu(take_outputs(z_BTHC, window))
        out_HCD = declare(self, p, OUT, (s.value_heads, s.value_dim, self.model_dim))
        return Mixed(dense(out, out_HCD, dtype=p.compute.dtype, axes=2), memory)

    def _project(self, x_BTD: Array) -> tuple[Array, Array]:
        """Channels q, k, v of all heads with the two gates of each, and what gates the output."""
        s, p, dim = self.spec, self.policy, self.model_dim
        lead, each = x_BTD.shape[:2], s.value_heads // s.key_heads
        sizes = (s.key_dim, s.key_dim, each * s.value_dim)
        if s.grouped:
            qkvz_DGX, ba_DGX = GROUPED
            both = dense(
                x_BTD, declare(self, p, qkvz_DGX, (dim, s.key_heads, sum(sizes) + sizes[2])), dtype=p.compute.dtype
            )
            gates = dense(x_BTD, declare(self, p, ba_DGX, (dim, s.key_heads, 2 * each)), dtype=p.compute.dtype)
            cuts = (sizes[0], 2 * sizes[0], sum(sizes))
            *qkv, z = jnp.split(both, cuts, axis=-1)
            parts = [*qkv, gates[..., :each], gates[..., each:]]
        else:
            qkv_DX, z_DX = FLAT
            qkv = dense(x_BTD, declare(self, p, qkv_DX, (dim, s.recurrence.channels)), dtype=p.compute.dtype)
            z = dense(x_BTD, declare(self, p, z_DX, (dim, s.value_heads * s.value_dim)), dtype=p.compute.dtype)
            gates = dense(x_BTD, declare(self, p, FLAT_GATES, (dim, 2, s.value_heads)), dtype=p.compute.dtype)
            parts = [qkv, gates]
        raw_BTX = jnp.concatenate([part.reshape(*lead, -1) for part in parts], axis=-1)
        return raw_BTX, z.reshape(*lead, s.value_heads, s.value_dim)

    def _steps(self, rate_H: Array, bias_H: Array, qkv_BTX: Array, gates_BTX: Array) -> Steps:
        s, lead = self.spec, qkv_BTX.shape[:2]
        keys = s.key_heads * s.key_dim
        q, k, v = jnp.split(qkv_BTX, [keys, 2 * keys], axis=-1)
        q, k = (unit(x.reshape(*lead, s.key_heads, s.key_dim)) for x in (q, k))
        strength, drift = jnp.split(gates_BTX, 2, axis=-1)
        decay = exp(rate_H * softplus(drift + bias_H))
        value = v.reshape(*lead, s.value_heads, s.value_dim)
        return Steps(q * s.key_dim**-0.5, k, value, decay[..., None], sigmoid(strength)[..., None])


def unit(x: Array) -> Array:
    """Returns vectors of unit length along the last axis."""
    return x / jnp.sqrt(row_dot(x, x) + UNIT_EPS)
