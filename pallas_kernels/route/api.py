"""Routing: checks, choice of the implementation, and the call."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Implementation
from pallas_kernels.route import kernel, reference
from pallas_kernels.row_blocks import Blocks, sort
from pallas_kernels.select import Choice, UnsupportedKernel, choose

OP = "route"
BIASES = ("logit", "choice")


@dataclass(frozen=True)
class Scoring:
    """How router logits become choices and weights.

    Attributes:
      kind: ``softmax`` weighs the chosen logits by their own softmax; ``sigmoid`` scores each expert by itself.
      top_k: A.
      renormalize: whether the weights of ``sigmoid`` are divided by their sum.
      scale: multiplies the weights.
      floor: added to that sum.
      groups, kept_groups: experts lie in equal groups, of which those with the best members are kept.
      members: how many members of a group are summed for that.
      thirds: whether the parts have three times the rows, of which those of high, middle and low bits add up to one.
    """

    kind: Literal["softmax", "sigmoid"]
    top_k: int
    renormalize: bool = True
    scale: float = 1.0
    floor: float = 0.0
    groups: int = 1
    kept_groups: int = 1
    members: int = 2
    thirds: bool = False


@partial(
    jax.tree_util.register_dataclass, data_fields=["expert_MA", "weight_MA", "logits_ME", "sorted"], meta_fields=[]
)
@dataclass(frozen=True)
class Routed:
    """Choices of M rows.

    Attributes:
      expert_MA: int32, best first; ties go to the lower expert.
      weight_MA: float32 combine weights.
      logits_ME: float32.
      sorted: the routed row m * A + a at each place of the order by expert, and its blocks, see ``row_blocks.sort``;
        None where nothing was sorted.
    """

    expert_MA: jax.Array
    weight_MA: jax.Array
    logits_ME: jax.Array
    sorted: tuple[jax.Array, Blocks] | None


def route(
    part_SXE: jax.Array,
    biases: Mapping[str, jax.Array],
    scoring: Scoring,
    *,
    layer: jax.Array | None = None,
    live_M: jax.Array | None = None,
    height: int | None = None,
    implementation: Implementation | Choice = "xla",
) -> Routed:
    """Adds up router logits, chooses experts, weighs them, and sorts the rows by expert.

    A row's choices and weights are bitwise the same whatever the other rows.

    Args:
      part_SXE: float32 logits in parts; X is M, or 3 M with ``scoring.thirds``.
      biases: ``logit`` is added to the logits, ``choice`` to the scores for choosing but not for weighing; [E], or
        [L, E] if ``layer`` is given.
      scoring: how.
      layer: int32, which layer of the biases' stacks.
      live_M: rows that are sorted, bool or int32, None for all.
      height: rows per block; None sorts nothing.
      implementation: what computes it; a case that the kernel cannot compute goes to the reference with a warning.

    Raises:
      UnsupportedKernel: shapes do not fit together.
    """
    rows, experts = part_SXE.shape[1] // (3 if scoring.thirds else 1), part_SXE.shape[-1]
    _check(part_SXE, biases, scoring, layer)
    if not isinstance(implementation, Choice):
        implementation = choose(OP, case_name(rows, experts, scoring), implementation, "", obstacles(experts, scoring))
    how = implementation.implementation
    if how == "xla":
        expert_MA, weight_MA, logits_ME = reference.route(part_SXE, biases, scoring, layer=layer)
        both = None
    else:
        expert_MA, weight_MA, logits_ME, both = kernel.route(
            part_SXE, biases, scoring, layer=layer, live_M=live_M, height=height, implementation=how
        )
    if both is None and height is not None:
        chosen_MA = expert_MA if live_M is None else jnp.where(live_M.astype(jnp.int32)[:, None] > 0, expert_MA, -1)
        both = sort(chosen_MA.reshape(-1), experts, height, how)
    return Routed(expert_MA, weight_MA, logits_ME, both)


def obstacles(experts: int, scoring: Scoring) -> list[str]:
    """Returns why the kernel cannot route so, each a sentence; empty if it can."""
    reasons = []
    if experts > kernel.MOST_EXPERTS:
        reasons.append(f"{experts} experts, more than {kernel.MOST_EXPERTS} in one tile")
    if experts % scoring.groups:
        reasons.append(f"{experts} experts in {scoring.groups} unequal groups")
    return reasons


def case_name(rows: int, experts: int, scoring: Scoring) -> str:
    """The shape in words, for the choice's record."""
    groups = f", {scoring.kept_groups} of {scoring.groups} groups" if scoring.groups > 1 else ""
    return f"M{rows} E{experts} A{scoring.top_k} {scoring.kind}{groups}"


def _check(part_SXE: jax.Array, biases: Mapping[str, jax.Array], scoring: Scoring, layer: Any) -> None:
    if part_SXE.ndim != 3 or (scoring.thirds and part_SXE.shape[1] % 3):
        raise UnsupportedKernel(f"{OP}: parts [S, M, E] are needed, 3 M with thirds, got {part_SXE.shape}")
    if not 0 < scoring.top_k <= part_SXE.shape[-1]:
        raise UnsupportedKernel(f"{OP}: from 1 to {part_SXE.shape[-1]} experts can be chosen, got {scoring.top_k}")
    for name, bias in biases.items():
        if name not in BIASES or bias.shape[-1] != part_SXE.shape[-1] or bias.ndim != 1 + (layer is not None):
            known = ", ".join(BIASES)
            raise UnsupportedKernel(f"{OP}: biases {known} with one number per expert, got {name} {bias.shape}")
