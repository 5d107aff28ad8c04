"""Medusa: heads that read one hidden state of the target and predict the tokens after the next one side by side."""

from dataclasses import dataclass

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.nn.dense import dense
from jaxspec.nn.param import ZEROS, Param, declare
from jaxspec.nn.policy import Policy
from jaxspec.nn.steady import silu
from jaxspec.shapes import Array, Params

RESIDUAL = Param("residual_{}_DX", ("embed", "channels"), "weight", ZEROS)
RESIDUAL_BIAS = Param("residual_bias_{}_X", ("channels",), "bias")
HEAD = Param("head_DW", ("embed", "draft_vocab"), part="head")


@dataclass(frozen=True)
class MedusaSpec:
    """Medusa heads (Cai 2024, 2401.10774).

    Attributes:
      heads: how many tokens they predict.
      layers: residual layers of each head.
      dim: D of the target.
      vocab_size: V.
      draft_vocab: W, tokens that the heads know; 0 where all use the target's head.
    """

    heads: int
    layers: int
    dim: int
    vocab_size: int
    draft_vocab: int = 0


class MedusaHead(nn.Module):
    """One head: residual layers ``x + silu(W x + b)``, W zero at first, then a product with its own vocabulary."""

    spec: MedusaSpec
    policy: Policy

    @nn.compact
    def __call__(self, last: Array) -> Array:
        """Logits over the draft vocabulary, or with the target's head what that reads, [..., W] or [..., D]."""
        s, p = self.spec, self.policy
        for layer in range(s.layers):
            w = declare(self, p, RESIDUAL, (s.dim, s.dim), layer)
            bias = declare(self, p, RESIDUAL_BIAS, (s.dim,), layer)
            last = last + silu(dense(last, w, bias, dtype=p.compute.dtype))
        if not s.draft_vocab:
            return last
        return dense(last, declare(self, p, HEAD, (s.dim, s.draft_vocab)), dtype=p.compute.dtype)


class Medusa(nn.Module):
    """Parameters of all heads; head m predicts the token m + 2 positions after the hidden state that it reads."""

    spec: MedusaSpec
    policy: Policy

    def setup(self) -> None:
        """Declares the heads."""
        self.medusa = [MedusaHead(self.spec, self.policy) for _ in range(self.spec.heads)]

    def __call__(self, last: Array) -> Array:
        """Runs all heads, [M, ..., X]."""
        return jnp.stack([head(last) for head in self.medusa])

    def one(self, number: int, last: Array) -> Array:
        """Runs one head."""
        return self.medusa[number](last)

    def initial(self, key: Array) -> Params:
        """Returns random parameters."""
        return nn.unbox(self.init(key, jnp.zeros((1, 1, self.spec.dim))))
