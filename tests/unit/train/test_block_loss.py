"""Blocks in training are what drafting does, and their losses are those of the papers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxspec.models.apply import apply
from jaxspec.models.arch import ArchSpec
from jaxspec.models.block_head import BlockHead, BlockSpec
from jaxspec.models.trained_head import Head
from jaxspec.models.transformer import head as head_of
from jaxspec.models.transformer import teacher_forced
from jaxspec.protocol import CaptureSpec
from jaxspec.pytree import replace
from jaxspec.shapes import Params
from jaxspec.train.batch import Batch
from jaxspec.train.block_loss import _followed, block_loss, choose_anchors, run_blocks, trained_drafts
from jaxspec.train.block_settings import BlockLoss
from jaxspec.train.objective import HeadObjective, cut_product
from jaxspec.train.settings import LossSettings
from tests.unit.train.test_unroll import (
    DIM,
    DRAFTS,
    EXACT,
    LENGTH,
    VOCAB,
    arch,
    batch_of,
    drafts_of,
    routed,
    run_teacher,
    target,
    texts,
)
from tests.unit.train.test_unroll import initial as initial_of
from tests.unit.train.test_vocab_loss import check_held

UPDATES = 300
choose = jax.jit(choose_anchors, static_argnums=0)
READS = CaptureSpec(taps=(1, 2, 3))


def layers(*windows: int | None) -> ArchSpec:
    """Qwen3's layers with these windows."""
    made = arch(len(windows))
    each: Any = zip(made.layers, windows, strict=True)
    return replace(
        made,
        layers=tuple(replace(y, attention=replace(y.attention, qk_norm="head", window=w)) for y, w in each),
    )


def spec(of: ArchSpec, **changes: Any) -> BlockSpec:
    given = {"block_size": DRAFTS + 1, "mask_token": 3, "causal": (False,) * len(of.layers)} | changes
    return BlockSpec(of, DIM, READS, **given)


DSPARK: dict[str, Any] = {"from_anchor": True, "block_size": DRAFTS, "markov_rank": 4, "confidence": "markov"}
SPECS = {
    "dflash": spec(layers(None, None), own_mask=True, softcap=20.0),
    "windows": spec(layers(6, None), causal=(True, False), draft_vocab=VOCAB),
    "both-ways": spec(layers(6, 7)),
    "to-the-anchor": spec(layers(5, None), causal=(True, False), window_from_anchor=True, embedding_scale=2.0),
    "shared-keys-to-the-anchor": spec(layers(5), window_from_anchor=True),
    "dspark": spec(layers(None), **DSPARK),
    "routed": spec(routed(layers(None, 6))),
    "dflash2-routed": spec(routed(layers(None)), conv_taps=2, conv_group=4, selector_rank=4, selector_top_k=VOCAB),
    "dspark-rnn": spec(layers(None), markov_kind="rnn", **(DSPARK | {"block_size": DRAFTS + 2})),
    "dflash2": spec(layers(None), conv_taps=2, conv_group=4, selector_rank=4, selector_top_k=VOCAB),
}


def objective_of(net: BlockHead, **loss: Any) -> HeadObjective:
    base, params = target()
    block = BlockLoss(**loss.pop("block", {}))
    return HeadObjective(params, None, base, net, LossSettings(block=block, **loss))


@partial(jax.jit, static_argnums=0)
def trained_logits(net: BlockHead, params: Params, objective: HeadObjective, batch: Batch, anchor_BN: jax.Array):
    """What drafts are drawn from after the text's own tokens."""
    teacher = run_teacher(*target(), batch, net.spec.reads)
    last = run_blocks(objective, net, params, teacher, batch, anchor_BN)[0][:, :, net.spec.first :]
    before = anchor_BN[..., None] + jnp.arange(net.spec.drafts, dtype=jnp.int32)
    read = _followed(net, params, last, batch.token_BT[jnp.zeros((1, 1, 1), jnp.int32), before])
    own = bool(net.spec.draft_vocab)
    logits = apply(net, params, last, method="logits") if own else head_of(*target(), last)
    logits = net.spec.shaped(logits)
    if net.spec.markov_rank:
        logits = logits + apply(net, params, read.markov, method="markov_bias")
    if net.spec.selector_rank:  # all tokens are candidates
        every = jnp.broadcast_to(jnp.arange(VOCAB, dtype=jnp.int32), logits.shape)
        logits = logits + apply(net, params, read.context, every, method="candidate_scores")
    return jax.nn.log_softmax(logits)


