"""The drafter that a command takes where none is named, and drafters in words."""

from pathlib import Path
from typing import Any

from jaxspec.draft import methods
from jaxspec.errors import ConfigError
from jaxspec.serve.demo_pair import DEMO, resolve_speculation
from jaxspec.serve.upcycled_model import NAME as UPCYCLED

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
SHIPPED = {
    DEMO: {"method": "shared_expert", "model": DEMO, "num_speculative_tokens": 5},
    UPCYCLED: {"method": "eagle3", "model": UPCYCLED, "num_speculative_tokens": 3},
}
WITHOUT_MODEL = {
    "ngram": "n-gram lookup in the text so far",
    "mtp": "the target's layers of multi-token prediction",
    "early_exit": "the target's first {exit_layer} layers",
}


def default_speculation(model: str) -> dict[str, Any]:
    """Returns a ``speculative_config`` with the head that comes with jaxspec for a model, else n-gram lookup.

    How many tokens it drafts is what pays on this machine (docs/results/2026-11-demo.md).
    """
    shipped = SHIPPED.get(model)
    if model == UPCYCLED and _verifies_slowly():
        shipped = {**SHIPPED[model], "num_speculative_tokens": 1}
    try:
        config = dict(resolve_speculation(shipped) or NGRAM)
    except ConfigError:  # this installation came without it
        return NGRAM
    there = "model" not in config or (Path(config["model"]) / "config.json").exists()
    return config if there else NGRAM


def _verifies_slowly() -> bool:
    """Whether a second position costs much: on a CPU without tiles, where one draft pays more than three."""
    import jax

    from jaxspec.nn.dense import has_tiles

    return jax.default_backend() == "cpu" and not has_tiles()


def drafter_line(speculative: dict[str, Any], target: dict[str, Any]) -> str:
    """Puts a drafter into words, for a target's published config."""
    from jaxspec.checkpoint.heads.directory import plan_head
    from jaxspec.checkpoint.heads.identify import is_head
    from jaxspec.checkpoint.load.model import read_config
    from jaxspec.inspect.describe import describe_model
    from jaxspec.inspect.model_sizes import parameters
    from jaxspec.models.catalog import arch_of
    from jaxspec.nn.policy import Policy

    config = methods.parse(speculative)
    ahead = f"{config.topology.max_depth} tokens ahead"
    if config.model is None:
        return f"{WITHOUT_MODEL[config.method].format(exit_layer=config.exit_layer)}, {ahead}"
    draft = read_config(Path(config.model))
    if is_head(draft):
        plan = plan_head(config.model, arch_of(target), Policy())
        kind = "draft" if config.method == "hybrid" else config.method
        words = f"{kind} head, {sum(parameters(plan.leaves).values()) / 1e6:.1f} M parameters"
    else:
        words = model_line(describe_model(draft))
    return f"{WITHOUT_MODEL['ngram']}, else {words}, {ahead}" if config.method == "hybrid" else f"{words}, {ahead}"


def model_line(model: dict[str, Any], name: str = "") -> str:
    """Puts ``describe_model`` into words, with another name than that of the family."""
    text = f"{name or model['family']}, {model['parameters'] / 1e6:.1f} M parameters"
    if "experts" in model:
        text += f", {model['active_parameters'] / 1e6:.1f} M active"
        text += f" ({model['experts_per_token']} of {model['experts']} experts)"
    return text
