"""The one layer of multi-token prediction that is trained for a model: what kind it is, and whether it can be."""

from typing import Any

from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec, LayerSpec
from jaxspec.models.catalog import arch_of, known_families
from jaxspec.models.read import Config
from jaxspec.nn.attention import AttentionSpec
from jaxspec.nn.latent_attention import LatentSpec
from jaxspec.pytree import replace


def with_one_layer(config: Config) -> dict[str, Any]:
    """Returns a model's published config as one that promises a single layer of multi-token prediction.

    Families that publish none have no key for it, so nothing changes.
    """
    family = known_families()[config["model_type"]]
    if family.mtp is None:
        return dict(config)
    inner = config.get(family.inside) if family.inside else None
    keys = [key for key in family.mtp.count if config.get(key) is not None or (inner or {}).get(key) is not None]
    one = {keys[0] if keys else family.mtp.count[0]: 1}
    return {**config, **one, **({str(family.inside): {**inner, **one}} if inner else {})}


def one_layer_arch(config: Config) -> ArchSpec:
    """Builds the architecture of a model with the one layer that is trained as ``mtp``.

    It is the first of those that the model's family publishes, or what its last layer with ordinary attention is.

    Raises:
      ConfigError: the config is wrong, or no such layer can be trained.
    """
    arch = arch_of(with_one_layer(config))
    layers = arch.mtp[:1] or tuple(layer for layer in reversed(arch.layers) if _fault(layer) is None)[:1]
    arch = replace(arch, mtp=layers or arch.layers[-1:])
    check_trainable(arch)
    return arch


def check_trainable(arch: ArchSpec) -> None:
    """Raises ConfigError where the first layer of multi-token prediction cannot be trained, with the reason."""
    if arch.hyper is not None:
        why = "it reads the residual streams of hyper-connections, and training keeps the last hidden state alone"
    elif arch.mtp_form.own_heads:
        why = "its layer has a vocabulary product of its own, and what is trained has the model's"
    else:
        why = _fault(arch.mtp[0])
    if why:
        raise ConfigError(
            f"head: multi-token prediction of {arch.family} cannot be trained: {why}; train a head of another kind"
        )


def _fault(layer: LayerSpec) -> str | None:
    """Returns why rounds of drafting cannot be trained through a layer, None if they can."""
    mixer = layer.attention
    if layer.second is not None:
        return "its layer has two halves"
    if isinstance(mixer, LatentSpec):
        by_index = mixer.index is not None or mixer.reuses_selection
        return "an indexer chooses what its attention sees, and knows no rounds of drafts" if by_index else None
    if not isinstance(mixer, AttentionSpec):
        return "its layer has neither grouped-query nor latent attention"
    return "its attention sees chunks of a text, and knows no rounds of drafts" if mixer.chunked else None
