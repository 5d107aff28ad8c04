"""Latent attention, with and without an indexer: two ways to compute it, and the same bits in every company."""

from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.addressing import CacheSize, init_layer
from jaxspec.cache.window import Window
from jaxspec.errors import ConfigError
from jaxspec.models.caches import compact_caches, init_caches
from jaxspec.models.catalog import arch_of
from jaxspec.models.transformer import Caches, Transformer, forward, head
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.latent_attention import LatentAttention, LatentSpec
from jaxspec.nn.policy import Policy, make_policy
from jaxspec.nn.rope import RopeSpec
from jaxspec.nn.sparse_index import IndexSpec
from jaxspec.topology import Topology
from pallas_kernels.quantized import Format
from tests.leaf_paths import leaf_paths

BLOCK, LENGTH, TOP_K = 8, 40, 8
FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
EXACT = make_policy(FLOAT32)
ROPE = RopeSpec(1e4, 8, interleaved=True)
PLAIN = LatentSpec(heads=4, plain_dim=16, value_dim=12, rank=24, rope=ROPE, scale=24**-0.5, query_rank=32)
INDEX = IndexSpec(heads=4, head_dim=16, top_k=TOP_K, rope=ROPE)
SPECS = {
    "plain": PLAIN,
    "direct-queries": replace(PLAIN, query_rank=None),
    "biased": replace(PLAIN, bias=True),
    "indexed": replace(PLAIN, index=INDEX),
}
CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 9,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
INDEXED = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": TOP_K}
CONFIGS = {
    "mla": CONFIG,
    "dsa": {**CONFIG, "model_type": "deepseek_v32", **INDEXED},
    "shared-dsa": {
        **CONFIG,
        **INDEXED,
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 4,
        "index_topk_pattern": "FSFS",
    },
}


def filled(init, *args):
    """Random parameters of the shapes that an initialiser gives; compiling the initialisers would take longer."""
    rng = np.random.default_rng(1)

    def fill(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        middle = 1.0 if "norm" in jax.tree_util.keystr(path) else 0.0
        return jnp.asarray(middle + rng.normal(0, 0.2, leaf.shape), jnp.float32).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, nn.unbox(jax.eval_shape(init, *args)))


def attention(spec: LatentSpec, policy: Policy = EXACT) -> tuple[LatentAttention, dict]:
    module, one = LatentAttention(spec, 64, 1e-5, policy), jnp.zeros((1, 1), jnp.int32)
    return module, filled(module.init, jax.random.key(0), jnp.zeros((1, 1, 64)), Inputs(one, one))


def model(name: str, depth: str = "unrolled", dtype: jnp.dtype = BFLOAT16, **changes) -> tuple[Transformer, dict]:
    net = Transformer(arch_of({**CONFIGS[name], **changes}), make_policy(dtype, depth=depth))
    return net, filled(net.initial, jax.random.key(0))


def tokens(rows: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, CONFIG["vocab_size"], (rows, LENGTH)).astype(np.int32)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def run(net: Transformer, params: dict, caches: Caches, token_BT: np.ndarray, start_B: np.ndarray):
    position_BT = start_B[:, None] + jnp.arange(token_BT.shape[1], dtype=jnp.int32)
    hidden = forward(net, params, Inputs(token_BT, position_BT, Window(start_B, block=BLOCK), caches))
    return hidden.caches, head(net, params, hidden.last_BTD)


def decode(net: Transformer, params: dict, token_BS: np.ndarray, width: int, room: int = 64) -> np.ndarray:
    """Logits, ``width`` positions at a time, [B, S, V]."""
    rows = len(token_BS)
    caches = init_caches(net.arch, net.policy, CacheSize(rows, room, width, BLOCK))
    found = []
    for start in range(0, token_BS.shape[1] - width + 1, width):
        caches, logits = run(net, params, caches, token_BS[:, start : start + width], np.full(rows, start, np.int32))
        found.append(np.asarray(logits))
    return np.concatenate(found, axis=1)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("count", [1, 5])
