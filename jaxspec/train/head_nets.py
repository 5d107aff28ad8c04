"""The network of a head from its settings; what they leave out is the target's."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.heads.layers import arch_of_head, rope_for_head, routed_ffn
from jaxspec.checkpoint.names.known import known_tables
from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec
from jaxspec.models.block_head import BlockHead
from jaxspec.models.draft_head import DraftHead, HeadSpec
from jaxspec.models.medusa import Medusa, MedusaSpec
from jaxspec.models.mtp import Mtp
from jaxspec.models.prediction import one_layer_arch
from jaxspec.models.transformer import Transformer
from jaxspec.models.vocab import read_ids
from jaxspec.native.packing import Packed, unpack
from jaxspec.nn.attention import AttentionSpec
from jaxspec.nn.ffn import FfnSpec
from jaxspec.nn.moe import MoeSpec
from jaxspec.nn.policy import Policy
from jaxspec.protocol import CaptureSpec
from jaxspec.shapes import Params
from jaxspec.train.block_nets import KINDS, block_net
from jaxspec.train.objective import Net
from jaxspec.train.settings import HeadSettings, LossSettings

HEAD_DIM, TOP_K = 128, 2


def net_of(settings: HeadSettings, arch: ArchSpec, config: Mapping[str, Any], policy: Policy) -> Net:
    """Returns the network of a head; its layers take the rotation of the target's published ``config``.

    Raises:
      ConfigError: the settings contradict each other or the target.
    """
    if settings.kind == "mtp":
        return _prediction(settings, config, policy)
    width = draft_vocab(settings, arch)
    if settings.kind == "medusa":
        return Medusa(MedusaSpec(settings.heads, settings.layers, arch.model_dim, arch.vocab_size, width), policy)
    layers = _layers(settings, arch, config)
    if settings.kind == "draft_model":
        return Transformer(layers, policy)
    _check_width(settings, arch)
    if settings.kind in KINDS:
        _check_taps(settings, arch)
        return block_net(settings, layers, arch, width, _mask(settings, arch), policy)
    reads = (
        CaptureSpec()
        if settings.kind == "eagle"
        else CaptureSpec(_taps(settings, arch), _chosen(settings.commons, arch))
    )
    routing = _chosen(settings.routing, arch)
    spec = HeadSpec(
        arch=layers,
        target_dim=arch.model_dim,
        reads=reads,
        last=settings.kind == "eagle",
        join="product" if settings.kind == "eagle" else "attention",
        join_bias=settings.bias and settings.kind == "eagle",
        norm_before_fc=settings.norm_before_fc,
        fc_norm=settings.fc_norm,
        norm_before_residual=settings.norm_before_residual,
        norm_output=settings.norm_output,
        draft_vocab=width,
        own_embedding=settings.own_embedding,
        mask_token=_mask(settings, arch) if settings.kind == "peagle" else None,
        routing=routing,
        experts=_experts(arch, routing),
    )
    if not spec.parts:
        raise ConfigError("head: it reads nothing; give taps or commons")
    return DraftHead(spec, policy)


def _prediction(settings: HeadSettings, config: Mapping[str, Any], policy: Policy) -> Mtp:
    """Returns the one layer of multi-token prediction that is trained for a target."""
    check_given(settings, "the target says everything about its layer of multi-token prediction", "from_target")
    arch = one_layer_arch(config)
    table = known_tables()[arch.family]
    top = {name for rule in table.top for name in rule.hub}
    if shared := sorted({name for rule in table.mtp_rules(arch) for name in rule.hub} & top):
        raise ConfigError(
            f"head: multi-token prediction of {arch.family} shares {', '.join(shared)} with the model itself, which is "
            "not trained; train a head of another kind"
        )
    return Mtp(arch, policy)


def check_given(settings: HeadSettings, why: str, *allowed: str) -> None:
    """Refuses settings, but for some, of a head that something else decides; raises ConfigError that says ``why``."""
    default = HeadSettings(kind=settings.kind)
    given = [name for name in settings.__struct_fields__ if getattr(settings, name) != getattr(default, name)]
    if extra := [name for name in given if name not in ("start", *allowed)]:
        raise ConfigError(f"head: {why}; leave out {', '.join(extra)}")


def draft_vocab(settings: HeadSettings, arch: ArchSpec) -> int:
    """Returns W of a head with a vocabulary product of its own, 0 for one that uses the target's."""
    if settings.own_head:
        return min(settings.draft_vocab_size or arch.vocab_size, arch.vocab_size)
    if settings.draft_vocab_size is not None and settings.draft_vocab_size < arch.vocab_size:
        raise ConfigError("head: draft_vocab_size needs own_head = true; the target's head knows all tokens")
    return 0


def token_map_of(loss: LossSettings, net: Net, vocab_size: int) -> np.ndarray | None:
    """Returns the tokens that the losses are over, int32 ascending [W], None where they are over all that it drafts.

    Raises:
      ConfigError: the file cannot be read, or the network has tokens of its own or depends on all.
    """
    if loss.token_map is None:
        return None
    if isinstance(net, Mtp):
        own = net.arch.mtp_form.own_heads
    else:
        own = not isinstance(net, Transformer) and bool(net.spec.draft_vocab)
    if own or (isinstance(net, BlockHead) and net.spec.markov_rank):
        raise ConfigError(
            f"loss: token_map = {loss.token_map} is for draft models, and for heads that draft through the target's "
            "vocabulary product alone (mtp, and others with head.own_head = false); leave it out, or choose "
            "head.draft_vocab_size"
        )
    try:
        return read_ids(loss.token_map, vocab_size)
    except ConfigError as error:
        raise ConfigError(f"loss.token_map: {error}") from error


