"""The training loss of each kind of head over one batch, and its metrics."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache.window import Segments
from jaxspec.models.apply import apply
from jaxspec.models.block_head import BlockHead
from jaxspec.models.draft_head import DraftHead
from jaxspec.models.medusa import Medusa
from jaxspec.models.mtp import Mtp
from jaxspec.models.transformer import Transformer, forward
from jaxspec.nn.inputs import Inputs
from jaxspec.shapes import Array, Params
from jaxspec.train.batch import Batch, TeacherOutput, shift_left
from jaxspec.train.block_loss import block_loss
from jaxspec.train.draft_losses import recall, routing_loss, smooth_l1
from jaxspec.train.expert_balance import RoutedSlots, balance_loss
from jaxspec.train.objective import HeadObjective
from jaxspec.train.unroll import Round, unroll, unroll_masked, weights
from jaxspec.train.vocab_loss import VocabTask, default_positions, vocab_loss

Metrics = dict[str, Array]


def head_loss(
    objective: HeadObjective, params: Params, teacher: TeacherOutput, batch: Batch, key: Array
) -> tuple[Array, Metrics]:
    """Computes the loss of a head's parameters over one batch, a scalar, and metrics.

    Metrics are the parts of the loss, and per round j the share of drafts that equal the target's best token
    (``accuracy_j``); ``simulated_length`` is how many tokens a verification would commit, bonus token included, if
    every draft were made after real ones. ``key`` is of noise and of the choice of slots.
    """
    net = objective.net
    if isinstance(net, DraftHead | Mtp):
        return _unrolled(objective, net, params, teacher, batch, key)
    if isinstance(net, Medusa):
        return _score(objective, params, [teacher.features.last_BTD] * net.spec.heads, None, teacher, batch)
    if isinstance(net, BlockHead):
        return block_loss(objective, net, params, teacher, batch, key)
    return _model(objective, net, params, teacher, batch)


def _unrolled(
    objective: HeadObjective, net: DraftHead | Mtp, params: Params, teacher: TeacherOutput, batch: Batch, key: Array
):
    """Loss of what drafts from its own output."""
    o, features = objective.loss, teacher.features
    noise_key, choice_key = jax.random.split(key)
    if o.noise:
        features = _noisy(features, o.noise, batch.keys(noise_key))
    target = (objective.target, objective.target_params)
    if isinstance(net, Mtp) or net.spec.mask_token is None:
        rounds = unroll(net, params, target, features, batch, o.rounds, remat=objective.remat)
        slots = None
    else:
        counts = o.counts(batch.token_BT.shape[1])
        rounds = unroll_masked(net, params, target, features, batch, counts, choice_key, remat=objective.remat)
        slots = [r.slot_BX for r in rounds]
    loss, metrics = _score(objective, params, [r.last_BXD for r in rounds], slots, teacher, batch)
    if o.feature:
        missed = _regress(objective, rounds, teacher, batch)
        loss, metrics = loss + o.feature * missed, metrics | {"feature_loss": missed}
    if isinstance(net, DraftHead) and net.spec.routing:
        missed, recalls = _routing(objective, net, params, rounds, teacher, batch)
        loss, metrics = loss + o.routing * missed, metrics | {"routing_loss": missed} | recalls
    if isinstance(net, DraftHead) and net.spec.arch.expert_layers:
        weight_SBX = [
            weights(batch, j) if slots is None else jnp.take_along_axis(weights(batch, j), r.slot_BX, axis=1)
            for j, r in enumerate(rounds)
        ]
        used = [RoutedSlots(one, weight_SBX[j]) for j, r in enumerate(rounds) for one in r.routing]
        count_B = jnp.sum(weights(batch, 0), axis=1)
        uneven, figures = balance_loss(used, count_B / jnp.maximum(jnp.sum(count_B), 1.0))
        loss, metrics = loss + o.balance * uneven, metrics | figures
    return loss, metrics


def _noisy(features: Any, width: float, key_B: Array) -> Any:
    """Adds uniform noise to features, every row's drawn by its own key."""
    leaves, structure = jax.tree.flatten(features)

    def draw(key: Array, rows: list[Array]) -> list[Array]:
        keys = jax.random.split(key, len(rows))
        return [
            x + jax.random.uniform(k, x.shape, jnp.float32, -width / 2, width / 2)
            for k, x in zip(keys, rows, strict=True)
        ]

    return jax.tree.unflatten(structure, jax.vmap(draw)(key_B, leaves))


def _model(objective: HeadObjective, net: Transformer, params: Params, teacher: TeacherOutput, batch: Batch):
    """Loss of a draft model, which reads the same tokens as the target and predicts the same ones."""

    def run(params: Params) -> Array:
        return forward(net, params, Inputs(batch.token_BT, batch.position_BT, Segments(batch.segment_BT))).last_BTD

    last_BTD = (jax.checkpoint(run) if objective.remat else run)(params)
    return _score(objective, params, [shift_left(last_BTD, 1)], None, teacher, batch)


