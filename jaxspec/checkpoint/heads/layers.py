"""Decoder layers of a draft head: from numbers, and from and to a Llama-like config."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec, LayerSpec
from jaxspec.models.catalog import known_families
from jaxspec.models.family import Family, arch_from_config
from jaxspec.models.mixers.gqa import FULL
from jaxspec.models.mixers.latent import LatentRow
from jaxspec.models.read import Reader
from jaxspec.models.rotary import TEMPERATURE, reach, rope_of, scaling_of, theta_of, yarn_scale
from jaxspec.nn.attention import AttentionSpec
from jaxspec.nn.ffn import FfnSpec
from jaxspec.nn.latent_attention import LatentSpec
from jaxspec.nn.moe import MoeSpec
from jaxspec.nn.rope import RopeSpec

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
DENSE = ("llama", "qwen2", "qwen3")
ROUTER = "layers.0.mlp.gate.weight"
LATENT = Family(model_type="deepseek_v3", mixer=LatentRow())
NOTABLE_DIGITS = 9  # of a published factor that is found back from what it was multiplied into


def arch_of_head(
    target: ArchSpec, attention: AttentionSpec, *, layers: int, model_dim: int, ffn: FfnSpec | MoeSpec
) -> ArchSpec:
    """Builds Llama's layers for a head that is about to be trained.

    Args:
      target: whose vocabulary, epsilon and longest text the head shares.
      attention: of every layer; ``rope_for_head`` gives its rotation.
      layers: how many.
      model_dim: D of the head.
      ffn: of every layer; ``routed_ffn`` gives one with experts.

    Raises:
      ConfigError: heads cannot share key-value heads evenly.
    """
    if attention.heads % attention.kv_heads:
        raise ConfigError(
            f"head: {attention.heads} attention heads cannot share {attention.kv_heads} key-value heads evenly; give "
            "num_attention_heads and num_key_value_heads of which one divides the other"
        )
    layer = LayerSpec(attention, ffn)
    longest = max(target.max_position, reach(attention.rope))
    return ArchSpec("llama", target.vocab_size, model_dim, (layer,) * layers, target.norm_eps, False, longest)


def routed_ffn(experts: int, top_k: int, hidden: int, shared_hidden: int = 0) -> MoeSpec:
    """Returns a mixture of experts as Qwen's configs state it: the softmax of the ``top_k`` best logits weighs them.

    Args:
      experts: E.
      top_k: A.
      hidden: F of one expert.
      shared_hidden: F of the gated expert that every token goes through, too; 0 for none.
    """
    return MoeSpec(experts, top_k, hidden, shared_hidden=shared_hidden, shared_gate=True)


def rope_for_head(config: Mapping[str, Any], head_dim: int, theta: float | None = None) -> RopeSpec:
    """Returns the rotation of a target's published config for heads of another width.

    Args:
      config: of the target.
      head_dim: C of the head's layers.
      theta: base that replaces the target's rotation, with its scaling.

    Raises:
      ConfigError: an odd number of channels would turn, or theta is out of bounds.
    """
    keys = (*ROPE_KEYS, "max_position_embeddings")
    rotation = {key: _of_heads(config.get(key)) for key in keys} if theta is None else {"rope_theta": theta}
    read = Reader(rotation, {})
    settings = scaling_of(read, FULL)
    if "short_factor" in settings:  # the target's own, which no published head has
        read = Reader({"rope_theta": theta_of(read, settings)}, {})
    return rope_of(read, head_dim, layer_kind=FULL)


def _of_heads(setting: Any) -> Any:
    """A rotary setting of a target without what no head has: the first of those by layer, no growth of the queries."""
    if isinstance(setting, list) and setting:
        return setting[0]
    return {k: v for k, v in setting.items() if k != TEMPERATURE} if isinstance(setting, Mapping) else setting


def layers_of(config: Mapping[str, Any], names: tuple[str, ...] = ()) -> ArchSpec:
    """Returns the layers that a config describes.

    Args:
      config: of a head, or the ``transformer_layer_config`` inside it.
      names: of the tensors, which tell latent from grouped-query attention, Qwen's from Llama's and experts from dense
        feed-forward layers: a config may be a copy of the target's, with another ``model_type`` and with experts that
        the head lacks. Without names the config is taken at its word.

    Raises:
      ConfigError: keys are missing or contradict each other.
    """
    kind, attention = config.get("model_type"), "layers.0.self_attn."
    if f"{attention}kv_a_proj_with_mqa.weight" in names or (not names and kind == LATENT.model_type):
        return arch_from_config(config, LATENT)
    if kind not in DENSE:
        kind = "qwen3" if f"{attention}q_norm.weight" in names else "llama"
    if config.get("qkv_bias") and not config.get("attention_bias"):
        kind = "qwen2"
    family = known_families()[kind]
    if ROUTER in names or (not names and config.get("num_experts")):
        # Which layers of a target are dense says nothing about its head's.
        experts: Any = known_families()["qwen2_moe"].moe
        family = replace(family, moe=replace(experts, sparse_step=False))
    return arch_from_config(config, family)


def layers_config(arch: ArchSpec) -> dict[str, Any]:
    """Returns the config that describes some layers, every number stated.

    Raises:
      ConfigError: no such config describes them.
    """
    first = arch.layers[0].attention
    if isinstance(first, LatentSpec):
        config = _latent(first)
    elif isinstance(first, AttentionSpec):
        config = _grouped(arch, first)
    else:
        raise ConfigError(f"head: no published config describes layers of {type(first).__name__}")
    ffn = arch.layers[0].ffn
    assert ffn is not None, "layers of heads have both parts"
    config |= {
        "hidden_size": arch.model_dim,
        "intermediate_size": ffn.hidden,
        "hidden_act": ffn.activation.kind,
        "num_hidden_layers": len(arch.layers),
        "vocab_size": arch.vocab_size,
        "rms_norm_eps": arch.norm_eps,
        "max_position_embeddings": arch.max_position,
        "tie_word_embeddings": False,
    }
    if isinstance(ffn, MoeSpec):
        config |= {
            "num_experts": ffn.experts,
            "num_experts_per_tok": ffn.top_k,
            "moe_intermediate_size": ffn.hidden,
            "shared_expert_intermediate_size": ffn.shared_hidden,
            "norm_topk_prob": ffn.router.renormalize,
        }
    if alike(layers_of(config)) != alike(arch):
        raise ConfigError(
            "head: its layers have mechanisms that no published config of Llama, Qwen or DeepSeek states; layers that "
            "can be saved are all alike, with rotary positions and gated feed-forward, dense or with Qwen's experts"
        )
    return config


def alike(arch: ArchSpec) -> ArchSpec:
    """Drops what a head does not depend on: the name of the family and a tied vocabulary product."""
    return replace(arch, family="", tied=False, mtp=())


def _grouped(arch: ArchSpec, spec: AttentionSpec) -> dict[str, Any]:
    kind = "qwen3" if spec.qk_norm == "head" else "qwen2" if spec.qkv_bias and not spec.out_bias else "llama"
    config: dict[str, Any] = {
        "model_type": kind,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "attention_bias": spec.qkv_bias,
    }
    spans = [getattr(layer.attention, "window", None) for layer in arch.layers]
    if any(spans):
        config |= {
            "sliding_window": next(filter(None, spans)),
            "use_sliding_window": True,
            "layer_types": ["sliding_attention" if span else "full_attention" for span in spans],
        }
    if spec.rope is None:
        raise ConfigError("head: its layers have no rotary positions, which no published head lacks")
    if spec.rope.dim != spec.head_dim:
        config["partial_rotary_factor"] = spec.rope.dim / spec.head_dim
    return config | _rotation(spec.rope)


def _latent(spec: LatentSpec) -> dict[str, Any]:
    config = {
        "model_type": LATENT.model_type,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.heads,
        "qk_nope_head_dim": spec.plain_dim,
        "qk_rope_head_dim": spec.rope.dim,
        "v_head_dim": spec.value_dim,
        "kv_lora_rank": spec.rank,
        "q_lora_rank": spec.query_rank,
        "attention_bias": spec.bias,
        "rope_interleave": spec.rope.interleaved,
        "n_routed_experts": None,
        **_rotation(spec.rope),
    }
    sharpened = (spec.scale * (spec.plain_dim + spec.rope.dim) ** 0.5) ** 0.5
    if spec.rope.scaling is not None and sharpened > 1:
        step = yarn_scale(config["rope_scaling"], 1.0) - 1
        all_dim = float(f"{(sharpened - 1) / step:.{NOTABLE_DIGITS}g}")
        for dialect in ("rope_scaling", "rope_parameters"):
            config[dialect] = config[dialect] | {"mscale_all_dim": all_dim}
    return config


def _rotation(rope: RopeSpec) -> dict[str, Any]:
    """Writes the rotation in both dialects."""
    s = rope.scaling
    theta = {"rope_theta": rope.theta}
    if s is None:
        return theta | {"rope_scaling": None, "rope_parameters": {"rope_type": "default"} | theta}
    scaling: dict[str, Any] = {
        "rope_type": s.kind,
        "factor": s.factor,
        "original_max_position_embeddings": s.original,
    }
    if s.kind == "llama3":
        scaling |= {"low_freq_factor": s.low, "high_freq_factor": s.high}
    elif s.kind == "yarn":
        scaling |= {"beta_slow": s.low, "beta_fast": s.high, "truncate": s.truncate}
        if s.attention_factor is not None:
            scaling["attention_factor"] = s.attention_factor
    return theta | {"rope_scaling": scaling, "rope_parameters": scaling | theta}
