"""Identification of draft heads of any known format, by their ``config.json`` and the names of their tensors."""

import re
from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise
from typing import Any, Literal

from jaxspec.checkpoint.heads.block_config import METHODS, TITLES, block_faults, block_spec, is_block
from jaxspec.checkpoint.heads.deepseek_stages import is_staged
from jaxspec.checkpoint.heads.layers import layers_of
from jaxspec.checkpoint.heads.tensors import HeadFiles
from jaxspec.errors import ConfigError
from jaxspec.models.arch import ArchSpec
from jaxspec.models.block_head import BlockSpec
from jaxspec.models.draft_head import HeadSpec
from jaxspec.models.medusa import MedusaSpec
from jaxspec.protocol import CaptureSpec

HeadFormat = Literal["native", "eagle1", "eagle3", "speculators", "medusa", "block"]
AnySpec = HeadSpec | BlockSpec | MedusaSpec
Config = Mapping[str, Any]

NATIVE = "JaxspecDraftHead"
PREDICTION = "JaxspecPrediction"
TAPS = "eagle_aux_hidden_state_layer_ids"
MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
SPECULATORS = ("eagle3", "peagle", *METHODS)
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
MEDUSA_NAME = re.compile(r"\d+\.\d+\.(linear\.)?weight$")
INSIDE = tuple(field.name for field in fields(HeadSpec) if field.name not in ("arch", "reads"))
KNOWN = (
    f"{NATIVE} and {PREDICTION} (ours), EAGLE-1 and EAGLE-3 of SafeAILab, SpecForge, SGLang and ModelOpt, EAGLE-3 "
    f"with latent attention, speculators ({', '.join(SPECULATORS)}), P-EAGLE, Medusa, DFlash, DFlash2 and DSpark"
)


def head_format(config: Config, names: tuple[str, ...]) -> HeadFormat:
    """Returns which of the known formats a head has.

    Raises:
      ConfigError: none of them.
    """
    titles = _titles(config)
    if NATIVE in titles:
        return "native"
    method = config.get("speculators_model_type")
    if method is not None and method not in SPECULATORS:
        raise ConfigError(f"head: speculators_model_type {method!r} is not supported; known are {KNOWN}")
    if method is not None:
        return "speculators"
    if is_block(config, titles) or is_staged(names):
        return "block"
    if "medusa_num_heads" in config or any(MEDUSA_NAME.match(name) for name in names):
        return "medusa"
    if "layers.0.hidden_norm.weight" in names:
        return "eagle3"
    if "fc.weight" in names and any(name.startswith("layers.0.") for name in names):
        return "eagle1"
    raise ConfigError(f"head: neither config.json nor the tensors are those of a draft head; known are {KNOWN}")


def _titles(config: Config) -> str:
    return " ".join(map(str, config.get("architectures") or ()))


def is_prediction(config: Config) -> bool:
    """Whether a config is that of a trained layer of multi-token prediction."""
    return PREDICTION in _titles(config)


def is_head(config: Config) -> bool:
    """Whether a config is that of a draft head rather than of a model."""
    titles = _titles(config)
    keys = ("speculators_model_type", "medusa_num_heads", "eagle_config", "dflash_config", "draft_vocab_size", TAPS)
    return any(key in config for key in keys) or any(
        word in titles for word in (NATIVE, PREDICTION, "Eagle", "Medusa", *TITLES)
    )


def spec_of(config: Config, files: HeadFiles, target: ArchSpec | None) -> AnySpec:
    """Builds the spec of a head.

    Args:
      config: its ``config.json``.
      files: its tensors.
      target: of the model that it drafts for; None only for our own format.

    Raises:
      ConfigError: the format is not known, or the config is wrong, ambiguous or not for this target.
    """
    kind, names = head_format(config, tuple(files)), tuple(files)
    if kind == "native":
        spec = _native(config)
    elif target is None:
        raise ConfigError(f"head: what it means depends on its target ({kind} format); name the target's directory")
    elif kind == "medusa":
        spec = _medusa(config, files, target)
    elif kind == "block" or config.get("speculators_model_type") in METHODS:
        spec = block_spec(config, files, target)
    elif kind == "eagle1":
        spec = _eagle1(config, names)
    else:
        spec = _eagle3(config, names, target, stated=kind == "speculators")
    if target is not None:
        check_target(spec, target)
    return spec


def _medusa(config: Config, files: HeadFiles, target: ArchSpec) -> MedusaSpec:
    heads = config.get("medusa_num_heads") or 1 + max(int(n.partition(".")[0]) for n in files if n[0].isdigit())
    layers = config.get("medusa_num_layers", 1)
    product = f"0.{layers}.weight"
    size = files.tensors[product].shape[0] if product in files else target.vocab_size
    return MedusaSpec(heads, layers, target.model_dim, target.vocab_size, size)


