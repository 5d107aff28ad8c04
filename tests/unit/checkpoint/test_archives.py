"""PyTorch archives that were spoilt, by damage or on purpose, end in one error and are never unpacked or waited for."""

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.checkpoint.files.pickled import pickled_tensors
from jaxspec.checkpoint.heads.tensors import HeadFiles
from jaxspec.errors import CheckpointError
from tests.unit.checkpoint.model_edits import replaced
from tests.unit.checkpoint.mutations import SPECIAL
from tests.unit.checkpoint.test_heads_import import _Pickler, _Stub, _Tensor, write_archive

NAME = "pytorch_model.bin"


def archive(file: Path, offset: Any = 0, shape: Any = (4,), stride: Any = (1,), storage: Any = None) -> None:
    """One tensor of four numbers, whose record says something else."""
    kind = _Stub("torch", "FloatStorage")
    out = io.BytesIO()
    record = storage or ("storage", kind, "0", "cpu", 4)
    _Pickler(out, 2).dump({"x": _Tensor(record, offset, shape, stride, False, {})})
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as made:
        made.writestr("archive/data/0", bytes(16))
        made.writestr("archive/data.pkl", out.getvalue())


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"shape": (-4,)}, "negative size or offset"),
        ({"offset": -1}, "negative size or offset"),
        ({"offset": 2}, "does not fit"),
        ({"shape": (2**62, 2**62), "stride": (2**62, 1)}, "does not fit"),
        ({"shape": (2**70,)}, "does not fit"),
        ({"shape": (4.0,)}, "not a readable PyTorch archive"),
        ({"shape": "four"}, "not a readable PyTorch archive"),
        ({"shape": None}, "not a readable PyTorch archive"),
        ({"storage": {"no": "storage"}}, "something other than arrays of numbers"),
        ({"storage": ("storage", _Stub("torch", "FloatStorage"), "0", "cpu", 2**70)}, "does not fit"),
        ({"storage": ("storage", _Stub("torch", "FloatStorage"), "9", "cpu", 4)}, "not a readable PyTorch archive"),
        ({"storage": ("storage", "FloatStorage", "0", "cpu", 4)}, "something other than arrays of numbers"),
    ],
)
def test_records_that_cannot_be(record: dict[str, Any], words: str, tmp_path: Path):
    archive(tmp_path / NAME, **record)
    with pytest.raises(CheckpointError, match=words):
        pickled_tensors(tmp_path / NAME)


def _nested(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("archive/data.pkl", b"\x80\x02" + b"(" * 10**6)


def _bomb(file: Path) -> None:
    """A few hundred kB that unpack to as many MB."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("archive/data.pkl", bytes(200_000_000))


def _without_data(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("other/thing", b"")


def _flipped(file: Path) -> None:
    archive(file)
    data = bytearray(file.read_bytes())
    data[-40:] = bytes(40)
    file.write_bytes(data)


def _deflated(file: Path) -> None:
    write_archive(file, {"x": np.ones((2, 2), np.float32)})
    with zipfile.ZipFile(file) as old:
        held = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in held.items():
            made.writestr(name, data)


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nested": (_nested, "not a readable PyTorch archive"),
    "bomb": (_bomb, "data.pkl has more than 100000000 bytes"),
    "no data": (_without_data, "no data.pkl"),
    "damaged directory": (_flipped, "not a readable PyTorch archive"),
    "compressed": (_deflated, "it is compressed"),
    "empty": (lambda file: file.write_bytes(b""), "not a readable PyTorch archive"),
    "old format": (lambda file: file.write_bytes(pickle.dumps({"x": 1})), "not a readable PyTorch archive"),
}


@pytest.mark.parametrize("what", FILES)
def test_files_that_are_no_archives(what: str, tmp_path: Path):
    make, words = FILES[what]
    make(tmp_path / NAME)
    with pytest.raises(CheckpointError, match=words) as caught:
        pickled_tensors(tmp_path / NAME)
    assert "weights_only=True" in str(caught.value), "what to do"


@pytest.mark.parametrize("what", SPECIAL)
def test_what_is_no_regular_file_is_not_opened(what: str, tmp_path: Path):
    make, words = SPECIAL[what]
    directory = tmp_path / "head"
    directory.mkdir()
    replaced(NAME, make)(directory)
    with pytest.raises(CheckpointError, match=f"{NAME}: {words}"):
        HeadFiles(directory)


def test_names_beside_it_do_not_matter(tmp_path: Path):
    write_archive(tmp_path / NAME, {"fc.weight": np.ones((2, 2), np.float32)})
    os.mkfifo(tmp_path / "model.pt")
    assert list(HeadFiles(tmp_path)) == ["fc.weight"]
