"""Finds the texts that training reads: Python installed on the machine, and carried prose."""

import hashlib
import json
import lzma
import re
import sysconfig
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

PERMISSIVE = re.compile(
    r"\b(MIT|BSD|Apache|ISC|PSF|Python Software Foundation|MPL|Mozilla Public|Unlicense|Zlib|HPND|CC0|0BSD)\b", re.I
)
OTHER = re.compile(r"\b(A?GPL|LGPL|GNU|Proprietary|NVIDIA|Commercial)", re.I)
KEPT = re.compile(r"^(nvidia|cuda|tensorrt|cupy)", re.I)
PARTS = 10
"""One package of so many is held out, if it is a small one."""
FILES = 100
"""One file of so many is held out of the other packages."""
LARGE = 6_000_000


@dataclass(frozen=True)
class Document:
    """A text and where it is from."""

    name: str
    text: str


def number(name: str) -> int:
    """Returns a fixed number of a name, by which texts are held out and ordered."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)


def entries(package: Distribution, name: str) -> list[str]:
    """Returns the entries of a name in a package's metadata."""
    return list(map(str, package.metadata.get_all(name) or []))


def is_permissive(package: Distribution) -> bool:
    """Says whether the metadata name a permissive license and no other."""
    said = [*entries(package, "License-Expression"), *(entry[:200] for entry in entries(package, "License"))]
    said += [entry for entry in entries(package, "Classifier") if entry.startswith("License")]
    text = "\n".join(said)
    return bool(PERMISSIVE.search(text)) and not OTHER.search(text)


def read(path: Path) -> str | None:
    """Returns a source file's text, None for what is no code to learn from: tables, generated or odd files."""
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if not 300 < len(text) < 400_000:
        return None
    lines = text.count("\n") + 1
    letters = sum(map(str.isalpha, text[:20_000])) / min(len(text), 20_000)
    return text if len(text) / lines < 90 and letters > 0.4 else None


def packages() -> dict[str, list[tuple[str, Path]]]:
    """Returns name and path of the Python files of every permissive package, and of the standard library."""
    files_of = {}
    for package in distributions():
        name = "".join(entries(package, "Name")[:1]).lower()
        if not name or KEPT.match(name) or not is_permissive(package):
            continue
        files = [file for file in package.files or () if file.suffix == ".py" and ".." not in file.parts]
        files_of.setdefault(name, [(f"{name}/{file}", Path(str(file.locate()))) for file in files])
    root = Path(sysconfig.get_path("stdlib"))
    paths = [p for p in root.rglob("*.py") if not {"site-packages", "dist-packages", "idlelib"} & set(p.parts)]
    files_of["python"] = [(f"python/{path.relative_to(root)}", path) for path in paths]
    return {name: sorted(files) for name, files in sorted(files_of.items()) if files}


def python() -> dict[str, list[Document]]:
    """Returns the texts of all packages: ``train``, ``packages`` (of packages held out) and ``files`` (held out)."""
    sets: dict[str, list[Document]] = {"packages": [], "files": [], "train": []}
    files_of, seen = packages(), set()
    texts = {name: [Document(n, t) for n, p in files if (t := read(p))] for name, files in files_of.items()}
    held = {
        n for n, docs in texts.items() if number(n) % PARTS == 0 and 20_000 < sum(len(d.text) for d in docs) < LARGE
    }
    inside = {d.name.split("/")[1] for name in held for d in texts[name]}
    for name in sorted(texts, key=lambda name: name not in held):
        for document in texts[name]:
            digest = hashlib.sha256(document.text.encode()).digest()
            if digest in seen:
                continue
            seen.add(digest)
            vendored = name not in held and inside & set(Path(document.name).parts)
            kind = "packages" if name in held else "files" if number(document.name) % FILES == 0 else "train"
            if not vendored:
                sets[kind].append(document)
    return sets


def carried(path: Path) -> dict[str, list[Document]]:
    """Reads documents of a compressed file: ``train`` and ``prose`` (held out)."""
    sets: dict[str, list[Document]] = {"train": [], "prose": []}
    for line in lzma.decompress(path.read_bytes()).decode().splitlines():
        document = Document(**json.loads(line))
        sets["prose" if number(document.name) % 40 == 0 else "train"].append(document)
    return sets
