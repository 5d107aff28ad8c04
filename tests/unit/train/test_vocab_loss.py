"""The loss by few positions at a time is the loss over all of them at once: value, gradients, figures and draws."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.apply import apply
from jaxspec.models.draft_head import DraftHead
from jaxspec.models.medusa import Medusa, MedusaSpec
from jaxspec.models.transformer import Transformer, head, teacher_forced
from jaxspec.nn import query_blocks
from jaxspec.pytree import replace
from jaxspec.train.batch import Batch, TeacherOutput, shift_left
from jaxspec.train.draft_losses import DRAFT_LOSSES, target_prediction
from jaxspec.train.head_loss import head_loss
from jaxspec.train.objective import HeadObjective, cut_product
from jaxspec.train.settings import LossSettings
from jaxspec.train.teacher import run_teacher
from jaxspec.train.unroll import unroll, unroll_masked, weights
from tests.unit.train.test_unroll import DIM, EXACT, HEADS, VOCAB, arch, initial, target

ROUNDS, IDS = 3, jnp.arange(2, VOCAB, 2, dtype=jnp.int32)
NARROW = Medusa(MedusaSpec(ROUNDS, 1, DIM, VOCAB, len(IDS)), EXACT)
NETS: dict[str, Any] = {
    "eagle": DraftHead(HEADS["eagle"], EXACT),
    "eagle3": DraftHead(HEADS["eagle3"], EXACT),
    "p-eagle": DraftHead(HEADS["p-eagle"], EXACT),
    "shared-expert": DraftHead(HEADS["shared-expert"], EXACT),
    "medusa": NARROW,
    "medusa-without-product": Medusa(MedusaSpec(ROUNDS, 1, DIM, VOCAB), EXACT),
    "draft-model": Transformer(arch(), EXACT),
}


def packed(rows: int = 2, length: int = 13) -> Batch:
    rng = np.random.default_rng(3)
    token_BT = rng.integers(4, VOCAB, (rows, length)).astype(np.int32)
    segment_BT = np.repeat([[1, 2, 0]], [7, 4, 2], axis=1).repeat(rows, axis=0).astype(np.int32)
    position_BT = np.tile([*range(7), *range(4), 0, 0], (rows, 1)).astype(np.int32)
    loss_BT = (rng.random((rows, length)) < 0.8) & (segment_BT > 0)
    return Batch(*(jnp.asarray(x) for x in (token_BT, segment_BT, position_BT, loss_BT)))


def objective_of(name: str, loss_settings: LossSettings, **more: Any) -> HeadObjective:
    net, params = target()
    return HeadObjective(params, IDS if name == "medusa" else None, net, NETS[name], loss_settings, **more)


def loss_settings_of(name: str) -> LossSettings:
    kind = {"eagle": "kl", "p-eagle": "lk_hybrid", "medusa": "tv"}.get(name, "soft_ce")
    more = {"feature": 0.1, "noise": 0.2} if name == "eagle" else {"routing": 0.3} if name == "shared-expert" else {}
    settings: dict[str, Any] = {"kind": kind, "rounds": ROUNDS, "token": 0.7, **more}
    return LossSettings(**settings)


def teacher_output_of(batch: Batch, name: str) -> TeacherOutput:
    (net, params), own = target(), NETS[name]
    spec = own.spec if isinstance(own, DraftHead) else HEADS["eagle"]
    return jax.jit(run_teacher, static_argnums=(0, 3, 4))(net, params, batch, spec.reads, spec.routing)


def all_at_once(objective: HeadObjective, params: Any, teacher: TeacherOutput, batch: Batch, key: Any) -> Any:
    """The token loss and the accuracies from logits of all positions."""
    net, o, base = objective.net, objective.loss, (objective.target, objective.target_params)
    slots: list[Any] = [None] * ROUNDS
    if isinstance(net, Medusa):
        found = list(apply(net, params, teacher.features.last_BTD))
        logits = found if net.spec.draft_vocab else [head(*base, x) for x in found]
    elif isinstance(net, Transformer):
        logits, slots = (
            [shift_left(teacher_forced(net, params, batch.token_BT, batch.position_BT, batch.segment_BT)[0], 1)],
            [None],
        )
    else:
        if net.spec.mask_token is None:
            rounds = unroll(net, params, base, teacher.features, batch, ROUNDS)
        else:
            counts = o.counts(batch.token_BT.shape[1])
            rounds = unroll_masked(net, params, base, teacher.features, batch, counts, jax.random.split(key)[1])
            slots = [r.slot_BX for r in rounds]
        lasts = [r.last_BXD for r in rounds]
        logits = [apply(net, params, x, method="logits") if net.spec.draft_vocab else head(*base, x) for x in lasts]
    wanted = target_prediction(head(*base, teacher.features.last_BTD), objective.ids_W)
    first, total, accuracy = jnp.sum(weights(batch, 0)), jnp.float32(0), []
    for j, (logits_BXV, slot_BX) in enumerate(zip(logits, slots, strict=True)):

        def at(x: Any, by: int, slot_BX: Any = slot_BX) -> Any:
            x = shift_left(x, by)
            if slot_BX is None:
                return x
            return jnp.take_along_axis(x, slot_BX.reshape(*slot_BX.shape, *[1] * (x.ndim - 2)), axis=1)

        here, weight = jax.tree.map(lambda x, j=j, at=at: at(x, 1 + j), wanted), at(weights(batch, j), 0)
        logq = jax.nn.log_softmax(logits_BXV, axis=-1)
        scale_B = jnp.sum(weights(batch, j), axis=1) / jnp.sum(weight, axis=1)
        kept = jnp.where(here.knows_BX, weight * scale_B[:, None], 0.0)
        total += o.decay**j * jnp.sum(DRAFT_LOSSES[o.kind](here, logq) * kept) / first
        hit = (jnp.argmax(logq, axis=-1) == here.best_BX) & here.knows_BX
        accuracy.append(jnp.sum(weight, where=hit) / jnp.sum(weight))
    return total, accuracy


SLOW = ("eagle", "shared-expert")  # which eagle3 and p-eagle are like


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in NETS])
def test_a_few_positions_at_a_time_are_all_of_them(name: str, monkeypatch: pytest.MonkeyPatch):
    loss_settings, batch, key = loss_settings_of(name), packed(), jax.random.key(4)
    if name == "eagle":  # its noise is drawn inside
        loss_settings = LossSettings(kind="kl", rounds=ROUNDS, token=0.7)
    if name == "shared-expert":
        loss_settings = LossSettings(rounds=ROUNDS, token=0.7)
    teacher, params = teacher_output_of(batch, name), initial(NETS[name])
    objective = objective_of(name, loss_settings, positions=4)

    def loss(params: Any, remat: bool) -> Any:
        return head_loss(replace(objective, remat=remat), params, teacher, batch, key)

    @jax.jit
    def reference(params: Any) -> Any:
        return jax.value_and_grad(lambda p: all_at_once(objective, p, teacher, batch, key), has_aux=True)(params)

    @jax.jit
    def graded(params: Any) -> Any:
        return [jax.value_and_grad(partial(loss, remat=remat), has_aux=True)(params) for remat in (False, True)]

    (total, accuracy), wanted = reference(params)
    monkeypatch.setattr(query_blocks, "BLOCK", 5)
    found = graded(params)
    for (value, metrics), grads in found:
        np.testing.assert_allclose(value, 0.7 * total, rtol=1e-6)
        np.testing.assert_allclose(metrics["token_loss"], total, rtol=1e-6)
        np.testing.assert_allclose([metrics[f"accuracy_{j}"] for j in range(len(accuracy))], accuracy, rtol=1e-6)
        for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(one, 0.7 * other, rtol=2e-5, atol=3e-7 if name == "eagle" else 2e-7)
    assert sum(float(jnp.abs(x).sum()) for x in jax.tree.leaves(wanted)) > 0.1


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_a_product_that_is_not_trained_and_a_target_of_few_tokens(name: str):
    """Both at once, as a small head is trained: the rest of the target's product is not computed."""
    net = NARROW if name == "medusa" else DraftHead(dataclasses.replace(HEADS[name], draft_vocab=len(IDS)), EXACT)
    batch, params, (base, whole) = packed(), initial(net), target()
    teacher = teacher_output_of(batch, name)
    settings = LossSettings(rounds=ROUNDS if name == "medusa" else 1, skip_unknown=False)
    usual = HeadObjective(whole, IDS, base, net, settings)
    small = replace(usual, product=cut_product(whole, IDS), vocabulary=False)

    @jax.jit
    def graded(params: Any) -> Any:
        def loss(params: Any, objective: HeadObjective) -> Any:
            return head_loss(objective, params, teacher, batch, jax.random.key(4))[0]

        return [jax.value_and_grad(loss)(params, objective) for objective in (usual, small)]

    (wanted, theirs), (loss, ours) = graded(params)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    check_held(ours, theirs)