def test_absorbed_products_equal_written_out_ones(name: str, count: int):
    spec = SPECS[name]
    module, params = attention(spec)
    x_BTD = jax.random.normal(jax.random.key(2), (2, LENGTH, 64))
    position_BT = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (2, LENGTH))
    whole_BTD, _, _ = jax.jit(module.apply)(params, x_BTD, Inputs(position_BT, position_BT))
    cache = init_layer(spec.streams, CacheSize(2, LENGTH, count, BLOCK), FLOAT32)

    @jax.jit
    def step(cache, x_BTD, position_BT):
        window = Window(position_BT[:, 0], block=BLOCK)
        out_BTD, cache, _ = module.apply(params, x_BTD, Inputs(position_BT, position_BT, window, cache))
        return out_BTD, cache

    for at in range(0, LENGTH, count):
        part = slice(at, at + count)
        out_BTD, cache = step(cache, x_BTD[:, part], position_BT[:, part])
        np.testing.assert_allclose(out_BTD, whole_BTD[:, part], rtol=0, atol=1e-4)


def test_quantised_key_and_value_weights_are_widened_exactly():
    form = Format("fp8", (16, 24))
    module, params = attention(PLAIN, EXACT.update(formats=(("kv_b_HXR", form),)))
    kept = params["params"]["kv_b_HXR"]
    assert kept.data.dtype == jnp.float8_e4m3fn
    wide = {"params": params["params"] | {"kv_b_HXR": kept.widen(FLOAT32)}}
    x_BTD = jax.random.normal(jax.random.key(2), (1, 4, 64))
    position_BT = jnp.arange(4, dtype=jnp.int32)[None]
    cache = init_layer(PLAIN.streams, CacheSize(1, BLOCK, 4, BLOCK), FLOAT32)
    window = Window(jnp.zeros(1, jnp.int32), block=BLOCK)
    plain = LatentAttention(PLAIN, 64, 1e-5, EXACT)
    for memory in ((None, None), (window, cache)):
        inputs = Inputs(position_BT, position_BT, *memory)
        kept_BTD, _, _ = module.apply(params, x_BTD, inputs)
        wide_BTD, _, _ = plain.apply(wide, x_BTD, inputs)
        assert np.abs(wide_BTD).max() > 0.1
        np.testing.assert_array_equal(kept_BTD, wide_BTD)


@pytest.mark.served
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_do_not_depend_on_the_rows_beside_them(name: str):
    net, params = model(name)
    token_BS = tokens(3)
    one = decode(net, params, token_BS[:1], 1)[0]
    for rows, width in ((1, 5), (3, 1), (3, 5)):
        many = decode(net, params, token_BS[:rows], width)[0]
        np.testing.assert_array_equal(
            many.view(np.uint32), one.view(np.uint32), err_msg=f"{rows} rows of {width} positions"
        )


@pytest.mark.served
@pytest.mark.parametrize("name", CONFIGS)
def test_trees_give_the_bits_of_plain_decoding_along_every_path(name: str):
    net, params = model(name)
    top, start = Topology((-1, 0, 0, 1, 2)), 20
    prompt_BT, node_BT = tokens(1)[:, :start], np.asarray([[7, 5, 9, 11, 12]], np.int32)
    position_BT = start + np.asarray(top.depth, np.int32)[None]

    @partial(jax.jit, donate_argnums=0)
    def verify(caches, start_B, path_BT):
        window = Window(start_B, path_BTJ=top.path_TJ[None], block=BLOCK)
        hidden = forward(net, params, Inputs(node_BT, position_BT, window, caches))
        caches = compact_caches(hidden.caches, net.arch, net.policy, Window(start_B, block=BLOCK), path_BT)
        return caches, head(net, params, hidden.last_BTD)[0]

    for path in ([0, *path] for path in leaf_paths(top)):
        text_BT = np.concatenate([prompt_BT, node_BT[:, path], node_BT[:, :1]], axis=1)
        plain_SV = decode(net, params, text_BT, 1)[0]
        caches = init_caches(net.arch, net.policy, CacheSize(1, 64, 1, BLOCK))
        for at in range(start):
            caches, _ = run(net, params, caches, prompt_BT[:, at : at + 1], np.full(1, at, np.int32))
        caches, tree_TV = verify(caches, np.full(1, start, np.int32), np.asarray([path], np.int32))
        _, after_BTV = run(net, params, caches, node_BT[:, :1], np.full(1, start + len(path), np.int32))
        np.testing.assert_array_equal(np.asarray(tree_TV)[path], plain_SV[start:-1], err_msg=str(path))
        np.testing.assert_array_equal(after_BTV[0, 0], plain_SV[-1], err_msg=f"behind {path}")


