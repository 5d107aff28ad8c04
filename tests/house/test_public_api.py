"""The names that jaxspec promises to its users are those of public_api.txt."""

from pathlib import Path

import jaxspec

SNAPSHOT = Path(__file__).with_name("public_api.txt")


def test_public_names_are_promised():
    names = sorted(jaxspec.__all__)
    assert names == SNAPSHOT.read_text().split(), (
        f"jaxspec.__all__ differs from {SNAPSHOT.name}. If that is meant, write these names there, "
        "one per line, and tell users in CHANGELOG.md:\n" + "\n".join(names)
    )


def test_public_names_exist():
    assert [name for name in jaxspec.__all__ if getattr(jaxspec, name, None) is None] == []
