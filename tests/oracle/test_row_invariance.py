"""What losslessness in bfloat16 rests on: a row's logits are bitwise the same however many rows run with it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.addressing import CacheSize
from jaxspec.cache.window import Window
from jaxspec.checkpoint.load.model import Model, load_model
from jaxspec.models.caches import init_caches
from jaxspec.models.transformer import forward, head
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.policy import policy_for
from jaxspec.serve.demo_pair import demo_model_dir

pytestmark = pytest.mark.served

BFLOAT16 = jnp.dtype("bfloat16")
LENGTH = 140  # beyond one attention block


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(demo_model_dir("target"), policy_for("bfloat16", "cpu"))


def bits(model: Model, token_BS: np.ndarray, width: int) -> np.ndarray:
    """Logits of the first row, decoded ``width`` positions at a time, as bits."""
    net, rows = model.net, len(token_BS)
    layers = init_caches(net.arch, net.policy, CacheSize(rows, 256, width))

    @partial(jax.jit, donate_argnums=0)
    def run(layers, token_BT, start_B):
        position_BT = start_B[:, None] + jnp.arange(width, dtype=jnp.int32)
        hidden = forward(net, model.params, Inputs(token_BT, position_BT, Window(start_B), layers))
        return hidden.caches, head(net, model.params, hidden.last_BTD)[0]

    found = []
    for start in range(0, token_BS.shape[1] - width + 1, width):
        layers, logits = run(layers, token_BS[:, start : start + width], np.full(rows, start, np.int32))
        found.append(np.asarray(logits))
    return np.concatenate(found).view(np.uint32)


def test_logits_do_not_depend_on_the_rows_beside_them(model: Model):
    rng = np.random.default_rng(0)
    token_BS = rng.integers(0, model.net.arch.vocab_size, (3, LENGTH)).astype(np.int32)
    one = bits(model, token_BS[:1], 1)
    for rows, width in ((1, 4), (1, 7), (3, 5)):
        many = bits(model, token_BS[:rows], width)
        np.testing.assert_array_equal(many, one[: len(many)], err_msg=f"{rows} rows of {width} positions")


def test_stacked_layers_give_the_bits_of_layers_apart(model: Model):
    """With native kernels, which read a layer's weights where they lie in the stack."""
    if model.net.policy.compute.kernels != "native":
        pytest.skip("no C compiler here")
    apart = load_model(demo_model_dir("target"), model.net.policy.update(depth="unrolled"))
    token_BS = np.random.default_rng(1).integers(0, model.net.arch.vocab_size, (2, 12)).astype(np.int32)
    np.testing.assert_array_equal(bits(model, token_BS, 3), bits(apart, token_BS, 3))
