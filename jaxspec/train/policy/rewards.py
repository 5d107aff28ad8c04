"""Verifiable rewards: what a program can say of a continuation."""

import ast
import warnings
from collections.abc import Callable

Reward = Callable[[str, str], float]  # of a prompt and its continuation
LEAST_LINES = 2


def parses(prompt: str, text: str) -> float:
    """Returns 1 where prompt and continuation, up to the last whole line, are Python that parses; else 0.

    A continuation of fewer than two lines of code counts as none: it would parse for having said nothing.
    """
    whole, _, _ = text.rpartition("\n")
    code = [line for line in whole.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return float(len(code) >= LEAST_LINES and is_python(prompt + whole + "\n"))


def is_python(source: str) -> bool:
    """Whether a text parses."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


REWARDS: dict[str, Reward] = {"parses": parses}
