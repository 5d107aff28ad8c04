"""Takes English prose out of Debian's documentation packages and writes it as one compressed file.

Run ``python -m lab.upcycle.prose DEBS OUT``: DEBS is a directory of .deb files (``apt-get download``).
"""

import argparse
import gzip
import json
import lzma
import re
import subprocess
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

SHARE = {
    "python3.11-doc": 5, "python-django-doc": 4, "python-sqlalchemy-doc": 3, "postgresql-doc-15": 5, "sqlite3-doc": 3,
    "manpages-dev": 2, "manpages": 1, "nodejs-doc": 1, "python-flask-doc": 1, "python-pytest-doc": 1,
    "python-werkzeug-doc": 1, "python-celery-doc": 1, "python-scrapy-doc": 1, "apache2-doc": 2, "sphinx-doc": 1,
    "twisted-doc": 2, "python-sklearn-doc": 3, "python-pandas-doc": 1, "python-sympy-doc": 1, "fortunes": 1,
    "wordnet-base": 2,
}  # fmt: skip
"""Most megabytes of text from each package."""

SKIPPED = {"script", "style", "nav", "head", "header", "footer", "table", "form", "svg"}
BLOCKS = {"p", "div", "li", "h1", "h2", "h3", "h4", "pre", "dt", "dd", "section", "br", "tr"}


class Page(HTMLParser):
    """Collects the visible text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: list) -> None:
        """Counts what is not shown, and breaks lines at blocks."""
        self.hidden += tag in SKIPPED
        if tag in BLOCKS:
            self.parts.append("\n\n" if tag in ("p", "pre", "h1", "h2", "h3", "h4") else "\n")

    def handle_endtag(self, tag: str) -> None:
        """Ends what is not shown."""
        self.hidden -= tag in SKIPPED

    def handle_data(self, data: str) -> None:
        """Keeps visible text."""
        if not self.hidden:
            self.parts.append(data)


def from_page(text: str) -> str:
    """Returns the visible text of an HTML page."""
    page = Page()
    page.feed(text)
    return "".join(page.parts)


def from_manual(text: str) -> str:
    """Returns the words of a manual page, without its macros."""
    lines = []
    for line in text.splitlines():
        if line.startswith((".SH", ".SS")):
            lines.append("\n" + line[4:].strip().strip('"') + "\n")
        elif line.startswith((".PP", ".P", ".LP", ".TP", ".IP", ".HP")):
            lines.append("\n")
        elif line.startswith((".B", ".I", ".R")):
            lines.append(" ".join(line.split()[1:]).replace('"', ""))
        elif not line.startswith((".", "'")):
            lines.append(line)
    text = re.sub(r"\\f(?:\[\w*\]|\(..|.)|\\&|\\s[-+]?\d|\\,|\\/", "", "\n".join(lines))
    return text.replace("\\-", "-").replace("\\e", "\\").replace("\\(aq", "'")


def _read(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8", "replace")


def _readers(root: Path) -> Iterator[tuple[str, str]]:
    sources = [p for p in root.rglob("*") if re.search(r"\.(rst|txt|md)(\.gz)?$", p.name)]
    sources = [p for p in sources if re.search(r"_sources|\.md|\.rst", str(p))]
    for path in sorted(sources):
        yield str(path.relative_to(root)), _read(path)
    if not sources:
        for path in sorted(root.rglob("*.htm*")):
            if path.is_file():
                yield str(path.relative_to(root)), from_page(_read(path))
    for path in sorted(root.rglob("man[1-8]/*.gz")):
        if path.is_file():
            yield str(path.relative_to(root)), from_manual(_read(path))
    for path in sorted(root.rglob("games/fortunes/*")):
        if path.is_file() and not path.suffix:
            yield str(path.relative_to(root)), _read(path).replace("\n%\n", "\n\n")
    for path in sorted(root.rglob("wordnet/data.*")):
        yield from _glosses(path)


def _glosses(path: Path) -> Iterator[tuple[str, str]]:
    """Yields a dictionary's entries, a hundred a document."""
    entries = []
    for line in path.read_text(errors="replace").splitlines():
        if line.startswith(" ") or "|" not in line:
            continue
        numbers, gloss = line.split("|", 1)
        word = numbers.split()[4].replace("_", " ")
        entries.append(f"{word}: {gloss.strip()}")
    for first in range(0, len(entries), 700):
        yield f"{path.name}/{first}", "\n".join(entries[first : first + 700 : 7])


def clean(text: str) -> str:
    """Drops trailing spaces, runs of empty lines and lines that are mostly signs."""
    lines = []
    for line in text.splitlines():
        letters = sum(c.isalnum() or c.isspace() for c in line)
        if not line.strip() or letters >= 0.6 * len(line):
            lines.append(line.rstrip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def documents(debs: Path) -> Iterator[tuple[str, str]]:
    """Yields name and text of the packages' documents, each package up to its share."""
    for package, megabytes in SHARE.items():
        (deb,) = debs.glob(f"{package}_*.deb")
        left, seen = megabytes * 1_000_000, set()
        with tempfile.TemporaryDirectory() as directory:
            subprocess.run(["dpkg", "-x", str(deb), directory], check=True)
            texts = [(name, clean(text)) for name, text in _readers(Path(directory))]
        texts.sort(key=lambda pair: hash_of(pair[0]))
        for name, text in texts:
            if 400 < len(text) < 200_000 and text not in seen and left > 0 and "changelog" not in name.lower():
                seen.add(text)
                left -= len(text)
                yield f"{package}/{name}", text


def hash_of(name: str) -> int:
    """A fixed number of a name, which orders documents and picks the held-out ones."""
    import hashlib

    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("debs", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    lines = [json.dumps({"name": n, "text": t}, ensure_ascii=False) for n, t in documents(args.debs)]
    args.out.write_bytes(lzma.compress("\n".join(lines).encode(), preset=7))
    print(len(lines), "documents", sum(map(len, lines)), "characters", args.out.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
