"""What the demo pair is: sizes of the target and the draft, how they start, and their held-out figures."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import demo_losses as losses
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.catalog import arch_of
from jaxspec.models.transformer import Hidden, Transformer, teacher_forced
from jaxspec.nn.policy import make_policy, policy_for
from jaxspec.shapes import Array, Params

TRAIN = make_policy("bfloat16", param=jnp.dtype("float32"))
FROZEN = make_policy("bfloat16")
DECODE = policy_for("bfloat16", "cpu")

TARGET = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "vocab_size": 4096,
    "hidden_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 512,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
DRAFT = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Recipe:
    """Sizes of the pair and of what it trains on; the seeds are part of the recipe.

    Attributes:
      target, draft: published configs.
      length: positions predicted per row.
      target_batch, draft_batch: rows per update; half of the draft's are text of the target's own.
      prompt: tokens of the corpus that the target continues.
      rows: prompts that it continues at once.
      warmup: updates until the peak learning rate.
      balance: weight of the load-balancing loss from an update on; raised when an expert had gone idle.
      save_every, log_every, evaluate_every: in updates.
      windows: held-out rows looked at during training.
    """

    target: dict[str, Any]
    draft: dict[str, Any]
    length: int = 512
    target_batch: int = 4
    draft_batch: int = 8
    prompt: int = 128
    rows: int = 16
    warmup: int = 100
    balance: tuple[tuple[int, float], ...] = ((0, 0.01), (1000, 0.05))
    save_every: int = 100
    log_every: int = 10
    evaluate_every: int = 100
    windows: int = 32
    target_seed: int = 0
    held_out_seed: int = 1
    draft_seed: int = 2
    text_seed: int = 3


DEMO = Recipe(TARGET, DRAFT)
TINY = replace(
    DEMO,
    target=TARGET
    | {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    | {"num_key_value_heads": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16}
    | {"num_experts": 4, "intermediate_size": 16},
    draft=DRAFT | {"vocab_size": 320, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16},
    length=32,
    target_batch=2,
    draft_batch=4,
    prompt=8,
    rows=2,
    warmup=2,
    save_every=2,
    log_every=1,
    evaluate_every=4,
    windows=4,
)


def positions(batch: Array) -> Array:
    """0, 1, 2, ... for every row."""
    return jnp.broadcast_to(jnp.arange(batch.shape[1], dtype=jnp.int32), batch.shape)


def net_of(config: dict[str, Any]) -> Transformer:
    """The network of a config, for training."""
    return Transformer(arch_of(config), TRAIN)


def forward(net: Transformer, params: Params, token_BT: Array) -> tuple[Array, Hidden]:
    """Logits and hidden states of whole rows."""
    return teacher_forced(net, params, token_BT, positions(token_BT))


def init(net: Transformer, seed: int) -> Params:
    """Random float32 parameters, residual outputs scaled down by depth."""
    params = net.initial(jax.random.key(seed))
    scale = (2 * len(net.arch.layers)) ** -0.5

    def shrink(path: tuple, leaf: Array) -> Array:
        return leaf * scale if path[-1].key.startswith(("down_", "out_HCD")) else leaf

    return jax.tree_util.tree_map_with_path(shrink, params)


def count(params: Params) -> int:
    """Parameters in all."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def groups(windows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Batches of ``size`` rows; a smaller rest is left out."""
    return (windows[i : i + size] for i in range(0, len(windows) - size + 1, size))


def cut(tokens: np.ndarray, length: int) -> np.ndarray:
    """The whole stream as int32 rows of ``length`` + 1, each from the last token of the one before."""
    rows = (len(tokens) - 1) // length
    return np.stack([tokens[i * length : i * length + length + 1] for i in range(rows)]).astype(np.int32)


def target_figures(net: Transformer, batch_size: int) -> Callable[[Params, np.ndarray], dict[str, Any]]:
    """Measures the loss in nats per token over rows, and each expert's share of its layer's choices."""

    @jax.jit
    def one(params, batch):
        logits, hidden = forward(net, params, batch[:, :-1])
        layers = [jnp.bincount(r.expert_MA.ravel(), length=r.logits_ME.shape[1]) for r in hidden.routing]
        return losses.cross_entropy(logits, batch[:, 1:]), jnp.stack(layers)

    def measure(params: Params, windows: np.ndarray) -> dict[str, Any]:
        parts = [one(params, batch) for batch in groups(windows, batch_size)]
        usage_YE = np.sum([np.asarray(usage, np.float64) for _, usage in parts], axis=0)
        share_YE = usage_YE / usage_YE.sum(1, keepdims=True)
        return {"held_out_loss": float(np.mean([float(loss) for loss, _ in parts])), "share_YE": share_YE}

    return measure


def draft_figures(
    net: Transformer, teacher: Transformer, batch_size: int
) -> Callable[[Params, Params, np.ndarray, int], dict[str, float]]:
    """Measures how a draft follows its target over rows, from a position on.

    The figures are the draft's loss, KL(target || draft), and the share of positions at which both find the
    same token most likely.
    """

    @jax.jit
    def one(params, frozen, batch, start):
        logits, _ = forward(net, params, batch[:, :-1])
        wanted, _ = forward(teacher, frozen, batch[:, :-1])
        logp, logq = jax.nn.log_softmax(wanted), jax.nn.log_softmax(logits)
        label = jnp.take_along_axis(logq, batch[:, 1:, None], axis=-1)[..., 0]
        kl = jnp.sum(jnp.exp(logp) * (logp - logq), axis=-1)
        same = (jnp.argmax(logits, axis=-1) == jnp.argmax(wanted, axis=-1)).astype(jnp.float32)
        seen = jnp.broadcast_to(jnp.arange(kl.shape[1]) >= start, kl.shape)
        return jnp.stack([jnp.mean(x, where=seen) for x in (-label, kl, same)])

    def measure(params: Params, frozen: Params, windows: np.ndarray, start: int) -> dict[str, float]:
        parts = [np.asarray(one(params, frozen, batch, np.int32(start))) for batch in groups(windows, batch_size)]
        loss, kl, same = np.mean(parts, axis=0).tolist()
        return {"loss": loss, "kl": kl, "agreement": same}

    return measure


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """The loss in a unit that does not depend on the tokenizer."""
    return nats_per_token / math.log(2) / bytes_per_token
