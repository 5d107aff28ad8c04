"""Measures the source tree: lines per room, longest files and functions, comments, suppressions."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACES = ("jaxspec", "pallas_kernels", "lab", "scripts")
SUPPRESSION = re.compile(r"#\s*(type:\s*ignore|(based)?pyright:)")


@dataclass(frozen=True)
class Function:
    """One function: where it is and its lines without decorators and docstring."""

    where: str
    lines: int


@dataclass(frozen=True)
class Source:
    """What is measured of one Python file; ``comments`` counts lines that carry a comment."""

    path: str
    lines: int
    comments: int
    suppressions: int
    docstring: str | None
    functions: tuple[Function, ...]

    @property
    def room(self) -> str:
        """The package one level below ``jaxspec``, else the top directory."""
        top, *rest = self.path.split("/")
        return f"{top}/{rest[0]}" if top == "jaxspec" and len(rest) > 1 else top


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from ``def`` to the end, without the docstring."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node) is not None:
        lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    return lines


def measure(file: Path) -> Source:
    """Reads one Python file."""
    text, path = file.read_text(), file.relative_to(ROOT).as_posix()
    tree = ast.parse(text)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [t.string for t in tokens if t.type == tokenize.COMMENT and not t.string.startswith("#!")]
    functions = tuple(
        Function(f"{path}:{node.lineno} {node.name}", function_lines(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    suppressions = sum(bool(SUPPRESSION.match(c)) for c in comments)
    return Source(path, len(text.splitlines()), len(comments), suppressions, ast.get_docstring(tree), functions)


def survey(*places: str) -> list[Source]:
    """Measures every Python file below the given directories of the project."""
    return [measure(file) for place in places for file in sorted((ROOT / place).rglob("*.py"))]


def by_room(sources: list[Source]) -> dict[str, list[Source]]:
    """Groups files by the room that they stand in."""
    rooms: dict[str, list[Source]] = defaultdict(list)
    for source in sources:
        rooms[source.room].append(source)
    return dict(rooms)


def main() -> None:
    """Prints the report."""
    sources = survey(*PLACES, "tests")
    print(f"{'room':24}{'files':>6}{'lines':>8}{'median':>8}{'comments':>10}")
    for room, files in sorted(by_room(sources).items()):
        lines = sorted(f.lines for f in files)
        share = sum(f.comments for f in files) / max(1, sum(lines))
        print(f"{room:24}{len(files):6}{sum(lines):8}{lines[len(lines) // 2]:8}{share:10.1%}")
    print("\nlongest files")
    for source in sorted(sources, key=lambda s: -s.lines)[:8]:
        print(f"{source.lines:6}  {source.path}")
    print("\nlongest functions")
    for function in sorted((f for s in sources for f in s.functions), key=lambda f: -f.lines)[:8]:
        print(f"{function.lines:6}  {function.where}")
    print(f"\ntype-checker suppressions: {sum(s.suppressions for s in sources)}")


if __name__ == "__main__":
    main()
