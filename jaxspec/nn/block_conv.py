"""The grouped convolution of DFlash2 over the rows of a block, whose coefficients follow from its input."""

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.nn.dense import dense
from jaxspec.nn.param import ZEROS, Param, declare
from jaxspec.nn.policy import Policy
from jaxspec.shapes import Array


def _identity(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    return jnp.zeros(shape, dtype).at[:, 0].set(1)


BASE = Param("base_XTD", ("sides", "taps", "embed"), "weight", _identity)
KERNEL = Param("kernel_DX", ("embed", "channels"), init=ZEROS)


class BlockConv(nn.Module):
    """A causal depthwise convolution in front of a sub-layer, and one after it; both are the identity at first.

    Attributes:
      taps: rows that an output reads, its own included.
      group: channels that share a coefficient.
      size: rows of a block, beyond which it does not read.
    """

    taps: int
    group: int
    size: int
    model_dim: int
    policy: Policy

    @nn.compact
    def __call__(self, x_BTD: Array) -> tuple[Array, Array, Array]:
        """Convolves what the sub-layer reads; also returns the coefficients for its output, by row and for all."""
        groups = self.model_dim // self.group
        base_XTD = declare(self, self.policy, BASE, (2, self.taps, self.model_dim))
        kernel_DX = declare(self, self.policy, KERNEL, (self.model_dim, 2 * self.taps * groups))
        own = dense(x_BTD, kernel_DX, dtype=self.policy.compute.dtype).reshape(*x_BTD.shape[:-1], 2, self.taps, groups)
        base_XTD = base_XTD.astype(jnp.float32)
        return self.convolve(x_BTD, own[..., 0, :, :], base_XTD[0]), own[..., 1, :, :], base_XTD[1]

    def convolve(self, x_BTD: Array, own: Array, base_TD: Array) -> Array:
        """Sums the rows before each row of its block, times ``base_TD`` plus a coefficient of each group's own."""
        blocks = x_BTD.reshape(-1, self.size, self.model_dim)
        own = jnp.repeat(own.reshape(-1, self.size, *own.shape[-2:]), self.group, axis=-1)
        out = jnp.zeros_like(blocks)
        for tap in range(self.taps):
            shifted = jnp.pad(blocks, ((0, 0), (tap, 0), (0, 0)))[:, : self.size]
            out += (base_TD[tap] + own[..., tap, :]) * shifted
        return out.reshape(x_BTD.shape)
