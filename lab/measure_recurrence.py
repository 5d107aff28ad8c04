"""Measures recurrent layers in steps against chunks: time of a text and of its gradient, memory, and difference.

Run ``python -m lab.measure_recurrence [--positions 1024] [--rounds 5]``: one row of a layer of each kind, rounds of
both interleaved.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.nn.recurrent_chunks import run_chunks
from jaxspec.nn.recurrent_steps import Steps, scan
from jaxspec.shapes import Array

# Groups, heads, key and value dims, decays per head, whether with the delta rule.
LAYERS = {
    "Qwen3-Next (GDN)": (16, 32, 128, 128, 1, True),
    "Kimi-Linear (KDA)": (32, 32, 128, 128, 128, True),
    "Nemotron-3 (Mamba-2)": (8, 64, 128, 64, 1, False),
    "MiniMax (lightning)": (64, 64, 128, 128, 1, False),
}


def main() -> None:
    """Prints a line per kind of layer."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for name, sizes in LAYERS.items():
        steps = make_steps(args.positions, *sizes)
        state = jnp.zeros((1, sizes[1], sizes[2], sizes[3]))
        zero = jnp.zeros((1, 1, 1, 1), jnp.int32)
        forms: dict[str, Callable[..., Any]] = {"steps": partial(scan, zero=zero), "chunks": run_chunks}
        print(name)
        for what, of in (("text", lambda run: run), ("gradient", gradient)):
            programs = {form: jax.jit(of(run)).lower(state, steps).compile() for form, run in forms.items()}
            times: dict[str, list[float]] = {form: [] for form in forms}
            for round_ in range(args.rounds + 1):
                for form, program in programs.items():
                    began = time.perf_counter()
                    jax.block_until_ready(program(state, steps))
                    if round_:
                        times[form].append(time.perf_counter() - began)
            ratio = [a / b for a, b in zip(times["steps"], times["chunks"], strict=True)]
            for form, program in programs.items():
                memory = program.memory_analysis()
                assert memory is not None, "XLA counts it on every platform that this runs on"
                temp = memory.temp_size_in_bytes / 2**20
                print(f"  {what:8} in {form:6} {1e3 * statistics.median(times[form]):8.1f} ms, {temp:8.1f} MiB")
            span = f"{min(ratio):.2f} to {max(ratio):.2f}"
            print(f"  {what:8} chunks {statistics.median(ratio):.2f} times ({span}) as fast")
        one, other = (jax.jit(run)(state, steps)[1] for run in forms.values())
        print(f"  differ by {jnp.max(jnp.abs(one - other)) / jnp.max(jnp.abs(one)):.1e} of the largest number")


def make_steps(count: int, groups: int, heads: int, keys: int, values: int, decays: int, delta: bool) -> Steps:  # noqa: FBT001
    """Returns steps of one row at random, keys and queries of length 1."""
    keys_5 = jax.random.split(jax.random.key(0), 5)
    q, k = (jax.random.normal(key, (1, count, groups, keys)) for key in keys_5[:2])
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = jax.random.normal(keys_5[2], (1, count, heads, values))
    decay = jnp.exp(-jnp.exp(jax.random.normal(keys_5[3], (1, count, heads, decays)) - 2))
    return Steps(q, k, v, decay, jax.nn.sigmoid(jax.random.normal(keys_5[4], (1, count, heads, 1))) if delta else None)


def gradient(run: Callable[..., tuple[Array, Array]]) -> Callable[..., Any]:
    """Returns the gradient of a sum over what positions read, by what they do."""

    def total(steps: Steps, state: Array) -> Array:
        return jnp.sum(jnp.square(run(state, steps)[1]))

    return lambda state, steps: jax.grad(total)(steps, state)


if __name__ == "__main__":
    main()
