"""Routed experts: checks, choice of the implementation, and the call."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels import blocks
from pallas_kernels.backend import Implementation
from pallas_kernels.blocks import Key
from pallas_kernels.product import Product
from pallas_kernels.product import obstacles as product_obstacles
from pallas_kernels.quantized import Quantized, Weight, form
from pallas_kernels.routed_experts import kernel, kernel_mosaic, reference
from pallas_kernels.routed_experts.kernel import Tiles
from pallas_kernels.routed_experts.kernel_mosaic import MosaicTiles
from pallas_kernels.row_blocks import Blocks
from pallas_kernels.select import INSTEAD, Choice, UnsupportedKernel, choose

OP = "routed_experts"
KNOWN = ("gate_up_ED2F", "down_EFD", "gate_up_bias_E2F", "down_bias_ED")
DECODE_ROWS = 512
MOSAIC = "routed_experts_mosaic"


def routed_experts(
    x: jax.Array,
    expert_MA: jax.Array,
    weight_MA: jax.Array,
    weights: Mapping[str, Weight],
    *,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    dtype: jnp.dtype,
    layer: jax.Array | None = None,
    implementation: Implementation | Choice = "xla",
    tiles: Tiles | MosaicTiles | None = None,
    sorted_rows: tuple[jax.Array, Blocks] | None = None,
) -> jax.Array:
    """``sum_a weight_a * down_a(activation(gate_a(x), up_a(x)))`` over each row's A experts (Shazeer 2017, 2020).

    Each expert's weights are read once for all rows that chose it. With up to 512 rows, a row's result is bitwise the
    same whatever the number of rows, their order and their choices. Not differentiable but by ``xla``.

    Args:
      x: rows [M, D], or as the kernel reads them, [planes, M, D / planes] of ``dtype``, see ``product.planes``.
      expert_MA: int32 choices, best first. A choice that is not in [0, E) adds nothing, so that a device that holds
        some of the experts can be given all choices, counted from its first expert.
      weight_MA: combine weights.
      weights: ``gate_up_ED2F`` [E, D, 2, F] and ``down_EFD`` [E, F, D], maybe ``gate_up_bias_E2F`` and
        ``down_bias_ED``; all with a leading axis of layers if ``layer`` is given.
      activation: hidden units of float32 gate and up, element by element, of operations that the kernel has too.
      dtype: of both factors of every product; sums are float32.
      layer: int32, which layer of the stack; the stack is never sliced, for a slice would be a copy.
      implementation: what computes it; a case that the kernel cannot compute goes to the reference with a warning.
      tiles: sizes; those that were measured, or else a safe default, if None.
      sorted_rows: what ``row_blocks.sort`` gives for the choices and blocks of the tiles' height, if it is known.

    Returns:
      float32 [M, D].

    Raises:
      UnsupportedKernel: shapes or dtypes do not fit together.
    """
    _check(x, expert_MA, weight_MA, weights, layer)
    dtype = jnp.dtype(dtype)
    if not isinstance(implementation, Choice):
        rows, top_k = expert_MA.shape
        name = case_name(rows, top_k, weights)
        implementation = choose(
            OP, name, implementation, "", obstacles(weights, stacked=layer is not None),
            mosaic=kernel_mosaic.obstacles(weights, dtype),
        )  # fmt: skip
    if implementation.implementation == "xla":
        x_MD = x if x.ndim == 2 else jnp.moveaxis(x, 0, 2).reshape(x.shape[1], -1)
        return reference.routed_experts(
            x_MD, expert_MA, weight_MA, weights, activation=activation, dtype=dtype, layer=layer
        )
    tiles = tiles or tiles_for(weights, *expert_MA.shape, by=implementation.implementation)
    if isinstance(tiles, MosaicTiles):
        return kernel_mosaic.routed_experts(
            x, expert_MA, weight_MA, weights, activation=activation, layer=layer, tiles=tiles,
            interpret=implementation.implementation == "mosaic_interpret", sorted_rows=sorted_rows,
        )  # fmt: skip
    return kernel.routed_experts(
        x,
        expert_MA,
        weight_MA,
        weights,
        activation=activation,
        dtype=dtype,
        layer=layer,
        tiles=tiles,
        implementation=implementation.implementation,
        sorted_rows=sorted_rows,
    )


def obstacles(weights: Mapping[str, Weight], *, stacked: bool) -> list[str]:
    """Returns why the kernel cannot compute with these weights, each a sentence; empty if it can."""
    lead = 2 if stacked else 1
    reasons = [o for name in ("gate_up_ED2F", "down_EFD") for o in product_obstacles(weights[name], name, lead=lead)]
    hidden = weights["down_EFD"].shape[lead]
    down = weights["down_EFD"]
    if isinstance(down, Quantized) and down.format.kind == "fp4" and hidden % 2:
        reasons.append(f"down_EFD: an odd number of hidden units, {hidden}, in pairs")
    return reasons


def case_name(rows: int, top_k: int, weights: Mapping[str, Weight]) -> str:
    """The shape in words, for the choice's record."""
    return f"M{rows} A{top_k} {shape_of(weights)} {form(weights['gate_up_ED2F'])}"


