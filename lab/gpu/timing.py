"""Times programs side by side: warm, many launches before one wait, in interleaved rounds, median reported."""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from jaxspec.sharding.compiler_options import compiler_options

T = TypeVar("T")
ROUNDS = 7
ROUND_S = 0.02


@dataclass(frozen=True)
class Subject:
    """Something to time.

    Attributes:
      name: of it.
      launch: starts one program and returns what ``wait`` waits for; it does not wait itself.
      calls: how often the measured operation runs in one program, each time on buffers of its own.
      wait: for all that was started.
    """

    name: str
    launch: Callable[[], Any]
    calls: int = 1
    wait: Callable[[Any], Any] = jax.block_until_ready


@dataclass(frozen=True)
class Timing:
    """Time of one call.

    Attributes:
      median_s, least_s, most_s: over the rounds.
    """

    median_s: float
    least_s: float
    most_s: float


def interleaved(subjects: Sequence[Subject], *, rounds: int = ROUNDS, round_s: float = ROUND_S) -> dict[str, Timing]:
    """Times subjects in turns, so that a drifting clock meets all of them alike.

    Each round starts as many programs of a subject as fill ``round_s`` and waits once: what the host does for a
    program overlaps with the programs before it.

    Args:
      subjects: programs that are compiled.
      rounds: of every subject.
      round_s: how long one subject runs in a round, about.
    """
    counts = {s.name: _warm(s, round_s) for s in subjects}
    times: dict[str, list[float]] = {s.name: [] for s in subjects}
    for number in range(rounds):
        for subject in subjects if number % 2 == 0 else reversed(subjects):
            count = counts[subject.name]
            times[subject.name].append(_run(subject, count) / (count * subject.calls))
    return {name: Timing(statistics.median(taken), min(taken), max(taken)) for name, taken in times.items()}


def _warm(subject: Subject, round_s: float) -> int:
    """Runs a subject until it is warm; returns how many of its programs fill a round."""
    _run(subject, 1)
    once = min(_run(subject, 1) for _ in range(2))
    return min(max(round(round_s / max(once, 1e-6)), 1), 1000)


def _run(subject: Subject, count: int) -> float:
    began = time.perf_counter()
    handle = None
    for _ in range(count):
        handle = subject.launch()
    subject.wait(handle)
    return time.perf_counter() - began


def chained(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Callable[[], Any]:
    """Compiles one program that calls a function once per set of arguments, one call after another.

    The sets should be larger together than the card's last cache, or later programs would read from it. The
    arguments differ, so XLA shares nothing between calls, and there is no loop whose turns it could take apart.

    Args:
      function: of trees of arrays.
      arguments: one tuple per call; arrays that are the same object become one parameter of the program.
    """
    return trace_chain(function, arguments)()


def trace_chain(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Callable[[], Callable[[], Any]]:
    """Traces what ``chained`` compiles; returns what compiles it and returns what launches it."""
    leaves, tree = jax.tree.flatten(list(arguments))
    distinct = {id(leaf): leaf for leaf in leaves}
    places = {key: place for place, key in enumerate(distinct)}
    order = [places[id(leaf)] for leaf in leaves]
    held = tuple(distinct.values())

    def program(*arrays: Any) -> list[Any]:
        return [function(*args) for args in jax.tree.unflatten(tree, [arrays[place] for place in order])]

    lowered = jax.jit(program).lower(*held)

    def compile_it() -> Callable[[], Any]:
        compiled = lowered.compile(compiler_options())
        return lambda: compiled(*held)

    return compile_it


def side_by_side(jobs: Mapping[T, Callable[[], Any]]) -> dict[T, Any]:
    """Results of functions that compile, run in threads because XLA does not hold the interpreter; errors as values."""

    def run(job: Callable[[], Any]) -> Any:
        try:
            return job()
        except Exception as error:
            return error

    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
        return dict(zip(jobs, pool.map(run, jobs.values()), strict=True))
