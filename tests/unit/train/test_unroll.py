"""Training-time rounds are what drafting does: the same head, the same slots, the same logits."""

from dataclasses import replace as changed
from functools import cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint.heads.layers import routed_ffn
from jaxspec.decode.prefill import Chunk, prefill
from jaxspec.decode.state import Target, init_state
from jaxspec.draft.head_drafter import head_drafter
from jaxspec.models.apply import apply
from jaxspec.models.arch import ArchSpec
from jaxspec.models.catalog import arch_of
from jaxspec.models.draft_head import DraftHead, HeadSpec
from jaxspec.models.medusa import Medusa, MedusaSpec
from jaxspec.models.trained_head import Head
from jaxspec.models.transformer import Transformer
from jaxspec.nn.policy import make_policy
from jaxspec.protocol import Anchor, CaptureSpec, Features
from jaxspec.pytree import replace
from jaxspec.shapes import Params
from jaxspec.topology import chain
from jaxspec.train.batch import Batch
from jaxspec.train.teacher import run_teacher as eager_run_teacher
from jaxspec.train.unroll import unroll as eager_unroll
from jaxspec.train.unroll import unroll_masked as eager_masked
from jaxspec.train.unroll import weights
from tests.random_params import random_params

VOCAB, DIM, LENGTH, DRAFTS = 40, 16, 13, 4
CONFIG = {
    "model_type": "qwen2_moe", "vocab_size": VOCAB, "hidden_size": DIM, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64,
}  # fmt: skip
run_teacher, fill = jax.jit(eager_run_teacher, static_argnums=(0, 3, 4)), jax.jit(prefill)
EXACT = make_policy("float32")
OWN = {"model_type": "llama", "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def arch(layers: int = 1, dim: int = DIM):
    config = {**OWN, "vocab_size": VOCAB, "hidden_size": dim, "num_hidden_layers": layers}
    return arch_of({**config, "num_key_value_heads": 1, "max_position_embeddings": 64, "rope_theta": 100.0})


def routed(of: ArchSpec) -> ArchSpec:
    """The layers with experts."""
    return changed(of, layers=tuple(changed(layer, ffn=routed_ffn(4, 2, 8, 8)) for layer in of.layers))


HEADS = {
    "eagle": HeadSpec(arch(), DIM, last=True, join="product", join_bias=True),
    "eagle3": HeadSpec(arch(), DIM, CaptureSpec(taps=(1, 2, 3)), draft_vocab=VOCAB),
    "eagle3-two-layers": HeadSpec(
        arch(2),
        DIM,
        CaptureSpec(taps=(0, 2)),
        norm_before_residual=True,
        fc_norm=True,
        norm_output=True,
        draft_vocab=VOCAB,
    ),
    "eagle3-narrow": HeadSpec(
        arch(dim=8), DIM, CaptureSpec(taps=(1, 3)), norm_before_fc=True, draft_vocab=VOCAB, own_embedding=True
    ),
    "shared-expert": HeadSpec(
        arch(), DIM, CaptureSpec(shared_outputs=(0, 2)), fc_norm=True, draft_vocab=VOCAB, routing=(0, 1), experts=4
    ),
    "routed": HeadSpec(routed(arch(2)), DIM, CaptureSpec(taps=(1, 3)), draft_vocab=VOCAB),
    "p-eagle-routed": HeadSpec(routed(arch()), DIM, CaptureSpec(taps=(1, 2)), draft_vocab=VOCAB, mask_token=3),
    "p-eagle": HeadSpec(arch(2), DIM, CaptureSpec(taps=(1, 2, 3)), draft_vocab=VOCAB, mask_token=3),
}


@cache
def target() -> tuple[Transformer, Params]:
    net = Transformer(arch_of(CONFIG), EXACT)
    return net, random_params(net, 0, wide=7.0)


@partial(jax.jit, static_argnums=(0, 4))
def unroll(net: DraftHead, params: Params, features: Features, batch: Batch, rounds: int):
    return eager_unroll(net, params, target(), features, batch, rounds)


@partial(jax.jit, static_argnums=(0, 4))
def unroll_masked(net: DraftHead, params: Params, features: Features, batch: Batch, counts: tuple[int, ...], key):
    return eager_masked(net, params, target(), features, batch, counts, key)


def texts(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, VOCAB, (count, LENGTH + DRAFTS + 1)).astype(np.int32)


def batch_of(token_BT: np.ndarray, segment_BT: np.ndarray | None = None) -> Batch:
    place = np.broadcast_to(np.arange(token_BT.shape[1], dtype=np.int32), token_BT.shape)
    if segment_BT is None:
        segment_BT = np.ones_like(token_BT)
    first = np.array([[int(np.argmax(row == s)) for s in row] for row in segment_BT], np.int32)
    parts = (token_BT, segment_BT, place - first, segment_BT > 0)
    return Batch(*(jnp.asarray(x) for x in parts))


def drafts_of(head: Head, token_BT: np.ndarray, pair: tuple[Transformer, Params] | None = None):
    """Drafted tokens and their log-probabilities after the first ``LENGTH`` tokens of one text."""
    net, params = pair or target()
    drafter = head_drafter(head, (net, params), chain(DRAFTS), 16)
    base = Target(params, net, 16)
    state = init_state(base, drafter, 1, 40, slack=32)
    chunk = np.zeros((1, 33), np.int32)
    chunk[0, :LENGTH] = token_BT[0, :LENGTH]
    zero = jnp.zeros(1, jnp.int32)
    state = fill(base, drafter, state, Chunk(zero, chunk, zero, jnp.full(1, LENGTH - 1, jnp.int32)))
    sampling = replace(state.sampling, temperature_B=jnp.ones(1), draft_limit_B=jnp.full(1, 99, jnp.int32))
    anchor = Anchor(
        jnp.asarray(token_BT[:, LENGTH - 1]), jnp.full(1, LENGTH - 1, jnp.int32), state.history_BS, sampling
    )
    proposal, _ = jax.jit(drafter.propose, static_argnums=2)(state.draft, anchor, "reject")
    assert bool(proposal.valid_BN.all())
    return np.asarray(proposal.token_BN), np.asarray(proposal.logp_BNV)


@cache
def initial(net: DraftHead | Medusa) -> Params:
    def varied(x: jax.Array) -> jax.Array:
        return jnp.asarray(x + 0.3 * np.random.default_rng(x.size).normal(size=x.shape).astype(x.dtype))

    return jax.tree.map(varied, jax.tree.map(np.asarray, random_params(net, 2)))


# One that reads shared experts is trained and served in tests/oracle/test_heads.py.
QUICK = ("eagle", "eagle3-two-layers", "p-eagle", "routed")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in HEADS])
def test_rounds_are_what_drafting_does(name: str):
    net = DraftHead(HEADS[name], EXACT)
    head = Head(net, initial(net))
    token_BT = texts(1)
    drawn, logp = drafts_of(head, token_BT)
    token_BT[0, LENGTH : LENGTH + DRAFTS] = drawn[0]
    batch = batch_of(token_BT)
    teacher = run_teacher(*target(), batch, net.spec.reads)
    if net.spec.mask_token is None:
        rounds = unroll(net, head.params, teacher.features, batch, DRAFTS)
    else:
        counts = (token_BT.shape[1],) * (DRAFTS - 1)
        rounds = unroll_masked(net, head.params, teacher.features, batch, counts, jax.random.key(0))
    slot = LENGTH - 2
    for j, r in enumerate(rounds):
        last = r.last_BXD[:, slot]
        if net.spec.draft_vocab:
            found = apply(net, head.params, last, method="logits")
        else:
            base, params = target()
            found = base.apply(params, last, method="logits")
        np.testing.assert_allclose(jax.nn.log_softmax(found)[0], logp[0, j], rtol=2e-4, atol=2e-4)


