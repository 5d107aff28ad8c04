"""Compiling for GPUs without one: left out where the plugin is not installed."""

import pytest

from jaxspec.aot import process


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = process.missing()
    for item in items:
        if why is not None and "tests/aot/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason=why))
