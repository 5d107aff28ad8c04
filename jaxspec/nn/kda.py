"""Kimi delta attention (Kimi Linear, 2510.26692): the gated delta rule with a decay of its own per key channel."""

from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.cache.window import pack, take_outputs, unpack
from jaxspec.nn.delta_net import NORM, unit
from jaxspec.nn.dense import dense
from jaxspec.nn.inputs import Inputs, Mixed
from jaxspec.nn.norm import rms_norm
from jaxspec.nn.param import Param, declare
from jaxspec.nn.policy import Policy
from jaxspec.nn.recurrence import OUT, Recurrence, RecurrentMixer, RecurrentSpec, run_recurrence
from jaxspec.nn.recurrent_steps import Steps
from jaxspec.nn.steady import exp, sigmoid, softplus
from jaxspec.shapes import Array

QKV = Param("qkv_D3X", ("embed", "qkv", "channels"))
CONV = Param("conv_3X1K", ("qkv", "channels", "one", "taps"), "weight")
STRENGTH = Param("strength_DH", ("embed", "value_heads"))
DRIFT, DRIFT_A = Param("drift_DX", ("embed", "channels")), Param("drift_a_DR", ("embed", "rank"))
DRIFT_B = Param("drift_b_RX", ("rank", "channels"))
GATE, GATE_A = Param("gate_DX", ("embed", "channels")), Param("gate_a_DR", ("embed", "rank"))
GATE_B = Param("gate_b_RX", ("rank", "channels"))
DECAY = Param("decay_H", ("value_heads",), "weight", dtype=jnp.float32)
DECAY_BIAS = Param("decay_bias_X", ("channels",), "bias", dtype=jnp.float32)


@dataclass(frozen=True)
class KdaSpec(RecurrentMixer):
    """One layer.

    Attributes:
      heads, head_dim: H and C, of keys and values.
      taps: positions that the convolutions of queries, keys and values span.
      rank: width of what decays and output gates are products of, None where they come straight from the input.
      lower_bound: of the logarithm of a decay, which is then a sigmoid's share of it; None for a softplus without one.
    """

    heads: int
    head_dim: int
    taps: int
    rank: int | None = None
    lower_bound: float | None = None

    @property
    def recurrence(self) -> RecurrentSpec:
        """Returns the sizes of its state: gates are a drift per channel and a strength per head."""
        wide = self.heads * self.head_dim
        return RecurrentSpec(self.heads, self.head_dim, self.head_dim, 3 * wide, self.taps, wide + self.heads)


class Kda(nn.Module):
    """What is read is normalized per head, then gated by a sigmoid."""

    spec: KdaSpec
    model_dim: int
    norm_eps: float
    policy: Policy

    @nn.compact
    def __call__(self, x_BTD: Array, inputs: Inputs) -> Mixed:
        """Projects, convolves and runs the recurrence."""
        s, p, window, dim = self.spec, self.policy, inputs.window, self.model_dim
        wide, lead = s.heads * s.head_dim, x_BTD.shape[:2]
        qkv = dense(x_BTD, declare(self, p, QKV, (dim, 3, wide)), dtype=p.compute.dtype)
        drift = self._product(x_BTD, DRIFT, (DRIFT_A, DRIFT_B))
        strength = dense(x_BTD, declare(self, p, STRENGTH, (dim, s.heads)), dtype=p.compute.dtype)
        raw_BTX = jnp.concatenate([qkv.reshape(*lead, -1), drift, strength], axis=-1)
        factor_H = exp(declare(self, p, DECAY, (s.heads,)))
        bias_X = declare(self, p, DECAY_BIAS, (wide,))
        conv = declare(self, p, CONV, (3, wide, 1, s.taps)).reshape(3 * wide, 1, s.taps)
        layer = Recurrence(s.recurrence, partial(self._steps, factor_H, bias_X), conv, compute=p.compute)
        out, memory = run_recurrence(unpack(raw_BTX, window), layer, inputs.unpack())
        out = rms_norm(pack(take_outputs(out, window), window), declare(self, p, NORM, (s.head_dim,)), self.norm_eps)
        gate = take_outputs(self._product(x_BTD, GATE, (GATE_A, GATE_B)), window)
        out = out * sigmoid(gate).reshape(out.shape)
        return Mixed(
            dense(out, declare(self, p, OUT, (s.heads, s.head_dim, dim)), dtype=p.compute.dtype, axes=2), memory
        )

    def _product(self, x_BTD: Array, whole: Param, halves: tuple[Param, Param]) -> Array:
        s, p, wide = self.spec, self.policy, self.spec.heads * self.spec.head_dim
        if s.rank is None:
            return dense(x_BTD, declare(self, p, whole, (self.model_dim, wide)), dtype=p.compute.dtype)
        low = dense(x_BTD, declare(self, p, halves[0], (self.model_dim, s.rank)), dtype=p.compute.dtype)
        return dense(low, declare(self, p, halves[1], (s.rank, wide)), dtype=p.compute.dtype)

    def _steps(self, factor_H: Array, bias_X: Array, qkv_BTX: Array, gates_BTX: Array) -> Steps:
        s, lead = self.spec, qkv_BTX.shape[:2]
        heads = (*lead, s.heads, s.head_dim)
        q, k, v = (x.reshape(heads) for x in jnp.split(qkv_BTX, 3, axis=-1))
        drift, strength = jnp.split(gates_BTX, [s.heads * s.head_dim], axis=-1)
        drift = (drift + bias_X).reshape(heads)
        if s.lower_bound is None:
            log = -(factor_H[:, None] * softplus(drift))
        else:
            log = s.lower_bound * sigmoid(factor_H[:, None] * drift)
        return Steps(unit(q) * s.head_dim**-0.5, unit(k), v, exp(log), sigmoid(strength)[..., None])