def test_medusa_predicts_from_the_last_hidden_state():
    net = Medusa(MedusaSpec(DRAFTS, 2, DIM, VOCAB, VOCAB), EXACT)
    head, token_BT = Head(net, initial(net)), texts(1)
    _, logp = drafts_of(head, token_BT)
    teacher = run_teacher(*target(), batch_of(token_BT), CaptureSpec())
    found = apply(net, head.params, teacher.features.last_BTD[:, LENGTH - 2])
    np.testing.assert_allclose(jax.nn.log_softmax(found)[:, 0], logp[0], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    "name", ["eagle3-two-layers", pytest.param("shared-expert", marks=pytest.mark.slow), "p-eagle"]
)
def test_packed_texts_do_not_see_one_another(name: str):
    net = DraftHead(HEADS[name], EXACT)
    params = initial(net)
    whole = texts(2)
    size = whole.shape[1]
    alone = [batch_of(whole[n : n + 1]) for n in range(2)]
    packed = batch_of(whole.reshape(1, -1), np.repeat([[1, 2]], size, axis=1).reshape(1, -1).astype(np.int32))
    np.testing.assert_array_equal(packed.position_BT[0], np.tile(np.arange(size), 2))

    def rounds_of(batch: Batch):
        teacher = run_teacher(*target(), batch, net.spec.reads)
        if net.spec.mask_token is not None:
            counts = (batch.token_BT.shape[1],) * (DRAFTS - 1)
            return unroll_masked(net, params, teacher.features, batch, counts, jax.random.key(0))
        return unroll(net, params, teacher.features, batch, DRAFTS)

    together = rounds_of(packed)
    for n, batch in enumerate(alone):
        for j, r in enumerate(rounds_of(batch)):
            trained = np.flatnonzero(np.asarray(weights(batch, j))[0])
            assert trained.tolist() == list(range(size - 2 - j))
            np.testing.assert_array_equal(np.flatnonzero(np.asarray(weights(packed, j))[0, n * size :][:size]), trained)
            own = np.asarray(together[j].last_BXD)[0, n * size + trained]
            np.testing.assert_allclose(own, np.asarray(r.last_BXD)[0, trained], rtol=2e-4, atol=2e-4)


