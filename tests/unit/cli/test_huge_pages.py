import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec.cli import huge_pages
from jaxspec.cli.interrupts import INTERRUPTS
from jaxspec.cli.main import main

SAYS = """
import os, sys
from jaxspec.cli.huge_pages import restart_with_huge_pages
restart_with_huge_pages()
print(os.environ["GLIBC_TUNABLES"], sys.argv[1:])
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list:
    """What is started in place of the process, with its environment; the kernel gives huge pages to who asks."""
    calls: list = []
    modes = tmp_path / "enabled"
    modes.write_text("always [madvise] never\n")
    monkeypatch.setattr(huge_pages, "MODES", modes)
    monkeypatch.setattr(os, "execv", lambda *given: calls.append((*given, os.environ[huge_pages.TUNABLES])))
    monkeypatch.setenv(huge_pages.TUNABLES, "")
    monkeypatch.setenv(huge_pages.RESTARTED, "")  # so that it is absent again after the test
    monkeypatch.delenv(huge_pages.RESTARTED)
    return calls


@pytest.mark.parametrize(
    ("given", "then"),
    [("", "glibc.malloc.hugetlb=1"), ("glibc.malloc.check=0", "glibc.malloc.check=0:glibc.malloc.hugetlb=1")],
)
def test_training_starts_anew_with_the_same_command(
    started: list, monkeypatch: pytest.MonkeyPatch, given: str, then: str
):
    monkeypatch.setenv(huge_pages.TUNABLES, given)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "jaxspec", "train", "eagle3"])
    huge_pages.restart_with_huge_pages()
    assert started == [(sys.executable, [sys.executable, "-m", "jaxspec", "train", "eagle3"], then)]


@pytest.mark.parametrize("tunables", ["glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=1"])
def test_what_is_asked_for_already_stays(started: list, monkeypatch: pytest.MonkeyPatch, tunables: str):
    monkeypatch.setenv(huge_pages.TUNABLES, tunables)
    huge_pages.restart_with_huge_pages()
    assert started == []


def test_it_starts_anew_once_even_where_the_variable_is_taken_away(started: list, monkeypatch: pytest.MonkeyPatch):
    huge_pages.restart_with_huge_pages()
    monkeypatch.setenv(huge_pages.TUNABLES, "")
    huge_pages.restart_with_huge_pages()
    assert len(started) == 1


@pytest.mark.parametrize("modes", ["[always] madvise never\n", "always madvise [never]\n", None])
def test_a_kernel_that_gives_them_to_all_or_none_is_not_asked(started: list, modes: str | None):
    huge_pages.MODES.unlink()
    if modes:
        huge_pages.MODES.write_text(modes)
    huge_pages.restart_with_huge_pages()
    assert started == []


def test_only_the_command_line_of_a_process_starts_it_anew(started: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(INTERRUPTS, "watch", lambda: None)  # which is for the rest of a process
    assert main(["train", "nothing"]) != 0
    assert started == []
    monkeypatch.setattr(sys, "argv", ["jaxspec", "plot"])
    main()
    assert started == []
    monkeypatch.setattr(sys, "argv", ["jaxspec", "train", "nothing"])
    main()
    assert len(started) == 1


@pytest.mark.skipif(
    not huge_pages.MODES.is_file() or "[madvise]" not in huge_pages.MODES.read_text(), reason="not given to who asks"
)
def test_a_real_process_has_them_and_its_arguments():
    ours = huge_pages.TUNABLES, huge_pages.RESTARTED
    quiet = {name: value for name, value in os.environ.items() if name not in ours}
    run = subprocess.run(
        [sys.executable, "-c", SAYS, "a", "b c"], env=quiet, capture_output=True, text=True, check=True
    )
    assert run.stdout == "glibc.malloc.hugetlb=1 ['a', 'b c']\n"
