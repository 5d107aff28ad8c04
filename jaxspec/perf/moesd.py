"""MoESD's arithmetic (Huang 2025, 2505.19645): experts that tokens touch, and the factors of a speed-up."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import cast

import scipy

from jaxspec.errors import ConfigError


def _check(num_experts: int, top_k: int) -> float:
    if not 1 <= top_k <= num_experts:
        raise ConfigError(f"moesd: top_k must be from 1 to num_experts, got {top_k} of {num_experts}")
    return top_k / num_experts


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"moesd: {name} must be from 0 to 1, got {value}")


def expected_experts(*, num_experts: int, top_k: int, tokens: float) -> float:
    """Computes N(t): distinct experts that ``tokens`` tokens touch in a layer if routing is uniform and independent.

    Real routing is correlated between neighbors, so this is an upper bound in practice. A dense layer is the case
    of one expert.
    """
    return num_experts * (1 - (1 - _check(num_experts, top_k)) ** tokens)


def saturation_tokens(*, num_experts: int, top_k: int, share: float = 0.95) -> int:
    """Computes T_thres: fewest tokens that touch this share of the experts; more tokens load hardly more weights."""
    ratio = _check(num_experts, top_k)
    if not 0 < share < 1:
        raise ConfigError(f"moesd: share must be between 0 and 1, got {share}")
    return 1 if ratio == 1 else math.ceil(math.log(1 - share) / math.log(1 - ratio))


def tokens_per_expert(*, num_experts: int, top_k: int, tokens: float) -> float:
    """Computes T_exp(t): tokens that an activated expert computes on average."""
    return top_k * tokens / expected_experts(num_experts=num_experts, top_k=top_k, tokens=tokens)


def mean_acceptance_length(*, accepted: float, passes: int) -> float:
    """Computes tokens committed per target pass, bonus included, from counts; 1 where there was no pass.

    Every pass counts, also one that had no drafts: this is SGLang's ``spec_accept_length``. vLLM's mean acceptance
    length is that of the passes with drafts alone, ``drafted_acceptance_length`` here.
    """
    return 1 + accepted / passes if passes else 1.0


def acceptance_length(*, acceptance: float, length: int) -> float:
    """Computes tokens committed per target pass, bonus included, if acceptances are independent (Leviathan 2023)."""
    _check_share("acceptance", acceptance)
    return length + 1.0 if acceptance == 1 else (1 - acceptance ** (length + 1)) / (1 - acceptance)


def survival(conditional: Sequence[float]) -> list[float]:
    """Computes s_j, the chance that drafts 1 to j are all accepted, from the chance of each after accepted ones."""
    for value in conditional:
        _check_share("acceptance", value)
    return list(accumulate(conditional, mul))


def survival_length(survives: Sequence[float]) -> float:
    """Computes tokens committed per target pass, bonus included, by survival per position: 1 + sum of s_j.

    Holds whatever the dependence between positions, which the closed form does not. Engines' acceptance rates per
    position are s_j.

    Raises:
      ConfigError: the values are not from 0 to 1 and falling.
    """
    for value in survives:
        _check_share("survival", value)
    if any(later > earlier for earlier, later in pairwise(survives)):
        raise ConfigError(f"moesd: survival per position cannot rise, got {list(survives)}")
    return 1 + sum(survives)


def target_efficiency(*, plain_time_s: float, verify_time_s: float) -> float:
    """Computes T_T(B, 1) / T_T(B, K + 1): 1 if verifying costs no more than a plain step, 1 / (K + 1) if it scales."""
    if plain_time_s <= 0 or verify_time_s <= 0:
        raise ConfigError(f"moesd: times must be positive, got {plain_time_s} and {verify_time_s}")
    return plain_time_s / verify_time_s


def speedup(*, acceptance_length: float, verify_ratio: float, draft_cost: float = 0.0, overhead: float = 0.0) -> float:
    """Computes speculative over plain tokens per second.

    Args:
      acceptance_length: tokens committed per target pass.
      verify_ratio: T(B, K + 1) / T(B, 1), the inverse of MoESD's target efficiency.
      draft_cost: time of drafting a step over a plain step.
      overhead: time of acceptance and the rest over a plain step.
    """
    return acceptance_length / (verify_ratio + draft_cost + overhead)


def break_even_acceptance(*, cost: float, length: int) -> float | None:
    """Computes the acceptance per draft at which K drafts pay for themselves, None if none is enough.

    Args:
      cost: a speculative step over a plain one, drafting and the rest included.
      length: K.
    """
    if length < 1:
        raise ConfigError(f"moesd: break-even needs at least one draft, got {length}")
    if cost <= 1:
        return 0.0
    if cost > length + 1:
        return None
    return cast(float, scipy.optimize.brentq(lambda a: acceptance_length(acceptance=a, length=length) - cost, 0.0, 1.0))