def test_some_tokens_of_the_targets_product_are_a_product_of_them():
    """A head without a product of its own learns what one learns whose product is these columns and stays."""
    own, none, batch = NARROW, NETS["medusa-without-product"], packed()
    base, whole = target()
    params: Any = initial(own)
    columns = whole["params"]["head_DV"][:, IDS]
    params = jax.tree_util.tree_map_with_path(lambda path, x: columns if path[-1].key == "head_DW" else x, params)
    bare = jax.tree.map(lambda x: x, params)
    for name in bare["params"]:
        del bare["params"][name]["head_DW"]
    teacher, settings = teacher_output_of(batch, "medusa"), LossSettings(rounds=ROUNDS)
    product = cut_product(whole, IDS)

    def graded(net: Any, params: Any) -> Any:
        objective = HeadObjective(whole, IDS, base, net, settings, product=product, vocabulary=False)
        run = jax.value_and_grad(lambda p: head_loss(objective, p, teacher, batch, jax.random.key(4))[0])
        return jax.jit(run)(params)

    (wanted, theirs), (loss, ours) = graded(own, params), graded(none, bare)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for path, grad in jax.tree_util.tree_leaves_with_path(ours):
        other = theirs["params"][path[1].key][path[2].key]
        assert jnp.any(other), path
        np.testing.assert_allclose(grad, other, rtol=2e-5, atol=2e-7)


