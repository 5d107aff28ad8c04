"""Measures the source tree: sizes of rooms, files and functions, prose, parameters, constants, duplicates, names.

``python scripts/house_report.py [--json] [--root DIR]``; the house's tests read the same figures.
"""

import argparse
import ast
import io
import json
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLACES = ("jaxspec", "pallas_kernels", "lab", "scripts")
PACKAGES = ("jaxspec", "pallas_kernels")
SUPPRESSION = re.compile(r"#\s*(type:\s*ignore|(based)?pyright:)")
MANY_PARAMETERS, DUPLICATE_LINES, SHOWN = 8, 6, 8

AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Function:
    """One function.

    Attributes:
      where: file, line and name.
      lines: without decorators and docstring.
      parameters: without ``self`` and ``cls``.
      assigned: local names that it assigns.
    """

    where: str
    lines: int
    parameters: int
    assigned: frozenset[str]


@dataclass(frozen=True)
class Source:
    """What is measured of one Python file.

    Attributes:
      path: within the project.
      lines: in all.
      comments, prose: lines that carry a comment, and those of docstrings.
      suppressions: of the type checker.
      docstring: of the module.
      functions: in order.
      classes: public ones, at the top of the module.
      constants: public and private names in capitals that the module assigns.
      blocks: consecutive statements of at least ``DUPLICATE_LINES`` lines, by their syntax.
    """

    path: str
    lines: int
    comments: int
    prose: int
    suppressions: int
    docstring: str | None
    functions: tuple[Function, ...]
    classes: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    blocks: dict[str, str] = field(default_factory=dict)

    @property
    def room(self) -> str:
        """The package one level below ``jaxspec``, else the top directory."""
        top, *rest = self.path.split("/")
        return f"{top}/{rest[0]}" if top == "jaxspec" and len(rest) > 1 else top


def measure(file: Path, root: Path = ROOT) -> Source:
    """Reads one Python file."""
    text, path = file.read_text(encoding="utf-8"), file.relative_to(root).as_posix()
    tree = ast.parse(text)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [t.string for t in tokens if t.type == tokenize.COMMENT and not t.string.startswith("#!")]
    nodes = list(ast.walk(tree))
    functions = [node for node in nodes if isinstance(node, AnyFunction)]
    named = [target.id for node in tree.body for target in _targets(node) if isinstance(target, ast.Name)]
    return Source(
        path=path,
        lines=len(text.splitlines()),
        comments=len(comments),
        prose=sum(_docstring_lines(node) for node in nodes),
        suppressions=sum(bool(SUPPRESSION.match(c)) for c in comments),
        docstring=ast.get_docstring(tree),
        functions=tuple(_function(node, path) for node in functions),
        classes=tuple(n.name for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")),
        constants=tuple(name for name in named if name.isupper()),
        blocks={key: f"{path}:{line}" for node in functions for key, line in _blocks(node)},
    )


def _function(node: AnyFunction, path: str) -> Function:
    args = node.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    names = [arg.arg for arg in every if arg.arg not in ("self", "cls")]
    lines = (node.end_lineno or node.lineno) - node.lineno + 1 - _docstring_lines(node)
    assigned = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return Function(f"{path}:{node.lineno} {node.name}", lines, len(names), frozenset(assigned))


def _docstring_lines(node: ast.AST) -> int:
    if not isinstance(node, ast.Module | ast.ClassDef | AnyFunction) or ast.get_docstring(node) is None:
        return 0
    return (node.body[0].end_lineno or 0) - node.body[0].lineno + 1


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.AnnAssign):
        return [node.target]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]


def _blocks(node: AnyFunction) -> Iterator[tuple[str, int]]:
    """Yields the syntax and first line of each run of statements that is just long enough to count."""
    body = node.body[ast.get_docstring(node) is not None :]
    for first in range(len(body)):
        for last in range(first, len(body)):
            if (body[last].end_lineno or 0) - body[first].lineno + 1 >= DUPLICATE_LINES:
                yield "\n".join(ast.dump(one) for one in body[first : last + 1]), body[first].lineno
                break


