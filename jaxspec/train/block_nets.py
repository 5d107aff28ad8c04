"""The network of a head that drafts blocks, from its settings."""

from dataclasses import replace
from typing import Any

from jaxspec.checkpoint.heads.block_config import block_faults, default_taps
from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec
from jaxspec.models.block_head import BlockHead, BlockSpec
from jaxspec.nn.attention import AttentionSpec
from jaxspec.nn.policy import Policy
from jaxspec.protocol import CaptureSpec
from jaxspec.train.settings import HeadSettings

KINDS = ("dflash", "dflash2", "dspark")
FEW_LAYERS = 6  # of a target, all of whose boundaries are then read


def block_net(settings: HeadSettings, layers: ArchSpec, target: ArchSpec, width: int, mask: int, policy: Policy):
    """Returns the network.

    Args:
      settings: of the head.
      layers: Llama's, as the settings and the target say; queries and keys are normalized here.
      target: that is drafted for.
      width: W of a vocabulary product of its own, 0 for the target's.
      mask: token of what is not drafted yet.
      policy: how it is stored and computed.

    Raises:
      ConfigError: the settings contradict each other or the target.
    """
    b = settings.block
    attention: Any = replace(_attention(layers), qk_norm="head", window=b.window)
    arch = replace(layers, layers=tuple(replace(layer, attention=attention) for layer in layers.layers))
    dspark = settings.kind == "dspark"
    spec = BlockSpec(
        arch=arch,
        target_dim=target.model_dim,
        reads=CaptureSpec(taps=_taps(settings, len(target.layers))),
        block_size=b.size,
        mask_token=mask,
        from_anchor=dspark if b.from_anchor is None else b.from_anchor,
        causal=(False,) * len(arch.layers),
        draft_vocab=width,
        own_embedding=settings.own_embedding,
        conv_taps=b.conv_taps,
        conv_group=b.conv_group if b.conv_taps else 0,
        selector_rank=b.selector_rank,
        selector_top_k=b.selector_top_k if b.selector_rank else 0,
        markov_rank=b.markov_rank,
        markov_kind=b.markov_kind,
        confidence=b.confidence,
    )
    wrong = block_faults(spec, target)
    if not spec.parts:
        wrong.append("it reads nothing; give taps")
    if wrong:
        raise ConfigError(f"head: {'; '.join(wrong)}")
    return BlockHead(spec, policy)


def _attention(layers: ArchSpec) -> AttentionSpec:
    attention = layers.layers[0].attention
    assert isinstance(attention, AttentionSpec), "a trained head's layers are Llama's"
    return attention


def _taps(settings: HeadSettings, depth: int) -> tuple[int, ...]:
    """Layer boundaries, z-lab's by default."""
    if settings.taps != "default":
        return settings.taps
    if depth < FEW_LAYERS:
        return tuple(range(1, depth + 1))
    return default_taps(settings.layers, depth)
