"""Bijections between published arrays and one parameter: they move axes and never change a value."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Arrays = list[np.ndarray]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Pack:
    """One bijection.

    Attributes:
      join: published arrays to a parameter of the given shape.
      split: parameter to published arrays.
    """

    join: Callable[[Arrays, Shape], np.ndarray]
    split: Callable[[np.ndarray], Arrays]


def _join_qkv(arrays: Arrays, shape: Shape) -> np.ndarray:
    *_, kv_heads, _, width = shape
    parts = [a.reshape(kv_heads, -1, width, *a.shape[1:]) for a in arrays]
    joined = np.concatenate(parts, axis=1)
    return np.moveaxis(joined, -1, 0) if joined.ndim == 4 else joined


def _split_qkv(leaf: np.ndarray) -> Arrays:
    joined = np.moveaxis(leaf, 0, -1) if leaf.ndim == 4 else leaf
    cuts = (joined[:, :-2], joined[:, -2:-1], joined[:, -1:])
    return [cut.reshape(-1, *joined.shape[3:]) for cut in cuts]


PACKS: Mapping[str, Pack] = {
    # [N] or any shape to itself
    "copy": Pack(lambda a, shape: a[0].reshape(shape), lambda leaf: [leaf]),
    # [H * C] to [H, C]
    "heads": Pack(lambda a, shape: a[0].reshape(shape), lambda leaf: [leaf.reshape(-1)]),
    # [out, in] to [in, out]
    "transpose": Pack(lambda a, _: a[0].T, lambda leaf: [leaf.T]),
    # three of [heads * C, D] to [D, G, R + 2, C], or three biases to [G, R + 2, C]
    "qkv": Pack(_join_qkv, _split_qkv),
    # [D, H * C] to [H, C, D]
    "out": Pack(lambda a, shape: a[0].T.reshape(shape), lambda leaf: [leaf.reshape(-1, leaf.shape[-1]).T]),
    # [H * C, R] to [R, H, C]
    "from_rank": Pack(lambda a, shape: a[0].T.reshape(shape), lambda leaf: [leaf.reshape(leaf.shape[0], -1).T]),
    # two of [F, D] to [D, 2, F]
    "gate_up": Pack(
        lambda a, _: np.stack([a[0].T, a[1].T], axis=1),
        lambda leaf: [leaf[:, 0].T, leaf[:, 1].T],
    ),
    # [D, 2 F], gate and up columns by turns, to [D, 2, F]
    "by_turns": Pack(
        lambda a, shape: a[0].reshape(shape[0], -1, 2).swapaxes(1, 2),
        lambda leaf: [leaf.swapaxes(1, 2).reshape(leaf.shape[0], -1)],
    ),
    # [2 F], gate and up entries by turns, to [2, F]
    "bias_by_turns": Pack(lambda a, _: a[0].reshape(-1, 2).T, lambda leaf: [leaf.T.reshape(-1)]),
}
