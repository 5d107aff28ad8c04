"""A tiny dense checkpoint of random weights, as upcycling begins with."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from lab.upcycle.network import TINY, Tree

NAMES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj", "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
}  # fmt: skip


def write_dense(frozen: Tree, directory: Path) -> None:
    """Writes weights and config in Hugging Face layout."""
    directory.mkdir()
    tensors = {"model.embed_tokens.weight": frozen["embed"], "model.norm.weight": frozen["norm"]}
    for index in range(TINY.layers):
        stack, at = ("lower", index) if index < TINY.first else ("upper", index - TINY.first)
        tensors |= {f"model.layers.{index}.{NAMES[n]}.weight": frozen[stack][n][at].T for n in NAMES}
    save_file({n: np.ascontiguousarray(np.asarray(x)) for n, x in tensors.items()}, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": TINY.dim, "hidden_act": "silu",
        "intermediate_size": TINY.hidden, "num_hidden_layers": TINY.layers, "num_attention_heads": TINY.heads,
        "num_key_value_heads": TINY.kv_heads, "head_dim": TINY.head_dim, "vocab_size": TINY.vocab,
        "max_position_embeddings": 64, "rms_norm_eps": TINY.eps, "rope_theta": TINY.theta, "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": False, "torch_dtype": "float32",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
