"""Placement of experts on devices: slots that share the measured load evenly, with replicas of heavy experts."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from jaxspec.errors import ConfigError
from jaxspec.perf.record_file import load_record
from jaxspec.whole_file import write_whole

VERSION = 1
EMPTY = -1
MOST_SWAPS = 4  # per slot, far more than were ever needed

Slots = tuple[int, ...]


class LayerSlots(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One expert layer.

    Attributes:
      layer: number of the decoder layer.
      slots: expert of each slot, -1 for an empty one; every device has equally many, device 0 the first ones.
    """

    layer: int
    slots: Slots


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record that ``jaxspec inspect --balance --output`` writes and ``LLM(expert_placement=...)`` loads.

    Attributes:
      version: of this layout.
      model: name and digests of the model that the load was measured with.
      devices: along the axis ``expert``.
      redundant: slots of each layer beyond its experts.
      layers: every expert layer of the model.
      source: what the load was counted on, in words.
    """

    version: int
    model: dict[str, str]
    devices: int
    redundant: int
    layers: tuple[LayerSlots, ...]
    source: str = ""


def save_placement(placement: Placement, file: Path) -> None:
    """Writes JSON."""
    write_whole(file, msgspec.json.format(msgspec.json.encode(placement), indent=1) + b"\n")


def load_placement(file: Path) -> Placement:
    """Reads what ``save_placement`` wrote.

    Raises:
      ConfigError: the file is missing, of another version, or names slots that leave out an expert or do not divide.
    """
    remedy = "run jaxspec inspect --balance --output to make one"
    placement = load_record(file, Placement, "placement", VERSION, remedy)
    for layer in placement.layers:
        wanted = set(range(len(layer.slots) - placement.redundant))
        if placement.devices < 1 or len(layer.slots) % placement.devices or set(layer.slots) - {EMPTY} != wanted:
            raise ConfigError(
                f"{file}: layer {layer.layer} has {len(layer.slots)} slots for {placement.devices} devices; they must "
                f"be a multiple and hold each of the experts 0 to {len(wanted) - 1}; {remedy}"
            )
    return placement


def slots_by_expert(slots: Sequence[int], experts: int) -> list[list[int]]:
    """Returns the slots of each of E experts, ascending."""
    slots_E: list[list[int]] = [[] for _ in range(experts)]
    for slot, expert in enumerate(slots):
        if expert != EMPTY:
            slots_E[expert].append(slot)
    return slots_E


def slots_of(expert: np.ndarray, turn: np.ndarray, slots: Sequence[int]) -> np.ndarray:
    """Returns the slot that computes each choice: of an expert's r slots number ``turn % r``.

    Args:
      expert: choices of any shape.
      turn: whole numbers that broadcast against them.
      slots: expert of each slot.
    """
    lists = slots_by_expert(slots, int(max(slots)) + 1)
    table_EX = np.array([[of[n % len(of)] for n in range(max(map(len, lists)))] for of in lists])
    count_E = np.array([len(of) for of in lists])
    return table_EX[expert, turn % count_E[expert]]


def device_load(load_E: np.ndarray, slots: Sequence[int], devices: int) -> np.ndarray:
    """Computes the expected load of each device, where an expert's slots share its load evenly."""
    slot_S = np.asarray(slots)
    held_S = slot_S != EMPTY
    replicas_E = np.bincount(slot_S[held_S], minlength=len(load_E))
    share_S = np.where(held_S, np.asarray(load_E, float)[slot_S] / np.maximum(replicas_E[slot_S], 1), 0.0)
    return share_S.reshape(devices, -1).sum(1)


def imbalance(load: np.ndarray) -> np.ndarray:
    """Computes the greatest load over the mean one along the last axis, 1 if all are equal or there is none.

    A layer lasts as long as its slowest device, so this is what uneven experts multiply its time by.
    """
    mean = np.mean(load, axis=-1)
    return np.where(mean > 0, np.max(load, axis=-1) / np.where(mean > 0, mean, 1), 1.0)


