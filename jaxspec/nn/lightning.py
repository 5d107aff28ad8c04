"""Lightning attention (Qin 2024, 2405.17381): linear attention whose heads decay at fixed rates (MiniMax-01)."""

from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.window import pack, take_outputs, unpack
from jaxspec.nn.dense import dense
from jaxspec.nn.inputs import Inputs, Mixed
from jaxspec.nn.kda import GATE
from jaxspec.nn.mamba import NORM
from jaxspec.nn.norm import rms_norm
from jaxspec.nn.param import Param, declare
from jaxspec.nn.policy import Policy
from jaxspec.nn.recurrence import Recurrence, RecurrentMixer, RecurrentSpec, run_recurrence
from jaxspec.nn.recurrent_steps import Steps
from jaxspec.nn.short_conv import MIX_OUT
from jaxspec.nn.steady import exp, sigmoid, silu
from jaxspec.shapes import Array

QKV = Param("qkv_DHX", ("embed", "value_heads", "channels"))
NORM_EPS, SLOWEST = 1e-6, 1e-5  # fixed in the reference


@dataclass(frozen=True)
class LightningSpec(RecurrentMixer):
    """One layer.

    Attributes:
      heads, head_dim: H and C, of keys and values.
      layers: of the model, L. Head h of 1..H of layer y keeps ``exp(-s)`` of the state at each position, with
        ``s = 2^(-8 h / H) (1 - y / (L - 1 + 1e-5) + 1e-5)``.
    """

    heads: int
    head_dim: int
    layers: int

    @property
    def recurrence(self) -> RecurrentSpec:
        """Returns the sizes of its state; nothing is convolved."""
        return RecurrentSpec(self.heads, self.head_dim, self.head_dim, 0, 1, 3 * self.heads * self.head_dim)


class Lightning(nn.Module):
    """Queries, keys and values go through SiLU; what is read is normalized over all heads and gated by a sigmoid."""

    spec: LightningSpec
    model_dim: int
    norm_eps: float
    policy: Policy

    @nn.compact
    def __call__(self, x_BTD: Array, inputs: Inputs) -> Mixed:
        """Projects and runs the recurrence."""
        s, p, window, dim = self.spec, self.policy, inputs.window, self.model_dim
        wide, lead = s.heads * s.head_dim, x_BTD.shape[:2]
        qkv = silu(dense(x_BTD, declare(self, p, QKV, (dim, s.heads, 3 * s.head_dim)), dtype=p.compute.dtype))
        number = jnp.asarray(0 if inputs.number is None else inputs.number, jnp.float32)
        layer = Recurrence(s.recurrence, partial(self._steps, number), compute=p.compute)
        out, memory = run_recurrence(unpack(qkv.reshape(*lead, -1), window), layer, inputs.unpack())
        out = pack(take_outputs(out, window), window)
        out = rms_norm(out.reshape(*out.shape[:2], wide), declare(self, p, NORM, (wide,)), NORM_EPS)
        gate = dense(take_outputs(x_BTD, window), declare(self, p, GATE, (dim, wide)), dtype=p.compute.dtype)
        out_XD = declare(self, p, MIX_OUT, (wide, dim))
        return Mixed(dense(out * sigmoid(gate), out_XD, dtype=p.compute.dtype), memory)

    def _steps(self, number: Array, none_BTX: Array, qkv_BTX: Array) -> Steps:
        s = self.spec
        qkv = qkv_BTX.reshape(*none_BTX.shape[:2], s.heads, 3 * s.head_dim)
        q, k, v = jnp.split(qkv, 3, axis=-1)
        rate_H1 = np.float32(2.0) ** (-8.0 * np.arange(1, s.heads + 1, dtype=np.float32) / s.heads)[:, None]
        decay_H1 = exp(-rate_H1 * (np.float32(1 + SLOWEST) - number / np.float32(s.layers - 1 + SLOWEST)))
        return Steps(q, k, v, jnp.broadcast_to(decay_H1, (*v.shape[:3], 1)))
