"""The training loss of heads that draft blocks: blocks after random anchors of whole texts, all in one pass."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.models.apply import apply
from jaxspec.models.block_head import BlockHead
from jaxspec.models.transformer import embed
from jaxspec.nn.anchored import Anchored
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.router import Routing
from jaxspec.shapes import Array, Params
from jaxspec.train.batch import Batch, TeacherOutput
from jaxspec.train.block_vocab import DraftInputs
from jaxspec.train.expert_balance import RoutedSlots, balance_loss
from jaxspec.train.objective import HeadObjective
from jaxspec.train.vocab_loss import VocabTask, default_positions, vocab_loss


def block_loss(
    objective: HeadObjective, net: BlockHead, params: Params, teacher: TeacherOutput, batch: Batch, key: Array
) -> tuple[Array, dict[str, Array]]:
    """Computes the loss of a head over one batch, and metrics; as ``head_loss``.

    Every draft is predicted after the text's own tokens, whose target distribution it is compared with. A draft counts
    if it and all before it in its block are trained tokens of the anchor's text.
    """
    o, spec = objective.loss, net.spec
    anchor_BN = choose_anchors(min(o.block.anchors, batch.token_BT.shape[1]), batch, key)
    weight_BNK = trained_drafts(batch, anchor_BN, spec.drafts)
    last_BNSD, routing = run_blocks(objective, net, params, teacher, batch, anchor_BN)
    before_BNK = anchor_BN[..., None] + jnp.arange(spec.drafts, dtype=jnp.int32)
    token_BNK = _at(batch.token_BT, before_BNK)
    read = _followed(net, params, last_BNSD[:, :, spec.first :], token_BNK)
    rows, count = len(anchor_BN), weight_BNK[0].size
    first = jnp.maximum(jnp.sum(weight_BNK[..., 0]), 1.0)
    decay_K = 1.0 if o.block.pace else o.decay ** jnp.arange(spec.drafts, dtype=jnp.float32)
    share_BX = (weight_BNK * decay_K / first).reshape(rows, count)
    teacher_BXD = _at(teacher.features.last_BTD, before_BNK).reshape(rows, count, -1)
    vocab = objective.target.arch.vocab_size
    width = spec.width if objective.ids_W is None else len(objective.ids_W)
    positions = objective.positions or default_positions(rows, count, vocab, width, 1)
    positions = max(positions // spec.drafts, 1) * spec.drafts  # whole blocks
    task = VocabTask(objective, teacher_BXD, share_BX[None], positions)
    total, hit_SBX = vocab_loss(params, task, (read.joined().reshape(rows, count, -1),))
    hit_BNK = hit_SBX[0].reshape(weight_BNK.shape)
    metrics = {"trained_tokens": jnp.sum(weight_BNK[..., 0]), "token_loss": total}
    metrics["tokens"] = jnp.sum((batch.segment_BT > 0).astype(jnp.float32))
    through_BNK = jnp.cumprod(hit_BNK.astype(jnp.float32), axis=2) * weight_BNK
    metrics["simulated_length"] = 1 + jnp.sum(through_BNK) / first
    for k in range(spec.drafts):
        weight_BN = weight_BNK[..., k]
        metrics[f"accuracy_{k}"] = jnp.sum(weight_BN, where=hit_BNK[..., k]) / jnp.maximum(jnp.sum(weight_BN), 1.0)
    if routing:
        weight_BX = jnp.repeat(weight_BNK[..., 0], spec.block_size, axis=1)
        share_B = jnp.sum(weight_BNK[..., 0], axis=1) / first
        uneven, figures = balance_loss([RoutedSlots(one, weight_BX) for one in routing], share_B)
        total, metrics = total + o.balance * uneven, metrics | figures
    return total, metrics


def choose_anchors(count: int, batch: Batch, key: Array) -> Array:
    """Draws positions before trained tokens of the same text, without replacement and ascending, int32 [B, N].

    Where a row has too few of them, others fill up, whose drafts count nothing.
    """
    every_BT = jnp.broadcast_to(jnp.arange(batch.token_BT.shape[1], dtype=jnp.int32), batch.token_BT.shape)
    may_BT = trained_drafts(batch, every_BT, 1)[..., 0]
    drawn_BT = jax.vmap(lambda own: jax.random.uniform(own, (may_BT.shape[1],)))(batch.keys(key))
    return jnp.sort(jax.lax.top_k(drawn_BT + may_BT, count)[1], axis=1).astype(jnp.int32)


def trained_drafts(batch: Batch, anchor_BN: Array, drafts: int) -> Array:
    """Returns 1 for drafts that are trained tokens of their anchor's text, as are all before them, [B, N, K]."""
    index_BNK = anchor_BN[..., None] + 1 + jnp.arange(drafts, dtype=jnp.int32)
    own_BN = _at(batch.segment_BT, anchor_BN)
    counts = _at(batch.loss_BT, index_BNK) & (_at(batch.segment_BT, index_BNK) == own_BN[..., None])
    counts &= (index_BNK < batch.token_BT.shape[1]) & (own_BN > 0)[..., None]
    return jnp.cumprod(counts.astype(jnp.float32), axis=-1)


