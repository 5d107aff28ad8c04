"""The JSON of ``lab/gpu_suite.py``, strictly: names that are not here, or are missing, are errors."""

from typing import Any, Literal

import msgspec


class Check(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    passed: bool
    detail: str


class Skipped(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    reason: str


class Section(msgspec.Struct, forbid_unknown_fields=True):
    status: Literal["done", "failed", "cut", "skipped"]
    reason: str | None
    time_s: float
    tables: dict[str, list[dict[str, Any]]]
    checks: list[Check]
    skipped: list[Skipped]


class Machine(msgspec.Struct, forbid_unknown_fields=True):
    cpu: str
    cores: int
    backend: str
    device: str
    versions: dict[str, str]


class Report(msgspec.Struct, forbid_unknown_fields=True):
    version: Literal[1]
    date: str
    command: str
    commit: str
    tiny: bool
    budget_s: float
    time_s: float
    machine: Machine | None
    sections: dict[str, Section]


ROWS = {
    "bandwidth": {"name", "bytes_per_s"},
    "matmul": {"name", "size", "flop_per_s"},
    "calls": {"model", "rows", "time_s", "least_s", "most_s", "read_bytes", "bytes_per_s", "share_of_copy"},
    "prompts": {"case", "kernel", "time_s", "least_s"},
    "weights": {"model", "bytes"},
    "cells": {
        "model", "rows", "drafts", "context", "step_s", "read_bytes", "bound_s", "fraction_of_bound", "verify_ratio",
        "plain_tok_per_s", "byte_ratio", "dispatch_of_one_step_s", "host_s", "launches_per_step",
    },
    "speedups": {
        "model", "rows", "drafts", "acceptance_length", "source", "speedup_with_free_drafts", "break_even_length",
    },
}  # fmt: skip


def read(text: str | bytes) -> Report:
    """A report, its rows complete.

    Raises:
      ValueError: it is not one.
    """
    report = msgspec.json.decode(text, type=Report)
    for name, section in report.sections.items():
        for table, rows in section.tables.items():
            lacking = [sorted(ROWS.get(table, {"a known table"}) - row.keys()) for row in rows]
            if any(lacking):
                raise ValueError(f"{name}: rows of {table} lack {lacking}")
    return report
