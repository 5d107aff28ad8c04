"""Draft heads and the target that the tests of head checkpoints use."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxspec.checkpoint.heads.layers import layers_of
from jaxspec.models.apply import apply
from jaxspec.models.catalog import arch_of
from jaxspec.models.draft_head import DraftHead, HeadSpec
from jaxspec.models.medusa import Medusa, MedusaSpec
from jaxspec.models.trained_head import Head
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.policy import Policy, make_policy
from jaxspec.protocol import CaptureSpec

GOLDEN = Path(__file__).parents[2] / "golden"
BASE = json.loads((GOLDEN / "qwen3_moe" / "config.json").read_text())
CONFIG = BASE | {"num_hidden_layers": 8}
TARGET = arch_of(CONFIG)
V, D, W = TARGET.vocab_size, TARGET.model_dim, 20
FLOAT32 = make_policy("float32")
IDS_W = np.sort(np.random.default_rng(0).permutation(V)[:W]).astype(np.int32)
LAYERS: dict[str, Any] = {
    "model_type": "llama", "hidden_size": D, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 1, "vocab_size": V, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "rope_theta": 50000.0,
}  # fmt: skip
ROUTED: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True,
}  # fmt: skip
LATENT: dict[str, Any] = LAYERS | {
    "model_type": "deepseek_v3", "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 16,
    "q_lora_rank": 12, "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 0.707,
    },
}  # fmt: skip


def spec(layers: dict[str, Any] | None = None, **changes: Any) -> HeadSpec:
    """An EAGLE-3 head with three taps and a reduced vocabulary, or another."""
    given = {"reads": CaptureSpec(taps=(2, 4, 5)), "draft_vocab": W} | changes
    return HeadSpec(layers_of(LAYERS | (layers or {})), D, **given)


def head(of: HeadSpec | MedusaSpec, policy: Policy = FLOAT32) -> Head:
    """A head with random numbers everywhere, norms included."""
    net = Medusa(of, policy) if isinstance(of, MedusaSpec) else DraftHead(of, policy)
    leaves, tree = jax.tree.flatten(jax.eval_shape(net.initial, jax.random.key(0)))
    rng = np.random.default_rng(1)
    made = [jnp.asarray(rng.standard_normal(x.shape).astype(np.float32)).astype(x.dtype) for x in leaves]
    return Head(net, jax.tree.unflatten(tree, made), IDS_W if of.draft_vocab == W else None)


def assert_same(found: Head, wanted: Head) -> None:
    """Asserts that two heads are the same to the bit."""
    assert found.net.spec == wanted.net.spec
    assert jax.tree.structure(found.params) == jax.tree.structure(wanted.params)
    for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(wanted.params), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    if wanted.ids_W is None:
        assert found.ids_W is None
    else:
        np.testing.assert_array_equal(found.ids_W, wanted.ids_W)


def logits(of: Head) -> np.ndarray:
    """What a head with a vocabulary of its own computes from fixed features and tokens."""
    rng = np.random.default_rng(2)
    net, length = of.net, 5
    assert isinstance(net, DraftHead)
    feature = jnp.asarray(rng.standard_normal((1, length, net.spec.feature_dim)), jnp.float32)
    embedded = jnp.asarray(rng.standard_normal((1, length, net.spec.arch.model_dim)), jnp.float32)
    position = jnp.arange(length, dtype=jnp.int32)[None]
    return np.asarray(_forward(net, of.params, embedded, feature, position))


@partial(jax.jit, static_argnums=0)
def _forward(net: DraftHead, params: Any, embedded: jax.Array, feature: jax.Array, position: jax.Array) -> jax.Array:
    joined = apply(net, params, feature, method="join")
    last, _, _ = apply(net, params, embedded, joined, Inputs(position, position))
    return apply(net, params, last, method="logits")


def write_target(directory: Path) -> Path:
    """The target's directory: its config, and of its weights the embedding."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file({"model.embed_tokens.weight": embedding()}, directory / "model.safetensors")
    return directory


def embedding() -> np.ndarray:
    """The target's embedding."""
    return np.random.default_rng(3).standard_normal((V, D)).astype(np.float32)


def tensors_of(shapes: dict[str, tuple[int, ...]], dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Random tensors of these names."""
    rng = np.random.default_rng(4)
    return {name: rng.standard_normal(shape).astype(np.float32).astype(dtype) for name, shape in shapes.items()}


def layer_shapes(prefix: str, wide: int, norms: tuple[str, ...], latent: bool = False) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one decoder layer as other tools write it, ``wide`` being what its attention reads."""
    a = f"{prefix}self_attn."
    grouped = {f"{a}q_proj.weight": (32, wide), f"{a}k_proj.weight": (16, wide), f"{a}v_proj.weight": (16, wide)}
    low = {
        f"{a}q_a_proj.weight": (12, wide), f"{a}q_a_layernorm.weight": (12,), f"{a}q_b_proj.weight": (48, 12),
        f"{a}kv_a_proj_with_mqa.weight": (20, wide), f"{a}kv_a_layernorm.weight": (16,),
        f"{a}kv_b_proj.weight": (64, 16),
    }  # fmt: skip
    return (low if latent else grouped) | {
        f"{a}o_proj.weight": (D, 32),
        f"{prefix}mlp.gate_proj.weight": (48, D),
        f"{prefix}mlp.up_proj.weight": (48, D),
        f"{prefix}mlp.down_proj.weight": (D, 48),
        **{f"{prefix}{name}.weight": (D,) for name in (*norms, "post_attention_layernorm")},
    }


EAGLE3: dict[str, tuple[int, ...]] = {"fc.weight": (D, 3 * D), "norm.weight": (D,), "lm_head.weight": (W, D)}
FIRST = ("hidden_norm", "input_layernorm")
VOCABULARY = {
    "d2t": IDS_W.astype(np.int64) - np.arange(W),
    "t2d": np.isin(np.arange(V), IDS_W),
}
BFLOAT16 = ml_dtypes.bfloat16


def write_head(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """A head's directory."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, directory / "model.safetensors")
    return directory


def eagle3_files(prefix: str = "midlayer.") -> dict[str, np.ndarray]:
    """A one-layer EAGLE-3 head as SafeAILab names it."""
    return tensors_of(EAGLE3 | layer_shapes(prefix, 2 * D, FIRST)) | VOCABULARY


EAGLE3_CONFIG: dict[str, Any] = LAYERS | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": W,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
}
