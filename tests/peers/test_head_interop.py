"""Heads that jaxspec writes, in the peers' own loaders; needs JAXSPEC_PEERS_PYTHON, an interpreter that has them.

A virtual environment for it: ``pip install torch==2.13.0 transformers==5.8.1 accelerate openai datasets==5.1.0
pydantic-settings loguru aiohttp protobuf requests hs-connectors==0.9.0``, and then, for their own pins exclude each
other, ``pip install --no-deps specforge==0.2.0 speculators==0.9.0``.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint.heads.directory import save_head
from jaxspec.checkpoint.heads.formats import ExportFormat, Verifier
from jaxspec.checkpoint.heads.layers import layers_of
from jaxspec.models.apply import apply
from jaxspec.models.draft_head import DraftHead, HeadSpec
from jaxspec.models.trained_head import Head
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.policy import make_policy
from jaxspec.nn.unrolled import Unrolled
from jaxspec.protocol import CaptureSpec

PYTHON = os.environ.get("JAXSPEC_PEERS_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="JAXSPEC_PEERS_PYTHON names no interpreter with the peers")
FLOAT32 = make_policy("float32")
FORMATS: dict[str, ExportFormat] = {"specforge": "eagle3", "speculators": "speculators", "peagle": "speculators"}
GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3_moe"
V, D, W, LENGTH, ROUNDS = 96, 32, 40, 11, 3
LAYERS = {
    "model_type": "llama", "hidden_size": D, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 1, "vocab_size": V, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "rope_theta": 50000.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
CASES: dict[str, dict[str, tuple[dict, dict]]] = {
    "specforge": {
        "plain": ({}, {}),
        "fc_norm": ({}, {"fc_norm": True}),
        "llama3": ({"rope_scaling": LLAMA3}, {}),
    },
    "speculators": {
        "plain": ({}, {}),
        "two-layers": ({"num_hidden_layers": 2}, {"norm_before_residual": True}),
        "output": ({}, {"norm_output": True, "norm_before_fc": True}),
        "qwen3": ({"model_type": "qwen3"}, {"fc_norm": True}),
        "llama3": ({"rope_scaling": LLAMA3}, {}),
    },
    "peagle": {
        "plain": ({"num_hidden_layers": 2}, {"mask_token": 7}),
        "normed": ({}, {"mask_token": 0, "norm_before_residual": True, "norm_before_fc": True}),
    },
}


def _head(layers: dict, flags: dict) -> Head:
    spec = HeadSpec(
        layers_of(LAYERS | layers), D, CaptureSpec(taps=(2, 3, 5)), draft_vocab=W, own_embedding=True, **flags
    )
    net = DraftHead(spec, FLOAT32)
    leaves, tree = jax.tree.flatten(net.initial(jax.random.key(3)))
    keys = jax.random.split(jax.random.key(4), len(leaves))
    shaken = [x + 0.2 * jax.random.normal(k, x.shape, x.dtype) for x, k in zip(leaves, keys, strict=True)]
    ids_W = np.sort(np.random.default_rng(5).permutation(V)[:W]).astype(np.int32)
    return Head(net, jax.tree.unflatten(tree, shaken), ids_W)


def _deeper(directory: Path) -> Path:
    """A model whose config has layers enough for the taps; speculators loads its embedding and head, no layer."""
    shutil.copytree(GOLDEN, directory)
    config = json.loads((GOLDEN / "config.json").read_text()) | {"num_hidden_layers": 8}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _ours(head: Head, feature: np.ndarray, token: np.ndarray) -> np.ndarray:
    """Logits of all rounds of the training-time test, or of all depths of a head with a mask, [S, 1, T, W]."""
    net, params, found = head.net, head.params, []
    assert isinstance(net, DraftHead)
    state = apply(net, params, jnp.asarray(feature), method="join")
    position = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    memory = tuple(Unrolled(jnp.ones((1, LENGTH), jnp.int32)) for _ in net.spec.arch.layers)
    for shift in range(ROUNDS):
        shifted = jnp.asarray(np.pad(token[:, shift:], ((0, 0), (0, shift))))
        if shift and net.spec.mask_token is not None:
            shifted = jnp.full_like(shifted, net.spec.mask_token)
            state = jnp.broadcast_to(apply(net, params, method="mask"), state.shape)
        embedded = apply(net, params, shifted, method="embed")
        last, state, memory = apply(net, params, embedded, state, Inputs(shifted, position + shift, memory=memory))
        found.append(apply(net, params, last, method="logits"))
    return np.asarray(jnp.stack(found))


@pytest.mark.parametrize("peer", CASES)
def test_the_peers_own_loader_gives_the_same_logits(peer: str, tmp_path: Path):
    rng = np.random.default_rng(6)
    feature = rng.standard_normal((1, LENGTH, 3 * D)).astype(np.float32)
    token = rng.integers(0, V, (1, LENGTH)).astype(np.int32)
    np.savez(tmp_path / "in.npz", feature=feature, token=token, rounds=ROUNDS)
    verifier = _deeper(tmp_path / "verifier")
    heads = {name: _head(*case) for name, case in CASES[peer].items()}
    for name, head in heads.items():
        save_head(head, tmp_path / name, FORMATS[peer], verifier=Verifier(str(verifier)))
    script = Path(__file__).with_name("draft_logits.py")
    command = [str(PYTHON), str(script), peer, str(tmp_path / "in.npz"), *(str(tmp_path / name) for name in heads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, head in heads.items():
        theirs, ours = np.load(tmp_path / name / "logits.npz"), _ours(head, feature, token)
        np.testing.assert_array_equal(theirs["ids"], head.ids_W)
        there = np.isfinite(theirs["logits"]).all(axis=-1)
        assert there.sum() >= ROUNDS * (LENGTH - ROUNDS + 1)
        wanted = theirs["logits"][there]
        np.testing.assert_allclose(ours[there], wanted, rtol=0, atol=1e-5 * np.abs(wanted).max(), err_msg=name)