@pytest.mark.parametrize("name", ["dsa", "shared-dsa"])
def test_a_selection_changes_the_logits_only_where_it_leaves_something_out(name: str):
    net, params = model(name)
    token_BS = tokens(1)
    few = decode(net, params, token_BS, 1)[0]
    wide_net, _ = model(name, index_topk=48)
    skipped = decode(wide_net, params, token_BS, 1, room=48)[0]
    kept_whole = decode(wide_net, params, token_BS, 1, room=64)[0]
    np.testing.assert_array_equal(kept_whole, skipped, err_msg="scores are needless up to top_k positions")
    np.testing.assert_array_equal(few[:TOP_K], skipped[:TOP_K])
    assert (few[TOP_K:] != skipped[TOP_K:]).any(axis=-1).mean() > 0.9


def test_a_selection_of_all_that_is_seen_is_plain_attention():
    """Scores are computed from position 30 on, and leave out nothing up to position 31."""
    net, params = model("dsa", index_topk=30)
    token_BS = tokens(1)
    plain_net, _ = model("dsa", index_topk=64)
    limited, plain = (decode(n, params, token_BS[:, :31], 1)[0] for n in (net, plain_net))
    np.testing.assert_array_equal(limited[:30], plain[:30])
    assert (limited[30] != plain[30]).any()


@pytest.mark.parametrize(("name", "top_k"), [("mla", TOP_K), ("dsa", TOP_K), ("shared-dsa", TOP_K), ("shared-dsa", 64)])
def test_stacked_layers_share_selections_as_unrolled_ones_do(name: str, top_k: int):
    changes = {} if name == "mla" else {"index_topk": top_k}
    net, params = model(name, dtype=FLOAT32, **changes)
    stacked, _ = model(name, "stacked", FLOAT32, **changes)
    shapes = jax.eval_shape(stacked.initial, jax.random.key(0))["params"]
    layers = [params["params"][f"layers_{y}"] for y in range(len(net.arch.layers))]
    made = {key: params["params"][key] for key in shapes if not key.startswith("segment_")}
    firsts = {"mla": {0: (0, 1)}, "dsa": {0: (0, 1)}, "shared-dsa": {0: (0, 2), 1: (1, 3)}}[name]
    for first, members in firsts.items():
        made[f"segment_{first}"] = jax.tree.map(lambda *x: jnp.stack(x), *(layers[y] for y in members))
    jax.tree.map(lambda x, shape: None if x.shape == shape.shape else pytest.fail(f"{x.shape}"), made, shapes)
    token_BS = tokens(2)
    unrolled = decode(net, params, token_BS, 5)
    np.testing.assert_allclose(decode(stacked, {"params": made}, token_BS, 5), unrolled, rtol=0, atol=1e-4)


