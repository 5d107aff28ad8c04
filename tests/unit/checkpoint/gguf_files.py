"""GGUF files of tiny models, written with the gguf library from directories in Hugging Face layout."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from jaxspec.checkpoint.files.stream import TensorFiles

ARCHITECTURES = {
    "llama": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "deepseek_v3": "deepseek2", "glm4_moe": "glm4moe",
}  # fmt: skip
EXPERT = re.compile(r"\.experts\.(\d+)\.")
Arrays = dict[str, np.ndarray]


def write_gguf(
    directory: Path,
    file: Path,
    *,
    kind: str | Callable[[str], str] = "F32",
    text: Mapping[str, Any] | None = None,
    cut_latent: bool = True,
    stacked: bool = True,
) -> Path:
    """Writes a directory's model; ``kind`` is the type of its matrices, ``text`` the tokenizer's metadata."""
    config = json.loads((directory / "config.json").read_text())
    name = ARCHITECTURES[config["model_type"]]
    writer = GGUFWriter(file, name)
    for key, value in metadata_of(config, name).items():
        put(writer, f"{name}.{key}", value)
    for key, value in (text or {}).items():
        put(writer, key, value)
    arrays = arrays_of(directory, config, name, cut_latent=cut_latent)
    if not stacked:
        for tensor in [tensor for tensor in arrays if "_exps" in tensor]:
            experts = enumerate(arrays.pop(tensor))
            arrays |= {tensor.replace("_exps", f".{e}"): expert for e, expert in experts}
    for tensor, array in arrays.items():
        wanted = kind if isinstance(kind, str) else kind(tensor)
        block = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[wanted]][0]
        if array.ndim < 2 or array.shape[-1] % block or "norm" in tensor:
            wanted = "F32"
        wide = np.ascontiguousarray(array, np.float32)
        data = quantize(wide, GGMLQuantizationType[wanted]) if wanted != "F32" else wide
        writer.add_tensor(tensor, data, raw_dtype=GGMLQuantizationType[wanted])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def put(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    (writer.add_array if isinstance(value, list) else kinds[type(value)])(key, value)


def metadata_of(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the architecture's own keys, as llama.cpp's conversion writes them."""
    heads, predictions = config["num_attention_heads"], config.get("num_nextn_predict_layers", 0)
    wide = config.get("head_dim", config["hidden_size"] // heads)
    keys = {
        "block_count": config["num_hidden_layers"] + predictions, "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads, "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "rope.freq_base": float(config["rope_theta"]),
        "attention.key_length": wide, "attention.value_length": wide, "rope.dimension_count": wide,
        "expert_count": config.get("num_local_experts", config.get("num_experts", config.get("n_routed_experts"))),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "attention.sliding_window": config.get("sliding_window"),
    }  # fmt: skip
    if "n_routed_experts" in config:
        keys |= {
            "expert_shared_count": config["n_shared_experts"], "expert_weights_norm": config["norm_topk_prob"],
            "expert_weights_scale": config["routed_scaling_factor"], "expert_gating_func": 2,
            "expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"],
            "leading_dense_block_count": config["first_k_dense_replace"], "nextn_predict_layers": predictions,
        }  # fmt: skip
    if name == "glm4moe":
        keys["rope.dimension_count"] = int(wide * config["partial_rotary_factor"])
    if name == "deepseek2":
        rotary = config["qk_rope_head_dim"]
        keys |= {
            "attention.q_lora_rank": config["q_lora_rank"], "attention.kv_lora_rank": config["kv_lora_rank"],
            "rope.dimension_count": rotary, "attention.head_count_kv": 1,
            "attention.key_length": config["kv_lora_rank"] + rotary, "attention.value_length": config["kv_lora_rank"],
            "attention.key_length_mla": config["qk_nope_head_dim"] + rotary,
            "attention.value_length_mla": config["v_head_dim"],
            "rope.scaling.yarn_log_multiplier": 0.1 * config["rope_scaling"]["mscale_all_dim"],
        }  # fmt: skip
    scaling = config.get("rope_scaling") or {}
    if "yarn" in scaling.values():
        keys |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": scaling["factor"],
            "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        }  # fmt: skip
    return {key: value for key, value in keys.items() if value is not None}


