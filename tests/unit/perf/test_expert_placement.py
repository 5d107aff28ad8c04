"""Placements share the load out: equal slots, every expert somewhere, no device lighter for nothing."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.errors import ConfigError
from jaxspec.perf.expert_placement import (
    EMPTY,
    LayerSlots,
    Placement,
    balanced,
    contiguous,
    device_load,
    imbalance,
    load_placement,
    save_placement,
    slots_by_expert,
    slots_of,
)


@st.composite
def cases(draw) -> tuple[list[int], int, int]:
    """Loads of some experts, devices, and redundant slots that divide."""
    load = draw(st.lists(st.one_of(st.just(0), st.integers(0, 20), st.integers(0, 1000)), min_size=1, max_size=14))
    devices = draw(st.integers(1, 6))
    return load, devices, -len(load) % devices + devices * draw(st.integers(0, 3))


@given(cases())
def test_every_placement_is_sound_and_none_is_worse_than_the_contiguous_one(case):
    load, devices, redundant = case
    slots = balanced(load, devices, redundant)
    rows = np.array(slots).reshape(devices, -1)
    replicas = [len(of) for of in slots_by_expert(slots, len(load))]
    assert len(slots) == len(load) + redundant
    assert min(replicas) >= 1
    assert max(replicas) <= devices
    for row in rows.tolist():
        held = [e for e in row if e != EMPTY]
        assert len(held) == len(set(held)), "two replicas on one device"
    plain = device_load(np.array(load), contiguous(len(load), devices, redundant), devices)
    found = device_load(np.array(load), slots, devices)
    assert found.sum() == pytest.approx(sum(load))
    assert found.max() <= plain.max() * (1 + 1e-9)


def test_loads_that_can_be_shared_out_evenly_are():
    assert imbalance(device_load(np.array([9, 1, 8, 2]), balanced([9, 1, 8, 2], 2), 2)) == 1
    shared = balanced([12, 3, 3, 3, 3], 4, 3)
    assert (shared.count(0), shared.count(EMPTY)) == (2, 2), "as few replicas as will do"
    assert imbalance(device_load(np.array([12, 3, 3, 3, 3]), shared, 4)) == 1
    assert balanced([9, 0, 0, 0], 4, 4).count(0) == 4, "the heavy expert is everywhere"
    assert balanced([1, 1, 1, 1], 2, 2).count(EMPTY) == 2, "what helps nothing stays empty"
    assert imbalance(np.zeros(4)) == 1


def test_longest_first_alone_would_pack_this_worse():
    """Greedy packing gives 3 + 2 + 2 = 7 and 3 + 2 = 5 here; one swap makes it 6 and 6."""
    assert device_load(np.array([3, 3, 2, 2, 2, 0]), balanced([3, 3, 2, 2, 2, 0], 2), 2).tolist() == [6, 6]


def test_replicas_take_turns():
    slots = (0, 1, 2, 0, 3, EMPTY)
    expert, turn = np.array([[0, 3], [0, 1], [2, 0]]), np.array([[4], [5], [7]])
    assert slots_of(expert, turn, slots).tolist() == [[0, 4], [3, 1], [2, 3]]


def test_slots_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"8 experts and 0 redundant slots .* over 3 devices; 1 redundant slots"):
        balanced([1.0] * 8, 3)


def test_files_are_read_strictly(tmp_path: Path):
    file = tmp_path / "placement.json"
    whole = Placement(1, {"name": "tiny", "config_digest": "d"}, 2, 0, (LayerSlots(1, (3, 0, 2, 1)),), "words")
    save_placement(whole, file)
    assert load_placement(file) == whole
    refusals = {
        '{"version": 2}': "version 2, this program reads 1",
        "[]": "not a placement",
        file.read_text().replace("3", "2"): r"layer 1 has 4 slots for 2 devices.*experts 0 to 3",
        file.read_text().replace('"devices": 2', '"devices": 3'): "4 slots for 3 devices",
    }
    for text, words in refusals.items():
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            load_placement(file)
    with pytest.raises(ConfigError, match="--output"):
        load_placement(tmp_path / "nothing.json")
