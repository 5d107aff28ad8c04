"""AdamW and Muon for draft heads, and their learning rates by update."""

from functools import partial

import jax
import msgspec
import optax
from optax.contrib import MuonDimensionNumbers, muon

from jaxspec.nn.param import declared
from jaxspec.shapes import Params
from jaxspec.train.settings import OptimizerSettings

RMS = 0.2  # of Muon's updates at a learning rate of 1, about that of AdamW's (Liu 2025, 2502.16982)


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


def optimizer_of(settings: OptimizerSettings, steps: int, *, vocabulary: bool = True) -> optax.GradientTransformation:
    """Returns Muon for matrices and AdamW for the rest where the settings give a rate for it, else AdamW for all.

    Without ``vocabulary`` the vocabulary product, which has no gradients then, is not decayed either.
    """
    if not settings.muon:
        return adamw(settings, steps, vocabulary=vocabulary)
    first, second = settings.betas
    rule = muon(
        schedule_of(msgspec.structs.replace(settings, learning_rate=settings.muon), steps),
        eps=settings.eps, weight_decay=settings.weight_decay, adam_b1=first, adam_b2=second,
        adam_learning_rate=schedule_of(settings, steps), consistent_rms=RMS,
        muon_weight_dimension_numbers=matrices,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    return _clipped(settings, rule)


def matrices(params: Params) -> Params:
    """Returns input and output axes of the parameters that Muon trains: matrices but for embeddings and vocabulary."""

    def axes(path: tuple, leaf: jax.Array) -> MuonDimensionNumbers | None:
        param = declared(path)
        if param.kind not in ("matrix", "weight") or param.part not in ("", "routed experts") or leaf.ndim < 2:
            return None
        first = int(param.axes[0] == "expert")
        last = first + param.inputs
        return MuonDimensionNumbers(tuple(range(first, last)), tuple(range(last, leaf.ndim)))

    return jax.tree_util.tree_map_with_path(axes, params)


def adamw(settings: OptimizerSettings, steps: int, *, vocabulary: bool = True) -> optax.GradientTransformation:
    """Returns AdamW (Loshchilov 2019) with the gradient's norm limited; only matrices are decayed."""
    first, second = settings.betas

    def decays(path: tuple, leaf: jax.Array) -> bool:
        return leaf.ndim > 1 and (vocabulary or declared(path).part != "head")

    rule = optax.adamw(
        schedule_of(settings, steps), first, second, settings.eps, weight_decay=settings.weight_decay,
        mask=partial(jax.tree_util.tree_map_with_path, decays),
    )  # fmt: skip
    return _clipped(settings, rule)


def _clipped(settings: OptimizerSettings, rule: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(settings.clip), rule) if settings.clip else rule
