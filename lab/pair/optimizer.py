"""Muon for training the demo pair from scratch, and its schedule."""

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

from jaxspec.nn.param import declared
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
    """Returns the input and output axes of the parameters that are matrices for Muon, as they are declared."""

    def dims(path: tuple, leaf: jax.Array) -> MuonDimensionNumbers | None:
        param = declared(path)
        if param.kind not in ("matrix", "weight") or param.part not in ("", "routed experts") or leaf.ndim < 2:
            return None
        first = int(param.axes[0] == "expert")
        last = first + param.inputs
        return MuonDimensionNumbers(tuple(range(first, last)), tuple(range(last, leaf.ndim)))

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
