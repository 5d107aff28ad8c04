"""Whole models whose attention is the kernel give the reference's logits, over caches of every form."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.kv import Window
from jaxspec.checkpoint.load import load_model
from jaxspec.checkpoint.stream import TensorFiles
from jaxspec.models.caches import init_caches
from jaxspec.nn.policy import Policy

GOLDEN = Path(__file__).parents[2] / "golden"
BLOCK, COUNT = 8, 5
FLOAT32 = jnp.dtype("float32")


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral_window"])
def test_golden_logits(family: str, tmp_path: Path):
    for name, file in (("config.json", "config.json"), ("model.safetensors", "model.safetensors")):
        (tmp_path / name).symlink_to(GOLDEN / family / file)
    (tmp_path / "says").mkdir()
    (tmp_path / "says" / "says.safetensors").symlink_to(GOLDEN / family / "reference.safetensors")
    says = {name: np.asarray(value) for name, value in TensorFiles(tmp_path / "says").items()}
    model = load_model(tmp_path, Policy(FLOAT32, FLOAT32, "switched", kernels="interpret"))
    net, ids_BT = model.net, says["input_ids"].astype(np.int32)
    rows, length = ids_BT.shape[0], ids_BT.shape[1] // COUNT * COUNT
    room = -(-(length + COUNT) // BLOCK) * BLOCK
    layers = init_caches(net.arch, net.policy, rows, room, slack=COUNT, block=BLOCK)

    @partial(jax.jit, donate_argnums=1)
    def forward(params, layers, token_BT, start):
        start_B = jnp.full(rows, start, jnp.int32)
        position_BT = start_B[:, None] + jnp.arange(COUNT, dtype=jnp.int32)[None]
        hidden = net.apply(params, token_BT, position_BT, layers, Window(start_B, block=BLOCK))
        return hidden.layers, net.apply(params, hidden.last_BTD, method="logits")

    found = []
    for start in range(0, length, COUNT):
        layers, logits_BTV = forward(model.params, layers, ids_BT[:, start : start + COUNT], np.int32(start))
        found.append(np.asarray(logits_BTV))
    np.testing.assert_allclose(np.concatenate(found, axis=1), says["logits"][:, :length], rtol=0, atol=1e-4)
