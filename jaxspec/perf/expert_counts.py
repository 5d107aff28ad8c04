"""Counts of chosen experts: the record of a measurement, and batches drawn from its routes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from jaxspec.errors import ConfigError
from jaxspec.perf.expert_placement import Slots, imbalance, slots_of
from jaxspec.perf.record_file import load_record
from jaxspec.whole_file import write_whole

VERSION = 1
Kind = Literal["prompt", "committed", "rejected"]
KINDS: tuple[Kind, ...] = ("prompt", "committed", "rejected")


class ExpertLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record that ``jaxspec inspect --balance --record`` writes.

    Attributes:
      version: of this layout.
      model: name and digests, as in a ``Placement``.
      source: what was read and how it was drafted, in words.
      layers: numbers of the expert layers.
      positions: that were counted, by kind: of prompts; of verifications those that became text, which plain decoding
        computes too; and drafts that were rejected.
      counts: choices of each expert, by kind, layer and expert.
    """

    version: int
    model: dict[str, str]
    source: str
    layers: tuple[int, ...]
    positions: dict[Kind, int]
    counts: dict[Kind, tuple[tuple[int, ...], ...]]

    def of(self, *kinds: Kind) -> list[np.ndarray]:
        """Returns choices [E] of each layer, of some kinds together."""
        return [np.sum([self.counts[kind][y] for kind in kinds], axis=0) for y in range(len(self.layers))]

    @property
    def decoding(self) -> tuple[Kind, ...]:
        """The kinds that a verification computes; the prompts if nothing was generated."""
        return ("committed", "rejected") if self.positions["committed"] else ("prompt",)


def save_load(load: ExpertLoad, file: Path) -> None:
    """Writes JSON."""
    write_whole(file, msgspec.json.encode(load) + b"\n")


def read_load(file: Path) -> ExpertLoad:
    """Reads what ``save_load`` wrote.

    Raises:
      ConfigError: the file is missing, of another version, or says anything else.
    """
    remedy = "run jaxspec inspect --balance --record to make one"
    load = load_record(file, ExpertLoad, "record of expert load", VERSION, remedy)
    if set(load.counts) != set(KINDS) or any(len(c) != len(load.layers) for c in load.counts.values()):
        raise ConfigError(f"{file}: it needs counts of {', '.join(KINDS)} for {len(load.layers)} layers; {remedy}")
    return load


def counted(expert_XYA: np.ndarray, experts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Counts choices of each expert of each layer among some positions; not of experts without weights."""
    counts = (np.bincount(expert_XYA[:, y].ravel(), minlength=size)[:size] for y, size in enumerate(experts))
    return tuple(tuple(each.tolist()) for each in counts)


@dataclass(frozen=True)
class Verifications:
    """Routes of the positions that were verified together, row by row.

    Attributes:
      expert_VTYA: choices of V verifications of T positions in Y layers.
      live_VT: positions that were computed.
      turn_VT: by which replicas take turns, token id plus position.
      text_V: number of the text that each belongs to.
    """

    expert_VTYA: np.ndarray
    live_VT: np.ndarray
    turn_VT: np.ndarray
    text_V: np.ndarray

    def of(self, mask_V: np.ndarray) -> "Verifications":
        """Returns some of them."""
        return Verifications(*(x[mask_V] for x in (self.expert_VTYA, self.live_VT, self.turn_VT, self.text_V)))

    @property
    def plain(self) -> "Verifications":
        """The same without their drafts: steps of plain decoding."""
        return Verifications(self.expert_VTYA[:, :1], self.live_VT[:, :1], self.turn_VT[:, :1], self.text_V)


@dataclass(frozen=True)
class Drawn:
    """Means over drawn batches and layers.

    Attributes:
      rows: of the heaviest device over the mean one, counted in routed rows: what the time goes by where products are
        limited by arithmetic.
      experts: the same in experts that a device reads, what it goes by where they are limited by memory.
      read: experts read by the heaviest device.
    """

    rows: float
    experts: float
    read: float


def drawn(seen: Verifications, slots: Mapping[int, Slots], devices: int, rows: int, draws: int = 200) -> Drawn:
    """Measures how unevenly batches of real verifications load the devices, with the same draws for all placements."""
    rng, size = np.random.default_rng(0), min(rows, len(seen.text_V))
    picked = [rng.choice(len(seen.text_V), size, replace=False) for _ in range(draws)]
    loads: list[tuple[float, float, float]] = []
    for y, of in slots.items():
        slot_VTA = slots_of(seen.expert_VTYA[:, :, y], seen.turn_VT[..., None], of)
        for batch in picked:
            chosen = slot_VTA[batch][seen.live_VT[batch]].ravel()
            count_NC = np.bincount(chosen, minlength=len(of)).reshape(devices, -1)
            load_N, read_N = count_NC.sum(1), (count_NC > 0).sum(1)
            loads.append((float(imbalance(load_N)), float(imbalance(read_N)), float(read_N.max())))
    return Drawn(*np.mean(loads, axis=0).tolist())
