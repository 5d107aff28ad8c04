"""A file is whole or not there, however writing it ends."""

from pathlib import Path

import pytest

from jaxspec import whole_file
from jaxspec.whole_file import write_whole


def test_it_is_whole_or_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "plan.json"
    write_whole(file, "first")
    monkeypatch.setattr(whole_file.os, "replace", lambda *names: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_whole(file, b"second")
    assert file.read_text() == "first"
    assert [found.name for found in tmp_path.iterdir()] == ["plan.json"]