def arrays_of(directory: Path, config: Mapping[str, Any], name: str, *, cut_latent: bool) -> Arrays:
    """Returns the arrays in llama.cpp's layout, under the names that the gguf library maps the hub's to."""
    architecture = next(a for a, word in gguf.MODEL_ARCH_NAMES.items() if word == name)
    layers = config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)
    mapped = gguf.get_tensor_name_map(architecture, layers)
    arrays: Arrays = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for hub, stored in TensorFiles.of(directory).items():
        if hub.startswith("model.layers.") and int(hub.split(".")[2]) >= layers:
            continue
        array = np.asarray(stored, np.float32)
        if name == "llama" and re.search(r"self_attn\.[qk]_proj\.", hub):
            heads = config["num_attention_heads" if "q_proj" in hub else "num_key_value_heads"]
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if match := EXPERT.search(hub):
            stacks.setdefault(EXPERT.sub(".experts.", hub), {})[int(match[1])] = array
        elif ".experts." in hub:
            arrays |= _oss(mapped, hub, array)
        elif "kv_b_proj" in hub and cut_latent:
            arrays |= _cut(mapped, hub, array, config)
        else:
            # As llama.cpp's conversion renames them.
            hub = hub.replace("e_score_correction_bias", "e_score_correction.bias")
            hub += ".weight" if hub.endswith("sinks") else ""
            arrays[_mapped(mapped, hub)] = array.reshape(-1) if "shared_expert_gate" in hub else array
    for hub, parts in stacks.items():
        arrays[_mapped(mapped, hub)] = np.stack([parts[e] for e in sorted(parts)])
    if (config.get("rope_scaling") or {}).get("rope_type") == "llama3":
        arrays["rope_freqs.weight"] = llama_3_factors(config)
    return arrays


def _mapped(mapped: Any, hub: str) -> str:
    # Qwen2-MoE's map has no dense layer, which llama.cpp does not run; a reader may.
    plain = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 8)
    found = next((n for m in (mapped, plain) if (n := m.get_name(hub, try_suffixes=(".weight", ".bias")))), None)
    assert found is not None, hub
    return found


def _oss(mapped: Any, hub: str, array: np.ndarray) -> Arrays:
    """Takes gpt-oss's gate and up apart."""
    if hub.endswith("_bias"):
        end, rows = ".bias", array
    else:
        end, rows = ".weight", array.swapaxes(1, 2)
    layer = hub.partition(".mlp.")[0]
    if "down" in hub:
        return {_mapped(mapped, f"{layer}.mlp.experts.down_proj{end}"): rows}
    pair = {"gate": rows[:, 0::2], "up": rows[:, 1::2]}
    number = layer.rpartition(".")[2]
    return {f"blk.{number}.ffn_{part}_exps{end}": rows for part, rows in pair.items()}


def _cut(mapped: Any, hub: str, array: np.ndarray, config: Mapping[str, Any]) -> Arrays:
    heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
    both = array.reshape(heads, -1, array.shape[1])
    parts = {"k_b_proj": both[:, :nope].swapaxes(1, 2), "v_b_proj": both[:, nope:]}
    return {_mapped(mapped, hub.replace("kv_b_proj", part)): rows for part, rows in parts.items()}


def llama_3_factors(config: Mapping[str, Any]) -> np.ndarray:
    """Returns the table of factors, as llama.cpp's conversion computes it."""
    scaling, dim = config["rope_scaling"], config["hidden_size"] // config["num_attention_heads"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original, factors = scaling["original_max_position_embeddings"], []
    for n in range(0, dim, 2):
        wavelength = 2 * np.pi * config["rope_theta"] ** (n / dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(scaling["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)
