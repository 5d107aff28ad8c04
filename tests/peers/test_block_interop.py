"""Heads that draft blocks, in speculators' own loader; needs JAXSPEC_PEERS_PYTHON, see ``test_head_interop``."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint.heads.directory import load_head, save_head
from jaxspec.checkpoint.heads.formats import Verifier
from jaxspec.checkpoint.load.model import load_model
from jaxspec.models.apply import apply
from jaxspec.models.block_head import BlockHead
from jaxspec.models.trained_head import Head
from jaxspec.models.transformer import embed, head
from jaxspec.nn.anchored import Anchored
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.policy import make_policy
from jaxspec.pytree import replace
from tests.unit.checkpoint.block_cases import SPECULATORS, block_head

PYTHON = os.environ.get("JAXSPEC_PEERS_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="JAXSPEC_PEERS_PYTHON names no interpreter with the peers")
GOLDEN = Path(__file__).parents[1] / "golden" / "qwen3_moe"
FLOAT32 = make_policy("float32")
FIRST, SECOND = 19, 14  # tokens of two texts in one row
ANCHORS = np.array([0, 3, 8, 11, 19, 24])
LENGTH = FIRST + SECOND


def _inputs(dim: int, vocab: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(6)
    position = np.concatenate([np.arange(FIRST), np.arange(SECOND)])[None]
    return {
        "feature": rng.standard_normal((1, LENGTH, 3 * dim)).astype(np.float32),
        "token": rng.integers(0, vocab, (1, LENGTH)),
        "document": np.repeat([0, 1], [FIRST, SECOND])[None],
        "position": position,
        "anchor": ANCHORS,
    }


def _ours(of: Head, target: Any, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What drafts are drawn from after the text's own tokens, by block and row."""
    net, params = of.net, of.params
    assert isinstance(net, BlockHead)
    spec, count = net.spec, len(ANCHORS)
    token, document = jnp.asarray(given["token"], jnp.int32), jnp.asarray(given["document"], jnp.int32) + 1
    c = apply(net, params, jnp.asarray(given["feature"]), method="join")
    text = Anchored(document, jnp.asarray(ANCHORS, jnp.int32)[None], size=spec.block_size)
    inputs = Inputs(token, jnp.asarray(given["position"], jnp.int32), memory=(text,) * len(spec.arch.layers))
    memory = apply(net, params, c, inputs, method="observe")
    own = ANCHORS[:, None] + np.arange(spec.block_size)
    block = np.full(own.shape, spec.mask_token)
    block[:, 0] = given["token"][0, ANCHORS]
    place = given["position"][0, ANCHORS][:, None] + np.arange(spec.block_size)
    tokens, positions = (jnp.asarray(x.reshape(1, -1), jnp.int32) for x in (block, place))
    embedded = embed(target.net, target.params, tokens)
    last, _ = apply(net, params, embedded, Inputs(tokens, positions, memory=memory))
    last = last.reshape(count, spec.block_size, -1)
    logits = apply(net, params, last, method="logits") if spec.draft_vocab else head(target.net, target.params, last)
    before = own if spec.from_anchor else np.maximum(own - 1, ANCHORS[:, None])
    before = token[0, before]
    found = {"hidden": last}
    if spec.markov_rank:
        e = apply(net, params, before, method="markov_embed")
        state, bias = jnp.zeros_like(e[:, 0]), []
        for k in range(spec.block_size):
            z, state = apply(net, params, e[:, k], last[:, k], state, method="markov_advance")
            bias.append(apply(net, params, z, method="markov_bias"))
        logits = logits + jnp.stack(bias, axis=1)
        found["confidence"] = apply(net, params, last, e, method="confidence")
    if spec.selector_rank:
        best, ids = jax.lax.top_k(logits, spec.selector_top_k)
        context = apply(net, params, before, last, method="context")
        scores = best + apply(net, params, context, ids, method="candidate_scores")
        rows, places = jnp.arange(count)[:, None, None], jnp.arange(spec.block_size)[:, None]
        logits = jnp.full_like(logits, -jnp.inf).at[rows, places, ids].set(scores)
    return {name: np.asarray(x) for name, x in (found | {"logits": logits}).items()}


def test_speculators_own_loader_gives_the_same_logits(tmp_path: Path):
    verifier = tmp_path / "verifier"
    shutil.copytree(GOLDEN, verifier)
    target = load_model(verifier, FLOAT32)
    config = json.loads((GOLDEN / "config.json").read_text()) | {"num_hidden_layers": 8}
    (verifier / "config.json").write_text(json.dumps(config))  # deep enough for the taps; only its ends are loaded
    arch = replace(target.net.arch, layers=target.net.arch.layers * 4)
    given = _inputs(arch.model_dim, arch.vocab_size)
    np.savez(tmp_path / "in.npz", **given)
    for name, spec in SPECULATORS.items():
        save_head(block_head(spec), tmp_path / name, "speculators", verifier=Verifier(str(verifier)))
    script = Path(__file__).with_name("block_logits.py")
    command = [str(PYTHON), str(script), str(tmp_path / "in.npz"), *(str(tmp_path / name) for name in SPECULATORS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in SPECULATORS:
        theirs = np.load(tmp_path / name / "logits.npz")
        ours = _ours(load_head(tmp_path / name, arch, FLOAT32), target, given)
        for field, wanted in theirs.items():
            finite = np.isfinite(wanted)
            np.testing.assert_array_equal(np.isfinite(ours[field]), finite, err_msg=f"{name} {field}")
            np.testing.assert_allclose(
                ours[field][finite], wanted[finite], rtol=0, atol=1e-5 * np.abs(wanted[finite]).max(), err_msg=name
            )
