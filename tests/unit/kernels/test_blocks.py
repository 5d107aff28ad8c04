"""Tile sizes come from measurements of the same card, and files that say anything unknown are refused."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lab.gpu.tuning import as_toml, differences, merged, neighbors
from pallas_kernels import blocks
from pallas_kernels.blocks import BadTiles, Key, Measured, parse


@dataclass(frozen=True)
class Inner:
    warps: int = 4


@dataclass(frozen=True)
class Tiles:
    rows: int = 16
    inner: Inner = field(default_factory=Inner)


ENTRY = Measured("card", "D8", "fp8", "2027-01-31", "tuner", 2.5, 3.0, {"rows": 32, "inner": {"warps": 8}})
OTHER = Measured("another", "D8", "fp8", "2027-01-31", "tuner", 2.5, 3.0, {"rows": 64})


@pytest.fixture
def op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a file for an operation and makes this process compute on ``card``."""
    monkeypatch.setattr(blocks, "folder", lambda: tmp_path)
    monkeypatch.setattr(blocks, "card", lambda: "card")
    blocks.measured.cache_clear()
    yield lambda text: (tmp_path / "op.toml").write_text(text)
    blocks.measured.cache_clear()


def look_up(shape: str = "D8", form: str = "fp8") -> Tiles:
    return blocks.look_up("op", Tiles(), shape=shape, form=form)


def test_measured_sizes_of_this_card_shape_and_form(op):
    op(as_toml([OTHER, ENTRY]))
    assert look_up() == Tiles(32, Inner(8))
    assert look_up(shape="D16") == look_up(form="int8") == Tiles()


def test_without_a_file_or_entries_the_default(op):
    assert look_up() == Tiles()
    blocks.measured.cache_clear()
    op(as_toml([]))
    assert look_up() == Tiles()


@pytest.mark.parametrize("tiles", [{"height": 2}, {"rows": 0}, {"rows": True}, {"rows": 1.5}, {"inner": {"x": 1}}])
def test_unknown_and_wrong_sizes_are_refused(op, tiles):
    op(as_toml([Measured(**{**vars(ENTRY), "tiles": tiles})]).replace("True", "true"))
    with pytest.raises(BadTiles, match=r"op: tiles of D8 fp8.*(not known|at least 1)"):
        look_up()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("measured = 3", "list measured"),
        ("", "list measured"),
        ("measured = []\nmore = 1", "more"),
        ("measured = [", "TOML"),
        ("[[measured]]\ncard = 'x'", "time_us"),
        (as_toml([ENTRY]) + "speed = 3\n", "speed"),
        (as_toml([ENTRY]).replace("2.5", "'fast'"), "time_us"),
        (as_toml([ENTRY, ENTRY]), "more than one"),
    ],
)
def test_files_that_say_anything_else_are_refused(text: str, said: str):
    with pytest.raises(BadTiles, match=said):
        parse(text, "op.toml")


def test_shipped_files_are_readable_and_belong_to_operations():
    files = sorted(blocks.folder().glob("*.toml"))
    assert files
    for file in files:
        assert (Path(blocks.__file__).parent / file.stem.removesuffix("_mosaic") / "api.py").exists(), file.name
        parse(file.read_text(), file.name)


def test_a_trial_replaces_the_answer_and_a_listener_hears_the_question(op):
    with blocks.trying("op", Tiles(64)):
        assert look_up() == Tiles(64)
    with blocks.trying("another", Tiles(64)):
        assert look_up() == Tiles()
    with blocks.listening("op") as asked:
        look_up()
    assert asked == [(Key("D8", "fp8"), Tiles())]
    assert look_up() == Tiles()


def test_the_tuner_writes_what_is_read(op):
    again = Measured(**{**vars(ENTRY), "time_us": 1.0})
    assert list(parse(as_toml(merged((OTHER, ENTRY), [again])), "")) == [OTHER, again]
    assert differences(Tiles(), Tiles(32, Inner(8))) == ENTRY.tiles
    assert set(neighbors(Tiles())) == {Tiles(8), Tiles(32), Tiles(16, Inner(2)), Tiles(16, Inner(8))}
