"""The configs of published models that ship with jaxspec, and those of directories and files."""

import json
from typing import Any

from jaxspec.config import shipped
from jaxspec.errors import ConfigError
from jaxspec.serve.demo_pair import DEMO, resolve_model


def model_config(wanted: str) -> tuple[str, dict[str, Any]]:
    """Name and published config of a shipped name (``qwen3-30b-a3b``), a ``config.json``, a directory, or ``demo``.

    Raises:
      ConfigError: there is no such thing, or it is not a JSON object.
    """
    path = resolve_model(wanted)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        known = {file.stem: file for file in sorted(shipped("models").glob("*.json"), key=lambda file: file.stem)}
        if wanted.lower() not in known:
            raise ConfigError(
                f"model {wanted!r}: neither a config.json nor a model directory nor one of {', '.join(known)}"
            )
        file = known[wanted.lower()]
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: not readable as JSON ({error})") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: a JSON object is needed, got {type(config).__name__}")
    if wanted == DEMO:
        return DEMO, config
    return path.resolve().name if path.is_dir() else file.stem, config
