"""Rewrites functions as simple Python: few names and literals, short blocks, the layout of ``ast.unparse``."""

import ast
import keyword
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from lab.upcycle.documents import number

LINES = (3, 16)
"""Fewest and most lines of a function."""
WIDTH = 72
ITEMS = 3
"""Most arguments, elements or targets in one place."""
STATEMENTS = 5
DEPTH = 3
"""Blocks within blocks."""
BUILTIN = (
    "self cls len str int list dict range print isinstance open sum min max sorted zip enumerate any all set tuple"
)
WORDS = "name key value path data item index text line error size result count code type user file start end mode"
NUMBERS = (0, 1, 2, 3, 4, 5, 8, 10, 16, 100)
PARTS = re.compile(r"[A-Z]?[a-z]+")
BANNED = (
    ast.Lambda, ast.AsyncFor, ast.AsyncWith, ast.Await, ast.YieldFrom, ast.Match, ast.TryStar, ast.NamedExpr,
    ast.Global, ast.Nonlocal, ast.ClassDef, ast.AsyncFunctionDef, ast.Set, ast.SetComp, ast.DictComp, ast.MatMult,
    ast.GeneratorExp,
)  # fmt: skip


def functions(text: str) -> Iterator[ast.FunctionDef]:
    """Yields the functions and methods of a file that are made of simple statements only."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            inner = [child for child in ast.walk(node) if child is not node]
            if not any(isinstance(child, (*BANNED, ast.FunctionDef)) for child in inner):
                yield node


def identifiers(node: ast.AST) -> Iterator[str]:
    """Yields every name in a function."""
    for child in ast.walk(node):
        for field in ("id", "attr", "arg", "name"):
            name = getattr(child, field, None)
            if isinstance(name, str):
                yield name


def parts(name: str) -> list[str]:
    """Splits a name into its words."""
    return [part.lower() for part in PARTS.findall(name)]


def common_names(counts: Counter[str], most: int) -> list[str]:
    """Returns the names that simple Python has: built-in ones, then the words that occur most often in names."""
    words: Counter[str] = Counter()
    for name, count in counts.items():
        for part in parts(name):
            words[part] += count
    fine = [word for word, _ in words.most_common() if len(word) > 2 and not keyword.iskeyword(word)]
    return list(dict.fromkeys([*BUILTIN.split(), *fine]))[:most]


class Simple(ast.NodeTransformer):
    """Rewrites one function.

    Attributes:
      names: allowed ones; every other becomes the last of its words that is allowed, or one by its number.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.allowed = names, set(names)
        self.errors = ("ValueError", "TypeError", "KeyError", "OSError")

    def name(self, name: str) -> str:
        """Returns the allowed name for a name."""
        if name in self.allowed or name in self.errors:
            return name
        if name.endswith(("Error", "Exception", "Warning")):
            return self.errors[number(name) % len(self.errors)]
        words = [part for part in parts(name) if part in self.allowed]
        return words[-1] if words else self.names[len(BUILTIN.split()) + number(name) % 64]

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Renames."""
        node.id = self.name(node.id)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Renames."""
        self.generic_visit(node)
        node.attr = self.name(node.attr)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        """Renames."""
        self.generic_visit(node)
        node.arg = node.arg and self.name(node.arg)
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        """Renames."""
        self.generic_visit(node)
        node.name = node.name and "error"
        return node

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        """Keeps a few plain arguments, each name once."""
        every = [*node.posonlyargs, *node.args, *node.kwonlyargs]
        names = list(dict.fromkeys(self.name(arg.arg) for arg in every))[: ITEMS + 1]
        with_default = min(len(node.defaults), 1 if len(names) > 1 else 0)
        defaults = [self.visit(default) for default in node.defaults[-1:] if isinstance(default, ast.Constant)]
        return ast.arguments(
            posonlyargs=[], args=[ast.arg(name) for name in names], kwonlyargs=[], kw_defaults=[],
            defaults=defaults[:with_default],
        )  # fmt: skip

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Takes one of a few literals."""
        value = node.value
        if isinstance(value, (str, bytes)):
            words, known = WORDS.split(), parts(str(value))
            fitting = [word for word in known if word in words]
            node.value = fitting[0] if fitting else words[number(str(value)) % len(words)] if value else ""
        elif isinstance(value, (int, float, complex)) and not isinstance(value, bool):
            node.value = value if value in NUMBERS else NUMBERS[number(str(value)) % len(NUMBERS)]
            node.value = int(abs(node.value))
        elif value is Ellipsis:
            node.value = None
        node.kind = None
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """Takes a plain string for a formatted one."""
        return self.visit(ast.Constant("".join(str(v.value) for v in node.values if isinstance(v, ast.Constant))))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        """Drops the annotation."""
        return None if node.value is None else self.visit(ast.Assign([node.target], node.value))

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Shortens every list of parts."""
        super().generic_visit(node)
        for field, most in (("args", ITEMS), ("keywords", 1), ("elts", ITEMS), ("keys", 2), ("values", 2)):
            if isinstance(getattr(node, field, None), list):
                setattr(node, field, getattr(node, field)[:most])
        if isinstance(node, ast.Compare):
            node.ops, node.comparators = node.ops[:1], node.comparators[:1]
        return node


def shorten(body: list[ast.stmt], depth: int) -> list[ast.stmt]:
    """Keeps the first statements of a block and of those within, without docstrings, imports and deep blocks."""
    left = []
    for statement in body:
        if isinstance(statement, (ast.Import, ast.ImportFrom, ast.Delete)):
            continue
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if hasattr(statement, "body"):
            if depth == DEPTH:
                continue
            for field in ("body", "orelse", "finalbody"):
                setattr(statement, field, shorten(getattr(statement, field, []), depth + 1))
            for handler in getattr(statement, "handlers", []):
                handler.body = shorten(handler.body, depth + 1) or [ast.Pass()]
            if not statement.body:  # pyright: ignore[reportAttributeAccessIssue]
                statement.body = [ast.Pass()]  # pyright: ignore[reportAttributeAccessIssue]
        left.append(statement)
    return left[:STATEMENTS]


def distinct(body: list[ast.stmt]) -> list[ast.stmt]:
    """Drops statements that a block has already, and ``x = x``: few names make many of them."""
    left: dict[str, ast.stmt] = {}
    for statement in body:
        for field in ("body", "orelse", "finalbody"):
            if inner := getattr(statement, field, None):
                setattr(statement, field, distinct(inner) or ([ast.Pass()] if field == "body" else []))
        nothing = isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == ast.unparse(
            statement.value
        )
        if not nothing:
            left.setdefault(ast.unparse(statement), statement)
    return list(left.values())


def simplify(function: ast.FunctionDef, names: Sequence[str]) -> str | None:
    """Returns a function's simple text, None where there is none within the limits."""
    function.decorator_list, function.returns, function.type_comment = [], None, None
    function.body = shorten(function.body, 0) or [ast.Pass()]
    rewrite = Simple(names)
    name = rewrite.name(function.name)
    try:
        function = ast.fix_missing_locations(rewrite.visit(function))
        function.name, function.body = name, distinct(function.body) or [ast.Pass()]
        text = ast.unparse(ast.fix_missing_locations(function)) + "\n"
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, AttributeError):
        return None
    lines = text.splitlines()
    fits = LINES[0] <= len(lines) <= LINES[1] and all(len(line) <= WIDTH and "\\" not in line for line in lines)
    return text if fits else None
