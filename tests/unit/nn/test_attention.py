"""Gates and value heads of grouped-query attention."""

from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.nn.attention import Attention, AttentionSpec
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.policy import make_policy

DIM, SPEC = 16, AttentionSpec(heads=4, kv_heads=2, head_dim=8, value_dim=6, outer_gate="head")


def attention(spec: AttentionSpec) -> Any:
    return Attention(spec, DIM, 1e-6, make_policy(jnp.float32, depth="unrolled", kernels="xla"))


def inputs(x_BTD: jax.Array) -> Inputs:
    position_BT = jnp.broadcast_to(jnp.arange(x_BTD.shape[1], dtype=jnp.int32), x_BTD.shape[:2])
    return Inputs(position_BT, position_BT)


def outputs(spec: AttentionSpec, params: Any, x_BTD: jax.Array) -> jax.Array:
    return jax.jit(attention(spec).apply)({"params": params}, x_BTD, inputs(x_BTD)).out_BTD


def test_a_gate_for_each_head_is_one_for_each_of_its_channels():
    x_BTD = jax.random.normal(jax.random.key(1), (2, 5, DIM))
    params: Any = nn.unbox(jax.jit(attention(SPEC).init)(jax.random.key(0), x_BTD, inputs(x_BTD)))["params"]
    params = jax.tree.map(lambda leaf: 20 * leaf, params)
    by_head = outputs(SPEC, params, x_BTD)
    gate_DH = params.pop("head_gate_DH")
    params["gate_DHC"] = jnp.repeat(gate_DH[..., None], SPEC.value_width, axis=2)
    np.testing.assert_allclose(outputs(replace(SPEC, outer_gate="channel"), params, x_BTD), by_head, atol=1e-5)
    scaled = outputs(replace(SPEC, outer_gate="channel", value_scale=0.5), params, x_BTD)
    np.testing.assert_allclose(scaled, by_head / 2, atol=1e-5)
    assert np.abs(by_head).max() > 0.1