def test_dropped_slots_keep_their_own_drafts_in_sight():
    net = DraftHead(HEADS["p-eagle"], EXACT)
    params, batch = initial(net), batch_of(texts(2))
    teacher = run_teacher(*target(), batch, net.spec.reads)
    full = (batch.token_BT.shape[1],) * 3
    every = unroll_masked(net, params, teacher.features, batch, full, jax.random.key(0))
    some = unroll_masked(net, params, teacher.features, batch, (12, 8, 5), jax.random.key(4))
    slots = [np.asarray(r.slot_BX) for r in some]
    assert [s.shape[1] for s in slots] == [full[0], 12, 8, 5]
    assert not np.array_equal(slots[2][0], slots[2][1])
    for before, after in pairwise(slots):
        assert all(set(a) <= set(b) for a, b in zip(after, before, strict=True))
    for whole, part, slot in zip(every, some, slots, strict=True):
        own = np.take_along_axis(np.asarray(whole.last_BXD), slot[:, :, None], axis=1)
        np.testing.assert_allclose(np.asarray(part.last_BXD), own, rtol=2e-4, atol=2e-4)


def test_what_a_head_reads_is_what_the_target_computed():
    net, params = target()
    batch = batch_of(texts(2))
    teacher = run_teacher(net, params, batch, CaptureSpec(taps=(0, 3), shared_outputs=(1,)), routing=(0, 2))
    stacked = Transformer(net.arch, EXACT.update(depth="stacked"))
    layers = [params["params"][f"layers_{y}"] for y in range(3)]
    rest = {k: v for k, v in params["params"].items() if not k.startswith("layers_")}
    whole = {"params": {**rest, "segment_0": jax.tree.map(lambda *x: jnp.stack(x), *layers)}}
    again = run_teacher(stacked, whole, batch, CaptureSpec(taps=(0, 3), shared_outputs=(1,)), routing=(0, 2))
    for one, other in zip(jax.tree.leaves(teacher), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(teacher.features.taps[1], teacher.features.stream)
    assert len(teacher.expert_YBTA) == 2
    assert teacher.features.shared_outputs[0].shape == teacher.features.last_BTD.shape
