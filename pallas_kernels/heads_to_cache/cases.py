"""Named cases of heads on their way to the cache: small ones of every kind, and layers of published models."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.cache_cases import abstract_where, random_where
from pallas_kernels.case import Case
from pallas_kernels.heads_to_cache.api import Heads, heads_to_cache


@dataclass(frozen=True)
class Sizes:
    """A shape of the operation.

    Attributes:
      rows: B.
      heads: what is done.
      parts: S.
      page: entries of a page.
      table: pages of a row that shares a pool, 0 for a page of its own.
      layers: of parameters and of pages, 0 for no stack.
      params: which there are.
      dtype: of the cache.
      packed: rows of the product, 0 for all positions in order.
    """

    rows: int
    heads: Heads
    parts: int = 2
    page: int = 16
    table: int = 0
    layers: int = 0
    params: tuple[str, ...] = ("q_norm", "k_norm")
    dtype: str = "bfloat16"
    packed: int = 0


def _abstract(s: Sizes) -> tuple[Any, ...]:
    h, m, whole = s.heads, s.packed or s.rows * s.heads.count, jnp.int32
    lead = (s.layers,) if s.layers else ()
    shapes = {"bias": (*lead, h.kv_heads, h.group + 2, h.width), "q_norm": (*lead, h.width), "k_norm": (*lead, h.width)}
    pages = s.rows * max(s.table, 1) * max(s.layers, 1)
    page = jax.ShapeDtypeStruct((pages, h.kv_heads, s.page, h.width), jnp.dtype(s.dtype))
    angles = m, h.turned // 2
    where = abstract_where(s.rows, table=s.table, layers=s.layers, packed=s.packed, angles=angles)
    return (
        jax.ShapeDtypeStruct((s.parts, m, h.kv_heads * (h.group + 2) * h.width), jnp.float32), (page, page),
        {name: jax.ShapeDtypeStruct(shapes[name], jnp.bfloat16) for name in s.params}, where,
        jax.ShapeDtypeStruct((), whole) if s.layers else None,
    )  # fmt: skip


def _random(s: Sizes, key: jax.Array) -> tuple[Any, ...]:
    part, pages, params, where, layer = _abstract(s)
    keys = iter(jax.random.split(key, 8))
    made = {name: jax.random.normal(next(keys), x.shape).astype(x.dtype) for name, x in params.items()}
    real = [jax.random.normal(next(keys), x.shape).astype(jnp.bfloat16) for x in pages]
    bits = [jax.lax.bitcast_convert_type(x, jnp.uint16) if s.dtype == "uint16" else x.astype(s.dtype) for x in real]
    base = max(s.layers - 1, 0) * s.rows * max(s.table, 1) // s.heads.base_pages
    given = random_where(next(keys), where, page=s.page, count=s.heads.count, base=base)
    number = None if layer is None else jnp.int32(s.layers - 1)
    return jax.random.normal(next(keys), part.shape), tuple(bits), made, given, number


def _call(s: Sizes, implementation: Any) -> Callable[..., Any]:
    def call(part_SMN: jax.Array, pages: Any, params: Any, where: Any, layer: Any) -> Any:
        q, *new = heads_to_cache(
            part_SMN, pages, s.heads, params=params, where=where, layer=layer, implementation=implementation
        )
        return q, [jax.lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x for x in new]

    return call


def _case(name: str, size: Literal["tiny", "real"], s: Sizes) -> Case:
    # Sums of squares in another order; a cached number may then be rounded to its neighbor, 2 ** -8 of it away.
    tolerance = 2e-6 if s.dtype == "float32" else 4e-3
    return Case(name, size, partial(_abstract, s), partial(_random, s), partial(_call, s), tolerance)


SMALL = Heads(2, 3, 16, turned=16, eps=1e-6)
POOLED = replace(SMALL, count=2, base_pages=9)
QWEN3 = Heads(4, 8, 128, turned=128, eps=1e-6)
GPT_OSS = Heads(8, 8, 64, turned=64)

CASES: tuple[Case, ...] = (
    _case("float32", "tiny", Sizes(3, SMALL, dtype="float32")),
    _case("layers_and_a_pool", "tiny", Sizes(3, POOLED, table=3, layers=2, dtype="uint16")),
    _case("ring_bias_one_part", "tiny", Sizes(
        2, replace(SMALL, count=4, ring=True, turned=8), parts=1, params=("bias",), dtype="float32",
    )),
    _case("packed_pairs_at_the_end", "tiny", Sizes(
        3, replace(SMALL, count=4, turned=8, last=True, interleaved=True, width=24, offset=1.0), packed=5,
        params=("bias", "q_norm", "k_norm"), dtype="float32",
    )),
    _case("not_turned", "tiny", Sizes(4, replace(SMALL, group=1, turned=0), params=())),
    *(_case(f"qwen3_30b_a3b_{b}_{t}", "real", Sizes(b, replace(QWEN3, count=t), 3, 4352, layers=2))
      for b, t in ((1, 1), (64, 4))),
    _case("qwen3_30b_a3b_pool", "real", Sizes(16, replace(QWEN3, count=4), 3, 256, table=16, layers=2)),
    _case("gpt_oss_120b_4", "real", Sizes(4, GPT_OSS, 3, 4352, layers=2, params=("bias",))),
    _case("gpt_oss_120b_ring", "real", Sizes(4, replace(GPT_OSS, ring=True), 3, 384, layers=2, params=("bias",))),
    _case("mixtral_8x7b_8", "real", Sizes(8, Heads(8, 4, 128, turned=128), 2, 4352, layers=2, params=())),
)  # fmt: skip
