"""Named cases of latents on their way to the cache: small ones of every kind, and layers of published models."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.cache_cases import abstract_where, random_where
from pallas_kernels.case import Case
from pallas_kernels.latents_to_cache.api import Latents, latents_to_cache


@dataclass(frozen=True)
class Sizes:
    """A shape of the operation.

    Attributes:
      rows: B.
      latents: what is done.
      query: width of low-rank queries, 0 for none.
      parts: S of the latents' product and of the queries'.
      page: entries of a page.
      table: pages of a row that shares a pool, 0 for a page of its own.
      layers: of parameters and of pages, 0 for no stack.
      bias: whether the products have biases.
      is_turned: whether the key is rotated.
      dtype: of the cache.
      packed: rows of the products, 0 for all positions in order.
    """

    rows: int
    latents: Latents
    query: int = 0
    parts: tuple[int, int] = (2, 3)
    page: int = 16
    table: int = 0
    layers: int = 0
    bias: bool = False
    is_turned: bool = True
    dtype: str = "bfloat16"
    packed: int = 0


def _abstract(s: Sizes) -> tuple[Any, ...]:
    x, m, whole = s.latents, s.packed or s.rows * s.latents.count, jnp.int32
    lead, width = (s.layers,) if s.layers else (), x.rank + x.turned
    widths = {"norm": x.rank} | ({"bias": width} if s.bias else {})
    if s.query:
        widths |= {"q_norm": s.query} | ({"q_bias": s.query} if s.bias else {})
    params = {name: jax.ShapeDtypeStruct((*lead, n), jnp.bfloat16) for name, n in widths.items()}
    pages = s.rows * max(s.table, 1) * max(s.layers, 1)
    angles = m, x.turned // 2 if s.is_turned else 0
    where = abstract_where(s.rows, table=s.table, layers=s.layers, packed=s.packed, angles=angles)
    return (
        jax.ShapeDtypeStruct((s.parts[0], m, width), jnp.float32),
        jax.ShapeDtypeStruct((pages, 1, s.page, width), jnp.dtype(s.dtype)),
        jax.ShapeDtypeStruct((s.parts[1], m, s.query), jnp.float32) if s.query else None, params, where,
        jax.ShapeDtypeStruct((), whole) if s.layers else None,
    )  # fmt: skip


def _random(s: Sizes, key: jax.Array) -> tuple[Any, ...]:
    part, pages, query, params, where, layer = _abstract(s)
    keys = iter(jax.random.split(key, 12))
    made = {name: jax.random.normal(next(keys), x.shape).astype(x.dtype) for name, x in params.items()}
    real = jax.random.normal(next(keys), pages.shape).astype(jnp.bfloat16)
    old = jax.lax.bitcast_convert_type(real, jnp.uint16) if s.dtype == "uint16" else real.astype(s.dtype)
    base = max(s.layers - 1, 0) * s.rows * max(s.table, 1) // s.latents.base_pages
    given = random_where(next(keys), where, page=s.page, count=s.latents.count, base=base)
    low = None if query is None else jax.random.normal(next(keys), query.shape)
    number = None if layer is None else jnp.int32(s.layers - 1)
    return jax.random.normal(next(keys), part.shape), old, low, made, given, number


def _call(s: Sizes, implementation: Any) -> Callable[..., Any]:
    def call(part_SMX: jax.Array, pages: Any, query_SMR: Any, params: Any, where: Any, layer: Any) -> Any:
        low, new = latents_to_cache(
            part_SMX, pages, s.latents, params=params, where=where, query_SMR=query_SMR, layer=layer,
            implementation=implementation,
        )  # fmt: skip
        return low, jax.lax.bitcast_convert_type(new, jnp.bfloat16) if new.dtype == jnp.uint16 else new

    return call


def _case(name: str, size: Literal["tiny", "real"], s: Sizes) -> Case:
    # Sums of squares in another order; a cached number may then be rounded to its neighbor, 2 ** -8 of it away.
    tolerance = 2e-6 if s.dtype == "float32" else 4e-3
    return Case(name, size, partial(_abstract, s), partial(_random, s), partial(_call, s), tolerance)


SMALL = Latents(24, 8)
DEEPSEEK = Latents(512, 64, interleaved=True)

CASES: tuple[Case, ...] = (
    _case("float32", "tiny", Sizes(3, SMALL, 20, dtype="float32")),
    _case("layers_and_a_pool", "tiny", Sizes(
        3, replace(SMALL, count=2, base_pages=9), 32, table=3, layers=2, dtype="uint16",
    )),
    _case("packed_pairs_biases", "tiny", Sizes(
        3, replace(SMALL, count=4, interleaved=True, scale=1.5), 20, parts=(1, 1), bias=True, packed=5, dtype="float32",
    )),
    _case("not_turned_no_queries", "tiny", Sizes(4, SMALL, is_turned=False)),
    *(_case(f"deepseek_v3_{b}_{t}", "real", Sizes(
        b, replace(DEEPSEEK, count=t), 1536, (14, 10), 4352, layers=2,
    )) for b, t in ((1, 1), (64, 4))),
    _case("deepseek_v3_pool", "real", Sizes(
        16, replace(DEEPSEEK, count=4, base_pages=256), 1536, (14, 10), 256, table=16, layers=2,
    )),
    _case("deepseek_v2_lite_4", "real", Sizes(4, DEEPSEEK, 0, (4, 1), 4352, layers=2)),
    _case("mistral_small_4_8", "real", Sizes(8, Latents(256, 64), 1024, (8, 8), 4352, layers=2)),
    _case("glm_5_8", "real", Sizes(8, replace(DEEPSEEK, eps=1e-6), 2048, (12, 8), 4352, layers=2)),
)  # fmt: skip
