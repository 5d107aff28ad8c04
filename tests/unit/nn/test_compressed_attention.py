"""DeepSeek-V4's attention survives rejected drafts without a trace, and its entries are the published ones."""

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.addressing import CacheSize, entries, init_layer
from jaxspec.cache.window import Window
from jaxspec.checkpoint.load.places import abstract_params
from jaxspec.errors import ConfigError
from jaxspec.models.caches import init_caches
from jaxspec.models.catalog import arch_of
from jaxspec.models.transformer import Transformer
from jaxspec.nn.compressed_attention import CompressedAttention, CompressedSpec
from jaxspec.nn.compressor import Compressor
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.policy import make_policy
from jaxspec.nn.rope import rotate

FLOAT, HALF = jnp.dtype("float32"), jnp.dtype("bfloat16")
DIM, BLOCK, DRAFTED, EPS = 32, 8, 5, 1e-6
CONFIG = {
    "model_type": "deepseek_v4",
    "vocab_size": 96,
    "hidden_size": DIM,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "o_groups": 2,
    "o_lora_rank": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 2.0,
    "sliding_window": 8,
    "num_hash_layers": 1,
    "index_n_heads": 4,
    "index_head_dim": 8,
    "index_topk": 3,
    "rms_norm_eps": EPS,
    "max_position_embeddings": 4096,
    "compress_ratios": [0, 4, 8],
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 64},
    "num_nextn_predict_layers": 0,
}


def spec_of(ratio: int, **changes: Any) -> CompressedSpec:
    arch = arch_of(CONFIG | {"num_hidden_layers": 1, "compress_ratios": [ratio]} | changes)
    spec = arch.layers[0].attention
    assert isinstance(spec, CompressedSpec)
    return spec