def run_blocks(
    objective: HeadObjective, net: BlockHead, params: Params, teacher: TeacherOutput, batch: Batch, anchor_BN: Array
) -> tuple[Array, tuple[Routing, ...]]:
    """Runs a block after every anchor; returns what the vocabulary product reads [B, N, size, D], and its choices."""
    spec = net.spec
    place_S = jnp.arange(spec.block_size, dtype=jnp.int32)
    token_BNS = jnp.where(place_S == 0, _at(batch.token_BT, anchor_BN)[..., None], spec.mask_token)
    position_BNS = _at(batch.position_BT, anchor_BN)[..., None] + place_S
    token_BX, position_BX = (x.reshape(len(anchor_BN), -1) for x in (token_BNS, position_BNS))

    def run(params: Params, frozen: Params, feature_BTX: Array) -> tuple[Array, tuple[Routing, ...]]:
        if spec.own_embedding:
            embedded = apply(net, params, token_BX, method="embed")
        else:
            embedded = embed(objective.target, frozen, token_BX)
        c_BTD = apply(net, params, feature_BTX, method="join")
        text = (Anchored(batch.segment_BT, anchor_BN, size=spec.block_size),) * len(spec.arch.layers)
        memory = apply(net, params, c_BTD, Inputs(batch.token_BT, batch.position_BT, memory=text), method="observe")
        last, _, routing = apply(net, params, embedded, Inputs(token_BX, position_BX, memory=memory), method="routed")
        return last, routing

    run = jax.checkpoint(run) if objective.remat else run
    last_BXD, routing = run(params, objective.target_params, spec.feature(teacher.features))
    return last_BXD.reshape(*token_BNS.shape, -1), routing


def _followed(net: BlockHead, params: Params, last_BNKD: Array, token_BNK: Array) -> DraftInputs:
    """Returns what the losses read of drafts after the text's own tokens."""
    spec, none = net.spec, last_BNKD[..., :0]
    markov = confidence = context = none
    e: Any = None
    if spec.markov_rank:
        e = apply(net, params, token_BNK, method="markov_embed")
        state, each = jnp.zeros_like(e[..., 0, :]), []
        for k in range(spec.drafts):
            z, state = apply(net, params, e[..., k, :], last_BNKD[..., k, :], state, method="markov_advance")
            each.append(z)
        markov = jnp.stack(each, axis=2)
    if spec.confidence != "none":
        confidence = apply(net, params, last_BNKD, e, method="confidence")[..., None]
    if spec.selector_rank:
        context = apply(net, params, token_BNK, last_BNKD, method="context")
    return DraftInputs(last_BNKD, markov, confidence, context)


def _at(x_BT: Array, index: Array) -> Array:
    """Takes entries [B, T, ...] at indices [B, ...]; the last one stands for those beyond the end."""
    flat = jnp.minimum(index, x_BT.shape[1] - 1).reshape(len(index), math.prod(index.shape[1:]))
    taken = x_BT[jnp.arange(len(index), dtype=jnp.int32)[:, None], flat]
    return taken.reshape(*index.shape, *x_BT.shape[2:])
