"""Finds tile sizes of kernels on this card: each field halved and doubled in turn, as long as it gets faster."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import jax

from lab.gpu.timing import Subject, interleaved, side_by_side, trace_chain
from pallas_kernels import blocks
from pallas_kernels.blocks import Key, Measured
from pallas_kernels.case import Case

COPIES = 4  # sets of arguments, so that weights come from memory and not from the cache
BETTER = 0.98  # of the time so far, or it is noise


@dataclass
class Group:
    """Cases of one operation that share tile sizes, because they differ in rows alone.

    Attributes:
      key: what the sizes depend on.
      cases: of it.
      default: sizes without a measurement.
    """

    key: Key
    cases: list[Case]
    default: Any


@dataclass(frozen=True)
class Tuned:
    """What was found for a group.

    Attributes:
      tiles: the fastest.
      time_us, default_time_us: of it and of the default, summed over the cases.
      skipped: candidates that cannot run, and why.
    """

    tiles: Any
    time_us: float
    default_time_us: float
    skipped: dict[str, str]


def groups(op: str, cases: list[Case], kernel: Any) -> list[Group]:
    """Cases by what their tile sizes depend on, found by tracing them; cases that look nothing up are left out."""
    by_key: dict[Key, Group] = {}
    for case in cases:
        jax.clear_caches()
        with blocks.listening(op) as asked:
            jax.eval_shape(case.call(kernel), *case.abstract())
        for key, default in asked[:1]:
            by_key.setdefault(key, Group(key, [], default)).cases.append(case)
    return list(by_key.values())


def neighbors(tiles: Any) -> Iterator[Any]:
    """Records that differ in one whole number, which is halved or doubled."""
    for f in fields(tiles):
        value = getattr(tiles, f.name)
        if is_dataclass(value):
            yield from (replace(tiles, **{f.name: inner}) for inner in neighbors(value))
        elif isinstance(value, int):
            yield from (replace(tiles, **{f.name: n}) for n in (value // 2, value * 2) if n >= 1)


def tune(
    op: str, group: Group, kernel: Any, *, tries: int, rounds: int = 5, round_s: float = 0.01, against: Any = None
) -> Tuned:
    """Searches from the default, the neighbors of the best one at a time; what does not compile or spills is skipped.

    Args:
      op: name of the operation.
      group: its cases.
      kernel: implementation.
      tries: most candidates.
      rounds: of a timing.
      round_s: of a round.
      against: implementation whose time stands for that of the default, None for the same.
    """
    arguments = {c.name: [c.random(jax.random.key(n)) for n in range(COPIES)] for c in group.cases}
    skipped: dict[str, str] = {}

    def measure(candidates: list[Any], by: Any = kernel) -> dict[Any, float]:
        """Microseconds of the candidates that run."""
        programs = _programs(op, group, by, candidates, arguments)
        times = {}
        for tiles in candidates:
            mine = {case.name: programs[tiles, case.name] for case in group.cases}
            errors = [e for e in mine.values() if isinstance(e, Exception)]
            if errors:
                skipped[str(tiles)] = f"{type(errors[0]).__name__}: {str(errors[0])[:200]}"
                continue
            subjects = [Subject(name, launch, COPIES) for name, launch in mine.items()]
            timings = interleaved(subjects, rounds=rounds, round_s=round_s)
            times[tiles] = 1e6 * sum(timing.median_s for timing in timings.values())
        return times

    tried, best = {group.default}, group.default
    times = measure([best])
    if not times:
        raise RuntimeError(skipped[str(best)])
    best_us = times[best]
    default_us = best_us if against is None else measure([best], against)[best]
    while candidates := [c for c in neighbors(best) if c not in tried][: tries + 1 - len(tried)]:
        tried.update(candidates)
        times = measure(candidates)
        fastest = min(times, key=times.__getitem__, default=best)
        if times.get(fastest, best_us) >= BETTER * best_us:
            break
        best, best_us = fastest, times[fastest]
    return Tuned(best, best_us, default_us, skipped)


def _programs(
    op: str, group: Group, kernel: Any, candidates: list[Any], arguments: dict[str, list[tuple[Any, ...]]]
) -> dict[tuple[Any, str], Any]:
    """Every case with every candidate, traced one after the other and compiled side by side; errors as values."""
    traced: dict[tuple[Any, str], Any] = {}
    for tiles in candidates:
        for case in group.cases:
            jax.clear_caches()
            with blocks.trying(op, tiles):
                try:
                    traced[tiles, case.name] = trace_chain(case.call(kernel), arguments[case.name])
                except Exception as error:
                    traced[tiles, case.name] = error
    return traced | side_by_side({key: value for key, value in traced.items() if not isinstance(value, Exception)})


def entry(group: Group, tuned: Tuned, *, card: str, date: str, command: str) -> Measured:
    """Returns what is written of a group."""
    return Measured(
        card, group.key.shape, group.key.form, date, command, round(tuned.time_us, 2), round(tuned.default_time_us, 2),
        differences(group.default, tuned.tiles),
    )  # fmt: skip


def differences(default: Any, tiles: Any) -> dict[str, Any]:
    """Fields of a record that are not the default's, nested ones as tables."""
    changed: dict[str, Any] = {}
    for f in fields(default):
        old, new = getattr(default, f.name), getattr(tiles, f.name)
        if old != new:
            changed[f.name] = differences(old, new) if is_dataclass(old) else new
    return changed


def merged(old: tuple[Measured, ...], new: list[Measured]) -> list[Measured]:
    """All entries; a new one takes the place of an old one for the same card, shape and form."""
    by_key = {(m.card, m.shape, m.form): m for m in (*old, *new)}
    return [by_key[key] for key in sorted(by_key)]


def as_toml(entries: list[Measured]) -> str:
    """The text of ``configs/kernels/<op>.toml``."""
    if not entries:
        return "measured = []\n"
    return "\n".join(_table(entry) for entry in entries)


def _table(entry: Measured) -> str:
    lines = ["[[measured]]"]
    for f in fields(entry):
        lines.append(f"{f.name} = {_value(getattr(entry, f.name))}")
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_value(inner)}" for name, inner in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