def _score(
    objective: HeadObjective,
    params: Params,
    lasts: Sequence[Array],
    slots: Sequence[Array] | None,
    teacher: TeacherOutput,
    batch: Batch,
):
    """Weighted loss of all rounds per trained position of the first, and agreement with the target."""
    o, (rows, length) = objective.loss, batch.token_BT.shape
    weight_SBT = [weights(batch, j) for j in range(len(lasts))]
    first = jnp.maximum(jnp.sum(weight_SBT[0]), 1.0)
    placed = [
        _placed(x, w, 1 + j, None if slots is None else slots[j])
        for j, (x, w) in enumerate(zip(lasts, weight_SBT, strict=True))
    ]
    shares = []
    for j, (weight_BT, (_, here_BT)) in enumerate(zip(weight_SBT, placed, strict=True)):
        # Some of a row's trained slots stand for all of them.
        scale_B = jnp.sum(weight_BT, axis=1) / jnp.maximum(jnp.sum(here_BT, axis=1), 1.0)
        shares.append(o.decay**j * scale_B[:, None] * here_BT / first)
    vocab = objective.target.arch.vocab_size
    width = vocab if objective.ids_W is None else len(objective.ids_W)
    positions = objective.positions or default_positions(rows, length, vocab, width, len(lasts))
    task = VocabTask(objective, teacher.features.last_BTD, jnp.stack(shares), positions)
    total, hit_SBT = vocab_loss(params, task, tuple(x for x, _ in placed))
    metrics: Metrics = {"trained_tokens": jnp.sum(weight_SBT[0])}
    metrics["tokens"] = jnp.sum((batch.segment_BT > 0).astype(jnp.float32))
    for j, (hit_BT, (_, here_BT)) in enumerate(zip(hit_SBT, placed, strict=True)):
        metrics[f"accuracy_{j}"] = jnp.sum(here_BT, where=hit_BT) / jnp.maximum(jnp.sum(here_BT), 1.0)
    if len(lasts) > 1 and slots is None:
        metrics["simulated_length"] = _simulated_length(hit_SBT, weight_SBT)
    return o.token * total, metrics | {"token_loss": total}


def _placed(last_BXD: Array, weight_BT: Array, by: int, slot_BX: Array | None) -> tuple[Array, Array]:
    """Moves a round's vectors and weights ``by`` positions, to where the target predicts the same token."""
    if slot_BX is None:
        return jnp.pad(last_BXD[:, :-by], [(0, 0), (by, 0), (0, 0)]), jnp.pad(weight_BT[:, :-by], [(0, 0), (by, 0)])
    weight_BX = jnp.take_along_axis(weight_BT, slot_BX, axis=1)
    row_B1 = jnp.arange(len(slot_BX), dtype=jnp.int32)[:, None]

    def scatter(x_BX: Array) -> Array:
        zeros = jnp.zeros((*weight_BT.shape, *x_BX.shape[2:]), x_BX.dtype)
        return zeros.at[row_B1, slot_BX + by].set(x_BX, mode="drop", unique_indices=True)

    return scatter(last_BXD), scatter(weight_BX)


def _simulated_length(hit_SBT: Array, weight_SBT: Sequence[Array]) -> Array:
    """Tokens that a verification would commit if every draft were made after real ones, the bonus token included."""
    length, through_BT = jnp.float32(1), None
    for j, (hit_BT, weight_BT) in enumerate(zip(hit_SBT, weight_SBT, strict=True)):
        hit_BT = shift_left(hit_BT, 1 + j)
        through_BT = hit_BT if through_BT is None else through_BT & hit_BT
        length += jnp.sum(weight_BT, where=through_BT) / jnp.maximum(jnp.sum(weight_BT), 1.0)
    return length


def _regress(objective: HeadObjective, rounds: list[Round], teacher: TeacherOutput, batch: Batch) -> Array:
    """EAGLE-1's regression of a slot's output to the target's last hidden state at the next position."""
    first = jnp.maximum(jnp.sum(weights(batch, 0)), 1.0)
    total = jnp.float32(0)
    for j, r in enumerate(rounds):
        missed = smooth_l1(r.next_BXD, shift_left(teacher.features.last_BTD, 1 + j))
        total += objective.loss.decay**j * jnp.sum(missed * weights(batch, j)) / first
    return total


def _routing(
    objective: HeadObjective, net: DraftHead, params: Params, rounds: list[Round], teacher: TeacherOutput, batch: Batch
):
    """Loss of the predicted experts of each drafted token, and their recall."""
    chosen = jnp.stack(teacher.expert_YBTA, axis=2)
    first = jnp.maximum(jnp.sum(weights(batch, 0)), 1.0)
    total, recalls = jnp.float32(0), {}
    for j, r in enumerate(rounds):
        logits = apply(net, params, r.last_BXD, method="routes")
        here, weight = (
            _at(x, None if net.spec.mask_token is None else r.slot_BX, by)
            for x, by in ((chosen, 2 + j), (weights(batch, j), 0))
        )
        total += objective.loss.decay**j * jnp.sum(routing_loss(logits, here) * weight) / first
        hit = recall(logits, here, here.shape[-1])
        recalls[f"routing_recall_{j}"] = jnp.sum(hit * weight) / jnp.maximum(jnp.sum(weight), 1.0)
    return total, recalls


def _at(x_BT: Array, slot_BX: Array | None, by: int) -> Array:
    """Entries ``by`` positions after each slot."""
    x_BT = shift_left(x_BT, by)
    if slot_BX is None:
        return x_BT
    return jnp.take_along_axis(x_BT, slot_BX.reshape(*slot_BX.shape, *[1] * (x_BT.ndim - 2)), axis=1)
