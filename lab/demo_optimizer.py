"""Muon for training the demo pair from scratch, and its schedule."""

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

from jaxspec.shapes import Params


def schedule(peak: float, steps: int, warmup: int, decay_from: float = 0.6) -> optax.Schedule:
    """Linear warm-up, constant, then linear decay to a twentieth over the last part (warm-up, stable, decay)."""
    hold = int(steps * decay_from)
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, peak / 20, steps - hold),
        ],
        [warmup, hold],
    )


def matrices(params: Params) -> Params:
    """Which parameters are matrices for Muon, and their input and output axes, from the names' shape suffixes."""

    def dims(path: tuple, leaf: jax.Array) -> MuonDimensionNumbers | None:
        name = path[-1].key
        axes = name.rsplit("_", 1)[-1] if not name.rsplit("_", 1)[-1].isdigit() else name.split("_")[-2]
        if name.startswith(("embed", "head", "router", "shared_gate")) or "bias" in name or leaf.ndim < 2:
            return None
        batch = 1 if axes.startswith("E") else 0
        if name.startswith("out_"):
            return MuonDimensionNumbers((0, 1), 2)
        return MuonDimensionNumbers(batch, tuple(range(batch + 1, leaf.ndim)))

    return jax.tree_util.tree_map_with_path(dims, params)


def build(steps: int, *, matrix_peak: float, other_peak: float, warmup: int = 100) -> optax.GradientTransformation:
    """Muon (Jordan 2024) for weight matrices and AdamW for the rest, gradients clipped to unit norm."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(
            schedule(matrix_peak, steps, warmup),
            weight_decay=0.05,
            adam_b2=0.98,
            adam_weight_decay=0.0,
            adam_learning_rate=schedule(other_peak, steps, warmup),
            muon_weight_dimension_numbers=matrices,  # pyright: ignore[reportArgumentType]
            consistent_rms=0.2,
        ),
    )