@pytest.mark.parametrize("tied", [False, True])
def test_a_draft_model_learns_some_tokens_alone(tied: bool):
    """Its logits of a map's tokens are those of its whole product, and so are the gradients; the rest has none."""
    net, batch, (base, whole) = Transformer(dataclasses.replace(arch(), tied=tied), EXACT), packed(), target()
    params, teacher = net.initial(jax.random.key(1)), teacher_output_of(batch, "draft-model")
    some = HeadObjective(whole, IDS, base, net, LossSettings(rounds=1), product=cut_product(whole, IDS))

    def reference(params: Any) -> Any:
        logits = teacher_forced(net, params, batch.token_BT, batch.position_BT, batch.segment_BT)[0][..., IDS]
        wanted = target_prediction(head(base, whole, teacher.features.last_BTD)[..., IDS], None)
        here = jax.tree.map(lambda x: shift_left(x, 1), wanted)
        weight_BT = weights(batch, 0)
        loss_BT = DRAFT_LOSSES["soft_ce"](here, jax.nn.log_softmax(shift_left(logits, 1), axis=-1))
        return jnp.sum(loss_BT * weight_BT) / jnp.sum(weight_BT)

    def ours(params: Any) -> Any:
        return head_loss(some, params, teacher, batch, jax.random.key(4))[0]

    (loss, grads), (wanted, theirs) = jax.jit(lambda p: [jax.value_and_grad(f)(p) for f in (ours, reference)])(params)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-7)


def check_held(grads: Any, wanted: Any) -> None:
    """Checks gradients that are none for a vocabulary product and the wanted ones for everything else."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(wanted), strict=True)
    for (path, grad), other in pairs:
        assert jnp.any(other), path
        if path[-1].key == "head_DW":
            assert not jnp.any(grad), path
        else:
            np.testing.assert_allclose(grad, other, rtol=2e-5, atol=2e-7)