def contiguous(experts: int, devices: int, redundant: int = 0) -> Slots:
    """Places experts in their order, without replicas; slots that are left over are empty.

    Raises:
      ConfigError: the slots do not divide.
    """
    each, held = _slots_each(experts, devices, redundant), -(-experts // devices)
    rows = [[*range(n * held, min((n + 1) * held, experts))] for n in range(devices)]
    return tuple(e for row in rows for e in (*row, *[EMPTY] * (each - len(row))))


def balanced(load_E: Sequence[float], devices: int, redundant: int = 0) -> Slots:
    """Places one layer's experts with little load on the heaviest device, never more than the contiguous placement has.

    For every number of replicas that there is room for: the experts that are heaviest per replica get another one, as
    DeepSeek's EPLB does (github.com/deepseek-ai/EPLB; DeepSeek-V3, 2412.19437, section 3.4); the replicas go to
    devices by longest processing time first (Graham 1969), never two of one expert to the same device unless it has
    more than there are devices; then experts of the heaviest device are swapped while that makes it lighter.

    Args:
      load_E: of each expert, in any unit.
      devices: along the axis ``expert``.
      redundant: slots beyond the experts; those that help nothing stay empty.

    Raises:
      ConfigError: slots are not a multiple of devices.
    """
    load = np.asarray(load_E, float)
    each = _slots_each(len(load), devices, redundant)
    best = contiguous(len(load), devices, redundant)
    lightest = device_load(load, best, devices).max()
    replicas_E = np.ones(len(load), int)
    for added in range(redundant + 1):
        if added:
            wanted = np.where(replicas_E < devices, load / replicas_E, -1.0)
            if wanted.max() <= 0:
                break
            replicas_E[int(np.argmax(wanted))] += 1
        rows = _swapped(load / replicas_E, _packed(load / replicas_E, replicas_E, devices, each))
        slots = tuple(e for row in rows for e in sorted(row, key=lambda e: (e == EMPTY, e)))
        heaviest = device_load(load, slots, devices).max()
        if heaviest < lightest * (1 - 1e-9):
            best, lightest = slots, heaviest
    return best


def _slots_each(experts: int, devices: int, redundant: int) -> int:
    if devices < 1 or redundant < 0 or (experts + redundant) % devices:
        raise ConfigError(
            f"placement: {experts} experts and {redundant} redundant slots cannot be split evenly over {devices} "
            f"devices; {-experts % max(devices, 1)} redundant slots, or as many and a multiple of {devices}, can"
        )
    return (experts + redundant) // devices


def _packed(share_E: np.ndarray, replicas_E: np.ndarray, devices: int, each: int) -> list[list[int]]:
    """Returns the experts of each device, filled up with empty slots."""
    rows: list[list[int]] = [[] for _ in range(devices)]
    load = np.zeros(devices)
    for expert in np.argsort(-share_E, kind="stable").tolist():
        for _ in range(replicas_E[expert]):
            open_N = [n for n in range(devices) if len(rows[n]) < each]
            free = [n for n in open_N if expert not in rows[n]]
            if not free:
                # All that have room hold it already: a full device gives one of its own away and takes it. There is
                # such a device, and an expert that the one with room lacks, for it holds fewer.
                given, full = open_N[0], next(n for n in range(devices) if expert not in rows[n])
                moved = min(set(rows[full]) - set(rows[given]), key=lambda e: (share_E[e], e))
                rows[full].remove(moved)
                rows[given].append(moved)
                load[full] -= share_E[moved]
                load[given] += share_E[moved]
                free = [full]
            n = min(free, key=lambda n: (load[n], n))
            rows[n].append(expert)
            load[n] += share_E[expert]
    return [row + [EMPTY] * (each - len(row)) for row in rows]


def _swapped(share_E: np.ndarray, rows: list[list[int]]) -> list[list[int]]:
    """Swaps slots of the heaviest device with others as long as the heavier of both gets lighter."""
    expert_NC = np.array(rows)
    share = np.append(share_E, 0.0)  # EMPTY is the last place
    for _ in range(MOST_SWAPS * expert_NC.size):
        share_NC = share[expert_NC]
        load_N = share_NC.sum(1)
        heavy = int(np.argmax(load_N))
        own_C = expert_NC[heavy]
        less_CNC = share_NC[heavy][:, None, None] - share_NC[None]
        worse_CNC = np.maximum(load_N[heavy] - less_CNC, load_N[None, :, None] + less_CNC)
        comes_NC = (expert_NC[:, :, None] == own_C).any(2) & (expert_NC != EMPTY)
        goes_CN = (expert_NC[None] == own_C[:, None, None]).any(2) & (own_C != EMPTY)[:, None]
        worse_CNC = np.where(comes_NC[None] | goes_CN[:, :, None], np.inf, worse_CNC)
        worse_CNC[:, heavy] = np.inf
        c, n, k = np.unravel_index(int(np.argmin(worse_CNC)), worse_CNC.shape)
        if worse_CNC[c, n, k] >= load_N[heavy] * (1 - 1e-12):
            break
        expert_NC[heavy, c], expert_NC[n, k] = expert_NC[n, k], expert_NC[heavy, c]
    return expert_NC.tolist()
