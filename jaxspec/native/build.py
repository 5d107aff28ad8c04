"""Compiles the kernels for this machine at their first use, with what C compiler there is, and keeps the library."""

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jax

FLAGS = ("-O2", "-ftree-vectorize", "-std=gnu11", "-fPIC", "-Wno-psabi", "-Wno-ignored-optimization-argument")
AVX2 = ("-mavx2", "-mfma")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl")
AVX512_BF16 = (*AVX512, "-mavx512bf16")
SETS = {  # the best one first
    "amx": (*AVX512_BF16, "-mamx-tile", "-mamx-bf16"),
    "avx512_bf16": AVX512_BF16,
    "avx512": AVX512,
    "avx2": AVX2,
    "plain": (),
}
NEEDED = {
    "amx": {"avx512f", "avx512bw", "avx512vl", "avx512_bf16", "amx_tile", "amx_bf16"},
    "avx512_bf16": {"avx512f", "avx512bw", "avx512vl", "avx512_bf16"},
    "avx512": {"avx512f", "avx512bw", "avx512vl"},
    "avx2": {"avx2", "fma"},
    "plain": set(),
}
SOURCE = Path(__file__).parent


@dataclass(frozen=True)
class Library:
    """The compiled kernels, or why there are none.

    Attributes:
      handle: None if there are none.
      instructions: key of ``SETS``.
      reason: which compiler made it, or what is missing.
    """

    handle: ctypes.CDLL | None
    instructions: str
    reason: str


def instructions() -> list[str]:
    """Returns the sets of instructions that this CPU has, the best one first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ["plain"]
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split("flags", 2)[1].split("\n")[0].split())
    except (OSError, IndexError):
        return ["plain"]
    return [name for name, needed in NEEDED.items() if needed <= flags]


def compiler() -> list[str] | None:
    """Returns the command of a C compiler: ``$CC``, a system's, or that of the ``ziglang`` wheel; None without any."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path:
            return [path]
    return [sys.executable, "-m", "ziglang", "cc"] if importlib.util.find_spec("ziglang") else None


@functools.cache
def library(name: str = "", source: Path = SOURCE) -> Library:
    """Loads the kernels, compiling them if this machine has not yet.

    Args:
      name: key of ``SETS``; the best one that this CPU has if empty.
      source: directory of the C files.
    """
    name = name or instructions()[0]
    command = compiler()
    path = _path(name, source)
    if not path.exists():
        if command is None:
            return Library(None, name, "no C compiler: install one, or `pip install ziglang`")
        failure = _compile(command, name, source, path)
        if failure:
            return Library(None, name, failure)
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        return Library(None, name, f"{path.name} cannot be loaded ({error})")
    if not handle.jaxspec_usable():  # the system does not lend the matrix unit
        return library(instructions()[instructions().index(name) + 1], source)
    handle.jaxspec_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return Library(handle, name, f"compiled for {name}")


def _path(name: str, source: Path) -> Path:
    """Returns where the library lies: apart for other sources, headers, flags and machines."""
    digest = hashlib.sha256(repr((FLAGS, SETS[name], jax.__version__, platform.platform())).encode())
    for file in sorted(source.glob("*.[ch]")):
        digest.update(file.read_bytes())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxspec" / "native"
    return folder / f"{name}-{digest.hexdigest()[:16]}.so"


def _compile(command: list[str], name: str, source: Path, path: Path) -> str:
    """Compiles into ``path``, which is there as a whole or not at all; returns what went wrong, or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            sources = [str(path) for path in sorted(source.glob("*.c"))]
            flags = [*FLAGS, *SETS[name], "-I", jax.ffi.include_dir(), "-shared", "-pthread", "-o", str(made)]
            done = subprocess.run(
                [*command, *flags, *sources, "-lm"], capture_output=True, text=True, timeout=300, check=False
            )
            if done.returncode:
                lines = (done.stderr.strip() or "no message").splitlines()
                return f"{command[0]} failed: {next((line for line in lines if 'error:' in line), lines[-1])}"
            os.replace(made, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return ""
