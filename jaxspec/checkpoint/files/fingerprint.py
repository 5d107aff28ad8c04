"""Fingerprints that tell model directories apart without reading all of their weights."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.errors import ConfigError

READ_WHOLE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
PROBE_BYTES = 1 << 16


def fingerprint(directory: str | Path | None) -> str:
    """Computes a fingerprint of a model: small files count whole, weight files by size and three probes."""
    digest = hashlib.sha256()
    folder = Path(directory or os.devnull)
    files = [*(folder / name for name in READ_WHOLE), *sorted(folder.glob("*.safetensors"))]
    for file in [folder] if folder.is_file() else files:
        if not file.is_file():
            continue
        try:
            with file.open("rb") as data:
                size = file.stat().st_size
                digest.update(f"{file.name} {size} ".encode())
                for offset in [None] if file.name in READ_WHOLE else [0, size // 2, max(size - PROBE_BYTES, 0)]:
                    data.seek(offset or 0)
                    digest.update(data.read(-1 if offset is None else PROBE_BYTES))
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()[:32]


def digests(config: Mapping[str, Any], directory: Path | None = None) -> dict[str, str]:
    """Computes SHA-256 of a config's content, and of the names and sizes of a directory's weight files."""
    hashes = {"config_digest": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()}
    if directory is not None:
        weights = [directory] if directory.is_file() else sorted(directory.glob("*.safetensors"))
        files = [(file.name, file.stat().st_size) for file in weights]
        hashes["files_digest"] = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    return hashes
