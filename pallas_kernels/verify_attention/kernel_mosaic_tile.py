"""The kernels by Mosaic GPU: softmax over pieces of a row's cache, which TMA copies, and the pieces put together."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import mosaic
from pallas_kernels.mosaic import COPY_REGISTERS, REGISTERS, WARPGROUPS, Registers, ds, mosaic_gpu, when
from pallas_kernels.verify_attention.kernel import MASKED, Plan

BFLOAT16, FLOAT32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
ROWS = 64  # queries of one instruction
WIDEST = 256  # channels of values whose sums fit into the registers of one warpgroup
JOINED = 64  # channels of values that are put together at a time, beside which a piece's fit into registers
Softmax = tuple[jax.Array, jax.Array, jax.Array]
"""Greatest score and total of each query [64], and its sums of values [64, C']."""


def groups(value_width: int) -> int:
    """Returns how many times 64 queries a tile has: each warpgroup its own, or both the same and half of the values."""
    return WARPGROUPS if value_width <= WIDEST else 1


def attend(plan: Plan, operands: dict[str, jax.Array]) -> jax.Array:
    """Runs the kernels.

    Args:
      plan: what is static.
      operands: ``q`` bfloat16 [N * 64 or 128, C], scaled; ``k`` and, where values have pages of their own, ``v``
        [P * G * Z, ...]; ``page`` [B, J]; ``last`` and, in a window, ``first`` [N, X, 64], positions that each query
        sees; ``reach`` [N, 2], from where and before where any of a tile does; maybe ``sinks`` [N, X, 64]; for
        trees what ``own_blocks`` returns.

    Returns:
      float32 [N, X, 64, C'].
    """
    tiles, shape, wide = plan.tiles_of_queries, jax.ShapeDtypeStruct, plan.value_width
    result = shape((tiles, groups(wide), ROWS, wide), FLOAT32)
    statistic = shape((plan.splits, tiles, WARPGROUPS, ROWS), FLOAT32)
    pieces = [statistic, statistic, shape((*statistic.shape, wide * groups(wide) // WARPGROUPS), FLOAT32)]
    how: dict[str, Any] = {"interpret": plan.implementation == "mosaic_interpret", "approximate": True}

    def run(kind: "type[_Reading | _Joining]", names: tuple[str, ...], *refs: Any) -> None:
        ref = dict(zip(names, refs, strict=False))
        kind(plan, ref, refs[len(names) :], Registers(how["interpret"])).run()

    out: Any = mosaic.launch(
        partial(run, _Reading, tuple(operands)), *operands.values(), name="verify_attention",
        grid={"tile": tiles, "share": plan.programs}, out_type=result if plan.whole_reach else pieces, **how,
    )  # fmt: skip
    if plan.whole_reach:
        return out
    kept = {name: operands[name] for name in ("reach", "sinks") if name in operands}
    return mosaic.launch(
        partial(run, _Joining, tuple(kept)), *kept.values(), *out, name="verify_attention_pieces",
        grid={"tile": tiles}, out_type=result, warpgroups=WARPGROUPS, **how,
    )  # fmt: skip


@dataclass(frozen=True)
class _Tile:
    """Inside a kernel: one tile of queries, and of it what a warpgroup computes.

    Attributes:
      plan: what is static.
      ref: operands by name.
      outs: results, or for ``_Joining`` the pieces and the result.
      registers: where numbers lie.
    """

    plan: Plan
    ref: dict[str, Any]
    outs: tuple[Any, ...]
    registers: Registers

    @property
    def n(self) -> jax.Array:
        """Its number."""
        return lax.axis_index("tile")

    @property
    def own(self) -> jax.Array:
        """Number of this warpgroup."""
        return lax.axis_index("warpgroup")

    @property
    def group(self) -> Any:
        """Number of the 64 queries that this warpgroup computes."""
        return self.own if groups(self.plan.value_width) == WARPGROUPS else 0

    @property
    def columns(self) -> int:
        """Channels of values that a warpgroup sums."""
        return self.plan.value_width * groups(self.plan.value_width) // WARPGROUPS

    def vector(self, name: str) -> jax.Array:
        """A number for each query."""
        return self.registers.load(self.ref[name], (self.n, self.group), 1)

    def begin(self, columns: int, *, with_sinks: bool) -> Softmax:
        """A running softmax that has seen nothing but a sink."""
        lay = self.registers.lay
        sums_RC = lay(jnp.zeros((ROWS, columns), FLOAT32))
        if with_sinks and "sinks" in self.ref:
            return self.vector("sinks"), lay(jnp.ones(ROWS, FLOAT32), 1), sums_RC
        return lay(jnp.full(ROWS, MASKED, FLOAT32), 1), lay(jnp.zeros(ROWS, FLOAT32), 1), sums_RC

    def finish(self, softmax: Softmax, out: Any, first: int = 0) -> None:
        """Stores the result, from a channel of the warpgroup's on."""
        _, total_R, sums_RC = softmax
        inverse_R = 1 / lax.max(total_R, lax.full_like(total_R, 1e-30))
        result_RC = sums_RC * _along_rows(inverse_R, sums_RC.shape)

        def store(begin: int) -> None:
            out[self.n, self.group, :, begin : begin + sums_RC.shape[1]] = result_RC

        if self.columns == self.plan.value_width:
            store(first)
            return
        for half in range(WARPGROUPS):  # so that columns are static, as a simulation wants them
            when(self.own == half)(partial(store, half * self.columns + first))


class _Reading(_Tile):
    """One warpgroup copies the tile's share of the cache block by block, two multiply."""

    def run(self) -> None:
        """Computes the splits of the tile's reach that are this program's, each for itself, or all of a short one."""
        plan, gpu = self.plan, mosaic_gpu()
        block, stages, x = plan.tiles.block, plan.tiles.launch.num_stages, groups(plan.value_width)
        memory = partial(gpu.SMEM, dtype=BFLOAT16)
        laid = {"transforms": mosaic.swizzled(BFLOAT16)}
        needs = {"q": memory((x, ROWS, plan.key_width), **laid), "q_there": gpu.Barrier(num_arrivals=x)}
        for name, width in self._cached.items():
            needs |= {name: memory((stages, block, width), **laid)}
            needs |= {f"{name}_there": gpu.Barrier(num_barriers=stages)}
        needs["read"] = gpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages)
        if self.registers.simulated:  # which knows no product with a transposed factor, nor with one in registers
            turned, weight = (WARPGROUPS, plan.key_width, block), (WARPGROUPS, ROWS, block)
            needs |= {"turned": memory(turned), "weight": memory(weight)}

        def warpgroup(scratch: dict[str, Any]) -> None:
            lax.cond(self.own == WARPGROUPS, partial(self._copy, scratch), partial(self._compute, scratch))

        mosaic.run_scoped(warpgroup, needs, collective_axes="warpgroup")

    @property
    def _cached(self) -> dict[str, int]:
        """Names and widths of what is copied of each position."""
        return {"k": self.plan.key_width} | ({"v": self.plan.value_width} if "v" in self.ref else {})

    def _over_splits(self, visit: Callable[..., None]) -> jax.Array:
        """Visits each split with its number, first and end block, and how many blocks were visited; returns these."""
        length, programs, block = (
            jnp.int32(x) for x in (self.plan.tiles.split, self.plan.programs, self.plan.tiles.block)
        )
        first, end = self.ref["reach"][self.n, 0], self.ref["reach"][self.n, 1]

        def split(number: Any, first: jax.Array, end: jax.Array, visited: jax.Array) -> jax.Array:
            low, high = lax.div(first, block), lax.div(end + block - 1, block)
            visit(number, low, high, visited)
            return visited + high - low

        if self.plan.whole_reach:
            return split(0, first, end, jnp.int32(0))
        begin = lax.div(first, length) + lax.axis_index("share")
        turns = lax.div(lax.div(end + length - 1, length) - begin + programs - 1, programs)

        def turn(number: jax.Array, visited: jax.Array) -> jax.Array:
            at = begin + number * programs
            return split(at, lax.max(at * length, first), lax.min((at + 1) * length, end), visited)

        return lax.fori_loop(0, lax.max(turns, jnp.int32(0)), turn, jnp.int32(0))

    def _copy(self, scratch: dict[str, Any]) -> None:
        """Copies the queries, and block after block as soon as the place of an earlier one is free."""
        gpu, stages, x = mosaic_gpu(), jnp.int32(self.plan.tiles.launch.num_stages), groups(self.plan.value_width)
        gpu.set_max_registers(COPY_REGISTERS, action="decrease")
        for group in range(x):
            rows = self.ref["q"].at[ds((self.n * x + group) * ROWS, ROWS), :]
            gpu.copy_gmem_to_smem(rows, scratch["q"].at[group], scratch["q_there"])

        def split(_: Any, low: jax.Array, high: jax.Array, visited: jax.Array) -> None:
            def copy(index: jax.Array, _: None) -> None:
                turn = visited + index - low
                slot = lax.rem(turn, stages)

                @when(turn >= stages)
                def _() -> None:
                    gpu.barrier_wait(scratch["read"].at[slot])

                self._fetch(scratch, index, slot)

            lax.fori_loop(low, high, copy, None)

        def drain(turn: jax.Array, _: None) -> None:
            gpu.barrier_wait(scratch["read"].at[lax.rem(turn, stages)])

        visited = self._over_splits(split)
        lax.fori_loop(lax.max(visited - stages, jnp.int32(0)), visited, drain, None)

    def _fetch(self, scratch: dict[str, Any], index: jax.Array, slot: jax.Array) -> None:
        """Starts the copies of a block; of a tree's last ones those of the tile's node."""
        size = self.plan.tiles.block

        def copy(suffix: str, row: jax.Array) -> None:
            for name in self._cached:
                block = self.ref[name + suffix].at[ds(row, size), :]
                mosaic_gpu().copy_gmem_to_smem(block, scratch[name].at[slot], scratch[f"{name}_there"].at[slot])

        if "tail" not in self.ref:
            copy("", self._row_of(index))
            return
        tail, begin = self.ref["tail"][self.n, 0], self.ref["tail"][self.n, 1]
        when(index < tail)(lambda: copy("", self._row_of(index)))
        when(index >= tail)(lambda: copy("_own", begin + (index - tail) * size))

    def _row_of(self, index: jax.Array) -> jax.Array:
        """First place of a block of the tile's row and kv head, among the positions of all pages and kv heads."""
        plan, page = self.plan, jnp.int32(self.plan.page)
        head = lax.div(self.n, jnp.int32(plan.tiles_of_queries // (plan.rows * plan.kv_heads)))
        b, g = lax.div(head, jnp.int32(plan.kv_heads)), lax.rem(head, jnp.int32(plan.kv_heads))
        position = index * plan.tiles.block
        place = lax.rem(lax.div(position, page), jnp.int32(self.ref["page"].shape[1]))
        return (self.ref["page"][b, place] * plan.kv_heads + g) * page + lax.rem(position, page)

    def _compute(self, scratch: dict[str, Any]) -> None:
        mosaic_gpu().set_max_registers(REGISTERS, action="increase")
        last_R, first_R = self.vector("last"), self.vector("first") if "first" in self.ref else None
        mosaic_gpu().barrier_wait(scratch["q_there"])

        def split(number: Any, low: jax.Array, high: jax.Array, visited: jax.Array) -> None:
            def visit(index: jax.Array, softmax: Softmax) -> Softmax:
                return self._visit(scratch, (last_R, first_R), index, visited + index - low, softmax)

            softmax = lax.fori_loop(low, high, visit, self.begin(self.columns, with_sinks=self.plan.whole_reach))
            if self.plan.whole_reach:
                self.finish(softmax, *self.outs)
                return
            place = lax.rem(number, jnp.int32(self.plan.splits)), self.n, self.own
            for out, made in zip(self.outs, softmax, strict=True):
                out[place] = made

        self._over_splits(split)

    def _visit(
        self, scratch: dict[str, Any], sees: Any, index: jax.Array, turn: jax.Array, softmax: Softmax
    ) -> Softmax:
        """One block of the running softmax (Milakov 2018)."""
        (top_R, total_R, sums_RC), size = softmax, self.plan.tiles.block
        slot, shape = lax.rem(turn, jnp.int32(self.plan.tiles.launch.num_stages)), (ROWS, size)
        mosaic_gpu().barrier_wait(scratch["k_there"].at[slot])
        score_RZ = _product(scratch["q"].at[self.group], self._turned(scratch, scratch["k"].at[slot]), shape)
        position_RZ = self.registers.lay(lax.broadcasted_iota(jnp.int32, shape, 1)) + index * size
        last_R, first_R = sees
        seen_RZ = position_RZ <= _along_rows(last_R, shape)
        if first_R is not None:
            seen_RZ &= position_RZ >= _along_rows(first_R, shape)
        score_RZ = lax.select(seen_RZ, score_RZ, self.registers.lay(jnp.full(shape, MASKED, FLOAT32)))
        new_top_R = lax.max(top_R, jnp.max(score_RZ, axis=1))
        # What a query does not see weighs 0 also as long as it has seen nothing.
        base_R = lax.max(new_top_R, lax.full_like(new_top_R, MASKED / 2))
        prob_RZ = lax.exp(score_RZ - _along_rows(base_R, shape))
        keep_R = lax.exp(top_R - base_R)
        weight = self._left(scratch, prob_RZ.astype(BFLOAT16))
        values, own_values = scratch.get("v", scratch["k"]), "v" in scratch
        if own_values:
            mosaic_gpu().barrier_wait(scratch["v_there"].at[slot])
        first = 0 if self.columns == self.plan.value_width else self.own * self.columns
        sums_RC = self._add_product(
            sums_RC * _along_rows(keep_R, sums_RC.shape), weight, values.at[slot, :, ds(first, self.columns)]
        )
        mosaic_gpu().barrier_arrive(scratch["read"].at[slot])
        return new_top_R, total_R * keep_R + jnp.sum(prob_RZ, axis=1), sums_RC

    def _turned(self, scratch: dict[str, Any], k: Any) -> Any:
        """The keys of a block as a right factor."""
        if not self.registers.simulated:
            return k.transpose((1, 0))
        scratch["turned"][self.own] = k[...].T
        return scratch["turned"].at[self.own]

    def _left(self, scratch: dict[str, Any], weight_RZ: jax.Array) -> Any:
        """Weights as a left factor, which stays in registers."""
        if not self.registers.simulated:
            return weight_RZ
        scratch["weight"][self.own] = weight_RZ
        return scratch["weight"].at[self.own]

    def _add_product(self, sums_RC: jax.Array, left: Any, right: Any) -> jax.Array:
        """Adds a product, in the registers where the sums are."""
        if self.registers.simulated:
            return sums_RC + _product(left, right, sums_RC.shape)
        add = mosaic.run_state(lambda sums: mosaic_gpu().wgmma(sums, left, right))
        return add(mosaic_gpu().WGMMAAccumulatorRef.init(sums_RC))


class _Joining(_Tile):
    """Puts the pieces of a tile together, in their order, and after them a sink."""

    def run(self) -> None:
        """Goes over the tile's splits, for some channels after others."""
        length, out = jnp.int32(self.plan.tiles.split), self.outs[-1]
        first, end = (lax.div(self.ref["reach"][self.n, n] + more, length) for n, more in ((0, 0), (1, length - 1)))
        for column in range(0, self.columns, JOINED):
            columns = slice(column, column + JOINED)

            def join(number: jax.Array, softmax: Softmax, columns: slice = columns) -> Softmax:
                return _joined(softmax, self._piece(number, columns))

            softmax = lax.fori_loop(first + 1, end, join, self._piece(first, columns))
            if "sinks" in self.ref:
                softmax = _joined(softmax, self.begin(JOINED, with_sinks=True))
            self.finish(softmax, out, column)

    def _piece(self, number: jax.Array, columns: slice) -> Softmax:
        place, load = (lax.rem(number, jnp.int32(self.plan.splits)), self.n, self.own), self.registers.load
        top_R, total_R = (load(statistic, place, 1) for statistic in self.outs[:2])
        return top_R, total_R, load(self.outs[2], (*place, slice(None), columns))


def _joined(one: Softmax, other: Softmax) -> Softmax:
    """The softmax over what two have seen; one that has seen nothing leaves the other as it is."""
    (top_R, total_R, sums_RC), (other_top_R, other_total_R, other_sums_RC) = one, other
    new_top_R = lax.max(top_R, other_top_R)
    keep_R, weight_R = lax.exp(top_R - new_top_R), lax.exp(other_top_R - new_top_R)
    sums_RC = sums_RC * _along_rows(keep_R, sums_RC.shape) + other_sums_RC * _along_rows(weight_R, sums_RC.shape)
    return new_top_R, total_R * keep_R + other_total_R * weight_R, sums_RC


def _along_rows(x_R: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x_R, shape, (0,))


def _product(left: Any, right: Any, shape: tuple[int, ...]) -> jax.Array:
    """The float32 product of two factors in shared memory; the left one may be in registers."""

    def multiply(sums: Any) -> jax.Array:
        mosaic_gpu().wgmma(sums, left, right)
        return sums[...]

    return mosaic.run_scoped(multiply, mosaic_gpu().WGMMAAccumulatorRef(shape, FLOAT32))
