"""Muon for training the demo pair from scratch, and its schedule."""

import optax
from optax.contrib import muon

from jaxspec.train.optimizer import RMS, matrices


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
            consistent_rms=RMS,
        ),
    )
