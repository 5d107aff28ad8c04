"""A search for numbers that are not finite, at the speed of reading memory."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np

# Bits of the smallest number that is not finite; larger bits are not finite either.
LIMITS = {
    np.dtype(np.float64): 0x7FF0 << 48,
    np.dtype(np.float32): 0x7F80 << 16,
    np.dtype(np.float16): 0x7C00,
    np.dtype(ml_dtypes.bfloat16): 0x7F80,
    np.dtype(ml_dtypes.float8_e5m2): 0x7C,
    np.dtype(ml_dtypes.float8_e4m3fn): 0x7F,
    np.dtype(ml_dtypes.float8_e8m0fnu): 0xFF,  # has no sign
}
BLOCK_BYTES = 1 << 18  # stays in a core's cache while it is looked at twice


def all_finite(x: np.ndarray) -> bool:
    """Returns whether all numbers are finite; whole numbers are."""
    limit = LIMITS.get(x.dtype)
    if limit is None:
        return True
    x = x.reshape(-1) if x.flags.c_contiguous else x
    size = x.dtype.itemsize
    # Positive numbers are in order as signed integers, negative ones as unsigned integers: two maxima, no copies.
    signed, unsigned = x.view(f"i{size}"), x.view(f"u{size}")
    lowest, highest = np.iinfo(signed.dtype).min, limit | 1 << (8 * size - 1)
    return all(
        signed[rows].max(initial=lowest) < limit and unsigned[rows].max(initial=0) < highest for rows in _blocks(x)
    )


def not_finite(x: np.ndarray) -> tuple[int, tuple[int, ...]]:
    """Returns how many numbers are not finite, and the index of the first, empty if all are."""
    count, first, x = 0, (), np.atleast_1d(x)
    for rows in _blocks(x):
        wrong = ~np.isfinite(x[rows].astype(np.float64))
        if not count and wrong.any():
            index = np.argwhere(wrong)[0].tolist()
            first = (index[0] + rows.start, *index[1:])
        count += int(wrong.sum())
    return count, first


def fault(name: str, x: np.ndarray, what: str = "numbers") -> str | None:
    """Returns what to say of a tensor some of whose numbers are not finite, None if all are.

    Args:
      name: of the tensor, or ``name[3]`` for an entry of its first axis.
      x: what it holds.
      what: these numbers are.
    """
    count, first = not_finite(x)
    if not count:
        return None
    return (
        f"{name}: {count} of {x.size} {what} are not finite (NaN or infinity), the first at {list(first)}; "
        "the file is damaged or the model was saved after its training diverged; take another copy"
    )


def _blocks(x: np.ndarray) -> Iterator[slice]:
    """Yields slices of rows of at most a block's bytes."""
    step = max(1, BLOCK_BYTES * len(x) // max(x.nbytes, 1))
    return (slice(start, start + step) for start in range(0, len(x), step))
