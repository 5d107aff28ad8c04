"""Heads that draft blocks, as the tests of their files use them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.heads.layers import layers_of
from jaxspec.models.block_head import BlockHead, BlockSpec
from jaxspec.models.trained_head import Head
from jaxspec.nn.policy import Policy
from jaxspec.protocol import CaptureSpec
from tests.unit.checkpoint.head_cases import FLOAT32, IDS_W, LAYERS, ROUTED, D, V, W

QWEN3 = LAYERS | {"model_type": "qwen3"}
SLIDING = {"sliding_window": 6, "use_sliding_window": True}
MIXED = SLIDING | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
EVERY = SLIDING | {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}
DSPARK: dict[str, Any] = {"from_anchor": True, "markov_rank": 5, "confidence": "markov"}
DFLASH2: dict[str, Any] = {"conv_taps": 2, "conv_group": 4, "selector_rank": 5, "selector_top_k": 6}


def block_spec(layers: dict[str, Any] | None = None, **changes: Any) -> BlockSpec:
    """A DFlash head with three taps that uses the target's vocabulary product, or another."""
    arch = layers_of(QWEN3 | (layers or {}))
    given = {"reads": CaptureSpec(taps=(2, 4, 5)), "block_size": 4, "mask_token": 7} | changes
    given.setdefault("causal", (False,) * len(arch.layers))
    return BlockSpec(arch, D, **given)


# Those that speculators can express, z-lab and its like too but for windows that end at the anchor.
SPECULATORS = {
    "dflash": block_spec({"num_hidden_layers": 2}),
    "dflash-reduced": block_spec(draft_vocab=W),
    "dflash-windows": block_spec(EVERY, window_from_anchor=True),
    "dflash-causal": block_spec(MIXED, window_from_anchor=True, causal=(True, False)),
    "dspark": block_spec(draft_vocab=W, **DSPARK),
    "dspark-gated": block_spec(markov_kind="gated", **DSPARK),
    "dspark-rnn": block_spec(draft_vocab=W, markov_kind="rnn", **(DSPARK | {"confidence": "hidden"})),
    "dflash2": block_spec({"num_hidden_layers": 2}, **DFLASH2),
}
ANYWHERE = {name: spec for name, spec in SPECULATORS.items() if not spec.window_from_anchor}
PUBLISHED = ANYWHERE | {
    "windows": block_spec(EVERY),
    "causal": block_spec(MIXED, causal=(True, False)),
    "all-causal": block_spec(MIXED, causal=(True, True)),
    "scaled": block_spec(embedding_scale=2.5, output_scale=0.5, softcap=30.0, own_embedding=True),
    "biases": block_spec({"attention_bias": True}),
    "embedding-tap": block_spec(reads=CaptureSpec(taps=(0, 8)), **DSPARK),
    "own-head": block_spec(draft_vocab=V),
}
NATIVE = PUBLISHED | {"own-mask": block_spec(own_mask=True), "convolved": block_spec(conv_taps=3, conv_group=8)}
NATIVE |= {"routed": block_spec(EVERY | ROUTED), "dflash2-routed": block_spec(ROUTED, **DFLASH2)}


def block_head(of: BlockSpec, policy: Policy = FLOAT32) -> Head:
    """A head with random numbers everywhere, norms included."""
    net = BlockHead(of, policy)
    leaves, tree = jax.tree.flatten(jax.eval_shape(net.initial, jax.random.key(0)))
    rng = np.random.default_rng(1)
    made = [jnp.asarray(rng.standard_normal(x.shape).astype(np.float32) * 0.3).astype(x.dtype) for x in leaves]
    return Head(net, jax.tree.unflatten(tree, made), IDS_W if of.draft_vocab == W else None)
