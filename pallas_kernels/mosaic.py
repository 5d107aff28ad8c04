"""The only file that names Pallas' Mosaic GPU backend: launches, registers, products of blocks of rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.select import UnsupportedKernel

SWIZZLE = 128  # bytes, the widest
DEPTH = SWIZZLE // 2  # numbers of bfloat16 of one step along the sum
COLUMNS = 128  # of which a product must have a multiple: 64 for each of two warpgroups
WARPGROUPS = 2  # that multiply; a third copies
COPY_REGISTERS = 40  # of a thread of the third; the others get the rest
REGISTERS = 232  # of a thread of theirs

ds = pl.ds
when = pl.when
run_scoped = pl.run_scoped
run_state = pl.run_state


@dataclass(frozen=True)
class Tile:
    """How one launch is cut.

    Attributes:
      columns: of the result per program, a multiple of 128; both warpgroups that multiply take half of them.
      stages: copies along the sum that are under way at a time.
    """

    columns: int = 128
    stages: int = 4


@dataclass(frozen=True)
class BlockProduct:
    """Static facts of products of blocks of rows with the weights of a group each.

    Attributes:
      name: in profiles and launch lists.
      rows: of a block, a multiple of 64.
      depth, columns: K and N of a group's weights.
      parts: weights [K, N] side by side that the same rows are multiplied by.
      tile: sizes.
      dtype: of the result.
      finish: takes the float32 sums of every part, biases added, and returns the result before factors.
    """

    name: str
    rows: int
    depth: int
    columns: int
    parts: int
    tile: Tile
    dtype: jnp.dtype
    finish: Callable[..., jax.Array]


@cache
def mosaic_gpu() -> Any:
    """Imports the backend at its first use: a third of a second, and a package that jax does not install."""
    from jax.experimental.pallas import mosaic_gpu

    return mosaic_gpu


def obstacles() -> list[str]:
    """Returns why these kernels cannot run here; empty for Hopper, and where there is no card."""
    if find_spec("absl") is None:
        return ["Mosaic GPU needs the package absl-py, which is not installed"]
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", "9.0") if device.platform == "gpu" else "9.0"
    return [] if capability == "9.0" else [f"wgmma is for compute capability 9.0, this card has {capability}"]


@dataclass(frozen=True)
class Registers:
    """How numbers lie in a warpgroup's registers: as products leave them; nowhere in particular in a simulation.

    Attributes:
      simulated: whether a CPU simulates the card.
    """

    simulated: bool

    def load(self, ref: Any, place: tuple[Any, ...], missing: int | None = None) -> jax.Array:
        """Loads numbers as sums lie in registers, or a vector that lacks their axis ``missing``."""
        if self.simulated:
            return ref[place]
        index = () if jax.__version_info__ >= (0, 12) else (None,)
        return mosaic_gpu().load(ref.at[place], *index, layout=_layout(missing), optimized=False)

    def lay(self, x: jax.Array, missing: int | None = None) -> jax.Array:
        """Lays out constants as ``load`` does numbers."""
        return x if self.simulated else mosaic_gpu().layout_cast(x, _layout(missing))


def _layout(missing: int | None) -> Any:
    layout = mosaic_gpu().Layout.WGMMA
    return layout if missing is None else layout.reduce(missing)


def launch(
    body: Callable[..., None],
    *operands: jax.Array,
    name: str,
    grid: Mapping[str, int],
    out_type: Any,
    interpret: bool,
    approximate: bool = False,
    warpgroups: int = WARPGROUPS + 1,
) -> Any:
    """Runs a kernel body over a grid of programs.

    Args:
      body: takes references to the operands, then to the results.
      *operands: arrays.
      name: in profiles and launch lists.
      grid: programs by the name of their axis.
      out_type: shapes and dtypes of the results.
      interpret: whether a CPU simulates the card.
      approximate: whether exponentials may be the card's instruction.
      warpgroups: of a program.
    """

    def named(*refs: Any) -> None:
        body(*refs)

    named.__name__ = name
    params = mosaic_gpu().CompilerParams(
        lowering_semantics=mosaic_gpu().LoweringSemantics.Lane, approx_math=approximate
    )
    return mosaic_gpu().kernel(
        named,
        out_type=out_type,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=params,
        interpret=_simulation() if interpret else None,
    )(*operands)


def block_products(
    what: BlockProduct,
    group_N: jax.Array,
    count_N: jax.Array,
    x_SK: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    factor_S: jax.Array | None = None,
    *,
    interpret: bool,
) -> jax.Array:
    """Multiplies every block of rows by its group's weights; block n is rows ``n * rows`` on, of x and of the result.

    A third warpgroup copies tiles of rows and weights into shared memory, some steps ahead; two multiply, 64 rows and
    16 numbers of the sum per instruction, in the order of the sum. So a row's bits depend on the row and the weights
    alone. Rows of a block after those that count are undefined, and blocks without any are not computed.

    Args:
      what: static facts.
      group_N: int32 group of each block.
      count_N: int32 how many of its rows count.
      x_SK: bfloat16 rows.
      weight: bfloat16 [..., K, N] or [..., K, parts, N] of all groups.
      bias: [..., N] or [..., parts, N] of all groups, None for none.
      factor_S: float32 factors of the rows of the result, None for none.
      interpret: whether a CPU simulates the card.

    Returns:
      [blocks * rows, N].

    Raises:
      UnsupportedKernel: sizes that no instruction has.
    """
    if what.rows % 64 or what.tile.columns % COLUMNS or what.columns % what.tile.columns or what.tile.stages < 2:
        raise UnsupportedKernel(
            f"{what.name}: rows of a block must be a multiple of 64, columns one of {COLUMNS} that divides "
            f"{what.columns}, stages at least 2, got {what.rows} and {what.tile}"
        )
    blocks, columns = group_N.shape[0], what.tile.columns
    half = columns // WARPGROUPS
    operands = [group_N, count_N, x_SK, weight.reshape(-1, what.parts * what.columns)]
    if bias is not None:
        operands.append(bias.reshape(-1, what.parts, what.columns // half, half))
    if factor_S is not None:
        operands.append(factor_S.reshape(blocks, what.rows))

    def body(*refs: Any) -> None:
        group_ref, count_ref, x_ref, weight_ref, *vectors, out_ref = refs
        bias_ref = vectors[0] if bias is not None else None
        factor_ref = vectors[-1] if factor_S is not None else None
        _Block(
            what, group_ref, count_ref, x_ref, weight_ref, bias_ref, factor_ref, out_ref, Registers(interpret)
        ).compute()

    return launch(
        body,
        *operands,
        name=what.name,
        grid={"block": blocks, "across": what.columns // columns},
        out_type=jax.ShapeDtypeStruct((blocks * what.rows, what.columns), what.dtype),
        interpret=interpret,
    )


@dataclass(frozen=True)
class _Block:
    """Inside the kernel: one block of rows and one tile of columns."""

    what: BlockProduct
    group_ref: Any
    count_ref: Any
    x_ref: Any
    weight_ref: Any
    bias_ref: Any
    factor_ref: Any
    out_ref: Any
    registers: Registers

    def compute(self) -> None:
        """Computes the block if it has rows."""
        what, n = self.what, lax.axis_index("block")

        @pl.when(self.count_ref[n] > 0)
        def _():
            needs = self._pipeline(_nothing, _nothing).get_allocations(self.x_ref, *[self.weight_ref] * what.parts)
            shape = (WARPGROUPS, what.rows, what.tile.columns // WARPGROUPS)
            out = mosaic_gpu().SMEM(shape, what.dtype, transforms=swizzled(what.dtype))
            pl.run_scoped(partial(self._run, n), needs, out, collective_axes="warpgroup")

    def _run(self, n: Any, allocations: Any, out_smem: Any) -> None:
        what = self.what
        across, own = lax.axis_index("across"), lax.axis_index("warpgroup")
        half = what.tile.columns // WARPGROUPS

        def multiply(_, x_smem: Any, *weights_and_sums: Any) -> Any:
            *weights, sums = weights_and_sums
            for sum_ref, weight_smem in zip(sums, weights, strict=True):
                mosaic_gpu().wgmma(sum_ref, x_smem, weight_smem.at[:, pl.ds(own * half, half)])
            mosaic_gpu().wgmma_wait(what.parts)  # all but this step's: what the step before read may be overwritten
            return sums

        def computing(multiply_all: Callable[..., Any]) -> None:
            def scope(*sums: Any) -> list[jax.Array]:
                multiply_all(sums)
                return [one[...] for one in sums]

            accumulator = mosaic_gpu().WGMMAAccumulatorRef((what.rows, half), jnp.float32)
            sums = pl.run_scoped(scope, *[accumulator] * what.parts)
            out_smem[own] = self._finished(sums, n, across * WARPGROUPS + own).astype(what.dtype)
            mosaic_gpu().commit_smem()
            place = pl.ds(n * what.rows, what.rows), pl.ds((across * WARPGROUPS + own) * half, half)
            mosaic_gpu().copy_smem_to_gmem(out_smem.at[own], self.out_ref.at[place])
            mosaic_gpu().wait_smem_to_gmem(0, wait_read_only=True)

        deep = pl.ds(self.group_ref[n] * what.depth, what.depth)
        starts = [part * what.columns + across * what.tile.columns for part in range(what.parts)]
        self._pipeline(multiply, computing)(
            self.x_ref.at[pl.ds(n * what.rows, what.rows), :],  # TMA takes tiles from multiples of 8 rows on alone
            *[self.weight_ref.at[deep, pl.ds(start, what.tile.columns)] for start in starts],
            allocations=allocations,
        )

    def _finished(self, sums: Sequence[jax.Array], n: Any, place: Any) -> jax.Array:
        if self.bias_ref is not None:
            places = [(self.group_ref[n], part, place) for part in range(len(sums))]
            biases = [self.registers.load(self.bias_ref, at, 0).astype(jnp.float32) for at in places]
            wide = [lax.broadcast_in_dim(bias, sums[0].shape, (1,)) for bias in biases]
            sums = [y + bias for y, bias in zip(sums, wide, strict=True)]
        y = without_derivatives(self.what.finish)(*sums)
        if self.factor_ref is None:
            return y
        return y * lax.broadcast_in_dim(self.registers.load(self.factor_ref, (n,), 1), y.shape, (0,))

    def _pipeline(self, multiply: Callable[..., Any], computing: Callable[..., None]) -> Any:
        what = self.what
        spec = partial(
            mosaic_gpu().BlockSpec, transforms=swizzled(jnp.dtype("bfloat16")), memory_space=mosaic_gpu().SMEM,
            delay_release=1,
        )  # fmt: skip
        return mosaic_gpu().emit_pipeline_warp_specialized(
            multiply,
            grid=(what.depth // DEPTH,),
            memory_registers=COPY_REGISTERS,
            in_specs=[
                spec((what.rows, DEPTH), lambda k: (0, k)),
                *[spec((DEPTH, what.tile.columns), lambda k: (k, 0))] * what.parts,
            ],
            wg_axis="warpgroup",
            num_compute_wgs=WARPGROUPS,
            max_concurrent_steps=what.tile.stages,
            compute_context=computing,
        )


def without_derivatives(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a function that computes the same, with no derivatives of its own; until jax 0.12 kernels know none."""

    def call(*args: jax.Array) -> jax.Array:
        traced = jax.make_jaxpr(function)(*args)
        (out,) = _evaluated(traced.jaxpr, traced.consts, args)
        return out

    return call


def _evaluated(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else values[atom]

    for step in jaxpr.eqns:
        inputs = [read(atom) for atom in step.invars]
        inner = step.params.get("call_jaxpr", step.params.get("jaxpr"))
        if inner is not None:
            results = _evaluated(inner.jaxpr, inner.consts, inputs)
        else:
            results = step.primitive.bind(*inputs, **step.primitive.get_bind_params(step.params))
            results = results if step.primitive.multiple_results else [results]
        values.update(zip(step.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _nothing(*_: Any, **__: Any) -> None:
    """In place of a pipeline's body, where only its memory is asked for."""


def swizzled(dtype: jnp.dtype) -> tuple[Any, ...]:
    """Returns how tiles lie in shared memory so that wgmma reads them without conflicts."""
    return mosaic_gpu().TilingTransform((8, SWIZZLE // dtype.itemsize)), mosaic_gpu().SwizzleTransform(SWIZZLE)


def _simulation() -> Any:
    """Returns what simulates a card and looks for races; until jax 0.11 it had no public name."""
    kind = getattr(mosaic_gpu(), "InterpretGPUParams", None)
    if kind is None:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams as kind
    return kind(detect_races=True)
