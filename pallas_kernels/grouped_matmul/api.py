"""Grouped matrix product: checks, choice of the implementation, and the call."""

import jax
import jax.numpy as jnp

from pallas_kernels import blocks
from pallas_kernels.backend import Implementation
from pallas_kernels.grouped_matmul import kernel, reference
from pallas_kernels.grouped_matmul.kernel import Setting, Tiles
from pallas_kernels.product import Product
from pallas_kernels.product import obstacles as product_obstacles
from pallas_kernels.quantized import Weight, form
from pallas_kernels.select import Choice, UnsupportedKernel, choose

OP = "grouped_matmul"
DEFAULT = {
    "float32": Tiles(32, Product(32, 32, 4, 2), Product(32, 32, 4, 2), 32),
    "mxfp4": Tiles(32, Product(128, 64, 4, 3)),
}


def grouped_matmul(
    x_RK: jax.Array,
    size_E: jax.Array,
    w_EKN: Weight,
    *,
    dtype: jnp.dtype,
    layer: jax.Array | None = None,
    implementation: Implementation | Choice = "xla",
    tiles: Tiles | None = None,
) -> jax.Array:
    """Each group of rows times its own matrix, for prefill and training (Gale 2022, MegaBlocks).

    Differentiable in the rows and in plain weights; sums of gradients over rows keep the order of the rows.

    Args:
      x_RK: rows, sorted by group.
      size_E: int32 rows per group; rows after the last group come out as 0.
      w_EKN: plain or quantized, with a leading axis of layers if ``layer`` is given.
      dtype: of both factors; sums are float32.
      layer: int32, which layer of the stack; the stack is never sliced, for a slice would be a copy.
      implementation: what computes it; a case that the kernel cannot compute goes to the reference with a warning.
      tiles: sizes; those that were measured, or else a safe default, if None.

    Returns:
      float32 [R, N].

    Raises:
      UnsupportedKernel: shapes or dtypes do not fit together.
    """
    axes = 3 if layer is None else 4
    if x_RK.ndim != 2 or len(w_EKN.shape) != axes or size_E.shape != w_EKN.shape[-3:-2]:
        raise UnsupportedKernel(
            f"{OP}: rows [R, K], sizes [E] and weights [E, K, N], with layers before E if one is chosen, must fit "
            f"together, got {x_RK.shape}, {size_E.shape} and {w_EKN.shape}"
        )
    if x_RK.shape[1] != w_EKN.shape[-2]:
        raise UnsupportedKernel(f"{OP}: rows of {x_RK.shape[1]} numbers for matrices of {w_EKN.shape[-2]} rows")
    if size_E.dtype != jnp.int32:
        raise UnsupportedKernel(f"{OP}: sizes must be int32, got {size_E.dtype}")
    dtype = jnp.dtype(dtype)
    if not isinstance(implementation, Choice):
        name = f"R{x_RK.shape[0]} {shape_of(w_EKN)} {form(w_EKN)}"
        implementation = choose(OP, name, implementation, "", obstacles(w_EKN))
    if implementation.implementation == "xla":
        return reference.grouped_matmul(x_RK, size_E, w_EKN, dtype=dtype, layer=layer)
    setting = Setting(dtype, tiles or tiles_for(w_EKN), implementation.implementation)
    return kernel.grouped_matmul(setting, x_RK, size_E, w_EKN, layer)


def obstacles(w_EKN: Weight) -> list[str]:
    """Returns why the kernel cannot compute with these weights, each a sentence; empty if it can."""
    return product_obstacles(w_EKN, "w_EKN", lead=len(w_EKN.shape) - 2)


def shape_of(w_EKN: Weight) -> str:
    """Sizes that tile sizes are measured for."""
    groups, depth, columns = w_EKN.shape[-3:]
    return f"E{groups} K{depth} N{columns}"


def tiles_for(w_EKN: Weight) -> Tiles:
    """Measured tile sizes of this card and shape, or a safe default."""
    kind = form(w_EKN)
    return blocks.look_up(OP, DEFAULT.get(kind, Tiles()), shape=shape_of(w_EKN), form=kind)
