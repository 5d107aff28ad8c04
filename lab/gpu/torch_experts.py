"""Routed experts in PyTorch and Triton, as inference engines of that world write them: what the kernel has to beat.

Four launches and no wait: rows are listed by expert, gate, up and activation are one kernel, down another, and the sum
over a row's experts is PyTorch's. Weights are read where JAX put them.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

FP4_STEP = 14  # e2m1 in the top bits of a float16 counts 2 ** -14 of its value


@dataclass(frozen=True)
class Tiles:
    """Rows, columns and depth of a program, its warps and the loads under way."""

    rows: int
    columns: int
    depth: int
    num_warps: int = 4
    num_stages: int = 4


def tiles_for(rows: int, *, packed: bool) -> Tiles:
    """Sizes by the number of rows, as such engines tune them; the depth of a step divides that of fp4's scales."""
    if rows <= 32:
        return Tiles(16, 64, 128)
    return Tiles(16 if rows <= 64 else 32, 64 if packed else 128, 64)


@triton.jit
def list_rows(choice, listed, count, routed, room, SIZE: tl.constexpr):
    """One program per expert: the routed rows that chose it, in their order."""
    expert = tl.program_id(0)
    row = tl.arange(0, SIZE)
    mine = (tl.load(choice + row, mask=row < routed, other=-1) == expert).to(tl.int32)
    tl.store(listed + expert * room + tl.cumsum(mine, 0) - 1, row, mask=mine == 1)
    tl.store(count + expert, tl.sum(mine, 0))


@triton.jit
def _widened(byte, shift, factor):
    code = (byte >> shift).to(tl.uint16)
    half = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.float16, bitcast=True)
    return (half.to(tl.float32) * factor).to(tl.bfloat16)


@triton.jit
def _add(total, x_even, x_odd, data, scale, inside, PACKED: tl.constexpr):
    w = tl.load(data, mask=inside, other=0)
    if PACKED:
        exponent = tl.load(scale, mask=inside, other=0).to(tl.int32) + 14
        factor = (exponent << 23).to(tl.float32, bitcast=True)
        total = tl.dot(x_even, _widened(w, 0, factor), total)
        total = tl.dot(x_odd, _widened(w, 4, factor), total)
    else:
        total = tl.dot(x_even, w, total)
    return total


@triton.jit
def product(
    x, data, scale, bias, weight, out, listed, count, room, tiles, depth, columns, top_k,
    PARTS: tl.constexpr, OSS: tl.constexpr, PACKED: tl.constexpr, BIASED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A tile of one expert's rows times its weights: with two parts gate, up and activation, else the way back."""
    expert, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    there = tl.load(count + expert)
    if tile * ROWS >= there:
        return
    place = tile * ROWS + tl.arange(0, ROWS)
    routed = tl.load(listed + expert * room + place, mask=place < there, other=0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    fits = column < columns
    source = routed // top_k if PARTS == 2 else routed
    STEP: tl.constexpr = DEPTH // 2 if PACKED else DEPTH
    stored = depth // 2 if PACKED else depth
    first = tl.zeros((ROWS, COLUMNS), tl.float32)
    second = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, stored, STEP):
        k = start + tl.arange(0, STEP)
        seen = (place < there)[:, None] & (k < stored)[None, :]
        if PACKED:
            even = tl.load(x + source[:, None] * depth + 2 * k[None, :], mask=seen, other=0.0)
            odd = tl.load(x + source[:, None] * depth + 2 * k[None, :] + 1, mask=seen, other=0.0)
        else:
            even = tl.load(x + source[:, None] * depth + k[None, :], mask=seen, other=0.0)
            odd = even
        inside = (k < stored)[:, None] & fits[None, :]
        base = expert.to(tl.int64) * stored * PARTS * columns
        at = data + base + k[:, None] * PARTS * columns + column[None, :]
        scales = expert.to(tl.int64) * (depth // 32) * PARTS * columns
        by = scale + scales + (k // 16)[:, None] * PARTS * columns + column[None, :]
        first = _add(first, even, odd, at, by, inside, PACKED)
        if PARTS == 2:
            second = _add(second, even, odd, at + columns, by + columns, inside, PACKED)
    if BIASED:
        own = bias + expert * PARTS * columns + column
        first += tl.load(own, mask=fits, other=0.0).to(tl.float32)[None, :]
        if PARTS == 2:
            second += tl.load(own + columns, mask=fits, other=0.0).to(tl.float32)[None, :]
    if PARTS == 2:
        if OSS:
            gate, up = tl.minimum(first, 7.0), tl.minimum(tl.maximum(second, -7.0), 7.0)
            first = (up + 1) * gate / (1 + tl.exp(-1.702 * gate))
        else:
            first = first / (1 + tl.exp(-first)) * second
    else:
        first *= tl.load(weight + routed, mask=place < there, other=0.0)[:, None]
    where = out + routed[:, None] * columns + column[None, :]
    tl.store(where, first.to(out.dtype.element_ty), mask=(place < there)[:, None] & fits[None, :])


def routed_experts(x: Any, choice: Any, weight: Any, weights: dict[str, Any], *, oss: bool) -> Any:
    """Float32 [M, D] of torch tensors on the GPU.

    Args:
      x: bfloat16 rows [M, D].
      choice: int32 [M, A].
      weight: float32 [M, A].
      weights: ``gate_up`` [E, D, 2, F], ``down`` [E, F, D] in bfloat16, or their mxfp4 bytes with ``gate_up_scale`` and
        ``down_scale``; maybe ``gate_up_bias`` and ``down_bias``.
      oss: whether the activation is gpt-oss's, else SwiGLU.
    """
    rows, top_k = choice.shape
    packed = "down_scale" in weights
    experts, width = weights["down"].shape[0], x.shape[1]
    hidden, routed = weights["down"].shape[1] * (2 if packed else 1), rows * top_k
    listed = torch.empty((experts, rows), dtype=torch.int32, device=x.device)
    count = torch.empty(experts, dtype=torch.int32, device=x.device)
    list_rows[(experts,)](choice, listed, count, routed, rows, SIZE=triton.next_power_of_2(routed))
    tile = tiles_for(rows, packed=packed)
    tiles = triton.cdiv(rows, tile.rows)
    inner = torch.empty((routed, hidden), dtype=torch.bfloat16, device=x.device)
    out = torch.empty((routed, width), dtype=torch.float32, device=x.device)
    for name, source, result, depth, columns in (
        ("gate_up", x, inner, width, hidden),
        ("down", inner, out, hidden, width),
    ):
        bias = weights.get(f"{name}_bias")
        product[(experts * tiles, triton.cdiv(columns, tile.columns))](
            source, weights[name], weights.get(f"{name}_scale", weights[name]), weights[name] if bias is None else bias,
            weight, result, listed, count, rows, tiles, depth, columns, top_k,
            PARTS=2 if name == "gate_up" else 1, OSS=oss, PACKED=packed, BIASED=bias is not None, ROWS=tile.rows,
            COLUMNS=tile.columns, DEPTH=tile.depth, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out.view(rows, top_k, width).sum(1)


def from_jax(x: Any) -> Any:
    """The same memory as a torch tensor."""
    return torch.from_dlpack(x)


def captured(calls: list[Callable[[], Any]]) -> tuple[Callable[[], None], list[Any]]:
    """A CUDA graph of several calls, and what they returned."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [call() for call in calls]
    return graph.replay, outs


def wait(_: Any = None) -> None:
    """Until the GPU has done all that torch asked for."""
    torch.cuda.synchronize()
