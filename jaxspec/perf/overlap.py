"""Overlap of routing: experts really touched, as a share of the count under independent routing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxspec.errors import ConfigError
from jaxspec.perf.moesd import expected_experts

# Most, likely and least of what is published for four positions.
PUBLISHED_AT_4 = (1.0, 0.82, 0.69)


@dataclass(frozen=True)
class AssumedOverlap:
    """Overlap without a measurement, from one number: the share of N(4) that 4 neighboring positions touch.

    The share of 2^n positions is that of 4 to the power n / 2, which fits what is published for one model at 4, 8 and
    16 positions (.72, .63, .55: .72, .61, .52). Rows of a batch are taken as independent of each other: T positions
    of a row count as the fewer independent tokens that touch as many experts.

    Attributes:
      at_4: published are 1.0 (DeepSeek-V3.1), .82 (Qwen3-235B), .77 (gpt-oss-120b), .72 and .69 (others).
    """

    at_4: float = PUBLISHED_AT_4[1]
    by_layer: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0.25 <= self.at_4 <= 1:
            raise ConfigError(f"overlap: four positions touch from 0.25 to 1 of the independent count, got {self.at_4}")

    def touched(self, num_experts: int, top_k: int, rows: int, positions: int, layer: int = 0) -> float:
        """Computes distinct experts of a layer that ``positions`` neighboring positions of each row touch."""
        sizes = {"num_experts": num_experts, "top_k": top_k}
        share = self.at_4 ** (math.log2(positions) / 2)
        one_row = max(expected_experts(**sizes, tokens=positions) * share, top_k)
        if rows == 1 or one_row >= num_experts:
            return one_row
        tokens = math.log(1 - one_row / num_experts) / math.log(1 - top_k / num_experts)
        return expected_experts(**sizes, tokens=rows * tokens)


@dataclass(frozen=True)
class MeasuredOverlap:
    """Shares of N(t) that were measured, per expert layer, at some rows and positions per row.

    Between the measured points shares are interpolated in the logarithms of both; outside the nearest counts.

    Attributes:
      rows, positions: ascending.
      share: by layer, rows and positions.
    """

    rows: tuple[int, ...]
    positions: tuple[int, ...]
    share: tuple[tuple[tuple[float, ...], ...], ...]
    by_layer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        shape = (len(self.share), len(self.rows), len(self.positions))
        rising = all(list(x) == sorted(set(x)) and x and x[0] >= 1 for x in (self.rows, self.positions))
        if not rising or not self.share or np.shape(self.share) != shape or not np.all(np.asarray(self.share) > 0):
            raise ConfigError("overlap: needs ascending rows and positions from 1, and a positive share for each layer")

    def touched(self, num_experts: int, top_k: int, rows: int, positions: int, layer: int = 0) -> float:
        """Computes distinct touched experts of expert layer ``layer``; the last layer stands for any after it."""
        table = np.asarray(self.share[min(layer, len(self.share) - 1)])
        by_rows = [np.interp(math.log(positions), np.log(self.positions), line) for line in table]
        share = float(np.interp(math.log(rows), np.log(self.rows), by_rows))
        most = expected_experts(num_experts=num_experts, top_k=top_k, tokens=rows * positions)
        return most * min(max(share, top_k / most), 1.0)


Overlap = AssumedOverlap | MeasuredOverlap


def measure_overlap(
    experts: Sequence[np.ndarray],
    num_experts: Sequence[int],
    rows: Sequence[int],
    positions: Sequence[int],
    seed: int = 0,
) -> MeasuredOverlap:
    """Counts distinct experts in routed ids and divides by the independent count.

    Args:
      experts: ids [texts, tokens, A] of each expert layer, tokens in the order of the text.
      num_experts: E of each layer.
      rows: rows per step; each takes another text where there are enough.
      positions: neighboring tokens per row.
      seed: of the places that are sampled.

    Raises:
      ConfigError: the texts are shorter than the positions.
    """
    rows, positions = tuple(sorted(set(rows))), tuple(sorted(set(positions)))
    texts, tokens = experts[0].shape[:2]
    if tokens < positions[-1]:
        raise ConfigError(f"overlap: texts of {tokens} tokens are too short for {positions[-1]} positions")
    share = np.zeros((len(experts), len(rows), len(positions)))
    for i, r in enumerate(rows):
        for j, p in enumerate(positions):
            generator = np.random.default_rng((seed, r, p))
            places = [_windows(generator, texts, tokens, r, p) for _ in range(max(256 // r, 32))]
            for y, ids in enumerate(experts):
                counts = [np.unique(ids[text[:, None], at]).size for text, at in places]
                most = expected_experts(num_experts=num_experts[y], top_k=ids.shape[2], tokens=r * p)
                share[y, i, j] = np.mean(counts) / most
    layers = tuple(tuple(tuple(float(x) for x in line) for line in table) for table in share)
    return MeasuredOverlap(rows, positions, layers)


def _windows(
    generator: np.random.Generator, texts: int, tokens: int, rows: int, positions: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draws a text for each row, and neighboring positions in it."""
    text = generator.permutation(np.arange(max(texts, rows)) % texts)[:rows]
    first = generator.integers(0, tokens - positions + 1, rows)
    return text, first[:, None] + np.arange(positions)
