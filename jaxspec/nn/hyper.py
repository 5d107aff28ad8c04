"""Hyper-connections: several residual streams that each sub-layer mixes, reads and writes (DeepSeek-V4's mHC)."""

from dataclasses import dataclass

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.nn.dense import exact_dense
from jaxspec.nn.norm import rms_norm
from jaxspec.nn.param import ONES, ZEROS, Param, declare
from jaxspec.nn.policy import Policy
from jaxspec.nn.steady import added_products, row_sum, sigmoid, softmax
from jaxspec.shapes import Array

MIX_FN = Param("mix_fn_XS", ("mixes", "stream_channels"), "weight", dtype=jnp.float32)
MIX_BASE = Param("mix_base_X", ("mixes",), "weight", ZEROS, jnp.float32)
MIX_SCALE = Param("mix_scale_X", ("mix_parts",), "weight", ONES, jnp.float32)
HEAD_FN = Param("head_fn_NS", ("streams", "stream_channels"), "weight", dtype=jnp.float32)
HEAD_BASE = Param("head_base_N", ("streams",), "weight", ZEROS, jnp.float32)
HEAD_SCALE = Param("head_scale_X", ("mix_parts",), "weight", ONES, jnp.float32)


@dataclass(frozen=True)
class HyperSpec:
    """Streams and how they are mixed.

    Attributes:
      streams: N, residual streams.
      rounds: normalizations of the mixing matrix's columns.
      eps: keeps mixing weights and their sums positive.
    """

    streams: int = 4
    rounds: int = 20
    eps: float = 1e-6


class HyperConnection(nn.Module):
    """Weights for reading the streams, for writing a sub-layer's output, and for mixing the streams themselves.

    The rows of ``mix_fn_XS`` are N for reading, N for writing and N x N for mixing; all are float32.
    """

    spec: HyperSpec
    model_dim: int
    norm_eps: float
    policy: Policy

    @nn.compact
    def __call__(self, x_BTND: Array) -> tuple[Array, Array, Array]:
        """Returns the sub-layer's input [B, T, D], its writing weights [B, T, N] and the mixing matrix [B, T, N, N]."""
        s, n = self.spec, self.spec.streams
        size = n * (2 + n)
        fn_XS = declare(self, self.policy, MIX_FN, (size, n * self.model_dim))
        base_X = declare(self, self.policy, MIX_BASE, (size,))
        scale_3 = declare(self, self.policy, MIX_SCALE, (3,))
        flat = rms_norm(x_BTND.reshape(*x_BTND.shape[:2], -1), None, self.norm_eps)
        mixed = exact_dense(flat, fn_XS.T, dtype=self.policy.compute.dtype)
        each = np.repeat(np.arange(3), (n, n, n * n))
        mixed = added_products([(mixed, scale_3[each])]) + base_X
        read_BTN = sigmoid(mixed[..., :n]) + np.float32(s.eps)
        write_BTN = 2 * sigmoid(mixed[..., n : 2 * n])
        comb_BTNN = softmax(mixed[..., 2 * n :].reshape(*mixed.shape[:2], n, n)) + np.float32(s.eps)
        return _weighted(read_BTN, x_BTND), write_BTN, balance(comb_BTNN, s.rounds, s.eps)


def balance(comb: Array, rounds: int, eps: float) -> Array:
    """Brings the sums of columns and rows of [..., N, N] by turns to 1, columns first and last (Sinkhorn 1967).

    Args:
      comb: positive matrices.
      rounds: how often columns are normalized.
      eps: added to the sums.
    """

    def columns(comb: Array) -> Array:
        return comb / (row_sum(comb.swapaxes(-1, -2)).swapaxes(-1, -2) + np.float32(eps))

    def both(_: Array, comb: Array) -> Array:
        return columns(comb / (row_sum(comb) + np.float32(eps)))

    return lax.fori_loop(0, rounds - 1, both, columns(comb))


def _weighted(w_BTN: Array, x_BTND: Array) -> Array:
    """Sums weighted streams."""
    return added_products((w_BTN[..., i, None], x_BTND[..., i, :]) for i in range(w_BTN.shape[-1]))


def merge(x_BTND: Array, out_BTD: Array, write_BTN: Array, comb_BTNN: Array) -> Array:
    """The streams after a sub-layer: each gets its share of the output and a mixture of the old streams.

    Args:
      x_BTND: the streams before it.
      out_BTD: the sub-layer's output.
      write_BTN: shares of the output.
      comb_BTNN: mixture; stream j gets the entries ``comb[i, j]`` of streams i.
    """
    shares = [(write_BTN, out_BTD)] + [(comb_BTNN[:, :, i], x_BTND[:, :, i]) for i in range(x_BTND.shape[2])]
    return added_products((share_BTN[..., None], x_BTD[:, :, None]) for share_BTN, x_BTD in shares)


class HyperHead(nn.Module):
    """Reads the last streams into one."""

    spec: HyperSpec
    model_dim: int
    norm_eps: float
    policy: Policy

    @nn.compact
    def __call__(self, x_BTND: Array) -> Array:
        """[B, T, N, D] to [B, T, D]."""
        n = self.spec.streams
        fn_NS = declare(self, self.policy, HEAD_FN, (n, n * self.model_dim))
        base_N = declare(self, self.policy, HEAD_BASE, (n,))
        scale = declare(self, self.policy, HEAD_SCALE, (1,))
        flat = rms_norm(x_BTND.reshape(*x_BTND.shape[:2], -1), None, self.norm_eps)
        mixed = exact_dense(flat, fn_NS.T, dtype=self.policy.compute.dtype)
        mixed = added_products([(mixed, scale)]) + base_N
        return _weighted(sigmoid(mixed) + np.float32(self.spec.eps), x_BTND)
