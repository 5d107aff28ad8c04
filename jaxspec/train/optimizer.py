"""AdamW for draft heads, and its learning rate by update."""

import jax
import optax

from jaxspec.train.settings import OptimizerSettings


def schedule_of(settings: OptimizerSettings, steps: int) -> optax.Schedule:
    """Returns the learning rate by update: linear warm-up to the peak, then what the settings say."""
    peak, warmup = settings.learning_rate, min(settings.warmup, steps)
    end, rest = peak * settings.final, max(steps - warmup, 1)
    if settings.schedule == "cosine":
        later = optax.cosine_decay_schedule(peak, rest, alpha=settings.final)
    elif settings.schedule == "linear":
        later = optax.linear_schedule(peak, end, rest)
    elif settings.schedule == "wsd":
        decay = max(min(round(steps * settings.decay_fraction), rest), 1)
        later = optax.join_schedules(
            [optax.constant_schedule(peak), optax.linear_schedule(peak, end, decay)], [rest - decay]
        )
    else:
        later = optax.constant_schedule(peak)
    return optax.join_schedules([optax.linear_schedule(peak / (warmup + 1), peak, warmup), later], [warmup])


def adamw(settings: OptimizerSettings, steps: int) -> optax.GradientTransformation:
    """Returns AdamW (Loshchilov 2019) with the gradient's norm limited; only matrices are decayed."""
    first, second = settings.betas
    rule = optax.adamw(
        schedule_of(settings, steps), first, second, settings.eps, weight_decay=settings.weight_decay,
        mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    )  # fmt: skip
    return optax.chain(optax.clip_by_global_norm(settings.clip), rule) if settings.clip else rule
