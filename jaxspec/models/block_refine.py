"""What makes the drafts of a block follow one another: DSpark's Markov and confidence heads, DFlash2's selector."""

from typing import Literal

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.nn.dense import dense, lookup
from jaxspec.nn.param import Param, declare
from jaxspec.nn.policy import Policy
from jaxspec.nn.steady import sigmoid
from jaxspec.shapes import Array

MARKOV_IN = Param("markov_in_VR", ("vocab", "rank"), "weight")
MARKOV_OUT = Param("markov_out_RW", ("rank", "draft_vocab"))
MARKOV_GATE = Param("markov_gate_XR", ("joined", "rank"))
MARKOV_GATE_BIAS = Param("markov_gate_bias_R", ("rank",), "bias")
MARKOV_JOINT = Param("markov_joint_XR", ("joined", "rank"))
MARKOV_JOINT_BIAS = Param("markov_joint_bias_R", ("rank",), "bias")
CONFIDENCE = Param("confidence_X1", ("joined", "gate"), "weight")
CONFIDENCE_BIAS = Param("confidence_bias_X", ("gate",), "bias")
PREDECESSOR = Param("predecessor_VR", ("vocab", "rank"), "weight")
SUCCESSOR = Param("successor_VR", ("vocab", "rank"), "weight")
CONTEXT = Param("context_DR", ("embed", "rank"))

MarkovKind = Literal["vanilla", "gated", "rnn"]


class Markov(nn.Module):
    """A bias of low rank on the logits of a draft, from the token before it.

    Attributes:
      kind: ``vanilla`` reads the token, ``gated`` also the draft's hidden state, ``rnn`` keeps a state along the block.
      rank: R.
      vocab_size, width: tokens that it reads (V) and that it drafts (W).
    """

    kind: MarkovKind
    rank: int
    vocab_size: int
    width: int
    model_dim: int
    policy: Policy

    def setup(self) -> None:
        """Declares the parameters."""
        p, r = self.policy, self.rank
        self.markov_in_VR = declare(self, p, MARKOV_IN, (self.vocab_size, r))
        self.markov_out_RW = declare(self, p, MARKOV_OUT, (r, self.width))
        if self.kind == "gated":
            self.gate = declare(self, p, MARKOV_GATE, (self.model_dim + r, r))
            self.gate_bias = declare(self, p, MARKOV_GATE_BIAS, (r,))
        elif self.kind == "rnn":
            self.joint = declare(self, p, MARKOV_JOINT, (self.model_dim + 2 * r, 3 * r))
            self.joint_bias = declare(self, p, MARKOV_JOINT_BIAS, (3 * r,))

    def embed(self, token: Array) -> Array:
        """Looks tokens up, float32 [..., R]."""
        return lookup(self.markov_in_VR, token)

    def advance(self, e: Array, last: Array, state: Array) -> tuple[Array, Array]:
        """Returns what ``bias`` reads and the next state, [..., R] each.

        Args:
          e: of the token before the draft, from ``embed``.
          last: the draft's hidden state [..., D].
          state: after the draft before it; zeros at first, and unread but by an ``rnn``.
        """
        dtype = self.policy.compute.dtype
        if self.kind == "vanilla":
            return e, state
        if self.kind == "gated":
            gate = dense(jnp.concatenate([last, e], axis=-1), self.gate, self.gate_bias, dtype=dtype)
            return sigmoid(gate) * e, state
        joint = dense(jnp.concatenate([state, e, last], axis=-1), self.joint, self.joint_bias, dtype=dtype)
        keep, new, out = jnp.split(joint, 3, axis=-1)
        keep = sigmoid(keep)
        return jnp.tanh(out), keep * state + (1 - keep) * jnp.tanh(new)

    def bias(self, z: Array) -> Array:
        """Returns what is added to the logits, float32 [..., W]."""
        return dense(z, self.markov_out_RW, dtype=self.policy.compute.dtype)


class Confidence(nn.Module):
    """The logit of a draft's being accepted, from its hidden state and maybe the token before it; in float32."""

    dim: int
    has_bias: bool
    policy: Policy

    @nn.compact
    def __call__(self, read: Array) -> Array:
        """Returns logits [...] of what is read, [..., X]."""
        w = declare(self, self.policy, CONFIDENCE, (self.dim, 1))
        bias = declare(self, self.policy, CONFIDENCE_BIAS, (1,)) if self.has_bias else None
        return dense(read, w.astype(jnp.float32), bias, dtype=jnp.dtype(jnp.float32))[..., 0]


class Selector(nn.Module):
    """Scores how well a few candidates follow the token before them."""

    rank: int
    vocab_size: int
    model_dim: int
    policy: Policy

    def setup(self) -> None:
        """Declares the parameters."""
        p, shape = self.policy, (self.vocab_size, self.rank)
        self.predecessor_VR, self.successor_VR = (
            declare(self, p, PREDECESSOR, shape),
            declare(self, p, SUCCESSOR, shape),
        )
        self.context_DR = declare(self, p, CONTEXT, (self.model_dim, self.rank))

    def context(self, token: Array, last: Array) -> Array:
        """Returns what candidates are compared with, [..., R], of the token before them and their hidden state."""
        return lookup(self.predecessor_VR, token) * dense(last, self.context_DR, dtype=self.policy.compute.dtype)

    def scores(self, context: Array, candidate: Array) -> Array:
        """Returns what is added to the candidates' logits, [..., X], of contexts [..., R] and ids [..., X]."""
        return jnp.sum(context[..., None, :] * lookup(self.successor_VR, candidate), axis=-1)
