"""The published config that a GGUF file's metadata amounts to, and its generation defaults."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxspec.checkpoint.gguf.blocks import widened
from jaxspec.checkpoint.gguf.gguf_header import GgufHeader
from jaxspec.checkpoint.gguf.names import NAMES, ROTATION
from jaxspec.errors import ConfigError

MODEL_TYPES = {
    "llama": "llama", "mixtral": "mixtral", "qwen2": "qwen2", "qwen3": "qwen3", "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss", "deepseek2": "deepseek_v3", "glm4moe": "glm4_moe",
}  # fmt: skip
LLAMA = "llama"  # llama.cpp's name of Llama and of Mixtral
SIGMOID = 2  # llama.cpp's number for the router of DeepSeek-V3 and GLM
LLAMA_3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3_CONTEXT = 8192
YARN = {"yarn", "yarn_linear"}
MOST = 1 << 24  # of any size; larger ones are damage
Settings = dict[str, Any]


class _Keys:
    """Reads metadata of one architecture.

    Attributes:
      header: of the file.
      prefix: of the architecture's own keys.
    """

    def __init__(self, header: GgufHeader):
        self.header = header
        self.prefix = str(header.metadata.get("general.architecture"))

    def __contains__(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.header.metadata

    def get(self, key: str, default: Any = ...) -> Any:
        """Returns a number, or a text where the default is one; of a list by layer the value that all layers share.

        Raises:
          ConfigError: it is not there, something else, or layers differ.
        """
        full = f"{self.prefix}.{key}"
        value = self.header.metadata.get(full, default)
        if value is ...:
            raise ConfigError(f"{self.header.file}: metadata lack {full}; the file is not complete, download it again")
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, list):
            raise ConfigError(f"{self.header.file}: {full} differs from layer to layer, which is not supported")
        if value is not default and not isinstance(value, str if isinstance(default, str) else int | float):
            raise ConfigError(f"{self.header.file}: {full} is {value!r:.80}; the file is corrupt, download it again")
        return value

    def count(self, key: str, most: int = MOST) -> int:
        """Returns a whole number from 1 to ``most``.

        Raises:
          ConfigError: it is not there, or another.
        """
        value = self.get(key)
        if not isinstance(value, int) or not 1 <= value <= most:
            raise ConfigError(f"{self.header.file}: {self.prefix}.{key} is {value!r}; the file is corrupt")
        return value

    def sparse_layers(self) -> list[bool]:
        """Whether each layer has routed experts."""
        names = self.header.tensors
        return [f"blk.{n}.ffn_gate_inp.weight" in names for n in range(self.layers)]

    @property
    def predictions(self) -> int:
        """Layers of multi-token prediction, which the file counts with the others."""
        return self.get("nextn_predict_layers", 0)

    @property
    def layers(self) -> int:
        """Layers of the model itself."""
        return self.count("block_count", len(self.header.tensors)) - self.predictions

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        each = self.count("embedding_length") // self.count("attention.head_count")
        return self.get("attention.key_length", None) or max(each, 1)


def architecture_of(header: GgufHeader) -> str:
    """Returns the key of a file's architecture in ``NAMES``.

    Raises:
      ConfigError: it is not known here.
    """
    name: Any = header.metadata.get("general.architecture")
    if name == LLAMA and header.metadata.get("llama.expert_count"):
        return "mixtral"
    if not isinstance(name, str) or name not in NAMES:
        known = ", ".join(sorted(set(NAMES) - {"mixtral"}))
        raise ConfigError(f"{header.file}: GGUF architecture {name!r} is not supported; known are {known}")
    return name


def heads_of(header: GgufHeader) -> tuple[int, int]:
    """Returns the number of heads of queries, and of keys."""
    keys = _Keys(header)
    heads = keys.count("attention.head_count")
    return heads, keys.get("attention.head_count_kv", heads)


def config_of(header: GgufHeader) -> Settings:
    """Returns what the ``config.json`` of the model would say.

    Raises:
      ConfigError: the architecture is not known, or the metadata are not complete.
    """
    architecture, keys, metadata = architecture_of(header), _Keys(header), header.metadata
    heads, kv_heads = heads_of(header)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{header.file}: no token_embd.weight; it is no language model, or its first file is another")
    config: Settings = {
        "model_type": MODEL_TYPES[architecture],
        "vocab_size": embedding.shape[0],
        "hidden_size": keys.get("embedding_length"),
        "num_hidden_layers": keys.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": keys.head_dim,
        "intermediate_size": keys.get("feed_forward_length", None),
        "max_position_embeddings": keys.get("context_length"),
        "rms_norm_eps": keys.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.get("rope.freq_base", 10000.0),
        "rope_scaling": _scaling(keys),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "torch_dtype": "bfloat16",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_ids(header),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in (config | OWN[architecture](keys)).items() if value is not None}


def generation_of(header: GgufHeader) -> Settings:
    """Returns what the ``generation_config.json`` of the model would say."""
    keys = {"bos_token_id": "tokenizer.ggml.bos_token_id", "pad_token_id": "tokenizer.ggml.padding_token_id"}
    ids = {name: header.metadata.get(key) for name, key in keys.items()} | {"eos_token_id": end_ids(header)}
    return {name: value for name, value in ids.items() if value is not None}


def end_ids(header: GgufHeader) -> int | list[int] | None:
    """Returns the ids that end a text or a turn of a conversation."""
    names = ("eos", "eot", "eom")
    ids = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    ends = list(dict.fromkeys(i for i in ids if isinstance(i, int)))
    return ends if len(ends) > 1 else next(iter(ends), None)


def _scaling(keys: _Keys) -> Settings | None:
    """Returns the extension of a context: as metadata say, or Llama 3's by its table of factors.

    Raises:
      ConfigError: it is of another kind.
    """
    if ROTATION in keys.header.tensors:
        return _llama_3(keys)
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    original = keys.get("rope.scaling.original_context_length", None)
    settings = {"rope_type": kind, "factor": keys.get("rope.scaling.factor")}
    if original:
        settings["original_max_position_embeddings"] = original
    if kind in YARN:
        settings["rope_type"] = "yarn"
        for name in ("beta_fast", "beta_slow"):
            settings[name] = keys.get(f"rope.scaling.yarn_{name}", 32.0 if name == "beta_fast" else 1.0)
    return settings


def _llama_3(keys: _Keys) -> Settings:
    """Finds the settings whose factors of the frequencies are those of the file's table."""
    tensor = keys.header.tensors[ROTATION]
    with tensor.file.open("rb") as handle:
        handle.seek(tensor.begin)
        raw = np.frombuffer(handle.read(tensor.end - tensor.begin), np.uint8)
    table = widened(raw, tensor.type).astype(np.float64)
    dim, base = 2 * len(table), keys.get("rope.freq_base", 10000.0)
    wavelengths = 2 * math.pi * base ** (np.arange(0, dim, 2) / dim)
    factor, low, high = float(table.max()), LLAMA_3["low_freq_factor"], LLAMA_3["high_freq_factor"]
    for context in (LLAMA_3_CONTEXT, *(1 << n for n in range(5, 18))):
        smooth = np.clip((context / wavelengths - low) / (high - low), 0, 1)
        factors = 1 / ((1 - smooth) / factor + smooth)
        if np.allclose(factors, table, rtol=1e-4):
            return {**LLAMA_3, "factor": factor, "original_max_position_embeddings": context}
    raise ConfigError(f"{keys.header.file}: its table of rotary factors is not that of Llama 3, which alone is read")


