"""Every drafter that the catalog can build, tiny and random, and prompts that it has observed."""

from collections.abc import Iterator
from dataclasses import replace as changed
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decode.state import Target, init_state
from jaxspec.draft import methods
from jaxspec.models.arch import ArchSpec
from jaxspec.models.block_head import BlockHead, BlockSpec
from jaxspec.models.catalog import arch_of
from jaxspec.models.draft_head import DraftHead, HeadSpec
from jaxspec.models.medusa import Medusa, MedusaSpec
from jaxspec.models.mtp import Mtp
from jaxspec.models.trained_head import Head
from jaxspec.models.transformer import Transformer, features_of, forward
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.policy import make_policy
from jaxspec.protocol import Anchor, CaptureSpec, Commit, Drafter, Features, Proposal
from jaxspec.pytree import replace
from jaxspec.shapes import Params
from jaxspec.topology import chain
from tests.random_params import random_params

ROWS, CAPACITY, VOCAB, BLOCK = 3, 60, 64, 16
CONFIG = {
    "model_type": "glm4_moe",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 128,
}
DYNAMIC = {"speculative_num_steps": 3, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 8}
SHAPES = [{"num_speculative_tokens": 1}, {"num_speculative_tokens": 4}, {"speculative_token_tree": [2, 2]}, DYNAMIC]
METHODS = ["none", *methods.METHODS]
# Drafters that share their walk with one that takes every shape take a chain: each shape costs seconds of compilation.
LIMITED = {"none": SHAPES[:1], "ngram": SHAPES[:3], "peagle": SHAPES[1::2], "medusa": SHAPES[1:3]}
LIMITED |= {"dflash": SHAPES[1::2], "dflash2": SHAPES[1:2], "dspark": SHAPES[1:3]}
LIMITED |= dict.fromkeys(("eagle", "shared_expert", "early_exit", "hybrid", "suffix"), SHAPES[1:2])
CASES = [(m, s) for m in METHODS for s in LIMITED.get(m, SHAPES)]


@cache
def model() -> tuple[Transformer, Params]:
    net = Transformer(arch_of(CONFIG), make_policy("float32"))
    return net, random_params(net, 0, wide=7.0)


@cache
def prediction() -> tuple[Mtp, Params]:
    """The layers of multi-token prediction of the model."""
    net = Mtp(model()[0].arch, model()[0].policy)
    return net, random_params(net, 0, wide=7.0)


@cache
def head_of(method: str) -> Head:
    """A head of each kind with random parameters, that knows half of the vocabulary where it has its own."""
    arch, policy, own = model()[0].arch, model()[0].policy, np.arange(0, VOCAB, 2, dtype=np.int32)
    if method == "medusa":
        net = Medusa(MedusaSpec(4, 1, arch.model_dim, VOCAB, len(own)), policy)
        return Head(net, random_params(net, 0, wide=7.0), own)
    layer = arch_of({**CONFIG, "model_type": "llama", "num_hidden_layers": 1, "num_nextn_predict_layers": 0})
    if method in methods.BLOCKS:
        net = BlockHead(block_spec(method, layer, len(own)), policy)
        return Head(net, random_params(net, 0, wide=7.0), own if net.spec.draft_vocab else None)
    wanted: dict[str, Any] = {
        "eagle": {"last": True, "join": "product", "join_bias": True},
        "eagle3": {"reads": CaptureSpec(taps=(0, 1, 2))},
        "peagle": {"reads": CaptureSpec(taps=(1, 2)), "mask_token": 5},
        "shared_expert": {"reads": CaptureSpec(shared_outputs=(1,)), "fc_norm": True, "routing": (1,), "experts": 4},
    }
    whole = method == "eagle"
    net = DraftHead(HeadSpec(layer, arch.model_dim, draft_vocab=0 if whole else len(own), **wanted[method]), policy)
    return Head(net, random_params(net, 0, wide=7.0), None if whole else own)


def block_spec(method: str, layer: ArchSpec, width: int) -> BlockSpec:
    """A head that drafts blocks of each kind; the windows of DSpark's layers end at the anchor."""
    wanted: dict[str, Any] = {
        "dflash": {"block_size": 6, "draft_vocab": width},
        "dflash2": {"block_size": 6, "conv_taps": 2, "conv_group": 4, "selector_rank": 4, "selector_top_k": 5},
        "dspark": {
            "block_size": 5, "draft_vocab": width, "from_anchor": True, "markov_rank": 4, "markov_kind": "rnn",
            "confidence": "markov", "window_from_anchor": True, "causal": (False, False),
        },
    }  # fmt: skip
    first, windowed = layer.layers[0], changed(layer.layers[0].attention, window=7)
    layers = (first, changed(first, attention=windowed)) if method == "dspark" else (first,)
    return BlockSpec(
        changed(layer, layers=layers), layer.model_dim, CaptureSpec(taps=(1, 2)), mask_token=5, **wanted[method]
    )


