"""Changes of a sound model directory, which broken and odd ones are made with.

A directory is as ``write_tiny_model`` makes it: one file of weights, a tokenizer.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
EXPERT = "model.layers.0.mlp.experts.1.down_proj.weight"
Change = Callable[[Path], Any]


def shard(directory: Path, count: int = 3) -> dict[str, str]:
    """Splits the weights into files with an index; returns its map."""
    tensors = load_file(directory / WEIGHTS)
    files = [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    places = {name: files[n % count] for n, name in enumerate(tensors)}
    for file in files:
        save_file({name: value for name, value in tensors.items() if places[name] == file}, directory / file)
    (directory / WEIGHTS).unlink()
    write_index(directory, places)
    return places


def write_index(directory: Path, places: Any) -> None:
    """Writes an index."""
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def edit_tensors(directory: Path, edit: Callable[[dict[str, np.ndarray]], Any]) -> None:
    """Changes the tensors of the one file of weights."""
    tensors = load_file(directory / WEIGHTS)
    edit(tensors)
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, directory / WEIGHTS)


def edit_config(directory: Path, **changes: Any) -> None:
    """Changes keys of ``config.json``."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_header(directory: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the header of the one file of weights, whose data stay as they are."""
    data = (directory / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    raw_header(directory, json.dumps(header).encode(), data[8 + length :])


def raw_header(directory: Path, header: bytes, data: bytes = bytes(64), length: int | None = None) -> None:
    """Writes a file of weights with any header."""
    size = len(header) if length is None else length
    (directory / WEIGHTS).write_bytes(size.to_bytes(8, "little") + header + data)


def replaced(name: str, make: Callable[[Path], Any]) -> Change:
    """A file that is something else."""

    def change(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        make(directory / name)

    return change


def text(name: str, content: str | bytes) -> Change:
    """A file of some content."""
    data = content.encode() if isinstance(content, str) else content
    return lambda directory: (directory / name).write_bytes(data)


def tensors(edit: Callable[[dict[str, np.ndarray]], Any]) -> Change:
    """Other tensors."""
    return lambda directory: edit_tensors(directory, edit)


def header(edit: Callable[[dict[str, Any]], Any]) -> Change:
    """Another header."""
    return lambda directory: edit_header(directory, edit)


def index(edit: Callable[[Path, dict[str, Any]], Any]) -> Change:
    """Shards, and an index that is changed."""

    def change(directory: Path) -> None:
        places: dict[str, Any] = dict(shard(directory))
        edit(directory, places)
        write_index(directory, places)

    return change


def put(name: str, place: Any, value: float) -> Callable[[dict[str, np.ndarray]], None]:
    """One number of a tensor replaced."""
    return lambda held: held[name].__setitem__(place, value)
