"""Root mean square norms by their kernel, which first adds the parts of a product to the stream."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxspec.nn.matrix import Matrix, added_up, own_of
from jaxspec.nn.norm import rms_norm
from jaxspec.shapes import Array
from pallas_kernels.add_norm.api import MOST_ROWS, OP, Norm, Parts, add_norm, case_name, obstacles
from pallas_kernels.select import Choice, choose


@dataclass(frozen=True)
class PartialSum:
    """What a sub-layer adds to the stream, not added up yet.

    Attributes:
      part_SMD: parts of its last product.
      bias: added to their sum, None for none.
    """

    part_SMD: Array
    bias: Matrix | None = None

    @classmethod
    def of(cls, x: Array, w: Any, bias: Any, dtype: Any, axes: int) -> "PartialSum | None":
        """Multiplies x, whose last axes are contracted; None where no kernel of a GPU does, which leaves parts."""
        if not isinstance(w, Matrix) or not (bias is None or isinstance(bias, Matrix)):
            return None
        if w.kernels not in ("triton", "interpret"):
            return None
        rows_MX = x.reshape(-1, *x.shape[x.ndim - axes :])
        part_SMD = w.parts(rows_MX.reshape(len(rows_MX), -1), dtype, axes)
        return None if part_SMD is None else cls(part_SMD, bias)

    def total(self) -> Array:
        """Returns the sum [M, D]."""
        total = added_up(self.part_SMD)
        return total if self.bias is None else total + own_of(self.bias).astype(jnp.float32)


def add_and_normalize(
    x: Array, scale: Any, norm: Norm, added: PartialSum | None = None
) -> tuple[Array, Array, Array | None]:
    """Returns x with what is added to it, that normalized, and a copy of this for the next kernel.

    Args:
      x: [..., D].
      scale: the norm's weight, in a ``Matrix`` where a kernel may compute it.
      norm: how, and which copy is wanted; there is none where XLA computes it.
      added: to x, [M, D] in its order.
    """
    x_MD = x.reshape(-1, x.shape[-1])
    if isinstance(scale, Matrix) and scale.kernels in ("triton", "interpret"):
        rows, width = scale.devices.own_rows(len(x_MD)), x_MD.shape[1]
        own_MD: Any = jax.ShapeDtypeStruct((rows, width), jnp.float32)
        parts = None if added is None else Parts(added.part_SMD, None)
        if rows <= MOST_ROWS:
            choice = choose(OP, case_name(own_MD, parts), scale.kernels, "cuda", obstacles(own_MD))
            if choice.implementation != "xla":
                return _by_kernel(x, scale, norm, added, choice)
    x = x if added is None else x + added.total().reshape(x.shape)
    return x, rms_norm(x, own_of(scale), norm.eps, offset=norm.offset), None


def _by_kernel(
    x: Array, scale: Matrix, norm: Norm, added: PartialSum | None, choice: Choice
) -> tuple[Array, Array, Array | None]:
    """Computes what ``add_and_normalize`` does; on a mesh every device its own rows."""
    x_MD = x.reshape(-1, x.shape[-1])
    over = scale.devices.over_rows(len(x_MD))
    bias = None if added is None or added.bias is None else added.bias.whole

    def compute(x_MD: Array, part_SMD: Array | None, bias: Any, weight: Any, layer: Array | None):
        parts = None if part_SMD is None else Parts(part_SMD, bias)
        return add_norm(x_MD, weight, norm, parts, layer=layer, implementation=choice)

    sum_MD, normed_MD, copy_PMX = scale.devices.run(
        compute, (x_MD.astype(jnp.float32), None if added is None else added.part_SMD, bias, scale.whole, scale.layer),
        (P(over), P(None, over), P(), P(), P()), (P(over), P(over), P(None, over) if norm.dtype else None),
    )  # fmt: skip
    return sum_MD.reshape(x.shape), normed_MD.reshape(x.shape), copy_PMX
