"""How a model turns its heads for the longest text that an engine takes."""

from jaxspec.models.arch import ArchSpec, LayerSpec
from jaxspec.models.rotary import limit
from jaxspec.nn.attention import AttentionSpec
from jaxspec.nn.rope import RopeSpec
from jaxspec.pytree import replace


def for_texts(arch: ArchSpec, longest: int | None) -> ArchSpec:
    """Returns the architecture for texts of at most so many tokens, None for those of its original context.

    LongRoPE (Ding 2024, arXiv 2402.13753) turns every position of a text by other divisors once the text is longer than
    the original context, also what is cached already. So one choice holds for all texts of an engine, as in vLLM.
    """

    def change(layer: LayerSpec) -> LayerSpec:
        rope = _extended(layer)
        if rope is None or rope.scaling is None:
            return layer
        far = longest is not None and longest > rope.scaling.longest
        rope = replace(rope, scaling=replace(rope.scaling, far=far))
        return replace(layer, attention=replace(layer.attention, rope=rope))

    layers = tuple(change(layer) for layer in arch.layers)
    most = [limit(rope) for layer in layers if (rope := _extended(layer)) is not None]
    return replace(arch, layers=layers, max_position=min(most)) if most else arch


def _extended(layer: LayerSpec) -> RopeSpec | None:
    """The rotation of a layer, where another holds in longer texts."""
    rope = layer.attention.rope if isinstance(layer.attention, AttentionSpec) else None
    return rope if rope is not None and rope.scaling is not None and rope.scaling.beyond is not None else None
