"""Heads of keys and values that lie several times, each beside the part of their queries that it serves."""

import numpy as np

COPIED = ("attention/qkv_DGQC", "attention/qkv_bias_GQC")
Shape = tuple[int, ...]


def with_copies(leaf: np.ndarray, copies: int) -> np.ndarray:
    """Returns [..., G, R + 2, C] with so many copies of each key and value: [..., G * copies, R / copies + 2, C]."""
    if copies == 1:
        return leaf
    *lead, kv_heads, parts, width = leaf.shape
    query = leaf[..., :-2, :].reshape(*lead, kv_heads * copies, (parts - 2) // copies, width)
    return np.concatenate([query, np.repeat(leaf[..., -2:, :], copies, axis=-3)], axis=-2)


def without_copies(leaf: np.ndarray, copies: int) -> np.ndarray:
    """Undoes ``with_copies``."""
    if copies == 1:
        return leaf
    *lead, kv_heads, parts, width = leaf.shape
    query = leaf[..., :-2, :].reshape(*lead, kv_heads // copies, (parts - 2) * copies, width)
    return np.concatenate([query, leaf[..., ::copies, -2:, :]], axis=-2)


def shape_without_copies(shape: Shape, copies: int) -> Shape:
    """Returns the shape that ``without_copies`` gives."""
    if copies == 1:
        return shape
    *lead, kv_heads, parts, width = shape
    return (*lead, kv_heads // copies, (parts - 2) * copies + 2, width)
