"""Slices of parameters are made of slices of published arrays, and the rest of a file is not read."""

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.checkpoint.files.stream import TensorFiles, TensorName
from jaxspec.checkpoint.names.packs import PACKS

G, R, C, D, F = 4, 2, 3, 5, 8
# Pack, published shapes, parameter, and for each axis of it whether a slice of it is one of the published arrays.
CASES = [
    ("copy", [(D, F)], (D, F), (True, True)),
    ("rows", [(F, D)], (F, D), (True, True)),
    ("transpose", [(F, D)], (D, F), (True, True)),
    ("qkv", [(G * R * C, D), (G * C, D), (G * C, D)], (D, G, R + 2, C), (True, True, False, False)),
    ("qkv", [(G * R * C,), (G * C,), (G * C,)], (G, R + 2, C), (False, False, False)),
    ("out", [(D, G * C)], (G, C, D), (True, False, True)),
    ("from_rank", [(G * C, F)], (F, G, C), (True, True, False)),
    ("head_rows", [(G * C, F)], (G, C, F), (True, False, True)),
    ("gate_up", [(F, D), (F, D)], (D, 2, F), (True, False, True)),
    ("by_turns", [(D, 2 * F)], (D, 2, F), (True, False, True)),
    ("columns", [(D, 2 * F)], (D, 2, F), (True, True, False)),
    ("query_key", [(G * R * C, D), (G * C, D)], (D, G, R + 1, C), (True, True, False, False)),
    ("heads", [(G * C,)], (G, C), (False, False)),
    ("each", [(D,), (D,)], (2, D), (False, False)),
]


@pytest.mark.parametrize(("name", "published", "shape", "cuttable"), CASES, ids=[f"{c[0]}-{len(c[2])}" for c in CASES])
def test_a_slice_is_made_of_slices(name: str, published: list, shape: tuple[int, ...], cuttable: tuple[bool, ...]):
    pack, rng = PACKS[name], np.random.default_rng(0)
    arrays = [rng.integers(0, 99, s) for s in published]
    whole, size = pack.join(arrays, shape), sum(a.nbytes for a in arrays)
    for axis, may in enumerate(cuttable):
        half = shape[axis] // 2
        index = tuple(slice(half, 2 * half) if i == axis else slice(None) for i in range(len(shape)))
        cut, small, left = pack.cut(arrays, shape, index)
        assert np.array_equal(pack.join(cut, small)[left], whole[index])
        assert sum(a.nbytes for a in cut) == (size * half // shape[axis] if may else size)


def test_heads_that_a_slice_does_not_divide_are_read_whole():
    arrays = [np.arange(6 * D).reshape(6, D)]
    cut, small, left = PACKS["transpose"].cut(arrays, (D, 4), (slice(None), slice(0, 2)))
    assert (cut[0].shape, small, left) == ((6, D), (D, 4), (slice(None), slice(0, 2)))


def mapped_bytes(file: Path) -> int:
    """Bytes of a file that this process has touched."""
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    return sum(
        int(m[1]) * 1024 for part in maps if str(file) in part if (m := re.search(r"^Rss: +(\d+) kB", part, re.M))
    )


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says which pages are mapped")
def test_the_other_half_is_not_touched(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    size = 1 << 20
    save_file({"gate": np.ones((1024, 256), np.float32), "up": np.ones((1024, 256), np.float32)}, file)
    files = TensorFiles.of(tmp_path)
    index = (slice(None), slice(None), slice(512, 1024))
    cut, small, left = PACKS["gate_up"].cut([files["gate"], files["up"]], (256, 2, 1024), index)
    assert PACKS["gate_up"].join(cut, small)[left].sum() == size // 4
    assert mapped_bytes(file) <= 1.2 * size, "of twice as much"
    for name in files:
        files.release(TensorName(name), size // 2)
    assert files.released.total() == size