def _dense(_keys: _Keys) -> Settings:
    return {"attention_bias": False, "mlp_bias": False}


def _mixtral(keys: _Keys) -> Settings:
    return {
        "num_local_experts": keys.count("expert_count", 1 << 12),
        "num_experts_per_tok": keys.get("expert_used_count"),
        "sliding_window": None,
    }


def _qwen3(keys: _Keys) -> Settings:
    return {"attention_bias": "blk.0.attn_q.bias" in keys.header.tensors, "use_sliding_window": False}


def _qwen_moe(keys: _Keys) -> Settings:
    sparse = keys.sparse_layers()
    shared = keys.header.tensors.get(f"blk.{sparse.index(True)}.ffn_gate_shexp.weight") if any(sparse) else None
    stacks = [t for name, t in keys.header.tensors.items() if re.fullmatch(r"blk\.\d+\.ffn_gate_exps\.weight", name)]
    return {
        "num_experts": keys.count("expert_count", 1 << 12),
        "num_experts_per_tok": keys.get("expert_used_count"),
        # Files of before 2024-06 say neither size.
        "moe_intermediate_size": keys.get("expert_feed_forward_length", stacks[0].shape[1] if stacks else None),
        "shared_expert_intermediate_size": shared.shape[0] if shared else None,
        "norm_topk_prob": bool(keys.get("expert_weights_norm", keys.prefix == "qwen3moe")),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [n for n, is_sparse in enumerate(sparse) if not is_sparse],
        "use_sliding_window": False,
    }


