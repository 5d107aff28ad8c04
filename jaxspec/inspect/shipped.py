"""The configs of published models that ship with jaxspec, and those of directories and files."""

import os
from pathlib import Path
from typing import Any

from jaxspec.checkpoint.files.model_files import read_json
from jaxspec.checkpoint.load.model import read_config
from jaxspec.config import shipped
from jaxspec.errors import ConfigError
from jaxspec.serve.demo_pair import DEMO, resolve_model


def model_config(wanted: str) -> tuple[str, dict[str, Any]]:
    """Returns name and config of a shipped name (``qwen3-30b-a3b``), a file, a directory, a hub id, or ``demo``.

    Raises:
      ConfigError: there is no such thing, or it is not a JSON object.
    """
    path = resolve_model(wanted) if wanted == DEMO else Path(wanted)
    if "/" in wanted and not os.path.lexists(path):
        path = resolve_model(wanted, weights=False)
        return wanted.rpartition("/")[2], read_config(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        known = {file.stem: file for file in sorted(shipped("models").glob("*.json"), key=lambda file: file.stem)}
        if wanted.lower() not in known:
            raise ConfigError(
                f"model {wanted!r}: neither a config.json nor a model directory nor a hub id such as "
                f"Qwen/Qwen3-30B-A3B nor one of {', '.join(known)}"
            )
        file = known[wanted.lower()]
    config = read_config(path) if path.is_dir() else read_json(file)
    if wanted == DEMO:
        return DEMO, config
    return path.resolve().name if path.is_dir() else file.stem, config
