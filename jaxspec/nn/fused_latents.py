"""Latent attention's projections by kernels, which read parts of products and each head's weights where they lie."""

from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec as P

from jaxspec.cache.addressing import LayerCache
from jaxspec.nn.devices import Over
from jaxspec.nn.fused_attention import rows_elsewhere
from jaxspec.nn.fused_heads import positions_of, specs_of, where_of
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
    window, kv_b, lead = inputs.cache_window, params["kv_b"], x_BTD.shape[:2]
    x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
    cut = heads.Cut(0, spec.plain_dim, further=spec.rope.dim, interleaved=spec.rope.interleaved)
    choice = _choice(kv_b, len(x_MD), cut)
    if window is None or choice is None:
        return None
    is_low = "q_a" in params
    parts = parts_together(x_MD, [params["q_a" if is_low else "q"], params["kv_a"]], dtype)
    if parts is None:
        return None
    (q_SMX, part_SMX), over = parts, kv_b.devices.over_rows(len(x_BTD))
    where = where_of(inputs, window, spec.streams["latent"], spec.rope if spec.rotates else None)
    record = latents.Latents(
        spec.rank, spec.rope.dim, spec.rope.interleaved, RANK_NORM_EPS, spec.latent_scale,
        positions_of(x_BTD, window), window.layer_pages,
    )  # fmt: skip
    made = _write(part_SMX, q_SMX if is_low else None, record, params, where, inputs, spec, over)
    if made is None:
        return None
    low_MR, pages = made
    q_SMHC = q_SMX if low_MR is None else params["q_b"].parts(low_MR, dtype)
    if q_SMHC is None:
        return None
    turns = {name: where[name] for name in ("cos", "sin") if name in where}
    if spec.temperature is not None:
        turns["factor"] = spec.temperature.at(inputs.position_BT).reshape(-1)
    q_MHX = _multiply(q_SMHC, kv_b, cut, dtype, choice, over, turns)
    low_BTR = None if low_MR is None else low_MR.reshape(*lead, -1)
    return q_MHX.reshape(*lead, *q_MHX.shape[1:]), low_BTR, {**inputs.memory, "latent": pages}


def values_by_kernel(out_BTHR: Array, kv_b: Weight | Matrix, spec: Any, dtype: Any) -> Array | None:
    """Returns each head's values [B, T, H, C'] of what it gives in the latents' space; None where no kernel does."""
    lead, rows = out_BTHR.shape[:2], out_BTHR.shape[0] * out_BTHR.shape[1]
    cut = heads.Cut(spec.plain_dim, spec.value_dim, from_rank=True)
    choice = _choice(kv_b, rows, cut)
    if choice is None or not isinstance(kv_b, Matrix):
        return None
    out_SMHR = out_BTHR.reshape(1, rows, *out_BTHR.shape[2:])
    out_MHX = _multiply(out_SMHR, kv_b, cut, dtype, choice, kv_b.devices.over_rows(lead[0]), {})
    return out_MHX.reshape(*lead, *out_MHX.shape[1:])


def _choice(kv_b: Any, rows: int, cut: heads.Cut) -> Choice | None:
    """Chooses what computes products with each head's weights, None where XLA does."""
    if not isinstance(kv_b, Matrix) or kv_b.kernels not in ("triton", "interpret"):
        return None
    rows = kv_b.devices.own_rows(rows)
    if rows > heads.MOST_ROWS:
        return None
    w: Any = kv_b.devices.part(kv_b.whole, kv_b.specs)
    blocked = heads.obstacles(w, rows) + kv_b.cut_scales()
    choice = choose(heads.OP, heads.case_name(rows, w, cut), kv_b.kernels, "cuda", blocked)
    return None if choice.implementation == "xla" else choice


def _multiply(
    x_SMHC: Array, kv_b: Matrix, cut: heads.Cut, dtype: Any, choice: Choice, over: Over, turns: Mapping[str, Array]
) -> Array:
    """Multiplies parts of rows with each head's weights; on a mesh every device its own rows and heads."""

    def compute(x_SMHC: Array, whole: Any, layer: Array | None, turns: Mapping[str, Array]) -> Array:
        x_SMN = x_SMHC.reshape(*x_SMHC.shape[:2], -1)
        return heads.heads_dense(x_SMN, whole, cut, dtype=dtype, layer=layer, where=turns, implementation=choice)

    split = kv_b.axes[0] if kv_b.axes else None
    specs = P(None, over, split), kv_b.specs, P(), P(over)
    return kv_b.devices.run(compute, (x_SMHC, kv_b.whole, kv_b.layer, turns), specs, P(over, split))


def _write(
    part_SMX: Array, query_SMR: Array | None, record: latents.Latents, params: Mapping[str, Any],
    where: dict[str, Array], inputs: Inputs, spec: Any, over: Over,
) -> tuple[Array | None, Array] | None:  # fmt: skip
    """Returns normalized low-rank queries, and pages with the latents written; None where no kernel computes this."""
    kv_b, pages, window = params["kv_b"], inputs.memory["latent"], inputs.cache_window
    assert window is not None, "asked of layers with a cache"
    devices = kv_b.devices
    blocked = latents.obstacles(record, pages, query_SMR) + rows_elsewhere(devices, window, spec.streams["latent"])
    case = latents.case_name(devices.own_rows(part_SMX.shape[1]), record, query_SMR)
    choice = choose(latents.OP, case, kv_b.kernels, "cuda", blocked)
    if choice.implementation == "xla":
        return None

    def compute(part_SMX: Array, query_SMR: Array | None, pages: Array, params: Any, where: Any, layer: Array | None):
        return latents.latents_to_cache(
            part_SMX, pages, record, params=params, where=where, query_SMR=query_SMR, layer=layer,
            implementation=choice,
        )  # fmt: skip

    stacks = {name: params[name].whole for name in latents.PARAMS if name in params}
    return devices.run(
        compute, (part_SMX, query_SMR, pages, stacks, where, kv_b.layer),
        (P(None, over), P(None, over), P(over), P(), specs_of(where, over), P()), (P(over), P(over)),
    )  # fmt: skip
