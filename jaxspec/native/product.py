"""Rows times packed weights: the call of the kernel, with and without a choice of matrices."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.errors import ConfigError
from jaxspec.native.build import Library, library
from jaxspec.native.packing import KINDS, Packed

Array = jax.Array
TARGET = "jaxspec_product"
TARGETS = (TARGET, "jaxspec_attention", "jaxspec_threshold", "jaxspec_cut", "jaxspec_draw")


@functools.cache
def kernels() -> Library:
    """Returns the compiled kernels, known to XLA, or why there are none."""
    made = library()
    if made.handle is not None:
        for target in TARGETS:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(made.handle[target]), platform="cpu")
    return made


def product(
    x_MD: Array,
    w: Packed,
    bias: Array | None = None,
    *,
    expert_MA: Array | None = None,
    layer: Array | None = None,
    weight_MA: Array | None = None,
    dtype: Any = jnp.bfloat16,
) -> Array:
    """Computes ``x @ w``, or each row's product with the matrices that it chose.

    A row's result is bit for bit the same for any number of rows, any threads and any instruction set, but that AMX
    adds bfloat16 products in an order of its own; a bfloat16 weight's are also those of XLA's own products of more than
    two rows. Sums are float32.

    Args:
      x_MD: float rows.
      w: leading axes: layers if ``layer`` is given, then experts if ``expert_MA`` is given.
      bias: of each matrix, [*lead, *outer], bfloat16 or float32; added to the products.
      expert_MA: int32 choices; one that is not in [0, E) gives zeros.
      layer: int32, which layer of the stack, which is not sliced.
      weight_MA: one per choice, [M', A'] with M' * A' = M * A: each product is multiplied by its weight, and A'
        neighbors are summed in their order.
      dtype: bfloat16 rounds the rows to it, but not for float32 weights; float32 does not.

    Returns:
      float32 [M, N]; with choices [M * A, N], with weights [M', N].

    Raises:
      ConfigError: the kernels could not be compiled.
    """
    if kernels().handle is None:
        raise ConfigError(f"kernels 'native': {kernels().reason}; or take 'xla'")
    rows = x_MD.shape[0]
    matrices = 1 if expert_MA is None else w.lead[-1]
    routed = rows if expert_MA is None else expert_MA.size
    columns = math.prod(w.outer)
    results = routed if weight_MA is None else weight_MA.shape[0]
    if not routed:
        return jnp.zeros((results, columns), jnp.float32)
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((results, columns), jnp.float32))
    choice = jnp.zeros(0, jnp.int32) if expert_MA is None else expert_MA.astype(jnp.int32)
    return call(
        x_MD.astype(jnp.float32),
        choice,
        jnp.int32(0) if layer is None else layer.astype(jnp.int32),
        w.data,
        w.scale,
        jnp.zeros(0, jnp.float32) if weight_MA is None else weight_MA.reshape(-1).astype(jnp.float32),
        jnp.zeros(0, jnp.float32) if bias is None else bias,
        kind=np.int64(KINDS.index(w.kind)),
        depth=np.int64(w.depth),
        group=np.int64(w.group + w.group % 2),  # an odd one is the whole depth, which is made even
        exponent_scales=np.int64(w.scale.dtype == jnp.uint8),
        wide=np.int64(w.kind == "float32" or jnp.dtype(dtype) == jnp.float32),
        matrices=np.int64(matrices),
    )