def test_a_borrowing_layer_sees_what_it_is_lent():
    module, params = attention(replace(PLAIN, reuses_selection=True))
    x_BTD = jax.random.normal(jax.random.key(2), (1, 12, 64))
    position_BT = jnp.arange(12, dtype=jnp.int32)[None]
    lent_BTS = jnp.zeros((1, 12, 16), bool).at[:, :, jnp.asarray([0, 3])].set(True)
    cache = init_layer(PLAIN.streams, CacheSize(1, 16, 12, BLOCK), FLOAT32)
    window = Window(jnp.zeros(1, jnp.int32), block=BLOCK)

    @jax.jit
    def attend(x_BTD):
        out, _, passed = module.apply(params, x_BTD, Inputs(position_BT, position_BT, window, cache, lent_BTS))
        assert passed is lent_BTS
        return out

    out = attend(x_BTD)
    for hidden in (1, 5, 11):
        other = attend(x_BTD.at[:, hidden].add(1.0))
        rest = np.arange(12) != hidden
        np.testing.assert_allclose(other[:, rest], out[:, rest], rtol=0, atol=1e-6)
    seen = attend(x_BTD.at[:, 3].add(1.0))
    assert (np.abs(seen - out).max(axis=-1)[0, 3:] > 1e-3).all()


def test_weights_behind_a_selection_have_gradients_and_the_indexer_none():
    module, params = attention(replace(PLAIN, index=INDEX))
    x_BTD = jax.random.normal(jax.random.key(2), (1, 20, 64))
    position_BT = jnp.arange(20, dtype=jnp.int32)[None]

    def loss(params):
        return jnp.sum(jnp.square(module.apply(params, x_BTD, Inputs(position_BT, position_BT))[0]))

    grads = jax.jit(jax.grad(loss))(params)["params"]
    assert all(float(jnp.abs(g).max()) == 0 for g in jax.tree.leaves(grads.pop("indexer")))
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads))


def test_scores_are_scaled_as_the_config_says():
    yarn = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    extended = arch_of({**CONFIG, "rope_scaling": yarn}).layers[0].attention
    assert isinstance(extended, LatentSpec)
    assert extended.scale * 24**0.5 == pytest.approx(1.8739, abs=1e-4)
    assert arch_of(CONFIG).layers[0].attention.scale == pytest.approx(24**-0.5)
    assert arch_of({**CONFIG, "head_dim": 7, "partial_rotary_factor": 0.5}) == arch_of(CONFIG)


def test_the_text_model_inside_another_config_is_the_same():
    nested = {"model_type": "kimi_k25", "text_config": {**CONFIG, "model_type": "kimi_k2"}, "vision_config": {}}
    assert replace(arch_of(nested), family="deepseek_v3") == arch_of(CONFIG)


def test_which_layers_lend_and_borrow():
    def kinds(**keys) -> list[str]:
        config = {**CONFIG, **INDEXED, "model_type": "glm_moe_dsa", "num_hidden_layers": 7, **keys}
        specs = [layer.attention for layer in (*arch_of(config).layers, *arch_of(config).mtp)]
        assert all((s.index is None) == s.reuses_selection for s in specs)
        return ["shared" if s.reuses_selection else "shares" if s.index.shares_selection else "full" for s in specs]

    assert kinds() == ["full"] * 7
    wanted = ["full", "full", "shares", "shared", "shared", "shares", "shared"]
    assert kinds(indexer_types=["shared" if k == "shared" else "full" for k in wanted]) == wanted
    assert kinds(index_topk_pattern="FFFSSFS") == wanted
    assert kinds(index_topk_freq=3, index_skip_topk_offset=3) == wanted
    behind = kinds(index_topk_pattern="FFFSSFS", num_nextn_predict_layers=1, n_routed_experts=4, num_experts_per_tok=2,
                   moe_intermediate_size=8)  # fmt: skip
    assert behind == [*wanted, "full"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"index_topk_pattern": "SFFFF"}, "first one full"),
        ({"index_topk_pattern": "FFX"}, "full or shared"),
        ({"indexer_types": ["full"]}, "each of the 2 layers"),
        ({"q_lora_rank": None}, "q_lora_rank is null"),
        ({"index_head_dim": 4}, "less than the 8 rotated channels"),
        ({"kv_lora_rank": None, "index_topk": None}, "missing \\['index_topk', 'kv_lora_rank'\\]"),
    ],
)
def test_bad_configs_are_refused(changes: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        arch_of({**CONFIG, **INDEXED, "model_type": "glm_moe_dsa", **changes})
