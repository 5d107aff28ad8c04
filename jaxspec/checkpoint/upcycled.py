"""Routed experts that ship apart from the dense model they were added to, and the checkpoint made of both."""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxspec.errors import CheckpointError

Weights = Mapping[str, np.ndarray]
MATRICES = ("gate", "up", "down")
FFN = re.compile(r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.weight")


def quantize(weight_EIO: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns int8 weights and the float16 scale of every column."""
    most = np.abs(weight_EIO).max(1, keepdims=True)
    scale = np.maximum(most / 127, 1e-7).astype(np.float16)
    return np.clip(np.rint(weight_EIO / scale.astype(np.float32)), -127, 127).astype(np.int8), scale[:, 0]


def dequantize(weight_EIO: np.ndarray, scale_EO: np.ndarray) -> np.ndarray:
    """Returns the weights as bfloat16."""
    return (weight_EIO * scale_EO[:, None].astype(np.float32)).astype(ml_dtypes.bfloat16)


def pack(experts: Weights, first: int) -> dict[str, np.ndarray]:
    """Returns the tensors that ship.

    Args:
      experts: ``router`` [Y, D, E], ``gate`` and ``up`` [Y, E, D, F], ``down`` [Y, E, F, D] of consecutive layers.
      first: number of the first of them.
    """
    packed: dict[str, np.ndarray] = {}
    experts = {name: np.asarray(x) for name, x in experts.items()}
    for index, router_DE in enumerate(experts["router"]):
        name = f"layers.{first + index}"
        packed[f"{name}.router"] = router_DE.astype(ml_dtypes.bfloat16)
        for matrix in MATRICES:
            packed[f"{name}.{matrix}"], packed[f"{name}.{matrix}.scale"] = quantize(experts[matrix][index])
    return packed


def unpack(packed: Weights) -> dict[str, np.ndarray]:
    """Returns what ``pack`` was given, as bfloat16."""
    layers = sorted({int(name.split(".")[1]) for name in packed})
    experts = {"router": np.stack([packed[f"layers.{y}.router"] for y in layers])}
    for matrix in MATRICES:
        parts = [dequantize(packed[f"layers.{y}.{matrix}"], packed[f"layers.{y}.{matrix}.scale"]) for y in layers]
        experts[matrix] = np.stack(parts)
    return experts


def save(packed: Weights, directory: Path, top_k: int, parts: int = 2) -> list[Path]:
    """Writes the tensors in files of about equal size, and returns their paths."""
    layers = sorted({int(name.split(".")[1]) for name in packed})
    paths = []
    for index, some in enumerate(np.array_split(layers, parts)):
        mine = {name: np.ascontiguousarray(x) for name, x in packed.items() if int(name.split(".")[1]) in some}
        paths.append(directory / f"experts-{index + 1}-of-{parts}.safetensors")
        save_file(mine, paths[-1], metadata={"top_k": str(top_k)})
    return paths


def load(paths: Sequence[Path]) -> tuple[dict[str, np.ndarray], int]:
    """Returns the tensors of all files, and how many experts a token goes to."""
    packed: dict[str, np.ndarray] = {}
    chosen = set()
    for path in paths:
        packed |= load_file(path)
        with safe_open(path, "np") as file:
            chosen.add((file.metadata() or {}).get("top_k"))
    if len(chosen) != 1 or None in chosen:
        raise CheckpointError(f"{paths}: the parts name {chosen} experts per token; all parts must be of one training")
    return packed, int(chosen.pop())


def config_of(dense: Mapping, packed: Weights, top_k: int) -> dict:
    """Returns the config of the mixture: Qwen2-MoE with the dense feed-forward as the shared expert."""
    first = min(int(name.split(".")[1]) for name in packed)
    experts, _, width = packed[f"layers.{first}.gate"].shape
    return {
        **dense,
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "attention_bias": True,
        "qkv_bias": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(first)),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": dense["intermediate_size"],
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
        "use_sliding_window": False,
    }


def merge(dense: Weights, packed: Weights) -> dict[str, np.ndarray]:
    """Returns the tensors of the mixture under their published names.

    The shared expert's gate is zero, whose sigmoid is a half, and its output has twice the weights: exactly the dense
    feed-forward.
    """
    experts, first = unpack(packed), min(int(name.split(".")[1]) for name in packed)
    merged: dict[str, np.ndarray] = {}
    for name, tensor in dense.items():
        ffn = FFN.fullmatch(name)
        if ffn is None or int(ffn[1]) < first:
            merged[name] = tensor
        else:
            shared = f"model.layers.{ffn[1]}.mlp.shared_expert.{ffn[2]}_proj.weight"
            merged[shared] = tensor * tensor.dtype.type(2) if ffn[2] == "down" else tensor
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            merged[name.replace("weight", "bias")] = np.zeros(len(tensor), tensor.dtype)
    for index, router_DE in enumerate(experts["router"]):
        mlp = f"model.layers.{first + index}.mlp"
        merged[f"{mlp}.gate.weight"] = router_DE.T
        merged[f"{mlp}.shared_expert_gate.weight"] = np.zeros((1, len(router_DE)), router_DE.dtype)
        for matrix in MATRICES:
            for e, weight_IO in enumerate(experts[matrix][index]):
                merged[f"{mlp}.experts.{e}.{matrix}_proj.weight"] = weight_IO.T
    return merged


def assemble(dense: Path, parts: Sequence[Path], out: Path) -> None:
    """Writes the mixture's directory: weights, config, and the dense model's tokenizer.

    Args:
      dense: directory of the dense model.
      parts: files of the experts.
      out: directory to write.
    """
    packed, top_k = load(parts)
    out.mkdir(parents=True, exist_ok=True)
    merged = merge(load_file(dense / "model.safetensors"), packed)
    save_file(
        {n: np.ascontiguousarray(x) for n, x in merged.items()}, out / "model.safetensors", metadata={"format": "pt"}
    )
    for file in dense.iterdir():
        if file.suffix in (".json", ".jinja") and not file.name.startswith("model.safetensors"):
            shutil.copyfile(file, out / file.name)
    config = config_of(json.loads((dense / "config.json").read_text()), packed, top_k)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
