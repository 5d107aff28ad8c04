"""What the house calls things: each check returns its offenders, one line each.

``python -m tests.house.language [PART_OF_A_PATH ...]`` prints all of them.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from scripts.house_report import PLACES, ROOT

Function = ast.FunctionDef | ast.AsyncFunctionDef
OPENINGS = ("What", "Which", "Where", "How", "Of", "That", "Those", "Who", "Why")
# Place and progress, not time or order.
ALLOWED_BEHIND = re.compile(
    r"\b(left?|leaves?|fall|falls|fell|nothing) behind\b|\bbehind (a|the) (door|flag|lock|switch)\b"
)
BRITISH = re.compile(
    r"(?:quant|normal|initial|optim|penal|serial|token|parallel|special|summar|recogn|organ|minim|maxim|util|general"
    r"|synchron|vector|final|local|priorit|character|randomi|linear|sanit|visual|emphas|material)is(?:e[ds]?|ing|ations?|ers?)\b"
    r"|behaviour|neighbour|colour|favour|honour|flavour|labour|centre|metre\b|analys(?:e[ds]?|ing)\b|catalogue|artefact|whilst|learnt\b"
    r"|labell|modell(?:ed|ing)|travell|signall|cancell(?:ed|ing)\b|grey\b|programme\b|licence",
    re.IGNORECASE,
)
SPELLED_ELSEWHERE = re.compile(r"CancelledError|cancelled\(")  # Python's own names
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
UNEDITED = {"lab-notebook.md"}  # is only ever added to


@cache
def modules() -> dict[str, ast.Module]:
    """Returns the parsed files of the packages and scripts by their paths."""
    files = (file for place in PLACES for file in sorted((ROOT / place).rglob("*.py")))
    return {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text()) for file in files}


@cache
def lines() -> list[tuple[str, str]]:
    """Returns every line of code and pages, with where it stands."""
    files = [ROOT / path for path in modules()] + [page for page in PAGES if page.name not in UNEDITED]
    return [
        (f"{file.relative_to(ROOT).as_posix()}:{number}", line)
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), start=1)
    ]


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Yields the syntax of these kinds, with where it stands."""
    for path, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, kinds):
                yield f"{path}:{getattr(node, 'lineno', 0)}", node


def locals_called_found() -> list[str]:
    """Finds names that say nothing of what was found."""
    bodies = (field for _, node in nodes(ast.ClassDef) for field in node.body)
    fields = {id(field.target) for field in bodies if isinstance(field, ast.AnnAssign)}
    names = ((where, node) for where, node in nodes(ast.Name) if id(node) not in fields)
    stored = (where for where, node in names if node.id == "found" and isinstance(node.ctx, ast.Store))
    arguments = (where for where, node in nodes(ast.arg) if node.arg == "found")
    return [*stored, *arguments]


def classes_of_one_name() -> list[str]:
    """Finds public classes of jaxspec that share their name with another."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, module in modules().items():
        for node in module.body:
            if path.startswith("jaxspec/") and isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
    return [f"{', '.join(where)} {name}" for name, where in sorted(places.items()) if len(where) > 1]


def files_of_one_name() -> list[str]:
    """Finds files of neighboring rooms with one name; a file of the command line has its subcommand's name."""
    places: dict[tuple[Path, str], list[str]] = defaultdict(list)
    for path in map(Path, modules()):
        if path.parts[0] == "jaxspec" and len(path.parts) > 2 and path.name != "__init__.py" and path.parts[1] != "cli":
            places[path.parent.parent, path.name].append(path.as_posix())
    return [", ".join(where) for where in places.values() if len(where) > 1]


def behind_for_after() -> list[str]:
    """Finds "behind" where English says after, past, beyond or following."""
    return [
        f"{where} {line.strip()}" for where, line in lines() if re.search(r"\bbehind\b", ALLOWED_BEHIND.sub("", line))
    ]


def british_spellings() -> list[str]:
    """Finds words that American English spells otherwise."""
    return [
        f"{where} {', '.join(words)}"
        for where, line in lines()
        if (words := [word for word in re.findall(r"\w+", SPELLED_ELSEWHERE.sub("", line)) if is_british(word)])
    ]


@cache
def is_british(word: str) -> bool:
    """Returns whether American English spells a word otherwise."""
    return BRITISH.search(word) is not None


def docstrings_without_a_verb() -> list[str]:
    """Finds functions whose docstring opens with a clause instead of a verb."""
    texts = ((where, ast.get_docstring(node)) for where, node in nodes(ast.FunctionDef, ast.AsyncFunctionDef))
    return [
        f"{where} {text.splitlines()[0]}"
        for where, text in texts
        if text and re.split(r"\W", text, maxsplit=1)[0] in OPENINGS
    ]


def methods_without_a_docstring() -> list[str]:
    """Finds public methods that neither say what they do nor stand in for one, of a base or a protocol, that does."""
    classes = {node.name: node for _, node in nodes(ast.ClassDef)}
    protocols = [node for node in classes.values() if any("Protocol" in ast.unparse(base) for base in node.bases)]

    def documented(node: ast.ClassDef) -> set[str]:
        bases = [classes[name] for base in node.bases if (name := ast.unparse(base).split("[")[0]) in classes]
        own = {f.name for f in node.body if isinstance(f, Function) and ast.get_docstring(f)}
        return own.union(*map(documented, bases))

    promised = set().union(*map(documented, protocols))
    return [
        f"{path}:{method.lineno} {node.name}.{method.name}"
        for path, module in modules().items()
        for node in module.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        for method in node.body
        if isinstance(method, Function) and not method.name.startswith("_")
        if method.name not in documented(node) | promised
        if not any("setter" in ast.unparse(d) or "overload" in ast.unparse(d) for d in method.decorator_list)
    ]


CHECKS = (
    locals_called_found, classes_of_one_name, files_of_one_name, behind_for_after, british_spellings,
    docstrings_without_a_verb, methods_without_a_docstring,
)  # fmt: skip


def main(parts: list[str]) -> None:
    """Prints the offenders of every check, all or those whose line has one of the parts."""
    for check in CHECKS:
        offenders = [line for line in check() if not parts or any(part in line for part in parts)]
        title = f"\n{check.__name__.replace('_', ' ')}: {len(offenders)}"
        sys.stdout.write("\n  ".join([title, *offenders]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
