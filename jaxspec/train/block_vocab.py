"""The losses of a head that drafts blocks at some drafts, over the vocabulary."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.models.apply import apply
from jaxspec.models.block_head import BlockHead, BlockSpec
from jaxspec.nn.steady import row_top_k
from jaxspec.shapes import Array, Params
from jaxspec.train.draft_losses import DRAFT_LOSSES, TargetPrediction, acceptance
from jaxspec.train.objective import HeadObjective

READS = ("head_DW", "markov", "selector")  # parameters that the vocabulary product reads


class DraftInputs(NamedTuple):
    """What the losses read of a draft, which lies side by side in one vector.

    Attributes:
      last: hidden state, [..., D].
      markov: what the Markov head's bias is made of, [..., R] or [..., 0].
      confidence: logit of being accepted, [..., 1] or [..., 0].
      context: what candidates are compared with, [..., R] or [..., 0].
    """

    last: Array
    markov: Array
    confidence: Array
    context: Array

    def joined(self) -> Array:
        """Returns all of it as one vector."""
        return jnp.concatenate(self, axis=-1)

    @staticmethod
    def of(joined: Array, spec: BlockSpec) -> "DraftInputs":
        """Takes the vector apart."""
        ends = [spec.arch.model_dim, spec.markov_rank, int(spec.confidence != "none")]
        ends = [sum(ends[: n + 1]) for n in range(len(ends))]
        return DraftInputs(*jnp.split(joined, ends, axis=-1))


def block_losses(
    objective: HeadObjective, params: Params, p: TargetPrediction, joined_BXY: Array
) -> tuple[Array, Array, Array]:
    """Computes the weighted losses of each draft, whether it is the target's best token, and how likely that one was.

    Args:
      objective: networks and weights.
      params: of the head.
      p: the target's prediction of the same tokens.
      joined_BXY: ``DraftInputs``, joined.

    Returns:
      The sum of all losses, whether the draft is right, and the log-probability of the target's best token, [B, X].
    """
    o, net = objective.loss, objective.net
    assert isinstance(net, BlockHead), "asked of heads that draft blocks"
    read = DraftInputs.of(joined_BXY, net.spec)
    if net.spec.draft_vocab:
        logits = apply(net, params, read.last, method="logits")
    else:
        logits = objective.target_logits(read.last)
    logits = net.spec.shaped(logits)
    if net.spec.markov_rank:
        logits = logits + apply(net, params, read.markov, method="markov_bias")
    logq = jax.nn.log_softmax(logits, axis=-1)
    loss = o.token * DRAFT_LOSSES[o.kind](p, logq)
    accepted = acceptance(p, logq)
    if o.block.tv:
        loss += o.block.tv * (1 - accepted)
    if net.spec.confidence != "none":
        logit, wanted = read.confidence[..., 0], lax.stop_gradient(accepted)
        loss += o.block.confidence * (jax.nn.softplus(logit) - wanted * logit)
    label = jnp.take_along_axis(logq, p.best_BX[..., None], axis=-1)[..., 0]
    hit = label >= jnp.max(logq, axis=-1)  # XLA:CPU finds a maximum much faster than its index
    if net.spec.selector_rank:
        missed, hit = _selected(objective, params, p, read.context, logits)
        loss += o.block.selector * missed
    return loss, hit & p.knows_BX, label


def _selected(
    objective: HeadObjective, params: Params, p: TargetPrediction, context: Array, logits: Array
) -> tuple[Array, Array]:
    """Cross-entropy of the target's best token among the candidates, to which it is added, and whether it is chosen.

    Candidates are counted among the tokens of ``logits``; the selector knows each by the target's id.
    """
    net, ids_W = objective.net, objective.ids_W
    assert isinstance(net, BlockHead), "asked of heads that draft blocks"

    def fitness(candidate: Array) -> Array:
        token = candidate if ids_W is None else ids_W[candidate]
        return apply(net, params, context, token, method="candidate_scores")

    best, candidate = row_top_k(logits, net.spec.selector_top_k)
    score = best + fitness(candidate)
    chosen = jnp.take_along_axis(candidate, jnp.argmax(score, axis=-1, keepdims=True), axis=-1)[..., 0]
    label = p.best_BX[..., None]
    lacking = ~jnp.any(candidate == label, axis=-1, keepdims=True)
    is_last = jnp.arange(net.spec.selector_top_k) == net.spec.selector_top_k - 1
    candidate = jnp.where(lacking & is_last, label, candidate)
    score = jnp.take_along_axis(logits, candidate, axis=-1)
    score = score + fitness(candidate)
    logp = jax.nn.log_softmax(score, axis=-1)
    return -jnp.sum(logp, axis=-1, where=candidate == label), chosen == p.best_BX
