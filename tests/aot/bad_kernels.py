"""Kernels that no GPU should be given, to see that compiling them fails."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxspec.aot import process
from jaxspec.aot.program_report import compile_for
from jaxspec.sharding.targets import target_devices
from pallas_kernels.backend import BlockSpec, Launch, ds, launch, whole

DEPTH = 512


def product(x_ref, w_ref, out_ref, *, step: int):
    def add(k, total):
        x, w = x_ref[:, ds(k * step, step)], w_ref[ds(k * step, step), :]
        return total + jnp.dot(x, w, preferred_element_type=jnp.float32)

    out_ref[...] = jax.lax.fori_loop(0, DEPTH // step, add, jnp.zeros(out_ref.shape, jnp.float32))


def compile_product(tile: int, step: int, num_warps: int, num_stages: int) -> int:
    """Compiles a product in square tiles and returns its shared memory in bytes."""
    size = jax.ShapeDtypeStruct((tile, DEPTH), jnp.bfloat16), jax.ShapeDtypeStruct((DEPTH, tile), jnp.bfloat16)

    def call(x, w):
        return launch(
            partial(product, step=step), x, w, name="product", grid=(1,), in_specs=[whole(x.shape), whole(w.shape)],
            out_specs=BlockSpec((tile, tile), lambda i: (0, 0)),
            out_shape=jax.ShapeDtypeStruct((tile, tile), jnp.float32),
            how=Launch(num_warps, num_stages), implementation="triton",
        )  # fmt: skip

    compiled = compile_for(call, size, target_devices(process.target_text("h100")), name="bad")
    return compiled.memory_analysis().temp_size_in_bytes