def filled(abstract: Any, experts: int = 1, seed: int = 0) -> Any:
    """Random values in the shapes of parameters: norms and scales near 1, weights that keep the size of their input."""
    rng = np.random.default_rng(seed)

    def one(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        if leaf.dtype == jnp.int32:
            return jnp.asarray(rng.integers(0, experts, leaf.shape), jnp.int32)
        name = path[-1].key
        if "norm" in name or "scale" in name:
            return jnp.asarray(1 + 0.1 * rng.standard_normal(leaf.shape), leaf.dtype)
        wide = 3 if "gate" in name or "place" in name else 1
        return jnp.asarray(wide * rng.standard_normal(leaf.shape) * leaf.shape[0] ** -0.5, leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, nn.unbox(abstract))


@dataclass
class Layer:
    """One attention layer with random parameters, and what decodes with it."""

    spec: CompressedSpec
    dtype: Any
    kernels: str = "xla"

    def __post_init__(self) -> None:
        self.module = CompressedAttention(self.spec, DIM, EPS, make_policy(self.dtype, kernels=self.kernels))
        x, position = jnp.zeros((1, 1, DIM)), jnp.zeros((1, 1), jnp.int32)
        shapes = jax.eval_shape(lambda: self.module.init(jax.random.key(0), x, Inputs(position, position)))
        self.params = filled(shapes)
        self.run = jax.jit(self._run, donate_argnums=0)

    def caches(self, rows: int, room: int, slack: int) -> Any:
        return init_layer(self.spec.streams, CacheSize(rows, room, slack, BLOCK), self.dtype)

    def whole(self, x_BSD: np.ndarray) -> np.ndarray:
        position_BS = jnp.broadcast_to(jnp.arange(x_BSD.shape[1], dtype=jnp.int32), x_BSD.shape[:2])
        out: Any = jax.jit(lambda x: self.module.apply(self.params, x, Inputs(position_BS, position_BS)))(x_BSD)
        return np.asarray(out[0])

    def _run(self, cache: Any, x_BTD: jax.Array, start_B: jax.Array, row_B: jax.Array | None = None) -> Any:
        position_BT = start_B[:, None] + jnp.arange(x_BTD.shape[1], dtype=jnp.int32)
        window = Window(start_B, row_B=row_B, block=BLOCK)
        out: Any = self.module.apply(self.params, x_BTD, Inputs(position_BT, position_BT, window, cache))
        return out[1], out[0]


def drafted(layer: Layer, x_BSD: np.ndarray, cache: Any, first_B: np.ndarray) -> np.ndarray:
    """Outputs of whole rows, decoded in blocks of which a random part is right and the rest is taken back."""
    rng = np.random.default_rng(7)
    rows, length, _ = x_BSD.shape
    out, start_B = np.zeros_like(x_BSD), first_B.astype(np.int32)
    while (start_B < length).any():
        right_B = np.minimum(rng.integers(1, DRAFTED + 1, rows), length - start_B)
        block = rng.standard_normal((rows, DRAFTED, DIM)).astype(np.float32)
        for row, right in enumerate(right_B):
            block[row, :right] = x_BSD[row, start_B[row] : start_B[row] + right]
        cache, found = layer.run(cache, block, np.minimum(start_B, length))
        for row, right in enumerate(right_B):
            out[row, start_B[row] : start_B[row] + right] = np.asarray(found)[row, :right]
        start_B = start_B + right_B.astype(np.int32)
    return out


# Rings of 16 positions, so that they wrap often; of 136 with entries of 128 positions.
@pytest.mark.parametrize(("ratio", "length"), [(0, 40), (4, 70), (8, 70), (128, 300)])
def test_rejected_drafts_leave_no_trace(ratio: int, length: int):
    layer = Layer(spec_of(ratio), HALF)
    x_BSD = np.random.default_rng(1).standard_normal((2, length, DIM)).astype(np.float32)
    room = -(-(length + DRAFTED) // BLOCK) * BLOCK
    cache, plain = layer.caches(2, room, DRAFTED), []
    for position in range(length):
        cache, out = layer.run(cache, x_BSD[:, position : position + 1], np.full(2, position, np.int32))
        plain.append(np.asarray(out))
    found = drafted(layer, x_BSD, layer.caches(2, room, DRAFTED), np.zeros(2))
    np.testing.assert_array_equal(found.view(np.uint32), np.concatenate(plain, axis=1).view(np.uint32))


@pytest.mark.parametrize(
    ("ratio", "top_k", "kernels"),
    [(0, 3, "xla"), (4, 3, "xla"), (4, 500, "xla"), (8, 3, "xla"), (0, 3, "interpret"), (4, 3, "interpret"),
     (8, 3, "interpret")],
)  # fmt: skip
def test_prompts_in_padded_chunks_and_then_drafts_give_what_the_whole_gives(ratio: int, top_k: int, kernels: str):
    layer, length, chunk, prompts = Layer(spec_of(ratio, index_topk=top_k), FLOAT, kernels), 60, 16, (21, 36)
    x_BSD = np.random.default_rng(2).standard_normal((2, length, DIM)).astype(np.float32)
    cache = layer.caches(2, 80, chunk)
    for row, prompt in reversed(list(enumerate(prompts))):
        for start in range(0, prompt, chunk):
            right = min(chunk, prompt - start)
            padded = np.full((1, chunk, DIM), 9.0, np.float32)
            padded[0, :right] = x_BSD[row, start : start + right]
            cache, _ = layer.run(cache, padded, np.array([start], np.int32), np.array([row], np.int32))
    found, wanted = drafted(layer, x_BSD, cache, np.array(prompts)), layer.whole(x_BSD)
    for row, prompt in enumerate(prompts):
        np.testing.assert_allclose(found[row, prompt:], wanted[row, prompt:], rtol=0, atol=2e-5)


@pytest.mark.parametrize("ratio", [4, 8])
def test_entries_are_the_published_ones(ratio: int):
    spec = spec_of(ratio).compressor
    assert spec is not None
    module, count = Compressor(spec, DIM, EPS, make_policy(FLOAT)), 3 * ratio + 1
    x_BTD = np.random.default_rng(3).standard_normal((1, count, DIM)).astype(np.float32)
    position_BT = jnp.arange(count, dtype=jnp.int32)[None]
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), x_BTD, Inputs(position_BT, position_BT)))
    params = filled(shapes)
    found: Any = jax.jit(lambda x_BTD: module.apply(params, x_BTD, Inputs(position_BT, position_BT))[0])(x_BTD)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["params"])
    value, gate = (np.einsum("td,dx->tx", x_BTD[0], p["kv_gate_D2X"][:, i]) for i in range(2))
    gate = gate + p["place_TX"][np.arange(count) % ratio]
    width = spec.head_dim
    for w in range(3):
        own = range(w * ratio, (w + 1) * ratio)
        if ratio == 4:  # the first half of the channels comes from the window before, the second from its own
            slots = [(t, 0) for t in range((w - 1) * ratio, w * ratio) if t >= 0] + [(t, 1) for t in own]
        else:
            slots = [(t, 0) for t in own]
        values = np.stack([value[t, half * width : (half + 1) * width] for t, half in slots])
        gates = np.exp(np.stack([gate[t, half * width : (half + 1) * width] for t, half in slots]))
        entry = (gates * values).sum(axis=0) / gates.sum(axis=0)
        entry = entry / np.sqrt(np.mean(entry**2) + EPS) * p["norm_C"]
        place_BT = jnp.full((1, 1), w * ratio, jnp.int32)
        wanted = rotate(jnp.asarray(entry[None, None, None], jnp.float32), place_BT, spec.rope)
        np.testing.assert_allclose(np.asarray(found)[0, w], np.asarray(wanted)[0, 0, 0], rtol=0, atol=2e-5)
    assert np.asarray(found).shape[1] == 3, "the fourth window is not complete"


