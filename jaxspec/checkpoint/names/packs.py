"""Bijections between published arrays and one parameter: they move axes and never change a value."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Arrays = list[np.ndarray]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Pack:
    """One bijection.

    Attributes:
      join: published arrays to a parameter of the given shape; where it can, a view of them.
      split: parameter to published arrays.
      axes: for each axis of a parameter made of matrices, the matrix axis that it comes from, None for that which
        counts matrices. None for packs of whatever else, whose parameters are never kept quantized.
      inner: the matrix axis that a product sums over.
      finer: size of the blocks that fit both layouts, from that of published blocks and the size of the last of the
        axes that a matrix axis is cut into.
      outer: which of the axes that a matrix axis is cut into goes from end to end of it: 0 the first, -1 the last.
    """

    join: Callable[[Arrays, Shape], np.ndarray]
    split: Callable[[np.ndarray], Arrays]
    axes: tuple[int | None, ...] | None = None
    inner: int = 1
    finer: Callable[[int, int], int] = math.gcd
    outer: int = 0

    def cut(self, arrays: Arrays, shape: Shape, index: Sequence[slice]) -> tuple[Arrays, Shape, tuple[slice, ...]]:
        """Cuts published arrays down to what a slice of a parameter needs.

        ``join(arrays, shape)[index]`` is ``join(cut, small)[left]`` of what this returns. Where a slice of the
        parameter is one of the arrays it is made there, as a view, and the rest of a mapped file is not read.

        Args:
          arrays: published ones.
          shape: of the parameter that they make.
          index: one slice per axis of it.

        Returns:
          The arrays' slices, the shape that they make, and what is still to be cut from it.
        """
        cuts, left, small = [[slice(None)] * a.ndim for a in arrays], list(index), list(shape)
        for dim, (span, size) in enumerate(zip(index, shape, strict=True)):
            axis, (start, stop, _) = self._end_to_end(dim, shape), span.indices(size)
            if axis is None or any(a.shape[axis] % size and (start, stop) != (0, size) for a in arrays):
                continue
            for array, cut in zip(arrays, cuts, strict=True):
                cut[axis] = slice(array.shape[axis] * start // size, array.shape[axis] * stop // size)
            left[dim], small[dim] = slice(None), stop - start
        return [a[tuple(cut)] for a, cut in zip(arrays, cuts, strict=True)], tuple(small), tuple(left)

    def _end_to_end(self, position: int, shape: Shape) -> int | None:
        """Returns the matrix axis that an axis of a parameter divides into neighboring parts, None if there is none."""
        if self.axes is None or len(self.axes) != len(shape) or self.axes[position] is None:
            return None
        parts = [i for i, axis in enumerate(self.axes) if axis == self.axes[position]]
        return self.axes[position] if parts[self.outer] == position else None

    def blocks(self, part: Shape, blocks: tuple[int, int]) -> tuple[int, ...] | None:
        """Returns the block sizes of a parameter from those of its matrices; None if it cannot be kept quantized."""
        if self.axes is None or len(self.axes) != len(part):
            return None
        sizes = []
        for position, axis in enumerate(self.axes):
            if axis is None or axis in self.axes[position + 1 :]:
                sizes.append(1)
            elif axis in self.axes[:position]:
                sizes.append(self.finer(blocks[axis], part[position]))
            else:
                sizes.append(blocks[axis])
        return tuple(sizes)


def _join_qkv(arrays: Arrays, shape: Shape) -> np.ndarray:
    *_, kv_heads, _, width = shape
    joined = np.concatenate([a.reshape(kv_heads, -1, width, *a.shape[1:]) for a in arrays], axis=1)
    return np.moveaxis(joined, -1, 0) if joined.ndim == 4 else joined


def _split_qkv(leaf: np.ndarray) -> Arrays:
    joined = np.moveaxis(leaf, 0, -1) if leaf.ndim == 4 else leaf
    cuts = (joined[:, :-2], joined[:, -2:-1], joined[:, -1:])
    return [cut.reshape(-1, *joined.shape[3:]) for cut in cuts]


def _join_rows(arrays: Arrays, shape: Shape) -> np.ndarray:
    *_, kv_heads, parts, width = shape
    query = kv_heads * (parts - 2) * width
    return _join_qkv(np.split(arrays[0], [query, query + kv_heads * width]), shape)


def _split_query_key(leaf: np.ndarray) -> Arrays:
    joined = np.moveaxis(leaf, 0, -1) if leaf.ndim == 4 else leaf
    return [cut.reshape(-1, *joined.shape[3:]) for cut in (joined[:, :-1], joined[:, -1:])]


def _split_key_value(leaf: np.ndarray) -> Arrays:
    return _split_qkv(leaf)[1:]


PACKS: Mapping[str, Pack] = {
    # [N], [in, out] or any other shape to itself
    "copy": Pack(lambda a, shape: a[0].reshape(shape), lambda leaf: [leaf], (0, 1), inner=0),
    # [out, in] to itself
    "rows": Pack(lambda a, _: a[0], lambda leaf: [leaf], (0, 1)),
    # [H * C] to [H, C]
    "heads": Pack(lambda a, shape: a[0].reshape(shape), lambda leaf: [leaf.reshape(-1)]),
    # [out, in] to [in, out]
    "transpose": Pack(lambda a, _: a[0].T, lambda leaf: [leaf.T], (1, 0)),
    # three of [heads * C, D] to [D, G, R + 2, C], or three biases to [G, R + 2, C]
    "qkv": Pack(_join_qkv, _split_qkv, (1, 0, 0, 0)),
    # [all heads * C, D], queries before keys before values, to [D, G, R + 2, C], or a bias to [G, R + 2, C]
    "qkv_rows": Pack(_join_rows, lambda leaf: [np.concatenate(_split_qkv(leaf))]),
    # two of [heads * C, D] to [D, G, R + 1, C], or two biases to [G, R + 1, C]
    "query_key": Pack(_join_qkv, _split_query_key, (1, 0, 0, 0)),
    # two of [G * C, D] to [D, G, 2, C], or two biases to [G, 2, C]
    "key_value": Pack(_join_qkv, _split_key_value, (1, 0, 0, 0)),
    # [D, H * C] to [H, C, D]
    "out": Pack(lambda a, shape: a[0].T.reshape(shape), lambda leaf: [leaf.reshape(-1, leaf.shape[-1]).T], (1, 1, 0)),
    # [H * C, R] to [R, H, C]
    "from_rank": Pack(
        lambda a, shape: a[0].T.reshape(shape),
        lambda leaf: [leaf.reshape(leaf.shape[0], -1).T],
        (1, 0, 0),
    ),
    # [H * X, R] to [H, X, R]
    "head_rows": Pack(lambda a, shape: a[0].reshape(shape), lambda leaf: [leaf.reshape(-1, leaf.shape[-1])], (0, 0, 1)),
    # two of [F, D] to [D, 2, F], or N of them to [D, N, F]
    "gate_up": Pack(
        lambda a, _: np.stack(a).transpose(2, 0, 1),
        lambda leaf: [part.T for part in leaf.swapaxes(0, 1)],
        (1, None, 0),
    ),
    # [2 F, D], gate rows and then up rows, to [D, 2, F], or N parts to [D, N, F]
    "halves": Pack(
        lambda a, shape: a[0].reshape(shape[1], -1, a[0].shape[1]).transpose(2, 0, 1),
        lambda leaf: [leaf.transpose(1, 2, 0).reshape(-1, leaf.shape[0])],
        (1, 0, 0),
    ),
    # [D, 2 F], gate columns and then up columns, to [D, 2, F]
    "columns": Pack(
        lambda a, shape: a[0].reshape(shape), lambda leaf: [leaf.reshape(leaf.shape[0], -1)], (0, 1, 1), inner=0
    ),
    # [D, 2 F], gate and up columns by turns, to [D, 2, F]
    "by_turns": Pack(
        lambda a, shape: a[0].reshape(shape[0], -1, 2).swapaxes(1, 2),
        lambda leaf: [leaf.swapaxes(1, 2).reshape(leaf.shape[0], -1)],
        (0, 1, 1),
        inner=0,
        finer=lambda block, _: max(block // 2, 1),
        outer=-1,
    ),
    # N of [D] to [N, D]
    "each": Pack(lambda a, _: np.stack(a), list),
    # [1, 1, N] to [N]
    "slot": Pack(lambda a, shape: a[0].reshape(shape), lambda leaf: [leaf[None, None]]),
    # [1, N] to [N]
    "row": Pack(lambda a, shape: a[0].reshape(shape), lambda leaf: [leaf[None]]),
    # [1, 1, N, 1] to [N]
    "per_head": Pack(lambda a, shape: a[0].reshape(shape), lambda leaf: [leaf[None, None, :, None]]),
    # [2 F], gate and up entries by turns, to [2, F]
    "bias_by_turns": Pack(lambda a, _: a[0].reshape(-1, 2).T, lambda leaf: [leaf.T.reshape(-1)]),
}