def config_of(method: str, shape: dict) -> dict | None:
    extra = {"early_exit": {"exit_layer": 1}} | {m: {"model": "draft"} for m in methods.WITH_MODEL}
    return None if method == "none" else {"method": method, **extra.get(method, {}), **shape}


def drafting(method: str) -> tuple[Transformer | Mtp, Params] | Head | None:
    """What drafts, where a method has a model."""
    if method in methods.HEADS or method == "hybrid":
        return head_of("eagle3" if method == "hybrid" else method)
    own = {"draft_model": model, "mtp": prediction}
    return own[method]() if method in own else None


def drafter_of(method: str, shape: dict) -> Drafter:
    return methods.build(methods.parse(config_of(method, shape)), model(), BLOCK, drafting(method))


@partial(jax.jit, static_argnums=(0, 3))
def features_for(net: Transformer, params: Params, token_BT: np.ndarray, reads: CaptureSpec) -> Features:
    position_BT = jnp.broadcast_to(jnp.arange(token_BT.shape[1], dtype=jnp.int32), token_BT.shape)
    return features_of(forward(net, params, Inputs(token_BT, position_BT, reads=reads)))


# Drafters are arguments, not closures, so that all tests of a drafter share its programs.
@jax.jit
def observe(drafter: Drafter, state: Any, commit: Commit) -> Any:
    return drafter.observe(state, commit)


@partial(jax.jit, static_argnames="rule")
def propose(drafter: Drafter, state: Any, anchor: Anchor, rule: str) -> tuple[Proposal, Any]:
    return drafter.propose(state, anchor, rule)


def observed(drafter: Drafter, lengths: tuple[int, ...]):
    """The drafter's state and the anchor after prompts of the given lengths."""
    net, params = model()
    state = init_state(
        Target(params, net, BLOCK),
        drafter,
        ROWS,
        CAPACITY,
        slack=max(drafter.topology.nodes, drafter.slack, 32),
    )
    rng = np.random.default_rng(0)
    # Three-token motifs, so that suffixes repeat.
    history = np.tile(rng.integers(1, VOCAB, (ROWS, 3)), (1, state.history_BS.shape[1]))[:, : state.history_BS.shape[1]]
    # What a drafter observes of a prompt does not depend on its topology: one program serves all of them.
    draft, reader = state.draft, drafter if drafter.needs == "none" else drafter.with_topology(chain(1))
    for row, length in enumerate(lengths):
        chunk = np.zeros((1, 33), np.int32)
        chunk[0, :length] = history[row, :length]
        features = features_for(net, params, chunk[:, :-1], drafter.reads)
        commit = Commit(
            jnp.asarray(chunk[:, :-1]), jnp.asarray(chunk[:, 1:]), features,
            jnp.full(1, length - 1, jnp.int32), jnp.zeros(1, jnp.int32), None, jnp.full(1, row, jnp.int32),
        )  # fmt: skip
        draft = observe(reader, draft, commit)
    at = jnp.asarray(lengths, jnp.int32) - 1
    places = np.arange(history.shape[1])[None] < np.asarray(lengths)[:, None]
    history_BS = jnp.asarray(np.where(places, history, 0), jnp.int32)
    token_B = jnp.take_along_axis(history_BS, at[:, None], axis=1)[:, 0]
    sampling = replace(state.sampling, draft_limit_B=jnp.full(ROWS, 99, jnp.int32))
    return draft, Anchor(token_B, at, history_BS, sampling)


def committed(state, length_B: np.ndarray) -> Iterator[np.ndarray]:
    """What a drafter's caches hold at committed positions, and whatever else it remembers of the rows."""
    for leaf in jax.tree.leaves(state):
        if len(leaf.shape) == 0 or leaf.shape[0] != len(length_B):  # of all rows together
            yield np.asarray(leaf)
            continue
        for row, length in enumerate(length_B):
            yield np.asarray(leaf)[row, ..., :length, :] if leaf.ndim == 4 else np.asarray(leaf)[row]
