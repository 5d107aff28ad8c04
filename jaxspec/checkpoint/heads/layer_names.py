"""Tensor names of a head's decoder layers, whose feed-forward is dense or a mixture of experts as Qwen names it."""

from collections.abc import Iterable, Iterator

from jaxspec.checkpoint.names.table import NameRule
from jaxspec.checkpoint.names.tables.qwen2_moe import QWEN
from jaxspec.models.arch import LayerSpec

FEED_FORWARD = tuple(rule for rule in QWEN.layer if rule.leaf.startswith("ffn/"))


def layer_rules(
    rules: Iterable[NameRule], path: str, prefix: str, layer: LayerSpec, expert: tuple[NameRule, ...] = QWEN.expert
) -> Iterator[NameRule]:
    """Yields every rule of a layer with its numbers filled in.

    Args:
      rules: of a layer.
      path: of its parameters.
      prefix: of its tensors' names.
      layer: how many experts it has.
      expert: rules of one of them.
    """
    for rule in rules:
        yield NameRule(path + rule.leaf, tuple(prefix + name for name in rule.hub), rule.pack)
    for e in map(str, range(getattr(layer.ffn, "experts", 0))):
        for rule in expert:
            hub = tuple(prefix + name.replace("{e}", e) for name in rule.hub)
            yield NameRule(path + rule.leaf.replace("{e}", e), hub, rule.pack)
