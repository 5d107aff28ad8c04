"""A named case of an operation: what tests, compile checks, benchmarks and the tuner run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax

from pallas_kernels.backend import Implementation


@dataclass(frozen=True)
class Case:
    """One shape of an operation.

    Attributes:
      name: unique within the operation.
      size: ``tiny`` runs in interpret mode in a test, ``real`` has the shape of a published model.
      abstract: makes the arguments as shapes and dtypes.
      random: makes concrete arguments from a key.
      call: the operation with everything static bound, for an implementation.
      tolerance: largest allowed difference to the reference, relative to the largest magnitude of the result.
      read_bytes: bytes that the operation must read at least, for given concrete arguments; None if not counted.
      mosaic: whether Mosaic GPU computes it, too.
    """

    name: str
    size: Literal["tiny", "real"]
    abstract: Callable[[], tuple[Any, ...]]
    random: Callable[[jax.Array], tuple[Any, ...]]
    call: Callable[[Implementation], Callable[..., Any]]
    tolerance: float
    read_bytes: Callable[..., int] | None = None
    mosaic: bool = False
