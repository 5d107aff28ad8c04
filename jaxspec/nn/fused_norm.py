"""Root mean square norms by their kernel, which first adds the parts of a product to the stream."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxspec.nn.matrix import Matrix, own_of
from jaxspec.nn.norm import rms_norm
from jaxspec.shapes import Array
from pallas_kernels.add_norm.api import MOST_ROWS, OP, Norm, Parts, add_norm, case_name, obstacles
from pallas_kernels.select import choose


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
        total = self.part_SMD[0]
        for part_MD in self.part_SMD[1:]:
            total = total + part_MD
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
    if isinstance(scale, Matrix) and scale.kernels in ("triton", "interpret") and len(x_MD) <= MOST_ROWS:
        bias: Any = None if added is None or added.bias is None else added.bias.whole
        parts = None if added is None else Parts(added.part_SMD, bias)
        choice = choose(OP, case_name(x_MD, parts), scale.kernels, "cuda", obstacles(x_MD))
        if choice.implementation != "xla":
            weight: Any = scale.whole  # norms and biases are plain arrays
            sum_MD, normed_MD, copy_PMX = add_norm(
                x_MD.astype(jnp.float32), weight, norm, parts, layer=scale.layer, implementation=choice
            )
            return sum_MD.reshape(x.shape), normed_MD.reshape(x.shape), copy_PMX
    x = x if added is None else x + added.total().reshape(x.shape)
    return x, rms_norm(x, own_of(scale), norm.eps, offset=norm.offset), None
