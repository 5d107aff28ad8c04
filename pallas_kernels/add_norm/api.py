"""Adding and normalizing: checks, choice of the implementation, and the call."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.add_norm import kernel, reference
from pallas_kernels.backend import Implementation
from pallas_kernels.select import Choice, UnsupportedKernel, choose

OP = "add_norm"
MOST_ROWS = 512
WIDEST = 1 << 14


@dataclass(frozen=True)
class Norm:
    """A root mean square norm (Zhang 2019), and in which other form its result is wanted.

    Attributes:
      eps: added to the mean square.
      offset: added to the scale.
      dtype: name of the dtype of a second copy, empty for none.
      planes: parts of that copy: two hold the even columns and the odd ones.
    """

    eps: float
    offset: float = 0.0
    dtype: str = ""
    planes: int = 1


@dataclass(frozen=True)
class Parts:
    """Parts of a product, whose sum in their order, with the bias, joins the stream.

    Attributes:
      part_SMD: float32.
      bias: [D], or [L, D] with a layer; None for none.
    """

    part_SMD: jax.Array
    bias: jax.Array | None = None


def add_norm(
    x_MD: jax.Array, scale: jax.Array, norm: Norm, parts: Parts | None = None, *, layer: jax.Array | None = None,
    implementation: Implementation | Choice = "xla",
) -> tuple[jax.Array, jax.Array, jax.Array | None]:  # fmt: skip
    """``x + sum(parts) + bias``, and that normalized.

    A row's numbers are bitwise the same whatever the other rows.

    Args:
      x_MD: float32 rows.
      scale: [D], or [L, D] if ``layer`` is given.
      norm: how they are normalized.
      parts: what is added first; None for nothing.
      layer: int32, which layer of the stacks.
      implementation: what computes it; a case that the kernel cannot compute goes to the reference with a warning.

    Returns:
      The sum [M, D]; it normalized, float32; and the copy of this [planes, M, D / planes], None without a dtype.

    Raises:
      UnsupportedKernel: shapes do not fit together.
    """
    _check(x_MD, scale, norm, parts, layer)
    if not isinstance(implementation, Choice):
        implementation = choose(OP, case_name(x_MD, parts), implementation, "", obstacles(x_MD))
    how = implementation.implementation
    if how == "xla":
        return reference.add_norm(x_MD, scale, norm, parts, layer=layer)
    return kernel.add_norm(x_MD, scale, norm, parts, layer=layer, implementation=how)


def obstacles(x_MD: jax.Array) -> list[str]:
    """Returns why the kernel cannot compute a case, each a sentence; empty if it can."""
    rows, width = x_MD.shape
    reasons = [] if width <= WIDEST else [f"rows of {width} numbers, more than {WIDEST} in one program"]
    return reasons if rows <= MOST_ROWS else [*reasons, f"{rows} rows, more than {MOST_ROWS}: XLA's code is as fast"]


def case_name(x_MD: jax.Array, parts: Parts | None) -> str:
    """The shape in words, for the choice's record."""
    added = "" if parts is None else f" and {parts.part_SMD.shape[0]} parts"
    return f"M{x_MD.shape[0]} D{x_MD.shape[1]}{added}"


def _check(x_MD: jax.Array, scale: jax.Array, norm: Norm, parts: Parts | None, layer: Any) -> None:
    shape = x_MD.shape
    if len(shape) != 2 or x_MD.dtype != jnp.float32 or scale.ndim != 1 + (layer is not None):
        raise UnsupportedKernel(f"{OP}: float32 rows and a scale of each column needed, got {shape} and {scale.shape}")
    if parts is not None and parts.part_SMD.shape[1:] != shape:
        raise UnsupportedKernel(f"{OP}: parts of {shape} needed, got {parts.part_SMD.shape}")
    if shape[1] % norm.planes:
        raise UnsupportedKernel(f"{OP}: {shape[1]} columns in {norm.planes} planes")
