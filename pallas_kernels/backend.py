"""The only file that names Pallas' Triton backend: how kernels are launched, load, store, and are compiled."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

Implementation = Literal["triton", "mosaic", "native", "interpret", "mosaic_interpret", "xla"]
"""``triton`` compiles for a GPU, ``interpret`` runs the same body as plain JAX anywhere, ``xla`` is the reference;
``mosaic`` and ``mosaic_interpret`` are the second backend for GPUs and a simulation of it, see ``mosaic.py``;
``native`` is a kernel in C for the CPU, outside of this package."""

BlockSpec = pl.BlockSpec
ds = pl.ds
program_id = pl.program_id
when = pl.when
load = triton.load
store = triton.store
assembly = triton.elementwise_inline_asm


@dataclass(frozen=True)
class Launch:
    """How the GPU runs one program of a kernel.

    Attributes:
      num_warps: of 32 threads.
      num_stages: loads of a loop that are under way at a time.
    """

    num_warps: int = 4
    num_stages: int = 3


def launch(
    kernel: Callable[..., None],
    *operands: jax.Array,
    name: str,
    grid: tuple[int, ...],
    in_specs: Sequence[Any],
    out_specs: Any,
    out_shape: Any,
    how: Launch,
    implementation: Implementation,
    aliases: Mapping[int, int] | None = None,
) -> Any:
    """Runs a kernel body over a grid of programs.

    Args:
      kernel: takes references to the inputs, then to the outputs; sizes of loads and products are powers of two.
      *operands: the inputs.
      name: in profiles and launch lists.
      grid: programs along up to three axes, static.
      in_specs: block of each input; ``whole`` hands it over unblocked.
      out_specs: block of each result.
      out_shape: shapes and dtypes of the results.
      how: static launch parameters.
      implementation: ``triton`` or ``interpret``.
      aliases: operand to result that share a buffer.
    """
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        interpret=implementation == "interpret",
        input_output_aliases=dict(aliases or {}),
        compiler_params=triton.CompilerParams(num_warps=how.num_warps, num_stages=how.num_stages),
    )(*operands)


def whole(shape: Sequence[int]) -> Any:
    """A block that is the whole operand, whatever the grid: the kernel indexes it itself."""
    return pl.BlockSpec(tuple(shape), lambda *_: (0,) * len(shape))
