"""Loading needs the memory of the model and little more, however many shards there are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

LAYERS, DIM, EXPERTS, HIDDEN, VOCAB, HEAD = 13, 512, 32, 384, 8192, 128
CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": VOCAB, "hidden_size": DIM, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": HEAD, "max_position_embeddings": 1024,
    "num_experts": EXPERTS, "num_experts_per_tok": 4, "moe_intermediate_size": HIDDEN, "norm_topk_prob": True,
    "intermediate_size": HIDDEN, "tie_word_embeddings": False,
}  # fmt: skip
SPARE = 200 << 20  # one tensor, its converted copy, and what JAX keeps of tracing the shapes: up to 150 MB measured

LOAD = """
import json, sys
import jax, jax.numpy as jnp
from jaxspec.checkpoint.load.model import load_model
from jaxspec.nn.policy import make_policy

def held(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024

jnp.zeros(1).block_until_ready()
before = held("VmRSS")
policy = make_policy(depth=sys.argv[2], kernels=sys.argv[3])
model = load_model(sys.argv[1], policy, quantization=sys.argv[4])
jax.block_until_ready(model.params)
size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
print(json.dumps({"size": size, "peak": held("VmHWM") - before, "mapped": held("RssFile")}))
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 550 MB in 54 shards."""
    path, rng, places = tmp_path_factory.mktemp("shards"), np.random.default_rng(0), {}

    def tensor(*shape: int) -> np.ndarray:
        bits = rng.integers(0, 1 << 14, shape, np.uint16)  # positive and below 2, so that they may be quantized
        return bits.view(ml_dtypes.bfloat16)

    def shard(tensors: dict[str, np.ndarray]) -> None:
        name = f"model-{len(set(places.values())):05}.safetensors"
        save_file(tensors, path / name)
        places.update(dict.fromkeys(tensors, name))

    shard({"model.embed_tokens.weight": tensor(VOCAB, DIM)})
    shard({"lm_head.weight": tensor(VOCAB, DIM), "model.norm.weight": tensor(DIM)})
    for y in range(LAYERS):
        prefix = f"model.layers.{y}."
        attention = {
            f"{prefix}self_attn.{n}_proj.weight": tensor(h * HEAD, DIM) for n, h in zip("qkv", (8, 4, 4), strict=True)
        }
        attention |= {f"{prefix}self_attn.{n}_norm.weight": tensor(HEAD) for n in "qk"}
        attention |= {f"{prefix}{n}_layernorm.weight": tensor(DIM) for n in ("input", "post_attention")}
        shard(attention | {f"{prefix}self_attn.o_proj.weight": tensor(DIM, 8 * HEAD)})
        for part in range(3):
            gate = {f"{prefix}mlp.gate.weight": tensor(EXPERTS, DIM)} if part == 0 else {}
            shapes = {"gate": (HIDDEN, DIM), "up": (HIDDEN, DIM), "down": (DIM, HIDDEN)}
            experts = {
                f"{prefix}mlp.experts.{e}.{name}_proj.weight": tensor(*shape)
                for e in range(part, EXPERTS, 3)
                for name, shape in shapes.items()
            }
            shard(gate | experts)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    ("depth", "kernels", "quantization"),
    [
        ("unrolled", "xla", "auto"),
        ("stacked", "xla", "auto"),
        ("stacked", "native", "auto"),
        ("stacked", "native", "fp8"),
    ],
    ids=["unrolled", "stacked", "packed", "fp8"],
)
def test_peak_memory(directory: Path, depth: str, kernels: str, quantization: str):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-c", LOAD, str(directory), depth, kernels, quantization]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["size"] > (500 << 20) * (1 if quantization == "auto" else 0.5)
    assert found["peak"] <= found["size"] + (2 << 30)
    assert found["peak"] <= 1.05 * found["size"] + SPARE, found
