"""What attention in C is worth: CPU time of a forward over a full cache, with it and with XLA's attention, in turns.

The products are native in both; outputs are compared bit for bit. Pin the process to one core:
``taskset -c 1 python lab/compare_attention.py --context 2048``.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.addressing import CacheSize
from jaxspec.cache.window import Window
from jaxspec.checkpoint.load.model import Model, load_model
from jaxspec.checkpoint.load.save import save_model
from jaxspec.models.caches import init_caches
from jaxspec.models.catalog import arch_of
from jaxspec.models.transformer import Transformer
from jaxspec.native import attention_call as native
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.policy import make_policy, policy_for
from jaxspec.serve.demo_pair import demo_model_dir

BLOCK = 128
DEEP = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip


def random_model(config: dict[str, Any]) -> Model:
    """A model of a shape, with random weights."""
    arch = arch_of(config)
    params = jax.jit(Transformer(arch, make_policy("bfloat16")).initial)(jax.random.key(0))
    with TemporaryDirectory() as folder:
        save_model(Path(folder), params, arch, config, np.dtype(jnp.bfloat16))
        return load_model(folder, policy_for("bfloat16", "cpu", "native"))


def build(model: Model, rows: int, count: int, context: int) -> Callable[..., Any]:
    """The greedy tokens of so many positions of each row after a context, and the caches, which are donated."""

    @partial(jax.jit, donate_argnums=1)
    def step(params: Any, caches: Any, token_BT: jax.Array) -> Any:
        start_B = jnp.full(rows, context, jnp.int32)
        position_BT = start_B[:, None] + jnp.arange(count, dtype=jnp.int32)
        hidden: Any = model.net.apply(params, Inputs(token_BT, position_BT, Window(start_B, block=BLOCK), caches))
        logits_BTV = model.net.apply(params, hidden.last_BTD, method="logits")
        return logits_BTV, hidden.caches

    return step


def main() -> None:
    """Reads the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", choices=("demo", "deep"), default="deep", help="deep: 30 layers of 9 and 3 heads")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--count", type=int, nargs="+", default=[1, 6], help="positions of a forward")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    native_policy = policy_for("bfloat16", "cpu", "native")
    model = load_model(demo_model_dir("target"), native_policy) if args.model == "demo" else random_model(DEEP)
    for count in args.count:
        size = CacheSize(args.rows, args.context + count, count, BLOCK)
        zeros = init_caches(model.net.arch, model.net.policy, size)
        noise = jax.tree.map(
            lambda x: jax.random.bits(jax.random.key(1), x.shape, jnp.uint16) % np.uint16(0x3F80), zeros
        )
        steps = {name: build(model, args.rows, count, args.context) for name in ("xla", "native")}
        caches = {name: jax.tree.map(jnp.copy, noise) for name in steps}
        token_BT = jnp.arange(args.rows * count, dtype=jnp.int32).reshape(args.rows, count)
        times_ms: dict[str, list[float]] = {name: [] for name in steps}
        logits = {}
        for turn in range(args.rounds + 1):
            for name, step in steps.items():
                reasons = ["XLA's turn"] if name == "xla" else []
                with mock.patch.object(native, "obstacles", lambda *_, r=reasons, **__: r):
                    began = time.process_time()
                    logits[name], caches[name] = jax.block_until_ready(step(model.params, caches[name], token_BT))
                    times_ms[name] += [1e3 * (time.process_time() - began)] if turn else []
        assert np.array_equal(logits["xla"], logits["native"]), "other bits"
        report = {"model": args.model, "context": args.context, "rows": args.rows, "positions": count}
        report |= {f"{name}_ms": np.round(np.quantile(t, (0, 0.25, 0.5)), 3).tolist() for name, t in times_ms.items()}
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
