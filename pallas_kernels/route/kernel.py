"""The Pallas body of routing: a few rows' logits in registers from their sums to the places of their choices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.backend import Implementation, Launch, launch, load, program_id, store, whole
from pallas_kernels.row_blocks import Blocks, describe, most_blocks
from pallas_kernels.steady import exp

MOST_EXPERTS = 1024
IN_ONE_TILE = 8192  # logits of which one program chooses and sorts
FEWEST_ROWS, ROWS = 4, 16
PER_WARP = 256


@dataclass(frozen=True)
class _Body:
    """Static facts of the kernel: ``tall`` rows of ``wide`` experts per program; a ``height`` of 0 sorts nothing."""

    rows: int
    experts: int
    tall: int
    wide: int
    scoring: Any
    height: int
    stacked: bool
    how: Implementation


def route(
    part_SXE: jax.Array,
    biases: Mapping[str, jax.Array],
    scoring: Any,
    *,
    layer: jax.Array | None,
    live_M: jax.Array | None,
    height: int | None,
    implementation: Implementation,
) -> tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array, Blocks] | None]:
    """As ``api.route``; many rows are not sorted."""
    rows, experts = part_SXE.shape[1] // (3 if scoring.thirds else 1), part_SXE.shape[-1]
    wide, tall = _power(experts), max(FEWEST_ROWS, _power(rows))
    if height is None or tall * wide > IN_ONE_TILE:
        height, tall = None, min(tall, ROWS)
    body = _Body(rows, experts, tall, wide, scoring, height or 0, layer is not None, implementation)
    operands = {"part": part_SXE, **biases}
    if layer is not None:
        operands["layer"] = layer.astype(jnp.int32).reshape(1)
    if live_M is not None and height is not None:
        operands["live"] = live_M.astype(jnp.int32)
    routed = rows * scoring.top_k
    kinds = [((rows, scoring.top_k), jnp.int32), ((rows, scoring.top_k), jnp.float32), ((rows, experts), jnp.float32)]
    if height is not None:
        most = most_blocks(routed, experts, height)
        kinds += [((n,), jnp.int32) for n in (routed, most, most, most)]
    shapes = [jax.ShapeDtypeStruct(*kind) for kind in kinds]
    outs = launch(
        partial(_route, body, tuple(operands)),
        *operands.values(),
        name="route",
        grid=(-(-rows // tall),),
        in_specs=[whole(x.shape) for x in operands.values()],
        out_specs=[whole(s.shape) for s in shapes],
        out_shape=shapes,
        how=Launch(num_warps=max(1, min(16, tall * wide // PER_WARP)), num_stages=1),
        implementation=implementation,
    )
    return (*outs[:3], None if height is None else (outs[3], Blocks(*outs[4:])))


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _route(body: _Body, names: Sequence[str], *refs: Any) -> None:
    ref, outs = dict(zip(names, refs, strict=False)), refs[len(names) :]
    row_C = program_id(0) * body.tall + jnp.arange(body.tall, dtype=jnp.int32)
    column_X = jnp.arange(body.wide, dtype=jnp.int32)
    inside_CX = (row_C < body.rows)[:, None] & (column_X < body.experts)[None]
    logits_CX = _logits(body, ref, row_C, column_X, inside_CX)
    store(outs[2].at[row_C[:, None], column_X[None]], logits_CX, mask=inside_CX)
    score_CX = 1 / (1 + exp(-logits_CX, body.how)) if body.scoring.kind == "sigmoid" else logits_CX
    wanted_CX = score_CX + _bias(body, ref, "choice", column_X) if "choice" in ref else score_CX
    wanted_CX = jnp.where(wanted_CX == wanted_CX, wanted_CX, -jnp.inf)  # a row of no numbers chooses, too
    open_CX = _open(body, wanted_CX, column_X)
    place_CX, weight_CX = _chosen(body, score_CX, wanted_CX, open_CX, column_X, biased="choice" in ref)
    is_chosen_CX = place_CX < body.scoring.top_k
    real_CX = is_chosen_CX & inside_CX
    # Beside the last row where masked: an interpreted store reads and writes those, too.
    at = jnp.where(real_CX, row_C[:, None], body.rows), place_CX
    store(outs[0].at[at], jnp.broadcast_to(column_X[None], place_CX.shape), mask=real_CX)
    store(outs[1].at[at], weight_CX, mask=real_CX)
    if body.height:
        if "live" in ref:
            real_CX &= (load(ref["live"].at[row_C], mask=row_C < body.rows, other=0) > 0)[:, None]
        _sort(body, row_C[:, None] * body.scoring.top_k + place_CX, real_CX, outs[3:])


def _logits(body: _Body, ref: dict[str, Any], row_C, column_X, inside_CX) -> jax.Array:
    def total(first: int) -> jax.Array:
        parts = ref["part"].shape[0]
        each = (
            load(ref["part"].at[s, (row_C + first)[:, None], column_X[None]], mask=inside_CX, other=0.0)
            for s in range(parts)
        )
        sum_CX = next(each)
        for part_CX in each:
            sum_CX = sum_CX + part_CX
        return sum_CX

    logits_CX = total(0)
    if body.scoring.thirds:
        logits_CX = logits_CX + (total(body.rows) + total(2 * body.rows))
    return logits_CX + _bias(body, ref, "logit", column_X) if "logit" in ref else logits_CX


def _bias(body: _Body, ref: dict[str, Any], name: str, column_X) -> jax.Array:
    lead = (ref["layer"][0],) if body.stacked else ()
    return load(ref[name].at[(*lead, column_X)], mask=column_X < body.experts, other=0.0).astype(jnp.float32)[None]


def _chosen(body: _Body, score_CX, wanted_CX, open_CX, column_X, *, biased: bool) -> tuple[jax.Array, jax.Array]:
    """Finds which choice each expert is, ``top_k`` if none, one after another, and computes what it would weigh."""
    s = body.scoring
    top_C = jnp.max(jnp.where(open_CX, score_CX, -jnp.inf), axis=1) if s.kind == "softmax" else None

    def choose(a, carry):
        open_CX, place_CX, total_C = carry
        one_CX, score_C = _first_best(wanted_CX, open_CX, column_X)
        if biased:
            score_C = _only(one_CX, score_CX)
        weight_C = score_C if top_C is None else exp(score_C - top_C, body.how)
        return open_CX & ~one_CX, jnp.where(one_CX, a, place_CX), total_C + weight_C

    nothing_C = jnp.zeros(body.tall, jnp.float32)
    carry = (open_CX, jnp.full(score_CX.shape, s.top_k, jnp.int32), nothing_C)
    _, place_CX, total_C = lax.fori_loop(0, s.top_k, choose, carry)
    weight_CX = score_CX
    if top_C is not None:
        weight_CX = exp(jnp.minimum(score_CX - top_C[:, None], 0.0), body.how) / total_C[:, None]
    elif s.renormalize:
        weight_CX = score_CX / (total_C[:, None] + np.float32(s.floor))
    return place_CX, weight_CX * np.float32(s.scale)


def _only(one_CX, x_CX) -> jax.Array:
    """The marked entry of each row; exact, for all others are left out."""
    return jnp.sum(jnp.where(one_CX, x_CX, 0), axis=1)


def _first_best(x_CX, open_CX, column_X) -> tuple[jax.Array, jax.Array]:
    """Marks the largest open entry of each row, of equal ones the first, and returns it."""
    best_C = jnp.max(jnp.where(open_CX, x_CX, -jnp.inf), axis=1)
    is_best_CX = open_CX & (x_CX == best_C[:, None])
    column_C = jnp.min(jnp.where(is_best_CX, column_X[None], np.int32(x_CX.shape[1])), axis=1)
    return column_X[None] == column_C[:, None], best_C


def _open(body: _Body, wanted_CX, column_X) -> jax.Array:
    """Experts that may be chosen: those in the groups whose best members score highest together."""
    s, there_CX = body.scoring, jnp.broadcast_to((column_X < body.experts)[None], wanted_CX.shape)
    if s.groups == 1:
        return there_CX
    group_CX = jnp.broadcast_to((column_X // (body.experts // s.groups))[None], wanted_CX.shape)

    def add_best(g, total_CX):
        left_CX, total_C = there_CX & (group_CX == g), jnp.zeros(body.tall, jnp.float32)
        for _ in range(s.members):
            one_CX, best_C = _first_best(wanted_CX, left_CX, column_X)
            total_C = total_C + best_C
            left_CX = left_CX & ~one_CX
        return jnp.where(group_CX == g, total_C[:, None], total_CX)

    total_CX = lax.fori_loop(0, s.groups, add_best, jnp.zeros_like(wanted_CX))

    def open_best(_, carry):
        open_CX, left_CX = carry
        one_CX, _ = _first_best(total_CX, left_CX, column_X)
        now_CX = there_CX & (group_CX == _only(one_CX, group_CX)[:, None])
        return open_CX | now_CX, left_CX & ~now_CX

    return lax.fori_loop(0, s.kept_groups, open_best, (jnp.zeros_like(there_CX), there_CX))[0]


def _sort(body: _Body, routed_CX, real_CX, outs: Sequence[Any]) -> None:
    """Places of all choices: a row chooses an expert once, so those before it are the rows before that chose it."""
    order_ref, *block_refs = outs
    member_CX = real_CX.astype(jnp.int32)
    size_X = jnp.sum(member_CX, axis=0)
    start_X = jnp.cumsum(size_X) - size_X
    place_CX = start_X[None] + jnp.cumsum(member_CX, axis=0) - 1
    store(order_ref.at[jnp.where(real_CX, place_CX, order_ref.shape[0])], routed_CX, mask=real_CX)
    describe(size_X, start_X, block_refs, groups=body.experts, height=body.height)
