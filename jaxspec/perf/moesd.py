"""MoESD's arithmetic (Huang 2025, 2505.19645): experts that tokens touch, and what a speed-up is made of."""

import math

from jaxspec.errors import ConfigError


def _check(num_experts: int, top_k: int) -> float:
    if not 1 <= top_k <= num_experts:
        raise ConfigError(f"moesd: top_k must be from 1 to num_experts, got {top_k} of {num_experts}")
    return top_k / num_experts


def expected_experts(*, num_experts: int, top_k: int, tokens: float) -> float:
    """N(t): distinct experts that ``tokens`` tokens touch in a layer if routing is uniform and independent.

    Real routing is correlated between neighbours, so this is an upper bound in practice. A dense layer is the case
    of one expert.
    """
    return num_experts * (1 - (1 - _check(num_experts, top_k)) ** tokens)


def saturation_tokens(*, num_experts: int, top_k: int, share: float = 0.95) -> int:
    """T_thres: fewest tokens that touch this share of the experts; beyond it, more tokens load hardly more weights."""
    ratio = _check(num_experts, top_k)
    if not 0 < share < 1:
        raise ConfigError(f"moesd: share must be between 0 and 1, got {share}")
    return 1 if ratio == 1 else math.ceil(math.log(1 - share) / math.log(1 - ratio))


def tokens_per_expert(*, num_experts: int, top_k: int, tokens: float) -> float:
    """T_exp(t): tokens that an activated expert computes on average."""
    return top_k * tokens / expected_experts(num_experts=num_experts, top_k=top_k, tokens=tokens)


def acceptance_length(*, acceptance: float, length: int) -> float:
    """Tokens committed per target pass, bonus included, if each draft is accepted independently (Leviathan 2023)."""
    if not 0 <= acceptance <= 1:
        raise ConfigError(f"moesd: acceptance must be from 0 to 1, got {acceptance}")
    return length + 1.0 if acceptance == 1 else (1 - acceptance ** (length + 1)) / (1 - acceptance)


def speedup(*, acceptance_length: float, verify_ratio: float, draft_cost: float = 0.0, overhead: float = 0.0) -> float:
    """Speculative over plain tokens per second.

    Args:
      acceptance_length: tokens committed per target pass.
      verify_ratio: T(B, K + 1) / T(B, 1), the inverse of MoESD's target efficiency.
      draft_cost: time of drafting a step over a plain step.
      overhead: time of acceptance and the rest over a plain step.
    """
    return acceptance_length / (verify_ratio + draft_cost + overhead)
