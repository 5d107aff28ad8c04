"""Log-probabilities of a prompt's own tokens and of the most likely ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxspec.decode.scores import Scores
from jaxspec.serve.request import Logprob, RequestOutput

Chunks = Sequence[tuple[int, Scores]]
BROKEN = "the model's logits are not finite in the prompt; look for NaN or infinity in the weights"


def prompt_logprobs(prompt: np.ndarray, chunks: Chunks, most: int) -> list[dict[int, Logprob] | None]:
    """Returns one entry per token of a prompt, by id; None for the first, which nothing comes before.

    ``chunks`` are how many positions count of each chunk, and its scores.
    """
    entries: list[dict[int, Logprob] | None] = [None]
    for token, values, top in zip(prompt[1:].tolist(), *_joined(chunks, most), strict=True):
        best = zip(top[1 : most + 1], values[1 : most + 1], strict=True)
        entry = {i: Logprob(value, rank) for rank, (i, value) in enumerate(best, start=1)}
        entry.setdefault(token, Logprob(values[0], top[0]))
        entries.append(entry)
    return entries


def own_logprobs(output: RequestOutput) -> list[Logprob | None]:
    """Returns the entries of a prompt's own tokens."""
    ids, entries = output.prompt_token_ids, output.prompt_logprobs or []
    return [None if entry is None else entry[token] for token, entry in zip(ids, entries, strict=True)]


def is_broken(chunks: Chunks) -> bool:
    """Whether some token's log-probability is not a number."""
    return any(bool(np.isnan(np.asarray(scores.logprob_TL)[:count, 0]).any()) for count, scores in chunks)


def _joined(chunks: Chunks, most: int) -> tuple[list[list[float]], list[list[int]]]:
    """Joins what counts of all chunks."""
    values = [np.asarray(scores.logprob_TL)[:count, : most + 1].tolist() for count, scores in chunks]
    tops = [np.asarray(scores.top_TL)[:count, : most + 1].tolist() for count, scores in chunks]
    return [row for rows in values for row in rows], [row for rows in tops for row in rows]