def _native(config: Config) -> AnySpec:
    stated, layers = config.get("head"), config.get("transformer_layer_config")
    if isinstance(stated, Mapping) and stated.get("kind") == "medusa":
        return _record(MedusaSpec, {key: value for key, value in stated.items() if key != "kind"})
    if not isinstance(stated, Mapping) or not isinstance(layers, Mapping):
        raise ConfigError(f"head: a config of {NATIVE} has head and transformer_layer_config; write it again")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in stated.items()}
    reads = CaptureSpec(values.pop("taps", ()), values.pop("commons", ()))
    kind = BlockSpec if values.pop("kind", None) == "block" else HeadSpec
    return _record(kind, values | {"arch": layers_of(layers), "reads": reads})


def _record(kind: Any, values: Mapping[str, Any]) -> Any:
    wanted = {field.name for field in fields(kind)}
    wrong = sorted(wanted ^ set(values))
    if wrong:
        raise ConfigError(f"head: config.json must state {sorted(wanted)}; missing or not known are {wrong}")
    return kind(**values)


def _eagle1(config: Config, names: tuple[str, ...]) -> HeadSpec:
    arch = layers_of(config, names)
    return HeadSpec(
        arch=arch,
        target_dim=config.get("target_hidden_size") or arch.model_dim,
        last=True,
        join="product",
        join_bias=bool(config.get("bias", "fc.bias" in names)),
        draft_vocab=_draft_vocab(config, names, arch),
        own_embedding="embed_tokens.weight" in names,
    )


def _eagle3(config: Config, names: tuple[str, ...], target: ArchSpec, *, stated: bool) -> HeadSpec:
    layers = config.get("transformer_layer_config") if stated else config
    if not isinstance(layers, Mapping):
        raise ConfigError("head: config.json of speculators has no transformer_layer_config")
    arch, eagle = layers_of(layers, names), config.get("eagle_config") or {}
    if stated and "norm_before_residual" not in config:
        raise ConfigError(
            "head: config.json does not state norm_before_residual, which vLLM takes for true in EAGLE-3 and false in "
            "P-EAGLE, and speculators for false; write down what the head was trained with"
        )
    there = {"norm_before_fc": "input_norm.weight" in names, "fc_norm": "fc_norm.0.weight" in names}
    flags: dict[str, Any] = {name: bool(eagle.get(name, config.get(name, there.get(name, False)))) for name in FLAGS}
    if config.get("use_aux_norm"):
        flags["fc_norm"] = True
    taps = taps_of(config, target) if eagle.get("use_aux_hidden_state", True) else ()
    return HeadSpec(
        arch=arch,
        target_dim=config.get("target_hidden_size") or arch.model_dim,
        reads=CaptureSpec(taps=taps),
        last=not taps,
        join_bias=bool(config.get("bias", False)) and "fc.bias" in names,
        draft_vocab=_draft_vocab(config, names, arch),
        own_embedding="embed_tokens.weight" in names,
        mask_token=_mask_token(config, names),
        **flags,
    )


def _draft_vocab(config: Config, names: tuple[str, ...], arch: ArchSpec) -> int:
    """Returns W, 0 if the head has no vocabulary product of its own."""
    size = config.get("draft_vocab_size") or config.get("truncated_vocab_size") or arch.vocab_size
    return size if "lm_head.weight" in names or size != arch.vocab_size else 0


def _mask_token(config: Config, names: tuple[str, ...]) -> int | None:
    """Returns the token that P-EAGLE's drafts stand on, None for heads that draft one token after another."""
    named = config.get("speculators_model_type") == "peagle" or "peagle" in _titles(config).lower()
    if not named and "mask_hidden" not in names:
        return None
    token = next((config[key] for key in MASK_KEYS if config.get(key) is not None), None)
    if not isinstance(token, int):
        raise ConfigError(f"head: it drafts in parallel, but config.json names no mask token; write {MASK_KEYS[0]}")
    return token


