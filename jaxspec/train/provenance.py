"""Provenance of a trained head, written beside its weights for whoever finds them later."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxspec import __version__
from jaxspec.checkpoint.files.fingerprint import fingerprint
from jaxspec.errors import ConfigError
from jaxspec.train.settings import RunSettings, identity


def provenance_of(settings: RunSettings, target: Path, corpus_digest: str) -> dict[str, Any]:
    """Returns target, data, settings and version; files by name, not by where they lie on this machine."""
    asked, data, name = identity(settings), settings.data, target.resolve().name
    asked["target"] = name
    asked["data"] |= {key: [Path(file).name for file in asked["data"][key]] for key in ("train", "held_out")}
    return {
        "jaxspec": __version__,
        "target": {"name": name, "fingerprint": fingerprint(target)},
        "data": {"train": _files(data.train), "held_out": _files(data.held_out), "digest": corpus_digest},
        "settings": asked,
    }


def _files(names: Iterable[str]) -> list[dict[str, str]]:
    return [{"name": Path(name).name, "sha256": _digest(Path(name))} for name in names]


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as data:
            return hashlib.file_digest(data, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"data: {file} cannot be read ({error.strerror})") from error
