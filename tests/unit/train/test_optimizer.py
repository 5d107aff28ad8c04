"""Muon trains the matrices of a head, AdamW what it is not for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from jaxspec.errors import ConfigError
from jaxspec.models.draft_head import DraftHead
from jaxspec.train.optimizer import RMS, adamw, matrices, optimizer_of
from jaxspec.train.settings import OptimizerSettings
from tests.unit.checkpoint.head_cases import FLOAT32, spec

SETTINGS = OptimizerSettings(learning_rate=0.5, muon=0.1, schedule="constant", warmup=0, clip=0)


@pytest.fixture(scope="module")
def params() -> Any:
    shapes = jax.eval_shape(DraftHead(spec({"model_type": "qwen3"}), FLOAT32).initial, jax.random.key(0))
    return jax.tree.map(lambda x: jnp.zeros(x.shape), shapes)


def change_of(rule: optax.GradientTransformation, params: Any, grads: Any) -> Any:
    with jax.numpy_dtype_promotion("standard"):
        return jax.jit(rule.update)(grads, rule.init(params), params)[0]["params"]


def test_each_trains_its_own(params: Any):
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)
    ours = change_of(optimizer_of(SETTINGS, 5), params, grads)
    axes = jax.tree_util.tree_leaves_with_path(
        matrices(params)["params"], is_leaf=lambda x: isinstance(x, MuonDimensionNumbers)
    )
    flat = {path[-1].key: x for path, x in axes}
    assert {"fc_XD", "qkv_DGQC", "out_HCD", "down_FD"} <= {*flat}
    assert not {"head_DW", "norm_D", "q_norm_C"} & {*flat}
    for path, change in jax.tree_util.tree_leaves_with_path(ours):
        name = path[-1].key
        if name not in flat:
            # optax gives AdamW Nesterov's momentum here, so the first change is greater than the rate.
            size = np.abs(np.asarray(change)) / SETTINGS.learning_rate
            assert 1 < size.min() < size.max() < 1.5, name
            continue
        inputs = change.shape[: len(flat[name].reduction_axis)]
        matrix = np.asarray(change).reshape(int(np.prod(inputs)), -1)
        values = np.linalg.svd(matrix, compute_uv=False)
        assert values.max() / values.min() < 3, f"{name}: its changes are as large in every direction"
        most = 0.1 * RMS * np.sqrt(max(matrix.shape))
        assert 0.6 * most < values.mean() < 1.2 * most, name


def test_without_a_rate_there_is_adamw_alone(params: Any):
    grads = jax.tree.map(jnp.ones_like, params)
    plain = OptimizerSettings(learning_rate=0.5, schedule="constant", warmup=0)
    one, other = (jax.tree.leaves(change_of(rule(plain, 5), params, grads)) for rule in (optimizer_of, adamw))
    assert all(map(np.array_equal, one, other))


def test_a_rate_below_zero():
    with pytest.raises(ConfigError, match=r"optimizer: muon must be at least 0, got -1"):
        OptimizerSettings(muon=-1.0)


@pytest.mark.parametrize("muon", [0.0, 0.1])
def test_a_product_that_is_not_trained_does_not_decay(params: Any, muon: float):
    settings = OptimizerSettings(learning_rate=0.5, muon=muon, schedule="constant", warmup=0, weight_decay=0.1)
    ones, none = (jax.tree.map(like, params) for like in (jnp.ones_like, jnp.zeros_like))
    change = change_of(optimizer_of(settings, 5, vocabulary=False), ones, none)
    flat = {path[-1].key: x for path, x in jax.tree_util.tree_leaves_with_path(change)}
    assert not jnp.any(flat["head_DW"])
    assert jnp.all(flat["fc_XD"] < 0)
