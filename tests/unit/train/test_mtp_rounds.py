"""Rounds of a shared layer of multi-token prediction give the logits that drafting gives, in every kind of layer."""

import json
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.mtp import Mtp
from jaxspec.models.prediction import one_layer_arch
from jaxspec.models.trained_head import Head
from jaxspec.models.transformer import Transformer, head
from jaxspec.nn.policy import make_policy
from jaxspec.protocol import Features
from jaxspec.shapes import Params
from jaxspec.train.batch import Batch
from jaxspec.train.unroll import Round, weights
from jaxspec.train.unroll import unroll as eager_unroll
from tests.random_params import random_params
from tests.unit.train.test_unroll import DRAFTS, LENGTH, batch_of, drafts_of, run_teacher, texts

GOLDEN = Path(__file__).parents[2] / "golden"
EXACT = make_policy("float32")
# Grouped queries and experts; latent attention; a window with sinks, on the stream; a gated output; latent, scaled.
QUICK, OTHERS = (
    ("glm4_moe", "deepseek_v3", "mimo_v2_flash"),
    ("qwen3_next", "longcat_flash", "nemotron_h", "exaone_moe"),
)
KINDS = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


@cache
def pair(name: str) -> tuple[Transformer, Params, Mtp, Params]:
    """A golden model's target and the layer that would be trained for it, with weights large enough that texts vary."""
    arch = one_layer_arch(json.loads((GOLDEN / name / "config.json").read_text()))
    nets = Transformer(arch, EXACT), Mtp(arch, EXACT)
    params = []
    for seed, net in enumerate(nets):
        rng = np.random.default_rng(seed)
        params.append(jax.tree.map(partial(_varied, rng), random_params(net, seed, wide=7.0)))
    return nets[0], params[0], nets[1], params[1]


def _varied(rng: np.random.Generator, x: jax.Array) -> jax.Array:
    return x if x.ndim > 1 else jnp.asarray(np.asarray(x) + 0.3 * rng.normal(size=x.shape).astype(x.dtype))


@partial(jax.jit, static_argnums=(0, 3, 5))
def unrolled(name: str, params: Params, features: Features, rounds: int, batch: Batch, remat: bool) -> list[Round]:
    net, base, mtp, _ = pair(name)
    return eager_unroll(mtp, params, (net, base), features, batch, rounds, remat=remat)


def rounds_of(name: str, batch: Batch, *, remat: bool = False) -> list[Round]:
    net, base, _, params = pair(name)
    return unrolled(name, params, run_teacher(net, base, batch, pair(name)[2].joins).features, DRAFTS, batch, remat)


@pytest.mark.parametrize("name", KINDS)
def test_rounds_are_what_drafting_does(name: str):
    net, base, mtp, params = pair(name)
    token_BT = texts(1)
    drawn, logp = drafts_of(Head(mtp, params), token_BT, (net, base))
    token_BT[0, LENGTH : LENGTH + DRAFTS] = drawn[0]
    rounds = rounds_of(name, batch_of(token_BT))
    assert len({int(np.argmax(row)) for row in logp[0]}) > 1, "drafts that are all alike would prove little"
    for j, r in enumerate(rounds):
        found = head(net, base, r.last_BXD[:, LENGTH - 2])
        np.testing.assert_allclose(jax.nn.log_softmax(found)[0], logp[0, j], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", QUICK[1:2])
def test_packed_texts_do_not_see_one_another(name: str):
    whole = texts(2)
    size = whole.shape[1]
    packed = batch_of(whole.reshape(1, -1), np.repeat([[1, 2]], size, axis=1).reshape(1, -1).astype(np.int32))
    together = rounds_of(name, packed)
    for n in range(2):
        for j, r in enumerate(rounds_of(name, batch_of(whole[n : n + 1]))):
            trained = np.arange(size - 2 - j)
            own = np.asarray(together[j].last_BXD)[0, n * size + trained]
            np.testing.assert_allclose(own, np.asarray(r.last_BXD)[0, trained], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", [QUICK[1], *(pytest.param(name, marks=pytest.mark.slow) for name in QUICK[::2])])
def test_every_parameter_learns(name: str):
    """Gradients through all rounds, of experts and router, too, are those of differences along themselves."""
    net, base, _, params = pair(name)
    batch = batch_of(texts(2))
    features = run_teacher(net, base, batch, pair(name)[2].joins).features
    cover = [weights(batch, j) for j in range(DRAFTS)]
    mark = jnp.asarray(np.random.default_rng(5).normal(size=net.arch.model_dim), jnp.float32)

    def loss(params: Params) -> jax.Array:
        rounds = unrolled(name, params, features, DRAFTS, batch, True)
        return sum(jnp.sum(jnp.tanh(r.last_BXD @ mark) * w) for r, w in zip(rounds, cover, strict=True)) / 10

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    paths = jax.tree_util.tree_leaves_with_path(grads)
    still = {path[-1].key for path, leaf in paths if not float(jnp.max(jnp.abs(leaf)))}
    assert still <= {"choice_bias_E"}, "it chooses experts, and has no gradient in any trainer"
    norm = float(jnp.sqrt(sum(jnp.sum(leaf**2) for _, leaf in paths)))
    step = 1e-3 / norm
    up, down = (jax.jit(loss)(jax.tree.map(lambda x, g, s=s: x + s * g, params, grads)) for s in (step, -step))
    assert float(up - down) / (2 * step) == pytest.approx(norm**2, rel=0.02), float(value)
