"""The house report counts what it says, on a small tree made by hand."""

import json
from pathlib import Path

import pytest

from scripts.house_report import double_classes, duplicates, main, survey

FILE = '''"""A room."""

LIMIT, _floor = 3, 1
SCALE: float = 2.0  # a comment


class Thing:
    """A thing."""

    def act(self, a, b, *, c=1):
        """Acts.

        Twice.
        """
        found = a + b
        return found * c


def total(values):
    result = 0
    for value in values:
        if value > LIMIT:
            result += value
        else:
            result -= value
    return result
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for room in ("one", "two"):
        (tmp_path / "jaxspec" / room).mkdir(parents=True)
        (tmp_path / "jaxspec" / room / "file.py").write_text(FILE)
    return tmp_path


def test_a_file_is_measured(root: Path):
    one, two = survey("jaxspec", root=root)
    assert (one.path, one.room, one.lines) == ("jaxspec/one/file.py", "jaxspec/one", FILE.count("\n"))
    assert (one.comments, one.prose, one.constants, one.classes) == (1, 1 + 1 + 4, ("LIMIT", "SCALE"), ("Thing",))
    act, total = sorted(one.functions, key=lambda function: function.where)
    assert (act.parameters, act.lines, act.assigned) == (3, 3, {"found"})
    assert (total.parameters, total.lines, total.assigned) == (1, 8, {"result", "value"})
    assert double_classes([one, two]) == {"Thing": [one.path, two.path]}
    assert duplicates([one, two])[0] == [f"{one.path}:20", f"{two.path}:20"]


def test_it_prints(root: Path, capsys: pytest.CaptureFixture[str]):
    main(["--root", str(root)])
    assert "jaxspec/one" in capsys.readouterr().out
    main(["--root", str(root), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["packages"] == 2 * FILE.count("\n")
    assert report["rooms"]["jaxspec/two"]["constants"] == 2
