"""Short convolutions between two gates, as LFM2 has them in place of attention."""

from dataclasses import dataclass

import flax.linen as nn

from jaxspec.cache.window import pack, take_outputs, unpack
from jaxspec.nn.delta_net import CONV
from jaxspec.nn.dense import dense
from jaxspec.nn.inputs import Inputs, Mixed
from jaxspec.nn.param import Param, declare
from jaxspec.nn.policy import Policy
from jaxspec.nn.recurrence import Recurrence, RecurrentMixer, RecurrentSpec, run_recurrence
from jaxspec.shapes import Array

IN = Param("in_D3X", ("embed", "gates_and_input", "channels"))
CONV_BIAS = Param("conv_bias_X", ("channels",), "bias")
MIX_OUT = Param("mix_out_XD", ("channels", "embed"))


@dataclass(frozen=True)
class ShortConvSpec(RecurrentMixer):
    """One layer.

    Attributes:
      channels: that are convolved.
      taps: positions that the convolution spans.
      bias: whether the convolution has one.
    """

    channels: int
    taps: int
    bias: bool = False

    @property
    def recurrence(self) -> RecurrentSpec:
        """Returns the sizes of its state: the last inputs of the convolution."""
        return RecurrentSpec(0, 0, 0, self.channels, self.taps, 0)


class ShortConv(nn.Module):
    """``out(c * conv(b * x))`` with b, c and x products of the input."""

    spec: ShortConvSpec
    model_dim: int
    norm_eps: float
    policy: Policy

    @nn.compact
    def __call__(self, x_BTD: Array, inputs: Inputs) -> Mixed:
        """Projects, gates, convolves, gates again."""
        s, p, window, dim = self.spec, self.policy, inputs.window, self.model_dim
        both = dense(x_BTD, declare(self, p, IN, (dim, 3, s.channels)), dtype=p.compute.dtype)
        raw_BTX, later = both[..., 0, :] * both[..., 2, :], both[..., 1, :]
        conv = declare(self, p, CONV, (s.channels, 1, s.taps))
        bias = declare(self, p, CONV_BIAS, (s.channels,)) if s.bias else None
        layer = Recurrence(s.recurrence, _as_they_are, conv, bias, activated=False)
        out, memory = run_recurrence(unpack(raw_BTX, window), layer, inputs.unpack())
        out = pack(take_outputs(out, window), window) * take_outputs(later, window)
        return Mixed(dense(out, declare(self, p, MIX_OUT, (s.channels, dim)), dtype=p.compute.dtype), memory)


def _as_they_are(channels_BTX: Array, gates_BTX: Array) -> Array:
    assert not gates_BTX.shape[-1], "a convolution alone has no gates"
    return channels_BTX