def _layers(settings: HeadSettings, arch: ArchSpec, config: Mapping[str, Any]) -> ArchSpec:
    """Llama's decoder layers, with the target's sizes and rotation unless the settings give others."""
    mixers = [layer.attention for layer in arch.layers]
    mixer = next((mixer for mixer in mixers if isinstance(mixer, AttentionSpec)), mixers[0])
    ffn = next(layer.ffn for layer in reversed(arch.layers) if layer.ffn is not None)
    dim = settings.hidden_size or arch.model_dim
    if isinstance(mixer, AttentionSpec):
        heads, kv_heads, head_dim = mixer.heads, mixer.kv_heads, mixer.head_dim
    else:
        heads = kv_heads = max(dim // HEAD_DIM, 1)
        head_dim = min(HEAD_DIM, dim)
    heads = settings.num_attention_heads or heads
    kv_heads = settings.num_key_value_heads or settings.num_attention_heads or kv_heads
    head_dim = settings.head_dim or head_dim
    # As wide as what a token goes through in the target.
    active = ffn.top_k * ffn.hidden + ffn.shared_hidden if isinstance(ffn, MoeSpec) else ffn.hidden
    rope, qk_norm = rope_for_head(config, head_dim, settings.rope_theta), "head" if settings.qk_norm else "none"
    return arch_of_head(
        arch, AttentionSpec(heads, kv_heads, head_dim, rope, qk_norm=qk_norm),
        layers=settings.layers, model_dim=dim, ffn=_feed_forward(settings, active),
    )  # fmt: skip


def _feed_forward(head: HeadSettings, active: int) -> FfnSpec | MoeSpec:
    """The feed-forward of a head's layers; a token goes through ``active`` hidden units where nothing says how many."""
    if not head.num_experts:
        return FfnSpec(head.intermediate_size or active)
    top_k = head.num_experts_per_tok or min(TOP_K, head.num_experts)
    hidden = head.moe_intermediate_size or max((active - head.shared_expert_intermediate_size) // top_k, 1)
    return routed_ffn(head.num_experts, top_k, hidden, head.shared_expert_intermediate_size)


def ends_of(target: Params, ids_W: np.ndarray | None) -> dict[str, Any]:
    """Returns what a head may start from: the target's embedding, its vocabulary product of some tokens, last norm."""
    leaves: Any = target["params"]
    embed = leaves.get("embed_VD")
    head = leaves.get("head_DV", None if embed is None else embed.T)
    head = unpack(head) if isinstance(head, Packed) else head
    given = {"embed_VD": embed, "head_DW": head if head is None or ids_W is None else head[:, ids_W]}
    return given if head is None else given | {"norm_D": leaves.get("norm_D")}


def start_from_target(params: Params, given: Mapping[str, Any]) -> Params:
    """Copies ``ends_of`` a target into a head that has its own of equal width."""

    def one(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        new = given.get(path[-1].key)
        if not isinstance(new, jax.Array) or new.shape != leaf.shape:
            return leaf
        return jnp.array(new, leaf.dtype)  # a copy even in its own dtype: a training donates what it updates

    return jax.tree_util.tree_map_with_path(one, params)


def _check_width(settings: HeadSettings, arch: ArchSpec) -> None:
    dim = settings.hidden_size or arch.model_dim
    if dim == arch.model_dim:
        return
    if settings.kind == "eagle":
        raise ConfigError(
            f"head: an EAGLE-1 head continues from the target's hidden states and is as wide as they are; leave "
            f"hidden_size = {dim} out or give {arch.model_dim}"
        )
    if not settings.own_embedding or not settings.own_head:
        raise ConfigError(
            f"head: hidden_size = {dim} is not the target's {arch.model_dim}, so it cannot use the target's embedding "
            "and head; set own_embedding and own_head, or leave hidden_size out"
        )


def _taps(settings: HeadSettings, arch: ArchSpec) -> tuple[int, ...]:
    """Layer boundaries, SafeAILab's by default."""
    count = len(arch.layers)
    if settings.taps == "default":
        return tuple(sorted({min(2, count), count // 2, max(count - 3, 0)}))
    _check_taps(settings, arch)
    return settings.taps


def _check_taps(settings: HeadSettings, arch: ArchSpec) -> None:
    count, taps = len(arch.layers), settings.taps
    if taps == "default":
        return
    if wrong := [b for b in taps if not 0 <= b <= count]:
        raise ConfigError(
            f"head: taps {wrong} are beyond the target's depth; boundary b is the input of layer b, from 0 to {count}"
        )


def _chosen(layers: str | tuple[int, ...], arch: ArchSpec) -> tuple[int, ...]:
    """Expert layers, three over the depth by default."""
    known = arch.expert_layers
    if isinstance(layers, str):
        if not known:
            raise ConfigError("head: the target has no layers with routed experts; give commons and routing as []")
        return tuple(sorted({known[len(known) * part // 6] for part in (1, 3, 5)}))
    if wrong := [y for y in layers if y not in known]:
        raise ConfigError(
            f"head: layers {wrong} have no routed experts in this target; those that do are {list(known)}"
        )
    return layers


def _mask(settings: HeadSettings, arch: ArchSpec) -> int:
    token = arch.vocab_size - 1 if settings.mask_token is None else settings.mask_token
    if token >= arch.vocab_size:
        raise ConfigError(f"head: mask_token {token} is beyond the target's vocabulary of {arch.vocab_size}")
    return token


def _experts(arch: ArchSpec, routing: tuple[int, ...]) -> int:
    counts = {layer.ffn.experts for y in routing if isinstance((layer := arch.layers[y]).ffn, MoeSpec)}
    if len(counts) > 1:
        raise ConfigError(
            f"head: layers {list(routing)} have {sorted(counts)} experts; predict layers that have equally many"
        )
    return counts.pop() if counts else 0
