"""The draft vocabulary: which of the target's tokens a head can draft, and how other engines write that down."""

from pathlib import Path

import numpy as np

from jaxspec.errors import ConfigError


def choose_ids(count_V: np.ndarray, size: int) -> np.ndarray:
    """The most frequent tokens, as EAGLE-3 chooses them; the smaller id wins a tie.

    Args:
      count_V: how often each token is trained on.
      size: W.

    Returns:
      int32 ids, ascending [W].

    Raises:
      ConfigError: W is not from 1 to V.
    """
    if not 1 <= size <= len(count_V):
        raise ConfigError(f"head: draft_vocab_size must be from 1 to the target's {len(count_V)}, got {size}")
    return np.sort(np.argsort(-count_V, kind="stable")[:size]).astype(np.int32)


def coverage(count_V: np.ndarray, ids_W: np.ndarray) -> float:
    """Share of the counted tokens that are in the draft vocabulary."""
    return float(count_V[ids_W].sum() / max(count_V.sum(), 1))


def check_ids(ids_W: np.ndarray, vocab_size: int) -> np.ndarray:
    """Ids as int32, checked.

    Raises:
      ConfigError: they are not ascending ids of the target without repetition.
    """
    if ids_W.ndim != 1 or not len(ids_W) or not np.issubdtype(ids_W.dtype, np.integer):
        got = f"{ids_W.dtype} {list(ids_W.shape)}"
        raise ConfigError(f"draft vocabulary: a row of integers is needed, at least one, got {got}")
    low, high = int(ids_W.min()), int(ids_W.max())
    if low < 0 or high >= vocab_size:
        raise ConfigError(
            f"draft vocabulary: ids from {low} to {high}, but the target has {vocab_size} tokens (0 to "
            f"{vocab_size - 1}); they are another target's"
        )
    if np.any(np.diff(ids_W.astype(np.int64)) <= 0):
        place = int(np.argmax(np.diff(ids_W.astype(np.int64)) <= 0))
        raise ConfigError(
            f"draft vocabulary: ids must ascend, but {int(ids_W[place])} at {place} is followed by "
            f"{int(ids_W[place + 1])}; were offsets taken for ids?"
        )
    return ids_W.astype(np.int32)


def read_ids(file: str | Path, vocab_size: int) -> np.ndarray:
    """Reads a token map, an ``.npy`` array of ids in any order, as ascending int32.

    Raises:
      ConfigError: the file cannot be read, or holds what are no ids of the target.
    """
    try:
        ids = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{file} cannot be read ({reason}); an .npy array of token ids is needed, as jaxspec token-map writes it"
        ) from error
    try:
        return check_ids(np.unique(ids), vocab_size)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def to_d2t(ids_W: np.ndarray) -> np.ndarray:
    """``d2t`` as EAGLE-3's checkpoints hold it: the offset from a draft id to the target's, int64 [W]."""
    return ids_W.astype(np.int64) - np.arange(len(ids_W), dtype=np.int64)


def to_t2d(ids_W: np.ndarray, vocab_size: int) -> np.ndarray:
    """``t2d``: which of the target's tokens can be drafted, bool [V]."""
    mask_V = np.zeros(vocab_size, bool)
    mask_V[ids_W] = True
    return mask_V


def from_d2t(d2t_W: np.ndarray, vocab_size: int, t2d_V: np.ndarray | None = None) -> np.ndarray:
    """The ids that ``d2t`` means.

    Args:
      d2t_W: offsets.
      vocab_size: V of the target.
      t2d_V: the mask beside it, where there is one.

    Returns:
      int32 ids, ascending [W].

    Raises:
      ConfigError: the ids are out of range or not ascending, or the mask says otherwise.
    """
    if d2t_W.ndim != 1 or not np.issubdtype(d2t_W.dtype, np.integer):
        raise ConfigError(f"d2t: integers [W] are needed, got {d2t_W.dtype} {list(d2t_W.shape)}")
    ids_W = check_ids(d2t_W.astype(np.int64) + np.arange(len(d2t_W), dtype=np.int64), vocab_size)
    if t2d_V is None:
        return ids_W
    if t2d_V.shape != (vocab_size,):
        raise ConfigError(f"t2d: {list(t2d_V.shape)} entries, but the target has {vocab_size} tokens")
    if not np.array_equal(np.flatnonzero(t2d_V), ids_W):
        wrong = int((t2d_V.astype(bool) != to_t2d(ids_W, vocab_size)).sum())
        raise ConfigError(f"d2t and t2d disagree about {wrong} tokens; the checkpoint is damaged")
    return ids_W
