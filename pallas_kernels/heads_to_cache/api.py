"""Heads to cache: checks, choice of the implementation, and the call."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Implementation
from pallas_kernels.heads_to_cache import kernel, reference
from pallas_kernels.select import Choice, UnsupportedKernel, choose

OP = "heads_to_cache"
CACHED = ("bfloat16", "float16", "float32", "uint16")
MOST_NUMBERS = 1 << 15  # of one row and kv head
PARAMS = ("bias", "q_norm", "k_norm")


@dataclass(frozen=True)
class Heads:
    """What is done with a row's heads.

    Attributes:
      kv_heads, group, width: G, queries per kv head, and C.
      turned: channels of each query and key that are rotated, an even number; 0 for none.
      interleaved: pairs are (2i, 2i + 1) instead of (i, i + turned / 2).
      last: the rotated channels are the last ones of a head instead of the first.
      eps, offset: added to the mean square and to the scale, where heads are normalized.
      count: positions of a row, T.
      ring: whether a row's one page is addressed by position modulo its size.
      base_pages: multiplies ``base``.
    """

    kv_heads: int
    group: int
    width: int
    turned: int = 0
    interleaved: bool = False
    last: bool = False
    eps: float = 0.0
    offset: float = 0.0
    count: int = 1
    ring: bool = False
    base_pages: int = 1


def heads_to_cache(
    part_SMN: jax.Array,
    pages: tuple[jax.Array, jax.Array],
    heads: Heads,
    *,
    params: Mapping[str, jax.Array],
    where: Mapping[str, jax.Array],
    layer: jax.Array | None = None,
    implementation: Implementation | Choice = "xla",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds up queries, keys and values, normalizes and rotates them, and writes keys and values into a cache.

    A row's numbers are bitwise the same whatever the other rows.

    Args:
      part_SMN: float32 parts of the product, whose columns are [G, group + 2, C]: a kv head's queries, key and value.
      pages: keys and values [P, G, Z, C], updated in place; uint16 are the bits of bfloat16.
      heads: what is done.
      params: ``bias`` [G, group + 2, C], ``q_norm`` and ``k_norm`` [C], each where there is one; all with a leading
        axis of layers if ``layer`` is given.
      where: int32 ``first`` [B], entry of each row's first position; maybe ``table`` [B, J], page ids of each row;
        without it ``row`` [B], its page where that is not its own number; ``base`` [1], added to page ids times
        ``base_pages``; ``position`` [M], which of the B * T positions each row of the product is, all in order by
        default. And float32 ``cos`` and ``sin`` [M, turned / 2].
      layer: int32, which layer of the parameters' stacks.
      implementation: what computes it; a case that the kernel cannot compute goes to the reference with a warning.

    Returns:
      Queries, float32 [M, H, C], and the pages with the new entries; an entry that has no place is left out.

    Raises:
      UnsupportedKernel: shapes do not fit together.
    """
    _check(part_SMN, pages, heads, params, where)
    if not isinstance(implementation, Choice):
        implementation = choose(OP, case_name(part_SMN.shape[1], heads), implementation, "", obstacles(heads, pages[0]))
    if implementation.implementation == "xla":
        return reference.heads_to_cache(part_SMN, pages, heads, params=params, where=where, layer=layer)
    return kernel.heads_to_cache(
        part_SMN, pages, heads, params=params, where=where, layer=layer, implementation=implementation.implementation
    )


def obstacles(heads: Heads, k_pages: jax.Array) -> list[str]:
    """Returns why the kernel cannot compute a case, each a sentence; empty if it can."""
    reasons, cached = [], jnp.dtype(k_pages.dtype).name
    if cached not in CACHED:
        reasons.append(f"a cache of {cached} is not written, only {', '.join(CACHED)}")
    if kernel.numbers(heads) > MOST_NUMBERS:
        reasons.append(f"{heads.group + 2} heads of {heads.width} channels are more than {MOST_NUMBERS} numbers")
    return reasons


def case_name(rows: int, heads: Heads) -> str:
    """The shape in words, for the choice's record."""
    return f"M{rows} G{heads.kv_heads} R{heads.group} C{heads.width}"


def _check(part_SMN, pages, heads: Heads, params, where) -> None:
    columns = heads.kv_heads * (heads.group + 2) * heads.width
    if part_SMN.ndim != 3 or part_SMN.shape[2] != columns:
        raise UnsupportedKernel(f"{OP}: parts [S, M, {columns}] are needed, got {part_SMN.shape}")
    if any(page.ndim != 4 or page.shape[1::2] != (heads.kv_heads, heads.width) for page in pages):
        raise UnsupportedKernel(f"{OP}: pages [P, {heads.kv_heads}, Z, {heads.width}] are needed")
    if set(params) - set(PARAMS) or "first" not in where or bool(heads.turned) != ("cos" in where):
        raise UnsupportedKernel(f"{OP}: {', '.join(PARAMS)} are known, and first, cos and sin are needed")
    if "position" not in where and part_SMN.shape[1] != len(where["first"]) * heads.count:
        raise UnsupportedKernel(f"{OP}: {part_SMN.shape[1]} rows are not {len(where['first'])} of {heads.count}")
