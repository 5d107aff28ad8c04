"""The training loss of each kind of head over one batch, and what it says of acceptance."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.models.draft_head import DraftHead, part_of
from jaxspec.models.medusa import Medusa, run_medusa
from jaxspec.models.transformer import Transformer, head, teacher_forced
from jaxspec.pytree import pytree, static
from jaxspec.shapes import Array, Params
from jaxspec.train.draft_losses import DRAFT_LOSSES, recall, routing_loss, smooth_l1, wanted_of
from jaxspec.train.settings import LossSettings
from jaxspec.train.teacher import Batch, Lesson, ahead
from jaxspec.train.unroll import Round, unroll, unroll_masked, weights

Metrics = dict[str, Array]


@pytree
class Course:
    """What does not change while a head is trained; its arrays go to the compiled update as arguments.

    Attributes:
      base: the target's parameters.
      ids_W: the target's id of each token of the draft vocabulary, None for all tokens.
      target: its network.
      net: what is trained: a head, or a draft model.
      objective: losses and their weights.
    """

    base: Params
    ids_W: Array | None
    target: Transformer = static()
    net: DraftHead | Medusa | Transformer = static()
    objective: LossSettings = static(default_factory=LossSettings)


def head_loss(course: Course, params: Params, lesson: Lesson, batch: Batch, key: Array) -> tuple[Array, Metrics]:
    """Loss of a head's parameters over one batch, and metrics.

    Args:
      course: what does not change.
      params: what is trained.
      lesson: what the target computed.
      batch: packed texts.
      key: of noise and of the choice of slots.

    Returns:
      A scalar, and per round j the share of drafts that equal the target's best token (``accuracy_j``), how many
      tokens a verification would commit if every draft were made behind real ones (``simulated_length``, bonus token
      included), and the parts of the loss.
    """
    net = course.net
    if isinstance(net, DraftHead):
        return _eagle(course, net, params, lesson, batch, key)
    if isinstance(net, Medusa):
        last_MBTX = run_medusa(net, params, lesson.features.last_BTD)
        owned = bool(net.spec.draft_vocab)
        rounds = [x if owned else head(course.target, course.base, x) for x in last_MBTX]
        return _score(course, rounds, [None] * len(rounds), lesson, batch)
    return _model(course, net, params, lesson, batch)


def _eagle(course: Course, net: DraftHead, params: Params, lesson: Lesson, batch: Batch, key: Array):
    o, features = course.objective, lesson.features
    noise_key, choice_key = jax.random.split(key)
    if o.noise:
        shift = o.noise / 2
        leaves, structure = jax.tree.flatten(features)
        keys = jax.random.split(noise_key, len(leaves))
        noisy = [
            x + jax.random.uniform(k, x.shape, jnp.float32, -shift, shift) for x, k in zip(leaves, keys, strict=True)
        ]
        features = jax.tree.unflatten(structure, noisy)
    target = (course.target, course.base)
    if net.spec.mask_token is None:
        rounds = unroll(net, params, target, features, batch, o.rounds)
        slots = [None] * o.rounds
    else:
        counts = o.counts(batch.token_BT.shape[1])
        rounds = unroll_masked(net, params, target, features, batch, counts, choice_key)
        slots = [None, *(r.slot_BX for r in rounds[1:])]
    own = bool(net.spec.draft_vocab)
    logits = [
        part_of(net, params, "logits", r.last_BXD) if own else head(course.target, course.base, r.last_BXD)
        for r in rounds
    ]
    loss, metrics = _score(course, logits, slots, lesson, batch)
    if o.feature:
        missed = _regress(course, rounds, lesson, batch)
        loss, metrics = loss + o.feature * missed, metrics | {"feature_loss": missed}
    if net.spec.routing:
        missed, found = _routing(course, net, params, rounds, slots, lesson, batch)
        loss, metrics = loss + o.routing * missed, metrics | {"routing_loss": missed} | found
    return loss, metrics


def _model(course: Course, net: Transformer, params: Params, lesson: Lesson, batch: Batch):
    """A draft model reads the same tokens as the target; its prediction behind a token is the target's to match."""
    logits, _ = teacher_forced(net, params, batch.token_BT, batch.position_BT, batch.segment_BT)
    return _score(course, [ahead(logits, 1)], [None], lesson, batch)


