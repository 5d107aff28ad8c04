"""Parameters to a checkpoint directory that transformers, vLLM and llama.cpp read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxspec.checkpoint.catalog import known_tables
from jaxspec.checkpoint.load import flatten, place_of
from jaxspec.checkpoint.table import PACKS
from jaxspec.models.arch import ArchSpec
from jaxspec.shapes import Params


def published_tensors(params: Params, arch: ArchSpec, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Every parameter under its published name and shape."""
    leaves = flatten(params["params"])  # pyright: ignore[reportArgumentType]
    out: dict[str, np.ndarray] = {}
    for rule in known_tables()[arch.family].rules(arch):
        place = place_of(rule, leaves)
        if place is not None:
            path, index = place
            leaf = np.asarray(leaves[path] if index is None else leaves[path][index])
            parts = PACKS[rule.pack].split(leaf, arch)
            out |= {name: np.ascontiguousarray(part.astype(dtype)) for name, part in zip(rule.hub, parts, strict=True)}
    return out


def save_model(directory: Path, params: Params, arch: ArchSpec, config: Mapping[str, Any], dtype: np.dtype) -> None:
    """Writes ``config.json`` and ``model.safetensors``; the weights appear under their name only when complete."""
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / "model.safetensors.part"
    save_file(published_tensors(params, arch, dtype), part, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    part.chmod((directory / "config.json").stat().st_mode)  # safetensors writes for the owner alone
    part.rename(directory / "model.safetensors")