def shape_of(weights: Mapping[str, Weight]) -> str:
    """Sizes that tile sizes are measured for; not the rows, on which they must not depend."""
    experts, hidden, width = weights["down_EFD"].shape[-3:]
    return f"E{experts} D{width} F{hidden}"


def tiles_for(
    weights: Mapping[str, Weight], rows: int, top_k: int, *, by: Implementation = "triton"
) -> Tiles | MosaicTiles:
    """Measured tile sizes of this card and shape, or a safe default; taller blocks for many rows per expert.

    Triton's blocks of 16 and 32 rows sum alike (``mma.sync`` takes 16 of them), those of 64 do not (``wgmma``).
    """
    kind = form(weights["gate_up_ED2F"])
    if by in INSTEAD:
        return blocks.look_up(MOSAIC, MosaicTiles(), shape=shape_of(weights), form=kind)
    tiles = blocks.look_up(OP, DEFAULT.get(kind, Tiles()), shape=shape_of(weights), form=kind)
    tallest = PREFILL_ROWS.get(kind, 64)
    if rows > DECODE_ROWS:
        return replace(tiles, rows=max(tiles.rows, tallest))
    many = rows * top_k >= MANY_PER_EXPERT * weights["down_EFD"].shape[-3]
    return replace(tiles, rows=max(tiles.rows, min(tallest, 32))) if many else tiles


def mosaic_obstacles(weights: Mapping[str, Weight], dtype: jnp.dtype) -> list[str]:
    """Returns why the Mosaic kernel cannot compute with these weights, each a sentence; empty if it can."""
    return kernel_mosaic.obstacles(weights, dtype)


def mosaic_is_faster(weights: Mapping[str, Weight], rows: int) -> str:
    """Returns the measurement of this card by which Mosaic's kernel takes the place of Triton's, empty if none.

    Never for up to 512 rows, of which Triton gives the same bits for any number.
    """
    if rows <= DECODE_ROWS:
        return ""
    return blocks.faster(MOSAIC, Key(shape_of(weights), form(weights["gate_up_ED2F"])))


MANY_PER_EXPERT = 8
# Taller blocks do not fit into registers with these.
PREFILL_ROWS: Mapping[str, int] = {"float32": 16, "mxfp4": 16}
DEFAULT: Mapping[str, Tiles] = {
    "float32": Tiles(up=Product(32, 64, 4, 2), down=Product(32, 64, 4, 2)),
    "mxfp4": Tiles(up=Product(128, 128, 4, 4), down=Product(128, 128, 4, 4)),
}


def _check(x, expert_MA, weight_MA, weights: Mapping[str, Weight], layer) -> None:
    unknown, missing = sorted(set(weights) - set(KNOWN)), [name for name in KNOWN[:2] if name not in weights]
    if unknown or missing:
        raise UnsupportedKernel(f"{OP}: weights must be {', '.join(KNOWN)}; missing {missing}, not known {unknown}")
    fits = expert_MA.ndim == 2 and expert_MA.shape == weight_MA.shape
    if not fits or x.ndim not in (2, 3) or x.shape[-2] != len(expert_MA):
        raise UnsupportedKernel(
            f"{OP}: rows [M, D], choices [M, A] and weights [M, A] must fit together, got "
            f"{x.shape}, {expert_MA.shape} and {weight_MA.shape}"
        )
    if expert_MA.dtype != jnp.int32:
        raise UnsupportedKernel(f"{OP}: choices must be int32, got {expert_MA.dtype}")
    lead = () if layer is None else weights["down_EFD"].shape[:1]
    experts, hidden, width = weights["down_EFD"].shape[-3:]
    shapes = ((experts, width, 2, hidden), (experts, hidden, width), (experts, 2, hidden), (experts, width))
    for name, shape in zip(KNOWN, shapes, strict=True):
        if name in weights and weights[name].shape != (*lead, *shape):
            raise UnsupportedKernel(
                f"{OP}: {name} must be {(*lead, *shape)} beside down_EFD, got {weights[name].shape}"
            )
        if "bias" in name and isinstance(weights.get(name), Quantized):
            raise UnsupportedKernel(f"{OP}: {name} must be a plain array")
    if x.size != len(expert_MA) * width:
        raise UnsupportedKernel(f"{OP}: rows of {x.size // len(expert_MA)} numbers for experts of width {width}")
