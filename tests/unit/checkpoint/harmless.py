"""Odd model directories that load like the sound one that they are made of."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.unit.checkpoint.model_edits import (
    HEAD,
    NORM,
    WEIGHTS,
    Change,
    edit_config,
    edit_tensors,
    raw_header,
    shard,
    tensors,
)  # fmt: skip


def _rotations(held: dict[str, np.ndarray]) -> None:
    for name in ("inv_freq", "cos_cached", "sin_cached", "original_inv_freq"):
        held[f"model.layers.0.self_attn.rotary_emb.{name}"] = np.full((1, 1, 8, 4), np.nan, np.float32)
    held["model.rotary_emb.inv_freq"] = held["rope.freqs"] = np.ones(4, np.float32)


def _stale_shard(directory: Path) -> None:
    """A shard that is read last holds other numbers under a name that the index gives to another."""
    places = shard(directory)
    first, *_, last = sorted(set(places.values()))
    name = next(name for name, file in places.items() if file == first)
    stale = load_file(directory / first)[name] + 1
    save_file(load_file(directory / last) | {name: stale}, directory / last)


def _stray(name: str, *, sharded: bool) -> Change:
    """A file that does not belong to the model, with a tensor of a name that does."""

    def change(directory: Path) -> None:
        if sharded:
            shard(directory)
        save_file({NORM: np.zeros(3, np.float32)}, directory / name)

    return change


def _linked(directory: Path) -> None:
    """The layout of the hub's cache: a snapshot of links to blobs, some of which all repositories share."""
    home = directory.with_name("cache") / "models--org--tiny"
    snapshot, blobs, shared = home / "snapshots" / ("0" * 40), home / "blobs", home.parent / "blobs" / "ab"
    for folder in (snapshot, blobs, shared):
        folder.mkdir(parents=True)
    for n, file in enumerate(sorted(directory.iterdir())):
        blob, name = blobs / f"{n:040}", file.name
        place = shared / blob.name if n % 2 else blob
        file.rename(place)
        if n % 2:
            blob.symlink_to(os.path.relpath(place, blobs))
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    directory.rmdir()
    directory.symlink_to(snapshot)


def _mounted(directory: Path) -> None:
    """The layout of a mounted volume: links to a folder beside them that is exchanged as a whole."""
    data = directory / "..2026_11_26"
    data.mkdir()
    (directory / "..data").symlink_to(data.name)
    for file in [file for file in directory.iterdir() if file.is_file()]:
        file.rename(data / file.name)
        file.symlink_to(Path("..data") / file.name)


def _key_twice(directory: Path) -> None:
    file = directory / "config.json"
    file.write_text(file.read_text().replace("{", '{"a": [1, NaN], "a": [1, NaN], ', 1))


def _padded(directory: Path) -> None:
    data = (directory / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    raw_header(directory, data[8 : 8 + length] + b" " * 24, data[8 + length :])


def _tied(head: Callable[[np.ndarray], np.ndarray]) -> Change:
    """A config that says tied, and files with a head."""

    def change(directory: Path) -> None:
        edit_config(directory, tie_word_embeddings=True)
        edit_tensors(directory, lambda held: held.update({HEAD: head(held[HEAD])}))

    return change


HARMLESS: dict[str, Change] = {
    "shards": lambda directory: shard(directory),
    "rotations": tensors(_rotations),
    "stale shard": _stale_shard,
    "stray file beside the index": _stray("z.safetensors", sharded=True),
    "stray file beside the weights": _stray("a.safetensors", sharded=False),
    "hub cache": _linked,
    "mounted volume": _mounted,
    "a key twice with one value": _key_twice,
    "a header padded with spaces": _padded,
    "tied with another head": _tied(lambda head: head),
}