def stated_taps(config: Config) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Returns the tap ids as written, None for none: at the top (boundaries), in ``eagle_config`` (block numbers)."""
    eagle = config.get("eagle_config")
    places = config.get(TAPS), eagle.get(TAPS) if isinstance(eagle, Mapping) else None
    for ids in places:
        if ids and not (isinstance(ids, list) and all(isinstance(x, int) for x in ids)):
            raise ConfigError(f"head: {TAPS} must be a list of whole numbers, got {ids!r}")
    top, nested = (tuple(ids) if ids else None for ids in places)
    return top, nested


def default_taps(target: ArchSpec) -> tuple[int, ...]:
    """Returns the boundaries that EAGLE-3 reads by default: (2, L // 2, L - 3)."""
    count = len(target.layers)
    return 2, count // 2, count - 3


def taps_of(config: Config, target: ArchSpec) -> tuple[int, ...]:
    """Returns the layer boundaries that a head reads.

    At the top of a config they are boundaries, in ``eagle_config`` one less: the number of the block in front of
    them. There the number of layers itself can only be a boundary, as for nvidia's heads of gpt-oss.

    Raises:
      ConfigError: both places say something, and not the same.
    """
    top, nested = stated_taps(config)
    if nested is None:
        return default_taps(target) if top is None else top
    is_boundary = max(nested) >= len(target.layers)
    inner = nested if is_boundary else tuple(o + 1 for o in nested)
    if top is not None and top != inner:
        raise ConfigError(
            f"head: {TAPS} is {list(top)} at the top of config.json, which vLLM reads as layer boundaries, but "
            f"{list(nested)} in eagle_config, which SGLang reads as block outputs, the boundaries {list(inner)}; "
            "write those that the head was trained with, in eagle_config one less than at the top"
        )
    return inner


def check_target(spec: AnySpec, target: ArchSpec) -> None:
    """Checks that a head can draft for a target.

    Raises:
      ConfigError: names everything that does not fit.
    """
    if isinstance(spec, MedusaSpec):
        wrong = _medusa_faults(spec, target)
    elif isinstance(spec, BlockSpec):
        wrong = _size_faults(spec, target) + block_faults(spec, target)
    else:
        wrong = _size_faults(spec, target) + _layer_faults(spec, target)
    if wrong:
        raise ConfigError(f"head: it does not fit its target ({target.family}): {'; '.join(wrong)}")


def _medusa_faults(spec: MedusaSpec, target: ArchSpec) -> list[str]:
    sizes = {"hidden size": (spec.dim, target.model_dim), "vocabulary": (spec.vocab_size, target.vocab_size)}
    return [f"{what} {head}, the target's is {size}" for what, (head, size) in sizes.items() if head != size]


def _size_faults(spec: HeadSpec | BlockSpec, target: ArchSpec) -> list[str]:
    """Lists what does not fit among widths and vocabularies."""
    a, wrong = spec.arch, []
    if spec.target_dim != target.model_dim:
        wrong.append(f"it reads vectors of {spec.target_dim}, the target's hidden size is {target.model_dim}")
    if a.vocab_size != target.vocab_size:
        wrong.append(f"it was made for a vocabulary of {a.vocab_size}, the target's is {target.vocab_size}")
    if a.model_dim != target.model_dim and not (spec.own_embedding and spec.draft_vocab):
        wrong.append(
            f"its hidden size is {a.model_dim}, so the target's embedding and head of {target.model_dim} do not fit, "
            "and its files lack embed_tokens.weight or lm_head.weight"
        )
    if spec.draft_vocab > target.vocab_size:
        wrong.append(f"its draft vocabulary of {spec.draft_vocab} is larger than the target's")
    if spec.mask_token is not None and not 0 <= spec.mask_token < target.vocab_size:
        wrong.append(f"its mask token {spec.mask_token} is none of the target's {target.vocab_size}")
    if isinstance(spec, HeadSpec) and spec.norm_before_fc and spec.fc_norm:
        wrong.append("norm_before_fc and fc_norm exclude each other")
    return wrong


def _layer_faults(spec: HeadSpec, target: ArchSpec) -> list[str]:
    """Lists what does not fit among the layers that it reads."""
    count, taps, wrong = len(target.layers), spec.reads.taps, []
    if any(not 0 <= b <= count for b in taps):
        wrong.append(f"it reads the layer boundaries {list(taps)}, the target's go from 0 to {count}")
    if any(low >= high for low, high in pairwise(taps)):
        wrong.append(f"its layer boundaries {list(taps)} do not ascend")
    if not spec.parts:
        wrong.append("it reads nothing of the target")
    sparse = {y: getattr(layer.ffn, "experts", 0) for y, layer in enumerate(target.layers)}
    if lacking := [y for y in (*spec.reads.shared_outputs, *spec.routing) if not sparse.get(y)]:
        wrong.append(f"layers {lacking} of the target have no routed experts")
    elif any(sparse[y] != spec.experts for y in spec.routing):
        wrong.append(f"it predicts {spec.experts} experts, the target has {sparse[spec.routing[0]]}")
    return wrong
