"""Sets JAX up before anything imports it: CPU, eight virtual devices, strict dtypes, one compile cache."""

import gc
import itertools
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import settings

from scripts.golden_files import unpack_goldens

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxspec" / "tests"
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_COMPILATION_CACHE_DIR": str(CACHE),
    # A bounded cache is also a locked one, so that the pytest workers can share it.
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(2 << 30),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    # What is lowered need not know its source lines.
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    "HF_HUB_OFFLINE": "1",
}
MOST_MAPS_OF_FILES, MOST_MAPS = 10_000, 20_000
TESTS, BETWEEN_COUNTS = itertools.count(), 8
DEVICES = "--xla_force_host_platform_device_count"

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could set it up; find what did it")
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)
if DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}=8".strip()

settings.register_profile("house", deadline=None, derandomize=True, database=None)
settings.load_profile("house")


def pytest_configure(config: pytest.Config) -> None:
    """Unpacks the goldens; takes halves of entries, which a killed run leaves and JAX fails on, out of the cache."""
    if hasattr(config, "workerinput"):
        return
    unpack_goldens()
    cache = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    if not cache.is_dir():
        return
    with FileLock(cache / ".lockfile"):
        for entry in cache.glob("*-cache"):
            if not entry.with_name(entry.name.removesuffix("cache") + "atime").exists():
                entry.unlink()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spares a run of the served tests the import of files that have none."""
    only_served = str(config.getoption("markexpr")).startswith("served")
    skipped = only_served and collection_path.suffix == ".py" and "mark.served" not in collection_path.read_text()
    return skipped or None


def pytest_collection_finish() -> None:
    """Spares the garbage collector what is imported by now, and most of its rounds: tracing makes little garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Every test starts from the same global seeds."""
    random.seed(0)
    np.random.seed(0)


def make_room(most_maps: int) -> None:
    """Drops compiled programs where they hold more of the process's memory maps.

    Linux allows a process 65 530 maps and every XLA:CPU program holds three; when they run out, LLVM crashes. Programs
    that hold 10 000 take some 3 GB.
    """
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > most_maps:
        sys.modules["jax"].clear_caches()
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def room_for_other_files() -> Iterator[None]:
    """Makes room where little is lost: what tests of a file share is not compiled again."""
    yield
    make_room(MOST_MAPS_OF_FILES)


@pytest.fixture(autouse=True)
def room_for_programs() -> Iterator[None]:
    """Makes room within a file that compiles very much; counting what a process has takes a while, so not each time."""
    yield
    if next(TESTS) % BETWEEN_COUNTS == 0:
        make_room(MOST_MAPS)
