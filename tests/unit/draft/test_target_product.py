"""Drafting some tokens alone, with the columns of the target's vocabulary product that belong to them."""

from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.draft import methods
from jaxspec.draft.target_product import CutProduct, TargetDrafter
from jaxspec.errors import ConfigError
from jaxspec.models.block_head import BlockHead
from jaxspec.models.catalog import arch_of
from jaxspec.models.medusa import Medusa
from jaxspec.models.trained_head import Head
from jaxspec.models.transformer import Transformer, head
from jaxspec.native.packing import pack
from jaxspec.nn.policy import make_policy
from pallas_kernels.quantized import Format, Quantized, widen
from tests.contract.tiny_drafters import (
    BLOCK,
    CONFIG,
    VOCAB,
    config_of,
    drafting,
    head_of,
    model,
    observed,
    propose,
)
from tests.random_params import random_params

IDS = np.arange(1, VOCAB, 3, dtype=np.int32)
REST = np.setdiff1d(np.arange(VOCAB), IDS)
LENGTHS = (5, 12, 30)
MAP = "speculative_token_map"
CHAIN, TREE = {"num_speculative_tokens": 4}, {"speculative_token_tree": [2, 2]}


def without_product(method: str) -> Any:
    """What drafts, with the target's vocabulary product where a head of the kind may have its own."""
    if method not in ("medusa", "dflash", "dspark"):
        return drafting(method)
    net: Any = head_of(method).net
    kind = Medusa if isinstance(net, Medusa) else BlockHead
    net = kind(changed(net.spec, draft_vocab=0), net.policy)
    return Head(net, random_params(net, 0, wide=7.0), None)


@pytest.fixture
def token_map(tmp_path: Path) -> str:
    np.save(tmp_path / "map.npy", IDS[::-1])
    return str(tmp_path / "map.npy")


@pytest.mark.parametrize(
    ("method", "shape"),
    [("eagle", CHAIN), ("mtp", TREE), ("early_exit", CHAIN), *((m, CHAIN) for m in ("medusa", "dflash2", "dspark"))],
)
def test_drafts_are_those_of_the_whole_product_among_these_tokens(method: str, shape: dict, token_map: str):
    config: Any = config_of(method, shape)
    whole, some = (
        methods.build(methods.parse(config | more), model(), BLOCK, without_product(method))
        for more in ({}, {MAP: token_map})
    )
    state, anchor = observed(whole, LENGTHS)
    (wanted, _), (found, _) = (propose(drafter, state, anchor, "reject") for drafter in (whole, some))
    assert np.isin(found.token_BN, IDS).all()
    first = np.asarray(wanted.logp_BNV)[:, 0]
    ours = np.asarray(found.logp_BNV)[:, 0]
    assert np.isneginf(ours[:, REST]).all()
    among = np.where(np.isin(np.arange(VOCAB), IDS), first, -np.inf)
    expected = np.asarray(jax.nn.log_softmax(among))[:, IDS]
    likely = np.isfinite(expected)  # a selector's drafts are a few candidates
    np.testing.assert_array_equal(np.isfinite(ours[:, IDS]) & likely, likely)
    if method != "dflash2":  # whose candidates are others where fewer tokens are drafted
        np.testing.assert_allclose(ours[:, IDS], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.served
def test_a_selector_s_candidates_are_chosen_without_a_sort():
    """Each draft reads a part of what was chosen for all, and XLA must not sort the vocabulary for that."""
    drafter = methods.build(methods.parse(config_of("dflash2", CHAIN)), model(), BLOCK, drafting("dflash2"))
    program = propose.lower(drafter, *observed(drafter, LENGTHS), rule="reject").compile()
    assert not [line for line in program.as_text().splitlines() if " sort(" in line and f",{VOCAB}]" in line]


FORMS = {
    "plain": {},
    "tied": {"tied": True},
    "capped and scaled": {"logit_cap": 3.0, "logit_scale": 0.5},
    "bias and another width": {"head_bias": True, "embed_dim": 8, "tied": True},
    "packed": {},
    "quantized": {},
}


@pytest.mark.parametrize("form", FORMS)
def test_its_logits_are_columns_of_the_whole_ones(form: str):
    net = Transformer(changed(arch_of(CONFIG), **FORMS[form]), make_policy("float32"))
    params: Any = random_params(net, 1)
    own, numbers = params["params"], np.random.default_rng(2)
    last = jnp.asarray(numbers.normal(size=(2, 3, net.arch.model_dim)), jnp.float32)
    given = dict(own)
    if form == "packed":
        net = net.clone(policy=net.policy.update(kernels="native"))
        given["head_DV"] = own["head_DV"] = pack(own["head_DV"])
    elif form == "quantized":
        values = jnp.asarray(numbers.integers(-127, 128, own["head_DV"].shape), jnp.int8)
        given["head_DV"] = Quantized(values, jnp.full((1, VOCAB), 0.5), Format("int8", (net.arch.model_dim, 1)))
        own["head_DV"] = widen(given["head_DV"], jnp.bfloat16)
    product = CutProduct.of(net, {"params": given}, jnp.asarray(IDS))
    wanted = np.asarray(head(net, params, last))[..., IDS]
    np.testing.assert_allclose(product.logits(last), wanted, rtol=1e-6, atol=1e-6)


def test_other_weights_of_the_target_and_of_a_draft_model_are_cut_again(token_map: str):
    net, params = model()
    other = random_params(net, 5, wide=7.0)
    for method in ("eagle", "draft_model"):
        config: Any = config_of(method, CHAIN)
        drafter: Any = methods.build(methods.parse(config | {MAP: token_map}), (net, params), BLOCK, drafting(method))
        new = drafter.update_target(other) if isinstance(drafter, TargetDrafter) else drafter.update_params(other)
        wanted = CutProduct.of(net, other, jnp.asarray(IDS)).weights
        jax.tree.map(np.testing.assert_array_equal, new.product.weights, wanted)
        assert jax.tree.structure(new) == jax.tree.structure(drafter)


@pytest.mark.parametrize("method", ["eagle3", "medusa", "dspark"])
def test_heads_with_a_product_of_their_own_are_refused(method: str):
    config: Any = config_of(method, CHAIN)
    with pytest.raises(ConfigError, match="draft has its own; leave it out"):
        methods.build(methods.parse(config | {MAP: "map.npy"}), model(), BLOCK, drafting(method))


def test_where_it_says_nothing_it_is_refused():
    with pytest.raises(ConfigError, match='"ngram" computes no vocabulary product; leave speculative_token_map out'):
        methods.parse({"method": "ngram", "num_speculative_tokens": 2, MAP: "map.npy"})
    with pytest.raises(ConfigError, match="speculative_token_map must be the name of a file of token ids, got 3"):
        methods.parse({"method": "mtp", "num_speculative_tokens": 2, MAP: 3})