@pytest.mark.served
@pytest.mark.parametrize("kernels", ["xla", pytest.param("interpret", marks=pytest.mark.slow)])
def test_bits_of_a_whole_model_do_not_depend_on_rows_and_positions(kernels: str):
    arch, length, room = arch_of(CONFIG | {"num_hidden_layers": 2, "compress_ratios": [4, 8]}), 45, 64
    net: Any = Transformer(arch, make_policy(HALF, kernels=kernels))
    params = {"params": filled(abstract_params(net), experts=4)}
    token_BS = np.random.default_rng(4).integers(0, 96, (3, length)).astype(np.int32)

    def bits(rows: int, width: int, lag: int = 0) -> np.ndarray:
        layers = init_caches(arch, net.policy, CacheSize(rows, room, width, BLOCK))

        @partial(jax.jit, donate_argnums=0)
        def run(layers, token_BT, start_B):
            position_BT = start_B[:, None] + jnp.arange(width, dtype=jnp.int32)
            hidden: Any = net.apply(params, Inputs(token_BT, position_BT, Window(start_B, block=BLOCK), layers))
            return hidden.caches, (hidden.stream[0], net.apply(params, hidden.last_BTD, method="logits")[0])

        found = []
        for start in range(0, length - width + 1, width):
            start_B = np.maximum(start - lag * np.arange(rows), 0).astype(np.int32)
            token_BT = np.stack([token_BS[row, s : s + width] for row, s in enumerate(start_B)])
            layers, out = run(layers, token_BT, start_B)
            found.append(np.concatenate([np.asarray(x).reshape(width, -1) for x in out], axis=1))
        return np.concatenate(found).view(np.uint32)

    one = bits(1, 1)
    for rows, width, lag in ((1, 5, 0), (3, 5, 2)):
        np.testing.assert_array_equal(bits(rows, width, lag), one, err_msg=f"{rows} rows of {width} positions")


@pytest.mark.parametrize("ratio", [4, 8, 128])
def test_every_window_that_a_forward_touches_has_a_place(ratio: int):
    spec = spec_of(ratio).compressor
    assert spec is not None
    for room, count in itertools.product((64, 128, 1024), (1, 2, 4, 5, 33)):
        last = (room - count) // ratio + spec.touched(count) - 1
        assert last < entries(spec.entries, room, count, BLOCK)
        assert all((start + count - 1) // ratio - start // ratio < spec.touched(count) for start in range(ratio))


def test_trees_are_refused_for_a_reason():
    assert "tree" in str(arch_of(CONFIG).chain_only)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"compress_ratios": [0, 4]}, "each of the 3 layers"),
        ({"compress_ratios": [0, 4, 1]}, "at least 2"),
        ({"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, "full_attention"),
        ({"o_groups": 3}, "equal groups"),
        ({"qk_rope_head_dim": 20}, "at most head_dim 16"),
        ({"index_head_dim": 4}, "less than the 8 rotated channels"),
    ],
)
def test_configs_that_contradict_themselves_are_refused(changes: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        arch_of(CONFIG | changes)