QUICK = ("windows", "dspark-rnn", "dflash2", "routed", "shared-keys-to-the-anchor")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in SPECS])
def test_blocks_in_training_are_what_drafting_does(name: str):
    net = BlockHead(SPECS[name], EXACT)
    params: Any = initial_of(net)
    token_BT = texts(1)
    drawn, logp = drafts_of(Head(net, params), token_BT)
    token_BT[0, LENGTH : LENGTH + DRAFTS] = drawn[0]
    found = trained_logits(net, params, objective_of(net), batch_of(token_BT), jnp.full((1, 1), LENGTH - 1, jnp.int32))
    np.testing.assert_allclose(np.asarray(found)[0, 0, :DRAFTS], logp[0], atol=2e-4)


def test_a_block_sees_neither_other_texts_nor_other_blocks():
    net = BlockHead(SPECS["windows"], EXACT)
    params: Any = initial_of(net)
    alone = texts(1)
    count = alone.shape[1]
    both = np.concatenate([texts(1, seed=5), alone], axis=1)
    packed = batch_of(both, np.repeat([[1, 2]], count, axis=1))
    anchors = jnp.asarray([[4, 9, count + 4, count + 9]], jnp.int32)
    found = trained_logits(net, params, objective_of(net), packed, anchors)
    wanted = trained_logits(net, params, objective_of(net), batch_of(alone), jnp.asarray([[4, 9]], jnp.int32))
    np.testing.assert_allclose(found[0, 2:], wanted[0], atol=2e-4)


def test_anchors_stand_before_trained_tokens_and_drafts_count_up_to_the_first_that_is_not():
    segment = np.array([[1] * 8 + [2] * 5 + [0] * 3])
    batch = batch_of(np.ones_like(segment), segment)
    trained = np.array([[0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0]], bool)
    batch = replace(batch, loss_BT=jnp.asarray(trained))
    anchors = choose(9, batch, jax.random.key(0))
    np.testing.assert_array_equal(anchors, [[1, 2, 3, 5, 6, 8, 9, 10, 11]])
    few = choose(3, batch, jax.random.key(0))
    assert {*np.asarray(few)[0].tolist()} < {*np.asarray(anchors)[0].tolist()}
    weight = trained_drafts(batch, jnp.asarray([[1, 3, 6, 11, 15]], jnp.int32), 4)
    np.testing.assert_array_equal(weight[0].sum(axis=-1), [3, 1, 1, 1, 0])