def survey(*places: str, root: Path = ROOT) -> list[Source]:
    """Measures every Python file below the given directories of the project."""
    return [measure(file, root) for place in places for file in sorted((root / place).rglob("*.py"))]


def by_room(sources: Sequence[Source]) -> dict[str, list[Source]]:
    """Groups files by the room that they stand in."""
    rooms: dict[str, list[Source]] = defaultdict(list)
    for source in sources:
        rooms[source.room].append(source)
    return dict(rooms)


def duplicates(sources: Sequence[Source]) -> list[list[str]]:
    """Returns the places of blocks that stand more than once, with the same names and values."""
    places: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        for key, place in source.blocks.items():
            places[key].append(place)
    return [same for same in places.values() if len(same) > 1]


def double_classes(sources: Sequence[Source]) -> dict[str, list[str]]:
    """Returns public classes of one name with the files that define them."""
    files: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        for name in source.classes:
            files[name].append(source.path)
    return {name: paths for name, paths in sorted(files.items()) if len(paths) > 1}


def report(root: Path = ROOT) -> dict[str, Any]:
    """Returns every figure of the report."""
    sources = survey(*PLACES, "tests", root=root)
    ours = [s for s in sources if s.path.startswith(PACKAGES)]
    functions = sorted((f for s in sources for f in s.functions), key=lambda f: -f.lines)
    rooms = {}
    for room, files in sorted(by_room(sources).items()):
        lines = sorted(s.lines for s in files)
        rooms[room] = {
            "files": len(files), "lines": sum(lines), "median": lines[len(lines) // 2],
            "docstrings": round(sum(s.prose for s in files) / max(1, sum(lines)), 3),
            "comments": round(sum(s.comments for s in files) / max(1, sum(lines)), 3),
            "constants": sum(len(s.constants) for s in files),
        }  # fmt: skip
    names = Counter(name for s in ours for f in s.functions for name in f.assigned)
    return {
        "packages": sum(s.lines for s in ours),
        "rooms": rooms,
        "longest files": [f"{s.lines:5}  {s.path}" for s in sorted(sources, key=lambda s: -s.lines)[:SHOWN]],
        "longest functions": [f"{f.lines:5}  {f.where}" for f in functions[:SHOWN]],
        "functions with many parameters": [
            f"{f.parameters:5}  {f.where}"
            for f in sorted((f for s in ours for f in s.functions), key=lambda f: -f.parameters)
            if f.parameters > MANY_PARAMETERS
        ],
        "duplicated blocks": [" = ".join(places) for places in duplicates(ours)],
        "classes of one name": [f"{name}: {', '.join(files)}" for name, files in double_classes(ours).items()],
        "most assigned names": [f"{count:5}  {name}" for name, count in names.most_common(SHOWN)],
        "suppressions": sum(s.suppressions for s in sources),
    }


def show(figures: dict[str, Any]) -> None:
    """Prints the report for people."""
    print(f"{'room':24}{'files':>6}{'lines':>8}{'median':>8}{'docstrings':>12}{'comments':>10}{'constants':>11}")
    for room, r in figures["rooms"].items():
        print(
            f"{room:24}{r['files']:6}{r['lines']:8}{r['median']:8}{r['docstrings']:12.1%}{r['comments']:10.1%}"
            f"{r['constants']:11}"
        )
    for name, value in figures.items():
        if isinstance(value, list):
            print(f"\n{name} ({len(value)})", *value, sep="\n")
    print(f"\njaxspec and pallas_kernels: {figures['packages']} lines")
    print(f"type-checker suppressions: {figures['suppressions']}")


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the report."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    args = parser.parse_args(argv)
    figures = report(args.root.resolve())
    if args.json:
        print(json.dumps(figures, indent=1))
    else:
        show(figures)


if __name__ == "__main__":
    main()
