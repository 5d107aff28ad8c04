"""What the caches of a model hold keys and values as."""

from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec, LayerSpec
from jaxspec.nn.attention import AttentionSpec
from jaxspec.pytree import replace

KV_CACHE_DTYPES = "auto", "fp8", "fp8_e4m3"


def cache_dtype_of(arch: ArchSpec) -> str:
    """Returns what ``with_cache_dtype`` was given."""
    float8 = any(isinstance(layer.attention, AttentionSpec) and layer.attention.float8 for layer in arch.layers)
    return "fp8" if float8 else "auto"


def with_cache_dtype(arch: ArchSpec, wanted: str) -> ArchSpec:
    """Returns the architecture with its keys and values cached as ``kv_cache_dtype`` of ``LLM`` says.

    Raises:
      ConfigError: the value is not known, or a layer caches something else than keys and values of heads.
    """
    if wanted not in KV_CACHE_DTYPES:
        raise ConfigError(f"kv_cache_dtype {wanted!r} is not known; known are {list(KV_CACHE_DTYPES)}")
    if wanted == "auto":
        return arch

    def change(layer: LayerSpec) -> LayerSpec:
        if isinstance(layer.attention, AttentionSpec):
            layer = replace(layer, attention=replace(layer.attention, float8=True))
        elif layer.attention.streams:
            raise ConfigError(
                f"kv_cache_dtype {wanted!r} is for keys and values of attention heads, and a layer of this model "
                f"({arch.family}) caches {', '.join(layer.attention.streams)}; take 'auto'"
            )
        return layer if layer.second is None else replace(layer, second=change(layer.second))

    return replace(arch, layers=tuple(change(layer) for layer in arch.layers))
