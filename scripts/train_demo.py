"""Reproduces the demo pair: an MoE target trained on the standard library's source, and a draft distilled from it."""

import argparse
import json
from pathlib import Path

import demo_corpus
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.catalog import arch_of
from jaxspec.models.transformer import Policy, Transformer
from jaxspec.train import losses, loop, optimizer

HERE = Path(__file__).parent
LENGTH, BATCH = 512, 4
TRAIN = Policy(jnp.dtype("float32"), jnp.dtype("bfloat16"), "stacked")

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


def positions(batch: jax.Array) -> jax.Array:
    """0, 1, 2, ... for every row."""
    return jnp.broadcast_to(jnp.arange(batch.shape[1], dtype=jnp.int32), batch.shape)


def init(net: Transformer) -> dict:
    """Random float32 parameters, residual outputs scaled down by depth."""
    token = jnp.zeros((1, 8), jnp.int32)
    params = net.init(jax.random.key(0), token, positions(token), method="logits_of")
    scale = (2 * len(net.arch.layers)) ** -0.5

    def shrink(path: tuple, leaf: jax.Array) -> jax.Array:
        return leaf * scale if path[-1].key.startswith(("down_", "out_HCD")) else leaf

    return jax.tree_util.tree_map_with_path(shrink, params)


def evaluator(apply, data: Path):
    """Held-out loss in nats per token over fixed windows, and the busiest expert's share of the choices."""
    held_out = np.load(data / "held_out.npy")
    windows = demo_corpus.batch(held_out, step=0, batch_size=32, length=LENGTH, seed=1)

    @jax.jit
    def one(params, batch):
        logits, hidden = apply(params, batch[:, :-1], positions(batch[:, :-1]))
        layers = [jnp.bincount(r.expert_MA.ravel(), length=r.logits_ME.shape[1]) for r in hidden.routing]
        return losses.cross_entropy(logits, batch[:, 1:]), jnp.stack(layers) if layers else jnp.zeros((0, 1))

    def evaluate(params) -> dict[str, float]:
        parts = [one(params, windows[i : i + BATCH]) for i in range(0, len(windows), BATCH)]
        usage = sum(np.asarray(u, np.float64) for _, u in parts)
        figures = {"held_out_loss": float(np.mean([float(loss) for loss, _ in parts]))}
        if usage.size:
            share = usage / usage.sum(1, keepdims=True)
            figures |= {"busiest_expert": float(share.max()), "idlest_expert": float(share.min())}
        return figures

    return evaluate


def train_target(data: Path, runs: Path, steps: int) -> None:
    """Next-token training of the target with load balancing."""
    net = Transformer(arch_of(TARGET), TRAIN)
    tokens = np.load(data / "train.npy")

    def apply(params, token, position):
        return net.apply(params, token, position, method="logits_of")

    def loss_fn(params, batch):
        logits, hidden = apply(params, batch[:, :-1], positions(batch[:, :-1]))
        ce = losses.cross_entropy(logits, batch[:, 1:])
        balance = losses.load_balance(hidden.routing)
        return ce + 0.01 * balance + 0.001 * losses.router_z(hidden.routing), {"ce": ce, "balance": balance}

    spec = loop.LoopSpec(steps=steps, directory=runs / "target")
    spec.directory.mkdir(parents=True, exist_ok=True)
    loop.run(
        spec,
        init(net),
        optimizer.build(steps, matrix_peak=2e-3, other_peak=3e-3),
        loss_fn,
        lambda step: demo_corpus.batch(tokens, step=step, batch_size=BATCH, length=LENGTH, seed=0),
        evaluator(apply, data),
        print,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--target-steps", type=int, default=3000)
    args = parser.parse_args()
    print(json.dumps({k: v for k, v in vars(args).items() if not isinstance(v, Path)}))
    train_target(args.data, args.runs, args.target_steps)
