"""Layers of which the output of one position per row is asked for, as drafters observe."""

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.addressing import CacheSize, LayerCache, init_layer
from jaxspec.cache.window import Window
from jaxspec.models.arch import ArchSpec, LayerSpec
from jaxspec.models.block import Block, init_block
from jaxspec.models.catalog import arch_of
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.policy import make_policy
from jaxspec.pytree import replace
from jaxspec.shapes import Array
from tests.random_params import fill

GOLDEN = Path(__file__).parents[2] / "golden"
FAMILIES = ("gpt_oss", "deepseek_v3", "glm_moe_dsa", "deepseek_v4", "opt")
LIKE_THEM = tuple(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral_window", "deepseek_v32"))
POLICY = make_policy("float32")
ROWS, COUNT, BLOCK, PAST = 3, 6, 8, 17
ASKED_B = np.array([0, 5, 2], np.int32)


@cache
def layers_of(family: str) -> tuple[ArchSpec, tuple[LayerSpec, ...]]:
    arch = arch_of(json.loads((GOLDEN / family / "config.json").read_text()))
    return arch, tuple(dict.fromkeys(arch.layers))


def stream(seed: int, arch: ArchSpec, count: int) -> Array:
    width = (arch.hyper.streams, arch.model_dim) if arch.hyper else (arch.model_dim,)
    return jax.random.normal(jax.random.key(seed), (ROWS, count, *width))


def params_of(layer: LayerSpec, arch: ArchSpec, seed: int) -> Any:
    return fill(jax.eval_shape(lambda key: init_block(key, layer, arch, POLICY), jax.random.key(0)), seed, wide=3.0)


@partial(jax.jit, static_argnums=(0, 1))
def run(
    layer: LayerSpec,
    arch: ArchSpec,
    params: dict,
    x: Array,
    start_B: Array,
    memory: LayerCache,
    output_index_B: Array | None,
) -> tuple[Array, LayerCache]:
    position_BT = start_B[:, None] + jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    window = Window(start_B, output_index_B=output_index_B, block=BLOCK)
    inputs = Inputs(position_BT % arch.vocab_size, position_BT, window, memory)
    out: Any = Block(layer, arch, POLICY).apply({"params": params}, x, inputs)
    return out.x, out.memory


@pytest.mark.parametrize("family", [*FAMILIES, *LIKE_THEM])
def test_it_is_that_of_all_positions_and_so_are_the_caches(family: str):
    arch, layers = layers_of(family)
    for number, layer in enumerate(layers):
        if getattr(layer.attention, "reuses_selection", False):
            continue  # it needs an earlier layer's selection
        params = params_of(layer, arch, number)
        memory = init_layer(dict(layer.attention.streams), CacheSize(ROWS, 32, PAST, BLOCK), jnp.dtype("float32"))
        _, memory = run(layer, arch, params, stream(1, arch, PAST), jnp.zeros(ROWS, jnp.int32), memory, None)
        start_B, x = jnp.array([17, 3, 9], jnp.int32), stream(2, arch, COUNT)
        whole, kept = run(layer, arch, params, x, start_B, memory, None)
        one, left = run(layer, arch, params, x, start_B, memory, jnp.asarray(ASKED_B))
        assert one.shape[1] == 1
        np.testing.assert_allclose(one[:, 0], np.asarray(whole)[np.arange(ROWS), ASKED_B], rtol=1e-5, atol=1e-5)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), left, kept)


@pytest.mark.served
def test_the_others_cost_keys_and_values_alone():
    """Behind attention one position of 64 is left."""
    arch, (layer, *_) = layers_of("mixtral_window")
    layer = replace(layer, attention=replace(layer.attention, window=None))
    params = params_of(layer, arch, 0)
    memory = init_layer(dict(layer.attention.streams), CacheSize(ROWS, 64, 64, BLOCK), jnp.dtype("float32"))

    def products(output_index_B: Array | None) -> float:
        args = layer, arch, params, stream(1, arch, 64), jnp.zeros(ROWS, jnp.int32), memory, output_index_B
        return run.lower(*args).compile().cost_analysis()["flops"]

    assert products(jnp.asarray(ASKED_B)) < 0.5 * products(None)


def test_a_tree_is_refused():
    window = Window(
        jnp.zeros(1, jnp.int32), path_BTJ=jnp.zeros((1, 2, 2), jnp.int32), output_index_B=jnp.zeros(1, jnp.int32)
    )
    with pytest.raises(AssertionError, match="every node"):
        _ = window.after_write
