"""Latents to cache: checks, choice of the implementation, and the call."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Implementation
from pallas_kernels.heads_to_cache.api import CACHED
from pallas_kernels.latents_to_cache import kernel, reference
from pallas_kernels.select import Choice, UnsupportedKernel, choose

OP = "latents_to_cache"
WIDEST = 1 << 13
PARAMS = ("norm", "bias", "q_norm", "q_bias")


@dataclass(frozen=True)
class Latents:
    """What is done with a row's latent.

    Attributes:
      rank: R, channels that are normalized.
      turned: further channels, one key that all heads share; they are rotated where there are angles.
      interleaved: pairs are (2i, 2i + 1) instead of (i, i + turned / 2).
      eps: added to the mean square.
      scale: multiplies the normalized channels.
      count: positions of a batch row, T.
      base_pages: multiplies ``base``.
    """

    rank: int
    turned: int
    interleaved: bool = False
    eps: float = 1e-6
    scale: float = 1.0
    count: int = 1
    base_pages: int = 1


def latents_to_cache(
    part_SMX: jax.Array,
    pages: jax.Array,
    latents: Latents,
    *,
    params: Mapping[str, jax.Array],
    where: Mapping[str, jax.Array],
    query_SMR: jax.Array | None = None,
    layer: jax.Array | None = None,
    implementation: Implementation | Choice = "xla",
) -> tuple[jax.Array | None, jax.Array]:
    """Adds up latents and low-rank queries, normalizes both, rotates the shared key, and writes it with the latent.

    A row's numbers are bitwise the same whatever the other rows (DeepSeek-V2, section 2.1).

    Args:
      part_SMX: float32 parts of the latents' product; columns are R and then the key's.
      pages: cache [P, 1, Z, X], updated in place; uint16 are the bits of bfloat16.
      latents: what is done.
      params: ``norm`` [R], maybe ``bias`` [X]; with queries ``q_norm``, maybe ``q_bias``, of their width. All with a
        leading axis of layers if ``layer`` is given.
      where: as of ``heads_to_cache``; ``cos`` and ``sin`` [M, turned / 2] only where the key is rotated.
      query_SMR: parts of the low-rank queries' product, of a width of their own; None where there are none.
      layer: int32, which layer of the parameters' stacks.
      implementation: what computes it; a case that the kernel cannot compute goes to the reference with a warning.

    Returns:
      The queries normalized, float32 [M, R'] or None, and the pages with the new entries; an entry that has no place
      is left out.

    Raises:
      UnsupportedKernel: shapes do not fit together.
    """
    _check(part_SMX, pages, latents, params, where, query_SMR)
    if not isinstance(implementation, Choice):
        blocked = obstacles(latents, pages, query_SMR)
        implementation = choose(OP, case_name(part_SMX.shape[1], latents, query_SMR), implementation, "", blocked)
    how = implementation.implementation
    given = {"params": params, "where": where, "query_SMR": query_SMR, "layer": layer}
    if how == "xla":
        return reference.latents_to_cache(part_SMX, pages, latents, **given)
    return kernel.latents_to_cache(part_SMX, pages, latents, **given, implementation=how)


def obstacles(latents: Latents, pages: jax.Array, query_SMR: jax.Array | None) -> list[str]:
    """Returns why the kernel cannot compute a case, each a sentence; empty if it can."""
    reasons, cached = [], jnp.dtype(pages.dtype).name
    if cached not in CACHED:
        reasons.append(f"a cache of {cached} is not written, only {', '.join(CACHED)}")
    widest = max(latents.rank, latents.turned, 0 if query_SMR is None else query_SMR.shape[2])
    if widest > WIDEST:
        reasons.append(f"rows of {widest} numbers, more than {WIDEST} in one program")
    return reasons


def case_name(rows: int, latents: Latents, query_SMR: jax.Array | None) -> str:
    """The shape in words, for the choice's record."""
    low = "" if query_SMR is None else f" Q{query_SMR.shape[2]}"
    return f"M{rows} R{latents.rank} C{latents.turned}{low}"


def _check(part_SMX, pages, latents: Latents, params, where, query_SMR) -> None:
    width, rows = latents.rank + latents.turned, part_SMX.shape[1]
    if part_SMX.ndim != 3 or part_SMX.shape[2] != width:
        raise UnsupportedKernel(f"{OP}: parts [S, M, {width}] are needed, got {part_SMX.shape}")
    if pages.ndim != 4 or pages.shape[1::2] != (1, width):
        raise UnsupportedKernel(f"{OP}: pages [P, 1, Z, {width}] are needed, got {pages.shape}")
    if query_SMR is not None and (query_SMR.ndim != 3 or query_SMR.shape[1] != rows):
        raise UnsupportedKernel(f"{OP}: parts of queries [S, {rows}, R] are needed, got {query_SMR.shape}")
    wanted = {"norm"} | (set() if query_SMR is None else {"q_norm"})
    if (
        set(params) - set(PARAMS)
        or wanted - set(params)
        or "first" not in where
        or ("cos" in where) != ("sin" in where)
    ):
        raise UnsupportedKernel(
            f"{OP}: {', '.join(PARAMS)} are known, and {', '.join(sorted(wanted))} and first needed"
        )
    if "position" not in where and rows != len(where["first"]) * latents.count:
        raise UnsupportedKernel(f"{OP}: {rows} rows are not {len(where['first'])} of {latents.count}")
