"""Runs functions of ours in a process that can compile for NVIDIA GPUs, on machines that have none."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.metadata import requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from jaxspec.errors import ConfigError

DIRECTORY = Path(sys.prefix) / "aot"
"""Where ``scripts/test`` installs JAX's CUDA plugin: apart from everything else, because on a machine without a GPU
every program that sees it complains."""

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
DUMP, LOG, MOSAIC = "JAXSPEC_AOT_DUMP", "log.txt", "mosaic"
FLAGS = ("--xla_gpu_autotune_level=0", "--xla_dump_hlo_as_text")
SPILLING_FAILS = "--xla_gpu_fail_ptx_compilation_on_register_spilling=true"
SPILL = re.compile(r"Registers are spilled to local memory in function '([^']+)', (\d+) bytes spill stores")
ERROR = re.compile(r"^[\w.]*(?:Error|Exception|UnsupportedKernel): ", re.MULTILINE)


def packages() -> list[str]:
    """Returns the packages that compile for a GPU: jaxspec's extra ``aot`` for this Python."""
    pins = []
    for requirement in map(Requirement, requires("jaxspec") or []):
        marker = requirement.marker
        if marker and marker.evaluate({"extra": "aot"}) and not marker.evaluate({"extra": ""}):
            pins.append(f"{requirement.name}{requirement.specifier}")
    return pins


def missing() -> str | None:
    """Says what to install before anything can be compiled for a GPU, None if everything is there."""
    if _installed(sys.path) or _installed([str(DIRECTORY)]):
        return None
    wanted = " ".join(f"'{package}'" for package in packages())
    return (
        "compiling for a GPU needs JAX's CUDA plugin, which is not installed; get it with: "
        f"{sys.executable} -m pip install --no-deps --target {DIRECTORY} {wanted}"
    )


def _installed(path: list[str]) -> bool:
    return any(PathFinder.find_spec(name, path) for name in PLUGINS)


def run(entry: str, *, gate: bool = False, timeout_s: float = 1800, **arguments: Any) -> Any:
    """Calls a function in a process of its own and returns what it returns.

    Args:
      entry: ``package.module:function``.
      gate: whether a kernel that spills registers is an error.
      timeout_s: after which the process is ended.
      **arguments: of the function; they and its result are JSON.

    Raises:
      ConfigError: the plugin is missing, or the function failed; the message ends in its last words.
    """
    why = missing()
    if why is not None:
        raise ConfigError(why)
    with tempfile.TemporaryDirectory(prefix="jaxspec-aot-") as name:
        directory = Path(name)
        (directory / MOSAIC).mkdir()
        request = {"entry": entry, "arguments": arguments, "reply": str(directory / "reply.json")}
        with (directory / LOG).open("wb") as log:
            try:
                done = subprocess.run(
                    [sys.executable, "-m", "jaxspec.aot.process"], input=json.dumps(request).encode(),
                    stdout=log, stderr=log, env=_environment(os.environ, directory, gate=gate), timeout=timeout_s,
                    check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                raise ConfigError(f"{entry}: compiling took longer than {timeout_s:.0f} s") from None
        if done.returncode:
            raise ConfigError(f"{entry}: {_last_words((directory / LOG).read_text(errors='replace'))}")
        return json.loads((directory / "reply.json").read_text())


def _environment(inherited: Mapping[str, str], directory: Path, *, gate: bool) -> dict[str, str]:
    """Returns what JAX and XLA read when they are imported."""
    path = [] if _installed(sys.path) else [str(DIRECTORY)]
    flags = [*FLAGS, f"--xla_dump_to={directory / 'dump'}", *([SPILLING_FAILS] if gate else [])]
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join([*path, *filter(None, [inherited.get("PYTHONPATH")])]),
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # what comes from a cache leaves no dump
        "TF_CPP_MIN_LOG_LEVEL": "0",  # spills are logged as information
        "XLA_FLAGS": " ".join(flags),
        DUMP: str(directory),
        "MOSAIC_GPU_DUMP_TO": str(directory / MOSAIC),
    }


def dump_file(program: str, *endings: str) -> str:
    """Reads a file that XLA left about a program compiled in this process.

    Args:
      program: name of the jitted function.
      *endings: of file names, best first.

    Raises:
      ConfigError: XLA left none of them.
    """
    dumps = Path(os.environ[DUMP]) / "dump"
    for ending in endings:
        files = sorted(dumps.glob(f"module_*.jit_{program}.*{ending}"))
        if files:
            return files[-1].read_text()
    raise ConfigError(f"XLA left no {' or '.join(endings)} of {program}")


def spills() -> dict[str, int]:
    """Returns the bytes of registers that each spilling kernel compiled in this process stores to memory."""
    text = (Path(os.environ[DUMP]) / LOG).read_text(errors="replace")
    return {name: int(size) for name, size in SPILL.findall(text)}


def mosaic_files() -> dict[str, dict[str, str]]:
    """Reads what Mosaic GPU left about each kernel compiled in this process since the last call, and removes it.

    Returns:
      By kernel the texts by ending: ``ptx``, ``ptxas`` and ``log``.
    """
    texts: dict[str, dict[str, str]] = {}
    for file in sorted((Path(os.environ[DUMP]) / MOSAIC).iterdir()):
        kernel = re.sub(r"_\d+\..*$", "", file.name)
        texts.setdefault(kernel, {})[file.suffix[1:]] = file.read_text()
        file.unlink()
    return texts


def target_text(gpu: str) -> str:
    """Reads the description of a GPU for XLA.

    Raises:
      ConfigError: there is none of that name.
    """
    package = Path(__file__).resolve().parent.parent
    folders = [root / "configs" / "hardware" / "targets" for root in (package, package.parent)]
    folder = next((one for one in folders if one.is_dir()), folders[0])
    known = sorted(file.stem for file in folder.glob("*.txtpb"))
    if gpu not in known:
        raise ConfigError(f"gpu {gpu!r} is not described; {folder} has {', '.join(known)}")
    return (folder / f"{gpu}.txtpb").read_text()


def target_name(gpu: str) -> str:
    """Returns what a described GPU calls itself.

    Raises:
      ConfigError: there is none of that name.
    """
    (name,) = re.findall(r'^device_description_str: "(.+)"$', target_text(gpu), re.MULTILINE)
    return name


def _last_words(log: str) -> str:
    """Returns the error that ended the process, without its traceback."""
    errors = list(ERROR.finditer(log))
    return log[errors[-1].start() :].strip() if errors else "\n".join(log.strip().splitlines()[-5:])


def main() -> None:
    """Answers the request on standard input."""
    request = json.load(sys.stdin)
    module, _, name = request["entry"].partition(":")
    result = getattr(import_module(module), name)(**request["arguments"])
    Path(request["reply"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