def test_the_losses_are_those_of_the_papers():
    """Against the formulas, block by block: D-PACE's weights, total variation, predicted acceptance, selector."""
    net = BlockHead(SPECS["dspark"], EXACT)
    params: Any = initial_of(net)
    batch, plain = batch_of(texts(1)), objective_of(net)
    teacher = run_teacher(*target(), batch, net.spec.reads)
    alpha, count = 0.5, batch.token_BT.shape[1]
    anchors = choose(count, batch, jax.random.key(0))
    logq = np.asarray(trained_logits(net, params, plain, batch, anchors), np.float64)[0]
    mask = np.asarray(trained_drafts(batch, anchors, net.spec.drafts))[0]
    at = np.minimum(np.asarray(anchors)[0][:, None] + np.arange(net.spec.drafts), count - 1)
    logits = head_of(*target(), teacher.features.last_BTD)
    p = np.asarray(jax.nn.softmax(logits), np.float64)[0][at]
    ce, overlap = -(p * logq).sum(-1), np.minimum(p, np.exp(logq)).sum(-1)
    for loss in (
        {"token": 0.1, "decay": 0.8, "block": {"anchors": count, "tv": 1.8, "confidence": 1.0}},
        {"token": 1.0, "block": {"anchors": count, "pace": alpha}},
    ):
        objective = objective_of(net, **loss)
        total, metrics = jax.jit(block_loss, static_argnums=1)(
            objective, net, params, teacher, batch, jax.random.key(0)
        )
        if "pace" in loss["block"]:
            label = np.take_along_axis(np.exp(logq), p.argmax(-1)[..., None], axis=-1)[..., 0]
            through = np.cumprod(np.where(mask > 0, (1 - alpha) * label + alpha, 1), axis=1) * mask
            wanted = (through[:, ::-1].cumsum(1)[:, ::-1] * mask * ce).sum()
        else:
            sure = np.asarray(confidence(net, params, plain, batch, anchors), np.float64)[0, ..., 0]
            bce = np.log1p(np.exp(sure)) - overlap * sure
            wanted = (0.8 ** np.arange(net.spec.drafts) * mask * (0.1 * ce + 1.8 * (1 - overlap) + bce)).sum()
        np.testing.assert_allclose(total, wanted / mask[:, 0].sum(), rtol=1e-4)
        assert float(metrics["trained_tokens"]) == mask[:, 0].sum()


