"""Parameters to a checkpoint directory that transformers, vLLM and llama.cpp read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxspec.checkpoint.catalog import known_tables
from jaxspec.checkpoint.packs import PACKS
from jaxspec.checkpoint.places import Leaf, flatten, places
from jaxspec.models.arch import ArchSpec
from jaxspec.shapes import Params


def published_tensors(params: Params, arch: ArchSpec, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Every parameter under its published name and shape."""
    leaves = flatten(params["params"])  # pyright: ignore[reportArgumentType]
    out: dict[str, np.ndarray] = {}
    for path, leaf in places(known_tables()[arch.family].rules(arch), leaves, arch).items():
        whole = np.asarray(leaves[path])
        for index, rule in leaf.rules.items():
            for name, part in zip(rule.hub, PACKS[rule.pack].split(whole[index]), strict=True):
                _put(out, name, part.astype(dtype), leaf)
    return out


def _put(out: dict[str, np.ndarray], name: str, part: np.ndarray, leaf: Leaf) -> None:
    """Puts a tensor, or an entry of one, where it belongs."""
    whole, _, entry = name.partition("[")
    if not entry:
        out[whole] = np.ascontiguousarray(part)
        return
    count = max(index[-1] for index in leaf.rules) + 1
    out.setdefault(whole, np.empty((count, *part.shape), part.dtype))[int(entry.rstrip("]"))] = part


def save_model(directory: Path, params: Params, arch: ArchSpec, config: Mapping[str, Any], dtype: np.dtype) -> None:
    """Writes ``config.json`` and ``model.safetensors``; the weights appear under their name only when complete."""
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / "model.safetensors.part"
    save_file(published_tensors(params, arch, dtype), part, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    part.chmod((directory / "config.json").stat().st_mode)  # safetensors writes for the owner alone
    part.rename(directory / "model.safetensors")
