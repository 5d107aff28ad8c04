"""Settings of the experts of a head's own layers, and what they must be."""

from typing import Any

from jaxspec.errors import ConfigError

EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
WITHOUT = ("medusa", "draft_model")


def check_experts(head: Any) -> None:
    """Checks what the settings of a head say of experts.

    Raises:
      ConfigError: a number is out of bounds, or they contradict each other or the kind of head.
    """
    least = {"num_experts": 0, "num_experts_per_tok": 1, "moe_intermediate_size": 1}
    for name, bound in (least | {"shared_expert_intermediate_size": 0}).items():
        value = getattr(head, name)
        if value is not None and value < bound:
            raise ConfigError(f"head: {name} must be at least {bound}, got {value}")
    given = [name for name in EXPERTS[1:] if getattr(head, name)]
    if not head.num_experts and given:
        raise ConfigError(f"head: {', '.join(given)} is of experts, and there are none; set num_experts, too")
    if not head.num_experts:
        return
    if head.kind in WITHOUT:
        raise ConfigError(
            f'head: num_experts = {head.num_experts}, but heads of kind "{head.kind}" have no experts of their own; '
            "leave it out"
        )
    if head.intermediate_size is not None:
        raise ConfigError(
            f"head: intermediate_size = {head.intermediate_size} is of a dense feed-forward, but num_experts = "
            f"{head.num_experts}; give moe_intermediate_size instead"
        )
    if (head.num_experts_per_tok or 1) > head.num_experts:
        raise ConfigError(
            f"head: num_experts_per_tok = {head.num_experts_per_tok} is more than num_experts = {head.num_experts}; "
            "lower it"
        )
