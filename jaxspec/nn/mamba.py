"""Mamba-2 (Dao 2024, 2405.21060): a linear recurrence whose decay and strength are one number per head and position."""

from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.cache.window import pack, take_outputs, unpack
from jaxspec.nn.delta_net import CONV, DECAY, DECAY_BIAS
from jaxspec.nn.dense import dense
from jaxspec.nn.inputs import Inputs, Mixed
from jaxspec.nn.norm import rms_norm
from jaxspec.nn.param import Param, declare
from jaxspec.nn.policy import Policy
from jaxspec.nn.recurrence import Recurrence, RecurrentMixer, RecurrentSpec, run_recurrence
from jaxspec.nn.recurrent_steps import Steps
from jaxspec.nn.short_conv import CONV_BIAS, MIX_OUT
from jaxspec.nn.steady import exp, silu, softplus
from jaxspec.shapes import Array

IN = Param("in_DX", ("embed", "channels"))
IN_BIAS = Param("in_bias_X", ("channels",), "bias")
SKIP = Param("skip_H", ("value_heads",), "weight", dtype=jnp.float32)
NORM = Param("out_norm_X", ("channels",), "norm")
OUT_BIAS = Param("mix_out_bias_D", ("embed",), "bias")


@dataclass(frozen=True)
class MambaSpec(RecurrentMixer):
    """One layer.

    Attributes:
      heads, head_dim: H and C of values.
      groups: of heads that share keys and queries, which Mamba calls B and C.
      state_dim: N, channels of keys and queries.
      taps: positions that the convolution of values, keys and queries spans.
      norm_groups: equal parts of all channels that the gated output is normalized in.
      conv_bias, bias: whether the convolution, and the products from and to the stream, have biases.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int
    norm_groups: int = 1
    conv_bias: bool = True
    bias: bool = False

    @property
    def inner(self) -> int:
        """Channels of all values."""
        return self.heads * self.head_dim

    @property
    def recurrence(self) -> RecurrentSpec:
        """Returns the sizes of its state; the gate of each head is its time step."""
        channels = self.inner + 2 * self.groups * self.state_dim
        return RecurrentSpec(self.heads, self.state_dim, self.head_dim, channels, self.taps, self.heads)


class Mamba(nn.Module):
    """What is read is gated by SiLU, then normalized in groups."""

    spec: MambaSpec
    model_dim: int
    norm_eps: float
    policy: Policy

    @nn.compact
    def __call__(self, x_BTD: Array, inputs: Inputs) -> Mixed:
        """Projects, convolves and runs the recurrence."""
        s, p, window, dim = self.spec, self.policy, inputs.window, self.model_dim
        wide = s.inner + s.recurrence.channels + s.heads
        in_bias = declare(self, p, IN_BIAS, (wide,)) if s.bias else None
        both = dense(x_BTD, declare(self, p, IN, (dim, wide)), in_bias, dtype=p.compute.dtype)
        gate, raw_BTX = both[..., : s.inner], both[..., s.inner :]
        rate_H = -exp(declare(self, p, DECAY, (s.heads,)))
        bias_H, skip_H = declare(self, p, DECAY_BIAS, (s.heads,)), declare(self, p, SKIP, (s.heads,))
        conv = declare(self, p, CONV, (s.recurrence.channels, 1, s.taps))
        conv_bias = declare(self, p, CONV_BIAS, (s.recurrence.channels,)) if s.conv_bias else None
        layer = Recurrence(
            s.recurrence, partial(self._steps, rate_H, bias_H, skip_H), conv, conv_bias, compute=p.compute
        )
        out, memory = run_recurrence(unpack(raw_BTX, window), layer, inputs.unpack())
        out = pack(take_outputs(out, window), window)
        out = out.reshape(*out.shape[:2], s.inner) * silu(take_outputs(gate, window))
        grouped = out.reshape(*out.shape[:2], s.norm_groups, -1)
        out = rms_norm(grouped, None, self.norm_eps).reshape(out.shape)
        out = out * declare(self, p, NORM, (s.inner,)).astype(jnp.float32)
        out_bias = declare(self, p, OUT_BIAS, (dim,)) if s.bias else None
        return Mixed(dense(out, declare(self, p, MIX_OUT, (s.inner, dim)), out_bias, dtype=p.compute.dtype), memory)

    def _steps(self, rate_H: Array, bias_H: Array, skip_H: Array, xbc_BTX: Array, step_BTH: Array) -> Steps:
        s, lead = self.spec, xbc_BTX.shape[:2]
        keys = s.groups * s.state_dim
        x, k, q = jnp.split(xbc_BTX, [s.inner, s.inner + keys], axis=-1)
        x = x.reshape(*lead, s.heads, s.head_dim)
        k, q = (part.reshape(*lead, s.groups, s.state_dim) for part in (k, q))
        step = softplus(step_BTH + bias_H)[..., None]
        return Steps(q, k, step * x, exp(step * rate_H[:, None]), skip_BTHC=skip_H[:, None] * x)
