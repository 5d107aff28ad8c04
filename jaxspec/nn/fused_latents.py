"""Latent attention's projections by kernels, which read parts of products and each head's weights where they lie."""

from collections.abc import Mapping
from typing import Any

from jaxspec.cache.addressing import LayerCache
from jaxspec.nn.fused_heads import positions_of, where_of
from jaxspec.nn.inputs import Inputs
from jaxspec.nn.matrix import Matrix, parts_together
from jaxspec.nn.policy import Weight
from jaxspec.shapes import Array
from pallas_kernels.heads_dense import api as heads
from pallas_kernels.latents_to_cache import api as latents
from pallas_kernels.select import Choice, choose

RANK_NORM_EPS = 1e-6  # fixed in the reference, whatever the model's own


def latents_by_kernel(
    x_BTD: Array, params: Mapping[str, Any], inputs: Inputs, spec: Any, dtype: Any
) -> tuple[Array, Array | None, LayerCache] | None:
    """Projects to latents, which it normalizes, rotates and writes, and to queries in their space, in four launches.

    Args:
      x_BTD: what the layer reads.
      params: by the names of ``LatentAttention``.
      inputs: positions, and the memory that is written.
      spec: a ``LatentSpec``.
      dtype: of products.

    Returns:
      Queries [B, T, H, R + rotated channels]; the normalized vector that they are products of, None where there is
      none; and the memory with the T positions written. None where no kernel computes this.
    """
    window, kv_b, x_MD = inputs.cache_window, params["kv_b"], x_BTD.reshape(-1, x_BTD.shape[-1])
    rows, pages = len(x_MD), None if window is None else inputs.memory["latent"]
    cut = heads.Cut(0, spec.plain_dim, further=spec.rope.dim, interleaved=spec.rope.interleaved)
    choice = _choice(kv_b, rows, cut)
    if window is None or pages is None or choice is None:
        return None
    rope = spec.rope if spec.rotates else None
    record = latents.Latents(
        spec.rank, spec.rope.dim, spec.rope.interleaved, RANK_NORM_EPS, spec.latent_scale,
        positions_of(x_BTD, window), window.layer_pages,
    )  # fmt: skip
    is_low = "q_a" in params
    parts = parts_together(x_MD, [params["q_a" if is_low else "q"], params["kv_a"]], dtype)
    if parts is None:
        return None
    q_SMN, part_SMX = parts
    query_SMR = q_SMN if is_low else None
    name, blocked = latents.case_name(rows, record, query_SMR), latents.obstacles(record, pages, query_SMR)
    how = choose(latents.OP, name, kv_b.kernels, "cuda", blocked)
    if how.implementation == "xla":
        return None
    where = where_of(inputs, window, spec.streams["latent"], rope)
    stacks = {name: params[name].whole for name in latents.PARAMS if name in params}
    low_MR, pages = latents.latents_to_cache(
        part_SMX, pages, record, params=stacks, where=where, query_SMR=query_SMR, layer=kv_b.layer, implementation=how
    )
    q_SMN = q_SMN if low_MR is None else params["q_b"].parts(low_MR, dtype)
    if q_SMN is None:
        return None
    turns = {name: where[name] for name in ("cos", "sin") if name in where}
    if spec.temperature is not None:
        turns["factor"] = spec.temperature.at(inputs.position_BT).reshape(-1)
    q_MHX = heads.heads_dense(q_SMN, kv_b.whole, cut, dtype=dtype, layer=kv_b.layer, where=turns, implementation=choice)
    lead = x_BTD.shape[:2]
    low_BTR = None if low_MR is None else low_MR.reshape(*lead, -1)
    return q_MHX.reshape(*lead, *q_MHX.shape[1:]), low_BTR, {**inputs.memory, "latent": pages}


def values_by_kernel(out_BTHR: Array, kv_b: Weight | Matrix, spec: Any, dtype: Any) -> Array | None:
    """Returns each head's values [B, T, H, C'] of what it gives in the latents' space; None where no kernel does."""
    rows = out_BTHR.shape[0] * out_BTHR.shape[1]
    cut = heads.Cut(spec.plain_dim, spec.value_dim, from_rank=True)
    choice = _choice(kv_b, rows, cut)
    if choice is None or not isinstance(kv_b, Matrix):
        return None
    whole: Any = kv_b.whole
    out_MHX = heads.heads_dense(
        out_BTHR.reshape(1, rows, -1), whole, cut, dtype=dtype, layer=kv_b.layer, implementation=choice
    )
    return out_MHX.reshape(*out_BTHR.shape[:2], *out_MHX.shape[1:])


def _choice(kv_b: Any, rows: int, cut: heads.Cut) -> Choice | None:
    """Chooses what computes products with each head's weights, None where XLA does."""
    if not isinstance(kv_b, Matrix) or kv_b.kernels not in ("triton", "interpret") or rows > heads.MOST_ROWS:
        return None
    w: Any = kv_b.whole
    choice = choose(heads.OP, heads.case_name(rows, w, cut), kv_b.kernels, "cuda", heads.obstacles(w, rows))
    return None if choice.implementation == "xla" else choice