def _gpt_oss(keys: _Keys) -> Settings:
    scaling = _scaling(keys)
    return {
        "intermediate_size": keys.get("expert_feed_forward_length", keys.get("feed_forward_length", None)),
        "num_local_experts": keys.count("expert_count", 1 << 12),
        "num_experts_per_tok": keys.get("expert_used_count"),
        "sliding_window": keys.get("attention.sliding_window"),
        "attention_bias": True,
        "rope_scaling": scaling and scaling | {"truncate": False},
    }


def _experts(keys: _Keys) -> Settings:
    """Returns what DeepSeek-V3 and GLM-4.5 have in common."""
    if keys.get("expert_gating_func", SIGMOID) != SIGMOID:
        raise ConfigError(f"{keys.header.file}: a softmax router (DeepSeek-V2) is not supported; known is the sigmoid")
    experts = keys.count("expert_count", 1 << 12)
    groups = (8, 4) if experts == 256 else (1, 1)  # DeepSeek-V3's, which older files leave out
    return {
        "moe_intermediate_size": keys.get("expert_feed_forward_length"),
        "n_routed_experts": experts,
        "n_shared_experts": keys.get("expert_shared_count"),
        "num_experts_per_tok": keys.get("expert_used_count"),
        "n_group": keys.get("expert_group_count", groups[0]),
        "topk_group": keys.get("expert_group_used_count", groups[1]),
        "norm_topk_prob": bool(keys.get("expert_weights_norm", True)),
        "routed_scaling_factor": keys.get("expert_weights_scale", 1.0),
        "first_k_dense_replace": keys.get("leading_dense_block_count", 0),
        "num_nextn_predict_layers": keys.predictions,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }


def _deepseek(keys: _Keys) -> Settings:
    rotary = keys.get("rope.dimension_count")
    scaling, factor = _scaling(keys), keys.get("rope.scaling.yarn_log_multiplier", None)
    if scaling and factor:
        scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * factor, 6))
    heads = keys.get("attention.head_count")
    return _experts(keys) | {
        "num_key_value_heads": heads,
        "head_dim": None,
        "q_lora_rank": keys.get("attention.q_lora_rank", None),
        "kv_lora_rank": keys.get("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": keys.get("attention.key_length_mla", keys.get("attention.key_length", 0)) - rotary,
        "v_head_dim": keys.get("attention.value_length_mla", keys.get("attention.value_length", None)),
        "rope_scaling": scaling,
    }


def _glm(keys: _Keys) -> Settings:
    tensors = keys.header.tensors
    return _experts(keys) | {
        "partial_rotary_factor": keys.get("rope.dimension_count", keys.head_dim // 2) / keys.head_dim,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
    }


OWN: Mapping[str, Callable[[_Keys], Settings]] = {
    "llama": _dense, "mixtral": _mixtral, "qwen2": lambda _: {"use_sliding_window": False}, "qwen3": _qwen3,
    "qwen2moe": _qwen_moe, "qwen3moe": _qwen_moe, "gpt-oss": _gpt_oss, "deepseek2": _deepseek, "glm4moe": _glm,
}  # fmt: skip
