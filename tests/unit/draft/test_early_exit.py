"""Early exit: the first layers of a target, however its layers lie."""

import jax
import numpy as np
import pytest

from jaxspec.draft.early_exit import first_layers
from jaxspec.errors import ConfigError
from jaxspec.models.arch import segments
from jaxspec.models.catalog import arch_of
from jaxspec.models.depth import stack_of
from jaxspec.models.transformer import Transformer
from jaxspec.nn.policy import make_policy

CONFIG = {
    "model_type": "glm4_moe",
    "vocab_size": 32,
    "hidden_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
}
TOKEN = np.arange(6, dtype=np.int32)[None]


def logits(net: Transformer, params) -> np.ndarray:
    return np.asarray(jax.jit(lambda p: net.apply(p, TOKEN, TOKEN, method="logits_of")[0])(params))


def test_stacked_layers_exit_as_unrolled_ones_do():
    arch, layers = arch_of(CONFIG), 3  # the dense layer and two of three alike
    stacked = Transformer(arch, make_policy("float32", depth="stacked"))
    unrolled = Transformer(arch, stacked.policy.update(depth="unrolled"))
    params = jax.jit(stacked.initial)(jax.random.key(0))["params"]
    spread = {name: x for name, x in params.items() if not name.startswith("segment_")}
    for y in range(len(arch.layers)):
        name, place, *_ = stack_of(y, tuple(segments(arch.layers)))
        spread[f"layers_{y}"] = jax.tree.map(lambda x, place=place: x[place], params[name])
    part = logits(*first_layers(stacked, {"params": params}, layers))
    assert np.ptp(part) > 0.1
    np.testing.assert_allclose(part, logits(*first_layers(unrolled, {"params": spread}, layers)), atol=1e-5)


def test_there_must_be_layers_to_leave_out():
    net = Transformer(arch_of(CONFIG), make_policy("float32"))
    for layers in (0, 4):
        with pytest.raises(ConfigError, match=f"exit_layer must be from 1 to 3, .* 4 layers; got {layers}"):
            first_layers(net, {"params": {}}, layers)
