"""The frozen target of training is the one that serves: its layout, kernels, parameters, and what it computes."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint.load.model import load_model
from jaxspec.native.packing import Packed
from jaxspec.native.product import kernels
from jaxspec.nn.policy import make_policy, policy_for
from jaxspec.protocol import CaptureSpec
from jaxspec.train.batch import Batch
from jaxspec.train.settings import RunSettings, load_run_settings
from jaxspec.train.target import read_headers
from jaxspec.train.teacher import run_teacher

GOLDEN = Path(__file__).parents[2] / "golden" / "qwen3_moe"
READS = CaptureSpec(taps=(0, 1, 2))


def settings_of(dtype: str) -> RunSettings:
    return load_run_settings("eagle3", [f'train.target_dtype="{dtype}"'])


def batch() -> Batch:
    token_BT = jnp.asarray(np.random.default_rng(0).integers(1, 30, (2, 12)), jnp.int32)
    segment_BT = jnp.asarray([[1] * 7 + [2] * 5, [1] * 10 + [0] * 2], jnp.int32)
    position_BT = jnp.asarray([[*range(7), *range(5)], [*range(10), 0, 0]], jnp.int32)
    return Batch(token_BT, segment_BT, position_BT, segment_BT > 0)


def taught(net: Any, params: Any) -> Any:
    return jax.jit(lambda params: run_teacher(net, params, batch(), READS, (0,)))(params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_served_parameters_teach_as_plain_ones(dtype: str):
    model = read_headers(settings_of(dtype), GOLDEN).load()
    assert model.net.policy.layout == policy_for(dtype, "cpu").layout
    assert model.net.policy.layout.depth == "stacked"
    packed = any(isinstance(x, Packed) for x in jax.tree.leaves(model.params, is_leaf=lambda x: isinstance(x, Packed)))
    assert packed == (kernels().handle is not None)
    assert model.net.policy.compute.kernels == ("native" if packed else "xla")
    plain = load_model(GOLDEN, make_policy(dtype))
    assert plain.net.policy.layout.depth == "unrolled"
    found, wanted = taught(model.net, model.params), taught(plain.net, plain.params)
    for one, other in zip(jax.tree.leaves(found.features), jax.tree.leaves(wanted.features), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 if dtype == "float32" else 0.05)
    if dtype == "float32":
        np.testing.assert_array_equal(found.expert_YBTA[0], wanted.expert_YBTA[0])


def test_on_a_cpu_recurrent_layers_teach_in_chunks():
    """What a hybrid teaches is near to what it teaches in steps, text by text."""
    model = read_headers(settings_of("float32"), GOLDEN.with_name("qwen3_next")).load()
    net: Any = model.net
    assert net.policy.compute.recurrence == "chunks"
    steps = net.clone(policy=net.policy.update(recurrence="steps"))
    ours, theirs = (taught(each, model.params).features for each in (net, steps))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.mean(np.abs(one - other)) < 1e-5 * max(float(np.max(np.abs(other))), 1.0)
    assert any(not np.array_equal(one, other) for one, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True))