def _score(course: Course, logits: Sequence[Array], slots: Sequence[Array | None], lesson: Lesson, batch: Batch):
    """Weighted loss of all rounds per trained position of the first, and agreement with the target."""
    o = course.objective
    wanted = wanted_of(lesson.logits_BTV, course.ids_W)
    total, through = jnp.float32(0), None
    first = jnp.maximum(jnp.sum(weights(batch, 0)), 1.0)
    metrics: Metrics = {"trained_tokens": jnp.sum(weights(batch, 0))}
    length = jnp.float32(1)
    for j, (found, slot_BX) in enumerate(zip(logits, slots, strict=True)):
        here, weight = _at(wanted, slot_BX, 1 + j), _at(weights(batch, j), slot_BX, 0)
        logq = jax.nn.log_softmax(found, axis=-1)
        kept = jnp.where(here.knows_BX, weight, 0.0) if o.skip_unknown else weight
        # Some of a round's trained slots stand for all of them.
        scale = jnp.sum(weights(batch, j)) / jnp.maximum(jnp.sum(weight), 1.0)
        total += o.decay**j * scale * jnp.sum(DRAFT_LOSSES[o.kind](here, logq) * kept) / first
        hit = (jnp.argmax(logq, axis=-1) == here.best_BX) & here.knows_BX
        metrics[f"accuracy_{j}"] = jnp.sum(weight, where=hit) / jnp.maximum(jnp.sum(weight), 1.0)
        if slot_BX is None:  # a slot's earlier drafts stand at the same place
            through = hit if through is None else through & hit
            length += jnp.sum(weight, where=through) / jnp.maximum(jnp.sum(weight), 1.0)
    if len(logits) > 1 and all(s is None for s in slots):
        metrics["simulated_length"] = length
    return o.token * total, metrics | {"token_loss": total}


def _regress(course: Course, rounds: list[Round], lesson: Lesson, batch: Batch) -> Array:
    """EAGLE-1's regression: what a slot returns is the target's last hidden state at the next position."""
    first = jnp.maximum(jnp.sum(weights(batch, 0)), 1.0)
    total = jnp.float32(0)
    for j, r in enumerate(rounds):
        missed = smooth_l1(r.next_BXD, ahead(lesson.features.last_BTD, 1 + j))
        total += course.objective.decay**j * jnp.sum(missed * weights(batch, j)) / first
    return total


def _routing(course: Course, net: DraftHead, params: Params, rounds: list[Round], slots, lesson: Lesson, batch: Batch):
    """Loss of the predicted experts of each drafted token, and how many of them were predicted."""
    chosen = jnp.stack(lesson.expert_YBTA, axis=2)
    first = jnp.maximum(jnp.sum(weights(batch, 0)), 1.0)
    total, found = jnp.float32(0), {}
    for j, (r, slot_BX) in enumerate(zip(rounds, slots, strict=True)):
        logits = part_of(net, params, "routes", r.last_BXD)
        here, weight = _at(chosen, slot_BX, 2 + j), _at(weights(batch, j), slot_BX, 0)
        total += course.objective.decay**j * jnp.sum(routing_loss(logits, here) * weight) / first
        hit = recall(logits, here, here.shape[-1])
        found[f"routing_recall_{j}"] = jnp.sum(hit * weight) / jnp.maximum(jnp.sum(weight), 1.0)
    return total, found


def _at(x: Any, slot_BX: Array | None, by: int) -> Any:
    """Entries that stand ``by`` positions behind each slot."""

    def one(leaf: Array) -> Array:
        leaf = ahead(leaf, by)
        if slot_BX is None:
            return leaf
        return jnp.take_along_axis(leaf, slot_BX.reshape(*slot_BX.shape, *[1] * (leaf.ndim - 2)), axis=1)

    return jax.tree.map(one, x)
