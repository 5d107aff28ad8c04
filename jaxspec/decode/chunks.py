"""How prompts are cut into chunks of the compiled sizes: padding against passes over the weights."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import numpy as np

from jaxspec.decode.prefill import Chunk

PASS = 16  # positions that are computed in the time of a pass over the weights


@dataclass
class UnreadPrompt:
    """A prompt on its way into the caches of its row.

    Attributes:
      row: that gets it.
      token_X: its ids; the last one is the row's first anchor and not read.
      table_J: page ids of the row, None without a page pool.
      start: tokens that were read.
      route: takes the expert choices of what was read, and the position that they begin at, where they are wanted.
    """

    row: int
    token_X: np.ndarray
    table_J: np.ndarray | None = None
    start: int = 0
    route: Callable[[int, np.ndarray], None] = lambda start, expert_TYA: None

    @property
    def left(self) -> int:
        """Returns how many tokens are left to read."""
        return len(self.token_X) - 1 - self.start


def next_size(left: int, sizes: tuple[int, ...]) -> int:
    """Returns the size of the next chunk where so many tokens are left; ``sizes`` are ascending."""
    cuts = _cuts(sizes)
    return cuts[min(left, len(cuts) - 1)]


def sizes_of(left: int, sizes: tuple[int, ...]) -> list[int]:
    """Returns the sizes of all chunks of a prompt that is read singly, of which so many tokens are left."""
    chunks = []
    while left > 0:
        chunks.append(next_size(left, sizes))
        left -= chunks[-1]
    return chunks


@cache
def _cuts(sizes: tuple[int, ...]) -> list[int]:
    """Returns the best first size by tokens left; with twice the largest size left it is the largest."""
    costs, firsts = [0], [0]
    for left in range(1, 2 * sizes[-1] + 1):
        cost, first = min((costs[max(left - size, 0)] + size + PASS, -size) for size in sizes)
        costs.append(cost)
        firsts.append(-first)
    return firsts


def choose_chunk(
    prompts: Sequence[UnreadPrompt], sizes: tuple[int, ...], joint: tuple[int, int] | None = None
) -> tuple[int, list[UnreadPrompt]]:
    """Returns the size of the next chunk and the prompts in it: the first, or several where a token then costs less.

    Args:
      prompts: the oldest first, each with tokens left.
      sizes: of chunks of one prompt, ascending.
      joint: how many prompts, and of each how many tokens, a chunk of several has; None where there is none.
    """
    left = prompts[0].left
    size = next_size(left, sizes)
    if joint is not None and len(prompts) >= joint[0]:
        several = list(islice(prompts, joint[0]))
        read = sum(min(prompt.left, joint[1]) for prompt in several)
        if (joint[0] * joint[1] + PASS) * min(left, size) < (size + PASS) * read:
            return joint[1], several
    return size, [prompts[0]]


def cut(prompts: Iterable[UnreadPrompt], size: int) -> Chunk:
    """Takes the next ``size`` tokens of each prompt, or what is left, as a chunk."""
    taken: Any = [(p, min(size, p.left)) for p in prompts]
    token_RX = np.zeros((len(taken), size + 1), np.int32)
    for token_X, (prompt, count) in zip(token_RX, taken, strict=True):
        token_X[: count + 1] = prompt.token_X[prompt.start : prompt.start + count + 1]
    row_R, start_R, count_R = np.asarray([(p.row, p.start, count) for p, count in taken], np.int32).T
    tables: Any = [prompt.table_J for prompt, _ in taken]
    for prompt, count in taken:
        prompt.start += count
    chunk: Any = row_R, token_RX, start_R, count_R, None if tables[0] is None else np.stack(tables)
    return Chunk(*chunk)