def test_candidates_among_some_tokens_are_known_by_the_targets_ids():
    """With a map all of whose tokens are candidates, the loss is that of the whole product among them."""
    ids_W = np.arange(1, VOCAB, 3)
    net = BlockHead(replace(SPECS["dflash2"], selector_top_k=len(ids_W)), EXACT)
    params, batch = initial_of(net), batch_of(texts(1))
    teacher = run_teacher(*target(), batch, net.spec.reads)
    count = batch.token_BT.shape[1]
    usual = objective_of(net, token=0.0, decay=1.0, skip_unknown=False, block={"anchors": count, "selector": 1.0})
    some = replace(usual, ids_W=jnp.asarray(ids_W), product=cut_product(usual.target_params, jnp.asarray(ids_W)))
    total, metrics = jax.jit(block_loss, static_argnums=1)(some, net, params, teacher, batch, jax.random.key(0))
    anchors = choose(count, batch, jax.random.key(0))
    whole = replace(net, spec=replace(net.spec, selector_top_k=VOCAB))
    logp = np.asarray(trained_logits(whole, params, usual, batch, anchors), np.float64)[0][..., ids_W]
    logp -= np.log(np.exp(logp).sum(axis=-1, keepdims=True))
    mask = np.asarray(trained_drafts(batch, anchors, net.spec.drafts))[0]
    at = np.minimum(np.asarray(anchors)[0][:, None] + np.arange(net.spec.drafts), count - 1)
    best = np.asarray(head_of(*target(), teacher.features.last_BTD))[0][at][..., ids_W].argmax(axis=-1)
    label = np.take_along_axis(logp, best[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(total, -(label * mask).sum() / mask[:, 0].sum(), rtol=1e-4)
    right = (logp.argmax(axis=-1) == best)[:, 0]
    np.testing.assert_allclose(metrics["accuracy_0"], (right * mask[:, 0]).sum() / mask[:, 0].sum(), rtol=1e-6)


@pytest.mark.served
def test_candidates_are_chosen_without_a_sort():
    """XLA:CPU sorts the whole vocabulary where the best of it are cut apart, which was most of an update's time."""
    net, batch = BlockHead(replace(SPECS["dflash2"], selector_top_k=6), EXACT), batch_of(texts(1))
    objective, teacher = objective_of(net, block={"selector": 1.0}), run_teacher(*target(), batch, net.spec.reads)
    graded = jax.grad(lambda p: block_loss(objective, net, p, teacher, batch, jax.random.key(0))[0])
    text = jax.jit(graded).lower(initial_of(net)).compile().as_text().splitlines()
    assert any('"TopK"' in line for line in text)
    assert not [line for line in text if " sort(" in line and f",{VOCAB}]" in line]


@pytest.mark.parametrize("name", ["dspark", "dflash2"])
def test_what_drafts_follow_from_is_trained_though_the_product_is_not(name: str):
    """The Markov head's table and the selector read the vocabulary, too, and are no part of its product."""
    net = BlockHead(replace(SPECS[name], draft_vocab=VOCAB), EXACT)
    params, batch = initial_of(net), batch_of(texts(1))
    teacher = run_teacher(*target(), batch, net.spec.reads)
    usual = objective_of(net, block={"anchors": 8, "selector" if name == "dflash2" else "confidence": 1.0})

    @jax.jit
    def graded(params: Any) -> Any:
        def loss(params: Any, objective: HeadObjective) -> Any:
            return block_loss(objective, net, params, teacher, batch, jax.random.key(0))[0]

        return [jax.grad(loss)(params, objective) for objective in (replace(usual, vocabulary=False), usual)]

    check_held(*graded(params))


@partial(jax.jit, static_argnums=0)
def confidence(net: BlockHead, params: Any, objective: HeadObjective, batch: Batch, anchors: jax.Array) -> jax.Array:
    teacher = run_teacher(*target(), batch, net.spec.reads)
    last = run_blocks(objective, net, params, teacher, batch, anchors)[0]
    before = jnp.minimum(anchors[..., None] + jnp.arange(net.spec.drafts), batch.token_BT.shape[1] - 1)
    return _followed(net, params, last, batch.token_BT[0][before]).confidence


@pytest.mark.parametrize("name", ["dflash", *(pytest.param(n, marks=pytest.mark.slow) for n in ("dspark", "dflash2"))])
def test_a_head_learns_a_text_by_heart(name: str):
    """The loss falls, and after some updates most drafts of whole blocks are the target's own."""
    net = BlockHead(replace(SPECS[name], selector_top_k=6 if name == "dflash2" else 0), EXACT)
    loss = {"selector": 1.0} if name == "dflash2" else {"confidence": 0.1, "tv": 0.5} if name == "dspark" else {}
    objective = objective_of(net, kind="kl", block={"anchors": 8} | loss)
    text, optimizer = written(2), optax.adam(0.01)
    batch = batch_of(text)
    teacher = run_teacher(*target(), batch, net.spec.reads)

    @jax.jit
    def learn(objective: HeadObjective) -> Any:
        def update(carry: Any, number: jax.Array) -> Any:
            params, state = carry
            run = jax.value_and_grad(
                lambda p: block_loss(objective, net, p, teacher, batch, jax.random.key(number)), has_aux=True
            )
            (_, metrics), grads = run(params)
            with jax.numpy_dtype_promotion("standard"):
                changes, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, changes), state), metrics

        params = net.initial(jax.random.key(2))
        return jax.lax.scan(update, (params, optimizer.init(params)), jnp.arange(UPDATES, dtype=jnp.uint32))

    (params, _), metrics = learn(objective)
    assert metrics["token_loss"][-1] < 0.5 * metrics["token_loss"][0]
    assert metrics["simulated_length"][0] < 2
    assert metrics["simulated_length"][-1] > 3
    _, logp = drafts_of(Head(net, params), text[:1, : LENGTH + DRAFTS].copy())
    right = logp[0].argmax(axis=-1) == text[0, LENGTH : LENGTH + DRAFTS]
    assert right.mean() >= 0.75, "serving drafts what training taught"


def written(count: int) -> np.ndarray:
    """Texts that the target continues greedily from their first tokens."""
    net, params = target()
    token_BT = np.zeros((count, 20), np.int32)
    token_BT[:, :2] = texts(count)[:, :2]
    position = jnp.broadcast_to(jnp.arange(20, dtype=jnp.int32), token_BT.shape)
    run = jax.jit(lambda token: jnp.argmax(teacher_forced(net, params, token, position)[0], axis=-1))
    for at in range(2, 20):
        token_BT[:, at] = np.asarray(run(jnp.asarray(token_BT)))[:, at - 1]
    return token_BT
